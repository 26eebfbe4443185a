"""Bound steps on the CPU give, bit for bit, what calls give, and notice positions that are not finite."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.runtime.reference import ReferenceBoundStep

NUMBA = pytest.param(
    torch.float32, marks=pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
)


def make(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = {
            "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0},
            "priors": [{"name": "atomref", "energies": {"1": -13.6, "8": -2041.3}}],
            "elements": [1, 8],
            "energy_shift": 0.25,
        }
        return Potential.from_config(config).to(dtype).eval()


def structure(sizes, cell=None, charge=0.0):
    random = torch.Generator().manual_seed(0)
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pos = 5 * torch.rand(sum(sizes), 3, generator=random, dtype=torch.float64)
    pos[0] += 40.0  # an atom without neighbors
    z = torch.tensor([1, 8])[torch.randint(0, 2, (sum(sizes),), generator=random)]
    given = None if cell is None else cell * torch.eye(3).expand(len(sizes), 3, 3)
    return System(z=z, pos=pos, batch=batch, cell=given, charge=torch.full((len(sizes),), charge))


@pytest.mark.parametrize("dtype", [NUMBA, torch.float64])
@pytest.mark.parametrize(
    "system",
    [structure([9]), structure([7, 7, 7]), structure([4, 6]), structure([5], charge=1.0), structure([8], cell=6.0)],
    ids=["one", "replicas", "batch", "charged", "periodic"],
)
def test_as_a_call(system, dtype):
    evaluator = Evaluator(make(dtype))
    bound = evaluator.bind(system)
    assert (type(bound) is ReferenceBoundStep) == (dtype == torch.float64)
    for k in range(2):
        expected = evaluator(system.replace(pos=bound.pos.clone()))
        assert torch.equal(bound.energy, expected.energy)
        assert torch.equal(bound.forces, expected.forces)
        assert torch.equal(bound.atom_energies, expected.atom_energies)
        bound.pos.add_(0.1 * (k + 1) * torch.sin(torch.arange(bound.pos.numel()).double()).view(-1, 3))
        bound.replay()
    assert bound.check()


@pytest.mark.parametrize("dtype", [NUMBA, torch.float64])
def test_positions_that_are_not_finite(dtype):
    system = structure([6])
    bound = Evaluator(make(dtype)).bind(system)
    bound.pos[4, 1] = float("nan")
    bound.replay()
    assert bound.energy.isnan().all() and bound.forces.isnan().all()
    with pytest.raises(ValueError, match="atom 4"):
        bound.check()
    bound.pos.copy_(system.pos)
    bound.replay()
    assert bound.check() and bool(bound.forces.isfinite().all())
