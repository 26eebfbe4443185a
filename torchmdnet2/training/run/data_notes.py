"""Warnings before training: repeated frames, leaks between subsets, inconsistent labels, entries that are not read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...data import CachedDataset, ConcatDataset, Dataset, HDF5Dataset
from ...data.edges import EdgeMemory
from ...data.label_checks import Usual
from ...potential.potential import SYMBOLS
from ..config.sections import epoch_of
from ..steps.batches import Frames
from .fine_tuning import first_names, reference_energies
from .label_notes import label_notes
from .references import singles

if TYPE_CHECKING:
    from .setup import Setup

__all__ = ["closest_pair", "data_notes"]

_OFF = 0.1  # eV
_CLOSE = 0.6  # Å; the bond of H₂ is 0.74 Å
_EDGES = 20_000_000  # looked at for close atoms, at most

_STATES = {"charge": r"charge(?!s)", "spin": r"spin(?!s)|multiplicity|(^|_)mult(_|$)"}
"""Key -> what other names of it look like."""


def data_notes(setup: Setup, total_steps: int) -> list[str]:
    """Properties of a run that are allowed and look like mistakes, in words.

    Args:
        setup: of the run.
        total_steps: of the training.
    """
    return [
        *_repetitions(setup),
        *label_notes(setup),
        *_standing_out(setup),
        *_close_atoms(setup),
        *_doubts(setup),
        *_unread(setup),
        *_single_atoms(setup),
        *_ignored(setup),
        *_settings(setup, total_steps),
    ]


def _repetitions(setup: Setup) -> Iterator[str]:
    """Structures that are in two subsets, or in the training set twice."""
    drawn = setup.frames["train"]
    _, first = np.unique(drawn.indices, return_index=True)  # a bootstrap draws some of them repeatedly
    train = setup.statistics["train"].keys[np.sort(first)]
    again = len(train) - len(np.unique(train))
    if again:
        yield f"{again} of {len(train)} training frames repeat the structure of another one"
    seen = {"training": train}
    for name in ("validation", "test"):
        if name not in setup.frames:
            continue
        keys = setup.statistics[name].keys
        for other, known in seen.items():
            found = np.flatnonzero(np.isin(keys, known))
            if len(found):
                where = setup.frames[name].name(int(found[0]))
                yield (
                    f"{len(found)} of {len(keys)} {name} frames have the same structure as {other} frames (the first: "
                    f"{where}): their errors say little about new structures"
                )
        seen[name] = keys


def _standing_out(setup: Setup) -> Iterator[str]:
    """Frames with labels that are far from what is usual in the training frames."""
    usual = Usual(setup.statistics["train"])
    for name, found in setup.statistics.items():
        frames, what = setup.frames[name], "training" if name == "train" else name
        far = usual.forces(found)
        if len(far):
            rms = np.sqrt(found.force_square[far] / found.force_count[far])
            listed = first_names([f"{frames.name(int(k))} ({value:.3g})" for k, value in zip(far, rms, strict=True)])
            yield (
                f"{what} frames have far larger forces than the others: {listed}; rms in eV/Å, where the median "
                f"training frame has {usual.median_force:.3g}. Are these labels right?"
            )
        far = usual.energies(found)
        if len(far):
            listed = first_names([frames.name(int(k)) for k in far])
            yield f"{what} frames have energies far from what their atoms have in the others: {listed}. Are they right?"


def _close_atoms(setup: Setup) -> Iterator[str]:
    """Atoms that are closer than any bond, or at one place."""
    for name, frames in setup.frames.items():
        most = int(_EDGES / max(1.0, float(frames.edges.mean())))
        distance, where = closest_pair(frames, max(1, most))
        if distance < _CLOSE:
            what = "training" if name == "train" else name
            yield (
                f"{what} frames have atoms {distance:.3f} Å from each other, in {where}: closer than any bond. Is "
                "data.units.length right, or that frame?"
            )


def _doubts(setup: Setup) -> Iterator[str]:
    """Entries of the files that put their labels in doubt."""
    for part in dict.fromkeys(part for frames in setup.frames.values() for part in _parts(frames.data)):
        yield from getattr(part, "doubts", ())


def _unread(setup: Setup) -> Iterator[str]:
    """Entries of the files that look like a charge or a spin and are not read, where nothing else is."""
    config = setup.config.data
    if config.dataset is not None:
        return
    read = {key for key in config.keys.model_dump().values() if isinstance(key, str)}
    for part in dict.fromkeys(part for frames in setup.frames.values() for part in _parts(frames.data)):
        for key, pattern in _STATES.items():
            names = [
                n for n in sorted(getattr(part, "available", ())) if re.search(pattern, n.lower()) and n not in read
            ]
            if names and not getattr(part, "counts", {}).get(key):
                meaning = "0 in all frames" if key == "charge" else "1 (a singlet) in all frames"
                yield (
                    f"{', '.join(map(repr, names))} in {getattr(part, 'path', 'the data')} is not read, and the "
                    f"{'total charge' if key == 'charge' else 'spin multiplicity'} is taken as {meaning}; if it says "
                    f"otherwise, set data.keys.{key}: {names[0]}"
                )


def _parts(data: Dataset) -> Sequence[Dataset]:
    """The files of a data set."""
    return data.datasets if isinstance(data, ConcatDataset) else [data]


def _single_atoms(setup: Setup) -> Iterator[str]:
    """Single atoms whose energies the model cannot learn: it gives them exactly their reference energies."""
    if "energy" not in setup.asked:
        return
    references, frames = reference_energies(setup.potential), setup.frames["train"]
    wrong: dict[int, tuple[float, str]] = {}
    for z, energy, where, fault in singles(frames.data, frames.indices):
        error = references.get(z, 0.0) - energy
        if fault is None and abs(error) > max(_OFF, abs(wrong.get(z, (0.0, ""))[0])):
            wrong[z] = error, where
    if wrong:
        listed = ", ".join(f"{SYMBOLS[z]} {error:+.2f} eV ({where})" for z, (error, where) in sorted(wrong.items()))
        yield (
            "single atoms have exactly the reference energies of the model, which differ from the labels of training "
            f"frames: {listed}. Take the labels, with priors: [{{name: atomref, energies: isolated}}], or leave these "
            "frames out"
        )


def _ignored(setup: Setup) -> Iterator[str]:
    """Total charges or spins that differ, and that the model does not use; charges that it is not trained on."""
    found, potential = setup.statistics["train"], setup.potential
    seen = {"charge": potential.reads_charge, "spin": potential.representation.reads_spin}
    for name, values in (("charge", found.charges), ("spin", found.spins)):
        if len(values) > 1 and not seen[name]:
            what = "total charges" if name == "charge" else "spin multiplicities"
            listed, model = first_names([str(v) for v in values]), setup.config.model["name"]
            yield f"training frames have the {what} {listed}, which {model} does not use"
    for subset in ("validation", "test"):
        if subset in setup.statistics and potential.total_charges is not None:
            new = [str(q) for q in setup.statistics[subset].charges if q not in potential.total_charges]
            if new:
                yield f"{subset} frames have the total charges {first_names(new)}, which no training frame has"
        if subset in setup.statistics and potential.closed_shell and setup.statistics[subset].odd_electrons:
            count = setup.statistics[subset].odd_electrons
            yield f"{count} {subset} frames have an odd number of electrons, which no training frame has"


def _settings(setup: Setup, total_steps: int) -> Iterator[str]:
    training = setup.config.training
    if training.warmup_steps >= total_steps:
        yield (
            f"training.warmup_steps is {training.warmup_steps}, and there are {total_steps} steps in all: the learning "
            "rate never reaches training.lr"
        )
    for key, stage in (("swa", training.swa), ("loss.schedule", training.loss.schedule)):
        if stage is not None and epoch_of(stage.start, training.max_epochs) >= training.max_epochs:
            yield (
                f"training.{key}.start is {stage.start}, and there are {training.max_epochs} epochs, counted from 0: "
                "the stage never starts"
            )
    frames = setup.frames["train"]
    if training.max_atoms is None and training.max_edges is None and training.batch_size > len(frames):
        size = training.batch_size
        yield f"training.batch_size is {size}, and there are {len(frames)} training frames: 1 step per epoch"
    slow = isinstance(frames.data, HDF5Dataset) or (isinstance(frames.data, CachedDataset) and _searches(frames))
    if setup.config.data.num_workers and not slow:
        yield ("data.num_workers has no benefit: the frames are already in memory. Set it to 0")


def _searches(frames: Frames) -> bool:
    return isinstance(frames.lists, EdgeMemory)


def closest_pair(frames: Frames, most: int = 2000) -> tuple[float, str]:
    """The smallest distance between two atoms, Å, and the frame that it is in.

    Args:
        frames: up to `most` of them, evenly spread, are looked at.

    Returns:
        (inf, "") where no two atoms are within the cutoff.
    """
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), most)).astype(int))
    least, where = float("inf"), ""
    for part in np.array_split(chosen, -(-len(chosen) // 64)):
        batch = frames.batch(part)
        distances = batch.neighbors.distances(batch.sample.system)
        if len(distances) and float(distances.min()) < least:
            edge = int(distances.argmin())
            owner = int(batch.sample.system.batch[batch.neighbors.edge_index[0, edge]])
            least, where = float(distances[edge]), frames.name(int(part[owner]))
    return least, where
