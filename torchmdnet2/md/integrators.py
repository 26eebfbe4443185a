"""Time steps on tensors: velocity Verlet, and Langevin dynamics by the BAOAB splitting.

A step is `open`, an evaluation of the forces, `close`. This is the specification; kernels.py does the same in one
kernel. BAOAB: B. Leimkuhler and C. Matthews, Appl. Math. Res. Express 2013, 34 (2013).

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..units import AMU_A2_FS2, KB
from .noise import normal
from .state import AtomConstants, State

__all__ = ["Langevin", "VelocityVerlet"]

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
