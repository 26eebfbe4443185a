"""Errors of predictions and the loss, masked by which labels are present.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..potential import Result
from ..system import System
from .config import LossConfig

__all__ = ["Residual", "atoms_per_system", "penalty", "residuals", "total_loss", "weights"]


@dataclass(eq=False)
class Residual:
    """Prediction − label of one property, 0 where the label is absent.

    Attributes:
        error: energy [B] in eV (float64), forces [N, 3] in eV/Å, stress [B, 3, 3] in eV/Å³.
        present: same shape; False where the label is absent (NaN).
    """

    error: Tensor
    present: Tensor


def residuals(result: Result, labels: Mapping[str, Tensor]) -> dict[str, Residual]:
    """Errors of the properties that were both predicted and labelled.

    Args:
        result: of the potential.
        labels: "energy" [B], "forces" [N, 3], "stress" [B, 3, 3]; NaN where absent.

    Returns:
        One Residual per property. Differences are formed in the label's precision (float64 for energies, which
        may be large).
    """
    found = {}
    for name, predicted in (("energy", result.energy), ("forces", result.forces), ("stress", result.stress)):
        label = labels.get(name)
        if label is None or predicted is None:
            continue
        present = torch.isfinite(label)
        if name != "energy":  # a vector or tensor with an absent component is absent
            inner = tuple(range(1, label.ndim))
            present = present.all(dim=inner, keepdim=True).expand_as(label)
        error = torch.where(present, predicted - torch.where(present, label, 0), 0)
        found[name] = Residual(error, present)
    return found


def penalty(error: Tensor, kind: str, delta: float) -> Tensor:
    """ℓ(error), elementwise: error², |error|, or Huber's (½ error² up to delta, then linear)."""
    if kind == "mse":
        return error * error
    if kind == "l1":
        return error.abs()
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


def atoms_per_system(system: System) -> Tensor:
    """[B] number of atoms of each structure, float64."""
    ones = torch.ones(system.num_atoms, dtype=torch.float64, device=system.device)
    return ones.new_zeros(system.num_systems).index_add(0, system.batch, ones)


def weights(config: LossConfig) -> dict[str, float]:
    """Weight of each property, without those that are 0."""
    table = {"energy": config.energy, "forces": config.forces, "stress": config.stress}
    return {name: weight for name, weight in table.items() if weight > 0}


def penalty_sums(found: Mapping[str, Residual], system: System, config: LossConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Per weighted property: Σ ℓ over the labels present, and how many there are (both scalars)."""
    sums = {}
    for name in weights(config):
        if name in found:
            error = found[name].error
            if name == "energy" and config.per_atom:
                error = error / atoms_per_system(system).clamp(min=1)
            sums[name] = (penalty(error, config.kind, config.huber_delta).sum(), found[name].present.sum())
    return sums


def total_loss(sums: Mapping[str, tuple[Tensor, Tensor]], config: LossConfig) -> Tensor:
    """Weighted sum of the means, a scalar; properties without any label contribute 0.

    Raises:
        ValueError: none of the weighted properties was both predicted and labelled.
    """
    if not sums:
        raise ValueError("no label to train on: none of the properties with a weight is in the data")
    table = weights(config)
    return sum((table[name] * total / count.clamp(min=1) for name, (total, count) in sums.items()), start=0.0)  # type: ignore[return-value]
