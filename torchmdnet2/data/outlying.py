"""Frames whose labels stand out: many robust standard deviations from what is usual in the data.

A few of them are mistakes of a unit, of a calculation that did not converge, or of a file. Many are a part of the data,
and are left alone. Robust: by medians, which single wrong labels do not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .statistics import Statistics

__all__ = ["Usual"]

_LEAST = 8  # frames, to know what is usual
_FORCES = (6.0, math.log(5.0))  # robust standard deviations of log(rms), and at least this
_ENERGIES = (10.0, 0.5)  # the same of energies per atom, eV
_FEW = 0.01  # of the frames, and at least three of them


@dataclass(frozen=True, eq=False)
class Usual:
    """What labels are usual in some frames, so that others can be compared.

    Attributes:
        found: statistics of these frames.
    """

    found: Statistics

    def forces(self, other: Statistics) -> np.ndarray:
        """Positions of frames whose rms force is far above the median, worst first.

        Args:
            other: statistics of the frames to look at; `found` for these themselves.
        """
        size = _log_rms(self.found)
        size = size[np.isfinite(size)]
        if len(size) < _LEAST:
            return np.zeros(0, dtype=np.int64)
        excess = np.nan_to_num(_log_rms(other) - np.median(size), nan=-np.inf)
        return _few(excess, _limit(size, *_FORCES))

    def energies(self, other: Statistics) -> np.ndarray:
        """The same of energies per atom, less references that are fitted without such frames; single atoms aside."""
        if self._references is None:
            return np.zeros(0, dtype=np.int64)
        own, rest = (_per_atom(each, self._references) for each in (self.found, other))
        own = own[~np.isnan(own)]
        return _few(np.nan_to_num(np.abs(rest - np.median(own)), nan=-np.inf), _limit(own, *_ENERGIES))

    @cached_property
    def median_force(self) -> float:
        """Median of the frames' rms force components, eV/Å."""
        size = _log_rms(self.found)
        return math.exp(float(np.median(size[np.isfinite(size)])))

    @cached_property
    def force_rms(self) -> float | None:
        """Rms of the force components without frames that stand out, eV/Å; None without forces."""
        square, count = self.found.force_square, self.found.force_count
        kept = np.ones(len(count), dtype=bool)
        kept[self.forces(self.found)] = False
        number = int(count[kept].sum())
        return math.sqrt(float(square[kept].sum()) / number) if number else None

    @cached_property
    def _references(self) -> dict[int, float] | None:
        """Element -> eV by least squares, three times, each without the frames that stood out before."""
        found = self.found
        chosen = ~np.isnan(found.energies) & (found.sizes > 1)
        for _ in range(3):
            if chosen.sum() < _LEAST:
                return None
            counts = found.counts[chosen].astype(np.float64)
            solution = np.linalg.lstsq(counts, found.energies[chosen], rcond=None)[0]
            references = dict(zip(found.elements, solution.tolist(), strict=True))
            rest = _per_atom(found, references)
            own = rest[chosen]
            chosen &= np.abs(rest - np.median(own)) <= _limit(own, *_ENERGIES)
        return references


def _log_rms(found: Statistics) -> np.ndarray:
    """Logarithm of the rms force component of each frame, [S]; −inf or NaN where it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 0.5 * np.log(found.force_square / found.force_count)


def _per_atom(found: Statistics, references: dict[int, float]) -> np.ndarray:
    """(energy − references) / atoms of each frame, [S] eV; NaN without an energy, and of single atoms."""
    alone = found.counts @ np.array([references.get(z, 0.0) for z in found.elements])
    return np.where(found.sizes > 1, (found.energies - alone) / found.sizes, np.nan)


def _limit(values: np.ndarray, deviations: float, least: float) -> float:
    """How far from the median is still usual."""
    width = 1.4826 * float(np.median(np.abs(values - np.median(values))))  # the standard deviation of a Gaussian
    return max(deviations * width, least)


def _few(excess: np.ndarray, limit: float) -> np.ndarray:
    """Positions above the limit, worst first; none where they are many."""
    beyond = np.flatnonzero(excess > limit)
    if len(beyond) > max(3, _FEW * len(excess)):
        beyond = beyond[:0]
    return beyond[np.argsort(-excess[beyond], kind="stable")]
