"""Ensembles: members differ by their random numbers, resume each, and load as one potential with a spread."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from ase.io import read

from torchmdnet2 import System, checkpoint
from torchmdnet2.adapters.ase import CommitteeCalculator
from torchmdnet2.cli import main
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadCheckpoint, BadConfig
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.reporting.evaluation import rank_correlation
from torchmdnet2.training.reporting.report import digits
from torchmdnet2.training.run.run import member_config, run_members, run_training


@pytest.fixture(scope="module")
def trained(data_file, tmp_path_factory):
    """An ensemble of three."""
    folder = tmp_path_factory.mktemp("members") / "run"
    raw = {
        "data": {"train": str(data_file), "split": {"validation": 6, "test": 6}},
        "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "training": {"batch_size": 5, "max_epochs": 2, "lr": 5e-3, "device": "cpu", "num_threads": 1},
        "output": {"folder": str(folder), "report": False},
    }
    config = parse_config(raw)
    path = run_members(config, 3)
    assert path == folder / "ensemble.json"
    assert not (folder / "report.html").exists()  # output.report is off
    return folder


@pytest.fixture
def ensemble(trained, raw_config, tmp_path):
    """A copy of it, in tmp_path / "run", and its configuration."""
    shutil.copytree(trained, tmp_path / "run")
    raw_config["training"].update(max_epochs=2)
    raw_config["training"].pop("warmup_steps")
    return parse_config(raw_config), tmp_path / "run" / "ensemble.json"


def test_members_and_their_spread(ensemble, raw_config, data_file, tmp_path):
    config, path = ensemble
    folder = tmp_path / "run"
    splits = [(folder / f"member_{k}" / "splits.json").read_text() for k in range(3)]
    assert splits[0] == splits[1] == splits[2]  # the same test frames for all
    together = Ensemble.load(path, dtype=torch.float64)
    frames = read(data_file, ":")
    indices = json.loads(splits[0])["test"]["indices"]
    metrics = json.loads((folder / "ensemble_metrics.json").read_text())
    spread, forces = [], []
    for i in indices:
        members = [p(System.from_ase(frames[i])) for p in together.members]
        energies = torch.cat([m.energy for m in members])
        assert len(set(energies.tolist())) == 3
        spread.append(float(energies.std()) / len(frames[i]))
        forces.append((torch.stack([m.forces for m in members]).mean(0).numpy() - frames[i].get_forces()).ravel())
    found = metrics["spread"]["energy_per_atom"]
    assert found["rms_spread"] == pytest.approx(np.sqrt(np.mean(np.square(spread))), rel=1e-6)
    assert metrics["errors"]["forces"]["mae"] == pytest.approx(np.abs(np.concatenate(forces)).mean(), rel=1e-6)
    assert -1 <= metrics["spread"]["forces"]["correlation"] <= 1
    # as one ASE calculator
    calc = CommitteeCalculator(path, dtype="float64")
    atoms = frames[indices[0]].copy()
    assert calc.get_property("energy_std", atoms) == pytest.approx(spread[0] * len(atoms), rel=1e-6)
    # a member is what a run with its seed alone would be
    alone = member_config(config, 1)
    assert alone.training.seed == config.training.seed + 1
    # nothing is left to do, and an interrupted member is continued
    before = [(folder / f"member_{k}" / "best.tmn").read_bytes() for k in range(3)]
    (folder / "member_2" / "metrics.json").unlink()
    assert run_members(config, 3, resume="auto") == path
    assert before == [(folder / f"member_{k}" / "best.tmn").read_bytes() for k in range(3)]
    with pytest.raises(BadConfig, match="holds a finished run"):
        run_members(config, 3)
    with pytest.raises(BadConfig, match="holds an ensemble"):
        run_training(config)
    with pytest.raises(BadConfig, match="holds the run of a single model"):
        run_members(member_config(config, 0), 2)


def test_what_is_listed_is_what_is_loaded(ensemble):
    _, path = ensemble
    other = path.parent / "member_1" / "best.tmn"
    potential = checkpoint.load(other)
    with torch.no_grad():
        next(potential.parameters()).add_(1.0)
    checkpoint.save(potential, other)
    with pytest.raises(BadCheckpoint, match=r"not the model that .* lists"):
        Ensemble.load(path)
    for wrong in ("{}", "[]", "{", json.dumps({"format": "torchmdnet2 ensemble 9", "members": []})):
        path.write_text(wrong)
        with pytest.raises(BadCheckpoint):
            Ensemble.load(path)
    with pytest.raises(FileNotFoundError):
        Ensemble.load(path.parent / "none.json")


def test_bootstrap_draws_with_repetition(raw_config, tmp_path, capsys):
    from torchmdnet2.training.run.setup import make_setup

    config = parse_config(raw_config)
    drawn = [make_setup(member_config(config, k, bootstrap=True)).splits for k in (0, 1)]
    assert drawn[0]["test"] == drawn[1]["test"]
    own = [part["train"]["indices"] for part in drawn]
    assert own[0] != own[1]
    assert all(len(part) == 20 and len(set(part)) < 20 for part in own)
    assert not set(own[0]) & set(drawn[0]["test"]["indices"])
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw_config))
    assert main(["train", str(tmp_path / "c.yaml"), "--bootstrap"]) == 2
    assert "also give --members" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "c.yaml"), "--members", "1"]) == 2
    assert "at least two members" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "c.yaml"), "--members", "4", "--check"]) == 0
    assert "4 members, one after the other" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_report_of_an_ensemble(raw_config, tmp_path, drawn):
    raw_config["training"]["max_epochs"] = 1
    raw_config["output"]["report"] = True
    path = run_members(parse_config(raw_config), 2)
    text = (path.parent / "report.html").read_text()
    metrics = json.loads((path.parent / "ensemble_metrics.json").read_text())
    for part in (
        digits(1e3 * metrics["errors"]["forces"]["mae"]),
        digits(1e3 * metrics["spread"]["energy_per_atom"]["rms_spread"]),
        "member_0",
        "member_1",
    ):
        assert part in text, part
    assert text.count("data:image/png;base64,") == 2 and "://" not in text
    assert (path.parent / "member_1" / "report.html").is_file()


def test_rank_correlation():
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, a.exp()) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)
    assert rank_correlation(a, torch.tensor([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
    assert rank_correlation(a, torch.zeros(4)) == 0


def test_potentials_that_are_no_ensemble():
    from tiny import tiny_potential

    a, b = tiny_potential(elements=[1, 8]), tiny_potential(elements=[6, 7])
    for members, words in (
        ([a], "needs at least two potentials to have a spread, got 1"),
        ([a, b], "no element that all potentials of the ensemble know"),
    ):
        with pytest.raises(ValueError, match=words):
            Ensemble(members)
    c = tiny_potential(elements=[1, 8])
    for potential, level in ((a, "PBE"), (c, "HF")):
        potential.metadata["data"] = {"level_of_theory": level}
    with pytest.warns(UserWarning, match="trained on labels of HF and PBE: their mean is of no level of theory"):
        Ensemble([a, c])
