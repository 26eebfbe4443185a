"""Read what a structure states besides its atoms: total charge, spin multiplicity, and whether it has a cell.

All inputs of the package use this module: files, `ase.Atoms`, data sets, OpenMM, torch-sim. A statement is used. Two
statements that differ are an error, which names both. An entry that looks like a statement and cannot be used gives a
`StructureWarning`, whose text is called a doubt here. What words mean stands in `stated_words.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import BadData
from .stated_words import (
    MOST,
    MULTIPLICITIES,
    TOTALS,
    WarnedInfo,
    charge_spin_pair,
    doubts_of_comment,
    doubts_of_smiles,
    kind_of,
    may_be_charges,
    plain_name,
    stated_units,
    warn,
)

__all__ = [
    "LARGEST", "OF_ATOMS", "ROUNDING", "SUMMED", "Statement", "agreed", "can_count", "cell_of", "charge_and_spin",
    "confirmed", "is_flag", "may_be_cell", "no_cell", "of_atoms", "of_charges", "of_first_frame", "require_angstrom",
    "require_atoms", "statements", "warn_of_name", "warn_of_sums", "whole_number",
]  # fmt: skip

if TYPE_CHECKING:
    from ase import Atoms


ROUNDING = 1e-4
"""Largest distance of a total charge or multiplicity from a whole number, such as that of 0.1 + 0.2 − 0.3 from 0."""

LARGEST = 10_000
"""Larger numbers are not total charges or multiplicities."""

_ROUNDING_OF_SUMS = 1e-2  # partial charges are written with three or four digits
_MOMENTS = frozenset(
    "magmoms magmom magnetic_moments spins spin atomic_spins spin_densities spin_populations mulliken_spin "
    "mulliken_spins hirshfeld_spin hirshfeld_spins".split()
)
_SYMBOLS = ("S", "Ms", "M_S")  # of the total spin
_ELECTRONS = re.compile(r"(n|num|number|total)(_of)?_?(electrons?|elec|el)|electrons")
_OF_ONE_SPIN = re.compile(
    r"(n|num)_?(el(ec(trons?)?)?_?)?(alpha|beta|up|down|dn)(_?electrons?)?|(alpha|beta)_?electrons?"
)

SUMMED = {
    "initial_charges": "the initial charges", "formal_charges": "the formal charges",
    "formal_charge": "the formal charges", "charges": "the charges of the atoms",
}  # fmt: skip
"""Entries of atoms whose sum is the total charge -> their names in messages."""

OF_ATOMS = (*SUMMED, "initial_magmoms")
"""Entries of atoms that state something."""


class Statement(NamedTuple):
    """A whole number that a structure states, and where it does so: `info['total_charge']`, `M  CHG`."""

    value: int
    source: str


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
    if type(value) is int and abs(value) <= LARGEST:  # at each step of a simulation
        return value
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
    if not arrays and all(_is_mute(key) and not isinstance(value, bool | str | Mapping) for key, value in info.items()):
        return found  # most frames
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
    doubts += doubts_of_comment(info, given, numbers)
    for key in SUMMED:
        if key in arrays and (total := _sum_of_charges(arrays[key])) is not None:
            if total.is_integer():
                found["charge"].append(Statement(int(total), f"the sum of {SUMMED[key]}"))
            elif key == "initial_charges":
                doubts.append("the initial charges do not sum to a whole number: they are not read as the total charge")
    if "charge" not in known:
        stated = next((one.value for one in found["charge"]), None)
        if stated is None:
            doubts += doubts_of_smiles(info)
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
    warn(doubts, where, warned)
    return found


@lru_cache(maxsize=1024)
def _is_mute(name: Any) -> bool:
    """Return whether numbers under this name state nothing and are no reason to doubt."""
    if not isinstance(name, str):
        return False
    return not (kind_of(name) or name in ("z", "Z", *_SYMBOLS) or _counts_electrons(name))


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
        if key in ("z", "Z") and "charge" not in known and number.is_integer() and -MOST <= number < 0:
            yield f"{name.format(key)} is not read: if it is the total charge, write charge={number:g}"
        elif key in _SYMBOLS and "spin" not in known and (2 * number).is_integer() and 0 < number <= MOST:
            yield f"{name.format(key)} is not read: if it is the spin S, write spin={2 * number + 1:g}"


def _of_electrons(info: Mapping[str, Any], protons: int, known: Collection[str], name: str) -> Iterator[str]:
    """Yield doubts about numbers of electrons, of all or of each spin, that show a charge or a multiplicity."""
    each: dict[bool, tuple[str, int]] = {}
    for key, value in info.items():
        plain = plain_name(key) if isinstance(key, str) else ""
        of_one_spin = bool(_OF_ONE_SPIN.fullmatch(plain))
        if not (of_one_spin or _ELECTRONS.fullmatch(plain)) or not can_count(value) or _size(value) != 1:
            continue
        if of_one_spin:
            each["alpha" in plain or "up" in plain] = name.format(key), int(value)
        elif 0 < abs(protons - int(value)) <= MOST and "charge" not in known:
            yield (
                f"{name.format(key)} is not read: if {int(value)} is the number of all electrons, write "
                f"charge={protons - int(value)}"
            )
    if len(each) == 2:
        (one, alpha), (other, beta) = each[True], each[False]
        charge, spin = protons - alpha - beta, abs(alpha - beta) + 1
        charged = 0 < abs(charge) <= MOST and "charge" not in known
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
    if pair or plain_name(key) == "cm" or np.all(fraction > ROUNDING):
        return
    quantity = "spin" if re.search("spin|mult|unpaired", key.lower()) else "charge"
    yield (
        f"{name.format(key)} is not read: if it is the {TOTALS[quantity]}, call it {quantity}, or give its name, "
        f"in data of a training by keys: {{{quantity}: {key}}} and in `evaluate` by --{quantity}-key {key}"
    )


def _pair_of(value: Any) -> tuple[int, int] | None:
    return charge_spin_pair(value if isinstance(value, str) else " ".join(map(str, np.ravel(value)[:3].tolist())))


def warn_of_name(key: str, values: Any, name: str = "'{}'") -> None:
    """Warn of an entry of the kind "like", unless it is 0, a boolean, or not a whole number."""
    warn(_of_name(key, values, name))


def warn_of_sums(arrays: Mapping[str, Any], where: str = "", stated: float | None = None) -> bool:
    """Warn of charges of atoms that sum to another whole number than the total charge.

    Args:
        arrays: name -> values of the atoms of a structure.
        where: the structure, for the message, as "a.h5, group 'b': ".
        stated: the total charge; None: none is stated, and it is 0.

    Returns:
        Whether there are any.
    """
    return warn(_of_sums(arrays, stated), where)


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
                f"{where}the {TOTALS[quantity]} is {first.value} by {first.source} and {one.value} by {one.source}: "
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
            f"the {TOTALS[quantity]} is {value} by {sources}, but {argument}={number} is given: "
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
    return bool(_ELECTRONS.fullmatch(plain_name(name)) or _OF_ONE_SPIN.fullmatch(plain_name(name)))


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
    if not _names_cell(name):
        return False
    numbers = values(name)
    if getattr(numbers, "dtype", np.dtype(object)).kind not in "iuf":
        return False
    return np.shape(numbers)[-1:] in ((3,), (6,), (9,)) and bool(np.any(numbers))


@lru_cache(maxsize=1024)
def _names_cell(name: str) -> bool:
    return re.sub(r"[\s-]+", "_", name.strip().lower()) in _CELLS


def no_cell(cell: Any, pbc: Any = True) -> bool:
    """Return whether a cell is the cube of 1 Å that PDB files have where there is no cell.

    Args:
        cell: [3, 3] Å, lattice vectors as rows.
        pbc: periodic along each of them.
    """
    return bool(np.asarray(pbc).all()) and bool((np.abs(np.asarray(cell) - _CUBE) < 1e-3).all())


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
