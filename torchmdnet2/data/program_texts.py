"""Molfiles and SDF; charge, multiplicity, unit of length and jobs in texts of programs."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..core.stated import ROUNDING, Statement, whole_number
from ..core.stated_words import MULTIPLICITIES
from ..errors import BadData, StructureWarning
from ..units import factor
from .extxyz import ISOTOPES

__all__ = [
    "MASSES", "Molecule", "counts_electrons", "jobs_of", "length_factor", "level_of", "program_statements",
    "read_molecules", "reason", "same_level", "states_charges", "states_more",
]  # fmt: skip

if TYPE_CHECKING:
    from ase import Atoms

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
    ("nwchem-in",):
        r"(?i)(?:^|;)\s*(?:charge\s+(?P<charge>[+-]?\d+)|mult\s+(?P<spin>\d+)|nopen\s+(?P<unpaired>\d+)"
        rf"|(?P<spin_>{'|'.join(MULTIPLICITIES)})\s*(?:$|;))",
    # DFT, and SCF with or without restrictions
    ("nwchem-out",):
        r"^\s*Charge\s*:\s*(?P<charge>[+-]?\d+)|^\s*Spin multiplicity\s*:\s*(?P<spin>\d+)"
        r"|^ +open shells +=\s*(?P<unpaired>\d+)|^ +charge +=\s*(?P<charge_>[+-]?\d+\.\d+)",
    ("gamess-us-in",): r"(?i)\bicharg\s*=\s*(?P<charge>[+-]?\d+)|\bmult\s*=\s*(?P<spin>\d+)",
    ("gamess-us-out",):
        r"^\s*CHARGE OF MOLECULE\s*=\s*(?P<charge>[+-]?\d+)|^\s*SPIN MULTIPLICITY\s*=\s*(?P<spin>\d+)",
    # Turbomole and xtb
    ("turbomole", "turbomole-gradient"):
        r"(?i)^\s*\$(?:chrg|eht\b.*?\bcharge\s*=)\s*(?P<charge>[+-]?\d+)(?:.*?\bunpaired\s*=\s*(?P<unpaired>\d+))?"
        r"|^\s*\$(?:spin|uhf)\s+(?P<unpaired_>\d+)|^\s*\$charge\s+(?P<charge_>[+-]?\d+)(?=\.0*\s|\s)",
    ("espresso-in",): rf"(?i)\btot_charge\s*=\s*{_REAL}",
    ("cjson",): r'"totalCharge"\s*:\s*(?P<charge>[+-]?\d+)|"totalSpinMultiplicity"\s*:\s*(?P<spin>\d+)',
    ("psi4",): r"^ *Charge\s*=\s+(?P<charge>[+-]?\d+)|^ *Multiplicity\s*=\s+(?P<spin>\d+)",
    ("cp2k-restart",):
        rf"(?i)^[ \t]*&DFT[ \t\r]*\n(?={_DFT.format('CHARGE', 'charge')})(?={_DFT.format('MULTIPLICITY', 'spin')})",
    ("aims-output", "fhi_aims"): rf"^\s*Charge\s*=\s*{_REAL}\s*:",
    ("aims",): rf"^[ \t]*charge[ \t]+{_REAL}|^[ \t]*fixed_spin_moment[ \t]+(?P<unpaired>[\d.]+)",  # of control.in
    ("castep-cell",): rf"(?i)^[ \t]*charge[ \t]*[:=]?[ \t]*{_REAL}",  # of NAME.param
    ("castep-castep",): rf"^\s*net\s+charge\s+of\s+system\s*:\s*{_REAL}",
    ("abinit-in", "abinit-out"): rf"(?i)^[ \t]*(?:cell)?charge\s+{_REAL}",
    ("onetep-in",): rf"(?i)^[ \t]*charge[ \t]*[:=]?[ \t]*{_REAL}",
    ("octopus-in",): rf"(?i)^[ \t]*ExcessCharge[ \t]*=[ \t]*{_REAL}",
    ("dftb", "gen"): rf"(?i)^[ \t]*Charge[ \t]*=[ \t]*{_REAL}",
    ("gpaw-out",): rf"(?i)^ *Total charge: +{_REAL} *$",
    ("siesta",): rf"^redata: Net charge of the system += +{_REAL}",
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


_JOBS = {
    "gaussian-out": (
        r"^ *(?:Entering Gaussian System|Entering Link 1 =|Link1: +Proceeding to internal job step|Initial command:|"
        r"(?:Normal|Error) termination\b)",
        r"^ *(?:Input|Z-Matrix|Standard) orientation:",
    ),
    "orca-output": (r"^\$+ +JOB NUMBER +\d+", r"^CARTESIAN COORDINATES \(ANGSTROEM\)"),
    "nwchem-out": (r"^ +NWChem Input Module", r"^ +NWChem (?:SCF|DFT) Module"),
}  # fmt: skip
"""Formats of ASE -> where another job may begin, and what each job has."""

_LEVEL = {
    "method":
        r"SCF Done: +E\((?:RO|R|U)?(.+?)\)|^ *Functional name +\.+ +(\S+)"
        r"|^ +wavefunction += +(?:RO|R|U)(HF)|^ +XC Information *\n[ -]+\n((?:.*\S.*\n)+)",
    # NWChem lists an element, its basis set, and the numbers of its functions
    "basis":
        r"^ *Standard basis: *(\S+)|^ *Your calculation utilizes the basis: *(\S+)"
        r"|^ [A-Z]\w* +(\S.*?) +\d+ +\d+ +(?:\d+[spdfghi])+ *$",
    "correlation":
        r"\b(EUMP2|CCSD\(T\)=|E\(CI\)|Wavefunction amplitudes converged)|^ *(E\(CCSD\(T\)\)|E\(MP2\)) "
        r"|^ +Total (MP2|CCSD\(T\)|CCSD) energy|^ +(\S+) total energy / hartree|^ +(Excited state) energy =",
    "solvent": r"^ *Solvent *: *([^,\s]+)|^ +dielectric constant +-eps- += +(\S+)",
    "dispersion": r"\b(Grimme-D\d\S*)|^ +(DFT-D\d\S*) Model",
}  # fmt: skip
"""What the texts of jobs state of method and basis set."""

_ROUTE = re.compile(r"^ -{10,} *\n( *#(?:.*\n)+?) -{10,} *$", re.M)
_LEVEL_IN_ROUTE = re.compile(r"(?:^|\s)([\w+().,*-]+)/([\w+().,*-]+)")
_READ_ELSEWHERE = ("gen", "genecp", "chkbas")  # basis sets that a route does not name


def jobs_of(format: str, text: str) -> list[str]:
    """Return the text of each job in an output, as of a Gaussian input with `--Link1--`, or a task of NWChem.

    A task of NWChem that has no geometry begins with that of the one before.
    """
    begin, needed = _JOBS.get(format, ("", ""))
    if not begin:
        return [text]
    places = [match.start() for match in re.finditer(begin, text, re.M)]
    jobs, rest = [], ""
    for start, end in zip([0, *places], [*places, len(text)], strict=True):
        rest += text[start:end]
        if re.search(needed, text[start:end], re.M):
            jobs.append(rest)
            rest = ""
    jobs = [*jobs[:-1], jobs[-1] + rest] if jobs else [text]
    geometry = ""
    for k, job in enumerate(jobs if format == "nwchem-out" else ()):
        own = _GEOMETRY.findall(job)
        jobs[k] = job if own else geometry + job
        geometry = f"\n{own[-1]}" if own else geometry
    return jobs


_GEOMETRY = re.compile(r'^ +Geometry "(?:.*\n){7}(?: +\d+ +\S+(?: +-?[\d.]+){4} *\n)+', re.M)  # of NWChem


def level_of(text: str) -> dict[str, str]:
    """Return what an output states of its method and basis set: aspect -> words in lower case; "" if it states nothing.

    Jobs that take them from a checkpoint file, such as frequencies after an optimization, do not state everything.
    """
    found = {}
    for aspect, pattern in _LEVEL.items():
        stated = [" ".join("".join(match.groups("")).split()) for match in re.finditer(pattern, text, re.M)]
        found[aspect] = " ".join(dict.fromkeys(stated)).lower()
    route = _ROUTE.search(text)
    if route is not None:  # lines of 70 characters are broken anywhere
        words = re.sub(r"\n ?", "", route[1]).lower()
        words = re.sub(r"\biop\([^)]*\)|\bgeom\S*|^ *#[a-z]?(?= |$)", " ", words)
        if model := _LEVEL_IN_ROUTE.search(words):
            found["route"] = model[1]
            if model[2] not in _READ_ELSEWHERE:
                found["basis"] = found["basis"] or model[2]
    return found


def same_level(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two jobs may be of one method and basis set, by what `level_of` has found."""
    for aspect in {**one, **other}:
        first, second = one.get(aspect, ""), other.get(aspect, "")
        if aspect in ("basis", "route") and not (first and second):
            continue
        if not _spellings(aspect, first) & _spellings(aspect, second):
            return False
    return True


def _spellings(aspect: str, words: str) -> set[str]:
    if aspect == "basis":  # 6-31G** is 6-31G(d,p), def2-TZVP is def2TZVP
        return {words.replace("**", "(d,p)").replace("*", "(d)").replace("-", "")}
    if aspect == "route":  # RB3LYP is B3LYP
        return {words, *(words.removeprefix(kind) for kind in ("ro", "r", "u"))}
    return {words}


def states_charges(format: str) -> bool:
    """Return True if texts of this format of ASE or dpdata state charge and multiplicity."""
    return _pattern(format) is not None


def states_more(format: str) -> bool:
    """Return True if texts of this format state what ASE leaves out."""
    return states_charges(format) or counts_electrons(format) or format in _LENGTHS


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
            charge = name.startswith("charge")
            value = str(MULTIPLICITIES.get(value.lower(), value))
            number = whole_number(re.sub("[dD]", "e", value), "charge" if charge else "spin")
            statement = Statement(number + name.startswith("unpaired"), f"its line '{line}'")
            found["charge" if charge else "spin"].append(statement)
        if format in _ONCE:
            break
    if format == "cjson":
        for match in re.finditer(r'"formalCharges"\s*:\s*\[([-+\d\s,]*)\]', text):
            if any(numbers := [int(word) for word in match[1].replace(",", " ").split()]):
                found["charge"].append(Statement(sum(numbers), "the formal charges of its atoms"))
    if (charge_ := _charge_of_electrons(format, text)) is not None:
        found["charge"].append(charge_)
    return found


_COUNTED = {
    "outcar": r"^ +NELECT += +(?P<electrons>\d+\.\d+)",
    "xml": r'<i name="NELECT"> *(?P<electrons>[\d.]+) *</i>',
    "pw": r"^ +number of electrons += +(?P<electrons>[\d.]+)",
}
_COUNTS_IN = {
    "vasp-out": "outcar", "vasp/outcar": "outcar", "outcar": "outcar", "vasp-xml": "xml", "vasp/xml": "xml",
    "xml": "xml", "espresso-out": "pw", "qe/pw/scf": "pw",
}  # fmt: skip


def counts_electrons(format: str) -> bool:
    """Return True if texts of this format state the number of electrons and the valences of all atoms."""
    return format in _COUNTS_IN


def _charge_of_electrons(format: str, text: str) -> Statement | None:
    """Return the charge that the number of electrons shows, if it is not 0; of several runs the first counts."""
    kind = _COUNTS_IN.get(format)
    electrons = None if kind is None else re.search(_COUNTED[kind], text, re.M)
    if kind is None or electrons is None:
        return None
    atoms: list[tuple[float, float]] = []  # number, valence
    if kind == "outcar":
        # rows of many types are broken
        valences = re.search(r"^ +ZVAL +=((?:\s+\d+\.\d+)+) *$", text, re.M)
        numbers = re.search(r"^ +ions per type +=((?:\s+\d+)+) *$", text, re.M)
        each = [[*map(float, found[1].split())] if found else [] for found in (numbers, valences)]
        atoms = [*zip(*each, strict=True)] if len(each[0]) == len(each[1]) else []
    elif kind == "xml":
        row = r"<rc><c> *(\d+) *</c><c>[^<]*</c><c>[^<]*</c><c> *([\d.]+) *</c><c>[^<]*</c></rc>"
        atoms = [(float(number), float(valence)) for number, valence in re.findall(row, text)]
    else:
        kinds = re.search(r"^ +atomic species +valence.*\n((?: +\S+ +[\d.]+ +[\d.]+ .*\n)+)", text, re.M)
        sites = re.search(r"^ +site n\. .*\n((?: +\d+ +\S+ +tau\(.*\n)+)", text, re.M)
        valence = {line.split()[0]: float(line.split()[1]) for line in kinds[1].splitlines()} if kinds else {}
        atoms = [(1.0, valence.get(line.split()[1], math.nan)) for line in sites[1].splitlines()] if sites else []
    charge = sum(number * valence for number, valence in atoms) - float(electrons["electrons"])
    if not atoms or not math.isfinite(charge) or abs(charge) < ROUNDING:
        return None
    source = f"its number of electrons, {float(electrons['electrons']):g}"
    if abs(charge - round(charge)) > ROUNDING:
        warnings.warn(
            f"{source}, shows a charge of {charge:g}, which is not whole and is not read",
            StructureWarning,
            stacklevel=4,
        )
        return None
    return Statement(round(charge), source)


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


# --- MDL molfiles and SDF, with formal charges, radicals, isotopes and data items ---
#
# Formats V2000 and V3000: Dassault Systèmes, "CTfile Formats" (BIOVIA, 2020).

MASSES = {"D": 2.01410178, "T": 3.01604928}
"""amu."""

_OLD_CHARGES = {1: 3, 2: 2, 3: 1, 5: -1, 6: -2, 7: -3}  # codes in the lines of atoms; 4 is a radical
_ORDERS = {1: 1.0, 2: 2.0, 3: 3.0, 4: 1.5}  # by the type of a bond; others are unknown
_NONMETALS = ("H", "D", "T", "B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "As", "Se", "Br", "I")
_SHOWN: dict[tuple[str, int], int] = {
    ("N", 4): 1, ("N", 2): -1, ("O", 3): 1, ("O", 1): -1, ("S", 3): 1, ("S", 1): -1, ("P", 4): 1, ("P", 6): -1,
    ("B", 4): -1,
}  # fmt: skip
"""(element, sum of the orders of its bonds) -> formal charge, where no charge is written."""

_COUNTS = re.compile(r"[\d ]{6}.*V[23]000\s*$")
_PROPERTY = re.compile(r"\s*M\s+(CHG|RAD|ISO)\s*(\d+)\s+(.*)", re.I)  # also as written by hand
_UNPAIRED = {1: 0, 2: 1, 3: 2}  # singlet, doublet, triplet


@dataclass
class Molecule:
    """One molecule of a file.

    Attributes:
        symbols, positions: of the atoms; positions in Å.
        charges, unpaired: index of an atom -> formal charge in e, and number of unpaired electrons, if not zero.
        masses: index of an atom -> mass in amu, if it is not the usual one.
        said: True if the file has a line about charges or radicals.
        items: data items of an SDF, name -> text.
        flat: True if the header says that the coordinates are a drawing.
        bonds: (index, index, type) of each bond; type 1 to 3 is its order, 4 is aromatic.
        titles: name and comment in the header.
    """

    symbols: list[str] = field(default_factory=list)
    positions: list[tuple[float, float, float]] = field(default_factory=list)
    charges: dict[int, int] = field(default_factory=dict)
    unpaired: dict[int, int] = field(default_factory=dict)
    masses: dict[int, float] = field(default_factory=dict)
    said: bool = False
    items: dict[str, str] = field(default_factory=dict)
    flat: bool = False
    bonds: list[tuple[int, int, int]] = field(default_factory=list)
    titles: tuple[str, ...] = ()

    @cached_property
    def _neighbors(self) -> dict[int, list[tuple[int, str]]]:
        """Index of an atom -> type of each of its bonds, and symbol of the atom at its other end."""
        found: dict[int, list[tuple[int, str]]] = {}
        for one, two, kind in self.bonds:
            found.setdefault(one, []).append((kind, self.symbols[two]))
            found.setdefault(two, []).append((kind, self.symbols[one]))
        return found

    def require_hydrogens(self) -> None:
        """Refuse a molecule that was written without its hydrogens, by the bonds of its carbons.

        A carbon lacks hydrogens if its bond orders sum to less than 4, and the file states neither a charge nor a
        radical of it. Carbons with three or more neighbors are left out, since cages are often written with single
        bonds only, and so are those bonded to metals and those with a triple bond to N or O, as of cyanide and CO.

        Raises:
            BadData: the carbons lack more hydrogens than there are.
        """
        if not self.bonds:
            return
        from ase.data import atomic_numbers

        metals = atomic_numbers.keys() - _NONMETALS
        lacking = 0.0
        for k, bonds in self._neighbors.items():
            if self.symbols[k] != "C" or len(bonds) > 2 or k in self.charges or k in self.unpaired:
                continue
            if not any(other in metals or (kind == 3 and other in ("N", "O")) for kind, other in bonds):
                lacking += max(0.0, 4 - sum(_ORDERS.get(kind, 4.0) for kind, _ in bonds))
        hydrogens = sum(symbol in ("H", *ISOTOPES) for symbol in self.symbols)
        if lacking > hydrogens:
            raise BadData(
                f"hydrogens are missing: by their bonds its carbons need {lacking:g} or more, and the file has "
                f"{hydrogens}. Add them with coordinates, for example by obabel IN.sdf -O OUT.sdf -h, or RDKit's "
                "Chem.AddHs(molecule, addCoords=True); a radical is stated by a line M  RAD"
            )

    def charge_of_bonds(self) -> int:
        """Return the charge that the bonds show where the file states none, as −1 for an O with one single bond.

        Atoms with bonds of unknown or aromatic type or to metals are left out.
        """
        total = 0
        for k, bonds in self._neighbors.items():
            known = all(kind in (1, 2, 3) and other in _NONMETALS for kind, other in bonds)
            order = sum(kind for kind, _ in bonds) if known else 0
            total += _SHOWN.get((self.symbols[k], order), 0) - int(self.symbols[k] == "C" and bonds[0][0] == order == 3)
        return total

    def partial_charges(self) -> dict[str, list[float]]:
        """Return data items that have a number for each atom: alone, or behind its index."""
        found, size = {}, len(self.symbols)
        for name, text in self.items.items():
            with suppress(ValueError):
                numbers = [float(word) for word in text.split()]
                if len(numbers) == 2 * size + 1 and numbers[0] == size:
                    numbers = numbers[2::2]
                if len(numbers) == size:
                    found[name] = numbers
        return found

    def to_ase(self) -> Atoms:
        """Return the atoms, with data items in `info`.

        Raises:
            BadData: the molecule has no atoms, or one of them is not an element.
        """
        from ase import Atoms
        from ase.data import atomic_masses, atomic_numbers

        known = {**atomic_numbers, **ISOTOPES}
        numbers = []
        for k, symbol in enumerate(self.symbols):
            if known.get(symbol, 0) < 1:
                raise BadData(f"atom {k} is '{symbol}', which is not an element")
            numbers.append(known[symbol])
        if not numbers:
            raise BadData("it has no atoms")
        atoms = Atoms(numbers, self.positions, info=dict(self.items))
        heavy = {k: MASSES[symbol] for k, symbol in enumerate(self.symbols) if symbol in MASSES} | self.masses
        if heavy:
            atoms.set_masses([heavy.get(k, atomic_masses[z]) for k, z in enumerate(numbers)])
        return atoms

    def statements(self) -> dict[str, list[Statement]]:
        """Return charge and spin from formal charges and radicals; without these, a file states neither."""
        found: dict[str, list[Statement]] = {"charge": [], "spin": []}
        if self.said or self.charges:
            found["charge"] = [Statement(sum(self.charges.values()), "the formal charges of its atoms")]
        if len(self.unpaired) == 1:  # the coupling of several radicals is unknown
            found["spin"] = [Statement(sum(self.unpaired.values()) + 1, "the radical of its atoms")]
        return found


def read_molecules(text: str) -> list[Molecule]:
    """Return all molecules of a molfile or an SDF.

    Raises:
        BadData: the text is cut off, or does not have this format.
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
            which = f"molecule {k}: " if len(records) > 1 else ""
            words = "a line is too short" if isinstance(error, IndexError) else reason(error)
            raise BadData(f"{which}not a molfile that can be read: {words}") from error
    return found


def _molecule(lines: Sequence[str]) -> Molecule:
    if len(lines) < 4:
        raise ValueError("it ends within its header")
    counts = lines[3]
    molecule = Molecule(flat=lines[1][20:22] == "2D", titles=(lines[0].strip(), lines[2].strip()))
    ends = [k for k, line in enumerate(lines) if line.startswith("M  END")]
    heads = [k for k, line in enumerate(lines) if _COUNTS.match(line)]
    if len(ends) > 1 or len(heads) > 1:
        raise ValueError(
            f"a second molecule begins in line {(heads[1:] or [ends[0] + 4])[0] - 2} of it: write a line M  END and "
            "then a line $$$$ between the two"
        )
    if not ends:
        raise ValueError("it has no line 'M  END': it is cut off, or a part of it is missing; write the file again")
    end = ends[0]
    if "V3000" in counts:
        _read_v3000(lines[4:end], molecule)
    else:
        _read_v2000(counts, lines[4:end], molecule)
    late = next(filter(_PROPERTY.match, lines[end + 1 :]), None)
    if late is not None:
        raise ValueError(f"'{late.strip()}' stands after the line 'M  END', where it has no effect: move it up")
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
        # fixed columns, since numbers may touch; lines with the symbol in another column have no charges
        if line[31:34].strip() == words[3] and (code := line[36:39].strip()).isdigit():
            old[k] = int(code)
    for k, line in enumerate(lines[atoms : atoms + bonds]):
        try:
            one, two, kind = (int(line[c : c + 3]) for c in (0, 3, 6))
        except ValueError:
            one = two = kind = 0
        if not (1 <= one <= atoms and 1 <= two <= atoms):
            raise ValueError(
                f"its header says {atoms} atoms and {bonds} bonds, and the line of bond {k + 1} is '{line.strip()}': "
                "one of the two numbers is wrong"
            )
        molecule.bonds.append((one - 1, two - 1, kind))
    lists: dict[str, dict[int, int]] = {"CHG": {}, "RAD": {}, "ISO": {}}
    for line in lines[atoms + bonds :]:
        if len(line.split()) >= 4 and not line.startswith(("M  ", "A  ", "V  ", "G  ", "S  ")) and _is_row(line):
            raise ValueError(
                f"its header says {atoms} atoms and {bonds} bonds, and there are more lines, as '{line.strip()}': "
                "correct the two numbers"
            )
        if (found := _PROPERTY.match(line)) is not None:
            name, count, words = found[1].upper(), int(found[2]), found[3].split()
            if len(words) < 2 * count:
                raise ValueError(f"'{line}' has fewer than {count} pairs of numbers")
            for atom, value in zip(words[: 2 * count : 2], words[1 : 2 * count : 2], strict=True):
                if not 1 <= int(atom) <= atoms:
                    raise ValueError(f"'{line}' names atom {atom}, but there are {atoms} atoms")
                lists[name][int(atom) - 1] = int(value)
            molecule.said |= name != "ISO"
    if molecule.said:  # the lines of atoms are then not valid
        molecule.charges = {k: q for k, q in lists["CHG"].items() if q}
        molecule.unpaired = {k: _radical(code) for k, code in lists["RAD"].items() if code}
    else:
        molecule.charges = {k: _OLD_CHARGES[code] for k, code in old.items() if code in _OLD_CHARGES}
        molecule.unpaired = {k: 1 for k, code in old.items() if code == 4}
    molecule.masses = {k: _mass(molecule.symbols[k], number) for k, number in lists["ISO"].items()}


def _is_row(line: str) -> bool:
    """Return whether a line is one of an atom or a bond: it begins with three numbers."""
    try:
        return len([float(word) for word in line.split()[:3]]) == 3
    except ValueError:
        return False


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
    inside, places = "", {}  # type: ignore[var-annotated]
    for line in joined:
        if line.startswith(("BEGIN ATOM", "END ATOM", "BEGIN BOND", "END BOND")):
            inside = line.removeprefix("BEGIN ") if line.startswith("BEGIN") else ""
        elif inside == "BOND":
            _, kind, one, two, *_ = line.split()
            if one not in places or two not in places:
                raise ValueError(f"the bond '{line}' names an atom that is not there")
            molecule.bonds.append((places[one], places[two], int(kind)))
        elif inside:
            name, symbol, x, y, z, _, *options = line.split()
            k = places[name] = len(molecule.symbols)
            molecule.symbols.append(symbol)
            molecule.positions.append((float(x), float(y), float(z)))
            values = dict(option.split("=", 1) for option in options if "=" in option)
            molecule.said |= "CHG" in values or "RAD" in values
            if int(values.get("CHG", 0)):
                molecule.charges[k] = int(values["CHG"])
            if int(values.get("RAD", 0)):
                molecule.unpaired[k] = _radical(int(values["RAD"]))
            if "MASS" in values:
                molecule.masses[k] = _mass(symbol, int(values["MASS"]))
    counts = next((line.split() for line in joined if line.startswith("COUNTS")), None)
    if counts is not None and len(counts) > 2 and int(counts[2]) != len(molecule.bonds):
        raise ValueError("its number of bonds differs from that in its line COUNTS")
    if counts is None or int(counts[1]) != len(molecule.symbols):
        raise ValueError("its number of atoms differs from that in its line COUNTS")


def _radical(code: int) -> int:
    """Return the unpaired electrons of an atom, from its code."""
    if code not in _UNPAIRED:
        raise ValueError(f"unknown code {code} of a radical; 1, 2 and 3 are singlet, doublet and triplet")
    return _UNPAIRED[code]


def _mass(symbol: str, number: int) -> float:
    """Return the mass in amu of the isotope with a mass number."""
    return {("H", 2): MASSES["D"], ("H", 3): MASSES["T"]}.get((symbol, number), float(number))


def _read_items(lines: Sequence[str], molecule: Molecule) -> None:
    """Read a data item: `> <name>`, then lines of text up to an empty one."""
    name = None
    for line in lines:
        if line.startswith(">") and "<" in line:
            name = line[line.index("<") + 1 : line.rindex(">")]
            molecule.items.setdefault(name, "")
        elif not line.strip():
            name = None
        elif name is not None:
            molecule.items[name] = f"{molecule.items[name]}\n{line}".strip()


def reason(error: Exception) -> str:
    """Return why ASE cannot read a file, also if ASE gives no message."""
    from ase.io.formats import UnknownFileTypeError

    if isinstance(error, UnknownFileTypeError) and "empty file" in str(error).lower():
        return "the file is empty"
    if isinstance(error, UnknownFileTypeError):
        return (
            f"ASE knows no format of structures with this name or content ({error}): convert the file to SDF, which "
            "keeps charges, or to extended XYZ"
        )
    if isinstance(error, ValueError) and (comma := re.search(r"'([+-]?\d*,\d+)'", str(error))):
        return f"the number {comma[1]} has a decimal comma: write {comma[1].replace(',', '.')}, and so in all numbers"
    symbol = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    if symbol.isalpha() and len(symbol) <= 3:
        return f"'{symbol}' is not an element"
    if "NoneType" in str(error):
        return "a part that its format needs is missing"
    own = isinstance(error, ValueError | EOFError) and str(error)
    return str(error) if own else f"{type(error).__name__}: {error}"
