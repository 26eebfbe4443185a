"""Run by test_messages.py in a process of its own, in Triton's interpreter: models on the kernels for messages."""

from __future__ import annotations

import copy

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.models.message_passing.gpu import GraphNetworkNetwork, LaunchShapes

CUTOFF = 2.5
POS = torch.tensor([[0.1, 0.2, 0.0], [1.3, 0.4, 0.3], [0.7, 1.5, 0.9], [2.9, 1.1, 1.4]])
CELL = torch.tensor([[2.4, 0.0, 0.0], [0.3, 3.1, 0.0], [0.1, 0.4, 3.3]])  # thinner than the cutoff: images of itself
SMALL = System(z=torch.tensor([6, 8]), pos=POS[1:3], cell=CELL)
BATCH = System.concatenate([System(z=torch.tensor([8, 1, 6, 1]), pos=POS, cell=5 * torch.eye(3)), SMALL])
WIDE = LaunchShapes(8, 4, 2, 4)  # that of large structures: all heads in one program
KINDS = {
    "graph network": {"name": "graph_network"},
    "bare graph network": {"name": "graph_network", "neighbor_embedding": False, "rbf_type": "gauss"},
    "transformer": {"name": "transformer", "num_heads": 2, "distance_influence": "keys"},
    "equivariant transformer": {"name": "equivariant_transformer", "num_heads": 4, "distance_influence": "values"},
    "its form without smooth vectors": {
        "name": "equivariant_transformer", "num_heads": 2, "vector_cutoff": False, "trainable_rbf": False,
    },
}  # fmt: skip


def potential(kind: str, scale: float = 1.0) -> Potential:
    torch.manual_seed(2)
    size = {"hidden_channels": 16, "num_layers": 2, "num_rbf": 8, "cutoff": CUTOFF, "max_z": 20}
    head = "equivariant_scalar" if "without" in kind else "scalar"
    config = {"model": {**size, **KINDS[kind]}, "head": {"name": head}, "energy_scale": scale}
    model = Potential.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("kind", "shapes"), [*((kind, None) for kind in KINDS), ("equivariant transformer", WIDE)])
def test_equals_the_potential(kind, shapes, monkeypatch):
    if shapes is not None:
        monkeypatch.setattr(GraphNetworkNetwork.__base__, "launch_shapes", lambda self, num_atoms: shapes)
    model = potential(kind, scale=2.5)
    evaluator = Evaluator(model)
    found = evaluator(BATCH, stress=True)
    expected = copy.deepcopy(model).double()(BATCH.to(dtype=torch.float64), stress=True)
    assert evaluator.fused and "kernels on cpu, float32" in evaluator.report()
    for name in ("energy", "atom_energies", "forces", "stress"):
        ours, exact = getattr(found, name), getattr(expected, name)
        assert float((ours - exact).abs().max()) <= 3e-6 * max(1.0, float(exact.abs().max())), name


def test_the_same_bits_again():
    evaluator = Evaluator(potential("transformer"))
    first, again = evaluator(SMALL), evaluator(SMALL)
    assert torch.equal(first.forces, again.forces) and torch.equal(first.energy, again.energy)


def test_a_lone_atom_has_no_energy():
    atom = System(z=torch.tensor([6]), pos=torch.zeros(1, 3))
    result = Evaluator(potential("graph network"))(atom)
    assert float(result.energy) == 0 and bool((result.forces == 0).all())


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("graph network", {"aggregation": "mean"}, "'add' only"),
        ("transformer", {"attn_activation": "tanh"}, "silu only"),
        ("transformer", {"cutoff_lower": 1.0}, "no lower cutoff"),
        ("transformer", {"hidden_channels": 24}, "power of two"),
        ("graph network", {"num_layers": 0}, "at least one layer"),
    ],
)
def test_what_the_kernels_do_not_cover(kind, change, reason, monkeypatch):
    monkeypatch.setitem(KINDS, kind, {**KINDS[kind], **change})
    evaluator = Evaluator(potential(kind))
    assert not evaluator.fused and reason in evaluator.report()
