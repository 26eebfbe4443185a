"""Another potential as a prior, for delta learning: the network learns the difference of the labels from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..neighbors import NeighborList
from ..registry import PRIORS
from ..system import System
from .cells import CoulombInCells
from .potential import Potential
from .prior import Prior

__all__ = ["Baseline"]


@PRIORS.register("baseline")
class Baseline(Prior):
    """A potential that is added to the network and that training does not change. Its weights are stored in the model.

    In a training configuration: {name: baseline, file: cheap.tmn}.

    Args:
        potential: configuration of the potential, as for `Potential.from_config`.
    """

    def __init__(self, potential: Mapping[str, Any]):
        super().__init__()
        self.potential = Potential.from_config(potential)
        self.potential.requires_grad_(False)
        self.cutoff, self.reads_charge = self.potential.cutoff, self.potential.reads_charge
        self.repels = any(prior.repels for prior in self.potential.priors)  # type: ignore[union-attr]

    def check(self, system: System) -> None:
        """Raise the potential's errors for structures that it cannot evaluate.

        Total charges are not checked, since the potential that contains this prior states which ones it knows.
        """
        self.potential.check(system, charge=False)

    def in_cells(self, coulomb: CoulombInCells) -> Prior:
        potential = self.potential.in_cells(coulomb)
        if potential is self.potential:
            return self
        part = copy.copy(self)
        part._modules = {"potential": potential}
        return part

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        """Return the energies of the atoms from the other potential, [N] eV."""
        assert neighbors is not None
        energies = self.potential.atom_energies(system, neighbors)[0]
        return energies + (self.potential.energy_shift / system.atom_counts.clamp(min=1))[system.batch]
