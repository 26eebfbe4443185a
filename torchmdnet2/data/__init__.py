"""Data: labelled structures from files, in the package's units, checked."""

from __future__ import annotations

import glob as _glob
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from ..errors import BadData
from ..registry import did_you_mean
from .ase_formats import AseDataset
from .check import check_sample
from .collate import collate
from .conversion import missing_key
from .dataset import LABELS, ConcatDataset, Dataset, Sample, Subset
from .hdf5 import HDF5Dataset
from .hdf5_writer import write_hdf5
from .memory import InMemoryDataset
from .sampler import AtomBatchSampler, BatchSampler, MoleculeBatchSampler
from .splits import Splits, make_splits
from .statistics import Statistics, fit_atomref, statistics

__all__ = [
    "FORMATS",
    "LABELS",
    "AseDataset",
    "AtomBatchSampler",
    "BatchSampler",
    "ConcatDataset",
    "Dataset",
    "HDF5Dataset",
    "InMemoryDataset",
    "MoleculeBatchSampler",
    "Sample",
    "Splits",
    "Statistics",
    "Subset",
    "check_sample",
    "collate",
    "fit_atomref",
    "make_splits",
    "open_dataset",
    "statistics",
    "write_hdf5",
]

FORMATS = {"xyz": "extxyz", "extxyz": "extxyz", "db": "db", "traj": "traj", "h5": "hdf5", "hdf5": "hdf5"}
"""file extension -> format."""


def open_dataset(
    path: str | PathLike | Sequence[str | PathLike],
    keys: Mapping[str, str | None] | None = None,
    units: Mapping[str, str | None] | None = None,
    format: str | None = None,
) -> Dataset:
    """Open one or several data files.

    Args:
        path: a file, a pattern such as "data/*.xyz" (files in sorted order), or a list of these (in the order given).
        keys: label -> its name in the file; see `AseDataset` and `HDF5Dataset`. A key that is given must be in at
            least one frame of one of the files.
        units: quantity -> unit that the files are written in, as {"energy": "hartree", "length": "bohr"}. Units that
            an HDF5 file states itself are used instead.
        format: "extxyz", "db", "traj", "hdf5", or None or "auto": by the file's extension.

    Returns:
        The data set; of several files one after the other.

    Raises:
        FileNotFoundError: a file is not there, or a pattern matches none.
        BadData: an unknown extension, a file named twice, a key that is nowhere, a damaged file, values that cannot
            be used; the message names the file and the frame.
    """
    paths = _expand([path] if isinstance(path, str | PathLike) else list(path))
    datasets = [_open(p, keys, units, None if format == "auto" else format) for p in paths]
    available = {key for dataset in datasets for key in dataset.available}
    for name, key in datasets[0].asked.items():
        if not any(dataset.counts[name] for dataset in datasets):
            raise missing_key(name, key, available, ", ".join(paths))
    return datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)


def _open(
    path: str, keys: Mapping[str, str | None] | None, units: Mapping[str, str | None] | None, format: str | None
) -> AseDataset | HDF5Dataset:
    if format is None:
        extension = Path(path).suffix.lstrip(".").lower()
        if extension not in FORMATS:
            raise BadData(
                f"{path}: the extension '.{extension}' does not tell its format{did_you_mean(extension, FORMATS)} "
                f"Known: {', '.join(FORMATS)}; or give the format"
            )
        format = FORMATS[extension]
    elif format not in FORMATS.values():
        known = sorted(set(FORMATS.values()))
        raise BadData(f"unknown data format '{format}'{did_you_mean(format, known)} Known: auto, {', '.join(known)}")
    if format == "hdf5":
        return HDF5Dataset(path, keys, units, require_keys=False)
    return AseDataset(path, keys, units, format, require_keys=False)


def _expand(paths: Sequence[str | PathLike]) -> list[str]:
    files: list[str] = []
    for path in map(str, paths):
        if Path(path).is_file():
            files.append(path)
            continue
        matches = sorted(_glob.glob(path, recursive=True)) if _glob.has_magic(path) else []
        if not matches:
            folder = Path(path).parent
            near = did_you_mean(Path(path).name, [p.name for p in folder.iterdir()] if folder.is_dir() else [])
            raise FileNotFoundError(f"there is no data file {path}{near}")
        files.extend(matches)
    if not files:
        raise FileNotFoundError("no data file is given")
    twice = next((file for k, file in enumerate(files) if file in files[:k]), None)
    if twice is not None:
        raise BadData(f"{twice}: this file is named twice; its frames would count double, and leak between subsets")
    return files
