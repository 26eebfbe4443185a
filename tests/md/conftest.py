"""A tiny random potential, weak enough for atoms to stay apart."""

from __future__ import annotations

import pytest
import torch
from ase.build import molecule

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import save
from torchmdnet2.engine.bound import ReferenceBoundStep
from torchmdnet2.md.integrators import HostEngine


@pytest.fixture(scope="session")
def potential():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = {
            "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0},
            "elements": [1, 8],
            "energy_scale": 0.2,
        }
        return Potential.from_config(config).double().eval()


@pytest.fixture(scope="session")
def model_file(potential, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.tmn"
    save(potential, path)
    return path


@pytest.fixture
def water():
    return molecule("H2O")


@pytest.fixture(params=["pytorch", "compiled"])
def host(request, monkeypatch):
    """The engine that runs on the CPU, with either integrator."""
    if request.param == "pytorch":
        return HostEngine
    pytest.importorskip("numba")
    from torchmdnet2.md.compiled import CompiledEngine

    monkeypatch.setattr(ReferenceBoundStep, "compiled", True)
    return CompiledEngine
