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
    """Adds a constant reference energy for each element, in float64.

    Args:
        energies: symbol or atomic number → eV; elements that are not listed have 0.
        max_z: atomic numbers 0 … max_z − 1 are allowed.
        trainable: let training change the energies.

    Raises:
        ValueError: a key is not an element; or a key, or an element of a structure, is not below max_z.
    """

    constant = True
    initial: Tensor

    def __init__(self, energies: Mapping[int | str, float] | None = None, max_z: int = 128, trainable: bool = False):
        super().__init__()
        table = torch.zeros(max_z, dtype=torch.float64)
        for z, energy in (energies or {}).items():
            table[atomic_number(z, max_z)] = float(energy)
        self.register_buffer("initial", table)
        # changes made by training, which are so small that float32 is enough
        self.change = nn.Parameter(torch.zeros(max_z)) if trainable else None

    @property
    def table(self) -> Tensor:
        """Return energies by atomic number with the changes made by training, [max_z] eV, float64."""
        return self.initial if self.change is None else self.initial + self.change.double()

    def check(self, system: System) -> None:
        """Refuse elements beyond the table.

        Args:
            system: the structure, or a batch.

        Raises:
            ValueError: a structure has such an element.
        """
        beyond = system.z >= self.initial.shape[0]
        if bool(beyond.any()):
            raise ValueError(
                f"the prior 'atomref' was made with max_z = {self.initial.shape[0]}, but there is "
                f"Z = {int(system.z[beyond][0])}"
            )

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        return self.table[system.z]
