"""Errors of a potential on labelled frames; predictions are kept for plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data import Sample
from ...data.extxyz import extxyz_frames
from ...data.labels import GROUP, LABELS
from ...ensemble import Ensemble, EnsembleResult, combine
from ...neighbors.neighbor_list import refuse_coincident
from ...potential.output import Output
from ...potential.potential import Potential, Result, with_dipole
from ...potential.refusals import rename
from ...priors import Atomref
from ...system import System
from ..config.sections import FRAME_LABELS, RELATIVE, LossConfig, prediction, property_of, unit_of
from ..steps.batches import Batch, Frames, Loader, in_order
from ..steps.loss import UNITS, ErrorSums, Residual, atoms_per_system, relative_errors, residuals
from ..steps.trainer import Properties, predict

__all__ = [
    "Evaluation", "MemberErrors", "Predictions", "Spread", "evaluate", "evaluate_ensemble",
]  # fmt: skip


_Found = TypeVar("_Found")


@dataclass
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        errors: MAE, RMSE, count and unit by property, and of forces by element (`ErrorSums.summary`).
        pairs: property -> (label, prediction) arrays of the labels that are present: "energy_per_atom" [n] in eV/atom,
            minus the reference energies, "forces" [n] components in eV/Å, "stress" [n] components in eV/Å³, and all
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
    units: Mapping[str, Any] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    check: bool = True,
) -> Evaluation:
    """Compute the errors on all given frames.

    Args:
        potential: in evaluation mode; its precision is that of the predictions.
        frames: labelled frames; their neighbor lists must have the potential's cutoff.
        properties: properties to predict besides the energy.
        batch_size: frames at a time; changes the result by rounding only.
        num_workers: data-loading processes.
        units: the section `data.units` as plain data, for the units of further labels.
        batches: the frames of each batch, instead of `batch_size`.
        check: refuse frames with elements or charges unknown to the potential; a training evaluates all frames.

    Raises:
        UnknownElement, UntrainedCharge, ValueError: the potential refuses a frame; the message names it.
    """
    properties = properties or Properties()
    sums = ErrorSums(LossConfig(), potential.device, units)
    kept: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    by_frame: list[dict[str, np.ndarray]] = []
    grouped: list[tuple[dict[str, np.ndarray], Residual, Tensor]] = []
    every = Loader(frames, num_workers)(batches or in_order(len(frames), batch_size))
    for batch, result in _predictions(potential, every, frames, properties, check, predict_with_dipole):
        found = residuals(result, batch.sample.labels)
        has_groups = found.pop(RELATIVE, None) is not None
        sums.add(found, batch.sample.system)
        by_frame.append({"frame": np.array(batch.frames), **_rms_by_frame(found, batch.sample.system)})
        if has_groups:
            grouped.append((by_frame[-1], found["energy"], batch.sample.labels[GROUP]))
        for name, residual in found.items():
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
    if grouped:  # whole groups, however they were batched
        relative = relative_errors([(energy, group) for _, energy, group in grouped])
        sums.add_relative(relative)
        sizes = torch.where(relative.present, relative.error.abs(), torch.nan).split([len(g) for *_, g in grouped])
        for (part, *_), size in zip(grouped, sizes, strict=True):
            part[RELATIVE] = size.numpy()
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
    potential: Potential,
    batches: Iterable[Batch],
    frames: Frames,
    properties: Properties,
    check: bool,
    predict: Callable[[Potential, Batch, Properties], _Found],
) -> Iterator[tuple[Batch, _Found]]:
    """Yield predictions for each batch, or for its halves if the memory of a GPU is too small."""
    for batch in batches:
        batch = batch.to(potential.device)
        if check:
            _check_batch(potential, batch, frames)
        try:
            result = predict(potential, batch, properties)
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
        yield from _predictions(potential, parts, frames, properties, False, predict)


def predict_with_dipole(potential: Potential, batch: Batch, properties: Properties) -> Result:
    """Predict as `predict`, with the dipole moment of predicted charges, which trainings do not use."""
    result = predict(potential, batch, properties)
    result.properties = with_dipole(result.properties, result.charges, batch.sample.system)
    return result


def _check_batch(potential: Potential, batch: Batch, frames: Frames) -> None:
    """Raise an error that names the frame that the potential refuses."""
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
    """Return the reference energies of each structure, [B] eV; 0 without any."""
    alone = torch.zeros(system.num_systems, dtype=torch.float64, device=system.pos.device)
    for prior in potential.priors:
        if isinstance(prior, Atomref):
            alone.index_add_(0, system.batch, prior.table.detach().to(alone)[system.z])
    return alone


def _rms_by_frame(found: Mapping[str, Residual], system: System) -> dict[str, np.ndarray]:
    """Return the root mean square of the errors of each structure, by property; NaN without labels."""
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


# --- Structures with what a potential predicts for them, as ase.Atoms, and as extended XYZ ---

if TYPE_CHECKING:
    from ase import Atoms


@dataclass(eq=False)
class Predictions:
    """What a potential predicts for structures, and their labels as "reference_…", as arrays.

    Attributes:
        system: the arrays of B structures with N atoms in all.
        names: [B] stored as "frame".
        values: name -> values of structures, [B, …].
        atoms: name -> values of atoms, [N] or [N, …].
        results: names of values and of atoms that are results of an ASE calculator.
        absent: name -> structures that do not have this value, [B].
    """

    system: dict[str, NDArray]
    names: list[str]
    values: dict[str, NDArray]
    atoms: dict[str, NDArray]
    results: list[str]
    absent: dict[str, NDArray]

    @classmethod
    def of(cls, sample: Sample, result: Result, outputs: Mapping[str, Output], names: list[str]) -> Predictions:
        """Return predictions and labels of structures; of an ensemble also the spread, as `energy_std` (eV) and
        `forces_std` [N, 3] (eV/Å).

        Args:
            sample: the structures and their labels.
            result: the predictions for them.
            outputs: those of the potential.
            names: of the structures.
        """
        system = sample.system.to("cpu")
        per_atom = {"forces": result.forces, "charges": result.charges}
        whole: dict[str, Tensor | None] = {"energy": result.energy, "stress": result.stress}
        found = {name for name, value in (per_atom | whole).items() if value is not None}
        results: list[str] = [name for name in ("energy", "forces", "charges", "stress") if name in found]
        absent = {"stress": (system.volume <= 0).numpy(), "dipole": system.pbc.any(1).numpy()}
        values: dict[str, Tensor | None] = {}
        atoms: dict[str, Tensor | None] = {}
        for name, value in result.properties.items():
            if name == "dipole":  # that of charges is NaN in cells
                results.append(name)
                whole[name] = value
            elif name not in found:  # charges, of their head
                (atoms if outputs[name].per_atom else values)[name] = value
        if isinstance(result, EnsembleResult):
            values["energy_std"], atoms["forces_std"] = result.energy_std, result.forces_std
        for name, value in sample.labels.items():
            if name not in FRAME_LABELS:
                key = f"reference_{property_of(name)}"
                if LABELS[name].per_atom:
                    atoms[key] = value
                else:
                    values[key], absent[key] = value, value.isnan().reshape(len(value), -1).all(1).cpu().numpy()
        return cls(
            {field.name: getattr(system, field.name).detach().numpy() for field in fields(System)}, names,
            {name: value.double().numpy() for name, value in _on_cpu(values | whole)},
            {name: value.numpy() for name, value in _on_cpu(atoms | per_atom)}, results, absent,
        )  # fmt: skip

    def infos(self) -> Iterator[dict[str, Any]]:
        """Yield the values of each structure: its state and predictions that ASE does not know, "frame", labels, and
        results."""
        labels = [name for name in self.values if name.startswith("reference_")]
        first = [name for name in self.values if name not in (*labels, *self.results)]
        last = [name for name in self.results if name in self.values]
        state = zip(self.system["charge"].tolist(), self.system["spin"].tolist(), strict=True)
        for k, (charge, spin) in enumerate(state):
            info: dict[str, Any] = {"charge": int(charge) if charge == int(charge) else charge} if charge else {}
            info |= {"spin": spin} if spin else {}
            info |= {name: self._value(name, k) for name in first}
            info["frame"] = self.names[k]
            info |= {name: self._value(name, k) for name in (*labels, *last)
                     if not (name in self.absent and self.absent[name][k])}  # fmt: skip
            yield info

    def _value(self, name: str, k: int) -> Any:
        value = self.values[name]
        return value[k] if value.ndim > 1 else float(value[k])

    def frames(self) -> list[Atoms]:
        """Return the structures, with results in their calculators, and all else in `info` and `arrays`."""
        from ase import Atoms
        from ase.calculators.singlepoint import SinglePointCalculator

        system, found = self.system, []
        ends = np.cumsum(np.bincount(system["batch"], minlength=len(self.names)))
        for k, info in enumerate(self.infos()):
            part = slice(ends[k - 1] if k else 0, ends[k])
            arrays = {name: value[part] for name, value in self.atoms.items()}
            results = {name: source.pop(name) for name in self.results for source in (info, arrays) if name in source}
            if "stress" in results:
                results["stress"] = results["stress"][[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
            atoms = Atoms(
                numbers=system["z"][part], positions=system["pos"][part], cell=system["cell"][k], pbc=system["pbc"][k],
                info=info,
            )  # fmt: skip
            atoms.arrays |= arrays
            atoms.calc = SinglePointCalculator(atoms, **results)
            found.append(atoms)
        return found

    def text(self) -> str:
        """Return the structures as ASE writes `frames` to extended XYZ."""
        system = self.system
        atoms = sorted(self.atoms.items(), key=lambda item: item[0] in self.results)
        sizes = np.bincount(system["batch"], minlength=len(self.names))
        arrays = {"positions": system["pos"], **dict(atoms)}
        return "".join(extxyz_frames(system["z"], sizes, system["cell"], system["pbc"], arrays, self.infos()))


def _on_cpu(values: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.detach().cpu()) for name, value in values.items() if value is not None)


# --- The spread of an ensemble, compared with its errors ---

_BINS = 5


class Spread:
    """Collects errors of the mean and standard deviations of the members, to see whether the spread shows the error."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._units: dict[str, str] = {}
        self._stride = 1

    def add(self, name: str, error: Tensor, deviation: Tensor, unit: str) -> None:
        """Add errors of the mean and deviations of the members, of one property, [n, …] with vectors and tensors
        whole."""
        n = len(error)
        pair = error.detach().double().cpu().reshape(n, -1), deviation.double().cpu().reshape(n, -1)
        self._rows.setdefault(name, []).append(pair)
        self._units[name] = unit

    def add_errors(
        self,
        found: Mapping[str, Residual],
        mean: EnsembleResult,
        system: System,
        units: Mapping[str, Any] | None = None,
    ) -> None:
        """Add all errors of a batch whose deviation is known.

        Args:
            found: errors of the mean, of `residuals`.
            mean: of the members.
            system: the structures.
            units: as of `evaluate`.
        """
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
            self.add(known_as, error[here], deviation[here], unit)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return |error| [n] and deviation [n] by property; of vectors and tensors their lengths (Frobenius)."""
        return {name: (error.norm(dim=1), deviation.norm(dim=1)) for name, (error, deviation) in self._joined().items()}

    def rows(self, stride: int, seed: int) -> list[tuple[str, str, int, NDArray, NDArray]]:
        """Return one in `stride` of the values, drawn at random, as arrays: name, unit, stride, errors and
        deviations. Regular ones would be the same atoms of each molecule."""
        drawn = {name: _drawn(pair, stride, seed) for name, pair in self._joined().items()}
        return [
            (name, self._units[name], stride, error.numpy(), deviation.numpy())
            for name, (error, deviation) in drawn.items()
        ]

    def add_rows(self, rows: Iterable[tuple[str, str, int, Any, Any]]) -> None:
        """Add the `rows` of other objects, and keep as few of all as of those with the largest stride."""
        for name, unit, stride, *values in rows:
            if stride > self._stride:
                part = stride // self._stride
                self._rows = {own: [_drawn(pair, part, stride)] for own, pair in self._joined().items()}
                self._stride = stride
            if len(values[0]):
                error, deviation = (torch.as_tensor(value, dtype=torch.float64) for value in values)
                self.add(name, error, deviation, unit)

    def summary(self) -> dict[str, Any]:
        """By property: "rms_spread" and "rmse", both by component as in `ErrorSums`, and their relation: "ratio",
        rmse over rms_spread, 1 where the spread is as large as the error; "correlation" of the ranks
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


def _drawn(pair: tuple[Tensor, Tensor], stride: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one in `stride` of the rows, in order."""
    random = torch.rand(len(pair[0]), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = random * stride < 1
    return pair[0][chosen], pair[1][chosen]


def _rms(error: Tensor, deviation: Tensor) -> dict[str, float]:
    rms_spread, rmse = (float(values.square().mean().sqrt()) for values in (deviation, error))
    return {"rms_spread": rms_spread, "rmse": rmse}


def _ratio(error: Tensor, deviation: Tensor) -> float | None:
    """Return RMSE over spread; None for members that agree, as copies do."""
    found = _rms(error, deviation)
    return found["rmse"] / found["rms_spread"] if found["rms_spread"] else None


def _bins(error: Tensor, deviation: Tensor) -> list[dict[str, float]]:
    parts = deviation.norm(dim=1).argsort().tensor_split(_BINS)
    return [_rms(error[part], deviation[part]) for part in parts if len(part)]


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of the ranks, −1 … 1; 0 for fewer than three values, or equal ones."""
    if len(a) < 3 or any(bool((values == values[0]).all()) for values in (a, b)):
        return 0.0
    ranks = [values.argsort().argsort().double() for values in (a, b)]
    x, y = (r - r.mean() for r in ranks)
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


# --- Errors of an ensemble on labelled frames: of the mean, of each member, and what the spread says about them ---


class MemberErrors:
    """Collects errors of a potential; of several those of the mean, those of each, and their spread.

    Args:
        count: number of potentials.
        device: of the sums.
        units: as of `evaluate`.

    Attributes:
        sums: errors of the only potential, or of the mean and then of each.
        spread: of several: errors of the mean and standard deviations, of the energy per atom and of every other label
            that all predict.
    """

    def __init__(self, count: int, device: torch.device, units: Mapping[str, Any] | None = None):
        self.sums = [ErrorSums(LossConfig(), device, units) for _ in range(1 + (count > 1) * count)]
        self.spread = Spread()
        self._units = units

    def add(self, results: Sequence[Result], sample: Sample) -> Result:
        """Add the errors of the results of each potential for the structures of a sample; returns the only result, or
        the mean."""
        labels, system = sample.labels, sample.system
        mean = combine(results) if len(results) > 1 else results[0]
        errors = residuals(mean, labels)
        self.sums[0].add(errors, system)
        if isinstance(mean, EnsembleResult):
            for own, result in zip(self.sums[1:], results, strict=True):
                own.add(residuals(result, labels), system)
            self.spread.add_errors(errors, mean, system, self._units)
        return mean


def evaluate_ensemble(
    ensemble: Ensemble,
    frames: Frames,
    properties: Properties,
    units: Mapping[str, Any] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
) -> MemberErrors:
    """Compute the errors on all given frames, which are not checked: a training evaluates all of them.

    Args:
        ensemble: its members' precision is that of the predictions.
        frames: labelled frames; their neighbor lists must have the ensemble's cutoff.
        properties, units, batches: as for `evaluate`.
    """
    members = ensemble.members
    errors = MemberErrors(len(members), members[0].device, units)

    def by_each(_: Potential, batch: Batch, properties: Properties) -> list[Result]:
        return [predict_with_dipole(member, batch, properties) for member in members]

    every = Loader(frames)(batches or in_order(len(frames), 32))
    for batch, results in _predictions(members[0], every, frames, properties, False, by_each):
        errors.add(results, batch.sample)
    return errors


def _deviation(result: EnsembleResult, label: str) -> Tensor | None:
    """Return the standard deviation of the members' predictions for a label; None if one of them does not predict
    it."""
    if hasattr(result, f"{label}_std"):
        return getattr(result, f"{label}_std")
    return result.properties_std.get(property_of(label))
