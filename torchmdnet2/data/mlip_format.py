"""Reader of MLIP's `.cfg` files (moment tensor potentials): configurations between BEGIN_CFG and END_CFG, in eV and Å.

Atoms have types 0, 1, …. The name of the format lists their elements: `mlip/Cu-Al`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import BadData
from .ase_formats import FrameReader
from .extxyz import Frame
from .reader import first_words, register_format

__all__ = ["MlipReader"]

_VOIGT = ["xx", "yy", "zz", "yz", "xz", "xy"]


@register_format("mlip")
class MlipReader(FrameReader):
    """Reads a `.cfg` file of MLIP; the labels are energy, forces and virial (its PlusStress, −volume × stress).

    Args:
        path, keys, units: see `AseDataset`.
        variant: the elements of types 0, 1, …, such as "Cu-Al".
    """

    @classmethod
    def require(cls, variant: str | None) -> None:
        from ase.data import atomic_numbers

        if variant is None or any(name not in atomic_numbers for name in variant.split("-")):
            raise BadData("data format 'mlip': name the elements of types 0, 1, … after it, as in mlip/Cu-Al"
                          + ("" if variant is None else f"; not {variant}"))  # fmt: skip

    @classmethod
    def guess(cls, path: str) -> str:
        return "mlip/Cu-Al" if first_words(path) == ["BEGIN_CFG"] else ""

    def frames(self) -> Iterator[Frame]:
        block: list[list[str]] | None = None
        with open(self.path, encoding="utf-8-sig") as file:
            for words in filter(None, map(str.split, file)):
                if words[0] == "BEGIN_CFG":
                    block = []
                elif block is None:
                    raise ValueError(f"BEGIN_CFG is expected where a configuration begins, not '{words[0]}'")
                elif words[0] == "END_CFG":
                    yield self._frame(block)
                    block = None
                else:
                    block.append(words)
        if block is not None:
            raise EOFError("the file was cut off: it ends without END_CFG")

    def _frame(self, block: list[list[str]]) -> Frame:
        from ase.data import atomic_numbers

        heads = {words[0].rstrip(":"): k for k, words in enumerate(block)}
        missing = [name for name in ("Size", "AtomData") if name not in heads]
        if missing:
            raise ValueError(f"a configuration has no {' and no '.join(missing)}")
        size = int(block[heads["Size"] + 1][0])
        vectors = [w for w in block[heads["Supercell"] + 1 :][:3] if len(w) == 3] if "Supercell" in heads else []
        names, first = block[heads["AtomData"]][1:], heads["AtomData"] + 1
        rows = block[first : first + size]
        if len(rows) < size or any(len(row) != len(names) for row in rows):
            raise ValueError(f"a configuration does not have {size} atoms with the columns {', '.join(names)}")
        column = {name: np.array([float(row[k]) for row in rows]) for k, name in enumerate(names)}
        cell = np.zeros((3, 3))
        cell[: len(vectors)] = np.array(vectors, dtype=float).reshape(-1, 3)
        _require(column, ["type"])
        axes, scale = ("cartes_", np.eye(3)) if "cartes_x" in column else ("direct_", cell)
        types, elements = column["type"].astype(int), self._variant.split("-")
        if types.size and not 0 <= types.min() <= types.max() < len(elements):
            raise ValueError(f"the file has types up to {types.max()}, but the format names only {', '.join(elements)}")
        entries: dict[str, Any] = {}
        if "fx" in column:
            entries["forces"] = _vectors(column, "f")
        if "Energy" in heads:
            entries["energy"] = float(block[heads["Energy"] + 1][0])
        if "PlusStress" in heads:
            given = dict(zip(block[heads["PlusStress"]][1:], map(float, block[heads["PlusStress"] + 1]), strict=True))
            _require(given, _VOIGT)
            entries["virial"] = np.array([given[name] for name in _VOIGT])
        positions = _vectors(column, axes) @ scale
        numbers = np.array([atomic_numbers[elements[k]] for k in types], dtype=np.int64)
        return Frame(numbers, positions, cell, np.arange(3) < len(vectors), entries)


def _vectors(column: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return three columns as [N, 3]."""
    names = [name + x for x in "xyz"]
    _require(column, names)
    return np.stack([column[one] for one in names], axis=1)


def _require(there: Mapping[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"{', '.join(missing)} are expected among {', '.join(there)}")
