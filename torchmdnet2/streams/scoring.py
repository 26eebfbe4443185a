"""Energies, forces, charges and novelty of a block of records.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..evaluator import Evaluator
from ..potential.potential import Potential, Result
from ..system import System
from .batches import Room, evaluate_each, reason, usable
from .records import FAULTS, Record
from .relaxing import Outcome, novelties

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["ScoreOptions", "Scorer"]


@dataclass(frozen=True)
class ScoreOptions:
    """What is computed besides energies, forces and charges.

    Attributes:
        novelty: of calibrated models.
        atoms: of a batch; None: 16,384 on a GPU, 768 on a CPU.
        padded: batches of one size, for CUDA graphs; None: on a GPU.
    """

    novelty: bool = True
    atoms: int | None = None
    padded: bool | None = None


class Scorer:
    """Evaluates blocks of records with one potential.

    Args:
        potential: on its device.
        options: of the evaluation.
    """

    def __init__(self, potential: Potential, options: ScoreOptions):
        self.potential, self.options, self.evaluator = potential, options, Evaluator(potential)
        self._room: Room | None = None

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        """One outcome for each record, in order."""
        outcomes = [Outcome(record, errors=[record.error] if record.error else []) for record in records]
        tasks: list[tuple[Outcome, Atoms, System]] = []
        for outcome in outcomes:
            for atoms in outcome.record.starts:
                try:
                    tasks.append((outcome, atoms, usable(atoms, self.potential)))
                except FAULTS as error:
                    outcome.errors.append(reason(error))
            outcome.record.starts = []
        for batch, room in self._batches(tasks):
            found = evaluate_each(self.evaluator, [system for _, _, system in batch], room)
            for (outcome, atoms, _), result in zip(batch, found, strict=True):
                if isinstance(result, Exception):
                    outcome.errors.append(reason(result))
                elif np.isfinite(energy := float(result.energy)):
                    outcome.structures.append(_scored(atoms, result, energy))
                else:
                    outcome.errors.append("its energy is not finite")
        if self.options.novelty:
            every = [atoms for outcome in outcomes for atoms in outcome.structures]
            for atoms, score in zip(every, novelties(self.potential, every), strict=True):
                atoms.info |= {} if score is None else {"novelty": score}
        return outcomes

    def _batches(
        self, tasks: Sequence[tuple[Outcome, Atoms, System]]
    ) -> Iterator[tuple[list[tuple[Outcome, Atoms, System]], Room]]:
        if not tasks:
            return
        largest = max(system.num_atoms for _, _, system in tasks)
        if self._room is None or self._room.atoms <= largest:
            self._room = Room(self.potential, largest, self.options.atoms, self.options.padded)
        batch: list[tuple[Outcome, Atoms, System]] = []
        used = 0
        for task in tasks:
            size = task[2].num_atoms
            if batch and not self._room.fits(used + size, len(batch) + 1):
                yield batch, self._room
                batch, used = [], 0
            batch.append(task)
            used += size
        yield batch, self._room


def _scored(atoms: Atoms, result: Result, energy: float) -> Atoms:
    """A structure with its results; labels of other methods that it had are left out."""
    from ase import Atoms

    assert result.forces is not None
    found = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    found.info = {name: value for name, value in atoms.info.items() if np.ndim(value) == 0}
    found.arrays["forces"] = result.forces.double().numpy()
    found.info |= {"energy": energy, "largest_force": float(np.linalg.norm(found.arrays["forces"], axis=1).max())}
    if result.charges is not None:
        found.arrays["charges"] = result.charges.double().numpy()
    return found
