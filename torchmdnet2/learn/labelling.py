"""The labels of a round of active learning: what was computed, what failed, and files that survive a kill."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.files import append
from .config import LabelsConfig
from .labellers import Labels
from .selection import with_labels, write_frames
from .workers import Outcome, Task, label_all

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["FAILED", "LABELLED", "LABELS", "RESULTS", "label_frames", "put_aside"]

RESULTS, LABELLED, FAILED, LABELS = "labels.jsonl", "labelled.xyz", "failed.xyz", "labels"


def label_frames(frames: Sequence[Atoms], folder: Path, config: LabelsConfig, say: Callable[[str], None]) -> None:
    """Label frames; write labelled.xyz and failed.xyz, both in the order of the frames.

    Each result is appended to labels.jsonl, and is not computed again after an interruption.

    Args:
        frames: frames to label.
        folder: folder of the round.
        config: the section `labels`.
        say: function that is called with a message for every failure.
    """
    done = _read_results(folder / RESULTS)
    tasks = []
    for number, atoms in enumerate(frames):
        if number not in done:
            aside = folder / LABELS / f"{number:04d}"
            shutil.rmtree(aside, ignore_errors=True)  # files of an interrupted attempt
            aside.mkdir(parents=True)
            tasks.append(Task(number, atoms, aside))
    with (folder / RESULTS).open("ab", buffering=0) as file:
        for outcome in label_all(tasks, config.labeller, config.processes, config.threads, config.timeout):
            row = _row(outcome, frames[outcome.number], config.max_force)
            append(file, (json.dumps(row) + "\n").encode())
            done[outcome.number] = row
            aside = folder / LABELS / f"{outcome.number:04d}"
            if "error" in row:
                say(f"frame {outcome.number} was not labelled: {row['error']}; files: {aside}")
            else:
                shutil.rmtree(aside)
    good, bad = [], []
    for number, atoms in enumerate(frames):
        row = done[number]
        if "error" in row:
            frame = atoms.copy()
            frame.info["error"] = row["error"]
            bad.append(frame)
        else:
            good.append(with_labels(atoms, Labels(row["energy"], np.array(row["forces"]))))
    write_frames(folder / FAILED, bad)
    write_frames(folder / LABELLED, good)  # last: it marks the end


def put_aside(folder: Path) -> None:
    """Undo the end of a round in which no frame was labelled, so that `label_frames` tries all of them again.

    The results are kept as failed.jsonl.

    Args:
        folder: folder of the round.
    """
    (folder / LABELLED).unlink()  # first, so that a run killed here finds the same failures again and loses nothing
    (folder / RESULTS).replace(folder / "failed.jsonl")


def _row(outcome: Outcome, atoms: Atoms, max_force: float | None) -> dict[str, Any]:
    """Return the line of a frame: its labels, or the reason why they are not used."""
    labels, reason = outcome.labels, outcome.reason
    if labels is not None:
        reason = _fault(labels, len(atoms), max_force)
    if labels is None or reason:
        return {"frame": outcome.number, "error": reason}
    return {"frame": outcome.number, "energy": labels.energy, "forces": np.asarray(labels.forces).tolist()}


def _fault(labels: Labels, num_atoms: int, max_force: float | None) -> str:
    forces = np.asarray(labels.forces)
    if forces.shape != (num_atoms, 3):
        return f"the forces have the shape {list(forces.shape)}, but there are {num_atoms} atoms"
    if not (math.isfinite(labels.energy) and np.isfinite(forces).all()):
        return "energy or forces are not finite"
    largest = float(np.linalg.norm(forces, axis=1).max(initial=0.0))
    if max_force is not None and largest > max_force:
        return f"a force of {largest:.1f} eV/Å (labels.max_force: {max_force:g})"
    return ""


def _read_results(path: Path) -> dict[int, dict[str, Any]]:
    """Return the results so far; remove a last line that a killed process has not finished."""
    if not path.is_file():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    rows = [json.loads(line) for line in whole.splitlines()]
    return {row["frame"]: row for row in rows}
