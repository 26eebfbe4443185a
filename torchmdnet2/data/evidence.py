"""Bayesian linear regression: noise and prior of the largest evidence (MacKay, Neural Comput. 4, 415 (1992))."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["LinearFit", "Solution"]

_ROUNDS = 30
_LEAST = 1e-30


@dataclass(frozen=True, eq=False)
class Solution:
    """Of C coefficients.

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
    """Fits of several sets of labels to one design.

    Args:
        design: [n, C]
    """

    def __init__(self, design: np.ndarray):
        self._design = design
        values, self._vectors = np.linalg.eigh(design.T @ design)
        self._values = np.maximum(values, 0.0)

    def __call__(self, labels: np.ndarray) -> Solution:
        """Fit labels, [n]."""
        values, vectors = self._values, self._vectors
        size, square = len(labels), max(float(labels @ labels), _LEAST)
        moment = vectors.T @ (self._design.T @ labels)
        noise = square / size
        prior = first = noise / max(values.mean() / size, 1e-300)
        for _ in range(_ROUNDS):
            precision = values / noise + 1 / prior
            mean = moment / noise / precision
            known = float((values / noise / precision).sum())
            left = square - 2 * mean @ moment + (values * mean**2).sum()
            prior = max(float(mean @ mean) / max(known, 1e-9), _LEAST * first)  # labels without any relation: towards 0
            noise = max(float(left), 1e-4 * square) / max(size - known, 1.0)
        precision = values / noise + 1 / prior
        mean = vectors @ (moment / noise / precision)
        return Solution(mean, vectors / np.sqrt(precision), 1 - noise * size / square, self._design @ mean)
