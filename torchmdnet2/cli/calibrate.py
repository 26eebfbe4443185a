"""`torchmdnet2 calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .common import (
    Command,
    add_device,
    add_model,
    data_of_training,
    keeping,
    note,
    opening,
    output_file,
    refuse_idle,
)

if TYPE_CHECKING:
    from ..data import Dataset
    from ..potential.potential import Potential
    from ..system import System

__all__ = ["add"]

_BATCH = 64
_RATE = 0.02  # default rate of false alarms


def add(command: Command) -> None:
    """Declare the arguments."""
    fit = command("calibrate", _calibrate, "let a model warn of structures that are unlike its training frames")
    add_model(fit, "; never changed")
    fit.add_argument("output", nargs="?", help=".tmn file to write: the same model with its calibration")
    fit.add_argument("--train", nargs="+", metavar="FILE", help="frames that the model was trained on")
    fit.add_argument("--validation", nargs="+", metavar="FILE", help="frames of the same kind, not used in training")
    fit.add_argument("--format", help="format of these files, as data.format (default: auto, by their names)")
    fit.add_argument("--split", metavar="FILE", help="splits.json of the training: both are chosen from --train")
    fit.add_argument("--rate", type=float, help=f"accepted false alarms per structure (default: {_RATE})")
    fit.add_argument("--frames", type=int, default=20000, help="largest number of frames of each kind (default: 20000)")
    fit.add_argument(
        "--test", nargs=2, metavar=("KNOWN", "UNKNOWN"),
        help="print the shares of structures with a score above 1 in two files: false alarms, and recall",
    )  # fmt: skip
    add_device(fit, dtype=None)


def _calibrate(options: argparse.Namespace) -> None:
    from ..checkpoint import load, to_bytes
    from ..core.files import atomic_write
    from ..errors import BadConfig
    from ..potential.novelty import calibrate

    fits = options.output is not None
    if fits != bool(options.train) or fits != bool(options.validation or options.split):
        raise BadConfig("give the file to write, --train, and --validation or --split; or only --test")
    if not fits:
        refuse_idle(options, ["rate"], "it belongs to a new calibration, but no file to write is given")
    if options.validation and options.split:
        raise BadConfig("--split chooses the validation frames from --train: leave --validation out")
    if not fits and not options.test:
        raise BadConfig("nothing to do: give the file to write with --train and --validation, or --test")
    if options.frames < 1:
        raise BadConfig(f"--frames must be at least 1, got {options.frames}")
    files = [*(options.train or []), *(options.validation or []), *(options.test or [])]
    if shared := {Path(f).resolve() for f in _files(options.train or [], options.format)} & {
        Path(f).resolve() for f in _files(options.validation or [], options.format)
    }:
        raise BadConfig(
            f"--validation: {min(shared)} is among the files of --train, but validation needs frames that "
            "the model was not trained on: give other frames, or --split"
        )
    inputs = [options.model, *_files(files, options.format), *([options.split] if options.split else [])]
    output = output_file(options.output, (".tmn",), inputs, "output") if fits else None
    potential = load(options.model, **opening(options, [options.model]))
    if output is not None:
        train, validation = _subsets(potential, options)
        potential.calibration = calibrate(
            potential.representation, train, validation, _RATE if options.rate is None else options.rate
        )
        # write the stored weights, although --dtype may have cast them for the fit
        stored = load(options.model)
        stored.calibration = potential.calibration
        with keeping(output):
            atomic_write(output, to_bytes(stored), keep=True)
        facts = potential.calibration.facts
        print(
            f"fitted to {facts['train_frames']} frames; {100 * facts['rate']:.2g} % of frames like the "
            f"{facts['validation_frames']} of the validation will have a score above 1\nwrote {output}"
        )
    if options.test:
        _test(potential, options)


def _subsets(potential: Potential, options: argparse.Namespace) -> tuple[Iterator[System], Iterator[System]]:
    """Return batches of the training frames and of the validation frames."""
    from ..data import read_splits
    from ..errors import BadData

    train = _dataset(potential, options.train, options.format)
    if options.split:
        found = read_splits(options.split, train, options.train)
        if missing := {"train", "validation"} - found.keys():
            raise BadData(
                f"{options.split}: the file has no {' and no '.join(sorted(missing))} frames of {options.train[0]}"
            )
        chosen, others, validation = found["train"], found["validation"], train
    else:
        validation = _dataset(potential, options.validation, options.format)
        chosen, others = list(range(len(train))), list(range(len(validation)))
    others = _spread(others, options.frames)
    new = _others(train, chosen, validation, others)
    if len(new) < len(others):
        note(f"{len(others) - len(new)} of {len(others)} validation frames repeat training frames and are left out")
    return _batches(potential, train, _spread(chosen, options.frames)), _batches(potential, validation, new)


def _others(train: Dataset, chosen: list[int], validation: Dataset, others: list[int]) -> list[int]:
    """Return the validation frames whose structure is not that of a training frame."""
    import numpy as np

    from ..data import statistics

    if not (chosen and others):
        return others
    repeated = np.isin(statistics(validation, others).keys, statistics(train, chosen).keys)
    return np.asarray(others)[~repeated].tolist()


def _test(potential: Potential, options: argparse.Namespace) -> None:
    """Print the shares of structures with a score above 1."""
    import torch

    from ..potential.novelty import largest

    for file, kind in zip(options.test, ("false alarms", "recall"), strict=True):
        data = _dataset(potential, [file], options.format)
        batches = _batches(potential, data, _spread(list(range(len(data))), options.frames))
        scores = torch.cat([largest(potential.novelty(system), system) for system in batches])
        above = int((scores > 1).sum())
        share = f"{kind} {100 * above / len(scores):.1f} % ({above} of {len(scores)} structures above 1)"
        print(f"{file}: {share}, median {float(scores.median()):.2f}, largest {float(scores.max()):.2f}")


def _files(paths: list[str], format: str | None) -> list[str]:
    from ..data import data_files

    return [file for path in paths for file in data_files([path], format)]


def _dataset(potential: Potential, paths: list[str], format: str | None) -> Dataset:
    """Read structures and charges without labels, with names and units as in the training."""
    from ..data import open_dataset
    from ..errors import BadData

    trained = data_of_training(potential)
    keys = {
        k: v for k, v in (trained.get("keys") or {}).items() if k in ("charge", "spin", "numbers", "positions") and v
    }
    units = {k: v for k, v in (trained.get("units") or {}).items() if k == "length" and v}
    data = open_dataset(paths, keys=keys, units=units, format=format)
    if not len(data):
        raise BadData(f"{paths[0]}: the file has no structures")
    return data


def _spread(indices: list[int], most: int) -> list[int]:
    """Return up to `most` evenly spread indices."""
    return [indices[k * len(indices) // most] for k in range(most)] if len(indices) > most else indices


def _batches(potential: Potential, data: Dataset, indices: list[int]) -> Iterator[System]:
    """Yield batches of checked structures on the potential's device."""
    from ..potential.refusals import rename

    for first in range(0, len(indices), _BATCH):
        chosen = indices[first : first + _BATCH]
        system = data.batch(chosen).system.to(potential.device)
        try:
            potential.check(system)
        except ValueError:
            for index in chosen:
                try:
                    potential.check(data.batch([index]).system.to(potential.device))
                except ValueError as error:
                    rename(error, data.name(index))
                    raise
            raise
        yield system
