"""Data: labelled structures from files, checked and converted to the package's units."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path

from ..errors import BadData
from . import cp2k_format, dpdata_format, peer_formats  # noqa: F401  (each registers its class)
from .ase_formats import AseDataset, FrameReader
from .cache import AUTO_BYTES, CachedDataset, cache_folder, cache_root, cached, missing_keys
from .check import check_sample
from .dataset import ConcatDataset, Dataset, Sample, Subset, collate
from .extxyz import Frame
from .hdf5 import HDF5Dataset, write_hdf5
from .labels import LABELS, Names
from .npy_format import NpyReader, NpzReader
from .reader import (
    FORMATS,
    Format,
    InMemoryDataset,
    LoadedDataset,
    Reader,
    data_files,
    find_format,
    format_of,
    make_readers,
    register_format,
)
from .splits import epoch_batches, epoch_order, in_order, make_splits, read_splits, splits_entry
from .statistics import Statistics, fit_atomref, statistics
from .structures import read_structures

__all__ = [
    "FORMATS",
    "LABELS",
    "AseDataset",
    "CachedDataset",
    "ConcatDataset",
    "Dataset",
    "Frame",
    "FrameReader",
    "HDF5Dataset",
    "InMemoryDataset",
    "NpzReader",
    "Sample",
    "Statistics",
    "Subset",
    "cache_root",
    "check_sample",
    "collate",
    "data_files",
    "epoch_batches",
    "epoch_order",
    "file_readers",
    "fit_atomref",
    "in_order",
    "make_splits",
    "missing_keys",
    "open_dataset",
    "read_splits",
    "read_structures",
    "register_format",
    "splits_entry",
    "statistics",
    "write_hdf5",
]


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
        keys: label -> its name in the file; see `AseDataset` and `HDF5Dataset`. Each given key must be in at least one
            frame of one of the files.
        units: quantity -> unit in the files, such as {"energy": "hartree", "length": "bohr"}. Units that an HDF5 file
            states take precedence.
        format: a name in `FORMATS`, such as "extxyz" or "hdf5"; "dpdata/NAME" for a format of dpdata; "ase/NAME" or
            NAME for one of ase.io. With None or "auto" the file's extension decides, before .gz, .bz2 or .xz.
        cache: "off" reads HDF5 frame by frame, other formats at once. "auto" reads everything at once, but converts
            files of more than 200 MiB in total once into a cache in `cache_root()`. A folder: caches are always made
            in it. See `CachedDataset`.
        optional: labels whose keys may be in no file, where files are read without a cache.

    Returns:
        The data set, with the frames of several files one after the other.

    Raises:
        FileNotFoundError: a file does not exist, or a pattern matches none.
        BadData: the extension is unknown, a file is named twice, a key is in no file, a file is damaged, or a value
            cannot be used; the message names the file and the frame.
        OSError: the folder of the cache cannot be written.
    """
    paths = data_files([path] if isinstance(path, str | PathLike) else list(path), format)
    chosen, formats = find_format(format), _formats(paths, format)

    def readers() -> list[Reader]:
        return make_readers(paths, keys, units, formats)

    if len(set(formats)) == 1:
        files = formats[0].reader.files_of(paths, keys)
    else:
        files = [file for p, f in zip(paths, formats, strict=True) for file in f.reader.files_of([p], keys)]
    options = {"keys": _plain(keys), "units": _plain(units), "format": chosen.name if chosen else None}
    names = [os.path.abspath(file) for file in files]
    folder = cache_folder(names, options, cache_root() if str(cache) in ("auto", "off") else Path(cache))
    # finding the size of a compressed file takes long: skip it where the files have led to a cache before
    large = cache == "auto" and (_on_disk(files) > AUTO_BYTES or (folder / "index.json").is_file())
    made = readers() if str(cache) in ("auto", "off") and not large else []
    if large or not made or (cache == "auto" and _in_memory(made) > 5 * AUTO_BYTES):
        return cached(readers, files, folder)
    datasets = [_loaded(reader, lazily=cache == "off") for reader in made]
    missing_keys(datasets, optional)
    return datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)


def file_readers(paths: Sequence[str], keys: Names, units: Names, format: str | None = None) -> list[Reader]:
    """Return readers of files, which yield their frames in order; arguments and errors as for `open_dataset`."""
    return make_readers(paths, keys, units, _formats(paths, format))


def _formats(paths: Sequence[str], format: str | None) -> list[Format]:
    chosen = find_format(format)
    formats = [chosen or format_of(path) for path in paths]
    if any(f.reader is NpyReader for f in formats) and len(set(formats)) > 1:
        raise BadData(f"{paths[0]}: .npy files cannot be mixed with other formats")
    return formats


def _on_disk(paths: Sequence[str]) -> int:
    return sum(Path(path).stat().st_size for path in paths)


def _in_memory(readers: Sequence[Reader]) -> int:
    """Estimate the bytes that HDF5 files take in memory; their datasets may be compressed."""
    return sum(int((reader.sizes() * 50 + 150).sum()) for reader in readers if isinstance(reader, HDF5Dataset))


def _loaded(reader: Reader, lazily: bool) -> HDF5Dataset | LoadedDataset:
    if lazily and isinstance(reader, HDF5Dataset):
        return reader
    return LoadedDataset(reader, require_keys=False)


def _plain(options: Mapping[str, str | None] | None) -> dict[str, str | None] | None:
    return None if options is None else dict(options)
