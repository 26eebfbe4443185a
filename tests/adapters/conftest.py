"""Tiny random potentials that the adapter tests share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import save

CONFIG = {
    "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0},
    "elements": [1, 6, 8],
}


@pytest.fixture(scope="session")
def potential():
    """A random TensorNet for H, C, O in float64, evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = Potential.from_config(CONFIG)
    made.energy_scale = 5.0  # forces of a few eV/Å
    made.config["energy_scale"] = 5.0
    return made.double().eval()


@pytest.fixture(scope="session")
def model_file(potential, tmp_path_factory):
    """The same potential as a model file."""
    path = tmp_path_factory.mktemp("model") / "tiny.tmn"
    save(potential, path)
    return path


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory):
    """A folder that, on the import path, announces the plug-in as the installed package would."""
    folder = tmp_path_factory.mktemp("plugin")
    info = folder / "plugin_test-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-test\nVersion: 0.0\n")
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = re.search(r'\[project\.entry-points\."(openmmml\.potentials)"\]\n(\w+) = "([\w.:]+)"', text)
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2]} = {entry[3]}\n")
    return folder
