"""Errors of predictions and the loss, masked by which labels are present.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.kinds import CONFIG_TYPE, kind_code
from ...data.labels import LABELS
from ...potential import Result
from ...system import System
from ..config.labels import LOSS_WEIGHT, prediction
from ..config.loss_config import LossConfig

__all__ = ["Residual", "atoms_per_system", "frame_weights", "penalty", "penalty_sums", "residuals", "total_loss"]


@dataclass(eq=False)
class Residual:
    """Prediction − label of one property, 0 where the label is absent.

    Attributes:
        error: energy [B] in eV (float64), forces [N, 3] in eV/Å, stress [B, 3, 3] in eV/Å³, dipole [B, 3] in e·Å,
            charges [N] in e, further labels in their own shape and unit.
        present: same shape; False where the label is absent (NaN).
    """

    error: Tensor
    present: Tensor


def residuals(result: Result, labels: Mapping[str, Tensor]) -> dict[str, Residual]:
    """Errors of the properties that were both predicted and labelled.

    Args:
        result: of the potential.
        labels: by name as in `data.labels.LABELS`; NaN where absent.

    Returns:
        One Residual per label. Differences are formed in the label's precision (float64 for energies, which may be
        large).
    """
    found = {}
    for name in sorted(labels, key=_order):
        label, predicted = labels[name], prediction(result, name)
        if predicted is None:
            continue
        present = torch.isfinite(label)
        if label.ndim > 1:  # a vector or tensor with an absent component is absent
            present = present.all(dim=tuple(range(1, label.ndim)), keepdim=True).expand_as(label)
        error = torch.where(present, predicted - torch.where(present, label, 0), 0)
        found[name] = Residual(error, present)
    return found


def _order(name: str) -> tuple[int, str]:
    """The same sum in the same order, whatever the order of the labels in the file."""
    known = list(LABELS)
    return (known.index(name) if name in known else len(known), name)


def penalty(error: Tensor, kind: str, delta: float) -> Tensor:
    """ℓ(error), elementwise: error², |error|, or Huber's (½ error² up to delta, then linear)."""
    if kind == "mse":
        return error * error
    if kind == "l1":
        return error.abs()
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


def atoms_per_system(system: System) -> Tensor:
    """[B] number of atoms of each structure, float64."""
    return system.atom_counts.double()


def frame_weights(labels: Mapping[str, Tensor], config: LossConfig) -> Tensor | None:
    """What each frame counts for, [B] float64; None where all count for 1.

    Args:
        labels: of the frames; NaN where a frame has no weight or kind.
        config: with the weights of kinds.
    """
    own, kind = labels.get(LOSS_WEIGHT), labels.get(CONFIG_TYPE)
    weight = None if own is None else torch.where(torch.isnan(own), 1.0, own.double())
    if kind is not None and config.config_weights:
        weight = torch.ones_like(kind, dtype=torch.float64) if weight is None else weight
        for word, factor in config.config_weights.items():
            weight = torch.where(kind == kind_code(word), weight * factor, weight)
    return weight


def penalty_sums(
    found: Mapping[str, Residual], system: System, config: LossConfig, weights: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per weighted property: Σ w ℓ over the labels present, and how many there are (both scalars).

    Args:
        found: of `residuals`.
        system: B structures.
        config: weights of the properties, and ℓ.
        weights: w of each structure, [B]; None: 1.
    """
    sums = {}
    for name, residual in found.items():
        if config.weight(name) > 0:
            error = residual.error
            if name == "energy" and config.per_atom:
                error = error / atoms_per_system(system).clamp(min=1)
            losses = penalty(error, config.kind_of(name), config.huber_delta)
            if weights is not None:
                own = weights.to(losses.dtype)
                own = own[system.batch] if LABELS[name].per_atom else own
                losses = losses * own.reshape(-1, *[1] * (losses.ndim - 1))
            sums[name] = (losses.sum(), residual.present.sum())
    return sums


def total_loss(sums: Mapping[str, tuple[Tensor, Tensor]], config: LossConfig) -> Tensor:
    """Weighted sum of the means, a scalar; properties without any label contribute 0.

    Raises:
        ValueError: none of the weighted properties was both predicted and labelled.
    """
    if not sums:
        raise ValueError("no label to train on: none of the properties with a weight is in the data")
    return sum(  # type: ignore[return-value]
        (config.weight(name) * total / count.clamp(min=1) for name, (total, count) in sums.items()), start=0.0
    )
