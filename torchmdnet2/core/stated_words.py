"""What names of entries and free text mean: a charge, a spin multiplicity, an ion, a unit.

`stated.py` reads the values. A doubt is the text of a `StructureWarning`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import BadData, StructureWarning
from ..units import factor

__all__ = [
    "MOST", "MULTIPLICITIES", "TOTALS", "StatedUnit", "WarnedInfo", "charge_spin_pair", "doubts_of_comment",
    "doubts_of_smiles", "formal_charge", "kind_of", "may_be_charges", "plain_name", "stated_units", "unit_in_name",
    "warn", "warn_of_text",
]  # fmt: skip

_CHARGE = frozenset(
    "charge total_charge totalcharge tot_charge totcharge net_charge netcharge molecular_charge mol_charge molcharge "
    "system_charge formal_charge total_formal_charge charge_total chrg qtot q_tot pubchem_total_charge "
    "total_charges net_charges molecular_charges mol_charges system_charges".split()
)
_SPIN = frozenset(
    "spin multiplicity spin_multiplicity spinmultiplicity mult spin_mult spinmult total_spin_multiplicity "
    "totalspinmultiplicity 2s+1 multiplicities spin_multiplicities".split()
)
_UNPAIRED = frozenset(
    "unpaired unpaired_electrons num_unpaired n_unpaired nunpaired num_unpaired_electrons n_unpaired_electrons uhf "
    "nopen 2s".split()
)

MULTIPLICITIES = {"singlet": 1, "doublet": 2, "triplet": 3, "quartet": 4, "quintet": 5, "sextet": 6, "septet": 7}
"""Names of spin states -> 2S+1."""

TOTALS = {"charge": "total charge", "spin": "spin multiplicity"}
_PARTIAL = re.compile(
    r"(^|_)(?<!nuclear_)(q|charges?|chgs?|oxidation|mulliken|hirshfeld|loe?wdin|resp|esp|mbis|cm5|npa|bader)(_|$)|"
    r"(?<![a-z])(?!nuclear|core|dis|super)[a-z]{1,9}(charges?|chgs?)(_|$)"
)

_LOOKS_LIKE = re.compile(
    r"""
    [\w,]* (charge|chr?g) (?![a-z]) [\w,]*        # my_charge, charge_of_ion, sys_chg, charge,mult
    | (.*_)? q_? (tot|total|sum|net|mol|sys)       # Qtotal, my_q_net
    | (tot|total|net|mol|sys)_? q                  # net_q
    | charges | q | ion | fparam | cm
    | .*multiplicity.* | (.*_)? mult | .*unpaired.* | (.*_)? spin (_.*)?
    """,
    re.VERBOSE,
)
"""Names that look like those of a charge or a spin."""

_OF_ANOTHER_KIND = re.compile(
    "nuclear|core|partial|point|valence|density|densities|transfer|discharge|supercharge|"  # other charges
    "note|model|method|scheme|cut|tol|iter|weight|error|mae|rms"  # about charges
)
"""Parts of names that look like those of a charge or a spin and mean something else."""

_OTHER_SUMS = re.compile(  # of atoms, as mulliken_spin and hirshfeld_ratio; of many frames, some are whole by chance
    r"spin|popul|ratio|volum|radi(us|i)|varian|(^|_)(std|var|err)|error|uncertain|weight|c6|polari|dipole|energ|moment"
)
_UNIT_BEHIND = re.compile(r"[\s_]*[\[(][^\])]*[\])]$")  # "Total Charge (e)"
_UNIT = re.compile(r"(?:(?P<first>[a-z]+)_?units?|units?_(?:of_)?(?!cell$)(?P<last>[a-z]+))")
_QUANTITIES = {
    "e": "energy", "r": "length", "f": "forces",  # as sGDML calls them
    "energy": "energy", "energies": "energy", "force": "forces", "forces": "forces", "stress": "stress",
    "virial": "virial", "virials": "virial", "dipole": "dipole", "dipoles": "dipole", "pos": "length",
    "position": "length", "positions": "length", "coord": "length", "coords": "length", "coordinate": "length",
    "coordinates": "length", "length": "length", "distance": "length", "geometry": "length", "lattice": "cell",
    "cell": "cell", "box": "cell", "xyz": "length", "geom": "length", "dist": "length",
}  # fmt: skip
_KINDS = {"energy": "energy", "forces": "force", "stress": "stress", "virial": "energy", "dipole": "dipole",
          "length": "length", "cell": "length"}  # fmt: skip
_ATOMIC = frozenset({"au", "a.u.", "atomic"})
_ATOMIC_UNITS = {"energy": "hartree", "length": "bohr", "force": "hartree/bohr", "stress": "hartree/bohr^3",
                 "dipole": "e*bohr"}  # fmt: skip


def plain_name(name: str) -> str:
    return re.sub(r"[\s\-]+", "_", _UNIT_BEHIND.sub("", name.strip().rstrip(":")).lower())


@lru_cache(maxsize=1024)
def kind_of(name: str) -> str:
    """Return what an entry of this name states: "charge", "spin", "unpaired", "unit", "unit:QUANTITY", "like", or "".

    "like" means that the name looks like that of a charge or a spin, but its meaning is not known.
    """
    plain = plain_name(name)
    for kind, names in (("charge", _CHARGE), ("spin", _SPIN), ("unpaired", _UNPAIRED)):
        if plain in names:
            return kind
    if plain in ("unit", "units"):
        return "unit"
    match = _UNIT.fullmatch(plain)
    if match and (match["first"] or match["last"]) in _QUANTITIES:
        return f"unit:{_QUANTITIES[match['first'] or match['last']]}"
    return "like" if _LOOKS_LIKE.fullmatch(plain) and not _OF_ANOTHER_KIND.search(plain) else ""


@lru_cache(maxsize=1024)
def may_be_charges(key: Any) -> bool:
    """Return whether an entry of this name may hold charges of atoms, as "mulliken", "partial_charges"."""
    if not isinstance(key, str) or _OTHER_SUMS.search(key.lower()):
        return False
    return bool(_PARTIAL.search(key.lower())) and kind_of(key) != "charge"


# --- free text -------------------------------------------------------------------------------------------------------


MOST = 20  # charge or multiplicity that two numbers in a comment line may be
_NUMBERS = re.compile(r"[+-]?\d+(,\d+)?,?")
_OTHER_LENGTH = re.compile(
    r"(?<![\w/^*·])(?:bohrs?|nanomet(?:er|re)s?|"
    r"(?:coord|pos|geom|length|distance|cell)\w*\W.*?\b(?:a\.u\b\.?|atomic[ _-]units?\b))(?![\w/^*·])", re.I
)  # fmt: skip
_FRACTIONAL = re.compile(
    r"(?<![a-z])(fractional|scaled|reduced|crystal)[ _]*(coord|pos)|"
    r"(?<![a-z])(coord|pos)(inate|ition)?s?\W+(fractional|scaled|reduced|crystal)(?![a-z])",
    re.IGNORECASE,
)

_SAYS = re.compile(
    r"""
    (?<![a-z.])
    (?P<name> ([a-z]+[ _-]){0,2}
        ([a-z]*(charge|chrg|chg) | multiplicity | mult | uhf | unpaired | nopen | q(?=\W*[:=])) )
    ["']? (\s+(of|is))? ([:=\s_]+ | (?=[+−-]))
    (?P<value> [+−-]?\d+ | \d+[+−-]) (\.0*)?
    (?![a-z0-9+−-]|\.\d)
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""A charge or a spin in free text: "charge -2", "net charge of 2-", "oxalate_charge-2"."""

_HIGH_SPIN = re.compile(r"(?<![\w-])(triplet|quartet|quintet|sextet|septet)(?![\w-]|\s+(gap|energ))", re.I)

_ION = re.compile(
    r"""
    (?<![a-z]) (mono|di|tri)?(an|cat)ion(ic)?s? (?![a-z])
    | (?<![\w.+-]) [1-9][+-] (?![\w.+>([{-])                            # oxalate 2-, and not 2-(4-pyridyl), 1->4
    | \( ([1-9][+-] | [+-][1-9]) \) | (?<=[\w\])]) \([+-]\)               # oxalate(2-), OH(-), and not (+)-catechin
    | (?<!\b10)\^\{? ([1-9]?[+-] | [+-][1-9]) (?![\w.])                # C2O4^2-, C2O4^{-2}, and not 10^-3
    | (?<=[a-z0-9)]\]) ([1-9][+-] | [+-][1-9]) (?![\w.])                # [C2O4]2-
    | [²³]?[⁺⁻]
    | [a-z\])]\^?\{?[1-9]?\+ (?![\w.+*,(-])                             # NH4+, Mg2+
    | /[pq][+-]\d                                                       # layers of an InChI
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""An ion in free text."""

_NEGATIVE = re.compile(r"[-⁻]|anion", re.I)

_FORMULA = re.compile(
    r"""
    (?<![\w.+-]) [\[(]? (?P<formula> ([A-Z][a-z]?\d* | \([A-Z]\w*\)\d*)+ ) [\])]?
    ( [_^]?\{? (?P<behind>[1-9]?[+-]+)                                  # SO4--, CH3COO-, C2O4_2-
    | [ _^]?[({]? (?P<before>[+-][1-9]) )                               # C2O4-2, C2O4 -2
    [)}]? (?![\w.+-])
    """,
    re.VERBOSE,
)
"""A formula with a charge. It belongs to a structure with the same composition."""

_CHARGED = re.compile(r"\[[^\]]*?(\++|-+)(\d*)(?::\d+)?\]")


@lru_cache(maxsize=1024)
def _ion(text: str) -> tuple[str, int]:
    """The words in which a text speaks of an ion, and the charge, of "NH4+" the sign alone; "" if it does not.

    A text with ions of both signs speaks of a salt and not of an ion.
    """
    found = [*_ION.finditer(text)]
    if len({bool(_NEGATIVE.search(one[0])) for one in found}) != 1:  # none, or a salt
        return "", 0
    ion = found[0][0].strip()
    digits = "" if re.match(r"[A-Z\])]\d", ion) else next(iter(re.findall(r"[1-9²³]|^di|^tri", ion.lower())), "")
    size = {"²": 2, "³": 3, "di": 2, "tri": 3}.get(digits) or int(digits or 1)
    begin = re.split(r"[^\w\[\]]", text[: found[0].start()])[-1]  # of the word
    return begin + ion, -size if _NEGATIVE.search(ion) else size


@lru_cache(maxsize=1024)
def _formulas(text: str, key: str) -> list[tuple[dict[str, int], int, str]]:
    """Return the formulas with a charge in a text: number of atoms of each element, charge, words.

    "H2O-2" mostly names the second water. It counts only as the value of an entry for formulas, or as a whole comment
    line.
    """
    found = []
    for match in _FORMULA.finditer(text):
        formula, behind, before = match["formula"], match["behind"] or "", match["before"]
        if before and not re.search(r"[\])^{(] *[+-]", match[0]):
            if (key and "formula" not in key.lower()) or match[0].strip() != text.strip():
                continue
        size = int(before[1:]) if before else int(behind[0]) if behind[0].isdigit() else len(behind)
        options = [(formula, size)]
        if re.fullmatch("[+-]", behind) and re.search(r"\D[1-9]+$", formula):  # SO42-
            options.append((formula[:-1], int(formula[-1])))
        for name, count in options:
            with suppress(ValueError, KeyError, TypeError):
                found.append((_composition(name), -count if "-" in (before or behind) else count, match[0].strip()))
    return found


def _composition(formula: str) -> dict[str, int]:
    from ase.formula import Formula

    return Formula(formula).count()


def _formula(text: str, key: str, numbers: np.ndarray | None) -> tuple[str, int]:
    """The words in which a text states the formula of a structure with a charge, and the charge; "" if it does not."""
    from ase.data import chemical_symbols

    formulas = _formulas(text, key)
    if not formulas or numbers is None:
        return "", 0
    own = {chemical_symbols[z]: count for z, count in zip(*np.unique(numbers, return_counts=True), strict=True)}
    return next(((words, charge) for counts, charge, words in formulas if counts == own), ("", 0))


def formal_charge(smiles: str) -> int:
    """Return the sum of the formal charges in a SMILES, as in "[NH3+]CC(=O)[O-]" or "[Ca+2]"."""
    total = 0
    for signs, digits in _CHARGED.findall(smiles):
        total += (1 if signs[0] == "+" else -1) * (int(digits) if digits else len(signs))
    return total


def doubts_of_smiles(info: Mapping[str, Any]) -> Iterator[str]:
    """Yield a doubt about a SMILES of an ion."""
    for key, value in info.items():
        if isinstance(value, str) and "smiles" in str(key).lower() and (charge := formal_charge(value)):
            yield (
                f"the formal charges of '{key}' sum to {charge}, and no total charge is stated: it is taken as 0. If "
                f"it is {charge}, state charge={charge}"
            )
            return


def doubts_of_comment(info: Mapping[str, Any], known: Collection[str], numbers: np.ndarray | None) -> Iterator[str]:
    """Yield doubts about what a comment line says in free text of charge and multiplicity, and of a unit of length."""
    flags = [str(key) for key, value in info.items() if value is True]
    words = [word for flag in flags if _NUMBERS.fullmatch(flag) for word in flag.replace(",", " ").split()]
    if len(words) == 2 and (pair := charge_spin_pair(" ".join(words))):
        yield (
            f"the comment line begins with '{pair[0]} {pair[1]}', which is not read: if it is charge and "
            f"multiplicity, write charge={pair[0]} spin={pair[1]}"
        )
    entries = {
        key: value for key, value in info.items()
        if isinstance(value, str) and not kind_of(str(key)) and "smiles" not in str(key).lower()
    }  # fmt: skip
    for key, value in {"": " ".join(flags), **entries}.items():
        key = str(key)
        yield from _of_text(value, known, numbers, key)
        text = f"{key}={value}" if key else value
        if other := _OTHER_LENGTH.search(text):
            yield (
                f"'{other[0][:60]}' {_place(key)} is not read: positions are taken to be in Å. If they are in another "
                f"unit, write it as in pos_unit={'nm' if other[0][0] in 'nN' else 'bohr'}"
            )
            return
        if fractional := _FRACTIONAL.search(text):
            yield f"'{fractional[0]}' {_place(key)} is not read: positions are taken as Cartesian, in Å; convert them"
            return


def charge_spin_pair(text: str) -> tuple[int, int] | None:
    """Return charge and multiplicity in a text of two whole numbers, unless they are 0 and 1, which changes nothing."""
    match = re.fullmatch(r"\s*([+-]?\d+)\s*[\s,]\s*(\+?\d+),?\s*", text)
    first, second = (int(match[1]), int(match[2])) if match else (0, 1)
    return (first, second) if abs(first) <= MOST and 1 <= second <= MOST and (first, second) != (0, 1) else None


def _of_text(text: str, known: Collection[str], numbers: np.ndarray | None, key: str) -> Iterator[str]:
    """Yield doubts about a text, as `warn_of_text`."""
    whole = f"{key}={text}" if key else text
    for says in _SAYS.finditer(whole):
        kind, sign = kind_of(says["name"]), says["value"].strip("0123456789").replace("−", "-")
        number = int(sign + says["value"].strip("+−-"))
        quantity = "charge" if re.search("ch|q", says["name"].lower()) else "spin"
        usual = int(quantity == "spin" and kind != "unpaired")
        if kind and -MOST <= number <= MOST and number != usual and quantity not in known:
            yield (
                f"'{says[0]}' {_place(key)} is not read: if it states the "
                f"{TOTALS[quantity]}, write {quantity}={number + (kind == 'unpaired')}"
            )
            known = {*known, quantity}
            break
    if "spin" not in known and (state := _HIGH_SPIN.search(whole)):
        spin = MULTIPLICITIES[state[1].lower()]
        yield f"'{state[0]}' {_place(key)} is not read: if it is the spin state, write spin={spin}"
    if "charge" not in known:
        ion, charge = _formula(text, key, numbers)
        if not ion:
            ion, charge = _ion(whole)
        if ion:
            yield f"'{ion}' {_place(key)} is not read: if it states a total charge, write it, as in charge={charge}"


def _place(key: str) -> str:
    """Return where a text stands, for messages. The text itself is left out: it may number the frames, and one warning
    is enough."""
    return f"in '{key}'" if key else "in a title or comment line"


def warn_of_text(text: str, known: Collection[str], numbers: np.ndarray, where: str) -> None:
    """Warn of a charge or a multiplicity in free text, as a title.

    Args:
        text: the text.
        known: "charge" or "spin", if it is stated elsewhere.
        numbers: [N] atomic numbers of the structure, for formulas with a charge.
        where: the structure, for the message, as "a.sdf: ".
    """
    warn(_of_text(text, known, numbers, ""), where)


def warn(doubts: Iterable[str], where: str = "", warned: set[str] | None = None) -> bool:
    """Warn of each doubt that is not in `warned`, and add it there; return whether there were any."""
    known = set() if warned is None else warned
    new = [words for words in doubts if _NAMED.sub(r"\1", words) not in known]
    for words in new:
        warnings.warn(f"{where}{words}", StructureWarning, stacklevel=4)
        known.add(_NAMED.sub(r"\1", words))
    return bool(new)


_NAMED = re.compile(r"\binfo\[('.*?')\]")  # an entry of `Atoms.info`, which has its name alone in a file


class WarnedInfo(dict[str, Any]):
    """Keeps the doubts of which the reader of a file has warned, with `Atoms.info`, so that no warning is repeated."""

    doubts: frozenset[str] = frozenset()


# --- units -----------------------------------------------------------------------------------------------------------


class StatedUnit(NamedTuple):
    """A unit that a structure states for one of its quantities.

    Attributes:
        unit: as written.
        quantity: "energy", "forces", "stress", "virial", "dipole", "length" or "cell".
        source: the statement, as in `energy-unit=hartree`.
    """

    unit: str
    quantity: str
    source: str

    @property
    def size(self) -> float:
        """The unit in the package's unit of this quantity.

        Raises:
            BadData: the unit is not known.
        """
        try:
            return factor(_KINDS[self.quantity], self._name)
        except ValueError as error:
            raise BadData(f"{self.source}: {error}") from None

    @property
    def energy(self) -> float:
        """The unit of energy in that of forces or a virial, in eV."""
        return factor("energy", self._name.rpartition("/")[0] if self.quantity == "forces" else self._name)

    @property
    def _name(self) -> str:
        name = self.unit.strip()
        return _ATOMIC_UNITS[_KINDS[self.quantity]] if name.lower() in _ATOMIC else name


def stated_units(entries: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> dict[str, StatedUnit]:
    """Return units that entries of a structure state, as `energy-unit=hartree`, `units_of_length=bohr`, `units=metal`.

    Args:
        entries: of the structure.
        keys: label -> its name in the file: `NAME_unit` states its unit too, and comes first.

    Returns:
        Of "energy", "forces", "stress", "virial", "dipole", "length" and "cell" those that are stated.
    """
    if not any(isinstance(key, str) and "unit" in key.lower() for key in entries):
        return {}
    found: dict[str, StatedUnit] = {}
    own = {plain_name(key): label for label, key in (keys or {}).items() if label in _KINDS}
    of_own = {}
    for key, value in entries.items():
        kind = kind_of(key) if isinstance(key, str) else ""
        if not isinstance(value, str) or not isinstance(key, str) or "unit" not in key.lower():
            continue
        if label := own.get(_OF_UNIT.sub("", plain_name(key))):
            of_own[label] = StatedUnit(value, label, f"{key}={value}")
        elif kind == "unit":
            found = _plain_units(key, value) | found
        elif kind.startswith("unit"):
            quantity = kind.partition(":")[2]
            found[quantity] = StatedUnit(value, quantity, f"{key}={value}")
    return found | of_own


_OF_UNIT = re.compile(r"_?units?$|^units?_(of_)?")
_BREAKS = re.compile(r"[_\s.()\[\]]+|(?<=[a-z])(?=[A-Z])")  # energy_hartree, EnergyHartree
_LENGTH_BEHIND = re.compile(r"(?<=\w)/?([aA]ngstroms?|[aA]ng|A|[bB]ohr|a0|nm)$")  # kcalmolA, HartreeBohr after breaks


@lru_cache(maxsize=1024)
def unit_in_name(quantity: str, name: str) -> StatedUnit | None:
    """Return the unit in the name of an entry, as in "energy_hartree", "forces_kcal_mol_ang", "E (eV)".

    Args:
        quantity: "energy", "forces", "stress", "virial" or "dipole"; of others, nothing is found.
        name: of the entry.
    """
    if quantity not in _KINDS:
        return None
    name_ = re.sub(r"hartree[\s_-]*fock", "", name, flags=re.I)
    breaks = [0, *(m.end() for m in _BREAKS.finditer(name_)), len(name_)]
    windows = [(i, j) for k, i in enumerate(breaks) for j in breaks[k + 1 :] if (i, j) != (0, len(name_))]
    for first, last in sorted(windows, key=lambda window: (window[0] - window[1], -window[1])):
        text = re.sub(r"(^|/)per(?=/|$)", "", re.sub(r"[_\s.()\[\]]+", "/", name_[first:last]).strip("/")).strip("/")
        for words in (text, _LENGTH_BEHIND.sub(r"/\1", text)):
            unit = StatedUnit(words, quantity, name)
            with suppress(BadData):
                # Au is gold
                if len(text) > 1 and text != "Au" and (text.lower() != "au" or last == len(name_)) and unit.size:
                    return unit
    return None


def _plain_units(key: str, text: str) -> dict[str, StatedUnit]:
    """Return the units that `units=eV`, `units="hartree bohr"` or `units=metal` state."""
    words = [word for word in re.split(r"[\s,;]+", text) if word]
    known = {"metal": ("eV", "angstrom"), "real": ("kcal/mol", "angstrom")}
    if len(words) == 1 and words[0].lower() in (*known, *_ATOMIC):
        words = list(known.get(words[0].lower(), ("hartree", "bohr")))
    found: dict[str, StatedUnit] = {}
    for word in words:
        for quantity, kind in _KINDS.items():
            if quantity in ("virial", "cell"):
                continue
            with suppress(ValueError):
                factor(kind, word)
                found.setdefault(quantity, StatedUnit(word, quantity, f"{key}={text}"))
                break
        else:
            warn([f"{key}={text} is not read: the unit '{word}' is unknown; write energy_unit=…, pos_unit=…"])
    return found
