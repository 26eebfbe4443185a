"""Read what a structure states besides its atoms: total charge, spin multiplicity, units, and whether it has a cell.

All inputs of the package use this module: files, `ase.Atoms`, data sets, OpenMM, torch-sim. A statement is used. Two
statements that differ are an error, which names both. An entry that looks like a statement and cannot be used gives a
`StructureWarning`, whose text is called a doubt here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import BadData, StructureWarning
from ..units import factor

__all__ = [
    "LARGEST", "MULTIPLICITIES", "OF_ATOMS", "ROUNDING", "SUMMED", "StatedUnit", "Statement", "WarnedInfo", "agreed",
    "can_count", "cell_of", "charge_and_spin", "confirmed", "formal_charge", "is_flag", "kind_of", "may_be_cell",
    "may_be_charges", "no_cell", "of_atoms", "of_charges", "of_first_frame", "require_angstrom", "require_atoms",
    "stated_units", "statements", "unit_in_name", "warn_of_name", "warn_of_sums", "warn_of_text", "whole_number",
]  # fmt: skip


if TYPE_CHECKING:
    from ase import Atoms


ROUNDING = 1e-4
"""Largest distance of a total charge or multiplicity from a whole number, such as that of 0.1 + 0.2 − 0.3 from 0."""

LARGEST = 10_000
"""Larger numbers are not total charges or multiplicities."""

_ROUNDING_OF_SUMS = 1e-2  # partial charges are written with three or four digits

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

_MOMENTS = frozenset(
    "magmoms magmom magnetic_moments spins spin atomic_spins spin_densities spin_populations mulliken_spin "
    "mulliken_spins hirshfeld_spin hirshfeld_spins".split()
)
_SYMBOLS = ("S", "Ms", "M_S")  # of the total spin
_OTHER_SUMS = re.compile(  # of atoms, as mulliken_spin and hirshfeld_ratio; of many frames, some are whole by chance
    r"spin|popul|ratio|volum|radi(us|i)|varian|(^|_)(std|var|err)|error|uncertain|weight|c6|polari|dipole|energ|moment"
)
_ELECTRONS = re.compile(r"(n|num|number|total)(_of)?_?(electrons?|elec|el)|electrons")
_OF_ONE_SPIN = re.compile(
    r"(n|num)_?(el(ec(trons?)?)?_?)?(alpha|beta|up|down|dn)(_?electrons?)?|(alpha|beta)_?electrons?"
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
SUMMED = {
    "initial_charges": "the initial charges", "formal_charges": "the formal charges",
    "formal_charge": "the formal charges", "charges": "the charges of the atoms",
}  # fmt: skip
"""Entries of atoms whose sum is the total charge -> their names in messages."""

OF_ATOMS = (*SUMMED, "initial_magmoms")
"""Entries of atoms that state something."""

_TOTAL = {"charge": "total charge", "spin": "spin multiplicity"}


class Statement(NamedTuple):
    """A whole number that a structure states, and where it does so: `info['total_charge']`, `M  CHG`."""

    value: int
    source: str


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


def _plain(name: str) -> str:
    return re.sub(r"[\s\-]+", "_", _UNIT_BEHIND.sub("", name.strip().rstrip(":")).lower())


@lru_cache(maxsize=1024)
def kind_of(name: str) -> str:
    """Return what an entry of this name states: "charge", "spin", "unpaired", "unit", "unit:QUANTITY", "like", or "".

    "like" means that the name looks like that of a charge or a spin, but its meaning is not known.
    """
    plain = _plain(name)
    for kind, names in (("charge", _CHARGE), ("spin", _SPIN), ("unpaired", _UNPAIRED)):
        if plain in names:
            return kind
    if plain in ("unit", "units"):
        return "unit"
    match = _UNIT.fullmatch(plain)
    if match and (match["first"] or match["last"]) in _QUANTITIES:
        return f"unit:{_QUANTITIES[match['first'] or match['last']]}"
    return "like" if _LOOKS_LIKE.fullmatch(plain) and not _OF_ANOTHER_KIND.search(plain) else ""


# --- charge and spin -------------------------------------------------------------------------------------------------


def is_flag(value: Any) -> bool:
    """Return whether a value is a boolean: ASE reads the word "charge" in a comment line as True, and int(True) is
    1."""
    if isinstance(value, bool | np.bool_ | int | float | str | np.number):
        return isinstance(value, bool | np.bool_)
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def whole_number(value: Any, name: str, where: str = "") -> int:
    """Return the whole number that a value means, up to rounding.

    Args:
        value: a number, or one as text.
        name: of the quantity, for the message; charges and multiplicities are at most 10,000.
        where: the structure, for the message, as "a.xyz, frame 3".

    Raises:
        BadData: it means none.
    """
    key = name.removeprefix("info[").strip("[]'")
    stating = kind_of(key) in ("charge", "spin", "unpaired")
    behind = re.fullmatch(r"(\d+)([+-])", value.strip()) if isinstance(value, str) else None  # the sign, as in 2-
    meant = int(behind[2] + behind[1]) if behind else int(kind_of(key) == "spin")
    remedy = f"; correct it, as in {key}={meant}, or leave it out" if stating else ""
    try:
        number = math.nan if is_flag(value) else float(value.item() if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if is_flag(value) and stating:
        remedy = f": in the comment line of a file, write {key}={meant}, or leave this word out"
    large = stating and math.isfinite(number) and abs(number) > LARGEST
    if large or not math.isfinite(number) or abs(number - round(number)) > ROUNDING:
        limit = f" up to {LARGEST:,}" if large else ""
        raise BadData(f"{where}{': ' if where else ''}{name} must be a whole number{limit}, got {value}{remedy}")
    return round(number)


def statements(
    info: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    periodic: bool = False,
    name: str = "info['{}']",
    known: Collection[str] = (),
    numbers: np.ndarray | None = None,
    where: str = "",
    warned: set[str] | None = None,
) -> dict[str, list[Statement]]:
    """Return what a structure states about its total charge and multiplicity.

    Args:
        info: entries of the structure, as `Atoms.info`.
        arrays: entries of its atoms, [N] each. The sums of those in `SUMMED` state the total charge. In a
            molecule, the sum of `initial_magmoms` states the multiplicity. Warnings name entries that look alike.
        periodic: True for a crystal, whose magnetic moments are a start of the calculation and not a spin state.
        name: form of the name of an entry of `info` in messages.
        known: "charge" or "spin", if the user or another source gives it, so that no warning is needed.
        numbers: [N] atomic numbers; a warning then names numbers of electrons and formulas that show a charge.
        where: the file, for warnings, as "a.xyz: ".
        warned: doubts of which the user has been warned; further ones are added.

    Returns:
        All statements, under "charge" and "spin"; empty lists if there are none.

    Raises:
        BadData: an entry of a known name is not a whole number.
    """
    found: dict[str, list[Statement]] = {"charge": [], "spin": []}
    doubts: list[str] = []
    for key, value in info.items():
        kind = kind_of(key) if isinstance(key, str) else ""
        if kind in ("charge", "spin", "unpaired"):
            plain = key.strip().rstrip(":")
            if key in arrays or (value is None and plain not in ("charge", "spin")):
                continue
            if plain not in ("charge", "spin") and _size(value) > 1:
                doubts.append(
                    f"{name.format(key)} is not read, since it has {_size(value)} values: write charge=… and spin=…"
                )
                continue
            if kind == "unpaired" and not can_count(value):
                if not is_flag(value):
                    doubts.append(f"{name.format(key)} is not read: it is not a number of unpaired electrons")
                continue
            if kind == "spin" and isinstance(value, str):
                value = MULTIPLICITIES.get(value.strip().lower(), value)
            shown = plain if plain in ("charge", "spin") else name.format(plain)
            number = whole_number(value, shown)
            if kind == "unpaired":
                found["spin"].append(Statement(number + 1, name.format(plain)))
            elif kind == "charge" or number:  # a multiplicity of 0: not given
                found[kind].append(Statement(number, name.format(plain)))
        elif isinstance(value, Mapping):
            doubts += _of_nested(value, name.format(key))
        elif kind == "like" and key not in arrays and (_size(value) == 1 or _pair_of(value)):
            doubts += _of_name(key, value, name)
    given = {quantity for quantity in found if found[quantity] or quantity in known}
    doubts += _of_symbols(info, given, name)
    if numbers is not None:
        doubts += _of_electrons(info, int(np.sum(numbers)), given, name)
    doubts += _comment(info, given, numbers)
    for key in SUMMED:
        if key in arrays and (total := _sum_of_charges(arrays[key])) is not None:
            if total.is_integer():
                found["charge"].append(Statement(int(total), f"the sum of {SUMMED[key]}"))
            elif key == "initial_charges":
                doubts.append("the initial charges do not sum to a whole number: they are not read as the total charge")
    if "charge" not in known:
        stated = next((one.value for one in found["charge"]), None)
        if stated is None:
            doubts += _smiles(info)
        doubts += _of_sums({key: values for key, values in arrays.items() if key not in OF_ATOMS}, stated)
    if "initial_magmoms" in arrays and np.ndim(arrays["initial_magmoms"]) == 1:
        total = _sum(arrays["initial_magmoms"])
        if total is not None and (periodic or not total.is_integer()):
            why = "of a periodic structure are" if periodic else "do not sum to a whole number, and are"
            doubts.append(f"the initial magnetic moments {why} not read as a spin multiplicity")
        elif total is not None:
            found["spin"].append(Statement(abs(int(total)) + 1, "the sum of the initial magnetic moments"))
    if not (periodic or found["spin"] or "spin" in known):
        for key in arrays.keys() & _MOMENTS:
            total = _sum(arrays[key])
            if total is not None and total.is_integer() and abs(total) > 1:  # less is the lowest multiplicity
                doubts.append(
                    f"'{key}' of the atoms sum to {total:g}, and no multiplicity is stated: if they are spins, write "
                    f"spin={abs(total) + 1:g}"
                )
    _warn(doubts, where, warned)
    return found


def _of_nested(entries: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield doubts about a charge or a multiplicity in a dictionary within the entries."""
    for key, value in entries.items():
        kind = kind_of(key) if isinstance(key, str) else ""
        usual = 1 if kind == "spin" else 0
        if (
            kind in ("charge", "spin", "unpaired")
            and isinstance(value, int | float)
            and not is_flag(value)
            and value != usual
        ):
            quantity, value = ("spin", value + 1) if kind == "unpaired" else (kind, value)
            yield f"'{key}' in {name} is not read: write {quantity}={value:g} outside of it"


def _of_symbols(info: Mapping[str, Any], known: Collection[str], name: str) -> Iterator[str]:
    """Yield doubts about z=-2, which cannot be a number of formula units, and about a spin S=1."""
    for key, value in info.items():
        number = float(value) if isinstance(value, int | float | np.number) and not is_flag(value) else 0.0
        if key in ("z", "Z") and "charge" not in known and number.is_integer() and -_MOST <= number < 0:
            yield f"{name.format(key)} is not read: if it is the total charge, write charge={number:g}"
        elif key in _SYMBOLS and "spin" not in known and (2 * number).is_integer() and 0 < number <= _MOST:
            yield f"{name.format(key)} is not read: if it is the spin S, write spin={2 * number + 1:g}"


def _of_electrons(info: Mapping[str, Any], protons: int, known: Collection[str], name: str) -> Iterator[str]:
    """Yield doubts about numbers of electrons, of all or of each spin, that show a charge or a multiplicity."""
    each: dict[bool, tuple[str, int]] = {}
    for key, value in info.items():
        plain = _plain(key) if isinstance(key, str) else ""
        of_one_spin = bool(_OF_ONE_SPIN.fullmatch(plain))
        if not (of_one_spin or _ELECTRONS.fullmatch(plain)) or not can_count(value) or _size(value) != 1:
            continue
        if of_one_spin:
            each["alpha" in plain or "up" in plain] = name.format(key), int(value)
        elif 0 < abs(protons - int(value)) <= _MOST and "charge" not in known:
            yield (
                f"{name.format(key)} is not read: if {int(value)} is the number of all electrons, write "
                f"charge={protons - int(value)}"
            )
    if len(each) == 2:
        (one, alpha), (other, beta) = each[True], each[False]
        charge, spin = protons - alpha - beta, abs(alpha - beta) + 1
        charged = 0 < abs(charge) <= _MOST and "charge" not in known
        if charged or (spin > 2 and "spin" not in known):
            yield (
                f"{one} and {other} are not read: if they are the numbers of all electrons of each spin, write "
                f"charge={charge} spin={spin}"
            )


def _of_name(key: str, values: Any, name: str) -> Iterator[str]:
    """Yield doubts about an entry of the kind "like", as `warn_of_name`."""
    if values is None or is_flag(values) or not (isinstance(values, str) or np.any(values)):
        return
    pair = _pair_of(values)
    if pair:
        meant = f"charge={pair[0]} spin={pair[1]}"
        yield f"{name.format(key)} is not read: if it is charge and multiplicity, write {meant}"
    fraction = 0.0 if isinstance(values, str) else np.abs(values - np.round(values))
    if pair or _plain(key) == "cm" or np.all(fraction > ROUNDING):
        return
    quantity = "spin" if re.search("spin|mult|unpaired", key.lower()) else "charge"
    yield (
        f"{name.format(key)} is not read: if it is the {_TOTAL[quantity]}, call it {quantity}, or give a key of data, "
        f"as in keys: {{{quantity}: {key}}}"
    )


def _pair_of(value: Any) -> tuple[int, int] | None:
    return _pair(value if isinstance(value, str) else " ".join(map(str, np.ravel(value)[:3].tolist())))


def _pair(text: str) -> tuple[int, int] | None:
    """Return charge and multiplicity in a text of two whole numbers, unless they are 0 and 1, which changes nothing."""
    match = re.fullmatch(r"\s*([+-]?\d+)\s*[\s,]\s*(\+?\d+),?\s*", text)
    first, second = (int(match[1]), int(match[2])) if match else (0, 1)
    return (first, second) if abs(first) <= _MOST and 1 <= second <= _MOST and (first, second) != (0, 1) else None


def warn_of_name(key: str, values: Any, name: str = "'{}'") -> None:
    """Warn of an entry of the kind "like", unless it is 0, a boolean, or not a whole number."""
    _warn(_of_name(key, values, name))


def warn_of_sums(arrays: Mapping[str, Any], where: str = "", stated: float | None = None) -> bool:
    """Warn of charges of atoms that sum to another whole number than the total charge.

    Args:
        arrays: name -> values of the atoms of a structure.
        where: the structure, for the message, as "a.h5, group 'b': ".
        stated: the total charge; None: none is stated, and it is 0.

    Returns:
        Whether there are any.
    """
    return _warn(_of_sums(arrays, stated), where)


def _of_sums(arrays: Mapping[str, Any], stated: float | None) -> Iterator[str]:
    """Yield at most one doubt about charges of atoms, as `warn_of_sums`."""
    for key, values in arrays.items():
        total = _sum_of_charges(values) if may_be_charges(key) else None
        if total is not None and total.is_integer() and total != round(stated or 0):
            said = f"no total charge is stated: it is taken as 0. If it is {total:g}, state charge={total:g}"
            if stated is not None:
                said = f"the total charge is stated as {stated:g}: correct the one that is wrong"
            yield f"'{key}' of the atoms sum to {total:g}, and {said}"
            return


def agreed(stated: Iterable[Statement], quantity: str, where: str = "", remedy: str = "") -> int | None:
    """Return the number that all statements agree on; None if there are none.

    Args:
        stated: of one quantity.
        quantity: "charge" or "spin".
        where: the structure, for the message, as "a.xyz, frame 3: ".
        remedy: how to correct one of them, for the message; "": usual words.

    Raises:
        BadData: two of them differ; names both.
    """
    first: Statement | None = None
    for one in stated:
        first = first or one
        if one.value != first.value:
            raise BadData(
                f"{where}the {_TOTAL[quantity]} is {first.value} by {first.source} and {one.value} by {one.source}: "
                f"{remedy or 'remove the one that is wrong'}"
            )
    return None if first is None else first.value


def confirmed(
    stated: Iterable[Statement], quantity: str, given: Any = None, argument: str = "", remedy: str = ""
) -> int | None:
    """Return what a structure states, which must agree with what the user gives, or else what the user gives.

    Every entry point that takes a charge or a multiplicity asks here.

    Args:
        stated: by the structure, of one quantity.
        quantity: "charge" or "spin".
        given: by the user; None: nothing. A multiplicity of 0 is nothing too.
        argument: what the user calls it, for the message; "": the name of the quantity.
        remedy: how to correct the statement, for the message; "": usual words.

    Returns:
        The number; None: neither stated nor given.

    Raises:
        BadData: two statements differ, or what is given differs from them, or is not a whole number; names both values.
    """
    own = list(stated)
    value = agreed(own, quantity)
    number = None if given is None else whole_number(given, quantity)
    if number is None or (quantity == "spin" and number == 0):
        return value
    if value is not None and value != number:
        argument = argument or quantity
        sources = " and ".join(one.source for one in own)
        raise BadData(
            f"the {_TOTAL[quantity]} is {value} by {sources}, but {argument}={number} is given: "
            f"give {argument}={value} or leave it out, or {remedy or 'correct or remove what the structure states'}"
        )
    return number


def charge_and_spin(atoms: Atoms, charge: int | None = None, spin: int | None = None) -> tuple[int | None, int | None]:
    """Return the total charge (e) and multiplicity 2S+1 of a structure; None: neither stated nor given.

    Args:
        atoms: statements are looked for in `info`, initial charges and initial magnetic moments.
        charge, spin: what a user gives, as of `confirmed`.

    Raises:
        BadData: as `confirmed`.
    """
    info, arrays = atoms.info, atoms.arrays
    kept = of_atoms({**info, **arrays}, len(atoms))
    if not info and not kept:
        return confirmed((), "charge", charge), confirmed((), "spin", spin)
    require_angstrom(info)
    warned = {*info.doubts} if isinstance(info, WarnedInfo) else None
    found = statements(info, kept, bool(atoms.pbc.any()), numbers=atoms.numbers, warned=warned)
    return confirmed(found["charge"], "charge", charge), confirmed(found["spin"], "spin", spin)


def can_count(values: Any) -> bool:
    """Return whether values can be numbers of unpaired electrons: other entries, such as energies by UHF, share the
    names."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    return not is_flag(values) and bool(((numbers >= 0) & (np.abs(numbers - np.round(numbers)) <= ROUNDING)).all())


def of_atoms(entries: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the entries of `size` atoms that state something: charges, by any name, and magnetic moments."""
    return {
        key: value for key, value in entries.items()
        if (key in OF_ATOMS or key in _MOMENTS or may_be_charges(key)) and np.shape(value) == (size,)
        and np.asarray(value).dtype.kind in "iuf"
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _counts_electrons(name: str) -> bool:
    return bool(_ELECTRONS.fullmatch(_plain(name)) or _OF_ONE_SPIN.fullmatch(_plain(name)))


def of_first_frame(
    names: Iterable[str], values: Callable[[str], Any], frames: int, atoms: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return numbers of electrons and spins of atoms in arrays of all frames, for `statements`.

    Args:
        names: of the arrays.
        values: function that returns the array, or dataset, under a name.
        frames, atoms: numbers of frames, and of atoms of each.

    Returns:
        Entries of the first frame, and of its atoms.
    """
    info, arrays = {}, {}
    for name in names:
        if _counts_electrons(name) or name in _SYMBOLS:
            if np.shape(given := values(name)) in ((), (1,), (frames,), (frames, 1)):
                info[name] = np.ravel(given[:1] if np.ndim(given) else given[()])[0]
        elif name in _MOMENTS and not kind_of(name) and np.shape(given := values(name)) in of_charges(frames, atoms):
            arrays[name] = np.ravel(given if np.ndim(given) == 1 else given[0])
    return info, arrays


def of_charges(frames: int, atoms: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of charges of the atoms of some frames: the same for all of them, or each its own."""
    return (atoms,), (frames, atoms), (frames, atoms, 1)


@lru_cache(maxsize=1024)
def may_be_charges(key: Any) -> bool:
    """Return whether an entry of this name may hold charges of atoms, as "mulliken", "partial_charges"."""
    if not isinstance(key, str) or _OTHER_SUMS.search(key.lower()):
        return False
    return bool(_PARTIAL.search(key.lower())) and kind_of(key) != "charge"


def _sum(values: Any) -> float | None:
    """Sum of the values of atoms, a whole number where it is one up to rounding; None: all are 0, or unknown."""
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.any() or not np.isfinite(numbers).all():
        return None
    total = float(numbers.sum())
    return float(round(total)) if abs(total - round(total)) < _ROUNDING_OF_SUMS else total


def _sum_of_charges(values: Any) -> float | None:
    """Return the same for charges; None also for nuclear charges (whole and positive), which some data sets call
    charges."""
    numbers = np.asarray(values, dtype=np.float64)
    nuclear = numbers.size > 1 and (numbers >= 1).all() and (numbers % 1 == 0).all() and numbers.max() > _NUCLEAR
    return None if nuclear else _sum(numbers)


_NUCLEAR = 4  # above the charge of an ion


def _size(value: Any) -> int:
    return 1 if isinstance(value, str) else int(np.size(value))


_NUMBERS = re.compile(r"[+-]?\d+(,\d+)?,?")
_MOST = 20  # charge or multiplicity that two numbers in a comment line may be
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


_NEGATIVE = re.compile(r"[-⁻]|anion", re.I)


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


def _smiles(info: Mapping[str, Any]) -> Iterator[str]:
    """Yield a doubt about a SMILES of an ion."""
    for key, value in info.items():
        if isinstance(value, str) and "smiles" in str(key).lower() and (charge := formal_charge(value)):
            yield (
                f"the formal charges of '{key}' sum to {charge}, and no total charge is stated: it is taken as 0. If "
                f"it is {charge}, state charge={charge}"
            )
            return


def _comment(info: Mapping[str, Any], known: Collection[str], numbers: np.ndarray | None) -> Iterator[str]:
    """Yield doubts about what a comment line says in free text of charge and multiplicity, and of a unit of length."""
    flags = [str(key) for key, value in info.items() if value is True]
    words = [word for flag in flags if _NUMBERS.fullmatch(flag) for word in flag.replace(",", " ").split()]
    if len(words) == 2 and (pair := _pair(" ".join(words))):
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


def _of_text(text: str, known: Collection[str], numbers: np.ndarray | None, key: str) -> Iterator[str]:
    """Yield doubts about a text, as `warn_of_text`."""
    whole = f"{key}={text}" if key else text
    for says in _SAYS.finditer(whole):
        kind, sign = kind_of(says["name"]), says["value"].strip("0123456789").replace("−", "-")
        number = int(sign + says["value"].strip("+−-"))
        quantity = "charge" if re.search("ch|q", says["name"].lower()) else "spin"
        usual = int(quantity == "spin" and kind != "unpaired")
        if kind and -_MOST <= number <= _MOST and number != usual and quantity not in known:
            yield (
                f"'{says[0]}' {_place(key)} is not read: if it states the "
                f"{_TOTAL[quantity]}, write {quantity}={number + (kind == 'unpaired')}"
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
    _warn(_of_text(text, known, numbers, ""), where)


def _warn(doubts: Iterable[str], where: str = "", warned: set[str] | None = None) -> bool:
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


def stated_units(entries: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> dict[str, StatedUnit]:
    """Return units that entries of a structure state, as `energy-unit=hartree`, `units_of_length=bohr`, `units=metal`.

    Args:
        entries: of the structure.
        keys: label -> its name in the file: `NAME_unit` states its unit too, and comes first.

    Returns:
        Of "energy", "forces", "stress", "virial", "dipole", "length" and "cell" those that are stated.
    """
    found: dict[str, StatedUnit] = {}
    own = {_plain(key): label for label, key in (keys or {}).items() if label in _KINDS}
    of_own = {}
    for key, value in entries.items():
        kind = kind_of(key) if isinstance(key, str) else ""
        if not isinstance(value, str) or not isinstance(key, str) or "unit" not in key.lower():
            continue
        if label := own.get(_OF_UNIT.sub("", _plain(key))):
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
            _warn([f"{key}={text} is not read: the unit '{word}' is unknown; write energy_unit=…, pos_unit=…"])
    return found


def require_angstrom(info: Mapping[str, Any]) -> None:
    """Refuse a structure in memory whose entries say that its positions are not in Å.

    Raises:
        BadData: names the entry.
    """
    if not any(isinstance(key, str) and kind_of(key).startswith("unit") for key in info):
        return
    stated = stated_units(info)
    for name in ("length", "cell"):
        if name in stated and abs(stated[name].size - 1) > 1e-6:
            raise BadData(
                f"{stated[name].source} is stated, and positions of ase.Atoms are in Å: read the file with "
                "torchmdnet2.data.read_structures, which converts them, or convert them and delete this entry"
            )


# --- cell ------------------------------------------------------------------------------------------------------------


_CELLS = frozenset(
    "cell cells box lattice unit_cell unitcell lattice_vectors latticevectors cell_vectors cell_lengths box_vectors "
    "lattice_parameters cell_parameters cellpar".split()
)


def may_be_cell(name: str, values: Callable[[str], Any]) -> bool:
    """Return whether an entry is a cell by its name and its numbers, which are not all 0.

    Args:
        name: of the entry.
        values: function that returns the values under this name.
    """
    if re.sub(r"[\s-]+", "_", name.strip().lower()) not in _CELLS:
        return False
    numbers = values(name)
    if getattr(numbers, "dtype", np.dtype(object)).kind not in "iuf":
        return False
    return np.shape(numbers)[-1:] in ((3,), (6,), (9,)) and bool(np.any(numbers))


def no_cell(cell: Any, pbc: Any = True) -> bool:
    """Return whether a cell is the cube of 1 Å that PDB files have where there is no cell.

    Args:
        cell: [3, 3] Å, lattice vectors as rows.
        pbc: periodic along each of them.
    """
    return bool(np.all(pbc)) and bool((np.abs(np.asarray(cell) - _CUBE) < 1e-3).all())


_CUBE = np.eye(3)


def require_atoms(atoms: Any) -> None:
    """Refuse what is not one structure with atoms.

    Raises:
        TypeError: something else is given, as a list or a path.
        BadData: it has no atoms.
    """
    if not hasattr(atoms, "get_positions"):
        raise TypeError(
            f"one ase.Atoms is needed, got {type(atoms).__name__}: torchmdnet2.data.read_structures reads files, and "
            "gives a list of them"
        )
    if not len(atoms):
        raise BadData("the structure has no atoms: a selection that matches nothing, or a file that was read in part")


def cell_of(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Return the cell [3, 3] in Å and periodicity [3] of a structure in memory, as new arrays.

    Raises:
        BadData: there are no atoms, or the cell is the dummy of a PDB file.
        TypeError: it is not a structure.
    """
    require_atoms(atoms)
    cell, pbc = atoms.cell.array.copy(), atoms.pbc.copy()
    if no_cell(cell, pbc):
        raise BadData(
            "the structure is periodic in a cell of 1 × 1 × 1 Å, which PDB files have if there is no cell: for a "
            "molecule set atoms.pbc = False, or read the file with torchmdnet2.data.read_structures"
        )
    return cell, pbc
