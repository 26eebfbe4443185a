"""Declared units and label keys: what a file's numbers are multiplied by, and which of its entries are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import BadData
from ..registry import did_you_mean
from ..units import factor

__all__ = ["KEYS", "UNIT_NAMES", "checked_keys", "label_factors", "missing_key"]

KEYS = ("energy", "forces", "stress", "virial", "dipole", "charges", "charge", "spin")
"""What a key can be given for: the labels, the virial (instead of the stress), total charge and spin multiplicity."""

UNIT_NAMES = ("energy", "length", "forces", "stress", "dipole", "charge")


def checked_keys(keys: Mapping[str, str | None], where: str) -> dict[str, str]:
    """The keys that are not None.

    Raises:
        BadData: a key is given for something unknown, or both for stress and virial.
    """
    for name in keys:
        if name not in KEYS:
            raise BadData(f"{where}: unknown label '{name}'{did_you_mean(name, KEYS)} Known: {', '.join(KEYS)}")
    asked = {name: key for name, key in keys.items() if key is not None}
    if "stress" in asked and "virial" in asked:
        raise BadData(f"{where}: give a key for stress or for virial, not for both")
    return asked


def missing_key(name: str, key: str, available: Iterable[str], where: str) -> BadData:
    """The error for a key that is in no frame."""
    known = sorted(available)
    return BadData(
        f"{where}: no frame has '{key}', which was asked for as {name}{did_you_mean(key, known) or '.'} "
        f"There are: {', '.join(known) or 'no labels at all'}. Set {name} to null if the file has none."
    )


def label_factors(units: Mapping[str, str | None], where: str) -> dict[str, float]:
    """What each quantity is multiplied by to be in eV, Å and e.

    Args:
        units: name -> unit, of "energy", "length" and where they do not follow from these "forces", "stress",
            "dipole"; None counts as not given.
        where: for messages.

    Returns:
        name -> factor, for those of "energy", "length", "forces", "stress", "virial", "dipole", "charges" for which
        the units say enough.

    Raises:
        BadData: an unknown name or unit.
    """
    given = {name: unit for name, unit in units.items() if unit is not None}
    for name in given:
        if name not in UNIT_NAMES:
            hint = did_you_mean(name, UNIT_NAMES)
            raise BadData(f"{where}: unknown entry '{name}' in units{hint} Known: {', '.join(UNIT_NAMES)}")
    factors: dict[str, float] = {}
    for name, kind, result in (
        ("energy", "energy", "energy"),
        ("length", "length", "length"),
        ("forces", "force", "forces"),
        ("stress", "stress", "stress"),
        ("dipole", "dipole", "dipole"),
        ("charge", "charge", "charges"),
    ):
        if name in given:
            try:
                factors[result] = factor(kind, given[name])
            except ValueError as error:
                raise BadData(f"{where}: {error}") from error
    factors.setdefault("charges", 1.0)
    if "energy" in factors:
        factors["virial"] = factors["energy"]
    if "energy" in factors and "length" in factors:
        factors.setdefault("forces", factors["energy"] / factors["length"])
        factors.setdefault("stress", factors["energy"] / factors["length"] ** 3)
    if "length" in factors:
        factors.setdefault("dipole", factors["length"])
    return factors
