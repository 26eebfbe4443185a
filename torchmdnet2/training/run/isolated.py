"""Reference energies from calculations of single atoms, in the training data or in a file of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...data import Dataset, open_dataset
from ...errors import BadConfig
from ...potential import SYMBOLS
from ...system import System
from ..config.config import Config
from ..config.labels import label_units
from .references import require_references
from .subsets import periodic_heights

__all__ = ["SingleAtoms", "atom_files", "reference_notes", "single_atoms", "singles", "trusted", "with_isolated"]

WORDS = ("auto", "fit", "keep", "isolated")
"""What `energies` of atomref may be, besides a table and a file."""

_SAME = 1e-3  # eV
_FAR = 8.0  # Å, between a single atom and its images


@dataclass
class SingleAtoms:
    """Frames that are one atom, far from its images.

    Attributes:
        energies: atomic number -> eV of the neutral ones.
        conflicts: atomic number -> what two frames say, where they differ by more than 1 meV.
        skipped: atomic number -> why a frame that is this atom was not taken, in words.
    """

    energies: dict[int, float] = field(default_factory=dict)
    conflicts: dict[int, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)


def atom_files(config: Config) -> list[str]:
    """Files of single atoms that the priors name."""
    words = [prior["energies"] for prior in config.priors if prior["name"] == "atomref"]
    return [word for word in words if isinstance(word, str) and word not in WORDS]


def with_isolated(config: Config, data: Dataset, elements: Sequence[int]) -> tuple[Config, SingleAtoms | None]:
    """The configuration with tables in the place of `energies: isolated` and `energies: FILE`.

    Args:
        config: of the run.
        data: its training data, of whatever subset.
        elements: of the training frames.

    Returns:
        The configuration, and the single atoms among the data where `energies: auto` asks for them.

    Raises:
        BadConfig: an element has no single atom, or two energies.
        FileNotFoundError, BadData: the file cannot be read.
    """
    files, priors, among = atom_files(config), [], None
    for prior in config.priors:
        if prior["name"] == "atomref" and prior["energies"] == "auto" and config.data.keys.energy is not None:
            among = single_atoms(data)
        if prior["name"] == "atomref" and prior["energies"] in ("isolated", *files):
            source, name = data, "data.train"
            if prior["energies"] in files:
                keys = {"energy": config.data.keys.energy or "energy", "charge": config.data.keys.charge}
                units = label_units(config.data.units.model_dump(), {})
                name = prior["energies"]
                source = open_dataset(name, {k: v for k, v in keys.items() if v is not None}, units)
            table = _complete_table(source, name, elements)
            prior = {**prior, "energies": {str(z): energy for z, energy in table.items()}}
        priors.append(prior)
    return config.model_copy(update={"priors": priors}), among


def _complete_table(data: Dataset, name: str, elements: Sequence[int]) -> dict[int, float]:
    found = single_atoms(data)
    for conflict in found.conflicts.values():
        raise BadConfig(f"priors: atomref.energies: {conflict}; give a table")
    missing = [found.skipped[z] for z in elements if z in found.skipped and z not in found.energies]
    reasons = "".join(f"; {reason}" for reason in missing)
    if not found.energies:
        raise BadConfig(
            f"priors: atomref.energies: no frame of {name} is a single neutral atom with an energy{reasons}"
        )
    require_references(found.energies, elements, reasons)
    return found.energies


def trusted(atoms: SingleAtoms, elements: Sequence[int]) -> dict[int, float]:
    """Atomic number -> eV of the elements for which there is one energy of a single atom."""
    return {z: energy for z, energy in atoms.energies.items() if z in elements and z not in atoms.conflicts}


def reference_notes(atoms: SingleAtoms, elements: Sequence[int]) -> Iterator[str]:
    """What `energies: auto` makes of the single atoms, in words; nothing where there are none."""
    known = trusted(atoms, elements)
    if known:
        rest = [SYMBOLS[z] for z in elements if z not in known]
        fitted = f"; {', '.join(rest)} by least squares" if rest else ""
        yield f"reference energies: single atoms of data.train for {', '.join(SYMBOLS[z] for z in known)}{fitted}"
    for z, conflict in atoms.conflicts.items():
        if z in elements:
            yield f"note: reference energies: {conflict}; that of {SYMBOLS[z]} is fitted. Give a table to choose one"
    for z, reason in atoms.skipped.items():
        if z in elements and z not in atoms.energies:
            yield f"note: reference energies: {reason}; that of {SYMBOLS[z]} is fitted"


def single_atoms(data: Dataset) -> SingleAtoms:
    """What the frames that are one neutral atom say.

    Args:
        data: with energies.
    """
    found = SingleAtoms()
    places: dict[int, str] = {}
    for z, energy, where, fault in singles(data):
        if fault is not None:
            found.skipped.setdefault(z, f"{where} is a single {SYMBOLS[z]}, but {fault}")
        elif z in places and abs(found.energies[z] - energy) > _SAME:
            found.conflicts[z] = f"{SYMBOLS[z]} has {found.energies[z]} eV in {places[z]} and {energy} eV in {where}"
        elif z not in places:
            found.energies[z], places[z] = energy, where
    found.energies = dict(sorted(found.energies.items()))
    return found


def singles(data: Dataset, frames: np.ndarray | None = None) -> Iterator[tuple[int, float, str, str | None]]:
    """Frames of one atom: its number, energy in eV, the frame's name, and why it is no reference or None.

    Args:
        data: the data set.
        frames: indices of those to look at; None: all.
    """
    chosen = np.arange(len(data)) if frames is None else np.unique(frames)
    for index in chosen[data.sizes()[chosen] == 1].tolist():
        sample = data[index]
        charge = int(sample.system.charge[0])
        energy = float(sample.labels["energy"][0]) if "energy" in sample.labels else np.nan
        fault = None
        if charge != 0:
            fault = f"has the charge {charge:+d}"
        elif np.isnan(energy):
            fault = "has no energy"
        elif (nearest := _to_image(sample.system)) < _FAR:
            fault = f"its images are {nearest:.1f} Å away"
        yield int(sample.system.z[0]), energy, data.name(index), fault


def _to_image(system: System) -> float:
    """Distance to the next image, or less: the smallest height of the cell along its periodic vectors, Å."""
    return min(periodic_heights(system).tolist(), default=np.inf)
