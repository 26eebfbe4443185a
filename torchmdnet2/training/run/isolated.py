"""Reference energies from calculations of single atoms, in the training data or in a file of their own."""

from __future__ import annotations

import math

import numpy as np

from ...data import Dataset, open_dataset
from ...errors import BadConfig
from ...potential import SYMBOLS
from ..config.config import Config
from ..config.labels import label_units

__all__ = ["atom_files", "isolated_energies", "with_isolated"]

_SAME = 1e-3  # eV


def atom_files(config: Config) -> list[str]:
    """Files of single atoms that the priors name."""
    words = [prior["energies"] for prior in config.priors if prior["name"] == "atomref"]
    return [word for word in words if isinstance(word, str) and word not in ("fit", "keep", "isolated")]


def with_isolated(config: Config, data: Dataset) -> Config:
    """The configuration with tables in the place of `energies: isolated` and `energies: FILE`.

    Args:
        config: of the run.
        data: its training data, of whatever subset.

    Raises:
        BadConfig: there are no single atoms, or two energies of one element.
        FileNotFoundError, BadData: the file cannot be read.
    """
    files, priors = atom_files(config), []
    for prior in config.priors:
        if prior["name"] == "atomref" and prior["energies"] in ("isolated", *files):
            source, name = data, "data.train"
            if prior["energies"] in files:
                keys = {"energy": config.data.keys.energy or "energy", "charge": config.data.keys.charge}
                units = label_units(config.data.units.model_dump(), {})
                name = prior["energies"]
                source = open_dataset(name, {k: v for k, v in keys.items() if v is not None}, units)
            table = isolated_energies(source, name)
            prior = {**prior, "energies": {str(z): energy for z, energy in table.items()}}
        priors.append(prior)
    return config.model_copy(update={"priors": priors})


def isolated_energies(data: Dataset, name: str) -> dict[int, float]:
    """Atomic number -> energy in eV of the frames that are one neutral atom.

    Args:
        data: with energies.
        name: of the data, for messages.

    Raises:
        BadConfig: there are none, or two of one element differ by more than 1 meV.
    """
    found: dict[int, tuple[float, str]] = {}
    for index in np.flatnonzero(data.sizes() == 1).tolist():
        sample = data[index]
        energy = float(sample.labels["energy"][0]) if "energy" in sample.labels else math.nan
        if math.isnan(energy) or float(sample.system.charge[0]) != 0 or bool(sample.system.pbc.any()):
            continue
        z, where = int(sample.system.z[0]), data.name(index)
        if z in found and abs(found[z][0] - energy) > _SAME:
            raise BadConfig(
                f"priors: atomref.energies: {SYMBOLS[z]} has {found[z][0]} eV in {found[z][1]} and {energy} eV in "
                f"{where}; give a table"
            )
        found.setdefault(z, (energy, where))
    if not found:
        raise BadConfig(f"priors: atomref.energies: no frame of {name} is a single neutral atom with an energy")
    return {z: energy for z, (energy, _) in sorted(found.items())}
