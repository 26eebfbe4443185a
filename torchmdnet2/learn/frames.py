"""Frames on disk: extended XYZ with labels, and in `info` where each frame comes from."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import open_dataset
from ..data.structures import read_structures
from ..errors import BadConfig, BadData
from ..files import atomic_write
from ..md.setup import plain_copy
from .labellers import Labels

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["labelled_frames", "labels_of", "read_frames", "structures", "with_labels", "write_frames"]


def write_frames(path: Path, frames: Sequence[Atoms]) -> None:
    """Write extended XYZ, of positions rounded to 10⁻⁸ Å; a reader sees all of it or nothing.

    What is computed from frames is computed from those that `read_frames` reads back.
    """
    from ase.io import write

    text = io.StringIO()
    if frames:
        write(text, list(frames), format="extxyz")
    atomic_write(path, text.getvalue())


def read_frames(path: Path) -> list[Atoms]:
    """The frames of a file of `write_frames`, which may be empty."""
    from ase.io import read

    if not path.stat().st_size:
        return []
    return read(path, ":", format="extxyz")  # type: ignore[return-value]


def with_labels(atoms: Atoms, labels: Labels) -> Atoms:
    """A copy with labels; `info` is kept."""
    from ase.calculators.singlepoint import SinglePointCalculator

    frame = atoms.copy()
    frame.set_constraint()  # forces are written as they are
    frame.calc = SinglePointCalculator(frame, energy=labels.energy, forces=labels.forces)
    return frame


def labels_of(frame: Atoms) -> Labels:
    """The labels of a frame of `with_labels`."""
    assert frame.calc is not None
    return Labels(float(frame.calc.results["energy"]), np.asarray(frame.calc.results["forces"]))


def labelled_frames(
    path: str | list[str], keys: Mapping[str, str | None], units: Mapping[str, str | None]
) -> list[Atoms]:
    """Frames of the user's data files, with their energies and forces in eV and Å.

    Raises:
        FileNotFoundError, BadData: as `open_dataset`; a frame has no energy or no forces.
    """
    data = open_dataset(path, keys=keys, units=units)
    frames = []
    for k in range(len(data)):
        sample = data[k]
        (atoms,) = sample.system.to_ase()
        for name in ("energy", "forces"):
            if name not in sample.labels or not bool(sample.labels[name].isfinite().all()):
                raise BadData(
                    f"{data.name(k)}: has no {name}; set start.labelled to false, to have all frames labelled"
                )
        labels = Labels(float(sample.labels["energy"][0]), sample.labels["forces"].numpy())
        frames.append(with_labels(atoms, labels))
    return frames


def structures(path: str | list[str]) -> list[Atoms]:
    """Frames of the user's files, without labels.

    Raises:
        FileNotFoundError, BadData: a file is missing or cannot be read.
    """
    found: list[Atoms] = []
    for file in [path] if isinstance(path, str) else path:
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file")
        try:
            found += read_structures(file)
        except Exception as error:  # ASE's readers raise whatever they meet
            raise BadData(f"{file}: cannot be read as structures: {str(error) or type(error).__name__}") from error
    if not found:
        raise BadConfig(f"{path}: there are no structures in it")
    return [plain_copy(atoms, None, None) for atoms in found]


def spread_over(frames: Sequence[Any], count: int | None) -> list[Any]:
    """So many of the frames, evenly from all over them; None: all."""
    if count is None or count >= len(frames):
        return list(frames)
    return [frames[k * len(frames) // count] for k in range(count)]
