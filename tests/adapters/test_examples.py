"""The example scripts run, each on a tiny model."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ase.build import molecule
from ase.io import read, write

from torchmdnet2.adapters.ase import TorchMDNet2Calculator

ROOT = Path(__file__).parents[2]
NEEDS_OPENMM = pytest.mark.skipif(find_spec("openmm") is None, reason="openmm is not installed")


def run(name, folder, *arguments, path=ROOT):
    """Standard output of an example; it must succeed."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}",
        "OMP_NUM_THREADS": "1",
        "OPENMM_CPU_THREADS": "1",
    }
    command = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def water(tmp_path):
    write(tmp_path / "water.xyz", molecule("H2O"))
    return tmp_path / "water.xyz"


def test_ase_md(model_file, water, tmp_path):
    assert "relaxed" in run("ase_md.py", tmp_path, model_file, water, "--steps", 20, "--temperature", 50)
    assert len(read(tmp_path / "ase_md.traj", ":")) == 3


@NEEDS_OPENMM
def test_openmm_md(model_file, water, tmp_path):
    out = run("openmm_md.py", tmp_path, model_file, water, "--steps", 20, "--temperature", 50)
    assert "wrote openmm_md.dcd" in out and (tmp_path / "openmm_md.dcd").stat().st_size > 500


@NEEDS_OPENMM
def test_openmm_mixed(model_file, tmp_path, plugin_folder):
    pytest.importorskip("openmmml")
    out = run("openmm_mixed.py", tmp_path, model_file, "--steps", 2, path=plugin_folder)
    assert "3 of them by the model" in out


def test_batch_evaluation(model_file, tmp_path):
    frames = [molecule(name) for name in ("H2O", "CH4", "CH3CH2OH", "CO", "C6H6")]
    write(tmp_path / "frames.xyz", frames)
    run("batch_evaluation.py", tmp_path, model_file, "frames.xyz", "--batch-size", 2)
    with open(tmp_path / "energies.csv") as file:
        rows = list(csv.DictReader(file))
    calc = TorchMDNet2Calculator(model_file)
    for row, atoms in zip(rows, read(tmp_path / "frames.xyz", ":"), strict=True):
        assert float(row["energy_eV"]) == pytest.approx(calc.get_property("energy", atoms), rel=1e-9)
