"""Equivariant Transformer, Transformer and graph network on their kernels: as accurate as eager float32, under replay,
in any order of launches, after an overflow, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

KINDS = ("graph_network", "transformer", "equivariant_transformer")


def potential(kind: str, **options) -> Potential:
    torch.manual_seed(1)
    model = {"name": kind, "hidden_channels": 128, "num_layers": 3, "num_rbf": 32, "cutoff": 5.0, **options}
    head = "equivariant_scalar" if kind == "equivariant_transformer" else "scalar"
    return Potential.from_config({"model": model, "head": {"name": head}}).cuda().eval()


def water(side: int, seed: int = 0) -> System:
    random = torch.Generator().manual_seed(seed)
    places = 3.1 * torch.cartesian_prod(*[torch.arange(float(side))] * 3)
    molecule = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    pos = (molecule + places[:, None]).reshape(-1, 3) + 0.1 * torch.randn(3 * side**3, 3, generator=random)
    return System(z=torch.tensor([8, 1, 1]).repeat(side**3), pos=pos, cell=3.1 * side * torch.eye(3)).to("cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [2, 7])
def test_as_accurate_as_eager(kind, side):
    model, system = potential(kind), water(side)
    evaluator = Evaluator(model, graphs=True, stress=True)
    for moved in (system, system.replace(pos=system.pos * 1.01, cell=system.cell * 1.01)):
        found, eager = evaluator(moved), model(moved, stress=True)
        exact = copy.deepcopy(model).double()(moved.to(dtype=torch.float64), stress=True)
        for name in ("energy", "atom_energies", "forces", "stress"):
            ours, theirs, truth = (getattr(result, name) for result in (found, eager, exact))
            bound = 1e-6 * max(1.0, float(truth.abs().max())) + 2 * float((theirs - truth).abs().max())
            assert float((ours - truth).abs().max()) <= bound, name
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_and_room(kind, monkeypatch):
    from torchmdnet2.engine import step as steps

    monkeypatch.setattr(steps, "next_capacity", lambda edges: -(-edges // 16) * 16)
    model, system = potential(kind), water(3)
    bound = Evaluator(model, graphs=True).bind(system)
    first = bound.forces.clone()
    for _ in range(20):
        bound.replay()
        assert torch.equal(bound.forces, first)
    closer = system.replace(pos=system.pos * 0.9)  # in the same cell: more edges than there is room for
    bound.pos.copy_(closer.pos)
    bound.replay()
    assert not bound.check()
    bound.replay()
    assert bound.check()
    expected = model(closer).forces
    assert float((bound.forces - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
