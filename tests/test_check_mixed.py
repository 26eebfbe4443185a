"""scripts/check_mixed.py and check_nve.py: their statistics and observables, and that programs get the precision."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import molecule

from torchmdnet2 import Potential
from torchmdnet2.benchmark import water_box
from torchmdnet2.checkpoint import save

ROOT = Path(__file__).resolve().parents[1]


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module(f"scripts.{name}")


@pytest.fixture
def check(monkeypatch):
    return script("check_mixed", monkeypatch)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0}
        potential = Potential.from_config({"model": model, "elements": [1, 6, 8], "energy_scale": 0.01}).eval()
    path = tmp_path_factory.mktemp("model") / "tiny.tmn"
    save(potential, path)
    return path


def test_means_and_differences(check):
    rng = np.random.default_rng(0)
    assert check.mean(np.array([1.0, 2.0, 3.0])) == pytest.approx((2, 1 / 3**0.5))
    off = []
    for _ in range(400):
        shift, error = check.difference(rng.normal(5, 1, 16), rng.normal(5, 2, 24))
        off.append(shift / error)
    assert np.std(off) == pytest.approx(1.05, abs=0.1) and np.mean(np.abs(off) > 2) == pytest.approx(0.055, abs=0.03)
    shift, error = check.difference(rng.normal(5, 1, 64), rng.normal(6, 1, 64))
    assert shift == pytest.approx(1, abs=4 * error) and shift / error > 3
    assert [check.verdict(x) for x in (0.1, -2.5, 4, np.nan)] == ["yes", "2 to 3", "NO", "unknown"]


def test_exchanges_of_replicas(check):
    rng = np.random.default_rng(1)
    same = [check.exchanged(*rng.normal(0, 1, (2, 8, 20)), exchanges=200, seed=k) for k in range(100)]
    assert np.mean(same) == pytest.approx(0.5, abs=0.12) and np.mean(np.array(same) < 0.05) < 0.15
    one, other = rng.normal(0, 1, (2, 8, 20))
    assert check.exchanged(one, other + 3) < 0.003
    assert check.exchanged(np.zeros((3, 4)), np.zeros((3, 4))) == 1


def test_rows_of_a_comparison(check):
    rng = np.random.default_rng(2)
    one, other = (
        check.Found({"K": rng.normal(k, 1, 50)}, {"g": rng.normal(0, 1, (50, 3))}, {"s": 1.0}) for k in (0, 9)
    )
    rows = check.compared({"float32": one, "mixed": other})
    assert [(row["observable"], row["within"]) for row in rows] == [("K", "NO"), ("g", "yes")]
    text = check.table("nve", {"float32": one, "mixed": other}, rows)
    assert "| K | " in text and "| g | | | p = 0." in text and "mixed: s 1.00e+00" in text
    assert "2 comparisons: 1 within 2" in check.summary(rows) and "1 beyond" in check.summary(rows)


def test_torsions(check):
    atoms = molecule("CH3CH2OH")
    found = check.chains(atoms)
    assert set(found) == {"H-C-C-O", "C-C-O-H"}
    for chain in found.values():
        expected = (atoms.get_dihedral(*chain) + 180) % 360 - 180
        assert np.abs(check.dihedrals(atoms.positions[chain])) == pytest.approx(abs(expected), abs=1e-6)
    one = check.dihedrals(np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0.5, 3**0.5 / 2, 1]]))
    assert abs(one) == pytest.approx(60)
    shares = check.histograms(np.array([[-179.0, 179.0, 5.0, 5.0]]), check.TORSION_BINS)
    assert shares.sum() == 1 and shares[0, [0, -1]].tolist() == [0.25, 0.25]


def test_radial_distributions(check):
    """1 at random; with the cells' faces, for atoms that have left the cell."""
    (atoms,) = water_box(6).to_ase()
    length, rng = atoms.cell[0, 0], np.random.default_rng(0)
    frames = [rng.uniform(-length, 2 * length, (2, len(atoms), 3)) for _ in range(10)]
    for curve in check.radial(frames, atoms, "cpu").values():
        assert curve.shape == (2, 60) and curve[:, 20:] == pytest.approx(1, abs=0.25)
        assert curve[:, 20:].mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("what", ["nve", "torsions"])
def test_from_the_command_to_the_file(what, check, model_file, tmp_path, monkeypatch, capsys):
    output = tmp_path / "found.json"
    words = [f"{what}:{model_file}:0.008", "--precisions", "float64,float32", "--device", "cpu", "--replicas", "2"]
    monkeypatch.setattr(sys, "argv", ["check_mixed.py", *words, "--output", str(output)])
    monkeypatch.setattr(check, "EVERY", 2)
    check.main()
    printed = capsys.readouterr().out
    assert f"{what}, tiny, 0.008 ps, 2 replicas" in printed and "comparisons: " in printed
    (job,) = json.loads(output.read_text())["jobs"]
    assert len(job["found"]["float32"]["values"]["temperature, K"]) == 2
    assert job["found"]["float32"]["facts"]["force errors, eV/Å: rms, largest"][1] < 1e-4


@pytest.mark.parametrize("host", ["ase", "md", "openmm Reference"])
def test_drift_in_each_program(host, model_file, monkeypatch, capsys):
    """The precision reaches every program: without a GPU all refuse it."""
    if host.startswith("openmm"):
        pytest.importorskip("openmm")
    check_nve = script("check_nve", monkeypatch)
    words = [str(model_file), str(ROOT / "examples/data/ibuprofen.xyz"), "--time", "0.01", "--hosts", host]
    monkeypatch.setattr(sys, "argv", ["check_nve.py", *words])
    check_nve.main()
    assert f"{host:<18} drift" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check_nve.py", *words, "--precision", "mixed"])
    with pytest.raises(ValueError, match="precision='mixed': there are kernels for a GPU only"):
        check_nve.main()
