"""The state of a simulation as float64 tensors on one device. N atoms in B replicas of n atoms each, N = B·n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..units import AMU_A2_FS2, KB

__all__ = ["AtomConstants", "State", "maxwell_boltzmann", "remove_momentum"]


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
