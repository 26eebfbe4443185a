"""Training on energies, forces and stress of crystals; the stored errors are those of the ASE calculator (bar R30)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import checkpoint
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training


@pytest.fixture
def crystals(tmp_path):
    rng = np.random.default_rng(0)
    frames = []
    for k in range(14):
        atoms = bulk("Cu", cubic=True)
        atoms.numbers[0] = 29 if k % 2 else 13
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(0, 0.02, (3, 3))), scale_atoms=True)
        atoms.rattle(0.1, rng=rng)
        atoms.calc = EMT()
        energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces, stress=stress)
        if k == 3:  # one without stress
            atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        frames.append(atoms)
    write(tmp_path / "c.xyz", frames, format="extxyz")
    return tmp_path / "c.xyz"


def test_errors_of_stress(raw_config, crystals, tmp_path):
    raw_config["data"] = {
        "train": str(crystals),
        "keys": {"energy": "energy", "forces": "forces", "stress": "stress"},
        "split": {"validation": 3, "test": 4},
    }
    raw_config["model"]["max_z"] = 30
    raw_config["training"].update(max_epochs=4, loss={"stress": 100.0})
    path = run_training(parse_config(raw_config))
    rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["validation_stress_mae"] < rows[0]["validation_stress_mae"]
    frames = read(crystals, ":")
    indices = json.loads((path.parent / "splits.json").read_text())["test"]["indices"]
    calc = TorchMDNet2Calculator(path, dtype="float64")
    errors, forces = [], []
    for i in indices:
        atoms = frames[i].copy()
        forces.append((calc.get_property("forces", atoms) - frames[i].get_forces()).ravel())
        if "stress" in frames[i].calc.results:
            voigt = calc.get_property("stress", atoms) - frames[i].get_stress()
            errors.append(voigt[[0, 1, 2, 3, 3, 4, 4, 5, 5]])  # nine components, as they are counted
    stored = checkpoint.read_header(path)["metadata"]["errors"]["test"]
    assert stored["stress"]["count"] == 9 * len(errors)
    assert stored["stress"]["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    assert stored["stress"]["rmse"] == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-6)
    assert stored["forces"]["mae"] == pytest.approx(np.abs(np.concatenate(forces)).mean(), rel=1e-6)
