"""Data formats by name, and the files of a data set.

A format is a class derived from `Reader` (or from `FrameReader`, which needs one method) and registered under a name:

    @register_format("mine")
    class Mine(FrameReader):
        extensions = ("mine",)

        def frames(self):
            yield Frame(numbers, positions, cell, pbc, {"energy": energy, "forces": forces})

A format with variants reads those that a library knows: "dpdata/deepmd/npy" is the variant "deepmd/npy" of "dpdata".
The formats of ase.io also go by their name alone.
"""

from __future__ import annotations

import glob as _glob
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ..errors import BadData
from ..registry import FORMATS, did_you_mean
from .reader import Reader, files_in

__all__ = ["FORMATS", "Format",  "data_files", "find_format", "format_of", "make_readers",
           "register_format"]  # fmt: skip

_COMPRESSED = ("gz", "bz2", "xz")


def register_format(name: str) -> Callable[[type[Reader]], type[Reader]]:
    """Class decorator: register a data format under `name`, for `data.format` and `--format`.

    Raises:
        ValueError: another class has this name.
    """
    return FORMATS.register(name)


class Format(NamedTuple):
    """A format that was chosen.

    Attributes:
        name: as it was given.
        reader: its class.
        variant: which of those that the class reads.
    """

    name: str
    reader: type[Reader]
    variant: str | None = None


def find_format(name: str | None) -> Format | None:
    """Return the data format with this name; None for "auto" and None: the extension of each file decides.

    Raises:
        BadData: there is none; names the closest.
        MissingBackend: the package that reads it is not installed.
    """
    if name is None or name == "auto":
        return None
    head, _, variant = name.partition("/")
    if name in FORMATS:
        found = Format(name, FORMATS[name])
    elif variant and head in FORMATS:
        found = Format(name, FORMATS[head], variant)
    elif name in FORMATS["ase"].variants():
        found = Format(name, FORMATS["ase"], name)
    else:
        known = list(FORMATS)
        hint = did_you_mean(name, [*known, *FORMATS["ase"].variants()]) or "."
        raise BadData(f"unknown data format '{name}'{hint} Known: auto, {', '.join(known)}, and those of ase.io")
    found.reader.require(found.variant)
    return found


def format_of(path: str) -> Format:
    """Return the format for a file's extension, before .gz, .bz2 or .xz.

    Raises:
        BadData: it tells none.
    """
    suffixes = [suffix.lstrip(".").lower() for suffix in Path(path).suffixes]
    compressed = suffixes and suffixes[-1] in _COMPRESSED
    extension = (["", *suffixes])[-2 if compressed else -1]
    known = {extension: name for name in reversed(list(FORMATS)) for extension in FORMATS[name].extensions}
    if extension not in known:
        raise BadData(
            f"{path}: the extension '.{extension}' does not determine its format{did_you_mean(extension, known) or '.'}"
            f" Known: {', '.join(sorted(known))}; or give the format{_guess(path)}"
        )
    name = known[extension]
    FORMATS[name].require(None)
    return Format(name, FORMATS[name])


def _guess(path: str) -> str:
    """Return the format that ase.io assumes for a file, as an example for messages."""
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    try:
        found = filetype(path)
    except (UnknownFileTypeError, OSError, UnicodeDecodeError):
        found = ""
    return f", as in data.format: {found} (--format {found})" if found in ioformats else " (data.format, --format)"


def make_readers(
    paths: Sequence[str],
    keys: Mapping[str, str | None] | None,
    units: Mapping[str, str | None] | None,
    formats: Sequence[Format],
) -> list[Reader]:
    """Return readers of files, in order, each of the format of its file."""
    made: list[Reader] = []
    for chosen, group in groupby(zip(paths, formats, strict=True), key=lambda pair: pair[1]):
        made += chosen.reader.readers([path for path, _ in group], keys, units, chosen.variant)
    return made


def data_files(paths: Sequence[str | os.PathLike], format: str | None = None) -> list[str]:
    """Return the files that names and patterns stand for, each once.

    Args:
        paths: names of files, or patterns.
        format: of the data, where it is known; of some a folder is one set of data.

    Raises:
        FileNotFoundError, BadData: as `open_dataset`.
    """
    files: list[str] = []
    chosen = find_format(format)
    folders = chosen is not None and chosen.reader.folders
    for path in map(str, paths):
        if Path(path).is_file() or (folders and Path(path).is_dir()):
            if not files_in(path):
                raise FileNotFoundError(f"{path} is a folder without files")
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
        raise BadData(f"{twice}: this file is named twice; its frames would count double and stand in several subsets")
    return files
