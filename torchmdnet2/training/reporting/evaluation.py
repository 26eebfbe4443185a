"""Errors of a potential on labelled frames, with the predictions kept for plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...data.labels import LABELS
from ...potential import Potential, Result
from ...priors import Atomref
from ...refusals import refuse_coincident, rename
from ...result import with_dipole
from ...system import System
from ..config.labels import prediction, property_of
from ..config.loss_config import LossConfig
from ..steps.batches import Batch, Frames, Loader, in_order
from ..steps.loss import Residual, atoms_per_system, residuals
from ..steps.metrics import ErrorSums
from ..steps.trainer import Properties, predict

__all__ = ["Evaluation", "check_batch", "evaluate"]


@dataclass
class Evaluation:
    """What `evaluate` found.

    Attributes:
        errors: MAE, RMSE, count and unit by property, and of forces by element (`ErrorSums.summary`).
        pairs: property -> (label, prediction) arrays of the labels that are present: "energy_per_atom" [n] in eV/atom,
            less the reference energies, "forces" [n] components in eV/Å, "stress" [n] components in eV/Å³, and all
            others by name.
        by_frame: rms error of each frame, [frames], NaN where it has no label: "energy_per_atom", "forces", … as in
            `pairs`; and "frame", its index in the data set.
    """

    errors: dict[str, Any]
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    by_frame: dict[str, np.ndarray] = field(default_factory=dict)


def evaluate(
    potential: Potential,
    frames: Frames,
    properties: Properties | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    keep_pairs: bool = True,
    units: Mapping[str, Any] | None = None,
    each: Callable[[Batch, Result], None] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    check: bool = True,
) -> Evaluation:
    """Errors on all given frames.

    Args:
        potential: in evaluation mode; its precision is that of the predictions.
        frames: labelled frames; their neighbor lists must have the potential's cutoff.
        properties: what is predicted besides the energy.
        batch_size: frames at a time; changes the result by rounding only.
        num_workers: data-loading processes.
        keep_pairs: keep labels and predictions too.
        units: the section `data.units` as plain data, for the units of further labels.
        each: called with every batch and the predictions for it.
        batches: which frames at a time, instead of `batch_size`.
        check: refuse frames with elements or charges that the potential does not know; a training evaluates all frames.

    Raises:
        UnknownElement, UntrainedCharge, ValueError: the potential refuses a frame; the message names it.
    """
    properties = properties or Properties()
    sums = ErrorSums(LossConfig(), potential.device, units)
    kept: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    by_frame: list[dict[str, np.ndarray]] = []
    every = Loader(frames, num_workers)(batches or in_order(len(frames), batch_size))
    for batch, result in _predictions(potential, every, frames, properties, check):
        if each is not None:
            each(batch, result)
        found = residuals(result, batch.sample.labels)
        sums.add(found, batch.sample.system)
        if keep_pairs:
            by_frame.append({"frame": np.array(batch.frames), **_rms_by_frame(found, batch.sample.system)})
        for name, residual in found.items() if keep_pairs else ():
            value = prediction(result, name)
            assert value is not None
            label, predicted = batch.sample.labels[name].double(), value.double()
            if name == "energy":
                atoms = atoms_per_system(batch.sample.system).clamp(min=1)
                alone = _references(potential, batch.sample.system)
                name, label, predicted = "energy_per_atom", (label - alone) / atoms, (predicted - alone) / atoms
            kept.setdefault(property_of(name), []).append(
                (_chosen(label, residual.present), _chosen(predicted, residual.present))
            )
    pairs = {
        name: (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
        for name, parts in kept.items()
    }
    names = dict.fromkeys(name for part in by_frame for name in part)
    absent = [np.full(len(part["frame"]), np.nan) for part in by_frame]
    columns = {
        name: np.concatenate([part.get(name, none) for part, none in zip(by_frame, absent, strict=True)])
        for name in names
    }
    return Evaluation(sums.summary(), pairs, columns)


def _predictions(
    potential: Potential, batches: Iterable[Batch], frames: Frames, properties: Properties, check: bool
) -> Iterator[tuple[Batch, Result]]:
    """What is predicted for each batch, or for its halves where the memory of a GPU is not enough."""
    for batch in batches:
        batch = batch.to(potential.device)
        if check:
            check_batch(potential, batch, frames)
        try:
            result = predict_with_dipole(potential, batch, properties)
        except torch.cuda.OutOfMemoryError:
            if len(batch.frames) == 1:
                raise
            result = None
        if result is not None:
            yield batch, result
            continue
        torch.cuda.empty_cache()  # after the exception, which holds tensors
        middle = len(batch.frames) // 2
        halves = (np.isin(frames.indices, part) for part in (batch.frames[:middle], batch.frames[middle:]))
        parts = (frames.batch(np.flatnonzero(half)) for half in halves)
        yield from _predictions(potential, parts, frames, properties, False)


def predict_with_dipole(potential: Potential, batch: Batch, properties: Properties) -> Result:
    """As `predict`, with the dipole moment of predicted charges, which no training knows."""
    result = predict(potential, batch, properties)
    result.properties = with_dipole(result.properties, result.charges, batch.sample.system)
    return result


def check_batch(potential: Potential, batch: Batch, frames: Frames) -> None:
    """Raise what the potential refuses, with the name of the frame."""
    try:
        _check_systems(potential, batch)
    except ValueError:
        for index in batch.frames:
            alone = frames.batch(np.flatnonzero(frames.indices == index)[:1])
            try:
                _check_systems(potential, alone.to(potential.device))
            except ValueError as error:
                rename(error, frames.data.name(index))
                raise
        raise


def _check_systems(potential: Potential, batch: Batch) -> None:
    system = batch.sample.system
    potential.check(system)
    refuse_coincident(batch.neighbors, system)


def _references(potential: Potential, system: System) -> torch.Tensor:
    """Reference energies of each structure, [B] eV; 0 without any."""
    alone = torch.zeros(system.num_systems, dtype=torch.float64, device=system.pos.device)
    for prior in potential.priors:
        if isinstance(prior, Atomref):
            alone.index_add_(0, system.batch, prior.table.detach().to(alone)[system.z])
    return alone


def _rms_by_frame(found: Mapping[str, Residual], system: System) -> dict[str, np.ndarray]:
    """Root mean square of the errors of each structure, by property; NaN without labels."""
    table = {}
    for name, residual in found.items():
        square, count = residual.error.double().square(), residual.present.double()
        if square.ndim > 1:
            square, count = square.flatten(1).sum(1), count.flatten(1).sum(1)
        if LABELS[name].per_atom:
            zeros = square.new_zeros(system.num_systems)
            square, count = (zeros.index_add(0, system.batch, part) for part in (square, count))
        rms = torch.where(count > 0, (square / count.clamp(min=1)).sqrt(), torch.nan)
        own = property_of(name)
        if name == "energy":
            own, rms = "energy_per_atom", rms / atoms_per_system(system).clamp(min=1)
        table[own] = rms.cpu().numpy()
    return table


def _chosen(values: torch.Tensor, present: torch.Tensor) -> np.ndarray:
    return values[present].cpu().numpy()
