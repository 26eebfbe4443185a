"""Reference energies of the elements."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..neighbors import NeighborList
from ..registry import PRIORS
from ..system import System
from .base import Prior

__all__ = ["Atomref"]


@PRIORS.register("atomref")
class Atomref(Prior):
    """A constant energy per element, kept and added in float64.

    Args:
        energies: atomic number → eV; elements that are not listed have 0. Keys may be strings, as in JSON.
        max_z: atomic numbers 0 … max_z − 1.
        trainable: let training change them.

    Raises:
        ValueError: an atomic number is out of range.
    """

    initial: Tensor

    def __init__(self, energies: Mapping[int | str, float] | None = None, max_z: int = 128, trainable: bool = False):
        super().__init__()
        table = torch.zeros(max_z, dtype=torch.float64)
        for z, energy in (energies or {}).items():
            if not 0 <= int(z) < max_z:
                raise ValueError(f"atomref: atomic number {z} is outside 0 … {max_z - 1}")
            table[int(z)] = float(energy)
        self.register_buffer("initial", table)
        # the change that training makes; small, so that float32 is enough for it
        self.change = nn.Parameter(torch.zeros(max_z)) if trainable else None

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        table = self.initial if self.change is None else self.initial + self.change.double()
        return table[system.z]
