"""The start of a run: frames to begin with, structures to start dynamics from, and whether labels fit the labeller."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BadConfig, BadData
from ..files import old_name
from .config import LearnConfig
from .frames import labelled_frames, labels_of, read_frames, spread_over, structures, write_frames
from .labelling import FAILED, LABELLED, label_frames

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["START", "STARTS", "VERIFY", "clear_start", "prepare_start", "verify_start"]

START, STARTS, VERIFY = "start.xyz", "starts.xyz", "verify"
ENERGY, FORCE = 5e-3, 0.05
"""eV per atom and eV/Å: by more than this, labels of the same method do not differ."""


def prepare_start(config: LearnConfig, folder: Path) -> None:
    """Write start.xyz, the frames to begin with, and starts.xyz, where dynamics start.

    Raises:
        FileNotFoundError, BadData: a file is missing or cannot be used.
        BadConfig: there are fewer than two frames.
    """
    start = config.start
    if not (folder / START).is_file():
        if start.labelled:
            keys = {name: key for name, key in start.keys.model_dump().items() if key is not None}
            frames = labelled_frames(start.file, keys, start.units.model_dump(exclude_none=True))
        else:
            frames = structures(start.file)
        frames = spread_over(frames, start.frames)
        if len(frames) < 2:
            raise BadConfig("start.file: has one frame; two are needed at least, to train on one and validate on one")
        for k, atoms in enumerate(frames):
            atoms.info.update(round=0, reason="start", start=k)
        write_frames(folder / START, frames)
    if not (folder / STARTS).is_file():
        given = config.dynamics.starts
        write_frames(folder / STARTS, read_frames(folder / START) if given is None else structures(given))


def verify_start(config: LearnConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Label some labelled start frames again, in the folder `verify`, and compare.

    Raises:
        BadData: labels differ, or cannot be computed: other units, another method or other settings.
    """
    count = config.start.verify if config.start.labelled else 0
    if not count:
        return
    frames: list[Atoms] = spread_over(read_frames(folder / START), count)
    own = folder / VERIFY
    own.mkdir(exist_ok=True)
    if not (own / LABELLED).is_file():
        label_frames([_bare(atoms) for atoms in frames], own, config.labels, say)
    for atoms in read_frames(own / FAILED):
        raise BadData(f"start frame {atoms.info['start']} cannot be labelled: {atoms.info['error']}")
    energy = force = 0.0
    for given, computed in zip(frames, read_frames(own / LABELLED), strict=True):
        theirs, ours = labels_of(given), labels_of(computed)
        energy = max(energy, abs(theirs.energy - ours.energy) / len(given))
        force = max(force, float(np.abs(theirs.forces - ours.forces).max()))
    if energy > ENERGY or force > FORCE:
        raise BadData(
            f"the labels of the start frames are not those of the labeller: energies differ by {1e3 * energy:.3g} "
            f"meV/atom, forces by {1e3 * force:.3g} meV/Å. Check start.keys, start.units and the settings of the "
            "labeller; or set start.labelled to false, to have the structures labelled anew"
        )
    say(
        f"{len(frames)} start frame(s) labelled again: energies differ by {1e3 * energy:.2g} meV/atom, forces by "
        f"{1e3 * force:.2g} meV/Å"
    )


def clear_start(folder: Path, others: Iterable[str]) -> None:
    """Make a folder free again for a run whose start has failed; what was labelled stays in verify.old.

    Args:
        folder: of the run.
        others: names of files that the run has written before.
    """
    own = folder / VERIFY
    if own.exists():
        shutil.rmtree(old_name(own), ignore_errors=True)
        os.replace(own, old_name(own))
    for name in (START, STARTS, *others):
        (folder / name).unlink(missing_ok=True)


def _bare(atoms: Atoms) -> Atoms:
    frame = atoms.copy()
    frame.calc = None
    return frame
