"""Labels: their names, shapes and units; kinds of frames (config_type of extended XYZ).

The kind of a frame is stored as a number. So it is a label like others, which every format, cache and batch can hold.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.stated import can_count, may_be_cell, warn_of_name
from ..core.stated_words import kind_of
from ..errors import BadData
from ..registry import did_you_mean
from ..system import System
from ..units import OWN_UNITS, UNITS, factor

__all__ = [
    "CELLS", "CONFIG_TYPE", "GROUP", "KEY_OPTIONS", "LABELS", "LEVEL", "LOSS_WEIGHT", "SHAPES", "LabelShape",
    "LabelSpec", "Names", "any_factor", "cell_key", "checked_keys", "extra_spin", "full_tensor", "gradient_sign",
    "key_names", "kind_code", "label_factors", "label_names", "missing_key", "stated_key", "stress_of",
    "structure_keys", "unit_names",
]  # fmt: skip


CONFIG_TYPE = "scalar:config_type"
"""The label."""

GROUP = "scalar:group"
"""The label of frames that belong together, such as the frames of a scan; a number for a word, as `CONFIG_TYPE`."""

LOSS_WEIGHT = "scalar:loss_weight"
"""The label of factors of the frames' parts of the loss."""

LEVEL = "scalar:level"
"""The label of frames of several levels of theory: the place of their level in a list of names."""

Names = Mapping[str, str | None] | None
"""Arguments `keys` and `units`: label or quantity -> its name in the file, or its unit; None: the usual ones."""

_WHOLE = 2**31


def kind_code(word: object) -> float:
    """Return the number of a word: a whole number unchanged, else 48 bits of the word's SHA-256, from 2³¹ on."""
    text = str(word).strip()
    digits = text.removesuffix(".0")
    if digits.isascii() and digits.isdigit() and int(digits) < _WHOLE:
        return float(digits)
    return float(_WHOLE + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


# --- The table of labels: name, shape, unit and meaning ---
#
# A new built-in label is one entry. Reading, writing, the keys of the configuration, the loss, errors and reports
# follow from the table.


@dataclass(frozen=True)
class LabelShape:
    """Shape of a label: one row per atom or one per structure, and the shape of a row."""

    per_atom: bool
    row: tuple[int, ...]

    def of(self, system: System) -> tuple[int, ...]:
        """Return the label's shape for these structures."""
        return self.shape(system.num_atoms, system.num_systems)

    def shape(self, num_atoms: int, num_systems: int = 1) -> tuple[int, ...]:
        """Return the label's shape for numbers of structures and atoms."""
        return (num_atoms if self.per_atom else num_systems, *self.row)


SHAPES = {
    "scalar": LabelShape(False, ()),
    "vector": LabelShape(False, (3,)),
    "tensor": LabelShape(False, (3, 3)),
    "atom_scalar": LabelShape(True, ()),
    "atom_vector": LabelShape(True, (3,)),
    "atom_tensor": LabelShape(True, (3, 3)),
}
"""Name of a shape -> its LabelShape."""


@dataclass(frozen=True)
class LabelSpec(LabelShape):
    """A label: its shape, its unit, and the key that reads it.

    Attributes:
        name: name in the table, the configuration and reports.
        kind: kind of its unit, a key of `units.OWN_UNITS`; None for a plain number.
        description: description of the entry in `data.keys`.
        default_key: name in data files if the configuration gives none; None does not read it.
        default_weight: default weight in the loss.
        from_head: True if an entry of `properties` predicts it; False for the energy and its derivatives.
    """

    name: str
    kind: str | None = None
    description: str = ""
    default_key: str | None = None
    default_weight: float = 1.0
    from_head: bool = True

    @property
    def unit(self) -> str:
        """Return the unit of its values in this package, such as "eV/Å"; "" for a plain number."""
        return "" if self.kind is None else OWN_UNITS[self.kind]

    @property
    def unit_key(self) -> str | None:
        """Return the entry of `units` for this label; None for a plain number."""
        return None if self.kind is None else "charge" if self.kind == "charge" else self.name


class LabelTable(dict[str, LabelSpec]):
    """Table of label name -> LabelSpec. Names of further labels contain their shape, as in "scalar:gap"."""

    def __missing__(self, name: str) -> LabelSpec:
        shape, _, rest = name.partition(":")
        if not rest or shape not in SHAPES:
            raise KeyError(name)
        return LabelSpec(SHAPES[shape].per_atom, SHAPES[shape].row, name)

    def __contains__(self, name: object) -> bool:
        shape, _, rest = str(name).partition(":")
        return super().__contains__(name) or (bool(rest) and shape in SHAPES)

    def add(self, spec: LabelSpec) -> None:
        """Add a label. Call it before other modules are imported: the configuration is built from the labels."""
        self[spec.name] = spec

    def of_energies(self) -> tuple[str, ...]:
        """Return the names of the energy and its derivatives."""
        return tuple(name for name, spec in self.items() if not spec.from_head)

    def of_heads(self) -> tuple[str, ...]:
        """Return the names of all other labels."""
        return tuple(name for name, spec in self.items() if spec.from_head)


LABELS = LabelTable()
"""Label name -> LabelSpec."""

for _spec in (
    LabelSpec(False, (), "energy", "energy", "total energy of a frame", "energy", 10.0, from_head=False),
    LabelSpec(True, (3,), "forces", "force", "forces on the atoms (−dE/dr)", "forces", from_head=False),
    LabelSpec(False, (3, 3), "stress", "stress", "stress of a periodic frame, tensile positive", from_head=False),
    LabelSpec(False, (3,), "dipole", "dipole", "dipole moment, a vector; needs the property 'dipole'"),
    LabelSpec(True, (), "charges", "charge", "partial charges of the atoms; needs the property 'charges'"),
):
    LABELS.add(_spec)


def label_names(*names: Iterable[str]) -> list[str]:
    """Return each label name once: names in LABELS in its order, then the others, sorted."""
    found = set().union(*names)
    return [name for name in LABELS if name in found] + sorted(found - LABELS.keys())


# --- Units and label keys of a file: conversion factors, and the entries that are read ---


def key_names() -> list[str]:
    """Return the names that `keys` may have: labels, virial (instead of the stress), charge and spin."""
    return [*(key for name in LABELS for key in ((name, "virial") if name == "stress" else (name,))), "charge", "spin"]


def unit_names() -> list[str]:
    """Return the names that `units` may have, besides further labels."""
    given = [spec.unit_key for spec in LABELS.values() if spec.unit_key is not None]
    return [given[0], "length", *given[1:]]


def checked_keys(keys: Mapping[str, str | None], where: str) -> dict[str, str]:
    """Return the keys that are not None.

    Raises:
        BadData: a label is unknown, keys are given for both stress and virial, or the energy is one per atom.
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
    if _PER_ATOM.search(asked.get("energy", "")):
        raise BadData(
            f"{where}: by its name '{asked['energy']}' is an energy per atom, and the energy of the frame is needed: "
            "multiply it by the number of atoms, or rename it if it is that"
        )
    if "stress" in asked and "virial" in asked:
        raise BadData(f"{where}: give a key for stress or for virial, not for both")
    return asked


def structure_keys(keys: Names) -> tuple[dict[str, str | None] | None, dict[str, str]]:
    """Return the keys of labels, and the keys of structures as {"z": …, "pos": …}."""
    names = {"numbers": "z", "positions": "pos"}
    given = {names[name]: key for name, key in (keys or {}).items() if name in names and key is not None}
    return None if keys is None else {name: key for name, key in keys.items() if name not in names}, given


def stated_key(quantity: str, names: Iterable[str], where: str, values: Callable[[str], Any]) -> str | None:
    """Return the name of the total charge or multiplicity in a file, such as "total_charge" or "mult".

    Args:
        quantity: "charge" or "spin"; a file may state unpaired electrons instead of the spin (`extra_spin`).
        names: names in the file.
        where: name of the file, for messages.
        values: function that returns the values under a name.

    Returns:
        The name; None if there is none. A warning then lists names that look like a charge or a spin.

    Raises:
        BadData: the file has several such names.
    """
    found = sorted(
        name for name in names
        if kind_of(name) == quantity or (quantity == "spin" and extra_spin(name) and can_count(values(name)))
    )  # fmt: skip
    if len(found) > 1:
        raise BadData(f"{where}: {' and '.join(found)} both state the {quantity}: choose one with keys.{quantity}")
    for name in names if quantity == "charge" and not found else ():
        if kind_of(name) == "like" and name.lower() != "charges" and _one_each(given := values(name)):
            warn_of_name(name, given[0] if np.ndim(given) == 2 else given, f"{where}: '{{}}'")
    return found[0] if found else None


def _one_each(values: Any) -> bool:
    """Return whether an array has a number for each frame, or a pair of charge and multiplicity other than 0 and 1."""
    if np.ndim(values) != 2:
        return np.ndim(values) < 2
    return np.shape(values)[1] == 2 and len(values) > 0 and not np.array_equal(values[0], (0, 1))


CELLS = ("cell", "box", "lattice", "cells")
"""Names of cells in files of arrays: lattice vectors as rows."""


def cell_key(names: Iterable[str], where: str, values: Callable[[str], Any]) -> str | None:
    """Return the name of the cell in a file; None if it has none.

    Args:
        names: names in the file.
        where: name of the file, for messages.
        values: function that returns the values under a name.

    Raises:
        BadData: the file has several, or one under an unknown name.
    """
    inside = set(names)
    found = [name for name in CELLS if name in inside]
    if len(found) > 1:
        raise BadData(f"{where}: it has both a {found[0]} and a {found[1]}; leave out one of them")
    other = next((name for name in sorted(inside) if not found and may_be_cell(name, values)), None)
    if other is not None:
        raise BadData(
            f"{where}: '{other}' is not read as a cell: call it cell, with lattice vectors as rows, [3, 3] or "
            "[frames, 3, 3], or leave it out for molecules"
        )
    return found[0] if found else None


def extra_spin(name: str | None) -> int:
    """Return the number to add to the values for the multiplicity: 1 if the name counts unpaired electrons, else 0."""
    return int(name is not None and kind_of(name) == "unpaired")


def gradient_sign(label: str, name: str) -> float:
    """Return −1 for forces whose name in the file says that they are a gradient, as "dft_total_gradient", else 1."""
    return -1.0 if label == "forces" and _GRADIENT.search(name) else 1.0


_GRADIENT = re.compile(
    r"^(?!.*(neg|minus)).*((?<![a-z])(en)?grad|gradient)s?(?![a-z])|(?<![a-z])de_?/?_?d[rx](?![a-z])", re.I
)
_PER_ATOM = re.compile(r"(?<![a-z])per[_ -]?atom|PerAtom", re.I)


def stress_of(virial: np.ndarray, cell: np.ndarray, where: str) -> np.ndarray:
    """Return the stress: −virial / volume.

    Args:
        virial: [..., 3, 3], or [..., 6] or [..., 9]; eV.
        cell: [..., 3, 3] Å.
        where: name of the frames, for messages.

    Raises:
        BadData: there is no cell.
    """
    volume = np.abs(np.linalg.det(cell))
    if not volume.all():
        raise BadData(f"{where}: the frame has a virial but no cell")
    return -full_tensor(virial) / volume[..., None, None]


def missing_key(name: str, key: str, available: Iterable[str], where: str, alone: bool = False) -> BadData:
    """Return the error for a key that is in no frame.

    Args:
        name: label.
        key: its name in the file.
        available: names of the entries that the file has.
        where: name of the file.
        alone: True if no frame has any of the labels that are read.
    """
    known, own = sorted(available), name.partition(":")[2] or name
    if not known:
        return BadData(
            f"{where}: no frame has '{key}', which is the key of {own}, nor any other label: the file has structures "
            "only; add the results of a calculation to it (in extended XYZ, energy=… and a column of "
            f"forces){_PREDICT}"
        )
    return BadData(
        f"{where}: no frame has '{key}', which is the key of {own}{did_you_mean(key, known) or '.'} "
        f"The file has: {', '.join(known)}. {_NAME_THEM if alone else _without(name, own)}."
    )


KEY_OPTIONS = ("energy", "forces", "stress", "virial", "charges", "dipole", "charge", "spin")
"""Names with an option of `evaluate`, as in --energy-key."""

_PREDICT = "; to predict without labels, take `torchmdnet2 score`"
_NAME_THEM = f"Name its labels in data.keys (in `evaluate` by --energy-key, --forces-key …){_PREDICT}"

_SETTINGS = {LOSS_WEIGHT: "weight", GROUP: "group"}


def _without(name: str, own: str) -> str:
    """Return what to do if the file has no such entry."""
    if name == CONFIG_TYPE:
        return "If it has none, take config_weights out of training.loss"
    if name in LABELS and name not in LABELS.keys() and name not in _SETTINGS:
        return f"If it has none, take {own} out of data.keys.properties"
    option = f"in `evaluate` --{own}-key null, " if name in KEY_OPTIONS else ""
    key = _SETTINGS.get(name, own)
    return f"Set {key} to null if it has none ({option}in `train` --set data.keys.{key}=null)"


def label_factors(units: Mapping[str, str | None], where: str) -> dict[str, float]:
    """Return the factors that convert each quantity to eV, Å and e.

    Args:
        units: name -> unit, for "energy", "length", and "forces", "stress", "dipole" where they do not follow from
            these; for further labels, as in {"scalar:gap": "hartree"}. None counts as not given.
        where: name of the file, for messages.

    Returns:
        name -> factor, for "energy", "length", "forces", "stress", "virial", "dipole" and "charges" if the units
        determine them, and for the given further labels.

    Raises:
        BadData: a name or unit is unknown.
    """
    given = {name: unit for name, unit in units.items() if unit is not None}
    factors: dict[str, float] = {}
    for name in given:
        if ":" in name and name in LABELS:
            factors[name] = any_factor(given[name], where)
        elif name not in unit_names():
            known = unit_names()
            raise BadData(
                f"{where}: unknown name '{name}' in units{did_you_mean(name, known) or '.'} Known: {', '.join(known)}"
            )
    wanted = [("length", "length", "length")]
    wanted += [(spec.unit_key, spec.kind, name) for name, spec in LABELS.items() if spec.unit_key and spec.kind]
    for name, kind, result in wanted:
        if name in given:
            try:
                factors[result] = factor(kind, given[name])
            except ValueError as error:
                raise BadData(f"{where}: {error}") from error
    by_kind: dict[str | None, float] = {None: 1.0, "charge": 1.0}  # used if no unit of the label is given
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


_VOIGT = np.array(((0, 5, 4), (5, 1, 3), (4, 3, 2)))  # places of xx, yy, zz, yz, xz, xy in the tensor


def full_tensor(values: np.ndarray) -> np.ndarray:
    """Return a stress or virial as [..., 3, 3]; its last dimension has 6 (Voigt: xx, yy, zz, yz, xz, xy) or 9."""
    if values.shape[-1:] == (6,):
        return values[..., _VOIGT]
    return values.reshape(*values.shape[:-1], 3, 3) if values.shape[-1:] == (9,) else values


def any_factor(unit: str, where: str) -> float:
    """Return the size of a unit, such as "hartree" or "kcal/mol/angstrom", in the package's unit of that kind.

    Raises:
        BadData: the unit is unknown.
    """
    for kind in (*UNITS, "force", "stress"):
        try:
            return factor(kind, unit)
        except ValueError:
            continue
    known = ", ".join(name for names in UNITS.values() for name in names)
    raise BadData(f"{where}: unknown unit '{unit}'. Known: {known}; ENERGY/LENGTH; leave it out for a plain number")
