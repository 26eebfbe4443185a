"""scripts/organic/ship.py: the card of a shipped model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
def test_the_card_says_what_the_model_learned_from(ship, scripts, tmp_path, capsys, further):
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
    level = scripts("ship").LEVEL if further else metadata["data"]["level_of_theory"]
    assert f"| Level of theory | {level} |" in card
    assert "| Citation of the data | D. Anstine" in card
    assert ("J. Weber and others, arXiv:2505.06462 |" in card) == further
    header = json.dumps(read_header(target))
    assert str(tmp_path) not in header and ("labels/train.h5" in header) == further
    again = load(target)
    assert again.calibration is not None and again.closed_shell
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), potential.parameters(), strict=True))


@pytest.mark.parametrize("name", ["organic", "organic-small"])
def test_errors_beside_references_are_those_of_the_documentation(scripts, name):
    """In the card that is shipped, too."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    column = {"organic": 0, "organic-small": 1}[name]
    table = text.split("Mean absolute errors from high-level references")[1].split("All sets but")[0]
    said = {row.split("|")[1].strip(): [c.strip() for c in row.split("|")[4 + column].split(",")]
            for row in table.splitlines() if row.startswith("|")}  # fmt: skip
    for label, errors in scripts("ship").SETS.items():
        words = label.replace("torsions, scans not trained on:", "torsions").replace(", ", " ").replace(":", "").split()
        row = next(row for row in said if words[0] in row and (words[-1] in row or words[1] in row))
        assert errors[column] in said[row], (label, row, said[row])
    card = load(name).metadata["about"]
    assert scripts("ship").beside_references(name == "organic") == card["Tests beside references"]


def test_errors_of_the_test_subset_are_expected(ship, tmp_path):
    checkpoint.save(load("organic-small"), tmp_path / "trained.tmn")
    with pytest.raises(SystemExit, match="of the test subset are expected, not of validation"):
        ship(tmp_path / "trained.tmn", "validation")
