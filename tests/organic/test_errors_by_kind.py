"""scripts/organic/evaluate.py: errors by kind, as ship.py takes them."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch

from torchmdnet2 import System, load
from torchmdnet2.cli import main
from torchmdnet2.data import Sample
from torchmdnet2.data.labels import GROUP

WATER = np.array([[0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]])
OFF = 0.03, -0.05, 0.02  # eV, of three frames of one group, whose mean is 0


def labelled(model, numbers, positions, charge, group, off):
    """A frame with the model's own labels, but for its energy."""
    system = System(torch.tensor(numbers), torch.tensor(positions), charge=torch.tensor([float(charge)]))
    found = model(system)
    labels = {"energy": found.energy.detach().double() + off, "forces": found.forces, "charges": found.charges}
    return Sample(system, {k: v.detach() for k, v in labels.items()} | {GROUP: torch.tensor([group])})


def test_relative_energies_are_those_of_groups(scripts, tmp_path, monkeypatch, capsys):
    """Relative to the mean of a group; kinds without groups have none, and a card shows what there is."""
    model = load("organic-small")
    frames = [labelled(model, [8, 1, 1], WATER * (1 + 0.1 * k), 0, 7, off) for k, off in enumerate(OFF)]
    frames.append(labelled(model, [8, 1], WATER[:2], -1, 8, 0.02))
    scripts("distil").write_samples(tmp_path, {"test-003-0000": frames})
    words = ["evaluate.py", "organic-small", tmp_path, "--subset", "test", "--json", tmp_path / "errors.json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    scripts("evaluate").main()
    errors = json.loads((tmp_path / "errors.json").read_text())["errors"]
    ion, water = sorted(errors.values(), key=lambda found: found["frames"])
    assert water["relative_energy"]["mae"] == pytest.approx(np.abs(OFF).mean(), abs=1e-4)
    assert water["relative_energy"]["rmse"] == pytest.approx(np.sqrt(np.square(OFF).mean()), abs=1e-4)
    assert water["energy"]["mae"] == pytest.approx(np.abs(OFF).mean(), abs=1e-4) and water["forces"]["mae"] < 1e-5
    assert "relative_energy" not in ion and ion["energy"]["mae"] == pytest.approx(0.02, abs=1e-4)
    words = ["ship.py", "organic-small", tmp_path / "shipped.tmn", "--errors", tmp_path / "errors.json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    scripts("ship").main()
    capsys.readouterr()
    assert main(["card", str(tmp_path / "shipped.tmn")]) == 0
    assert re.search(r"relative energy \| 33\.3", capsys.readouterr().out)  # meV
