"""`torchmdnet2 evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .common import (
    Command,
    add_allow_untrained_charge,
    add_coulomb,
    add_device,
    add_model,
    frame_numbers,
    keeping,
    note,
    opening,
    output_file,
    print_json,
    print_table,
    refuse_idle,
    split_index,
)

if TYPE_CHECKING:
    from ..data import Dataset
    from ..training.reporting.evaluation import EnsembleEvaluation

__all__ = ["add"]

_UNITS = ("energy", "length", "forces", "stress", "dipole")
_LABELS = ("energy", "forces", "stress", "virial", "charges", "dipole")
_KEYS = (*_LABELS, "charge", "spin")


def add(command: Command) -> None:
    """Declare the arguments."""
    test = command("evaluate", _evaluate, "compute errors on labelled frames, by property and element")
    add_model(test, "; or an ensemble.json")
    test.add_argument(
        "data",
        nargs="+",
        help="data files: extended XYZ, HDF5, ASE databases …; some frames as file@0:5. More .tmn files before them "
        "form an ensemble",
    )
    test.add_argument(
        "--format", help="format of the data, as data.format of a training (default: auto, by the name of a file)"
    )
    for name in _KEYS:
        none = "none" if name in _LABELS else "as the data state it"
        test.add_argument(
            f"--{name}-key", metavar="NAME", help=f"{name} in the data; null: {none} (default: as trained)"
        )
    for name in _UNITS:
        test.add_argument(f"--{name}-unit", metavar="UNIT", help=f"unit of {name} in the data (default: as trained)")
    test.add_argument("--split", metavar="FILE", help="splits.json of a training run: only its test frames")
    test.add_argument("--subset", choices=["train", "validation", "test"], help="frames of --split (default: test)")
    test.add_argument("--batch-size", type=int, default=32, help="frames of a batch (default: 32)")
    test.add_argument("--output", metavar="FILE", help=".xyz file to write: predictions, and labels as reference_…")
    test.add_argument("--unlabelled", action="store_true", help="the data have no labels: only predict, to --output")
    test.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_coulomb(test)
    add_allow_untrained_charge(test)
    add_device(test, dtype="float64")


def _evaluate(options: argparse.Namespace) -> None:
    from ..checkpoint import load
    from ..core.files import written_aside
    from ..data import data_files
    from ..ensemble import Ensemble
    from ..errors import BadConfig
    from ..potential.potential import Result, has_dipole
    from ..training.config.sections import label_keys, label_units, predicted_shapes
    from ..training.reporting.evaluation import evaluate, evaluate_ensemble, predicted_frames, write_frames
    from ..training.steps.batches import Batch, Frames
    from ..training.steps.trainer import Properties

    if options.batch_size < 1:
        raise BadConfig(f"--batch-size must be at least 1, got {options.batch_size}")
    models = _models(options)
    sources = [split_index(path) for path in options.data]
    files = [data_files([file], options.format) for file, _ in sources]
    read = [file for found in files for file in found]
    output = None
    if options.output is not None:
        inputs = [options.model, *models, *read, *([options.split] if options.split else [])]
        output = output_file(options.output, (".xyz", ".extxyz"), inputs, "--output")
    settings = opening(options, models)
    potentials = [load(model, **settings) for model in models]
    if len(potentials) == 1:
        potentials = potentials[0].members
        models = models if len(potentials) == 1 else [f"{models[0]}, member {k}" for k in range(len(potentials))]
    ensemble = Ensemble(potentials) if len(potentials) > 1 else None
    potential = potentials[0]
    config = potential.metadata.get("config")
    trained = (config.get("data") or {}) if isinstance(config, dict) else {}  # metadata may hold anything
    keys = _keys(options, trained.get("keys") or {"energy": "energy", "forces": "forces"})
    units = {**(trained.get("units") or {}), **_given(options, "unit")}
    shapes = predicted_shapes(potential)
    keys, units = label_keys(keys, shapes), label_units(units, shapes)
    for name, is_predicted in {"charges": "charges" in shapes, "dipole": has_dipole(potential.outputs)}.items():
        if getattr(options, f"{name}_key") not in (None, "null") and not is_predicted:
            raise BadConfig(f"--{name}-key: {options.model} does not predict {name}")
    wanted = Properties(forces="forces" in keys, stress="stress" in keys or "virial" in keys)
    if options.unlabelled:
        if output is None:
            raise BadConfig("--unlabelled: without labels there are no errors; give --output for the predictions")
        of_labels = [f"{name}_key" for name in _LABELS] + [f"{name}_unit" for name in _UNITS if name != "length"]
        refuse_idle(options, [*of_labels, "json"], "with --unlabelled, no labels are read and no errors are printed")
        keys = {name: key for name, key in keys.items() if name in ("charge", "spin", "numbers", "positions")}
    elif not keys.keys() - {"charge", "spin", "numbers", "positions"}:
        raise BadConfig("no labels are left to compare with; to predict only, give --unlabelled and --output")
    dataset = _opened(options, read, keys, units)
    _refuse_idle_units(options, dataset)
    chosen = _frames_of_split(options, dataset) if options.split or options.subset else _frames(dataset, sources, files)
    frames = Frames(dataset, chosen, (ensemble or potential).cutoff, cache_bytes=0)
    plain = trained.get("units") or {}
    with ExitStack() as stack:
        file = None
        if output is not None:
            stack.enter_context(keeping(output))
            file = stack.enter_context(written_aside(output, keep=True))

        periodic = False

        def write(batch: Batch, result: Result) -> None:
            nonlocal periodic
            periodic = periodic or bool(batch.sample.system.pbc.any())
            if file is not None:
                names = [dataset.name(index) for index in batch.frames]
                write_frames(file, predicted_frames(batch, result, potential.outputs, names))

        if ensemble is not None:
            together = evaluate_ensemble(ensemble, frames, wanted, options.batch_size, plain, write)
            errors = together.errors
        else:
            errors = evaluate(
                potential, frames, wanted, options.batch_size, keep_pairs=False, units=plain, each=write
            ).errors
    if options.coulomb != "pme" and not periodic:
        note(f"--coulomb {options.coulomb} had no effect: no frame is periodic")
    title = f"{options.model} on {len(frames)} frames of {', '.join(options.data)}"
    if options.unlabelled:
        print(f"{len(frames)} frames are in {output}")
    elif options.json:
        more = {}
        if ensemble is not None:
            alone = [{"file": str(model), **own} for model, own in zip(models, together.members, strict=True)]
            more = {"members": alone, "spread": together.spread.summary()}
        print_json({"frames": len(frames), **errors, **more})
    elif ensemble is None:
        _print_errors(errors, title)
    else:
        _print_errors(errors, f"mean of {len(models)} models on {len(frames)} frames of {', '.join(options.data)}")
        _print_members(models, together)


def _models(options: argparse.Namespace) -> list[str]:
    """Return the models of the command line, one or the members of an ensemble, and remove them from the data.

    Raises:
        BadConfig: no data are given.
    """
    from ..ensemble import read_ensemble
    from ..errors import BadConfig
    from ..potentials import is_name

    models = [options.model]
    while options.data and (options.data[0].endswith(".tmn") or is_name(options.data[0])):
        models.append(options.data.pop(0))
    if not options.data and not (options.model.endswith((".tmn", ".json")) or is_name(options.model)):
        raise BadConfig(f"{models[1]} is a model, but data are expected there: the model comes first")
    if not options.data:
        raise BadConfig("only models are given: name the data too")
    if len(models) == 1 and options.model.endswith(".json"):
        return [str(path) for path in read_ensemble(options.model)]
    return models


def _given(options: argparse.Namespace, kind: str) -> dict[str, str | None]:
    """Return the keys or units of the command line."""
    named = {name: getattr(options, f"{name}_{kind}", None) for name in ("length", *_KEYS)}
    return {name: None if value == "null" else value for name, value in named.items() if value is not None}


def _keys(options: argparse.Namespace, trained: dict[str, Any]) -> dict[str, Any]:
    """Return the command line's value, else that of the training; stress and virial replace each other."""
    given = _given(options, "key")
    other = {"stress": "virial", "virial": "stress"}
    replaced = [other[name] for name in given if name in other and given[name] is not None]
    return {**{name: key for name, key in trained.items() if name not in replaced}, **given}


def _opened(options: argparse.Namespace, files: list[str], keys: dict[str, str], units: dict[str, str]) -> Dataset:
    """Open the data; labels of the training other than energy and forces may be missing.

    Raises:
        BadData: a label that the command line names is missing, or all labels are.
    """
    from ..data import LABELS, missing_keys, open_dataset
    from ..training.config.sections import property_of

    labels = [name for name in keys if name in LABELS or name == "virial"]
    optional = [name for name in labels if name not in {"energy", "forces", *_given(options, "key")}]
    dataset = open_dataset(
        files if len(files) > 1 else files[0], keys=keys, units=units, format=options.format, optional=optional
    )
    parts = getattr(dataset, "datasets", [dataset])
    absent = [name for name in optional if not any(part.counts[name] for part in parts)]
    if absent == labels:
        missing_keys(parts)
    for name in absent:
        note(f"no frame has '{keys[name]}', the key of {property_of(name)} in the training; this label is left out")
    return dataset


def _refuse_idle_units(options: argparse.Namespace, dataset: Dataset) -> None:
    """Raise BadConfig for units of labels that the data do not have, or that are not read."""
    derived = {"energy": ("energy", "forces", "stress", "virial")}  # whose units may follow from it
    parts = getattr(dataset, "datasets", [dataset])
    for name in _UNITS:
        if name != "length" and not any(part.counts[label] for part in parts for label in derived.get(name, (name,))):
            refuse_idle(options, [f"{name}_unit"], f"no {name} is read from the data; see --{name}-key")


def _frames(dataset: Dataset, sources: Sequence[tuple[str, str | None]], files: Sequence[list[str]]) -> list[int]:
    """Return the indices of the frames that file@index selects, over all files in order.

    Raises:
        BadConfig: an index is not valid, or selects no frame.
    """
    from ..errors import BadConfig

    if all(index is None for _, index in sources):
        return list(range(len(dataset)))
    parts = getattr(dataset, "datasets", [dataset])
    if len(parts) != len(sources) or any(len(found) > 1 for found in files):
        raise BadConfig("file@index chooses frames of one file: name the files one by one")
    chosen: list[int] = []
    first = 0
    for (file, index), part in zip(sources, parts, strict=True):
        chosen += [first + frame for frame in frame_numbers(file, index, len(part))]
        first += len(part)
    return chosen


def _frames_of_split(options: argparse.Namespace, dataset: Dataset) -> list[int]:
    from ..data import read_splits
    from ..errors import BadConfig

    if options.split is None:
        raise BadConfig("--subset chooses from a split: also give --split")
    if any(index is not None for _, index in map(split_index, options.data)):
        raise BadConfig("--split chooses the frames: name the files without @")
    subset = options.subset or "test"
    found = read_splits(options.split, dataset, options.data)
    if subset not in found:
        raise BadConfig(f"{options.split}: the file has no '{subset}' frames of these data, only {', '.join(found)}")
    return found[subset]


def _print_errors(errors: dict[str, Any], title: str) -> None:
    from ..training.steps.loss import shown

    rows = []
    for name, value in errors.items():
        entries = {f"forces on {z}": e for z, e in value.items()} if name == "forces_by_element" else {name: value}
        for label, error in entries.items():
            (mae, unit), (rmse, _) = (shown(error[kind], error["unit"]) for kind in ("mae", "rmse"))
            rows.append([label.replace("_", " "), f"{mae:.3f}", f"{rmse:.3f}", unit, str(error["count"])])
    print_table(title, ("property", "MAE", "RMSE", "unit", "labels"), rows, left=(0, 3))


def _print_members(models: Sequence[str], found: EnsembleEvaluation) -> None:
    """Print the RMSE of each member, the spread of the members and the error of their mean."""
    from ..training.steps.loss import shown

    names = [name for name in found.errors if name != "forces_by_element"]
    heads = [f"{name.replace('_', ' ')}, {shown(0, found.errors[name]['unit'])[1] or '1'}" for name in names]
    every = [*zip(models, found.members, strict=True), ("mean of all", found.errors)]
    rows = [
        [model, *(f"{shown(errors[name]['rmse'], errors[name]['unit'])[0]:.3f}" for name in names)]
        for model, errors in every
    ]
    print_table("RMSE of the members", ["member", *heads], rows, left=(0,))
    rows = []
    for name, value in found.spread.summary().items():
        (spread, unit), (rmse, _) = (shown(value[key], value["unit"]) for key in ("rms_spread", "rmse"))
        ratio = "–" if value["ratio"] is None else f"{value['ratio']:.2f}"
        correlation = f"{value['correlation']:.2f}"
        rows.append([name.replace("_", " "), f"{spread:.3f}", f"{rmse:.3f}", unit, ratio, correlation])
    heads = ["property", "rms spread", "RMSE", "unit", "RMSE / spread", "rank correlation"]
    print_table("spread of the members and error of their mean", heads, rows, left=(0, 3))
