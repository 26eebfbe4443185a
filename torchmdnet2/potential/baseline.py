"""Another potential as a prior: the network learns what it misses (delta learning)."""

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
    """A potential that is added unchanged and that training does not change; its weights are kept with the model.

    In a training configuration: {name: baseline, file: cheap.tmn}.

    Args:
        potential: its configuration, as `Potential.from_config` takes it.
    """

    def __init__(self, potential: Mapping[str, Any]):
        super().__init__()
        self.potential = Potential.from_config(potential)
        self.potential.requires_grad_(False)
        self.cutoff, self.reads_charge = self.potential.cutoff, self.potential.reads_charge
        self.repels = any(prior.repels for prior in self.potential.priors)  # type: ignore[union-attr]

    def check(self, system: System) -> None:
        """Raise what the potential raises for structures that it cannot evaluate.

        Of any charge: which ones are known is stated by the potential that was trained on top of this one.
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
        """[N] energies of the atoms in eV, by the other potential."""
        assert neighbors is not None
        energies = self.potential.atom_energies(system, neighbors)[0]
        return energies + (self.potential.energy_shift / system.atom_counts.clamp(min=1))[system.batch]
