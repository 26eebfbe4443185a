"""The data that the quickstart trains on: whole, small, decorrelated, and labelled with what it says."""

import importlib.util
from pathlib import Path

import pytest
import torch

from torchmdnet2.data import open_dataset, statistics

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "data" / "ethanol_gfn2.xyz"


@pytest.fixture(scope="module")
def data():
    return open_dataset(FILE, {"energy": "energy", "forces": "forces"})


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_quickstart_data", ROOT / "scripts" / "make_quickstart_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_contents(data):
    found = statistics(data)
    assert FILE.stat().st_size <= 1_000_000
    assert found.num_frames == 1000 and found.labelled == {"energy": 1000, "forces": 1000}
    assert found.elements == [1, 6, 8] and found.atoms == (9, 9.0, 9)
    assert 0.5 < found.force_rms < 2.0


def test_frames_are_decorrelated(data):
    energies = torch.cat([sample.labels["energy"] for sample in data])
    centred = energies - energies.mean()
    correlation = (centred[1:] * centred[:-1]).mean() / centred.square().mean()
    assert abs(correlation) < 0.3
    assert len({sample.labels["energy"].item() for sample in data}) > 990


def test_no_net_force_or_torque(data):
    for sample in data:
        forces = sample.labels["forces"]
        torque = torch.linalg.cross(sample.system.pos, forces)
        assert forces.sum(0).abs().max() < 1e-3 and torque.sum(0).abs().max() < 5e-3  # eV/Å, eV


def test_labels_are_gfn2(data):
    """tblite, asked anew from another first guess, gives the same to within its convergence."""
    tblite = pytest.importorskip("tblite.ase")
    for k in (0, 499, 999):
        atoms = data[k].system.to_ase()[0]
        atoms.calc = tblite.TBLite(method="GFN2-xTB", accuracy=0.1, verbosity=0)
        assert atoms.get_potential_energy() == pytest.approx(data[k].labels["energy"].item(), abs=2e-6)
        torch.testing.assert_close(torch.from_numpy(atoms.get_forces()), data[k].labels["forces"], rtol=0, atol=5e-5)


def test_the_script_gives_the_same_for_the_same_seed(script, tmp_path, monkeypatch):
    pytest.importorskip("tblite.ase")
    monkeypatch.setattr(script, "EQUILIBRATE", 20)
    monkeypatch.setattr(script, "EVERY", 5)
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert script.main([str(tmp_path / f"{name}.xyz"), "--frames", "3", "--seed", str(seed)]) == 0
        texts.append((tmp_path / f"{name}.xyz").read_text())
    assert texts[0] == texts[1] != texts[2]
    assert len(open_dataset(tmp_path / "a.xyz", {"energy": "energy", "forces": "forces"})) == 3
    assert len(list(tmp_path.iterdir())) == 3
