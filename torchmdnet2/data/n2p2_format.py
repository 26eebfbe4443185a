"""Reader of `input.data` of n2p2 and RuNNer: structures between `begin` and `end`, in bohr and hartree.

Lines: `lattice` x y z (three or none), `atom` x y z element charge (unused) fx fy fz, `energy`, `charge` (of the whole
structure), `comment`. See https://compphysvienna.github.io/n2p2/topics/cfg_file.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from ..errors import BadData
from .ase_formats import FrameReader
from .extxyz import Frame, numbers_of
from .reader import first_words, register_format

__all__ = ["N2P2Reader"]


@register_format("n2p2")
class N2P2Reader(FrameReader):
    """Reads an `input.data`; the labels are energy, forces and charges. The entry "charge" is the total charge."""

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
