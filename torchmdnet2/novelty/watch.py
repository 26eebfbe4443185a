"""Warnings about a run that is outside of what its model knows: once for each element.

Shapes: N atoms in B structures.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..system import System

__all__ = ["INTERVAL", "LARGEST", "NoveltyWarning", "UnknownStructure", "Watch"]

LARGEST = 5000
"""Atoms, of all structures together, beyond which runs are not looked at: the features come from the Potential in plain
PyTorch, whose memory a run on kernels may not have."""

INTERVAL = 1000
"""Evaluations between two looks in the programs of others: a look takes as long as some compiled steps."""

_MEAN_OF = 5


class NoveltyWarning(UserWarning):
    """Atoms are unlike those that the model was trained on."""


class UnknownStructure(RuntimeError):
    """A run that was to stop outside of what its model knows."""


class Watch:
    """Looks at the scores of a run now and then.

    A frame in fifty of what the model knows well may have a score above 1 (`Calibration`). Told is therefore an element
    of which, in the same structure, the mean of the largest scores of the last five looks is above 1: a score of 5
    tells at once, one of 1.2 when it stays.

    Attributes:
        largest: score so far; 0 before the first look.
        looks, outside: how many there were, and in how many a score was above 1.
        told: elements that were warned about.
    """

    def __init__(self) -> None:
        self.largest, self.looks, self.outside = 0.0, 0, 0
        self.told: set[int] = set()
        self._last: dict[int, deque[Tensor]] = {}
        self._evaluations = 0

    def due(self, num_atoms: int) -> bool:
        """Count an evaluation in the program of another, and tell whether to look at it: the first, and each
        `INTERVAL`-th from there, of up to `LARGEST` atoms."""
        due = self._evaluations % INTERVAL == 0 and 0 < num_atoms <= LARGEST
        self._evaluations += 1
        return due

    def __call__(
        self,
        scores: Tensor,
        system: System,
        when: str = "",
        names: Sequence[str] = (),
        atom_name: Callable[[int], str] | None = None,
    ) -> None:
        """Look at a frame.

        Args:
            scores: [N] of `Potential.novelty`.
            system: the frame; with the same atoms at every call, unless `restart` comes before.
            when: for the warning, as in " at 1.2 ps".
            names: of the structures, for the warning; empty for a single one.
            atom_name: of the atom of an index, where that of its structure is not what the user knows.

        Warns:
            NoveltyWarning: names the atom of the element with the largest score.
        """
        self.largest = max(self.largest, float(scores.max()))
        self.looks += 1
        self.outside += bool((scores > 1).any())
        for element in map(int, system.z.unique()):
            own = torch.where(system.z == element, scores, 0.0)
            tops = own.new_zeros(system.num_systems).scatter_reduce(0, system.batch, own, "amax")
            last = self._last.setdefault(element, deque(maxlen=_MEAN_OF))
            last.append(tops)
            if element not in self.told and bool((torch.stack(list(last)).mean(0) > 1).any()):
                self.told.add(element)
                warnings.warn(_words(own, system, when, names, atom_name), NoveltyWarning, stacklevel=2)

    def restart(self) -> None:
        """Another structure comes next."""
        self._last, self._evaluations = {}, 0

    def summary(self) -> str:
        """In words; "" before the first look."""
        if not self.looks:
            return ""
        return f"largest novelty {self.largest:.2f}, above 1 in {self.outside} of {self.looks} frames looked at"


def _words(
    scores: Tensor, system: System, when: str, names: Sequence[str], atom_name: Callable[[int], str] | None
) -> str:
    from ase.data import chemical_symbols

    atom = int(scores.argmax())
    structure = int(system.batch[atom])
    where = f"atom {atom - int((system.batch < structure).sum())} ({chemical_symbols[int(system.z[atom])]})"
    if atom_name is not None:
        where = atom_name(atom)
    if names:
        where += f" of {names[structure]}"
    return (
        f"{where}{when} is unlike the atoms that the model was trained on (novelty {float(scores[atom]):.2f}, above 1: "
        "outside): its energy and forces may be wrong"
    )
