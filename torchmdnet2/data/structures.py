"""Structures from files of any format that ASE reads, with what the files state of charge, spin, units and cell.

ASE reads coordinates; what its readers leave out is added here: formal charges and further molecules of SDF and
molfiles, charges of atoms in PDB files, charge and multiplicity in the text of quantum-chemistry programs, units of
length in the header of extended XYZ.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BadData, StructureWarning
from ..stated import OF_ATOMS, Statement, agreed, no_cell, stated_units, statements, whole_number
from .extxyz import BOM, ISOTOPES, raw_frames, with_elements
from .molfile import MASSES, read_molecules

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["open_structures", "read_structures"]

_PROGRAMS = {
    "gaussian-out": r"^\s*Charge\s*=\s*(?P<charge>[+-]?\d+)\s+Multiplicity\s*=\s*(?P<spin>\d+)\s*$",
    "gaussian-in": r"^\s*(?P<charge>[+-]?\d+)(?:\s*,\s*|\s+)(?P<spin>\d+)(?:(?:\s*,\s*|\s+)[+-]?\d+)*\s*$",
    "orca-output": r"^\s*Total Charge\s+Charge[\s.]+(?P<charge>[+-]?\d+)|^\s*Multiplicity\s+Mult[\s.]+(?P<spin>\d+)",
    "nwchem-in": r"(?i)^\s*charge\s+(?P<charge>[+-]?\d+)|^\s*mult\s+(?P<spin>\d+)",
    "nwchem-out": r"^\s*Charge\s*:\s*(?P<charge>[+-]?\d+)|^\s*Spin multiplicity\s*:\s*(?P<spin>\d+)",
    "gamess-us-in": r"(?i)\bicharg\s*=\s*(?P<charge>[+-]?\d+)|\bmult\s*=\s*(?P<spin>\d+)",
    "gamess-us-out": r"^\s*CHARGE OF MOLECULE\s*=\s*(?P<charge>[+-]?\d+)|^\s*SPIN MULTIPLICITY\s*=\s*(?P<spin>\d+)",
    "turbomole": r"(?i)^\s*\$chrg\s+(?P<charge>[+-]?\d+)",
    "espresso-in": r"(?i)\btot_charge\s*=\s*(?P<charge>[+-]?[\d.]+)",
    "cjson": r'"totalCharge"\s*:\s*(?P<charge>[+-]?\d+)|"totalSpinMultiplicity"\s*:\s*(?P<spin>\d+)',
}
"""Format of ASE -> where its text states charge and multiplicity."""

_PDB_CHARGE = re.compile(r"(\d)([+-])|([+-])(\d)|([+-])")


class _Found(NamedTuple):
    """A structure, and what its file states of it besides."""

    atoms: Atoms
    charge: list[Statement]
    spin: list[Statement]


def read_structures(path: str | PathLike, index: int | slice | None = None, format: str | None = None) -> list[Atoms]:
    """Structures of a file; `info["charge"]` and `info["spin"]` hold what it states, positions are in Å.

    Use it instead of `ase.io.read`, which leaves out the formal charges of an SDF, all of its molecules but the first,
    and the charge in the log of a quantum-chemistry program.

    Args:
        path: a file of any format that ASE reads; text may begin with a byte order mark.
        index: a number or a slice; None: all.
        format: as ASE calls it; None: by the file's name and content.

    Raises:
        FileNotFoundError: there is no such file.
        BadData: it states two charges, multiplicities or elements that differ, or is damaged.
        IndexError: there is no structure of this number.
    """
    found = open_structures(path, format)
    return [found[k] for k in range(len(found))[index]] if isinstance(index, slice) else (
        [found[index]] if index is not None else [found[k] for k in range(len(found))]
    )  # fmt: skip


def open_structures(path: str | PathLike, format: str | None = None) -> Sequence[Atoms]:
    """The same as a sequence, of which XYZ files and trajectories of ASE are parsed frame by frame."""
    import ase.io.formats

    name = str(path)
    format = format or ase.io.formats.filetype(name)
    if format in ("extxyz", "xyz"):
        return _Xyz(name)
    if format == "traj":
        return _Completed(name, ase.io.trajectory.Trajectory(name))
    reader = _READERS.get(format)
    if reader is not None:
        found = reader(_text(name))
    else:
        text = _text(name) if format in _PROGRAMS else ""
        ours = _of_program(_PROGRAMS[format], text) if text else _Found(None, [], [])  # type: ignore[arg-type]
        source: Any = io.StringIO(text) if text.startswith(BOM) else name
        found = [_Found(atoms, ours.charge, ours.spin) for atoms in _by_ase(source, format)]
    return [_completed(one, f"{name}, structure {k}" if len(found) > 1 else name) for k, one in enumerate(found)]


def _by_ase(source: Any, format: str) -> list[Atoms]:
    import ase.io

    if isinstance(source, str) and _begins_with_mark(source):
        source = io.StringIO(_text(source))
    return list(ase.io.iread(source, index=":", format=format, do_not_split_by_at_sign=True))


def _begins_with_mark(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(3) == BOM.encode()


def _text(path: str) -> str:
    from ase.io.formats import open_with_compression

    with open_with_compression(path, "rb") as file:
        return file.read().decode("utf-8-sig", errors="replace")


class _Completed(Sequence):
    """Frames of a trajectory of ASE."""

    def __init__(self, path: str, frames: Any):
        self.path, self.frames = path, frames

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: Any) -> Any:
        k = range(len(self))[index]
        return _completed(_Found(self.frames[k], [], []), f"{self.path}, structure {k}")


class _Xyz(Sequence):
    """Frames of an XYZ file, plain or extended; only those that are asked for are parsed, best in ascending order."""

    def __init__(self, path: str):
        self.path = path
        self._count = sum(1 for _ in raw_frames(path))
        self._next, self._raw = 0, raw_frames(path)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        from ase.io import read

        k = range(self._count)[index]
        if k < self._next:
            self._next, self._raw = 0, raw_frames(self.path)
        raw = next(islice(self._raw, k - self._next, None))
        self._next = k + 1
        text, isotopes = with_elements(*raw)
        atoms: Atoms = read(io.StringIO(text), format="extxyz")  # type: ignore[assignment]
        _set_isotopes(atoms, isotopes)
        return _completed(_Found(atoms, [], []), f"{self.path}, structure {k}" if self._count > 1 else self.path)


def _set_isotopes(atoms: Atoms, isotopes: dict[int, str]) -> None:
    if isotopes and not atoms.has("masses"):
        masses = atoms.get_masses()
        for k, symbol in isotopes.items():
            masses[k] = MASSES[symbol]
        atoms.set_masses(masses)


def _completed(found: _Found, where: str) -> Atoms:
    """The structure in Å, with the charge and spin that are stated in its info, and without a dummy cell."""
    atoms, info = found.atoms, found.atoms.info
    units = stated_units(info)
    if "length" in units or "cell" in units:
        length = units.get("length") or units["cell"]
        atoms.set_cell(atoms.cell.array * units.get("cell", length).size)
        if "length" in units:
            atoms.set_positions(atoms.positions * length.size, apply_constraint=False)
        for key in [key for key, value in info.items() if any(u.source == f"{key}={value}" for u in units.values())]:
            del info[key]
    if no_cell(atoms.cell.array, atoms.pbc):
        warnings.warn(f"{where}: a cell of 1 × 1 × 1 Å means that there is none: a molecule", StructureWarning, 4)
        atoms.set_cell(None)
        atoms.set_pbc(False)
    given = {**(atoms.calc.results if atoms.calc is not None else {}), **atoms.arrays}
    arrays = {key: given[key] for key in OF_ATOMS if key in given}
    try:
        own = statements(info, arrays, bool(atoms.pbc.any()), "'{}'")
    except BadData as error:
        raise BadData(f"{where}: {error}") from None
    for quantity, more in (("charge", found.charge), ("spin", found.spin)):
        value = agreed([*own[quantity], *more], quantity, f"{where}: ")
        if value is not None:
            info[quantity] = value
    return atoms


# --- formats ---------------------------------------------------------------------------------------------------------


def _molfile(text: str) -> list[_Found]:
    found = []
    for molecule in read_molecules(text):
        if molecule.flat and not any(z for _, _, z in molecule.positions) and len(molecule.symbols) > 3:
            warnings.warn(
                "the header of the molfile says 2D: its coordinates are a drawing, and no structure in Å",
                StructureWarning,
                stacklevel=4,
            )
        if len(molecule.unpaired) > 1:
            warnings.warn(
                f"{len(molecule.unpaired)} atoms of the molfile are radicals, and their coupling is not known: no "
                "multiplicity is read, give it as spin",
                StructureWarning,
                stacklevel=4,
            )
        stated = molecule.statements()
        found.append(_Found(molecule.to_ase(), stated["charge"], stated["spin"]))
    if not found:
        raise BadData("there are no molecules in it")
    return found


def _pdb(text: str) -> list[_Found]:
    """ASE's reader, and the charges of atoms in columns 79 and 80."""
    lines, charges, isotopes = [], [{}], [{}]  # type: ignore[var-annotated]
    count = 0
    for line in text.splitlines():
        if line.startswith(("ATOM  ", "HETATM")):
            match = _PDB_CHARGE.fullmatch(line[78:80].strip())
            if match:
                sign = match[2] or match[3] or match[5]
                charges[-1][count] = int(f"{sign}{match[1] or match[4] or 1}")
            symbol = line[76:78].strip()
            if symbol in ISOTOPES:
                isotopes[-1][count] = symbol
                line = f"{line[:76]} H{line[78:]}"
            count += 1
        elif line.startswith("END"):  # ENDMDL and END end a structure for ASE
            if count or not line.startswith("END "):
                charges.append({})
                isotopes.append({})
            count = 0
        lines.append(line)
    while len(lines) > 1 and lines[-1].strip() == "END" and any(line.startswith("ENDMDL") for line in lines):
        lines.pop()  # it would make a structure without atoms
    found = []
    for k, atoms in enumerate(_by_ase(io.StringIO("\n".join(lines) + "\n"), "proteindatabank")):
        own = charges[k] if k < len(charges) else {}
        _set_isotopes(atoms, isotopes[k] if k < len(isotopes) else {})
        if not atoms.cell.array.any():  # CRYST1 of zeros
            atoms.set_pbc(False)
        stated = [Statement(sum(own.values()), "the charges of its atoms (columns 79 and 80)")] if own else []
        found.append(_Found(atoms, stated, []))
    return found


def _of_program(pattern: str, text: str) -> _Found:
    """Charge and multiplicity in the text of a program."""
    found: dict[str, list[Statement]] = {"charge": [], "spin": []}
    for match in re.finditer(pattern, text, re.MULTILINE):
        for quantity, value in match.groupdict().items():
            if value is not None:
                line = " ".join(text[match.start() : match.end()].split())
                found[quantity].append(Statement(whole_number(value, quantity), f"its line '{line}'"))
        if pattern == _PROGRAMS["gaussian-in"]:
            break  # later lines of two numbers are about other things
    return _Found(None, found["charge"], found["spin"])  # type: ignore[arg-type]


_READERS = {"sdf": _molfile, "mol": _molfile, "proteindatabank": _pdb}
