"""What the spread of an ensemble tells about its errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["Spread"]

_UNITS = {"energy_per_atom": "eV/atom", "forces": "eV/Å"}


class Spread:
    """Errors of the mean beside the standard deviation of the members, gathered over batches."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, name: str, error: Tensor, deviation: Tensor) -> None:
        """Errors [n] of the mean and deviations [n] of the members, of one property; of vectors the lengths."""
        self._pairs.setdefault(name, []).append((error.detach().double().abs().cpu(), deviation.double().cpu()))

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By property: (|error| [n], deviation [n])."""
        return {
            name: (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
            for name, parts in self._pairs.items()
        }

    def summary(self) -> dict[str, Any]:
        """By property: rms of both, and how well the order of one follows that of the other (Spearman's rank)."""
        found = {}
        for name, (error, deviation) in self.pairs().items():
            if len(error):
                found[name] = {
                    "rms_spread": float(deviation.square().mean().sqrt()),
                    "rmse": float(error.square().mean().sqrt()),
                    "correlation": rank_correlation(error, deviation),
                    "unit": _UNITS[name],
                }
        return found


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: the correlation of the ranks, −1 … 1; 0 for fewer than three values."""
    if len(a) < 3:
        return 0.0
    ranks = [values.argsort().argsort().double() for values in (a, b)]
    x, y = (r - r.mean() for r in ranks)
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0
