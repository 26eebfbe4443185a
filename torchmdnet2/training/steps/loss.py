"""Errors of predictions and the loss, masked by which labels are present.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...data.labels import CONFIG_TYPE, GROUP, LABELS, LEVEL, kind_code
from ...potential.potential import SYMBOLS, Result
from ...system import System
from ..config.sections import LOSS_WEIGHT, RELATIVE, LossConfig, prediction, property_of, unit_of

__all__ = [
    "NUM_ELEMENTS", "UNITS", "ErrorSums", "Residual", "atoms_per_system", "frame_weights", "in_words", "penalty",
    "penalty_sums", "relative_errors", "residuals", "shown", "total_loss",
]  # fmt: skip


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
    """Return errors of the properties that were both predicted and labelled.

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
    if GROUP in labels and "energy" in found:
        found[RELATIVE] = _relative(found["energy"], labels[GROUP], labels.get(LEVEL))
    return found


def _relative(energy: Residual, group: Tensor, level: Tensor | None) -> Residual:
    """Return errors of energies relative to the mean of their group, [B]; absent for frames that are alone.

    A group at two levels of theory counts as two. The frames of a group are found by comparing all pairs, [B, B]: the
    sizes of all tensors are known before, as a CUDA graph needs.
    """
    same = (group[:, None] == group) & energy.present & energy.present[:, None]  # NaN, no group, equals nothing
    if level is not None:
        same = same & (level[:, None] == level)
    count = same.sum(1)
    mean = same.to(energy.error) @ energy.error / count.clamp(min=1)
    present = count > 1
    return Residual(torch.where(present, energy.error - mean, 0.0), present)


def relative_errors(batches: Sequence[tuple[Residual, Tensor]]) -> Residual:
    """Return errors of energies relative to the mean of their group over all batches, [B] float64 on the CPU; absent
    for frames that are alone.

    Args:
        batches: errors of energies and numbers of the groups (NaN: none) of each batch, of one level of theory.
    """
    error, present, group = (
        torch.cat([part.detach().cpu() for part in parts])
        for parts in zip(*((energy.error.double(), energy.present, group) for energy, group in batches), strict=True)
    )
    present = present & ~group.isnan()
    _, own = torch.unique(group[present], return_inverse=True)
    count = torch.bincount(own)
    mean = error.new_zeros(len(count)).index_add(0, own, error[present]) / count
    error = torch.zeros_like(error).masked_scatter(present, error[present] - mean[own])
    return Residual(error, present.masked_scatter(present, count[own] > 1))


def _order(name: str) -> tuple[int, str]:
    """Return the key by which labels are sorted, so that sums do not depend on their order in the file."""
    known = list(LABELS)
    return (known.index(name) if name in known else len(known), name)


def penalty(error: Tensor, kind: str, delta: float) -> Tensor:
    """Return ℓ(error), elementwise: error², |error|, or Huber's (½ error² up to delta, then linear)."""
    if kind == "mse":
        return error * error
    if kind == "l1":
        return error.abs()
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


def atoms_per_system(system: System) -> Tensor:
    """Return the number of atoms of each structure, [B] float64."""
    return system.atom_counts.double()


def frame_weights(labels: Mapping[str, Tensor], config: LossConfig) -> Tensor | None:
    """Return the weight of each frame, [B] float64; None if all are 1.

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
    """Return Σ w ℓ over the labels present, and their number (both scalars), by weighted property.

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
                own = own[system.batch] if name != RELATIVE and LABELS[name].per_atom else own
                losses = losses * own.reshape(-1, *[1] * (losses.ndim - 1))
            sums[name] = (losses.sum(), residual.present.sum())
    return sums


def total_loss(sums: Mapping[str, tuple[Tensor, Tensor]], config: LossConfig) -> Tensor:
    """Return the weighted sum of the means, a scalar; properties without any label contribute 0.

    Raises:
        ValueError: none of the weighted properties was both predicted and labelled.
    """
    if not sums:
        raise ValueError("no label to train on: none of the properties with a weight is in the data")
    return sum(  # type: ignore[return-value]
        (config.weight(name) * total / count.clamp(min=1) for name, (total, count) in sums.items()), start=0.0
    )


# --- Errors over many batches: sums and counts, so that every label weighs the same however it was batched ---

NUM_ELEMENTS = len(SYMBOLS) + 10
"""Rows of a table by atomic number, also of numbers without a symbol."""

UNITS = {
    "energy": "eV",
    "energy_per_atom": "eV/atom",
    RELATIVE: "eV",
    **{name: spec.unit for name, spec in LABELS.items()},
}
"""Property -> unit of its errors; vectors and tensors by component."""


def shown(error: float, unit: str) -> tuple[float, str]:
    """Return an error in thousandths of its unit, as in (12.3, "meV/Å"); a plain number unchanged."""
    return (1e3 * error, f"m{unit}") if unit else (error, "")


def in_words(errors: Mapping[str, Any]) -> str:
    """Return "energy MAE 1.200 RMSE 1.900 meV, …" from an `ErrorSums.summary`."""
    texts = []
    for name, value in errors.items():
        if name != "forces_by_element":
            (mae, unit), (rmse, _) = shown(value["mae"], value["unit"]), shown(value["rmse"], value["unit"])
            texts.append(f"{name.replace('_', ' ')} MAE {mae:.3f} RMSE {rmse:.3f} {unit}".rstrip())
    return ", ".join(texts)


class ErrorSums:
    """Sums of |error| and error² by property and, for forces, by element; sums of the loss.

    Args:
        loss: the definition of the loss.
        device: of the batches; nothing is read back before a result is requested.
        units: the section `data.units` as plain data, for the units of further labels.
    """

    def __init__(self, loss: LossConfig, device: torch.device | str = "cpu", units: Mapping[str, Any] | None = None):
        self.loss_config = loss
        self.units = units
        self.device = torch.device(device)
        # name -> [count, Σ|e|, Σe²]; forces_by_element: [Z, 3] of these; loss_*: [count, Σℓ, 0]
        self.sums: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Residual], system: System, weights: Tensor | None = None) -> None:
        """Add the errors of one batch; weights [B] of its frames act on the loss only."""
        with torch.no_grad():
            for name, residual in found.items():
                error, present = residual.error.detach().double(), residual.present
                self._add(name, _three(error, present))
                if name == "energy":
                    self._add("energy_per_atom", _three(error / atoms_per_system(system).clamp(min=1), present))
                if name == "forces":
                    rows = torch.stack([present.double().sum(1), error.abs().sum(1), error.square().sum(1)], 1)
                    table = rows.new_zeros(NUM_ELEMENTS, 3).index_add(0, system.z, rows)
                    self._add("forces_by_element", table)
            for name, (total, count) in penalty_sums(found, system, self.loss_config, weights).items():
                total = total.detach().double()
                self._add(f"loss_{name}", torch.stack([count.double(), total, torch.zeros_like(total)]))

    def add_relative(self, residual: Residual) -> None:
        """Add errors of `relative_errors`."""
        self._add(RELATIVE, _three(residual.error, residual.present).to(self.device))

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Add the `sums` of another object."""
        for name, value in sums.items():
            self._add(name, value)

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def loss(self) -> float:
        """Return the weighted sum of the mean losses; NaN before anything was added."""
        parts = [
            (self.loss_config.weight(name.removeprefix("loss_")), value.tolist())
            for name, value in sorted(self.sums.items())  # in the same order after a resume
            if name.startswith("loss_")
        ]
        return sum(w * total / max(count, 1) for w, (count, total, _) in parts) if parts else math.nan

    def mae(self, name: str) -> float:
        """Return the mean absolute error of a property in its unit; NaN without labels."""
        return _errors(self.sums[name].tolist())["mae"] if name in self.sums else math.nan

    def rmse(self, name: str) -> float:
        """Return the root mean square error of a property in its unit; NaN without labels."""
        return _errors(self.sums[name].tolist())["rmse"] if name in self.sums else math.nan

    def summary(self) -> dict[str, Any]:
        """{"energy": {"mae", "rmse", "count", "unit"}, …, "forces_by_element": {"H": {…}, …}}, plain numbers."""
        result: dict[str, Any] = {}
        for name in self._properties():
            if self.sums[name][0] > 0:
                unit = UNITS[name] if name in UNITS else unit_of(name, self.units)
                result[property_of(name)] = {**_errors(self.sums[name].tolist()), "unit": unit}
        if "forces_by_element" in self.sums:
            rows = self.sums["forces_by_element"].tolist()
            result["forces_by_element"] = {
                SYMBOLS[z]: {**_errors(row), "unit": UNITS["forces"]} for z, row in enumerate(rows) if row[0] > 0
            }
        return result

    def row(self, prefix: str) -> dict[str, float]:
        """Return the loss, MAE and RMSE of all properties as one flat row, for the metrics table."""
        row = {f"{prefix}_loss": self.loss()}
        for name in self._properties():
            own = f"{prefix}_{property_of(name)}"
            row[f"{own}_mae"], row[f"{own}_rmse"] = self.mae(name), self.rmse(name)
        return row

    def _properties(self) -> list[str]:
        """Return the labels of which errors were added, in a fixed order."""
        further = sorted(name for name in self.sums if ":" in name and not name.startswith("loss_"))
        return [name for name in UNITS if name in self.sums] + further


def _three(error: Tensor, present: Tensor) -> Tensor:
    return torch.stack([present.double().sum(), error.abs().sum(), error.square().sum()])


def _errors(sums: list[float]) -> dict[str, Any]:
    count, absolute, square = sums
    if count == 0:
        return {"mae": math.nan, "rmse": math.nan, "count": 0}
    return {"mae": absolute / count, "rmse": math.sqrt(square / count), "count": int(count)}
