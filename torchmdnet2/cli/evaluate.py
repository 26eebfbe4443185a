"""`torchmdnet2 evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import (
    Command,
    add_allow_untrained_charge,
    add_coulomb,
    add_devices,
    add_model,
    data_of_training,
    frame_numbers,
    keeping,
    make_console,
    names_options,
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
    from ..streams.evaluating import Evaluated, FrameSource

__all__ = ["add"]

_NAMED = 3  # files in the title of a table
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
    words = "as many as have 200 atoms in float64 on a CPU, 2,000 in float32, some ten thousand on a GPU"
    test.add_argument("--batch-size", type=int, help=f"frames of a batch (default: {words})")
    test.add_argument(
        "--output",
        metavar="FILE",
        help=".xyz file to write: predictions, and labels as reference_…; "
        "frames that fail are listed beside it, in NAME.failed.txt",
    )
    test.add_argument("--unlabelled", action="store_true", help="the data have no labels: only predict, to --output")
    test.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_coulomb(test)
    add_allow_untrained_charge(test)
    add_devices(test, "float64 on CPUs, as stored on GPUs")
    test.add_argument("--dask", metavar="ADDRESS", help="scheduler of a dask cluster that computes")


@names_options
def _evaluate(options: argparse.Namespace) -> None:
    from ..core.files import spare_inputs
    from ..errors import BadConfig, BadData
    from ..potential.potential import has_dipole
    from ..streams.evaluating import Evaluation, evaluate_stream, files_of, members_of
    from ..streams.run import devices_for, identity
    from ..training.config.sections import label_keys, label_units, predicted_shapes
    from ..training.steps.trainer import Properties

    if options.batch_size is not None and options.batch_size < 1:
        raise BadConfig(f"--batch-size must be at least 1, got {options.batch_size}")
    models = _models(options)
    data = _Data(options)
    output = None
    if options.output is not None:
        inputs = [options.model, *models, *data.files, *([options.split] if options.split else [])]
        output = output_file(options.output, (".xyz", ".extxyz"), inputs, "--output")
        spare_inputs(files_of(output), map(Path, inputs), "choose another --output")
    devices = devices_for(options.devices, models, options.dask)
    if options.dtype is None and (devices[0] == "cpu" or options.dask):
        options.dtype = "float64"
    settings = opening(options, models)
    potential, *others = members_of(models, **settings)
    trained = data_of_training(potential)
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
    source = data.frames(keys, units)
    plain = trained.get("units") or {}
    evaluation = Evaluation(tuple(map(_absolute, models)), settings, wanted, options.batch_size, plain, bool(output))
    job = {"model": [identity(name) for name in models], "data": [identity(name) for name in data.files],
           "options": repr((keys, units, settings, options.data, options.format, options.batch_size, options.subset)),
           "split": options.split and identity(options.split)}  # fmt: skip
    with keeping(output) if output is not None else nullcontext():
        found = evaluate_stream(evaluation, source, devices, output, job, make_console(stderr=True), options.dask)
    if options.coulomb != "pme" and not found.periodic:
        note(f"--coulomb {options.coulomb} had no effect: no frame is periodic")
    rest = len(options.data) - _NAMED
    files = ", ".join(options.data[:_NAMED]) + (f" and {rest} more files" if rest > 0 else "")
    on = f"on {found.frames} frames of {files}"
    if others and len(models) == 1:
        models = [f"{models[0]}, member {k}" for k in range(1 + len(others))]
    if options.unlabelled:
        print(f"{found.frames} frames are in {output}")
    elif options.json:
        failed = {"failed": found.failed} if found.failed else {}
        print_json({"frames": found.frames, **failed, **_errors(found, models)})
    elif not others:
        _print_errors(found.sums[0].summary(), f"{options.model} {on}")
    else:
        _print_errors(found.sums[0].summary(), f"mean of {len(models)} models {on}")
        _print_members(models, found)
    if found.failed:
        *more, last = found.failures if output is None else found.failures[:1]
        for line in more:
            note(line)
        words = f"{found.failed} of {found.failed + found.frames} frames could not be evaluated"
        if output is None:
            raise BadData(f"{words}{', also' if more else ''}: {last}")
        note(f"{words}, see {files_of(output)[1]}; the first: {last}")


def _absolute(model: str) -> str:
    """Return the absolute path of a model file, since other processes may have another current folder."""
    return str(Path(model).resolve()) if Path(model).is_file() else model


def _errors(found: Evaluated, models: Sequence[str]) -> dict[str, Any]:
    """Return the errors as plain data; of an ensemble also those of the members, and the spread."""
    mean, *members = (own.summary() for own in found.sums)
    if not members:
        return mean
    alone = [{"file": str(model), **own} for model, own in zip(models, members, strict=True)]
    return {**mean, "members": alone, "spread": found.spread.summary()}


def _models(options: argparse.Namespace) -> list[str]:
    """Return the models of the command line, one or the members of an ensemble, and remove them from the data.

    Raises:
        BadConfig: no data are given.
    """
    from ..ensemble import model_files
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
        return model_files(options.model)
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


class _Data:
    """The data files of the command line, and the chosen frames of them."""

    def __init__(self, options: argparse.Namespace):
        from ..data import data_files

        self._options = options
        self._sources = [split_index(path) for path in options.data]
        self._found = [data_files([file], options.format) for file, _ in self._sources]
        self.files = [file for found in self._found for file in found]

    def frames(self, keys: dict[str, str], units: dict[str, str]) -> FrameSource:
        """Return the frames; labels of the training other than energy and forces may be missing.

        Raises:
            BadData: a label that the command line names is missing, or all labels are. Where all frames of the files
                are read, while they are read.
        """
        from ..data import LABELS, file_readers, open_dataset
        from ..streams.evaluating import FrameSource

        options = self._options
        labels = [name for name in keys if name in LABELS or name == "virial"]
        optional = [name for name in labels if name not in {"energy", "forces", *_given(options, "key")}]
        if not (options.split or options.subset or any(index is not None for _, index in self._sources)):
            readers = file_readers(self.files, keys, units, options.format)
            return FrameSource(readers, lambda whole: _check_labels(options, readers, keys, labels, optional, whole))
        files = self.files if len(self.files) > 1 else self.files[0]
        dataset = open_dataset(files, keys=keys, units=units, format=options.format, optional=optional)
        _check_labels(options, getattr(dataset, "datasets", [dataset]), keys, labels, optional)
        if options.split or options.subset:
            return FrameSource.of_dataset(dataset, _frames_of_split(options, dataset))
        return FrameSource.of_dataset(dataset, _frames(dataset, self._sources, self._found))


def _check_labels(
    options: argparse.Namespace,
    parts: Sequence[Any],
    keys: dict[str, str],
    labels: list[str],
    optional: list[str],
    whole: bool = True,
) -> None:
    """Check, with readers or data sets that have been read, that the data have the labels.

    With `whole=False` only the first frames have been read, and it is enough that one label is there.

    Raises:
        BadData: a label that the command line names is missing, or all labels are.
        BadConfig: the command line gives a unit of a label that is not there.
    """
    from ..data import missing_keys
    from ..training.config.sections import property_of

    if not whole and any(part.counts[name] for name in labels for part in parts):
        return
    missing_keys(parts, optional if whole else ())
    absent = [name for name in optional if not any(part.counts[name] for part in parts)]
    if absent == labels:
        missing_keys(parts)
    for name in absent:
        note(f"no frame has '{keys[name]}', the key of {property_of(name)} in the training; this label is left out")
    _refuse_idle_units(options, parts)


def _refuse_idle_units(options: argparse.Namespace, parts: Sequence[Any]) -> None:
    """Raise BadConfig for units of labels that the data do not have, or that are not read."""
    derived = {"energy": ("energy", "forces", "stress", "virial")}  # whose units may follow from it
    for name in _UNITS:
        if name != "length" and not any(part.counts[label] for part in parts for label in derived.get(name, (name,))):
            refuse_idle(options, [f"{name}_unit"], f"no {name} is read from the data; see --{name}-key")


def _frames(dataset: Dataset, sources: Sequence[tuple[str, str | None]], files: Sequence[list[str]]) -> list[int]:
    """Return the indices of the frames that file@index selects, over all files in order.

    Raises:
        BadConfig: an index is not valid, or selects no frame.
    """
    from ..errors import BadConfig

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
    if not found[subset]:
        raise BadConfig(f"{options.split}: its '{subset}' subset has no frames; choose another with --subset")
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
    error = errors.get("energy_per_atom")
    constant = error and error["count"] >= _SOME and error["mae"] > max(_NEAR, _CONSTANT * error["rmse"])
    if error and (error["mae"] > _FAR or constant):
        note(
            f"energies differ by about {error['mae']:.3g} eV per atom: probably the labels have another zero (total or "
            "atomisation energies, another method) or unit (--energy-unit). Take labels of the model's level of "
            "theory (--level chooses among several), or fine-tune the model, which fits the zero; errors of forces do "
            "not depend on the zero"
        )
    forces = errors.get("forces")
    if forces and forces["rmse"] > _WRONG:
        note(
            f"forces differ by {forces['rmse']:.3g} eV/Å (rms): check their unit (--forces-unit) and sign (−dE/dx), "
            "the unit of positions (--length-unit), and whether the model was trained on such structures"
        )


# eV per atom. Above the first, labels have another zero: all bonds of an atom make a few eV. Above the second, so have
# labels whose errors are nearly the same in some frames, as of another functional: mean and rms errors are then equal.
_FAR, _NEAR, _CONSTANT, _SOME = 1.0, 0.2, 0.98, 5
_WRONG = 1.0  # eV/Å, above which forces have another unit or sign, or the model does not know the structures


def _print_members(models: Sequence[str], found: Evaluated) -> None:
    """Print the RMSE of each member, the spread of the members and the error of their mean."""
    from ..training.steps.loss import shown

    mean, *members = (own.summary() for own in found.sums)
    names = [name for name in mean if name != "forces_by_element"]
    heads = [f"{name.replace('_', ' ')}, {shown(0, mean[name]['unit'])[1] or '1'}" for name in names]
    every = [*zip(models, members, strict=True), ("mean of all", mean)]
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
