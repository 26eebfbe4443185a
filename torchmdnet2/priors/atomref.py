"""Reference energies of the elements."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..neighbors import NeighborList
from ..potential.prior import Prior, atomic_number
from ..registry import PRIORS
from ..system import System

__all__ = ["Atomref"]


@PRIORS.register("atomref")
class Atomref(Prior):
    """A constant energy per element, kept and added in float64.

    Args:
        energies: symbol or atomic number → eV; elements that are not listed have 0.
        max_z: atomic numbers 0 … max_z − 1.
        trainable: let training change them.

    Raises:
        ValueError: a key is not an element, or not below max_z; a structure has an element that is not.
    """

    constant = True
    initial: Tensor

    def __init__(self, energies: Mapping[int | str, float] | None = None, max_z: int = 128, trainable: bool = False):
        super().__init__()
        table = torch.zeros(max_z, dtype=torch.float64)
        for z, energy in (energies or {}).items():
            table[atomic_number(z, max_z)] = float(energy)
        self.register_buffer("initial", table)
        # the change that training makes; small, so that float32 is enough for it
        self.change = nn.Parameter(torch.zeros(max_z)) if trainable else None

    @property
    def table(self) -> Tensor:
        """Energies by atomic number, [max_z] eV, float64, changes made by training included."""
        return self.initial if self.change is None else self.initial + self.change.double()

    def check(self, system: System) -> None:
        """Refuse elements beyond the table.

        Args:
            system: the structure, or a batch.

        Raises:
            ValueError: there are such elements.
        """
        beyond = system.z >= self.initial.shape[0]
        if bool(beyond.any()):
            raise ValueError(
                f"the prior 'atomref' was made with max_z = {self.initial.shape[0]}, and there is "
                f"Z = {int(system.z[beyond][0])}"
            )

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        return self.table[system.z]
