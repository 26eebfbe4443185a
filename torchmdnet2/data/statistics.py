"""What is in a data set, in numbers. All sums are in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import BadData
from ..neighbors import neighbor_list
from .dataset import Dataset, label_names

__all__ = ["Statistics", "fit_atomref", "statistics"]


@dataclass(frozen=True)
class Statistics:
    """Numbers of a data set, or of some of its frames.

    Attributes:
        num_frames: frames.
        labelled: label -> frames that have it, at least in part.
        elements: atomic numbers, ascending.
        atoms: least, mean and largest number of atoms of a frame.
        atomref: atomic number -> eV, see `fit_atomref`; empty without energies.
        energy_spread: rms of (energy − atomref) / atoms, eV per atom; None without energies.
        force_rms: rms of the force components, eV/Å; None without forces.
        neighbors: mean and largest number of neighbors of an atom within the cutoff; None without a cutoff.
    """

    num_frames: int
    labelled: dict[str, int]
    elements: list[int]
    atoms: tuple[int, float, int]
    atomref: dict[int, float]
    energy_spread: float | None
    force_rms: float | None
    neighbors: tuple[float, int] | None


def statistics(
    dataset: Dataset, indices: Sequence[int] | None = None, cutoff: float | None = None, neighbor_frames: int = 100
) -> Statistics:
    """Statistics in one pass.

    Args:
        dataset: the data set.
        indices: of the frames to look at; None: all.
        cutoff: Å, for the numbers of neighbors; None: without.
        neighbor_frames: number of frames, evenly spread, in which neighbors are counted.

    Raises:
        BadData: there are no frames, or one cannot be used.
    """
    chosen = _chosen(dataset, indices)
    labelled: Counter[str] = Counter()
    sizes: list[int] = []
    compositions = _Compositions()
    force_square, force_count = 0.0, 0
    edges, centers, most = 0, 0, 0
    searched = set(np.linspace(0, len(chosen) - 1, min(len(chosen), neighbor_frames)).astype(int).tolist())
    for k, index in enumerate(chosen):
        sample = dataset[index]
        system, labels = sample.system, sample.labels
        sizes.append(system.num_atoms)
        labelled.update(name for name, value in labels.items() if not bool(torch.isnan(value).all()))
        compositions.add(system.z, labels.get("energy"))
        if "forces" in labels:
            known = labels["forces"][~torch.isnan(labels["forces"])].double()
            force_square, force_count = force_square + float(known.square().sum()), force_count + known.numel()
        if cutoff is not None and k in searched:
            row_ptr = neighbor_list(system, cutoff).row_ptr
            edges, centers = edges + int(row_ptr[-1]), centers + system.num_atoms
            most = max(most, int(row_ptr.diff().max()))
    atomref, spread = compositions.fit()
    return Statistics(
        num_frames=len(chosen),
        labelled={name: labelled[name] for name in label_names(labelled)},
        elements=sorted(compositions.elements),
        atoms=(min(sizes), sum(sizes) / len(sizes), max(sizes)),
        atomref=atomref,
        energy_spread=spread,
        force_rms=math.sqrt(force_square / force_count) if force_count else None,
        neighbors=(edges / centers, most) if cutoff is not None else None,
    )


def fit_atomref(dataset: Dataset, indices: Sequence[int] | None = None) -> dict[int, float]:
    """Reference energies of the elements: least squares of the energies on the compositions, in float64.

    Where the compositions do not determine them (one molecule, or elements in fixed proportion), the solution of
    least norm is given: sums over the molecules seen are right, single values have no meaning.

    Args:
        dataset: the data set.
        indices: of the frames to fit to; None: all. Use those for training only.

    Returns:
        atomic number -> eV, for all elements of the frames that have an energy.

    Raises:
        BadData: there are no frames, none has an energy, or one cannot be used.
    """
    compositions = _Compositions()
    for index in _chosen(dataset, indices):
        sample = dataset[index]
        compositions.add(sample.system.z, sample.labels.get("energy"))
    atomref, spread = compositions.fit()
    if spread is None:
        raise BadData("reference energies cannot be fitted: no frame has an energy")
    return atomref


class _Compositions:
    """Element counts and energies of frames."""

    def __init__(self) -> None:
        self.elements: set[int] = set()
        self._counts: list[dict[int, int]] = []
        self._energies: list[float] = []

    def add(self, z: torch.Tensor, energy: torch.Tensor | None) -> None:
        counts = dict(Counter(z.tolist()))
        self.elements |= counts.keys()
        if energy is not None and not bool(torch.isnan(energy).any()):
            self._counts.append(counts)
            self._energies.append(float(energy))

    def fit(self) -> tuple[dict[int, float], float | None]:
        """Element -> eV, and the rms of what is left per atom; ({}, None) without energies."""
        if not self._energies:
            return {}, None
        elements = sorted(set().union(*self._counts))
        matrix = np.array([[counts.get(z, 0) for z in elements] for counts in self._counts], dtype=np.float64)
        energies = np.array(self._energies)
        solution = np.linalg.lstsq(matrix, energies, rcond=None)[0]
        left = (energies - matrix @ solution) / matrix.sum(1)
        return dict(zip(elements, solution.tolist(), strict=True)), float(np.sqrt(np.mean(left**2)))


def _chosen(dataset: Dataset, indices: Sequence[int] | None) -> list[int]:
    chosen = list(range(len(dataset))) if indices is None else [int(i) for i in indices]
    if not chosen:
        raise BadData("there are no frames to take statistics of")
    return chosen
