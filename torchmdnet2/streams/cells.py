"""Relaxation of positions and cells, one structure after another, by ASE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..adapters.ase import TorchMDNet2Calculator
from ..errors import BadData
from ..potential.potential import Potential
from .batches import reason, usable
from .records import FAULTS, Record
from .relaxing import Outcome, RelaxOptions, novelties, with_properties

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["CellRelaxer"]


class CellRelaxer:
    """Relaxes blocks of periodic structures at zero pressure.

    Forces and, with a length of one atom, the gradient along the cell are below `fmax` at the end
    (`ase.filters.FrechetCellFilter`).

    Args:
        potential: on its device.
        options: `fmax` and `steps` count.
    """

    def __init__(self, potential: Potential, options: RelaxOptions):
        self.potential, self.options = potential, options
        self._calculator = TorchMDNet2Calculator(
            potential, device=potential.device, allow_untrained_charge=potential.allow_untrained_charge
        )

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        """One outcome for each record, in order."""
        outcomes = []
        for record in records:
            outcome = Outcome(record, errors=[record.error] if record.error else [])
            for atoms in record.starts:
                try:
                    outcome.structures.append(self._relaxed(atoms))
                except FAULTS as error:
                    outcome.errors.append(reason(error))
            record.starts = []
            outcomes.append(outcome)
        return outcomes

    def _relaxed(self, start: Atoms) -> Atoms:
        from ase.filters import FrechetCellFilter
        from ase.optimize import LBFGS

        if not start.pbc.all():
            raise BadData("it has no cell that is periodic along three directions")
        usable(start, self.potential)
        atoms = start.copy()
        atoms.calc = self._calculator
        optimizer = LBFGS(FrechetCellFilter(atoms), logfile=None)  # type: ignore[arg-type]
        converged = bool(optimizer.run(fmax=self.options.fmax, steps=self.options.steps))
        energy, forces = float(atoms.get_potential_energy()), atoms.get_forces()
        atoms.calc = None
        if not np.isfinite(energy):
            raise BadData("its energy is not finite")
        found = with_properties(start, atoms, forces, energy, optimizer.nsteps, converged)
        (score,) = novelties(self.potential, [found])
        found.info |= {} if score is None else {"novelty": score}
        return found
