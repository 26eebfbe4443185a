"""Time steps on tensors: velocity Verlet, and Langevin dynamics by the BAOAB splitting.

BAOAB: B. Leimkuhler and C. Matthews, Appl. Math. Res. Express 2013, 34 (2013). One evaluation of the potential per
step, nothing read by the host.
"""

from __future__ import annotations

import math

import torch

from ..units import AMU_A2_FS2, KB
from .state import Atomistics, Evaluate, State

__all__ = ["Langevin", "VelocityVerlet"]


class VelocityVerlet:
    """Constant energy; symplectic, error of the energy O(timestep²).

    Args:
        evaluate: the potential.
        atoms: masses and fixed atoms.
        timestep: fs.
    """

    def __init__(self, evaluate: Evaluate, atoms: Atomistics, timestep: float):
        self.evaluate, self.atoms, self.timestep = evaluate, atoms, timestep
        self.half_kick = 0.5 * timestep * atoms.mobile / (AMU_A2_FS2 * atoms.masses)
        self.generator = torch.Generator(device=atoms.masses.device)

    def step(self, state: State) -> None:
        """Advance the state in place."""
        state.vel = state.vel + self.half_kick * state.forces
        self.drift(state)
        state.energy, state.forces = self.evaluate(state.pos)
        state.vel = state.vel + self.half_kick * state.forces
        state.step += 1

    def drift(self, state: State) -> None:
        state.pos = state.pos + self.timestep * state.vel


class Langevin(VelocityVerlet):
    """Constant temperature by friction and noise.

    Args:
        evaluate, atoms, timestep: as above.
        temperature: K.
        friction: 1/ps.
        seed: of the noise.
    """

    def __init__(
        self, evaluate: Evaluate, atoms: Atomistics, timestep: float, temperature: float, friction: float, seed: int
    ):
        super().__init__(evaluate, atoms, timestep)
        self.generator.manual_seed(seed)
        self.keep = math.exp(-friction * 1e-3 * timestep)
        thermal = (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt() * atoms.mobile
        self.kick = math.sqrt(1 - self.keep**2) * thermal

    def drift(self, state: State) -> None:
        state.pos = state.pos + 0.5 * self.timestep * state.vel
        noise = torch.empty_like(state.vel).normal_(generator=self.generator)
        before = self.atoms.kinetic_energy(state.vel)
        state.vel = self.keep * state.vel + self.kick * noise
        state.heat = state.heat + self.atoms.kinetic_energy(state.vel) - before
        state.pos = state.pos + 0.5 * self.timestep * state.vel
