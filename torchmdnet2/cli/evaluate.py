"""`torchmdnet2 evaluate`."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import Command, add_device, device_name, make_console

if TYPE_CHECKING:
    from ..data import Dataset

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    test = command("evaluate", _evaluate, "errors of a potential on labelled frames, by property and element")
    test.add_argument("model", help=".tmn file")
    test.add_argument("data", nargs="+", help="data files: extended XYZ, HDF5, ASE databases and trajectories")
    for name in ("energy", "forces", "stress"):
        test.add_argument(f"--{name}-key", metavar="NAME", help=f"name of the {name} in the data; null: not there")
    for name in ("energy", "length", "forces", "stress"):
        test.add_argument(f"--{name}-unit", metavar="UNIT", help=f"unit of {name} in the data (default: as trained)")
    test.add_argument("--split", metavar="FILE", help="splits.json of a training run: only its test frames")
    test.add_argument("--subset", choices=["train", "validation", "test"], help="with --split (default: test)")
    test.add_argument("--batch-size", type=int, default=32, help="frames at a time (default: 32)")
    test.add_argument("--output", metavar="FILE", help="extended XYZ with the predictions, labels as reference_…")
    test.add_argument("--unlabelled", action="store_true", help="the data have no labels: only predict, to --output")
    test.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_device(test, dtype="float64")


def _evaluate(options: argparse.Namespace) -> None:
    from ..adapters.model import device_of, dtype_of
    from ..checkpoint import load
    from ..data import open_dataset
    from ..errors import BadConfig
    from ..potential import Result
    from ..training.config.labels import label_keys, label_units
    from ..training.config.parts import predicted_shapes
    from ..training.reporting.evaluation import evaluate
    from ..training.reporting.predictions import PredictionFile, predicted_frames
    from ..training.steps.batches import Batch, Frames
    from ..training.steps.trainer import Properties

    if options.batch_size < 1:
        raise BadConfig(f"--batch-size must be at least 1, got {options.batch_size}")
    read = {Path(path).resolve() for path in (options.model, *options.data)}
    if options.output is not None and Path(options.output).resolve() in read:
        raise BadConfig(f"--output: {options.output} is read by this command and would be written too: choose another")
    potential = load(options.model, device_of(device_name(options.device)), dtype_of(options.dtype))
    config = potential.metadata.get("config")
    trained = (config.get("data") or {}) if isinstance(config, dict) else {}  # metadata may hold anything
    keys = _chosen(options, "key", trained.get("keys") or {"energy": "energy", "forces": "forces"})
    units = _chosen(options, "unit", trained.get("units") or {})
    shapes = predicted_shapes(potential)
    keys, units = label_keys(keys, shapes), label_units(units, shapes)
    wanted = Properties(forces="forces" in keys, stress="stress" in keys or "virial" in keys)
    if options.unlabelled:
        if options.output is None:
            raise BadConfig("--unlabelled: without labels there are no errors; give --output for the predictions")
        keys = {name: key for name, key in keys.items() if name in ("charge", "spin", "numbers")}
    dataset = open_dataset(options.data if len(options.data) > 1 else options.data[0], keys=keys, units=units)
    frames = Frames(dataset, _frames_of_split(options, dataset), potential.cutoff, cache_bytes=0)
    plain = trained.get("units") or {}
    with PredictionFile(options.output) if options.output else nullcontext() as file:

        def write(batch: Batch, result: Result) -> None:
            if file is not None:
                file.add(predicted_frames(batch, result, [dataset.name(index) for index in batch.frames]))

        found = evaluate(potential, frames, wanted, options.batch_size, keep_pairs=False, units=plain, each=write)
    if options.unlabelled:
        print(f"{len(frames)} frames are in {options.output}")
    elif options.json:
        print(json.dumps({"frames": len(frames), **found.errors}, indent=1, ensure_ascii=False))
    else:
        _print_errors(found.errors, f"{options.model} on {len(frames)} frames of {', '.join(options.data)}")


def _chosen(options: argparse.Namespace, kind: str, trained: dict[str, Any]) -> dict[str, Any]:
    """Keys or units: what the command line says, else what the model was trained with."""
    given = {name: getattr(options, f"{name}_{kind}", None) for name in ("energy", "length", "forces", "stress")}
    return {**trained, **{name: None if v == "null" else v for name, v in given.items() if v is not None}}


def _frames_of_split(options: argparse.Namespace, dataset: Dataset) -> list[int]:
    from ..data import read_splits
    from ..errors import BadConfig

    if options.split is None:
        if options.subset:
            raise BadConfig("--subset chooses from a split: give --split too")
        return list(range(len(dataset)))
    subset = options.subset or "test"
    found = read_splits(options.split, dataset, options.data)
    if subset not in found:
        raise BadConfig(f"{options.split}: no '{subset}' frames of these data in it; there are {', '.join(found)}")
    return found[subset]


def _print_errors(errors: dict[str, Any], title: str) -> None:
    from rich.table import Table

    from ..training.steps.metrics import shown

    table = Table(title=title, title_justify="left")
    for name in ("property", "MAE", "RMSE", "unit", "labels"):
        table.add_column(name, justify="left" if name in ("property", "unit") else "right")
    for name, value in errors.items():
        entries = {f"forces on {z}": e for z, e in value.items()} if name == "forces_by_element" else {name: value}
        for label, error in entries.items():
            (mae, unit), (rmse, _) = (shown(error[kind], error["unit"]) for kind in ("mae", "rmse"))
            table.add_row(label.replace("_", " "), f"{mae:.3f}", f"{rmse:.3f}", unit, str(error["count"]))
    make_console().print(table)
