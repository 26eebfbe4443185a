"""scripts/organic/ship.py: the card of a shipped model."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from torchmdnet2 import checkpoint, load
from torchmdnet2.checkpoint import read_header
from torchmdnet2.cli import main


@pytest.fixture
def ship(scripts, tmp_path, monkeypatch):
    """Ships a model with its errors on a subset; returns the file."""

    def shipped(model, subset="test"):
        found = {"frames": 3, "forces": {"mae": 0.04, "rmse": 0.09, "count": 30, "unit": "eV/Å"}}
        errors, target = tmp_path / "errors.json", tmp_path / "shipped.tmn"
        errors.write_text(json.dumps({"subset": subset, "errors": {"conformers": found}}))
        words = ["ship.py", model, target, "--errors", errors, "--speed", "fast"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        scripts("ship").main()
        return target

    return shipped


@pytest.mark.parametrize("further", [False, True])
def test_the_card_says_what_the_model_learned_from(ship, tmp_path, capsys, further):
    """Also after a further training with several sources."""
    potential = load("organic-small")
    metadata = dict(potential.metadata)
    metadata["config"]["init"] = {"file": str(tmp_path / "r12.tmn")}
    if further:
        metadata["config"]["data"]["sources"] = [{"train": str(tmp_path / "labels" / "train.h5"), "level": "a method"}]
    checkpoint.save(potential, tmp_path / "trained.tmn", metadata)
    target = ship(tmp_path / "trained.tmn")
    capsys.readouterr()
    assert main(["card", str(target)]) == 0
    card = capsys.readouterr().out
    assert "| test conformers | forces | 40.000 | 90.000 |" in card and "AIMNet2" in card
    assert ("Leif Jacobson" in card) == ("density functional theory" in card) == further
    assert ("Its errors are inherited" in card) != further
    assert f"| Level of theory | {metadata['data']['level_of_theory']} |" in card
    header = json.dumps(read_header(target))
    assert str(tmp_path) not in header and ("labels/train.h5" in header) == further
    again = load(target)
    assert again.calibration is not None and again.closed_shell
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), potential.parameters(), strict=True))


def test_errors_of_the_test_subset_are_expected(ship, tmp_path):
    checkpoint.save(load("organic-small"), tmp_path / "trained.tmn")
    with pytest.raises(SystemExit, match="of the test subset are expected, not of validation"):
        ship(tmp_path / "trained.tmn", "validation")
