"""The state of a simulation as float64 tensors on one device. N atoms in B replicas of n atoms each, N = B·n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..units import AMU_A2_FS2, KB

__all__ = [
    "AtomConstants", "Langevin", "State", "VelocityVerlet", "maxwell_boltzmann", "normal", "philox",
    "remove_momentum",
]  # fmt: skip


@dataclass(eq=False)
class State:
    """What changes from step to step, and all that a restart needs.

    Attributes:
        pos: [N, 3] Å, not wrapped into the cell.
        vel: [N, 3] Å/fs.
        forces: [N, 3] eV/Å at `pos`.
        energy: [B] eV at `pos`.
        heat: [B, P] eV that a thermostat has put in since the start, in P parts (of the atoms) that add up.
        step: steps done.
    """

    pos: Tensor
    vel: Tensor
    forces: Tensor
    energy: Tensor
    heat: Tensor
    step: int = 0

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if name != "step"}

    def clone(self) -> State:
        return State(**{name: value.clone() for name, value in self.tensors().items()}, step=self.step)

    def to(self, device: torch.device | str) -> State:
        """On another device; tensors that are there already are shared."""
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
        dof: degrees of freedom that the kinetic energy of a replica is spread over.
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
        """[B] eV."""
        return 0.5 * AMU_A2_FS2 * (self.masses * vel.square()).view(self.replicas, -1).sum(1)

    def temperature(self, kinetic: float) -> float:
        """K, from the kinetic energy of a replica in eV."""
        return 2 * kinetic / (self.dof * KB)


def maxwell_boltzmann(atoms: AtomConstants, temperature: float, seeds: Sequence[int]) -> Tensor:
    """Velocities [N, 3] in Å/fs at a temperature in K, without total momentum unless atoms are fixed or alone.

    Drawn on the CPU, so that a seed means the same on every device; replica b is what its seed alone would give.
    """
    noise = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        noise.append(torch.randn(atoms.num_atoms, 3, generator=generator, dtype=torch.float64))
    thermal = (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt() * atoms.mobile
    return remove_momentum(atoms, torch.cat(noise).to(atoms.masses.device) * thermal)


def remove_momentum(atoms: AtomConstants, vel: Tensor) -> Tensor:
    """The velocities seen from each centre of mass; unchanged where an atom is fixed or there is only one."""
    if atoms.num_atoms < 2 or bool((atoms.mobile == 0).any()):
        return vel
    masses, vel = atoms.masses.view(atoms.replicas, -1, 1), vel.view(atoms.replicas, -1, 3)
    return (vel - (masses * vel).sum(1, keepdim=True) / masses.sum(1, keepdim=True)).view(-1, 3)


# --- Random numbers that are a function of seed, step and atom: nothing to store, the same on every device ---
#
# Philox 4x32-10: J. K. Salmon et al., SC '11 (2011), doi:10.1145/2063384.2063405; normal numbers by Box and Muller,
# Ann. Math. Stat. 29, 610 (1958). Shapes: B replicas of n atoms, S steps.

_MASK = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)


def normal(seeds: Tensor, steps: Tensor, num_atoms: int) -> Tensor:
    """Independent standard normal numbers, [S, B, n, 3] float64.

    The counter of an atom's numbers is (atom within its replica, low and high half of the step, 0), their key is the
    replica's seed.

    Args:
        seeds: [B] int64.
        steps: [S] int64.
        num_atoms: n.
    """
    atom = torch.arange(num_atoms, device=seeds.device)
    counter = [atom, (steps & _MASK)[:, None, None], (steps >> 32)[:, None, None], torch.zeros_like(atom)]
    words = philox(counter, (seeds & _MASK)[None, :, None], ((seeds >> 32) & _MASK)[None, :, None])
    a, b, c, d = (w.double() for w in words)
    first, second = ((-2 * torch.log((u + 1) * 2.0**-32)).sqrt() for u in (a, c))
    angle, other = (u * (2 * math.pi * 2.0**-32) for u in (b, d))
    return torch.stack([first * torch.cos(angle), first * torch.sin(angle), second * torch.cos(other)], -1)


def philox(counter: list[Tensor], key_low: Tensor, key_high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of 32 bits for each counter (four words) and key (two); all int64 that broadcast."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        k0, k1 = (key_low + i * _KEY[0]) & _MASK, (key_high + i * _KEY[1]) & _MASK
        low, high = c0 * _ROUND[0], c2 * _ROUND[1]  # modulo 2⁶⁴, as two's complement
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0, high & _MASK, ((low >> 32) & _MASK) ^ c3 ^ k1, low & _MASK
        )  # fmt: skip
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


# --- Time steps on tensors: velocity Verlet, and Langevin dynamics by the BAOAB splitting ---
#
# A step is `open`, an evaluation of the forces, `close`. This is the specification; kernels.py does the same in one
# kernel. BAOAB: B. Leimkuhler and C. Matthews, Appl. Math. Res. Express 2013, 34 (2013).

_AHEAD = 4096  # for few atoms, random numbers of several steps are drawn at once, in the time of one step


class VelocityVerlet:
    """Constant energy; symplectic, error of the energy O(timestep²).

    Args:
        atoms: masses and fixed atoms.
        timestep: fs.

    Attributes:
        half_kick: [N, 1] change of the velocity in half a step per force, (Å/fs)/(eV/Å).
    """

    def __init__(self, atoms: AtomConstants, timestep: float):
        self.atoms, self.timestep = atoms, timestep
        self.half_kick = 0.5 * timestep * atoms.mobile / (AMU_A2_FS2 * atoms.masses)

    def open(self, state: State) -> None:
        """Advance velocities by half a step and positions by one, in place; forces must then be computed."""
        state.vel.add_(self.half_kick * state.forces)
        self.drift(state)

    def close(self, state: State) -> None:
        """Advance velocities by the second half of the step, with the new forces."""
        state.vel.add_(self.half_kick * state.forces)
        state.step += 1

    def drift(self, state: State) -> None:
        state.pos.add_(self.timestep * state.vel)


class Langevin(VelocityVerlet):
    """Constant temperature by friction and noise.

    Args:
        atoms, timestep: as above.
        temperature: K.
        friction: 1/ps.
        seeds: of the noise, one for each replica.

    Attributes:
        keep: part of the velocity that is left after a step of friction.
        kick: [N, 1] width of the random change of the velocity, Å/fs.
        seeds: [B] int64.
    """

    def __init__(
        self, atoms: AtomConstants, timestep: float, temperature: float, friction: float, seeds: Sequence[int]
    ):
        super().__init__(atoms, timestep)
        self.keep = math.exp(-friction * 1e-3 * timestep)
        thermal = (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt() * atoms.mobile
        self.kick = math.sqrt(1 - self.keep**2) * thermal
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=atoms.masses.device)
        self._window = max(1, min(32, _AHEAD // atoms.masses.shape[0]))
        self._first = -self._window
        self._noise = torch.empty(0)

    def drift(self, state: State) -> None:
        state.pos.add_(0.5 * self.timestep * state.vel)
        before = self.atoms.kinetic_energy(state.vel)
        state.vel.mul_(self.keep).add_(self.kick * self.noise(state.step))
        state.heat[:, 0].add_(self.atoms.kinetic_energy(state.vel) - before)
        state.pos.add_(0.5 * self.timestep * state.vel)

    def noise(self, step: int) -> Tensor:
        """[N, 3] of the step that comes after `step` steps."""
        if not 0 <= step - self._first < self._window:
            self._first = step
            steps = torch.arange(step, step + self._window, device=self.seeds.device)
            self._noise = normal(self.seeds, steps, self.atoms.num_atoms).view(self._window, -1, 3)
        return self._noise[step - self._first]
