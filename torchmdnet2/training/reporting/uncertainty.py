"""The spread of an ensemble, compared with its errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["Spread"]


_BINS = 5


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
        """By property: "rms_spread" and "rmse", both by component as in `ErrorSums`, and what the one tells about the
        other: "ratio", rmse over rms_spread, 1 where the spread is as large as the error; "correlation" of the ranks
        (Spearman's, of the lengths of vectors and tensors); "bins", the frames or atoms in five parts of equal number
        from the smallest spread to the largest, with "rms_spread" and "rmse" of each."""
        pairs = self.pairs()
        return {
            name: {
                **_rms(error, deviation),
                "ratio": _ratio(error, deviation),
                "correlation": rank_correlation(*pairs[name]),
                "bins": _bins(error, deviation),
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


def _rms(error: Tensor, deviation: Tensor) -> dict[str, float]:
    rms_spread, rmse = (float(values.square().mean().sqrt()) for values in (deviation, error))
    return {"rms_spread": rms_spread, "rmse": rmse}


def _ratio(error: Tensor, deviation: Tensor) -> float | None:
    """None for members that agree, as copies do."""
    found = _rms(error, deviation)
    return found["rmse"] / found["rms_spread"] if found["rms_spread"] else None


def _bins(error: Tensor, deviation: Tensor) -> list[dict[str, float]]:
    parts = deviation.norm(dim=1).argsort().tensor_split(_BINS)
    return [_rms(error[part], deviation[part]) for part in parts if len(part)]


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: the correlation of the ranks, −1 … 1; 0 for fewer than three values, or equal ones."""
    if len(a) < 3 or any(bool((values == values[0]).all()) for values in (a, b)):
        return 0.0
    ranks = [values.argsort().argsort().double() for values in (a, b)]
    x, y = (r - r.mean() for r in ranks)
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0
