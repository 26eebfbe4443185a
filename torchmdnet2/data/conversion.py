"""Declared units and label keys: conversion factors of a file, and the entries that are read from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import BadData
from ..registry import did_you_mean
from ..stated import kind_of
from ..units import UNITS, factor
from .labels import LABELS

__all__ = [
    "any_factor",
    "checked_keys",
    "full_tensor",
    "key_names",
    "label_factors",
    "missing_key",
    "stated_key",
    "stress_of",
    "structure_keys",
    "unit_names",
]


def key_names() -> list[str]:
    """What a key can be given for: the labels, the virial (instead of the stress), total charge and spin."""
    return [*(key for name in LABELS for key in ((name, "virial") if name == "stress" else (name,))), "charge", "spin"]


def unit_names() -> list[str]:
    """What a unit can be given for, besides further labels."""
    given = [spec.unit_key for spec in LABELS.values() if spec.unit_key is not None]
    return [given[0], "length", *given[1:]]


def checked_keys(keys: Mapping[str, str | None], where: str) -> dict[str, str]:
    """The keys that are not None.

    Raises:
        BadData: a key is given for something unknown, or both for stress and virial.
    """
    known = key_names()
    for name in keys:
        if name in ("numbers", "positions"):
            raise BadData(f"{where}: keys.{name} is for formats of arrays, whose files have no names for these")
        if name not in known and name not in LABELS:
            raise BadData(
                f"{where}: unknown label '{name}'{did_you_mean(name, known) or '.'} Known: {', '.join(known)}"
            )
    asked = {name: key for name, key in keys.items() if key is not None}
    if "stress" in asked and "virial" in asked:
        raise BadData(f"{where}: give a key for stress or for virial, not for both")
    return asked


def structure_keys(keys: Mapping[str, str | None] | None) -> tuple[dict[str, str | None] | None, dict[str, str]]:
    """Keys without those of the structures, and these as {"z": …, "pos": …}."""
    names = {"numbers": "z", "positions": "pos"}
    given = {names[name]: key for name, key in (keys or {}).items() if name in names and key is not None}
    return None if keys is None else {name: key for name, key in keys.items() if name not in names}, given


def stated_key(quantity: str, names: Iterable[str], where: str) -> str | None:
    """What the total charge or the spin multiplicity is called among the names of a file, as "total_charge", "mult".

    Args:
        quantity: "charge" or "spin".
        names: in the file.
        where: for the message.

    Returns:
        The name; None where there is none.

    Raises:
        BadData: there are several.
    """
    found = sorted(name for name in names if kind_of(name) == quantity)
    if len(found) > 1:
        raise BadData(f"{where}: {' and '.join(found)} both state the {quantity}: choose one with keys.{quantity}")
    return found[0] if found else None


def stress_of(virial: np.ndarray, cell: np.ndarray, where: str) -> np.ndarray:
    """−virial / volume.

    Args:
        virial: [..., 3, 3], or [..., 6] or [..., 9]; eV.
        cell: [..., 3, 3] Å.
        where: for the message.

    Raises:
        BadData: there is no cell.
    """
    volume = np.abs(np.linalg.det(cell))
    if not volume.all():
        raise BadData(f"{where}: there is a virial but no cell")
    return -full_tensor(virial) / volume[..., None, None]


def missing_key(name: str, key: str, available: Iterable[str], where: str) -> BadData:
    """The error for a key that is in no frame."""
    known, own = sorted(available), name.partition(":")[2] or name
    if not known:
        return BadData(
            f"{where}: no frame has '{key}', which was asked for as {own}, nor any other label: these are structures "
            "only, and results of another program are needed beside them (in extended XYZ, energy=… and a column of "
            "forces)"
        )
    return BadData(
        f"{where}: no frame has '{key}', which was asked for as {own}{did_you_mean(key, known) or '.'} "
        f"There are: {', '.join(known)}. Set {own} to null if the file has none."
    )


def label_factors(units: Mapping[str, str | None], where: str) -> dict[str, float]:
    """What each quantity is multiplied by to be in eV, Å and e.

    Args:
        units: name -> unit, of "energy", "length" and where they do not follow from these "forces", "stress",
            "dipole"; of further labels, as {"scalar:gap": "hartree"}; None counts as not given.
        where: for messages.

    Returns:
        name -> factor, for those of "energy", "length", "forces", "stress", "virial", "dipole", "charges" for which
        the units say enough, and for further labels that were given.

    Raises:
        BadData: an unknown name or unit.
    """
    given = {name: unit for name, unit in units.items() if unit is not None}
    factors: dict[str, float] = {}
    for name in given:
        if ":" in name and name in LABELS:
            factors[name] = any_factor(given[name], where)
        elif name not in unit_names():
            known = unit_names()
            raise BadData(
                f"{where}: unknown entry '{name}' in units{did_you_mean(name, known) or '.'} Known: {', '.join(known)}"
            )
    wanted = [("length", "length", "length")]
    wanted += [(spec.unit_key, spec.kind, name) for name, spec in LABELS.items() if spec.unit_key and spec.kind]
    for name, kind, result in wanted:
        if name in given:
            try:
                factors[result] = factor(kind, given[name])
            except ValueError as error:
                raise BadData(f"{where}: {error}") from error
    by_kind: dict[str | None, float] = {None: 1.0, "charge": 1.0}  # where the label's own unit is not given
    if "energy" in factors:
        by_kind["energy"] = factors["virial"] = factors["energy"]
    if "length" in factors:
        by_kind["dipole"] = factors["length"]
    if "energy" in factors and "length" in factors:
        by_kind["force"] = factors["energy"] / factors["length"]
        by_kind["stress"] = factors["energy"] / factors["length"] ** 3
    for name, spec in LABELS.items():
        if spec.kind in by_kind:
            factors.setdefault(name, by_kind[spec.kind])
    return factors


_VOIGT = np.array(((0, 5, 4), (5, 1, 3), (4, 3, 2)))  # where xx, yy, zz, yz, xz, xy go


def full_tensor(values: np.ndarray) -> np.ndarray:
    """Stress or virial as [..., 3, 3], where the last dimension has 6 (Voigt's order: xx, yy, zz, yz, xz, xy) or 9."""
    if values.shape[-1:] == (6,):
        return values[..., _VOIGT]
    return values.reshape(*values.shape[:-1], 3, 3) if values.shape[-1:] == (9,) else values


def any_factor(unit: str, where: str) -> float:
    """Size of a unit of any kind in the package's unit of that kind: "hartree", "bohr", "debye", "kcal/mol/angstrom".

    Raises:
        BadData: an unknown unit.
    """
    for kind in (*UNITS, "force", "stress"):
        try:
            return factor(kind, unit)
        except ValueError:
            continue
    known = ", ".join(name for names in UNITS.values() for name in names)
    raise BadData(f"{where}: unknown unit '{unit}'. Known: {known}; ENERGY/LENGTH; leave it out for a plain number")
