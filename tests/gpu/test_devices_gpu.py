"""Training on two GPUs is training on one (issue: several devices), with NCCL's sums inside the captured step."""

from __future__ import annotations

import copy

import pytest
import torch
from training.conftest import make_frames
from training.test_distributed import rows, run_on

from torchmdnet2 import load
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


def test_two_gpus_give_the_weights_of_one(tmp_path):
    """To rounding in float64: R20 across devices."""
    from ase.io import write

    path = tmp_path / "morse.xyz"
    write(path, make_frames(32), format="extxyz")
    raw = {
        "data": {"train": str(path), "split": {"validation": 6, "test": 6}},
        "model": {"hidden_channels": 16, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "training": {
            "batch_size": 5, "max_epochs": 3, "lr": 2e-3, "warmup_steps": 5, "precision": "float64", "device": "cuda",
        },
        "output": {"folder": str(tmp_path / "one"), "report": False},
    }  # fmt: skip
    run_training(parse_config(copy.deepcopy(raw)))
    raw["output"]["folder"] = str(tmp_path / "two")
    outputs = run_on(raw, tmp_path, 2)
    assert "2 processes" in outputs[0] and outputs[1] == ""
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for key in set(a) - {"seconds", "best"}:
            assert b[key] == pytest.approx(a[key], rel=1e-6), key
    one, two = (load(tmp_path / name / "best.tmn") for name in ("one", "two"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6
