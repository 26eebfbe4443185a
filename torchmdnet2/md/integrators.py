"""State and integrators of a simulation, as float64 tensors on one device: B replicas of n atoms each, N = B·n.

Engines advance a state by many steps: one by one from the host, or in blocks on the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.bound import BoundStep
from ..errors import BadConfig
from ..units import AMU_A2_FS2, KB, factor

__all__ = [
    "BAR",
    "DIRECTIONS",
    "AtomConstants",
    "Barostat",
    "Engine",
    "HostEngine",
    "Langevin",
    "MultipleTimeSteps",
    "State",
    "VelocityVerlet",
    "maxwell_boltzmann",
    "normal",
    "philox",
    "remove_momentum",
    "volume_of",
]


@dataclass(eq=False)
class State:
    """The state of a simulation: all that changes from step to step, as a restart needs it.

    Attributes:
        pos: [N, 3] Å, not wrapped into the cell.
        vel: [N, 3] Å/fs.
        forces: [N, 3] eV/Å at `pos`.
        energy: [B] eV at `pos`.
        heat: [B, P] eV that thermostat and barostat have added since the start, as P partial sums over atoms.
        step: steps done.
        cell [B, 3, 3] Å, stress [B, 3, 3] eV/Å³ at `pos`: of a cell that changes; else None.
        fast: [N, 3] eV/Å, forces of the inner potential of multiple time steps at `pos`; else None.
    """

    pos: Tensor
    vel: Tensor
    forces: Tensor
    energy: Tensor
    heat: Tensor
    step: int = 0
    cell: Tensor | None = None
    stress: Tensor | None = None
    fast: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def clone(self) -> State:
        return State(**{name: value.clone() for name, value in self.tensors().items()}, step=self.step)

    def to(self, device: torch.device | str) -> State:
        """Return the state on another device; tensors that are there already are shared."""
        return State(**{name: value.to(device) for name, value in self.tensors().items()}, step=self.step)

    def copy_(self, other: State) -> None:
        """Take over another state of the same shapes, on any device."""
        for name, value in self.tensors().items():
            value.copy_(getattr(other, name))
        self.step = other.step


@dataclass(eq=False)
class AtomConstants:
    """Masses and constraints, which do not change during a simulation.

    Attributes:
        masses: [N, 1] amu.
        mobile: [N, 1] 1 for atoms that move, 0 for fixed ones.
        dof: degrees of freedom of a replica.
        replicas: B.
    """

    masses: Tensor
    mobile: Tensor
    dof: int
    replicas: int = 1

    @property
    def num_atoms(self) -> int:
        """n, atoms of one replica."""
        return self.masses.shape[0] // self.replicas

    def to(self, device: torch.device | str) -> AtomConstants:
        return AtomConstants(self.masses.to(device), self.mobile.to(device), self.dof, self.replicas)

    def kinetic_energy(self, vel: Tensor) -> Tensor:
        """Return the kinetic energies, [B] eV."""
        return 0.5 * AMU_A2_FS2 * (self.masses * vel.square()).view(self.replicas, -1).sum(1)

    def temperature(self, kinetic: float) -> float:
        """Return the temperature in K, from the kinetic energy of a replica in eV."""
        return 2 * kinetic / (self.dof * KB)


def maxwell_boltzmann(atoms: AtomConstants, temperature: float, seeds: Sequence[int]) -> Tensor:
    """Return velocities [N, 3] in Å/fs at a temperature in K, without total momentum unless atoms are fixed or alone.

    Drawn on the CPU, so that a seed gives the same on every device. Replica b depends on its seed only.
    """
    noise = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        noise.append(torch.randn(atoms.num_atoms, 3, generator=generator, dtype=torch.float64))
    thermal = (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt() * atoms.mobile
    return remove_momentum(atoms, torch.cat(noise).to(atoms.masses.device) * thermal)


def remove_momentum(atoms: AtomConstants, vel: Tensor) -> Tensor:
    """Return the velocities relative to each centre of mass; unchanged where an atom is fixed or there is only one."""
    if atoms.num_atoms < 2 or bool((atoms.mobile == 0).any()):
        return vel
    return _without_momentum(atoms, vel)


def _without_momentum(atoms: AtomConstants, vel: Tensor) -> Tensor:
    masses, vel = atoms.masses.view(atoms.replicas, -1, 1), vel.view(atoms.replicas, -1, 3)
    return (vel - (masses * vel).sum(1, keepdim=True) / masses.sum(1, keepdim=True)).view(-1, 3)


# --- Random numbers that are a function of seed, step and atom: nothing to store, the same on every device ---
#
# Philox 4x32-10: J. K. Salmon et al., SC '11 (2011), doi:10.1145/2063384.2063405; normal numbers by Box and Muller,
# Ann. Math. Stat. 29, 610 (1958). Shapes: B replicas of n atoms, S steps.

_MASK = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)


def normal(seeds: Tensor, steps: Tensor, num_atoms: int, stream: int = 0) -> Tensor:
    """Return independent standard normal numbers, [S, B, n, 3] float64.

    The counter of an atom's numbers is (atom within its replica, low and high half of the step, stream), their key is
    the replica's seed.

    Args:
        seeds: [B] int64.
        steps: [S] int64.
        num_atoms: n.
        stream: 0 for the atoms, 1 for the cell.
    """
    atom = torch.arange(num_atoms, device=seeds.device)
    counter = [atom, (steps & _MASK)[:, None, None], (steps >> 32)[:, None, None], torch.full_like(atom, stream)]
    words = philox(counter, (seeds & _MASK)[None, :, None], ((seeds >> 32) & _MASK)[None, :, None])
    a, b, c, d = (w.double() for w in words)
    first, second = ((-2 * torch.log((u + 1) * 2.0**-32)).sqrt() for u in (a, c))
    angle, other = (u * (2 * math.pi * 2.0**-32) for u in (b, d))
    return torch.stack([first * torch.cos(angle), first * torch.sin(angle), second * torch.cos(other)], -1)


def philox(counter: list[Tensor], key_low: Tensor, key_high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words of 32 bits for each counter (four words) and key (two); all int64 that broadcast."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        k0, k1 = (key_low + i * _KEY[0]) & _MASK, (key_high + i * _KEY[1]) & _MASK
        low, high = c0 * _ROUND[0], c2 * _ROUND[1]  # modulo 2⁶⁴, as two's complement
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0, high & _MASK, ((low >> 32) & _MASK) ^ c3 ^ k1, low & _MASK
        )  # fmt: skip
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


# --- Time steps on tensors: velocity Verlet, Langevin dynamics by the BAOAB splitting, a cell that changes ---
#
# A step is `open`, an evaluation of the forces, `close`. This is the specification; kernels_gpu.py does the same in
# kernels. BAOAB: B. Leimkuhler and C. Matthews, Appl. Math. Res. Express 2013, 34 (2013).

_AHEAD = 4096  # for few atoms, random numbers of several steps are drawn at once, in the time of one step

BAR = factor("stress", "bar")
"""eV/Å³."""


def _symmetric(*places: tuple[int, int]) -> list[list[float]]:
    """Return a symmetric matrix of norm 1 with equal numbers at these places."""
    matrix = torch.zeros(3, 3, dtype=torch.float64)
    for i, j in places:
        matrix[i, j] = matrix[j, i] = 1.0
    return (matrix / matrix.norm()).tolist()


_X, _Y, _Z = (0, 0), (1, 1), (2, 2)
DIRECTIONS: dict[str, list[list[list[float]]]] = {
    "isotropic": [_symmetric(_X, _Y, _Z)],
    "semi-isotropic": [_symmetric(_X, _Y), _symmetric(_Z)],
    "anisotropic": [_symmetric(_X), _symmetric(_Y), _symmetric(_Z)],
    "flexible": [_symmetric(place) for place in (_X, _Y, _Z, (0, 1), (0, 2), (1, 2))],
}
"""Name of a barostat -> orthonormal strains, [3, 3] each, in which it changes the cell."""

_LARGEST_GROWTH = 100  # of a volume, at any step; the limits of guard.py are checked now and then


class Barostat:
    """Constant pressure by stochastic rescaling of the cell.

    M. Bernetti and G. Bussi, J. Chem. Phys. 153, 114107 (2020); V. Del Tatto, P. Raiteri, M. Bernetti and G. Bussi,
    Appl. Sci. 12, 1139 (2022). Cell and positions are multiplied by exp(η), velocities stay. The strain of a step,

        η = Σₖ Eₖ [ Eₖ : ((N kT/V − P) 1 − σ) β Δt/3τ + Rₖ √(2 kT β Δt/3τV) ]

    with the directions Eₖ, the stress σ and normal numbers Rₖ, samples volumes with Vᴺ exp(−(U + PV)/kT) (and shapes
    with the invariant measure) for any β and τ. The kinetic part of the pressure is its mean, N kT/V.

    Args:
        atoms: of which none is fixed.
        timestep: fs.
        temperature: K.
        pressure: bar.
        seeds: of the noise, one for each replica.
        kind: a name in DIRECTIONS.
        time: ps, τ, in which the volume relaxes where β is the material's.
        compressibility: 1/bar, β.

    Attributes:
        directions: [K, 3, 3].
        pressure: eV/Å³. kinetic: eV, N kT. rate: Å³/eV, β Δt/3τ. thermal: eV, kT.
        seeds: [B] int64.
    """

    def __init__(
        self, atoms: AtomConstants, timestep: float, temperature: float, pressure: float, seeds: Sequence[int],
        kind: str = "isotropic", time: float = 1.0, compressibility: float = 4.6e-5,
    ):  # fmt: skip
        device = atoms.masses.device
        self.directions = torch.tensor(DIRECTIONS[kind], dtype=torch.float64, device=device)
        self.pressure, self.thermal = pressure * BAR, KB * temperature
        self.kinetic = atoms.num_atoms * self.thermal
        self.rate = compressibility / BAR * timestep / (3 * time * 1e3)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self._strain = torch.zeros(atoms.replicas, 3, 3, dtype=torch.float64, device=device)
        self._first: Tensor | None = None  # volumes of the start, on a CPU

    def scale(self, state: State) -> None:
        """Strain the cell and its atoms in place; forces and stress must then be computed."""
        assert state.cell is not None and state.stress is not None
        volume = volume_of(state.cell)[:, None]
        if self._first is None and volume.device.type == "cpu":
            self._first = volume[:, 0].clone()
        noise = normal(self.seeds, torch.tensor([state.step], device=self.seeds.device), 2, stream=1).view(-1, 6)
        trace = self.directions.diagonal(dim1=1, dim2=2).sum(1)
        drive = (self.kinetic / volume - self.pressure) * trace
        drive = drive - torch.einsum("bij,kij->bk", state.stress.double(), self.directions)
        width = (2 * self.thermal * self.rate / volume).sqrt()
        along = self.rate * drive + width * noise[:, : len(self.directions)]
        self._strain = torch.einsum("bk,kij->bij", along, self.directions)
        self._count_work(state)
        scale = exponential(self._strain)
        state.cell.copy_(state.cell @ scale)
        state.pos.copy_((state.pos.view(len(scale), -1, 3) @ scale).view(-1, 3))

    def check(self, state: State) -> None:
        """Refuse a cell that explodes, before meshes and lists of its size are made, which may need terabytes.

        Raises:
            BadConfig: the volume is too large.
        """
        assert state.cell is not None and self._first is not None
        if bool((volume_of(state.cell) > _LARGEST_GROWTH * self._first).any()):
            raise BadConfig(
                f"the volume of the cell is more than {_LARGEST_GROWTH} times that of the start: the compressibility "
                "is too large, barostat_time too short, or the pressure of the start too far away; run at constant "
                "volume first"
            )

    def settle(self, state: State) -> None:
        """Count the second half of the work, with the new stress."""
        self._count_work(state)

    def _count_work(self, state: State) -> None:
        """Count half of the energy that the strain puts in: V σ:η, by the trapezoidal rule."""
        assert state.cell is not None and state.stress is not None
        half = 0.5 * volume_of(state.cell) * (state.stress.double() * self._strain).sum((1, 2))
        state.heat[:, 0].add_(half)


def volume_of(cell: Tensor) -> Tensor:
    """Return the volumes [B] in Å³ of cells [B, 3, 3], without waiting for a GPU."""
    a, b, c = cell.unbind(1)
    return (a * torch.linalg.cross(b, c)).sum(1).abs()


def exponential(matrix: Tensor) -> Tensor:
    """Return exponentials of small matrices [B, 3, 3]: seven terms of the series, exact to rounding up to norms of
    0.01."""
    one = torch.eye(3, dtype=matrix.dtype, device=matrix.device)
    total = one + matrix / 6
    for k in (5, 4, 3, 2, 1):
        total = one + matrix @ total / k
    return total


class VelocityVerlet:
    """Constant energy; symplectic, error of the energy O(timestep²).

    Args:
        atoms: masses and fixed atoms.
        timestep: fs.
        barostat: strains the cell in each step; None: the cell stays.
        remove_drift: steps between those before which the motion of each centre of mass is removed; None: never.

    Attributes:
        half_kick: [N, 1] change of the velocity in half a step per force, (Å/fs)/(eV/Å).
        fast: inner potential of multiple time steps, None where there is none.
    """

    fast: BoundStep | None = None

    def __init__(
        self, atoms: AtomConstants, timestep: float, barostat: Barostat | None = None, remove_drift: int | None = None
    ):
        self.atoms, self.timestep, self.barostat, self.remove_drift = atoms, timestep, barostat, remove_drift
        self.half_kick = 0.5 * timestep * atoms.mobile / (AMU_A2_FS2 * atoms.masses)

    def open(self, state: State) -> None:
        """Advance velocities by half a step and positions by one, in place; forces must then be computed."""
        self.kick(state)
        if self.barostat is not None:
            self.barostat.scale(state)
        self.drift(state)

    def close(self, state: State) -> None:
        """Advance velocities by the second half of the step, with the new forces."""
        self.kick(state)
        if self.barostat is not None:
            self.barostat.settle(state)
        state.step += 1

    def kick(self, state: State) -> None:
        """Advance velocities by half a step."""
        state.vel.add_(self.half_kick * state.forces)

    def drift(self, state: State) -> None:
        state.pos.add_(self.timestep * state.vel)

    def begin_block(self, state: State) -> None:
        """Call before some steps. Where the first is a multiple of `remove_drift`, it removes the motion of each centre
        of mass, whose energy counts as heat."""
        if self.remove_drift is None or state.step % self.remove_drift:
            return
        before = self.atoms.kinetic_energy(state.vel)
        state.vel.copy_(_without_momentum(self.atoms, state.vel))
        state.heat[:, 0].add_(self.atoms.kinetic_energy(state.vel) - before)


class Langevin(VelocityVerlet):
    """Constant temperature by friction and noise.

    Args:
        atoms, timestep: as above.
        temperature: K.
        friction: 1/ps.
        seeds: of the noise, one for each replica.
        barostat, remove_drift: as above.

    Attributes:
        keep: part of the velocity that is left after a step of friction.
        kick_width: [N, 1] width of the random change of the velocity, Å/fs.
        seeds: [B] int64.
    """

    def __init__(
        self, atoms: AtomConstants, timestep: float, temperature: float, friction: float, seeds: Sequence[int],
        barostat: Barostat | None = None, remove_drift: int | None = None,
    ):  # fmt: skip
        super().__init__(atoms, timestep, barostat, remove_drift)
        self.keep = math.exp(-friction * 1e-3 * timestep)
        thermal = (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt() * atoms.mobile
        self.kick_width = math.sqrt(1 - self.keep**2) * thermal
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=atoms.masses.device)
        self._window = max(1, min(32, _AHEAD // atoms.masses.shape[0]))
        self._first = -self._window
        self._noise = torch.empty(0)

    def drift(self, state: State) -> None:
        state.pos.add_(0.5 * self.timestep * state.vel)
        before = self.atoms.kinetic_energy(state.vel)
        state.vel.mul_(self.keep).add_(self.kick_width * self.noise(state.step))
        state.heat[:, 0].add_(self.atoms.kinetic_energy(state.vel) - before)
        state.pos.add_(0.5 * self.timestep * state.vel)

    def noise(self, step: int) -> Tensor:
        """Return noise [N, 3] of the step after `step` steps."""
        if not 0 <= step - self._first < self._window:
            self._first = step
            steps = torch.arange(step, step + self._window, device=self.seeds.device)
            self._noise = normal(self.seeds, steps, self.atoms.num_atoms).view(self._window, -1, 3)
        return self._noise[step - self._first]


class MultipleTimeSteps(VelocityVerlet):
    """Long steps of an expensive potential: a cheap inner one moves the atoms between kicks by the difference of
    forces.

    The reversible splitting r-RESPA: M. Tuckerman, B. J. Berne and G. J. Martyna, J. Chem. Phys. 97, 1990 (1992).

    Args:
        inner: integrator of the inner steps; its barostat and `remove_drift` become those of the outer step.
        count: inner steps in one step.
        fast: the inner potential at the same positions and cell.
    """

    def __init__(self, inner: VelocityVerlet, count: int, fast: BoundStep):
        super().__init__(inner.atoms, count * inner.timestep, inner.barostat, inner.remove_drift)
        inner.barostat = inner.remove_drift = None
        self.inner, self.count, self.fast = inner, count, fast

    def kick(self, state: State) -> None:
        assert state.fast is not None
        state.vel.add_(self.half_kick * (state.forces - state.fast))

    def drift(self, state: State) -> None:
        fast = self.fast
        assert fast is not None
        fast.pos.copy_(state.pos)
        if state.cell is not None:
            fast.cell.copy_(state.cell)
        own = State(fast.pos, state.vel, fast.forces, fast.energy, state.heat, step=state.step * self.count)
        for _ in range(self.count):
            self.inner.open(own)
            with torch.enable_grad():
                fast.replay()
            self.inner.close(own)
        state.pos.copy_(fast.pos)


class Engine(ABC):
    """Advances the replicas of a simulation.

    Args:
        step: energy and forces of N atoms in B structures, float64; where the simulation begins.
        dynamics: the integrator.

    Attributes:
        ahead: blocks that may run while the host checks the previous one.
    """

    ahead = 0

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet):
        self.step, self.dynamics = step, dynamics

    def begin(self, vel: Tensor) -> State:
        """Return the state at the first positions with these velocities, on the host."""
        heat = torch.zeros(self.step.energy.shape[0], self.parts, dtype=torch.float64)
        state = self._state_of(vel, heat, 0).to("cpu").clone()
        self.load(state)
        return state

    def _state_of(self, vel: Tensor, heat: Tensor, steps: int) -> State:
        """Return the state on its device, without velocities and heat."""
        step, dynamics = self.step, self.dynamics
        state = State(step.pos, vel, step.forces, step.energy, heat, step=steps)
        if dynamics.barostat is not None:
            if step.stress is None:
                raise ValueError("constant pressure needs a step that computes the stress")
            state.cell, state.stress = step.cell, step.stress
        if dynamics.fast is not None:
            state.fast = dynamics.fast.forces
        return state

    def prepare(self) -> None:  # noqa: B027
        """Compile kernels and capture graphs, so that the first steps are as fast as later ones."""

    @property
    def parts(self) -> int:
        """P, the number of partial sums of a replica's heat."""
        return 1

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from another state."""

    @abstractmethod
    def launch(self, steps: int) -> None:
        """Advance by some steps; on a GPU, returns before they are done."""

    @abstractmethod
    def collect(self) -> State:
        """Return the state after the oldest launch that was not collected, on the host. It is overwritten by the second
        launch after this call."""

    @abstractmethod
    def drop(self) -> None:
        """Discard launches that were not collected."""

    def check(self) -> bool:
        """Return whether the steps since the last check were good, as BoundStep.check."""
        fast = self.dynamics.fast
        enough = fast is None or fast.check()
        return self.step.check() and enough


class HostEngine(Engine):
    """Launches step by step from the host: on a CPU, and where the potential cannot be captured in a CUDA graph."""

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet):
        super().__init__(step, dynamics)
        self._state = self._state_of(torch.zeros_like(step.pos), torch.zeros_like(step.energy)[:, None], 0)
        self._done: list[State] = []

    def load(self, state: State) -> None:
        with torch.no_grad():
            self._state.copy_(state)

    def launch(self, steps: int) -> None:
        with torch.no_grad():
            self.dynamics.begin_block(self._state)
        self.advance(steps)
        self._done.append(self._state.clone().to("cpu"))

    def advance(self, steps: int) -> None:
        """Advance the state by some steps, one at least."""
        state, dynamics = self._state, self.dynamics
        for _ in range(steps):
            with torch.no_grad():
                dynamics.open(state)
                if dynamics.barostat is not None and state.pos.device.type == "cpu":
                    dynamics.barostat.check(state)
            self.step.replay()
            with torch.no_grad():
                dynamics.close(state)

    def collect(self) -> State:
        return self._done.pop(0)

    def drop(self) -> None:
        self._done.clear()
