"""Total charge and multiplicity in the texts of quantum-chemistry programs, which ASE and dpdata leave out."""

from __future__ import annotations

import re

from ..core.stated import Statement, whole_number

__all__ = ["program_statements", "states_charges"]

_LINE, _WORDS, _EMPTY = r"(?:.*\n)", r"(?:.*\S.*\n)", r"(?:[ \t\r]*\n)"
_DFT = r"(?:(?:[ \t]*[^&\s].*\n|[ \t\r]*\n)*?[ \t]*{}[ \t]+(?P<{}>[+-]?\d+)[ \t\r]*$)?"

_PROGRAMS = {
    # of a counterpoise correction that of all fragments, of ONIOM that of the real system
    ("gaussian-out", "gaussian/log", "gaussian/md"):
        r"^\s*Charge\s*=\s*(?P<charge>[+-]?\d+)\s+Multiplicity\s*=\s*(?P<spin>\d+)"
        r"(?=\s*$|\s+in\s+supermolecule|.*\bon\s+real\s+system)",
    # route, empty line, title, empty line, charge and multiplicity; of all first, then those of fragments or layers
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
    # of Turbomole and of xtb
    ("turbomole", "turbomole-gradient"):
        r"(?i)^\s*\$(?:chrg|eht\b.*?\bcharge\s*=)\s*(?P<charge>[+-]?\d+)(?:.*?\bunpaired\s*=\s*(?P<unpaired>\d+))?"
        r"|^\s*\$(?:spin|uhf)\s+(?P<unpaired_>\d+)",
    ("espresso-in",): r"(?i)\btot_charge\s*=\s*(?P<charge>[+-]?[\d.]+(?:[de][+-]?\d+)?)",
    ("cjson",): r'"totalCharge"\s*:\s*(?P<charge>[+-]?\d+)|"totalSpinMultiplicity"\s*:\s*(?P<spin>\d+)',
    ("psi4",): r"^ *Charge\s*=\s+(?P<charge>[+-]?\d+)|^ *Multiplicity\s*=\s+(?P<spin>\d+)",
    ("cp2k-restart",):
        rf"(?i)^[ \t]*&DFT[ \t\r]*\n(?={_DFT.format('CHARGE', 'charge')})(?={_DFT.format('MULTIPLICITY', 'spin')})",
    ("cp2k",): r"DFT\| Charge\s+(?P<charge>[+-]?\d+)|DFT\| Multiplicity\s+(?P<spin>\d+)",
}  # fmt: skip
"""Formats of ASE, and beginnings of those of dpdata -> where their texts state charge and multiplicity."""

_ONCE = ("gaussian-in",)  # only the first match counts: further jobs may follow


def states_charges(format: str) -> bool:
    """Whether texts of this format of ASE or dpdata state charge and multiplicity."""
    return _pattern(format) is not None


def program_statements(format: str, text: str) -> dict[str, list[Statement]]:
    """What a text states of total charge and multiplicity, under "charge" and "spin".

    Args:
        format: as ASE or dpdata calls it; of one that is not known, nothing is found.
        text: the whole file.

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


def _pattern(format: str) -> str | None:
    for names, pattern in _PROGRAMS.items():
        if any(format == name or format.startswith(f"{name}/") for name in names):
            return pattern
    return None
