"""Run by test_fast_paths.py in a process of its own: the GPU variant of the toy model in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernels.toy import Springs, ToyGpu, potential

from torchmdnet2 import Evaluator, System
from torchmdnet2.engine import step as steps


def atoms(n, edge, seed=0):
    random = torch.Generator().manual_seed(seed)
    z = torch.randint(1, 9, (n,), generator=random)
    return System(z=z, pos=edge * torch.rand(n, 3, generator=random).double(), cell=edge * torch.eye(3).double())


@pytest.mark.parametrize("priors", [(), (Springs(),)])
def test_the_evaluator_takes_the_toy_path(priors):
    model, runs = potential(priors), ToyGpu.runs
    evaluator = Evaluator(model)
    batch = System.concatenate([atoms(4, 4.5), atoms(3, 6.0, 1).replace(charge=torch.ones(1).double())])
    for system in (batch, batch.replace(pos=batch.pos * 1.02)):
        found, expected = evaluator(system, stress=True), model(system, stress=True)
        for name in ("energy", "atom_energies", "forces", "stress"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name)
    assert evaluator.fused and "fused Toy kernels" in evaluator.report() and ToyGpu.runs > runs


def test_room_grows_for_every_list(monkeypatch):
    monkeypatch.setattr(steps, "next_capacity", lambda edges: max(16, -(-edges // 16) * 16))
    model = potential([Springs()])
    evaluator, system = Evaluator(model), atoms(6, 30.0)
    evaluator(system)
    close = system.replace(pos=system.pos / 10)
    torch.testing.assert_close(evaluator(close).forces, model(close).forces, rtol=1e-5, atol=1e-5)
    ((graphed, _),) = evaluator._active.steps.values()
    assert len(graphed.step.searches) == 2 and all(search.capacity >= 30 for search in graphed.step.searches.values())
