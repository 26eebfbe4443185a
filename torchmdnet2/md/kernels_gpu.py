"""Time steps in one Triton kernel: what integrators.py does between two evaluations of the forces.

Every program counts the steps and keeps a partial sum of the heat, so that nothing is passed between
programs, no atomics are needed and a captured graph needs no arguments from the host. Programs are one warp: it has
read the count before it writes the next.

Shapes: N atoms in B replicas of n atoms each; P parts of a replica, of BLOCK atoms.
"""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..engine.bound import BoundStep
from ..engine.graph import CudaGraph, ReplayDiffers, same_bytes
from ..units import AMU_A2_FS2
from .integrators import Barostat, Engine, Langevin, MultipleTimeSteps, State, VelocityVerlet
from .springs import SpringStep

__all__ = ["BLOCK", "GraphEngine", "advance_kernel", "close_kernel", "launch_springs", "normal3"]


BLOCK = 64


@triton.jit
def normal3(seed, atom, step, STREAM: tl.constexpr = 0):
    """Three standard normal numbers (float64) per atom; as integrators.normal."""
    zero = atom * 0
    low = (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (step >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, atom, zero + low, zero + high, zero + STREAM)
    unit: tl.constexpr = 2.0**-32
    turn: tl.constexpr = 6.283185307179586 * 2.0**-32
    first = tl.sqrt(tl.log((a.to(tl.float64) + 1.0) * unit) * -2.0)
    second = tl.sqrt(tl.log((c.to(tl.float64) + 1.0) * unit) * -2.0)
    angle, other = b.to(tl.float64) * turn, d.to(tl.float64) * turn
    return first * tl.cos(angle), first * tl.sin(angle), second * tl.cos(other)


@triton.jit
def product(a, b):
    """Product of two matrices in blocks [4, 4]."""
    return tl.sum(a[:, :, None] * b[None, :, :], 1)


@triton.jit
def volume_of(cell):
    """Å³."""
    ax, ay, az = tl.load(cell), tl.load(cell + 1), tl.load(cell + 2)
    bx, by, bz = tl.load(cell + 3), tl.load(cell + 4), tl.load(cell + 5)
    cx, cy, cz = tl.load(cell + 6), tl.load(cell + 7), tl.load(cell + 8)
    return tl.abs(ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx))


@triton.jit
def strain_kernel(
    cell, stress, strain, scale, directions, constants, seeds, counter, heat, parts,
    OPEN: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Program b: count the second half of the work of the previous strain, and with OPEN strain the cell again; as
    integrators.Barostat.

    Args:
        cell [B, 3, 3] Å, stress [B, 3, 3] eV/Å³: float64; the cell is overwritten.
        strain, scale: [B, 3, 3] float64, the strain whose work is not counted, and its exponential: overwritten.
        directions: [COUNT, 3, 3] float64.
        constants: [4] float64: N kT, pressure, rate and kT, as Barostat has them.
        seeds: [B] int64.
        counter [B, P] int64, heat [B, P] float64: steps opened; heat put in, whose first part takes the work.
        parts: P.
    """
    b = tl.program_id(0)
    i, j = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    ok, at = (i < 3) & (j < 3), i * 3 + j
    one = tl.where(ok & (i == j), 1.0, 0.0).to(tl.float64)
    sigma = tl.load(stress + b * 9 + at, ok, other=0.0)
    before = tl.load(strain + b * 9 + at, ok, other=0.0)
    volume = volume_of(cell + b * 9)
    after = before * 0.0
    if OPEN:
        kinetic, pressure = tl.load(constants), tl.load(constants + 1)
        rate, thermal = tl.load(constants + 2), tl.load(constants + 3)
        isotropic = kinetic / volume - pressure
        width = tl.sqrt(2.0 * thermal * rate / volume)
        lane = tl.arange(0, 2)
        r, s, t = normal3(tl.load(seeds + b), lane, tl.load(counter + b * parts), STREAM=1)
        for k in tl.static_range(COUNT):
            own = tl.load(directions + k * 9 + at, ok, other=0.0)
            drive = tl.sum(tl.sum((isotropic * one - sigma) * own, 1), 0)
            if k % 3 == 0:
                noise = r
            elif k % 3 == 1:
                noise = s
            else:
                noise = t
            after += (rate * drive + width * tl.sum(tl.where(lane == k // 3, noise, 0.0), 0)) * own
        held = tl.load(cell + b * 9 + at, ok, other=0.0)
        total = one + after / 6.0
        for k in tl.static_range(5):
            total = one + product(after, total) / (5.0 - k)
        tl.store(scale + b * 9 + at, total, ok)
        tl.store(cell + b * 9 + at, product(held, total), ok)
    # one after the other, so that the sum does not depend on where blocks of steps end
    held_work = tl.load(heat + b * parts) + 0.5 * volume * tl.sum(tl.sum(sigma * before, 1), 0)
    tl.store(heat + b * parts, held_work + 0.5 * volume * tl.sum(tl.sum(sigma * after, 1), 0))
    tl.store(strain + b * 9 + at, after, ok)


@triton.jit
def force_on(forces, fast, at, ok, SLOW: tl.constexpr):
    """A component of the forces, without those of the inner potential (SLOW)."""
    force = tl.load(forces + at, ok, other=0.0)
    if SLOW:
        force -= tl.load(fast + at, ok, other=0.0)
    return force


@triton.jit(do_not_specialize=["num_atoms"])
def advance_kernel(
    pos, vel, forces, fast, half_kick, masses, kick, constants, seeds, heat, counter, pending, scale, num_atoms,
    LANGEVIN: tl.constexpr, SLOW: tl.constexpr, SCALE: tl.constexpr, DRIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, p): close the previous step, if it is not closed, and open the next one.

    Args:
        pos [N, 3], vel [N, 3], forces [N, 3]: float64.
        fast: [N, 3] float64, forces that inner steps apply (SLOW; else not read).
        half_kick, masses, kick: [N] float64.
        constants: [3] float64: timestep, part of the velocity that friction leaves, eV in half an amu (Å/fs)².
        seeds: [B] int64.
        heat [B, P] float64, counter [B, P] int64, pending [B, P] int32: heat put in, steps opened, whether the last
            one is not closed.
        scale: [B, 3, 3] float64, by which positions are multiplied after the kick (SCALE; else not read).
        num_atoms: n.
        DRIFT: move the atoms; else inner steps do.
    """
    b, p = tl.program_id(0), tl.program_id(1)
    slot = b * tl.num_programs(1) + p
    own = p * BLOCK + tl.arange(0, BLOCK)
    ok = own < num_atoms
    atom = b.to(tl.int64) * num_atoms + own
    at = atom * 3
    timestep = tl.load(constants)
    h = tl.load(half_kick + atom, ok, other=0.0)
    closing = tl.load(pending + slot) != 0
    x, y, z = tl.load(pos + at, ok), tl.load(pos + at + 1, ok), tl.load(pos + at + 2, ok)
    u, v, w = (
        tl.load(vel + at, ok, other=0.0),
        tl.load(vel + at + 1, ok, other=0.0),
        tl.load(vel + at + 2, ok, other=0.0),
    )
    du, dv, dw = (
        h * force_on(forces, fast, at, ok, SLOW),
        h * force_on(forces, fast, at + 1, ok, SLOW),
        h * force_on(forces, fast, at + 2, ok, SLOW),
    )
    u, v, w = tl.where(closing, u + du, u), tl.where(closing, v + dv, v), tl.where(closing, w + dw, w)
    u, v, w = u + du, v + dv, w + dw
    if SCALE:
        m = scale + b * 9
        x, y, z = (
            x * tl.load(m) + y * tl.load(m + 3) + z * tl.load(m + 6),
            x * tl.load(m + 1) + y * tl.load(m + 4) + z * tl.load(m + 7),
            x * tl.load(m + 2) + y * tl.load(m + 5) + z * tl.load(m + 8),
        )
    step = tl.load(counter + slot)
    if LANGEVIN:
        half = timestep * 0.5
        x, y, z = x + half * u, y + half * v, z + half * w
        mass = tl.load(masses + atom, ok, other=0.0)
        before = mass * (u * u + v * v + w * w)
        keep, width = tl.load(constants + 1), tl.load(kick + atom, ok, other=0.0)
        r, s, t = normal3(tl.load(seeds + b), own, step)
        u, v, w = keep * u + width * r, keep * v + width * s, keep * w + width * t
        after = mass * (u * u + v * v + w * w)
        change = tl.sum(tl.where(ok, after - before, 0.0), 0)
        tl.store(heat + slot, tl.load(heat + slot) + change * tl.load(constants + 2))
        x, y, z = x + half * u, y + half * v, z + half * w
    elif DRIFT:
        x, y, z = x + timestep * u, y + timestep * v, z + timestep * w
    tl.store(pos + at, x, ok)
    tl.store(pos + at + 1, y, ok)
    tl.store(pos + at + 2, z, ok)
    tl.store(vel + at, u, ok)
    tl.store(vel + at + 1, v, ok)
    tl.store(vel + at + 2, w, ok)
    tl.store(counter + slot, step + 1)
    tl.store(pending + slot, 1)


@triton.jit(do_not_specialize=["num_atoms"])
def close_kernel(vel, forces, fast, half_kick, pending, num_atoms, SLOW: tl.constexpr, BLOCK: tl.constexpr):
    """Program (b, p): close the previous step, if it is not closed; arguments as above."""
    b, p = tl.program_id(0), tl.program_id(1)
    slot = b * tl.num_programs(1) + p
    own = p * BLOCK + tl.arange(0, BLOCK)
    ok = own < num_atoms
    atom = b.to(tl.int64) * num_atoms + own
    h = tl.load(half_kick + atom, ok, other=0.0)
    closing = tl.load(pending + slot) != 0
    for k in tl.static_range(3):
        at = atom * 3 + k
        v = tl.load(vel + at, ok)
        tl.store(vel + at, tl.where(closing, v + h * force_on(forces, fast, at, ok, SLOW), v), ok)
    tl.store(pending + slot, 0)


@triton.jit
def vector_to(pos, other, there, x, y, z, shift, cell):
    """Return the vector from (x, y, z) to the image of an atom in the cell `shift`; without meaning if not `there`."""
    r, s, t = (
        tl.load(shift, there, other=0.0),
        tl.load(shift + 1, there, other=0.0),
        tl.load(shift + 2, there, other=0.0),
    )
    at = pos + other * 3
    return (
        tl.load(at, there, other=0.0) - x + r * tl.load(cell) + s * tl.load(cell + 3) + t * tl.load(cell + 6),
        tl.load(at + 1, there, other=0.0) - y + r * tl.load(cell + 1) + s * tl.load(cell + 4) + t * tl.load(cell + 7),
        tl.load(at + 2, there, other=0.0) - z + r * tl.load(cell + 2) + s * tl.load(cell + 5) + t * tl.load(cell + 8),
    )


@triton.jit(do_not_specialize=["num_atoms"])
def springs_kernel(
    pos, cell, partner, shift, kind, middle, first, second, shifts, bend, usual, coefficients, forces, num_atoms, bonds,
    angles, reach, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, p): forces of springs on the atoms of a part; as springs.SpringStep.

    Args:
        pos [N, 3] Å, cell [B, 3, 3] Å, forces [N, 3] eV/Å: float64; forces are overwritten.
        partner [N, bonds] int32, shift [N, bonds, 3] float64, kind [N, bonds] int32: −1 is no partner.
        middle, first, second [N, angles] int32, shifts [N, angles, 2, 3] float64, bend [N, angles] int32: −1 is none.
        usual [T], coefficients [T, 4]: float64.
        num_atoms: n.
        reach: Å, float64 in a tensor of one.
    """
    b, p = tl.program_id(0), tl.program_id(1)
    own = p * BLOCK + tl.arange(0, BLOCK)
    ok = own < num_atoms
    atom = b.to(tl.int64) * num_atoms + own
    x, y, z = (
        tl.load(pos + atom * 3, ok, other=0.0),
        tl.load(pos + atom * 3 + 1, ok, other=0.0),
        tl.load(pos + atom * 3 + 2, ok, other=0.0),
    )
    m = cell + b * 9
    limit = tl.load(reach)
    fx, fy, fz = x * 0.0, x * 0.0, x * 0.0
    for k in range(bonds):
        at = atom * bonds + k
        other = tl.load(partner + at, ok, other=-1).to(tl.int64)
        there = other >= 0
        dx, dy, dz = vector_to(pos, other, there, x, y, z, shift + at * 3, m)
        d = tl.sqrt(tl.where(there, dx * dx + dy * dy + dz * dz, 1.0))
        which = tl.load(kind + at, there, other=0).to(tl.int64)
        u = tl.minimum(tl.maximum(d - tl.load(usual + which), -limit), limit)
        c = coefficients + which * 4
        slope = tl.load(c) + u * (tl.load(c + 1) + u * (tl.load(c + 2) + u * tl.load(c + 3)))
        slope = tl.where(there, slope / d, 0.0)
        fx, fy, fz = fx + slope * dx, fy + slope * dy, fz + slope * dz
    for k in range(angles):
        at = atom * angles + k
        vertex = tl.load(middle + at, ok, other=-1).to(tl.int64)
        there = vertex >= 0
        i, j = tl.load(first + at, there, other=0).to(tl.int64), tl.load(second + at, there, other=0).to(tl.int64)
        vx, vy, vz = (
            tl.load(pos + vertex * 3, there, other=0.0),
            tl.load(pos + vertex * 3 + 1, there, other=0.0),
            tl.load(pos + vertex * 3 + 2, there, other=0.0),
        )
        dx, dy, dz = vector_to(pos, i, there, vx, vy, vz, shifts + at * 6, m)
        ex, ey, ez = vector_to(pos, j, there, vx, vy, vz, shifts + at * 6 + 3, m)
        which = tl.load(bend + at, there, other=0).to(tl.int64)
        c = coefficients + which * 4
        slope = tl.load(c) + tl.load(c + 1) * (dx * ex + dy * ey + dz * ez - tl.load(usual + which))
        slope = tl.where(there, slope, 0.0)
        is_vertex = vertex == atom
        fx += slope * tl.where(is_vertex, dx + ex, -ex)
        fy += slope * tl.where(is_vertex, dy + ey, -ey)
        fz += slope * tl.where(is_vertex, dz + ez, -ez)
    tl.store(forces + atom * 3, fx, ok)
    tl.store(forces + atom * 3 + 1, fy, ok)
    tl.store(forces + atom * 3 + 2, fz, ok)


def launch_springs(step: SpringStep) -> None:
    """Overwrite the forces of springs."""
    replicas = len(step.energy)
    atoms = len(step.pos) // replicas
    springs_kernel[(replicas, -(-atoms // BLOCK))](
        step.pos, step.cell, step.partner, step.shift, step.kind, step.middle, step.first, step.second, step.shifts,
        step.bend, step.usual, step.coefficients, step.forces, atoms, step.partner.shape[1], step.middle.shape[1],
        step.reach, BLOCK=BLOCK, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


# --- Dynamics on the device: several steps in one CUDA graph; results are copied to the host during the next ones ---

_CHUNK = 20  # steps in one graph
_CHUNK_UP_TO = 4096  # atoms; above, the pause between two graphs is nothing beside a step


class _Level:
    """Launches kicks by the forces of a step; there are two levels with an inner potential.

    Args:
        step: whose forces they are.
        dynamics: their integrator.
        vel, heat: [N, 3], [B, P], shared by all levels.
        scale: [B, 3, 3], of a cell that changes; None where it stays.
    """

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet, vel: Tensor, heat: Tensor, scale: Tensor | None):
        self.step, self.dynamics, self._vel, self._heat = step, dynamics, vel, heat
        self.counter = torch.zeros_like(heat, dtype=torch.int64)
        self.pending = torch.zeros_like(heat, dtype=torch.int32)
        self._half_kick, self._masses = dynamics.half_kick.flatten(), dynamics.atoms.masses.flatten()
        self._kick, keep, self._seeds = self._masses, 1.0, self.counter
        if isinstance(dynamics, Langevin):
            self._kick, keep, self._seeds = dynamics.kick_width.flatten(), dynamics.keep, dynamics.seeds
        constants = [dynamics.timestep, keep, 0.5 * AMU_A2_FS2]
        self._constants = torch.tensor(constants, dtype=torch.float64, device=vel.device)
        self._scales, self._scale = scale is not None, vel if scale is None else scale
        self._slow, self._fast = dynamics.fast is not None, (dynamics.fast or step).forces

    def load(self, steps: int) -> None:
        self.counter.fill_(steps)
        self.pending.zero_()

    def advance(self) -> None:
        """Close the previous step, if it is not closed, and open the next one."""
        dynamics, step = self.dynamics, self.step
        advance_kernel[tuple(self._heat.shape)](
            step.pos, self._vel, step.forces, self._fast, self._half_kick, self._masses, self._kick, self._constants,
            self._seeds, self._heat, self.counter, self.pending, self._scale, dynamics.atoms.num_atoms,
            LANGEVIN=isinstance(dynamics, Langevin), SLOW=self._slow, SCALE=self._scales, DRIFT=not self._slow,
            BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def close(self) -> None:
        """Close the previous step, if it is not closed."""
        close_kernel[tuple(self._heat.shape)](
            self._vel, self.step.forces, self._fast, self._half_kick, self.pending, self.dynamics.atoms.num_atoms,
            SLOW=self._slow, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


class _Cell:
    """Launches the barostat's part of each step.

    Args:
        step: with cell and stress.
        barostat: as the integrator has it.
        counter, heat: [B, P], of the outer level.
    """

    def __init__(self, step: BoundStep, barostat: Barostat, heat: Tensor):
        self._step, self._barostat, self._heat = step, barostat, heat
        self.strain, self.scale = torch.zeros_like(step.cell), torch.zeros_like(step.cell)
        constants = [barostat.kinetic, barostat.pressure, barostat.rate, barostat.thermal]
        self._constants = torch.tensor(constants, dtype=torch.float64, device=heat.device)

    def launch(self, counter: Tensor, opening: bool) -> None:
        """Count the work of the previous strain; with `opening`, strain the cell, and not yet the positions."""
        replicas, parts = self._heat.shape
        directions = self._barostat.directions
        strain_kernel[(replicas,)](
            self._step.cell, self._step.stress, self.strain, self.scale, directions, self._constants,
            self._barostat.seeds, counter, self._heat, parts, OPEN=opening, COUNT=len(directions), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


class GraphEngine(Engine):
    """Integrator and potential in CUDA graphs. Under Triton's interpreter (tests): the same launches on the CPU.

    Args:
        step: on the device, without waits.
        dynamics: as for Engine.
        interval: steps between checks by the host.
        capture: False for a step that replays its graph, which cannot be captured in another.

    Attributes:
        captures: how often a graph was captured.
    """

    ahead = 1

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet, interval: int = _CHUNK, capture: bool = True):
        super().__init__(step, dynamics)
        pos, atoms = step.pos, dynamics.atoms
        self.captures = 0
        self._device = pos.device
        self._cuda = pos.device.type == "cuda"
        self._capturing = capture and self._cuda
        self._vel = torch.zeros_like(pos)
        self._heat = torch.zeros(atoms.replicas, self.parts, dtype=torch.float64, device=pos.device)
        self._cell = None if dynamics.barostat is None else _Cell(step, dynamics.barostat, self._heat)
        scale = None if self._cell is None else self._cell.scale
        self._outer, self._inner, self._count = _Level(step, dynamics, self._vel, self._heat, scale), None, 0
        if isinstance(dynamics, MultipleTimeSteps):
            assert dynamics.fast is not None
            self._inner = _Level(dynamics.fast, dynamics.inner, self._vel, self._heat, None)
            self._count = dynamics.count
        self._chunk = min(_CHUNK, interval) if pos.shape[0] <= _CHUNK_UP_TO else 1
        self._graphs: dict[int, CudaGraph] = {}
        self._steps = 0
        self._slots = [self._slot() for _ in range(self.ahead + 2)]
        self._under_way: list[_Slot] = []
        self._next = 0

    @property
    def parts(self) -> int:
        return -(-self.dynamics.atoms.num_atoms // BLOCK)

    # --- states --------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        """Return the state on its device."""
        return self._state_of(self._vel, self._heat, self._steps)

    def _slot(self) -> _Slot:
        """Return buffers for a copy on the host."""
        state = self._state()
        for name, value in state.tensors().items():
            setattr(state, name, torch.zeros_like(value, device="cpu", pin_memory=self._cuda))
        return _Slot(state, torch.cuda.Event() if self._cuda else None)

    def load(self, state: State) -> None:
        self._state().copy_(state)
        for k, slot in enumerate(self._slots):
            if slot.state is state:  # the caller may return to it again: the next copies go to the other slots
                self._next = (k + 1) % len(self._slots)
        self._outer.load(state.step)
        if self._inner is not None:
            self._inner.load(state.step * self._count)
        if self._cell is not None:
            self._cell.strain.zero_()
        self._steps = state.step

    def prepare(self) -> None:
        if self._capturing:
            with torch.cuda.device(self._device):
                self._capture(self._chunk)
                self._close()  # nothing is open: this compiles the kernel

    # --- steps ---------------------------------------------------------------------------------------------------

    def launch(self, steps: int) -> None:
        with torch.cuda.device(self._device) if self._cuda else contextlib.nullcontext():
            self._launch_block(steps)

    def _launch_block(self, steps: int) -> None:
        self.dynamics.begin_block(self._state())
        left = steps
        for size in (self._chunk, 1):
            while left >= size:
                self._run(size)
                left -= size
        self._close()
        self._steps += steps
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        for name, value in self._state().tensors().items():
            getattr(slot.state, name).copy_(value, non_blocking=True)
        slot.state.step = self._steps
        if slot.done is not None:
            slot.done.record()
        self._under_way.append(slot)

    def _close(self) -> None:
        self._outer.close()
        if self._cell is not None:
            self._cell.launch(self._outer.counter, opening=False)

    def collect(self) -> State:
        slot = self._under_way.pop(0)
        while slot.done is not None and not slot.done.query():
            time.sleep(5e-5)  # unlike waiting for the event, this can be interrupted
        return slot.state

    def drop(self) -> None:
        while self._under_way:
            self.collect()

    def check(self) -> bool:
        good = super().check()
        if not good:  # other buffers: what was captured is void
            self._graphs.clear()
        return good

    def _run(self, size: int) -> None:
        if not self._capturing:
            self._launch(size)
            return
        if size not in self._graphs:
            self._capture(size)
        self._graphs[size].replay()

    def _launch(self, size: int) -> None:
        for _ in range(size):
            if self._cell is not None:
                self._cell.launch(self._outer.counter, opening=True)
            self._outer.advance()
            if self._inner is not None:
                self._launch_inner(self._inner)
            self.step.replay()

    def _launch_inner(self, inner: _Level) -> None:
        """Launch the inner steps of one step."""
        fast = inner.step
        fast.pos.copy_(self.step.pos)
        if self._cell is not None:
            fast.cell.copy_(self.step.cell)
        for _ in range(self._count):
            inner.advance()
            fast.replay()
        inner.close()
        self.step.pos.copy_(fast.pos)

    def _changed(self) -> list[Tensor]:
        """Return all that a launch both reads and writes."""
        levels = [level for level in (self._outer, self._inner) if level is not None]
        held = [tensor for level in levels for tensor in (level.counter, level.pending)]
        return [*self._state().tensors().values(), *held, *([] if self._cell is None else [self._cell.strain])]

    def _capture(self, size: int) -> None:
        """Capture `size` steps, and compare the results of a replay with those of the launches."""
        tensors = self._changed()

        def agree(launched: list[Tensor]) -> bool:
            # what overflowed on the way is NaN from then on, in a replay from its first step on; `check` repeats both
            void = any(bool(t.isnan().any()) for t in launched)
            return void or all(map(same_bytes, tensors, launched))

        try:
            graph = CudaGraph.record(
                lambda: self._launch(size), self._device, tensors, agree=agree, changes_inputs=True
            )  # fmt: skip
        except ReplayDiffers as error:
            raise ReplayDiffers(f"{error}, in dynamics: please report this") from None
        self._graphs[size] = graph
        self.captures += 1


class _Slot(NamedTuple):
    state: State
    done: torch.cuda.Event | None
