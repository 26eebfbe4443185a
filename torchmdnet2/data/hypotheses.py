"""Faults of labels: a table of hypotheses, each compared with labels without a fault.

A hypothesis undoes a fault. A linear model is fitted to labels of which some frames (or atoms) have the fault undone,
in turn with the choice of these frames, from two starts: none of them, and all. Right labels are described best as they
are. A fault that all frames have is found where the model tells one from the other: by the axes, or the order of
frames. A sign or a unit is found where frames differ in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Fault", "LinearFit", "Solution", "energy_fault", "force_fault"]

_ROUNDS = 12
_SHARE, _LEAST = 0.02, 4  # of the frames or atoms, that have the fault
_CLEAR = 2.0  # times the mean square error of a frame that has the fault, if it is not undone
_LEFT = 0.85  # of the residual of the unchanged labels; 0.87 to 1 in right data
_MOST_LEFT = 0.5  # the same of energies; moved by one frame, right ones leave 2.4 times as much and more
_DESCRIBED = 0.5  # of the variance of the forces, once the fault is undone
_USUAL = 20.0  # times the median square error of energies, three standard deviations; and times the one without fault

# --- Bayesian linear regression: noise and prior of the largest evidence (MacKay, Neural Comput. 4, 415 (1992)) ---

_EVIDENCE_ROUNDS = 30
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Solution:
    """The fit of C coefficients.

    Attributes:
        mean: [C]
        spread: a root of the covariance, [C, C].
        explained: share of the mean square of the labels.
        predicted: labels, [n].
    """

    mean: np.ndarray
    spread: np.ndarray
    explained: float
    predicted: np.ndarray


class LinearFit:
    """Fits several sets of labels to one design matrix.

    Args:
        design: [n, C]
    """

    def __init__(self, design: np.ndarray):
        self._design = design
        values, self._vectors = np.linalg.eigh(design.T @ design)
        self._values = np.maximum(values, 0.0)

    def __call__(self, labels: np.ndarray) -> Solution:
        """Fit labels [n]."""
        values, vectors = self._values, self._vectors
        size, square = len(labels), max(float(labels @ labels), _TINY)
        moment = vectors.T @ (self._design.T @ labels)
        noise = square / size
        prior = first = noise / max(values.mean() / size, 1e-300)
        for _ in range(_EVIDENCE_ROUNDS):
            precision = values / noise + 1 / prior
            mean = moment / noise / precision
            known = float((values / noise / precision).sum())
            left = square - 2 * mean @ moment + (values * mean**2).sum()
            prior = max(float(mean @ mean) / max(known, 1e-9), _TINY * first)  # labels without any relation: towards 0
            noise = max(float(left), 1e-4 * square) / max(size - known, 1.0)
        precision = values / noise + 1 / prior
        mean = vectors @ (moment / noise / precision)
        return Solution(mean, vectors / np.sqrt(precision), 1 - noise * size / square, self._design @ mean)


# --- faults ---

Undo = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Fault:
    """A fault that describes the labels better than no fault.

    Attributes:
        name: in the table, a sentence about the labels.
        having: which frames (or atoms) have it, boolean.
        labels: with the fault undone.
        left: mean square error that remains.
    """

    name: str
    having: np.ndarray
    labels: np.ndarray
    left: float


def _axes(*order: int) -> Undo:
    return lambda f: f[:, order]


def _times(*factors: float) -> Undo:
    return lambda f: f * np.array(factors)


FORCES: dict[str, Undo] = {
    "have x and y exchanged": _axes(1, 0, 2),
    "have x and z exchanged": _axes(2, 1, 0),
    "have y and z exchanged": _axes(0, 2, 1),
    "have the axes in the order y, z, x": _axes(2, 0, 1),
    "have the axes in the order z, x, y": _axes(1, 2, 0),
    "have the wrong sign of x": _times(-1, 1, 1),
    "have the wrong sign of y": _times(1, -1, 1),
    "have the wrong sign of z": _times(1, 1, -1),
}
"""Fault of the forces -> how it is undone."""

UNITS: dict[str, Undo] = {
    "have the sign opposite to that of the others": _times(-1),
    "are 1.89 times the others, as if per Å and per bohr were mixed": _times(1 / 1.8897),
    "are 23.06 times the others, as if kcal/mol and eV were mixed": _times(1 / 23.06),
    "are 96.5 times the others, as if kJ/mol and eV were mixed": _times(1 / 96.485),
    "are 27.2 times the others, as if eV and hartree were mixed": _times(1 / 27.211),
    "are 51.4 times the others, as if eV/Å and hartree/bohr were mixed": _times(1 / 51.422),
    "are 1/1.89 of the others, as if per Å and per bohr were mixed": _times(1.8897),
    "are 1/23.06 of the others, as if kcal/mol and eV were mixed": _times(23.06),
    "are 1/96.5 of the others, as if kJ/mol and eV were mixed": _times(96.485),
    "are 1/27.2 of the others, as if eV and hartree were mixed": _times(27.211),
    "are 1/51.4 of the others, as if eV/Å and hartree/bohr were mixed": _times(51.422),
}
"""Fault of the labels of some frames -> how it is undone."""


def force_fault(
    fit: Callable[[np.ndarray], Solution], forces: np.ndarray, owner: np.ndarray, others: dict[str, np.ndarray]
) -> Fault | None:
    """Return the fault that describes the forces best, if clearly better than no fault.

    Args:
        fit: of a model, to flat labels.
        forces: [N, 3] eV/Å.
        owner: [N] frame of each atom, in ascending order.
        others: what may be said -> the forces that belong to the structures then, [N, 3].
    """
    plain = _Mixture(fit, forces, forces, owner, relative=True)
    if not np.isfinite(plain.left):
        return None
    undone = {name: undo(forces) for name, undo in (FORCES | UNITS).items()} | others
    found = []
    for name, labels in undone.items():
        tried = _Mixture.best(fit, forces, labels, owner, relative=True, most=0.5 if name in UNITS else 1.0)
        if tried is not None and tried.left < min(_LEFT * plain.left, 1 - _DESCRIBED):
            found.append(tried.fault(name))
    tried = _Mixture.best(fit, forces, -forces, np.arange(len(forces)), relative=True, most=0.5)
    if tried is not None and tried.left < min(_LEFT * min([plain.left, *(f.left for f in found)]), 1 - _DESCRIBED):
        found.append(tried.fault("have the sign opposite to that of the other atoms"))
    return min(found, key=lambda fault: fault.left, default=None)


def energy_fault(
    fit: Callable[[np.ndarray], Solution], energies: np.ndarray, others: dict[str, np.ndarray]
) -> Fault | None:
    """Return the fault that describes the energies best, if clearly better than no fault.

    Args:
        fit: of a model.
        energies: [B] eV, times the weights of the fit.
        others: what may be said -> the energies that belong to the structures then, [B].
    """
    frames = np.arange(len(energies))
    plain = _Mixture(fit, energies, energies, frames, relative=False)
    found = []
    for name, undo in UNITS.items():
        tried = _Mixture.best(fit, energies, undo(energies), frames, relative=False, most=0.5)
        if tried is not None:
            found.append(tried.fault(name))
    for name, labels in others.items():  # of all frames: of two energies of some, one is always nearer
        left = _Mixture(fit, labels, labels, frames, relative=False).left
        found.append(Fault(name, np.full(len(frames), True), labels, left))
    found = [fault for fault in found if fault.left < _MOST_LEFT * plain.left]
    return min(found, key=lambda fault: fault.left, default=None)


class _Mixture:
    """Labels of which some groups may have a fault.

    Args:
        fit: of a model, to flat labels.
        labels, undone: unchanged, and with the fault undone, [n] or [n, 3].
        groups: [n] number of the group that has the fault or not, in ascending order.
        relative: errors are compared in units of the labels' size, so that smaller ones are not better for it.
        start: whether all groups have it at the start.
    """

    def __init__(
        self, fit: Callable[[np.ndarray], Solution], labels: np.ndarray, undone: np.ndarray, groups: np.ndarray,
        *, relative: bool, start: bool = False,
    ):  # fmt: skip
        number = int(groups[-1]) + 1
        both = labels.reshape(len(groups), -1), undone.reshape(len(groups), -1)
        size = [np.bincount(groups, np.square(each).sum(1), number) if relative else np.ones(number) for each in both]
        having = np.full(number, start)
        for _ in range(_ROUNDS):
            left = self._fit(fit, both, having, groups, relative)
            again = left[1] * size[0] < left[0] * size[1]
            if (again == having).all():
                break
            having = again
        self.clear = having & (left[0] * size[1] > _CLEAR * left[1] * size[0])
        if not relative:  # of energies near zero either may be nearer
            left_now = np.where(having, *left[::-1])
            self.clear = having & (left[0] > _USUAL * np.maximum(np.median(left_now), left[1]))
            self._fit(fit, both, self.clear, groups, relative)

    def _fit(
        self, fit: Callable[[np.ndarray], Solution], both: tuple[np.ndarray, np.ndarray], having: np.ndarray,
        groups: np.ndarray, relative: bool,
    ) -> list[np.ndarray]:  # fmt: skip
        """Return the sum of square errors of each group, without the fault and with the fault undone."""
        self.having = having
        self.labels = np.where(having[groups][:, None], both[1], both[0])
        solution = fit(self.labels.reshape(-1))
        predicted = solution.predicted.reshape(self.labels.shape)
        left = [np.bincount(groups, np.square(each - predicted).sum(1), len(having)) for each in both]
        self.left = 1 - solution.explained if relative else float(np.where(having, *left[::-1]).mean())
        return left

    @classmethod
    def best(cls, fit, labels, undone, groups, *, relative: bool, most: float) -> _Mixture | None:  # type: ignore[no-untyped-def]
        """Fit from either start; None if too few groups have the fault, or more than a share `most`."""
        tried = [cls(fit, labels, undone, groups, relative=relative, start=start) for start in (False, True)]
        tried = [t for t in tried if t.clear.sum() >= max(_LEAST, _SHARE * len(t.having)) and t.having.mean() <= most]
        return min(tried, key=lambda t: t.left, default=None)

    def fault(self, name: str) -> Fault:
        return Fault(name, self.having, self.labels.squeeze(), self.left)
