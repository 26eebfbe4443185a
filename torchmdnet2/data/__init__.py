"""Data: labelled structures from files, checked and converted to the package's units."""

from __future__ import annotations

import glob as _glob
import os
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path

from ..errors import BadData
from ..registry import did_you_mean
from .ace_format import AceReader, is_ace
from .ase_formats import AseDataset, AseReader
from .cache import CachedDataset
from .check import check_sample
from .collate import collate
from .dataset import ConcatDataset, Dataset, Subset
from .hdf5 import HDF5Dataset
from .hdf5_writer import write_hdf5
from .labels import LABELS
from .memory import InMemoryDataset, LoadedDataset
from .npy_format import NpyReader
from .npz_format import NpzReader
from .reader import Reader
from .sample import Sample
from .sampler import epoch_batches, epoch_order, in_order
from .sources import AUTO_BYTES, cache_folder, cache_root, cached, missing_keys
from .splits import make_splits, read_splits, splits_entry
from .statistics import Statistics, fit_atomref, statistics

__all__ = [
    "FORMATS",
    "LABELS",
    "AseDataset",
    "CachedDataset",
    "ConcatDataset",
    "Dataset",
    "HDF5Dataset",
    "InMemoryDataset",
    "Sample",
    "Statistics",
    "Subset",
    "cache_root",
    "check_sample",
    "collate",
    "data_files",
    "epoch_batches",
    "epoch_order",
    "fit_atomref",
    "in_order",
    "make_splits",
    "missing_keys",
    "open_dataset",
    "read_splits",
    "splits_entry",
    "statistics",
    "write_hdf5",
]

FORMATS = {
    "xyz": "extxyz",
    "extxyz": "extxyz",
    "db": "db",
    "traj": "traj",
    "h5": "hdf5",
    "hdf5": "hdf5",
    "npy": "npy",
    "npz": "npz",
}
"""file extension -> format."""


def open_dataset(
    path: str | PathLike | Sequence[str | PathLike],
    keys: Mapping[str, str | None] | None = None,
    units: Mapping[str, str | None] | None = None,
    format: str | None = None,
    cache: str | PathLike = "off",
    optional: Collection[str] = (),
) -> Dataset:
    """Open one or several data files.

    Args:
        path: a file, a pattern such as "data/*.xyz" (files in sorted order), or a list of these (in the order given).
        keys: label -> its name in the file; see `AseDataset` and `HDF5Dataset`. A key that is given must be in at
            least one frame of one of the files.
        units: quantity -> unit that the files are written in, as {"energy": "hartree", "length": "bohr"}. Units that
            an HDF5 file states itself are used instead.
        format: "extxyz", "db", "traj", "hdf5", "npy" and "npz" (see `NpyReader`, `NpzReader`), a format of ase.io by
            its name there, or None or "auto": by the file's extension, before .gz, .bz2 or .xz.
        cache: "off": HDF5 is read frame by frame, other formats at once; "auto": everything is read at once, but files
            of more than 200 MiB together are converted once into a cache in `cache_root()`; or a folder where caches
            are always made. See `CachedDataset`.
        optional: labels whose keys need not be in any file that is read without a cache.

    Returns:
        The data set; of several files one after the other.

    Raises:
        FileNotFoundError: a file is not there, or a pattern matches none.
        BadData: an unknown extension, a file named twice, a key that is nowhere, a damaged file, values that cannot
            be used; the message names the file and the frame.
        OSError: the folder of the cache cannot be written.
    """
    paths = data_files([path] if isinstance(path, str | PathLike) else list(path))
    chosen = None if format == "auto" else format
    if chosen is not None and chosen not in FORMATS.values() and chosen not in _ase_formats():
        known = sorted(set(FORMATS.values()))
        hint = did_you_mean(chosen, known) or "."
        raise BadData(f"unknown data format '{chosen}'{hint} Known: auto, {', '.join(known)}, and those of ase.io")
    formats = [_format_of(p) if chosen is None else chosen for p in paths]
    if "npy" in formats and len(set(formats)) > 1:
        raise BadData(f"{paths[formats.index('npy')]}: .npy files cannot be mixed with other formats")

    def readers() -> list[Reader]:
        if formats[0] == "npy":  # which belong together
            return [NpyReader(paths, keys, units)]
        return [_reader(p, keys, units, f) for p, f in zip(paths, formats, strict=True)]

    files = [file for reader in readers() for file in reader.files] if formats[0] == "npy" else paths
    options = {"keys": _plain(keys), "units": _plain(units), "format": chosen}
    names = [os.path.abspath(file) for file in files]
    folder = cache_folder(names, options, cache_root() if str(cache) in ("auto", "off") else Path(cache))
    # looking into a compressed file takes long: not again where that has led to a cache before
    large = cache == "auto" and (_on_disk(paths) > AUTO_BYTES or (folder / "index.json").is_file())
    made = readers() if str(cache) in ("auto", "off") and not large else []
    if large or not made or (cache == "auto" and _in_memory(made) > 5 * AUTO_BYTES):
        return cached(readers, files, folder)
    datasets = [_loaded(reader, lazily=cache == "off") for reader in made]
    missing_keys(datasets, optional)
    return datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)


def _on_disk(paths: Sequence[str]) -> int:
    return sum(Path(path).stat().st_size for path in paths)


def _in_memory(readers: Sequence[Reader]) -> int:
    """Bytes that HDF5 files, which may be compressed, take when they are read."""
    return sum(int((reader.sizes() * 50 + 150).sum()) for reader in readers if isinstance(reader, HDF5Dataset))


def _ase_formats() -> Collection[str]:
    from ase.io.formats import ioformats

    return ioformats.keys()


def _format_of(path: str) -> str:
    suffixes = [suffix.lstrip(".").lower() for suffix in Path(path).suffixes]
    compressed = suffixes and suffixes[-1] in ("gz", "bz2", "xz")
    extension = (["", *suffixes])[-2 if compressed else -1]
    if extension not in FORMATS:
        raise BadData(
            f"{path}: the extension '.{extension}' does not tell its format{did_you_mean(extension, FORMATS) or '.'} "
            f"Known: {', '.join(FORMATS)}; or give the format"
        )
    return FORMATS[extension]


def _reader(
    path: str, keys: Mapping[str, str | None] | None, units: Mapping[str, str | None] | None, format: str
) -> Reader:
    if format == "npz":
        return NpzReader(path, keys, units)
    if format != "hdf5":
        return AseReader(path, keys, units, format)
    return AceReader(path, keys, units) if is_ace(path) else HDF5Dataset(path, keys, units, require_keys=False)


def _loaded(reader: Reader, lazily: bool) -> HDF5Dataset | LoadedDataset:
    if lazily and isinstance(reader, HDF5Dataset):
        return reader
    return LoadedDataset(reader, require_keys=False)


def _plain(options: Mapping[str, str | None] | None) -> dict[str, str | None] | None:
    return None if options is None else dict(options)


def data_files(paths: Sequence[str | PathLike]) -> list[str]:
    """The files that some names and patterns mean, each once.

    Raises:
        FileNotFoundError, BadData: as `open_dataset`.
    """
    files: list[str] = []
    for path in map(str, paths):
        if Path(path).is_file():
            files.append(path)
            continue
        matches = sorted(_glob.glob(path, recursive=True)) if _glob.has_magic(path) else []
        if not matches:
            if Path(path).is_dir():
                raise FileNotFoundError(f"{path} is a folder; name the files in it, as in '{Path(path) / '*.xyz'}'")
            folder = Path(path).parent
            near = did_you_mean(Path(path).name, [p.name for p in folder.iterdir()] if folder.is_dir() else [])
            raise FileNotFoundError(f"there is no data file {path}{near}")
        files.extend(matches)
    if not files:
        raise FileNotFoundError("no data file is given")
    real = [os.path.realpath(file) for file in files]
    twice = next((file for k, file in enumerate(files) if real[k] in real[:k]), None)
    if twice is not None:
        raise BadData(f"{twice}: this file is named twice; its frames would count double, and leak between subsets")
    return files
