"""training.max_minutes: a run ends after a time, and its learning rate with it."""

from __future__ import annotations

import itertools
import json
import types

import pytest
import torch

from torchmdnet2.system import System
from torchmdnet2.training.config.config import TrainingConfig, parse_config
from torchmdnet2.training.run import run
from torchmdnet2.training.run.references import subtract_priors
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.steps.trainer import LearningRate

from .test_distributed import rows, run_on


def test_cosine_follows_what_is_ahead():
    rate = LearningRate(TrainingConfig(lr=1.0, lr_min=0.0, warmup_steps=0, max_epochs=10), 100)
    assert rate.rate(50) == pytest.approx(0.5)
    rate.time = 0.75
    assert rate.rate(0) == rate.rate(50) == pytest.approx(0.1464466, rel=1e-4)
    assert rate.rate(90) == pytest.approx(0.0244717, rel=1e-4)
    other = LearningRate(rate.config, 100)
    other.restore(rate.state())
    assert other.rate(0) == rate.rate(0)
    rate.time = 1.0
    assert rate.rate(0) == 0.0


def test_a_run_ends_after_its_time(raw_config, monkeypatch):
    """A clock that goes on by a second whenever it is read: 30 s for the run, of which the first steps have 28."""
    seconds = itertools.count()
    monkeypatch.setattr(run, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    raw_config["training"].update(max_epochs=1000, max_minutes=0.5, lr=1e-3, lr_min=1e-6, warmup_steps=0)
    path = run.run_training(parse_config(raw_config))
    found = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    assert found[-1]["step"] == 29 and len(found) == 8  # four steps an epoch: the last one is not whole
    assert found[0]["lr"] > 0.9e-3 and found[-1]["lr"] < 1e-5
    said = (path.parent / "log.txt").read_text()
    # what has come to its end is not taken up again, also with another limit
    raw_config["training"]["max_minutes"] = 5
    before = path.read_bytes()
    run.run_training(parse_config(raw_config), resume="auto")
    assert path.read_bytes() == before and (path.parent / "log.txt").read_text() == said


def test_two_processes_end_together(raw_config, tmp_path):
    raw_config["training"].update(device="cpu", max_epochs=100_000, max_minutes=0.1)
    folder = raw_config["output"]["folder"] = str(tmp_path / "two")
    run_on(raw_config, tmp_path, 2)
    last = rows(tmp_path / "two")[-1]
    assert last["epoch"] < 100_000 and last["lr"] < 1e-3, folder


def test_priors_of_all_frames_are_subtracted_before_references_are_fitted(raw_config):
    """The same numbers as one structure at a time by `prior_energies`, with its atoms' references."""
    raw_config["priors"] = [{"name": "atomref", "energies": "fit"}, {"name": "zbl"}]
    config = parse_config(raw_config)
    setup = make_setup(config)
    frames = setup.frames["train"]
    facts = {"energies": [0.0] * len(frames), "energy_positions": list(range(len(frames)))}
    subtract_priors(config, frames, facts, "cpu")
    (zbl,) = (prior for prior in setup.potential.priors if type(prior).__name__ == "ZBL")
    setup.potential.priors = torch.nn.ModuleList([zbl])
    for k in range(len(frames)):
        system: System = frames.batch([k]).sample.system
        assert facts["energies"][k] == pytest.approx(-float(setup.potential.prior_energies(system).sum()), abs=1e-10)
