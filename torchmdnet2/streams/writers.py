"""Results as text: SDF with the bonds of the input, extended XYZ, tables in CSV.

Each record is text by itself, so that files can be appended to.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadConfig

if TYPE_CHECKING:
    from ase import Atoms

    from .relaxing import Outcome

__all__ = ["writer_of"]

Writer = Callable[["Outcome"], str]

_FORMATS = (".sdf", ".xyz", ".extxyz", ".csv")


def writer_of(path: str, has_bonds: bool) -> Writer:
    """What writes a record into a file of this name.

    Args:
        path: of the file to be written.
        has_bonds: whether the input has bonds, which an SDF needs.

    Raises:
        BadConfig: the format is not known, or needs bonds that the input lacks.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".sdf" and not has_bonds:
        raise BadConfig(f"{path}: an SDF has bonds, and the input has none: write an .xyz file")
    if suffix not in _FORMATS:
        raise BadConfig(f"{path}: results are written to {', '.join(_FORMATS)}")
    return {".sdf": _sdf, ".csv": _csv}.get(suffix, _xyz)


def _properties(outcome: Outcome, atoms: Atoms) -> dict[str, Any]:
    """What is known of a structure as a whole, the number and name of its record first."""
    name = {"name": outcome.record.name} if outcome.record.name else {}
    return {"record": outcome.record.number, **atoms.info, **name}


def _xyz(outcome: Outcome) -> str:
    from ase.io import write

    text = io.StringIO()
    for atoms in outcome.structures:
        copy = atoms.copy()
        copy.info = _properties(outcome, atoms)
        write(text, copy, format="extxyz")
    return text.getvalue()


def _csv(outcome: Outcome) -> str:
    """Without a line of names: `csv_head` gives it."""
    text = io.StringIO()
    for atoms in outcome.structures:
        found = {"formula": atoms.get_chemical_formula(), **_properties(outcome, atoms)}
        csv.writer(text, lineterminator="\n").writerow([found.get(name, "") for name in CSV_COLUMNS])
    return text.getvalue()


CSV_COLUMNS = (
    "record", "name", "conformer", "formula", "charge", "energy", "relative_energy", "largest_force", "steps",
    "converged", "bonds_changed", "novelty",
)  # fmt: skip
"""Units: e, eV, eV/Å."""


def csv_head(path: str) -> str:
    """What a file begins with, "" but for CSV."""
    return ",".join(CSV_COLUMNS) + "\n" if path.lower().endswith(".csv") else ""


def _sdf(outcome: Outcome) -> str:
    text = []
    for atoms in outcome.structures:
        block = outcome.record.molfile.partition("M  END")[0]
        text.append(with_positions(block, atoms.positions) + "M  END\n")
        for name, value in _properties(outcome, atoms).items():
            text.append(f"> <{name}>\n{f'{value:.8f}' if isinstance(value, float) else value}\n\n")
        charges = atoms.arrays.get("charges")
        if charges is not None:
            text.append("> <atom_charges>\n" + "\n".join(f"{q:.5f}" for q in charges) + "\n\n")
        text.append("$$$$\n")
    return "".join(text)


def with_positions(block: str, positions: Any) -> str:
    """A molfile with other coordinates.

    Args:
        block: V2000 or V3000, up to "M  END".
        positions: [N, 3] Å.
    """
    lines = block.split("\n")
    lines[1] = lines[1][:20].ljust(20) + "3D" + lines[1][22:]
    rows = iter(positions.tolist())
    if "V3000" in lines[3]:
        inside = False
        for k, line in enumerate(lines):
            if line.startswith("M  V30 BEGIN ATOM"):
                inside = True
            elif line.startswith("M  V30 END ATOM"):
                inside = False
            elif inside and not (k and lines[k - 1].rstrip().endswith("-")):
                words = line.split()
                words[4:7] = [f"{x:.6f}" for x in next(rows)]
                lines[k] = "M  V30 " + " ".join(words[2:])
        return "\n".join(lines)
    for k, (x, y, z) in enumerate(rows, start=4):
        line = lines[k]
        lines[k] = f"{x:10.4f}{y:10.4f}{z:10.4f}" + (line[30:] if len(line) > 30 else " " + line.split(None, 3)[3])
    return "\n".join(lines)
