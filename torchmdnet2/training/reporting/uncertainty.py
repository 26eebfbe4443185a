"""The spread of an ensemble, compared with its errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["Spread"]


class Spread:
    """Errors of the mean and standard deviations of the members, collected over batches."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._units: dict[str, str] = {}

    def add(self, name: str, error: Tensor, deviation: Tensor, unit: str) -> None:
        """Errors of the mean and deviations of the members, of one property, [n, …] with vectors and tensors whole."""
        n = len(error)
        pair = error.detach().double().cpu().reshape(n, -1), deviation.double().cpu().reshape(n, -1)
        self._rows.setdefault(name, []).append(pair)
        self._units[name] = unit

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By property: (|error| [n], deviation [n]), of vectors and tensors their lengths (Frobenius)."""
        return {name: (error.norm(dim=1), deviation.norm(dim=1)) for name, (error, deviation) in self._joined().items()}

    def summary(self) -> dict[str, Any]:
        """By property: "rms_spread" and "rmse", both by component as in `ErrorSums`, and "correlation", how well the
        order of the one follows that of the other (Spearman's rank, of the lengths of vectors and tensors)."""
        pairs = self.pairs()
        return {
            name: {
                "rms_spread": float(deviation.square().mean().sqrt()),
                "rmse": float(error.square().mean().sqrt()),
                "correlation": rank_correlation(*pairs[name]),
                "unit": self._units[name],
            }
            for name, (error, deviation) in self._joined().items()
            if len(error)
        }

    def _joined(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
            for name, parts in self._rows.items()
        }


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: the correlation of the ranks, −1 … 1; 0 for fewer than three values."""
    if len(a) < 3:
        return 0.0
    ranks = [values.argsort().argsort().double() for values in (a, b)]
    x, y = (r - r.mean() for r in ranks)
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0
