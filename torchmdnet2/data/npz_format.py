"""Single .npz files of one molecule, as sGDML, MD17 and rMD17 have them."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ..errors import BadData
from .conversion import checked_keys, stated_key, structure_keys
from .formats import register_format
from .npy_format import ArrayReader
from .reader import Chunk

__all__ = ["NpzReader"]

_STRUCTURE = {
    "pos": ("R", "coords", "coord", "positions", "pos"),
    "z": ("z", "nuclear_charges", "numbers", "atomic_numbers", "Z"),
    "cell": ("lattice", "cell", "box", "cells"),
    "pbc": ("pbc",),
}
_NAMES = {"energy": ("E", "energies"), "forces": ("F",)}


@register_format("npz")
class NpzReader(ArrayReader):
    """Frames of one .npz file.

    Positions [S, N, 3] are called R, coords or positions; atomic numbers [N] or [S, N] z, nuclear_charges or numbers.
    Others are named by the keys "positions" and "numbers". A cell [3, 3] or [S, 3, 3] is called lattice, cell or box,
    and pbc [3] or [S, 3] may be beside it. Stress and virial are [S, 3, 3], [S, 9] or [S, 6].
    `energy` and `forces` also stand for E, energies and F. Units are those that the file states (e_unit, r_unit), else
    the declared ones.

    Args:
        path: the file.
        keys: label -> name of its array; without keys energy and forces are read if they are there.
        units: "energy" and "length", and where they do not follow "forces", "stress", "dipole".

    Raises:
        FileNotFoundError: no such file.
        BadData: it is damaged, has no positions or numbers, or units are stated nowhere.
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
        keys, named_structure = structure_keys(keys)
        self._structure = {name: next((n for n in known if n in inside), None) for name, known in _STRUCTURE.items()}
        self._structure |= {name: key for name, key in named_structure.items() if key in inside}
        for found, name, key in (("positions", "pos", "positions"), ("atomic numbers", "z", "numbers")):
            if self._structure[name] is None or (name in named_structure and named_structure[name] not in inside):
                known = [named_structure[name]] if name in named_structure else _STRUCTURE[name]
                raise BadData(
                    f"{self.path}: {found} are expected as {', '.join(known)}; there are: "
                    f"{', '.join(sorted(inside))}. keys.{key} names another"
                )
        stated_keys = {name: stated_key(name, inside, self.path) for name in ("charge", "spin")}
        optional: dict[str, str | None] = {name: key or name for name, key in stated_keys.items()}
        self.asked = checked_keys(keys, self.path) if keys is not None else {}
        wanted = checked_keys({**optional, **({"energy": "energy", "forces": "forces"} if keys is None else keys)},
                              self.path)  # fmt: skip
        named = {name: _found(name, key, inside) for name, key in wanted.items()}
        self.keys = {name: key for name, key in named.items() if key is not None}
        self.counts, self.available = Counter(), inside - {*self._structure.values()}
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
            names = {name: key for name, key in self._structure.items() if key is not None}
            for name, key in {**names, **self.keys}.items():
                try:
                    array = content[key]
                except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                    raise BadData(
                        f"{self.path}: its array '{key}' is damaged or not made of numbers: {error}"
                    ) from error
                if array.dtype.kind not in ("iufb" if name == "pbc" else "iuf"):
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
