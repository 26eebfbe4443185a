"""Reader of CP2K's trajectories: NAME-pos-1.xyz and, beside it, NAME-frc-1.xyz, NAME-1.cell and NAME-1.stress.

Positions are in Å, energies in hartree, forces in hartree/bohr, the stress in bar (pressure positive). A file
NAME-1.restart gives total charge and multiplicity, and the cell if NAME-1.cell is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..errors import BadData
from .ase_formats import FrameReader
from .extxyz import Frame, numbers_of
from .labels import Names
from .program_texts import program_statements
from .reader import register_format
from .structures import open_found

__all__ = ["Cp2kReader"]

_STEP = re.compile(r"\bi = +(\d+).*\bE = +([-+.\dEe]+)")


@register_format("cp2k")
class Cp2kReader(FrameReader):
    """Reads a trajectory of CP2K; the labels are energy, forces and stress.

    The variant `cp2k/none` is for structures without a cell.
    """

    default_units: ClassVar = {
        "energy": "hartree",
        "length": "angstrom",
        "forces": "hartree/bohr",
        "stress": "bar",
    }

    def __init__(self, path, keys=None, units=None, variant=None):  # type: ignore[no-untyped-def]
        super().__init__(path, keys, units, variant)
        self._beside = {kind: other for kind in ("frc", "cell", "stress", "restart") if (other := self._other(kind))}
        self.files = self.files_of([self.path], keys)

    @classmethod
    def variants(cls) -> Collection[str]:
        return ("none",)

    @classmethod
    def files_of(cls, paths: Sequence[str], keys: Names) -> list[str]:
        others = (_beside(path, kind) for path in paths for kind in ("frc", "cell", "stress", "restart"))
        return [*paths, *(str(other) for other in others if other.is_file())]

    def _other(self, kind: str) -> Path | None:
        other = _beside(self.path, kind)
        return other if other.is_file() else None

    def frames(self) -> Iterator[Frame]:
        stated, isolated = self._stated(), self._variant == "none"
        cells = {} if isolated else self._table("cell", 9)
        stresses = self._table("stress", 9)
        fixed = None if cells or isolated else self._fixed_cell()
        forces = _steps(str(self._beside["frc"])) if "frc" in self._beside else None
        for step, energy, symbols, positions in _steps(self.path):
            entries: dict[str, object] = {**stated, "energy": energy}
            if forces is not None:
                other, _, names, values = next(forces, (None, 0.0, [], positions))
                if other != step or names != symbols:
                    raise ValueError(f"step {step} has no forces in {self._beside['frc']}, where step {other} is next")
                entries["forces"] = values
            if isolated:
                cell, pbc = np.zeros((3, 3)), np.zeros(3, dtype=bool)
            elif fixed is not None:
                cell, pbc = fixed
            elif step in cells:
                cell, pbc = cells[step].reshape(3, 3), np.ones(3, dtype=bool)
            else:
                raise ValueError(f"step {step} is not in {self._beside['cell']}")
            if step in stresses:
                entries["stress"] = -stresses[step].reshape(3, 3)
            yield Frame(numbers_of(symbols), positions, cell, pbc, entries)

    def _table(self, kind: str, width: int) -> dict[int, np.ndarray]:
        """Return step -> numbers of a file of CP2K whose lines hold step, time and numbers."""
        if kind not in self._beside:
            return {}
        rows = np.loadtxt(self._beside[kind], ndmin=2)
        return {int(row[0]): row[2 : 2 + width] for row in rows}

    def _stated(self) -> dict[str, int]:
        """Return the total charge and multiplicity that NAME-1.restart states."""
        if "restart" not in self._beside:
            return {}
        found = program_statements("cp2k-restart", self._beside["restart"].read_text(errors="replace"))
        return {name: stated[0].value for name, stated in found.items() if stated}

    def _fixed_cell(self) -> tuple[np.ndarray, np.ndarray]:
        restart = self._beside.get("restart")
        if restart is None or not re.search(r"(?m)^\s*&CELL\b", restart.read_text(errors="replace")):
            names = f"{_beside(self.path, 'cell').name} nor {_beside(self.path, 'restart').name}"
            raise BadData(f"{self.path}: the cell is missing, since there is neither {names}"
                          f"{' with a section &CELL' if restart else ''} beside the file; "
                          "for molecules without a cell, name the format cp2k/none")  # fmt: skip
        (found,) = open_found(restart, "cp2k-restart")
        return found.atoms.cell.array, np.asarray(found.atoms.pbc)


def _beside(path: str, kind: str) -> Path:
    """Return the file of another quantity that belongs to NAME-pos-1.xyz."""
    name = Path(path).name
    other = name.replace("-pos-", "-frc-") if kind == "frc" else re.sub(r"-pos-(\d+)\.xyz$", rf"-\1.{kind}", name)
    return Path(path).with_name(other if other != name else f"{Path(path).stem}.{kind}")


def _steps(path: str) -> Iterator[tuple[int, float, list[str], np.ndarray]]:
    """Yield step, energy, symbols and vectors [N, 3] of each frame of an XYZ file of CP2K."""
    with open(path, encoding="utf-8-sig") as file:
        for head in file:
            if not head.strip():
                continue
            comment = _STEP.search(file.readline())
            if comment is None:
                raise ValueError(f"{path}: 'i = STEP, … E = ENERGY' is expected in the second line of a frame")
            rows = [file.readline().split() for _ in range(int(head))]
            if any(len(row) < 4 for row in rows):
                raise EOFError(f"{path}: the file was cut off: it ends within step {comment[1]}")
            vectors = np.array([list(map(float, row[1:4])) for row in rows]).reshape(-1, 3)
            yield int(comment[1]), float(comment[2]), [row[0] for row in rows], vectors
