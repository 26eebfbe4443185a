"""The state of a simulation as float64 tensors on one device. N atoms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..units import AMU_A2_FS2, KB

__all__ = ["Atomistics", "State", "maxwell_boltzmann", "remove_momentum"]

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [N, 3] in Å -> energy [] in eV and forces [N, 3] in eV/Å."""


@dataclass(eq=False)
class State:
    """What changes from step to step; all a restart needs, with the random generator.

    Attributes:
        pos: [N, 3] Å, not wrapped into the cell.
        vel: [N, 3] Å/fs.
        forces: [N, 3] eV/Å at `pos`.
        energy: [] eV at `pos`.
        heat: [] eV that a thermostat has put in since the start.
        step: steps done.
    """

    pos: Tensor
    vel: Tensor
    forces: Tensor
    energy: Tensor
    heat: Tensor
    step: int = 0

    def clone(self) -> State:
        return State(**{name: value.clone() for name, value in self.tensors().items()}, step=self.step)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if name != "step"}


@dataclass(eq=False)
class Atomistics:
    """What stays the same.

    Attributes:
        masses: [N, 1] amu.
        mobile: [N, 1] 1 for atoms that move, 0 for fixed ones.
        dof: degrees of freedom that the kinetic energy is spread over.
    """

    masses: Tensor
    mobile: Tensor
    dof: int

    def kinetic_energy(self, vel: Tensor) -> Tensor:
        """[] eV."""
        return 0.5 * AMU_A2_FS2 * (self.masses * vel.square()).sum()

    def temperature(self, kinetic: float) -> float:
        """K, from the kinetic energy in eV."""
        return 2 * kinetic / (self.dof * KB)


def maxwell_boltzmann(atoms: Atomistics, temperature: float, seed: int) -> Tensor:
    """Velocities [N, 3] in Å/fs at a temperature in K, without total momentum unless atoms are fixed or alone.

    Drawn on the CPU, so that a seed means the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(atoms.masses.shape[0], 3, generator=generator, dtype=torch.float64).to(atoms.masses.device)
    vel = noise * (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt() * atoms.mobile
    return remove_momentum(atoms, vel)


def remove_momentum(atoms: Atomistics, vel: Tensor) -> Tensor:
    """The velocities seen from the centre of mass; unchanged where an atom is fixed or there is only one."""
    if vel.shape[0] < 2 or bool((atoms.mobile == 0).any()):
        return vel
    return vel - (atoms.masses * vel).sum(0) / atoms.masses.sum()
