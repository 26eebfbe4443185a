"""`torchmdnet2 evaluate` of several models: their mean, each of them, and their spread."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ase.io import read, write
from commands import MODEL, contents, fill, run

from torchmdnet2 import Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.ensemble import write_ensemble
from torchmdnet2.training.reporting.evaluation import Spread


@pytest.fixture
def folder(tmp_path):
    """m.tmn, n.tmn, o.tmn, of two cutoffs, and data.xyz."""
    fill(tmp_path)
    for name, seed, cutoff in (("n", 1, 3.0), ("o", 2, 1.2)):
        potential = Potential.from_config({"model": {**MODEL, "cutoff": cutoff}, "elements": [1, 8]}).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in potential.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        save(potential, tmp_path / f"{name}.tmn")
    return tmp_path


def by_hand(folder, models):
    """Energies per atom [members, frames] and forces [members, frames, 3, 3] of float64 models, and their labels."""
    frames = read(folder / "data.xyz", ":")
    potentials = [load(folder / f"{m}.tmn", dtype="float64") for m in models]
    results = [[p(System.from_ase(atoms)) for atoms in frames] for p in potentials]
    energy = np.array([[float(r.energy) / 3 for r in row] for row in results])
    forces = np.array([[r.forces.numpy() for r in row] for row in results])
    return energy, forces, np.array([a.get_potential_energy() / 3 for a in frames])


def rms(values):
    return np.sqrt(np.mean(np.square(values)))


def test_mean_members_and_spread(capsys, folder):
    models = [folder / f"{m}.tmn" for m in "mno"]
    before = contents(folder)
    code, out, _ = run(capsys, "evaluate", *models, folder / "data.xyz", "--json", "--batch-size", 4)
    found = json.loads(out)
    energy, forces, label = by_hand(folder, "mno")
    assert code == 0 and found["frames"] == 6 and contents(folder) == before
    assert found["energy_per_atom"]["rmse"] == pytest.approx(rms(energy.mean(0) - label))
    assert found["forces"]["rmse"] == pytest.approx(rms(forces.mean(0)))  # the labels are 0
    assert [m["file"] for m in found["members"]] == list(map(str, models))
    for own, e, f in zip(found["members"], energy, forces, strict=True):
        assert own["energy_per_atom"]["rmse"] == pytest.approx(rms(e - label))
        assert own["forces"]["rmse"] == pytest.approx(rms(f))
    spread = found["spread"]["forces"]
    assert spread["rms_spread"] == pytest.approx(rms(forces.std(0, ddof=1)))
    assert spread["ratio"] == pytest.approx(spread["rmse"] / spread["rms_spread"])
    assert found["spread"]["energy_per_atom"]["rms_spread"] == pytest.approx(rms(energy.std(0, ddof=1)))
    bins = [part["rms_spread"] for part in spread["bins"]]
    assert len(bins) == 5 and bins == sorted(bins)
    _, table, _ = run(capsys, "evaluate", *models, folder / "data.xyz")
    assert "RMSE of the members" in table and "mean of 3 models" in table and f"{1e3 * spread['rmse']:.3f}" in table
    assert f"{spread['ratio']:.2f}" in table
    listed = write_ensemble(models, folder / "ensemble.json")
    again = json.loads(run(capsys, "evaluate", listed, folder / "data.xyz", "--json")[1])
    assert again["forces"]["rmse"] == pytest.approx(found["forces"]["rmse"]) and len(again["members"]) == 3


def test_predictions_have_their_spread(capsys, folder, tmp_path):
    arguments = ["evaluate", folder / "m.tmn", folder / "n.tmn", folder / "data.xyz@0:2"]
    output = tmp_path / "predicted.xyz"
    assert run(capsys, *arguments, "--output", output)[0] == 0
    energy, forces, _ = by_hand(folder, "mn")
    for k, atoms in enumerate(read(output, ":")):
        assert atoms.get_potential_energy() == pytest.approx(3 * energy[:, k].mean())
        assert atoms.info["energy_std"] == pytest.approx(3 * energy[:, k].std(ddof=1), rel=1e-5)
        np.testing.assert_allclose(atoms.arrays["forces_std"], forces[:, k].std(0, ddof=1), atol=1e-6)


def test_refusals(capsys, folder):
    data = folder / "data.xyz"
    for arguments, code, words in (
        ([folder / "m.tmn", folder / "n.tmn"], 2, "only models are given"),
        ([folder / "m.tmn", folder / "n.tmn", data, "--output", folder / "n.tmn"], 2, "must end in .xyz"),
        ([folder / "m.tmn", folder / "none.tmn", data], 1, "no such model file"),
    ):
        before = contents(folder)
        got, _, err = run(capsys, "evaluate", *arguments)
        assert got == code and words in err and contents(folder) == before
    methane = read(data)
    methane.symbols[0] = "C"
    write(folder / "methane.xyz", methane)
    got, _, err = run(capsys, "evaluate", folder / "m.tmn", folder / "n.tmn", folder / "methane.xyz")
    assert got == 1 and "frame 0" in err and "knows only H, O" in err


def test_calibration_of_errors_that_follow_the_spread():
    generator = torch.Generator().manual_seed(0)
    deviation = torch.rand(4000, 3, generator=generator) + 0.1
    spread = Spread()
    spread.add("forces", 2 * deviation * torch.randn(4000, 3, generator=generator), deviation, "eV/Å")
    found = spread.summary()["forces"]
    assert found["ratio"] == pytest.approx(2, rel=0.05) and found["correlation"] > 0.4
    assert all(part["rmse"] / part["rms_spread"] == pytest.approx(2, rel=0.1) for part in found["bins"])
    same = Spread()
    same.add("energy", torch.ones(2), torch.zeros(2), "eV")
    assert same.summary()["energy"]["ratio"] is None
