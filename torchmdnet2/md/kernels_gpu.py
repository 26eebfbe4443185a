"""Time steps in one Triton kernel: what integrators.py does between two evaluations of the forces.

Every program keeps its own count of the steps and its own part of the heat, so that nothing is passed between
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
from ..engine.graph import CudaGraph, ReplayDiffers
from ..units import AMU_A2_FS2
from .engine import Engine
from .integrators import Langevin, State, VelocityVerlet

__all__ = ["BLOCK", "GraphEngine", "advance_kernel", "close_kernel", "normal3"]


BLOCK = 64


@triton.jit
def normal3(seed, atom, step):
    """Three standard normal numbers (float64) per atom; as noise.normal."""
    zero = atom * 0
    low = (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (step >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, atom, zero + low, zero + high, zero)
    unit: tl.constexpr = 2.0**-32
    turn: tl.constexpr = 6.283185307179586 * 2.0**-32
    first = tl.sqrt(tl.log((a.to(tl.float64) + 1.0) * unit) * -2.0)
    second = tl.sqrt(tl.log((c.to(tl.float64) + 1.0) * unit) * -2.0)
    angle, other = b.to(tl.float64) * turn, d.to(tl.float64) * turn
    return first * tl.cos(angle), first * tl.sin(angle), second * tl.cos(other)


@triton.jit(do_not_specialize=["num_atoms"])
def advance_kernel(
    pos, vel, forces, half_kick, masses, kick, constants, seeds, heat, counter, pending, num_atoms,
    LANGEVIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, p): close the step before, if it is not closed, and open the next one.

    Args:
        pos [N, 3], vel [N, 3], forces [N, 3]: float64.
        half_kick, masses, kick: [N] float64.
        constants: [3] float64: timestep, part of the velocity that friction leaves, eV in half an amu (Å/fs)².
        seeds: [B] int64.
        heat [B, P] float64, counter [B, P] int64, pending [B, P] int32: heat put in, steps opened, whether the last
            one is not closed.
        num_atoms: n.
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
    du, dv, dw = h * tl.load(forces + at, ok), h * tl.load(forces + at + 1, ok), h * tl.load(forces + at + 2, ok)
    u, v, w = tl.where(closing, u + du, u), tl.where(closing, v + dv, v), tl.where(closing, w + dw, w)
    u, v, w = u + du, v + dv, w + dw
    if LANGEVIN:
        half = timestep * 0.5
        x, y, z = x + half * u, y + half * v, z + half * w
        mass = tl.load(masses + atom, ok, other=0.0)
        before = mass * (u * u + v * v + w * w)
        keep, width = tl.load(constants + 1), tl.load(kick + atom, ok, other=0.0)
        step = tl.load(counter + slot)
        r, s, t = normal3(tl.load(seeds + b), own, step)
        u, v, w = keep * u + width * r, keep * v + width * s, keep * w + width * t
        after = mass * (u * u + v * v + w * w)
        change = tl.sum(tl.where(ok, after - before, 0.0), 0)
        tl.store(heat + slot, tl.load(heat + slot) + change * tl.load(constants + 2))
        x, y, z = x + half * u, y + half * v, z + half * w
    else:
        step = tl.load(counter + slot)
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
def close_kernel(vel, forces, half_kick, pending, num_atoms, BLOCK: tl.constexpr):
    """Program (b, p): close the step before, if it is not closed; arguments as above."""
    b, p = tl.program_id(0), tl.program_id(1)
    slot = b * tl.num_programs(1) + p
    own = p * BLOCK + tl.arange(0, BLOCK)
    ok = own < num_atoms
    atom = b.to(tl.int64) * num_atoms + own
    h = tl.load(half_kick + atom, ok, other=0.0)
    closing = tl.load(pending + slot) != 0
    for k in tl.static_range(3):
        v = tl.load(vel + atom * 3 + k, ok)
        tl.store(vel + atom * 3 + k, tl.where(closing, v + h * tl.load(forces + atom * 3 + k, ok), v), ok)
    tl.store(pending + slot, 0)


# --- Dynamics that stay on the device: several steps in one CUDA graph, results copied to the host while the next ---
# run

_CHUNK = 20  # steps in one graph
_CHUNK_UP_TO = 4096  # atoms; above, the pause between two graphs is nothing beside a step


class GraphEngine(Engine):
    """Integrator and potential in CUDA graphs. Under Triton's interpreter (tests): the same launches on the CPU.

    Args:
        step: on the device, without waits.
        dynamics: as for Engine.
        interval: steps between the moments when the host looks.
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
        self._grid = (atoms.replicas, self.parts)

        def new(dtype: torch.dtype) -> Tensor:
            return torch.zeros(self._grid, dtype=dtype, device=pos.device)

        self._vel, self._heat = torch.zeros_like(pos), new(torch.float64)
        self._counter, self._pending = new(torch.int64), new(torch.int32)
        self._half_kick, self._masses = dynamics.half_kick.flatten(), atoms.masses.flatten()
        self._kick, keep, self._seeds = self._masses, 1.0, self._counter
        if isinstance(dynamics, Langevin):
            self._kick, keep, self._seeds = dynamics.kick.flatten(), dynamics.keep, dynamics.seeds
        constants = [dynamics.timestep, keep, 0.5 * AMU_A2_FS2]
        self._constants = torch.tensor(constants, dtype=torch.float64, device=pos.device)
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
        """The state where it lives."""
        step = self.step
        return State(step.pos, self._vel, step.forces, step.energy, self._heat, self._steps)

    def _slot(self) -> _Slot:
        """Room for a copy on the host."""
        state = self._state()
        for name, value in state.tensors().items():
            setattr(state, name, torch.zeros_like(value, device="cpu", pin_memory=self._cuda))
        return _Slot(state, torch.cuda.Event() if self._cuda else None)

    def load(self, state: State) -> None:
        self._state().copy_(state)
        self._counter.fill_(state.step)
        self._pending.zero_()
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
        close_kernel[self._grid](
            self._vel, self.step.forces, self._half_kick, self._pending, self.dynamics.atoms.num_atoms, BLOCK=BLOCK,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def collect(self) -> State:
        slot = self._under_way.pop(0)
        while slot.done is not None and not slot.done.query():
            time.sleep(5e-5)  # unlike waiting for the event, this can be interrupted
        return slot.state

    def drop(self) -> None:
        while self._under_way:
            self.collect()

    def check(self) -> bool:
        good = self.step.check()
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
        dynamics = self.dynamics
        for _ in range(size):
            advance_kernel[self._grid](
                self.step.pos, self._vel, self.step.forces, self._half_kick, self._masses, self._kick, self._constants,
                self._seeds, self._heat, self._counter, self._pending, dynamics.atoms.num_atoms,
                LANGEVIN=isinstance(dynamics, Langevin), BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
            self.step.replay()

    def _capture(self, size: int) -> None:
        """Capture `size` steps; what a replay gives is compared with what the launches give."""
        tensors = [*self._state().tensors().values(), self._counter, self._pending]
        try:
            graph = CudaGraph.record(lambda: self._launch(size), self._device, tensors, changes_inputs=True)
        except ReplayDiffers as error:
            raise ReplayDiffers(f"{error}, in dynamics: please report this") from None
        self._graphs[size] = graph
        self.captures += 1


class _Slot(NamedTuple):
    state: State
    done: torch.cuda.Event | None
