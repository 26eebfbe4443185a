"""Charge, multiplicity and unit of length in texts of programs, which ASE and dpdata leave out."""

from __future__ import annotations

import re

from ..core.stated import Statement, whole_number
from ..errors import BadData
from ..units import factor

__all__ = ["length_factor", "program_statements", "states_charges", "states_more"]

_REAL = r"(?P<charge>[+-]?\d+(?:\.\d*)?(?:[deDE][+-]?\d+)?)"
_LINE, _WORDS, _EMPTY = r"(?:.*\n)", r"(?:.*\S.*\n)", r"(?:[ \t\r]*\n)"
_DFT = r"(?:(?:[ \t]*[^&\s].*\n|[ \t\r]*\n)*?[ \t]*{}[ \t]+(?P<{}>[+-]?\d+)[ \t\r]*$)?"

_PROGRAMS = {
    # with a counterpoise correction the value of all fragments counts, with ONIOM the one of the real system
    ("gaussian-out", "gaussian/log", "gaussian/md"):
        r"^\s*Charge\s*=\s*(?P<charge>[+-]?\d+)\s+Multiplicity\s*=\s*(?P<spin>\d+)"
        r"(?=\s*$|\s+in\s+supermolecule|.*\bon\s+real\s+system)",
    # route, empty line, title, empty line, charge and multiplicity: first of the whole, then of fragments or layers
    ("gaussian-in",):
        rf"^[ \t]*#{_LINE}{_WORDS}*{_EMPTY}+{_WORDS}+{_EMPTY}+"
        r"[ \t]*(?P<charge>[+-]?\d+)(?:[ \t]*,[ \t]*|[ \t]+)(?P<spin>\d+)(?=[\s,]|$)",
    ("gaussian/fchk",): r"^Charge\s+I\s+(?P<charge>[+-]?\d+)|^Multiplicity\s+I\s+(?P<spin>\d+)",
    ("orca-output", "orca"):
        r"^\s*Total Charge\s+Charge[\s.]+(?P<charge>[+-]?\d+)|^\s*Multiplicity\s+Mult[\s.]+(?P<spin>\d+)",
    ("nwchem-in",): r"(?i)^\s*charge\s+(?P<charge>[+-]?\d+)|^\s*mult\s+(?P<spin>\d+)",
    ("nwchem-out",): r"^\s*Charge\s*:\s*(?P<charge>[+-]?\d+)|^\s*Spin multiplicity\s*:\s*(?P<spin>\d+)",
    ("gamess-us-in",): r"(?i)\bicharg\s*=\s*(?P<charge>[+-]?\d+)|\bmult\s*=\s*(?P<spin>\d+)",
    ("gamess-us-out",):
        r"^\s*CHARGE OF MOLECULE\s*=\s*(?P<charge>[+-]?\d+)|^\s*SPIN MULTIPLICITY\s*=\s*(?P<spin>\d+)",
    # Turbomole and xtb
    ("turbomole", "turbomole-gradient"):
        r"(?i)^\s*\$(?:chrg|eht\b.*?\bcharge\s*=)\s*(?P<charge>[+-]?\d+)(?:.*?\bunpaired\s*=\s*(?P<unpaired>\d+))?"
        r"|^\s*\$(?:spin|uhf)\s+(?P<unpaired_>\d+)",
    ("espresso-in",): rf"(?i)\btot_charge\s*=\s*{_REAL}",
    ("cjson",): r'"totalCharge"\s*:\s*(?P<charge>[+-]?\d+)|"totalSpinMultiplicity"\s*:\s*(?P<spin>\d+)',
    ("psi4",): r"^ *Charge\s*=\s+(?P<charge>[+-]?\d+)|^ *Multiplicity\s*=\s+(?P<spin>\d+)",
    ("cp2k-restart",):
        rf"(?i)^[ \t]*&DFT[ \t\r]*\n(?={_DFT.format('CHARGE', 'charge')})(?={_DFT.format('MULTIPLICITY', 'spin')})",
    ("aims-output", "fhi_aims"): rf"^\s*Charge\s*=\s*{_REAL}\s*:",
    ("castep-castep",): rf"^\s*net\s+charge\s+of\s+system\s*:\s*{_REAL}",
    ("abinit-in",): rf"(?i)^[ \t]*(?:cell)?charge\s+{_REAL}",
    ("onetep-in",): rf"(?i)^[ \t]*charge[ \t]*[:=]?[ \t]*{_REAL}",
    ("octopus-in",): rf"(?i)^[ \t]*ExcessCharge[ \t]*=[ \t]*{_REAL}",
    ("dftb",): rf"(?i)^[ \t]*Charge[ \t]*=[ \t]*{_REAL}",
    ("cp2k",): r"DFT\| Charge\s+(?P<charge>[+-]?\d+)|DFT\| Multiplicity\s+(?P<spin>\d+)",
}  # fmt: skip
"""Formats of ASE, and beginnings of formats of dpdata -> pattern of charge and multiplicity in their texts."""

_LENGTHS = {
    "nwchem-in": ("angstrom", r"(?im)^[ \t]*geometry\b.*?\bunits[ \t]+(?P<unit>\w+)"),
    "gaussian-in": ("angstrom", r"(?im)^[ \t]*#(?:.*\S.*\n)*?.*?\bunits[ \t]*=?[ \t]*\(?[^)\n]*?\b(?P<unit>au|bohr)\b"),
    "gamess-us-in": ("angstrom", r"(?i)\bunits[ \t]*=[ \t]*(?P<unit>\w+)"),
    "turbomole": ("bohr", r"(?im)^[ \t]*\$coord[ \t]+(?!file\b)(?P<unit>\w+)|^[ \t]*\$(?:periodic|lattice|cell)\b"),
    "lammps-data": ("angstrom", r"(?i)\ALAMMPS.*\bunits[ \t]*=[ \t]*(?P<unit>\w+)"),
    "lammps-dump-text": ("angstrom", r"ITEM: UNITS[ \t\r]*\n[ \t]*(?P<unit>\w+)"),
}
"""Formats -> the unit of length that ASE assumes, and the pattern of another unit, or of a cell, in their texts."""

_CALLED = {
    "an": "angstrom", "angs": "angstrom", "real": "angstrom", "metal": "angstrom", "au": "bohr", "atomic": "bohr",
    "electron": "bohr", "nano": "nm",
}  # fmt: skip
"""Names that programs give to units of length, or to systems of units."""

_ONCE = ("gaussian-in",)  # only the first match counts: further jobs may follow


def states_charges(format: str) -> bool:
    """True if texts of this format of ASE or dpdata state charge and multiplicity."""
    return _pattern(format) is not None


def states_more(format: str) -> bool:
    """True if texts of this format state what ASE leaves out."""
    return states_charges(format) or format in _LENGTHS


def program_statements(format: str, text: str) -> dict[str, list[Statement]]:
    """Return the total charge and multiplicity that a text states, under "charge" and "spin".

    Args:
        format: name in ASE or dpdata; texts of unknown formats state nothing.
        text: content of the file.

    Raises:
        BadData: the charge is not a whole number.
    """
    found: dict[str, list[Statement]] = {"charge": [], "spin": []}
    pattern = _pattern(format)
    for match in re.finditer(pattern, text, re.MULTILINE) if pattern else ():
        for name, value in match.groupdict().items():
            if value is None:
                continue
            start, end = text.rfind("\n", 0, match.start(name)) + 1, text.find("\n", match.end(name))
            line = " ".join(text[start : end if end >= 0 else len(text)].split())
            number = whole_number(re.sub("[dD]", "e", value), "charge" if name == "charge" else "spin")
            statement = Statement(number + name.startswith("unpaired"), f"its line '{line}'")
            found["charge" if name == "charge" else "spin"].append(statement)
        if format in _ONCE:
            break
    return found


def length_factor(format: str, text: str) -> float:
    """Return the factor that converts positions and cells that ASE has read from a text to Å.

    Args:
        format: name in ASE.
        text: content of the file.

    Raises:
        BadData: the text states a unit, or a cell, that cannot be used.
    """
    assumed, pattern = _LENGTHS.get(format, ("", ""))
    match = re.search(pattern, text) if pattern else None
    if match is None:
        return 1.0
    word = (match["unit"] or "").lower()
    try:
        return factor("length", _CALLED.get(word, word)) / factor("length", assumed)
    except ValueError:
        line = text[text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0].strip()
        raise BadData(
            f"its line '{line}' states {'lengths' if word else 'a cell'} in a form that is not supported: convert the "
            "file to extended XYZ"
        ) from None


def _pattern(format: str) -> str | None:
    for names, pattern in _PROGRAMS.items():
        if any(format == name or format.startswith(f"{name}/") for name in names):
            return pattern
    return None
