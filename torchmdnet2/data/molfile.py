"""MDL molfiles and SDF: coordinates, formal charges, radicals, isotopes and data items.

Formats V2000 and V3000: Dassault Systèmes, "CTfile Formats" (BIOVIA, 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import BadData
from ..stated import Statement
from .extxyz import ISOTOPES

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["MASSES", "Molecule", "read_molecules"]

MASSES = {"D": 2.01410178, "T": 3.01604928}
"""amu."""

_OLD_CHARGES = {1: 3, 2: 2, 3: 1, 5: -1, 6: -2, 7: -3}  # in the lines of atoms; 4 is a radical
_UNPAIRED = {1: 0, 2: 1, 3: 2}  # singlet, doublet, triplet


@dataclass
class Molecule:
    """One molecule of a file.

    Attributes:
        symbols, positions: of the atoms; Å.
        charges, unpaired: of the atoms that have any, by index; e, unpaired electrons.
        masses: of the atoms that have another than the usual one, by index; amu.
        said: the file has a line about charges or radicals.
        items: data items of an SDF, name -> text.
        flat: the header says that the coordinates are a drawing.
    """

    symbols: list[str] = field(default_factory=list)
    positions: list[tuple[float, float, float]] = field(default_factory=list)
    charges: dict[int, int] = field(default_factory=dict)
    unpaired: dict[int, int] = field(default_factory=dict)
    masses: dict[int, float] = field(default_factory=dict)
    said: bool = False
    items: dict[str, str] = field(default_factory=dict)
    flat: bool = False

    def to_ase(self) -> Atoms:
        """The atoms, with data items in `info`.

        Raises:
            BadData: there is no atom, or one is not an element.
        """
        from ase import Atoms
        from ase.data import atomic_masses, atomic_numbers

        known = {**atomic_numbers, **ISOTOPES}
        numbers = []
        for k, symbol in enumerate(self.symbols):
            if known.get(symbol, 0) < 1:
                raise BadData(f"atom {k} is '{symbol}', which is no element")
            numbers.append(known[symbol])
        if not numbers:
            raise BadData("there are no atoms in it")
        atoms = Atoms(numbers, self.positions, info=dict(self.items))
        heavy = {k: MASSES[symbol] for k, symbol in enumerate(self.symbols) if symbol in MASSES} | self.masses
        if heavy:
            atoms.set_masses([heavy.get(k, atomic_masses[z]) for k, z in enumerate(numbers)])
        return atoms

    def statements(self) -> dict[str, list[Statement]]:
        """What the formal charges and radicals say; a file without any leaves both open."""
        found: dict[str, list[Statement]] = {"charge": [], "spin": []}
        if self.said or self.charges:
            found["charge"] = [Statement(sum(self.charges.values()), "the formal charges of its atoms")]
        if len(self.unpaired) == 1:  # of several radicals, the coupling is not known
            found["spin"] = [Statement(sum(self.unpaired.values()) + 1, "the radical of its atoms")]
        return found


def read_molecules(text: str) -> list[Molecule]:
    """All molecules of a molfile or an SDF.

    Raises:
        BadData: the text is cut off, or not of this format.
    """
    records: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("$$$$"):
            records.append([])
        else:
            records[-1].append(line)
    if not any(line.strip() for line in records[-1]):
        records.pop()
    found = []
    for k, lines in enumerate(records):
        try:
            found.append(_molecule(lines))
        except (ValueError, IndexError) as error:
            raise BadData(f"molecule {k}: not a molfile that can be read: {error}") from error
    return found


def _molecule(lines: Sequence[str]) -> Molecule:
    if len(lines) < 4:
        raise ValueError("it ends within its header")
    counts = lines[3]
    molecule = Molecule(flat=lines[1][20:22] == "2D")
    end = next((k for k, line in enumerate(lines) if line.startswith("M  END")), len(lines))
    if "V3000" in counts:
        _read_v3000(lines[4:end], molecule)
    else:
        _read_v2000(counts, lines[4:end], molecule)
    _read_items(lines[end + 1 :], molecule)
    return molecule


def _read_v2000(counts: str, lines: Sequence[str], molecule: Molecule) -> None:
    atoms, bonds = int(counts[0:3]), int(counts[3:6] or 0)
    if len(lines) < atoms:
        raise ValueError(f"it ends after {len(lines)} of its {atoms} atoms")
    old: dict[int, int] = {}
    for k, line in enumerate(lines[:atoms]):
        words = line.split()
        molecule.symbols.append(words[3])
        molecule.positions.append((float(words[0]), float(words[1]), float(words[2])))
        # columns, as neighbours may touch; symbols in other columns than the format's have no more to say
        if line[31:34].strip() == words[3] and (code := line[36:39].strip()).isdigit():
            old[k] = int(code)
    lists: dict[str, dict[int, int]] = {"CHG": {}, "RAD": {}, "ISO": {}}
    for line in lines[atoms + bonds :]:
        name = line[3:6]
        if line.startswith("M  ") and name in lists:
            words = line[9:].split()
            count = int(line[6:9])
            if len(words) < 2 * count:
                raise ValueError(f"'{line}' has fewer than {count} pairs of numbers")
            for atom, value in zip(words[: 2 * count : 2], words[1 : 2 * count : 2], strict=True):
                if not 1 <= int(atom) <= atoms:
                    raise ValueError(f"'{line}' is about atom {atom}, and there are {atoms}")
                lists[name][int(atom) - 1] = int(value)
            molecule.said |= name != "ISO"
    if molecule.said:  # the lines of atoms are then not valid
        molecule.charges = {k: q for k, q in lists["CHG"].items() if q}
        molecule.unpaired = {k: _UNPAIRED[code] for k, code in lists["RAD"].items() if code in _UNPAIRED}
    else:
        molecule.charges = {k: _OLD_CHARGES[code] for k, code in old.items() if code in _OLD_CHARGES}
        molecule.unpaired = {k: 1 for k, code in old.items() if code == 4}
    molecule.masses = {k: _mass(molecule.symbols[k], number) for k, number in lists["ISO"].items()}


def _read_v3000(lines: Sequence[str], molecule: Molecule) -> None:
    joined, start = [], ""
    for line in lines:
        if not line.startswith("M  V30 "):
            continue
        start += line[7:]
        if start.endswith("-"):
            start = start[:-1]
            continue
        joined.append(start.strip())
        start = ""
    inside, place = False, {}
    for line in joined:
        if line.startswith(("BEGIN ATOM", "END ATOM")):
            inside = line.startswith("BEGIN")
        elif inside:
            index, symbol, x, y, z, _, *options = line.split()
            k = place[index] = len(molecule.symbols)
            molecule.symbols.append(symbol)
            molecule.positions.append((float(x), float(y), float(z)))
            values = dict(option.split("=", 1) for option in options if "=" in option)
            molecule.said |= "CHG" in values or "RAD" in values
            if int(values.get("CHG", 0)):
                molecule.charges[k] = int(values["CHG"])
            if int(values.get("RAD", 0)):
                molecule.unpaired[k] = _UNPAIRED[int(values["RAD"])]
            if "MASS" in values:
                molecule.masses[k] = _mass(symbol, int(values["MASS"]))
    counts = next((line.split() for line in joined if line.startswith("COUNTS")), None)
    if counts is None or int(counts[1]) != len(molecule.symbols):
        raise ValueError("it has not as many atoms as its line COUNTS says")


def _mass(symbol: str, number: int) -> float:
    """Of the isotope with a mass number, amu."""
    return {("H", 2): MASSES["D"], ("H", 3): MASSES["T"]}.get((symbol, number), float(number))


def _read_items(lines: Sequence[str], molecule: Molecule) -> None:
    """`> <name>`, then lines of text up to an empty one."""
    name = None
    for line in lines:
        if line.startswith(">") and "<" in line:
            name = line[line.index("<") + 1 : line.rindex(">")]
            molecule.items.setdefault(name, "")
        elif not line.strip():
            name = None
        elif name is not None:
            molecule.items[name] = f"{molecule.items[name]}\n{line}".strip()
