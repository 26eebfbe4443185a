"""Readers of the text files that other packages of potentials train on: n2p2 and RuNNer, and MLIP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import BadData
from .ase_formats import FrameReader
from .extxyz import Frame, numbers_of
from .reader import first_words, register_format

__all__ = ["MlipReader", "N2P2Reader"]


@register_format("n2p2")
class N2P2Reader(FrameReader):
    """Reads an `input.data` of n2p2 or RuNNer: structures between `begin` and `end`, in bohr and hartree.

    Lines: `lattice` x y z (three or none), `atom` x y z element charge (unused) fx fy fz, `energy`, `charge` (of the
    whole structure), `comment`. See https://compphysvienna.github.io/n2p2/topics/cfg_file.html. The labels are energy,
    forces and charges. The entry "charge" is the total charge.
    """

    default_units: ClassVar = {"energy": "hartree", "length": "bohr"}

    @classmethod
    def guess(cls, path: str) -> str:
        return "n2p2" if first_words(path) == ["begin"] else ""

    def frames(self) -> Iterator[Frame]:
        with open(self.path, encoding="utf-8-sig") as file:
            lines = (line.split() for line in file)
            for words in filter(None, lines):
                if words[0] != "begin":
                    raise ValueError(f"'begin' is expected where a structure begins, not '{words[0]}'")
                if len(words) > 1:
                    raise BadData(
                        f"{self.path}: the file names its columns after 'begin'; read it with the format runnerdata"
                    )
                yield self._frame(lines)

    def _frame(self, lines: Iterable[list[str]]) -> Frame:
        lattice: list[list[float]] = []
        atoms: list[list[str]] = []
        entries: dict[str, Any] = {}
        for name, *words in filter(None, lines):
            if name == "atom":
                if len(words) != 9:
                    raise ValueError(f"atom {len(atoms)} has {len(words)} columns instead of 9")
                atoms.append(words)
            elif name == "lattice":
                lattice.append([float(word) for word in words])
            elif name in ("energy", "charge"):
                entries[name] = float(words[0])
            elif name == "end":
                break
            elif name != "comment":
                raise ValueError(f"'{name}' is not one of begin, comment, lattice, atom, energy, charge, end")
        else:
            raise EOFError("the file was cut off: it ends without 'end'")
        if np.shape(lattice) not in ((0,), (3, 3)):
            raise ValueError(f"three lattice vectors are expected, not {lattice}")
        numbers = numbers_of([words[3] for words in atoms])
        values = np.array([[float(w) for k, w in enumerate(words) if k != 3] for words in atoms]).reshape(-1, 8)
        entries["forces"] = values[:, 5:]
        if values[:, 3].any():  # files without charges have zeros
            entries["charges"] = values[:, 3]
        cell = np.array(lattice) if lattice else np.zeros((3, 3))
        return Frame(numbers, values[:, :3], cell, np.full(3, bool(lattice)), entries)


_VOIGT = ["xx", "yy", "zz", "yz", "xz", "xy"]


@register_format("mlip")
class MlipReader(FrameReader):
    """Reads a `.cfg` file of MLIP: configurations between BEGIN_CFG and END_CFG, in eV and Å.

    Atoms have types 0, 1, …. The name of the format lists their elements: `mlip/Cu-Al`. The labels are energy, forces
    and virial (its PlusStress, −volume × stress).

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
