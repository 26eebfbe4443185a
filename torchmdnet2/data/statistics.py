"""Statistics of a data set, for checks, reports and reference energies; all sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import BadData
from ..neighbors.frames import search
from .dataset import Dataset
from .labels import label_names

__all__ = ["Statistics", "fit_atomref", "statistics"]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Counts, sums and reference energies of a data set, or of some of its frames.

    Shapes: S frames, K elements.

    Attributes:
        labelled: label -> number of frames that have it, at least in part; labels without frames are absent.
        elements: [K] atomic numbers, ascending.
        counts: [S, K] atoms of each element in each frame.
        energies: [S] eV, NaN where a frame has none.
        charges, spins: all total charges and multiplicities, ascending.
        odd_electrons: frames with an odd number of electrons.
        impossible_spins: frames with a multiplicity that their number of electrons excludes.
        force_rms: rms of the force components, eV/Å; None without forces.
        force_square, force_count: [S] sum of the squared force components, eV²/Å², and their number.
        neighbors: least, mean and largest number of neighbors of an atom within the cutoff; None without a cutoff.
        keys: [S] a number for each frame, equal for equal structures.
    """

    labelled: dict[str, int]
    elements: list[int]
    counts: np.ndarray
    energies: np.ndarray
    charges: list[int]
    spins: list[int]
    odd_electrons: int
    impossible_spins: int
    force_rms: float | None
    force_square: np.ndarray
    force_count: np.ndarray
    neighbors: tuple[int, float, int] | None
    keys: np.ndarray

    @property
    def num_frames(self) -> int:
        return len(self.counts)

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of atoms of each frame, [S]."""
        return self.counts.sum(1)

    @property
    def atoms(self) -> tuple[int, float, int]:
        """Return the least, mean and largest number of atoms of a frame."""
        return int(self.sizes.min()), float(self.sizes.mean()), int(self.sizes.max())

    @property
    def atomref(self) -> dict[int, float]:
        """Return atomic number -> reference energy in eV, from `fit_atomref`; empty without energies."""
        known = ~np.isnan(self.energies)
        if not known.any():
            return {}
        counts = self.counts[known]
        seen = counts.any(0)
        solution = np.linalg.lstsq(counts[:, seen].astype(np.float64), self.energies[known], rcond=None)[0]
        return dict(zip(np.array(self.elements)[seen].tolist(), solution.tolist(), strict=True))

    @property
    def energy_spread(self) -> float | None:
        """Return the rms of (energy − atomref) / atoms, eV per atom; None without energies."""
        known, atomref = ~np.isnan(self.energies), self.atomref
        if not atomref:
            return None
        references = np.array([atomref.get(z, 0.0) for z in self.elements])
        left = (self.energies - self.counts @ references)[known] / self.sizes[known]
        return float(np.sqrt(np.mean(left**2)))


def statistics(
    dataset: Dataset,
    indices: Sequence[int] | np.ndarray | None = None,
    cutoff: float | None = None,
    neighbor_frames: int = 100,
) -> Statistics:
    """Compute the statistics in one pass; those of a `CachedDataset` are stored with the cache.

    Args:
        dataset: the data set.
        indices: indices of the frames; None takes all.
        cutoff: cutoff in Å for the numbers of neighbors; None leaves them out.
        neighbor_frames: number of evenly spread frames in which neighbors are counted.

    Raises:
        BadData: there are no frames, or one cannot be used.
    """
    chosen = np.arange(len(dataset)) if indices is None else np.asarray(indices, dtype=np.int64)
    if not len(chosen):
        raise BadData("statistics need at least one frame")
    facts = dataset.facts_of(chosen)
    force_count = int(facts.force_count.sum())
    electrons = facts.counts @ facts.elements - facts.charges
    return Statistics(
        labelled={
            name: int(facts.labelled[name].sum()) for name in label_names(facts.labelled) if facts.labelled[name].any()
        },
        elements=facts.elements.tolist(),
        counts=facts.counts,
        energies=facts.energies,
        charges=np.unique(facts.charges).tolist(),
        spins=np.unique(facts.spins).tolist(),
        odd_electrons=int((electrons % 2).sum()),
        impossible_spins=int(((facts.spins > 0) & ((electrons + facts.spins) % 2 == 0)).sum()),
        force_rms=math.sqrt(float(facts.force_square.sum()) / force_count) if force_count else None,
        force_square=facts.force_square,
        force_count=facts.force_count,
        neighbors=None if cutoff is None else _neighbors(dataset, chosen, cutoff, neighbor_frames),
        keys=facts.keys,
    )


def _neighbors(dataset: Dataset, chosen: np.ndarray, cutoff: float, most_frames: int) -> tuple[int, float, int]:
    places = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), most_frames)).astype(int))
    degree = search(dataset.batch(chosen[places]).system, cutoff).degree
    return int(degree.min()), float(degree.mean()), int(degree.max())


def fit_atomref(dataset: Dataset, indices: Sequence[int] | np.ndarray | None = None) -> dict[int, float]:
    """Fit reference energies of the elements: least squares of the energies on the compositions, in float64.

    If the compositions do not determine the energies (one molecule, or elements in fixed proportion), the result is the
    solution of least norm: sums over the molecules of the data are right, single values have no meaning.

    Args:
        dataset: the data set.
        indices: indices of the frames; None takes all. Use training frames only.

    Returns:
        Atomic number -> eV, for all elements of the frames that have an energy.

    Raises:
        BadData: there are no frames, none has an energy, or one cannot be used.
    """
    atomref = statistics(dataset, indices).atomref
    if not atomref:
        raise BadData("reference energies cannot be fitted: no frame has an energy")
    return atomref
