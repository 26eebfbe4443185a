"""A small world for active learning: a triangle of atoms with Morse bonds, labelled by a calculator of ASE."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.calculators.morse import MorsePotential
from ase.calculators.singlepoint import SinglePointCalculator

MORSE = {"epsilon": 2.0, "r0": 1.0, "rho0": 3.0}


def water_like(seed: int) -> Atoms:
    atoms = Atoms("OHH", [[0, 0, 0], [1, 0, 0], [0.5, 0.87, 0]])
    atoms.rattle(0.04, seed=seed)
    return atoms


def labelled(atoms: Atoms) -> Atoms:
    atoms.calc = MorsePotential(**MORSE)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return atoms


def fingerprints(folder: Path) -> dict[str, str]:
    """Checksums of all that must not depend on interruptions: frames, dynamics, models, what rounds found."""
    from safetensors import safe_open

    names = ("*.xyz", "*.npz", "round.json", "finished.json", "best.tmn")
    found = {}
    for path in sorted(path for name in names for path in folder.rglob(name)):
        digest = hashlib.sha256()
        if path.suffix == ".tmn":  # whose metadata name the folder
            with safe_open(path, "numpy") as file:
                for name in sorted(file.keys()):
                    digest.update(name.encode() + file.get_tensor(name).tobytes())
        else:
            digest.update(path.read_bytes())
        found[str(path.relative_to(folder))] = digest.hexdigest()
    return found


def raw_config(start_file: Path, folder: Path) -> dict[str, Any]:
    """A configuration whose rounds take about a second each, as plain data."""
    return {
        "start": {"file": str(start_file)},
        "labels": {
            "labeller": {"name": "ase", "calculator": "morse", "level_of_theory": "Morse", "arguments": MORSE},
            "budget": 4,
            "per_round": 3,
            "processes": 1,  # the start of each costs more than the labels
        },
        "dynamics": {"temperatures": [5.0, 10.0], "time": 0.02, "timestep": 2.0, "replicas": 2, "every": 0.01},
        "selection": {"name": "disagreement", "lowest": 0.0, "highest": 1000.0, "apart": 0.0},
        "stop": {"whole": 1.0, "rounds": 5},
        "members": 2,
        "train": {
            "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
            "training": {
                "batch_size": 4, "max_epochs": 2, "lr": 5e-3, "warmup_steps": 2, "device": "cpu", "num_threads": 1,
                "energy_scale": 0.01,  # weak: what is nearly untrained must not break at once
            },
        },
        "refine": {"max_epochs": 1},
        "output": {"folder": str(folder)},
    }  # fmt: skip
