"""Single .npz files of one molecule, as sGDML, MD17 and rMD17 have them."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ..errors import BadData
from .conversion import checked_keys
from .formats import register_format
from .npy_format import ArrayReader
from .reader import Chunk

__all__ = ["NpzReader"]

_POSITIONS = ("R", "coords", "coord", "positions", "pos")
_NUMBERS = ("z", "nuclear_charges", "numbers", "atomic_numbers", "Z")
_NAMES = {"energy": ("E", "energies"), "forces": ("F",)}
_CELLS = ("lattice", "cell", "box")


@register_format("npz")
class NpzReader(ArrayReader):
    """Frames of one .npz file.

    Positions [S, N, 3] are called R, coords or positions; atomic numbers [N] or [S, N] z, nuclear_charges or numbers.
    `energy` and `forces` also stand for E, energies and F. Units are those that the file states (e_unit, r_unit), else
    the declared ones.

    Args:
        path: the file.
        keys: label -> name of its array; without keys energy and forces are read if they are there.
        units: "energy" and "length", and where they do not follow "forces", "stress", "dipole".

    Raises:
        FileNotFoundError: no such file.
        BadData: it is damaged, has no positions or numbers, is periodic, or units are stated nowhere.
    """

    extensions = ("npz",)

    def __init__(
        self, path: str, keys: Mapping[str, str | None] | None = None, units: Mapping[str, str | None] | None = None
    ):
        self.path, self.files = str(path), [str(path)]
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no data file {self.path}")
        with self._opened() as content:
            inside = set(content.files)
            stated = {"energy": _text(content, "e_unit"), "length": _text(content, "r_unit")}
        for found, names in (("positions", _POSITIONS), ("atomic numbers", _NUMBERS)):
            if not inside & set(names):
                raise BadData(
                    f"{self.path}: {found} are expected as {', '.join(names)}; there are: {', '.join(sorted(inside))}"
                )
        if inside & set(_CELLS):
            raise BadData(f"{self.path}: periodic frames are not read from .npz files; convert them to HDF5 or extxyz")
        optional: dict[str, str | None] = {"charge": "charge", "spin": "spin"}
        self.asked = checked_keys(keys, self.path) if keys is not None else {}
        wanted = checked_keys({**optional, **({"energy": "energy", "forces": "forces"} if keys is None else keys)},
                              self.path)  # fmt: skip
        named = {name: _found(name, key, inside) for name, key in wanted.items()}
        self.keys = {name: key for name, key in named.items() if key is not None}
        self.counts, self.available = Counter(), inside - {*_POSITIONS, *_NUMBERS}
        self._read_units({**(units or {}), **{name: unit for name, unit in stated.items() if unit}}, ".npz")

    def _opened(self) -> np.lib.npyio.NpzFile:
        try:
            content = np.load(self.path, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise BadData(f"{self.path}: it is damaged or not a .npz file: {error}") from error
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise BadData(f"{self.path}: it is not a .npz file")
        return content

    def chunks(self) -> Iterator[Chunk]:
        self.num_frames = 0
        arrays = {}
        with self._opened() as content:
            names = {name: next(n for n in known if n in content.files)
                     for name, known in (("pos", _POSITIONS), ("z", _NUMBERS))}  # fmt: skip
            for name, key in {**names, **self.keys}.items():
                try:
                    array = content[key]
                except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                    raise BadData(
                        f"{self.path}: its array '{key}' is damaged or not made of numbers: {error}"
                    ) from error
                if array.dtype.kind not in "iuf":
                    raise BadData(f"{self.path}: '{key}' is not made of numbers but of {array.dtype}")
                arrays[name] = (f"{self.path}, array '{key}'", array)
        yield from self._frames_of(self.path, arrays)


def _found(name: str, key: str, inside: set[str]) -> str | None:
    """What a label is called in the file, None where it is not there."""
    if key in inside:
        return key
    return next((other for other in _NAMES.get(name, ()) if key == name and other in inside), None)


def _text(content: np.lib.npyio.NpzFile, name: str) -> str | None:
    """A unit that a file of sGDML states."""
    if name not in content.files:
        return None
    value = content[name]
    text = value.item() if value.ndim == 0 else ""
    text = text.decode() if isinstance(text, bytes) else str(text)
    return text if text not in ("", "N/A") else None
