"""Errors of an ensemble on labelled frames: of the mean, of each member, and what the spread tells about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...ensemble import Ensemble, EnsembleResult, combine
from ...potential import Result
from ..config.labels import property_of, unit_of
from ..config.loss_config import LossConfig
from ..steps.batches import Batch, Frames, Loader, in_order
from ..steps.loss import atoms_per_system, residuals
from ..steps.metrics import UNITS, ErrorSums
from ..steps.trainer import Properties
from .evaluation import check_batch, predict_with_dipole
from .uncertainty import Spread

__all__ = ["EnsembleEvaluation", "evaluate_ensemble"]


@dataclass
class EnsembleEvaluation:
    """What `evaluate_ensemble` found.

    Attributes:
        errors: of the mean of the members, as `ErrorSums.summary`.
        members: of each member, in the order of the ensemble.
        spread: errors of the mean and standard deviations of the members, of the energy per atom and of every other
            label that all members predict.
    """

    errors: dict[str, Any]
    members: list[dict[str, Any]]
    spread: Spread


def evaluate_ensemble(
    ensemble: Ensemble,
    frames: Frames,
    properties: Properties,
    batch_size: int = 32,
    units: Mapping[str, Any] | None = None,
    each: Callable[[Batch, Result], None] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    check: bool = True,
) -> EnsembleEvaluation:
    """Errors on all given frames.

    Args:
        ensemble: its members' precision is that of the predictions.
        frames: labelled frames; their neighbor lists must have the ensemble's cutoff.
        properties, batch_size, units, each, batches, check: as of `evaluation.evaluate`; `each` is given the mean.

    Raises:
        UnknownElement, UntrainedCharge, ValueError: a member refuses a frame; the message names it.
    """
    device = ensemble.members[0].device
    sums, *alone = (ErrorSums(LossConfig(), device, units) for _ in range(1 + len(ensemble.members)))
    spread = Spread()
    for batch in Loader(frames)(batches or in_order(len(frames), batch_size)):
        batch = batch.to(device)
        if check:
            for member in ensemble.members:
                check_batch(member, batch, frames)
        results = [predict_with_dipole(member, batch, properties) for member in ensemble.members]
        mean = combine(results)
        if each is not None:
            each(batch, mean)
        labels, system = batch.sample.labels, batch.sample.system
        for own, result in zip(alone, results, strict=True):
            own.add(residuals(result, labels), system)
        found = residuals(mean, labels)
        sums.add(found, system)
        atoms = atoms_per_system(system).clamp(min=1)
        for name, residual in found.items():
            deviation = _deviation(mean, name)
            if deviation is None:
                continue
            known_as, error = property_of(name), residual.error
            if name == "energy":
                known_as, error, deviation = "energy_per_atom", error / atoms, deviation / atoms
            here = residual.present.reshape(len(error), -1).all(1)
            unit = UNITS[known_as] if known_as in UNITS else unit_of(name, units)
            spread.add(known_as, error[here], deviation[here], unit)
    return EnsembleEvaluation(sums.summary(), [own.summary() for own in alone], spread)


def _deviation(result: EnsembleResult, label: str) -> Tensor | None:
    """The standard deviation of what the members predict for a label; None where one of them does not predict it."""
    if hasattr(result, f"{label}_std"):
        return getattr(result, f"{label}_std")
    return result.properties_std.get(property_of(label))
