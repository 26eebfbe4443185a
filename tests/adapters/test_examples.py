"""The example scripts run, each on a tiny model, and say something true."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.socketio import SocketIOCalculator
from ase.io import read, write
from warm import warm_python

from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import load

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NEEDS_OPENMM = pytest.mark.skipif(find_spec("openmm") is None, reason="openmm is not installed")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script as __main__ in a temporary folder; gives its standard output."""
    monkeypatch.chdir(tmp_path)

    def script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


@pytest.fixture
def label(tmp_path):
    """Runs label_with_xtb.py; in a process of its own, since its worker processes import it as their main module."""

    def script(*arguments):
        command = [sys.executable, EXAMPLES / "label_with_xtb.py", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True).stdout

    return script


@pytest.fixture
def water(tmp_path):
    write(tmp_path / "water.xyz", molecule("H2O"))
    return tmp_path / "water.xyz"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_short_and_documented(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"python examples/{script.name}" in text.split('"""')[1]


# the first that compiles kernels, soon after the start: tests/conftest.py
def test_new_prior(run, water, monkeypatch):
    from torchmdnet2.registry import PRIORS

    assert "zbl" in PRIORS  # the built-in priors are there
    monkeypatch.setattr(PRIORS, "_classes", dict(PRIORS._classes))
    out = run("new_prior.py", water)
    energies = [float(value) for value in re.findall(r": +(-?[\d.]+) eV", out)]
    assert len(energies) == 3 and energies == sorted(energies)


def test_train(run, tmp_path, potential):
    frames = []
    calc = TorchMDNet2Calculator(potential)
    for seed in range(12):
        atoms = molecule("H2O")
        atoms.rattle(0.05, seed=seed)
        atoms.calc = calc
        atoms.get_forces()
        frames.append(atoms)
    write(tmp_path / "frames.xyz", frames)
    arguments = ["--epochs", 2, "--channels", 8, "--validation", 2, "--output", "trained"]
    out = run("train.py", "frames.xyz", *arguments)
    assert re.search(r"best\.tmn: mean force error on 10 frames [\d.]+ meV/Å", out)
    assert load(tmp_path / "trained" / "best.tmn").elements == [1, 8]


def test_label_with_xtb(label, water, tmp_path):
    tblite = pytest.importorskip("tblite.ase")
    out = label(water, "cheap.xyz", "--frames", 3, "--temperatures", "300,600")
    assert "cheap.xyz: 3 frames" in out
    frames = read(tmp_path / "cheap.xyz", ":")
    positions, forces = frames[2].positions, frames[2].get_forces()
    assert np.abs(positions - frames[1].positions).max() > 1e-3
    again = molecule("H2O")
    again.positions = positions
    again.calc = tblite.TBLite(method="GFN2-xTB", accuracy=0.1, verbosity=0)
    np.testing.assert_allclose(forces, again.get_forces(), atol=2e-3)  # eV/Å: how far its iterations converge
    assert frames[2].get_potential_energy() == pytest.approx(again.get_potential_energy(), abs=1e-4)


def test_teach_with_xtb(run, label, potential, model_file, water, tmp_path):
    pytest.importorskip("tblite")
    label(water, "cheap.xyz", "--frames", 3)
    out = run("teach_with_xtb.py", "difference", "cheap.xyz", "difference.xyz")
    assert "difference.xyz: 3 of 3 frames" in out
    cheap, difference = (read(tmp_path / name, ":") for name in ("cheap.xyz", "difference.xyz"))
    assert np.abs([frame.get_forces() for frame in difference]).max() < 2e-3  # of xTB to itself
    assert np.abs([frame.get_potential_energy() for frame in difference]).max() < 1e-4
    run("teach_with_xtb.py", "add", "cheap.xyz", "taught.xyz", model_file, model_file)
    taught = read(tmp_path / "taught.xyz", ":")
    calc = TorchMDNet2Calculator(potential)
    for before, after in zip(cheap, taught, strict=True):
        own = before.copy()
        own.calc = calc
        np.testing.assert_allclose(after.get_forces(), before.get_forces() + own.get_forces(), atol=1e-5)
        energy = before.get_potential_energy() + own.get_potential_energy()
        assert after.get_potential_energy() == pytest.approx(energy, abs=1e-5)


def test_ase_md(run, model_file, water, tmp_path):
    assert "relaxed" in run("ase_md.py", model_file, water, "--steps", 20, "--temperature", 50)
    assert len(read(tmp_path / "ase_md.traj", ":")) == 3


def test_ase_npt_water(run, model_file, tmp_path):
    out = run("ase_npt_water.py", model_file, "--side", 2, "--steps", 10, "--temperature", 50)
    densities = [float(found) for found in re.findall(r"([\d.]+) g/cm³", out)]
    assert densities[0] == pytest.approx(1.0, abs=0.01) and len(set(densities)) > 1
    assert len(read(tmp_path / "water.traj", ":")) == 2


def test_ase_cell_relaxation(run, model_file, tmp_path):
    crystal = bulk("CO", "zincblende", a=4.4)
    write(tmp_path / "crystal.xyz", crystal)
    out = run("ase_cell_relaxation.py", model_file, "crystal.xyz", "--steps", 15, "--fmax", 0.05)
    assert "onverged" in out and "equation of state" in out
    relaxed, calc = read(tmp_path / "relaxed.xyz"), TorchMDNet2Calculator(model_file)
    assert calc.get_property("energy", relaxed) < calc.get_property("energy", crystal)
    assert relaxed.get_volume() != pytest.approx(crystal.get_volume(), rel=1e-3)


def test_ase_neb(run, model_file, tmp_path):
    """Both ends are the same molecule, turned: the barrier is at least zero."""
    one = molecule("H2O")
    other = one.copy()
    other.rotate(40, "z", center="COM")
    write(tmp_path / "a.xyz", one), write(tmp_path / "b.xyz", other)
    out = run("ase_neb.py", model_file, "a.xyz", "b.xyz", "--images", 5, "--steps", 5)
    assert out.count("image") >= 5
    assert float(re.search(r"barrier (-?[\d.]+) eV", out)[1]) >= 0
    assert len(read(tmp_path / "neb.xyz", ":")) == 5


def test_ase_vibrations(run, model_file, water, tmp_path):
    out = run("ase_vibrations.py", model_file, water)
    assert out.count("mode") == 9 and "zero-point energy" in out
    write(tmp_path / "crystal.xyz", bulk("CO", "zincblende", a=4.4))
    out = run("ase_vibrations.py", model_file, "crystal.xyz", "--supercell", 1, "--fmax", 0.1)
    at_gamma = next(line for line in out.splitlines() if line.startswith("[0. 0. 0.]"))
    frequencies = [float(value) for value in at_gamma.split("]")[1].split()[:6]]
    assert sorted(np.abs(frequencies))[2] < 1  # three modes are translations


def test_ase_ipi_client(model_file, water, tmp_path):
    """Against ASE's own server, which speaks i-PI's side of the protocol."""
    name = f"torchmdnet2_{uuid.uuid4().hex[:8]}"
    command = [warm_python(), EXAMPLES / "ase_ipi_client.py", model_file, water, "--unixsocket", name]
    path = {"PYTHONPATH": str(EXAMPLES.parent), "PATH": "", "OMP_NUM_THREADS": "1"}

    def start(*_, **__):
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path, cwd=tmp_path)

    alone = TorchMDNet2Calculator(model_file)
    with SocketIOCalculator(unixsocket=name, launch_client=start, timeout=120) as served:
        atoms = read(water)
        for step in range(3):
            atoms.rattle(0.05, seed=step)
            assert served.get_property("energy", atoms) == pytest.approx(alone.get_property("energy", atoms), rel=1e-9)
            forces = served.get_property("forces", atoms)
            np.testing.assert_allclose(forces, alone.get_property("forces", atoms), atol=1e-9)
        client = served.server.proc
    assert "served 3 rounds" in client.communicate(timeout=60)[0]


@NEEDS_OPENMM
def test_openmm_md(run, model_file, water, tmp_path):
    out = run("openmm_md.py", model_file, water, "--steps", 20, "--temperature", 50)
    assert "wrote openmm_md.dcd" in out and (tmp_path / "openmm_md.dcd").stat().st_size > 500


@NEEDS_OPENMM
@pytest.mark.slow
def test_openmm_mixed(run, model_file):
    openmmml = pytest.importorskip("openmmml")
    from torchmdnet2.adapters.openmmml import TorchMDNet2Factory

    if "torchmdnet2" not in openmmml.MLPotential._implFactories:  # where this package is not installed
        openmmml.MLPotential.registerImplFactory("torchmdnet2", TorchMDNet2Factory())
    out = run("openmm_mixed.py", model_file, "--steps", 2)
    assert "9 of them by the model" in out and np.isfinite(float(re.search(r"(-?[\d.]+) kJ/mol", out)[1]))


def test_from_torchmd_net(run, water, tmp_path):
    from torchmdnet2 import Potential
    from torchmdnet2.importers.torchmd_net import export_checkpoint

    with torch.random.fork_rng(devices=[]):
        made = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 8, "num_rbf": 8}})
    export_checkpoint(made.eval(), tmp_path / "their.ckpt")
    out = run("from_torchmd_net.py", "their.ckpt", water)
    assert float(re.search(r"differs from float64 by at most ([\d.e+-]+)", out)[1]) < 1e-3
    expected = TorchMDNet2Calculator(made, dtype="float64").get_property("energy", read(water))
    assert float(re.search(r"torch.float64: (-?[\d.]+) eV", out)[1]) == pytest.approx(expected, abs=1e-5)


def test_torch_sim_relax(run, model_file, tmp_path):
    pytest.importorskip("torch_sim")
    write(tmp_path / "frames.xyz", [molecule("H2O"), molecule("CH4")])
    out = run("torch_sim_relax.py", model_file, "frames.xyz", "--steps", 20)
    energies = [tuple(map(float, pair)) for pair in re.findall(r": (-?[\d.]+) -> (-?[\d.]+) eV", out)]
    assert len(energies) == 2 and all(after < before for before, after in energies)
    assert [len(atoms) for atoms in read(tmp_path / "relaxed.xyz", ":")] == [3, 5]
