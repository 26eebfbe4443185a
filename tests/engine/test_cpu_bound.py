"""Bound steps on the CPU give, bit for bit, what calls give, and notice positions that are not finite."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.bound import ReferenceBoundStep

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
@pytest.mark.parametrize("stress", [False, True])
@pytest.mark.parametrize("kind", ["heads", "charges", "tensornet2"])
def test_charges_and_properties(kind, stress, dtype):
    """All of a Result, of the present positions; NaN where they cannot be computed."""
    heads = {"heads": [{"name": "scalar_property", "property": "shift", "per": "atom"}, {"name": "charges"}],
             "charges": [{"name": "charges"}], "tensornet2": []}[kind]  # fmt: skip
    config = make(dtype).config
    model = {**config["model"], **({"name": "tensornet2", "q_dim": 4} if kind == "tensornet2" else {})}
    coulomb = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 4.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        potential = Potential.from_config({**config, "model": model, "properties": heads, "priors": [coulomb]})
    evaluator, system = Evaluator(potential.to(dtype).eval()), structure([7, 7], cell=8.0)
    bound = evaluator.bind(system, stress=stress)
    for scale in (1.0, 0.95):
        bound.pos.copy_(scale * system.pos)
        bound.replay()
        expected, found = evaluator(system.replace(pos=scale * system.pos), stress=stress), bound.fetch()
        assert float(expected.charges.std()) > 0 and list(found.properties) == list(expected.properties)
        for name in ("energy", "forces", "atom_energies", "charges", "stress"):
            value = getattr(expected, name)
            assert (value is None) == (getattr(found, name) is None) == (name == "stress" and not stress)
            assert value is None or torch.allclose(getattr(found, name), value, rtol=0, atol=1e-12), name
        for name, value in expected.properties.items():
            assert torch.equal(found.properties[name], value) and torch.equal(bound.properties()[name], value), name
    bound.pos[3] = float("nan")
    bound.replay()
    assert bound.charges.isnan().all() and all(value.isnan().all() for value in bound.properties().values())
    with pytest.raises(ValueError, match="atom 3"):
        bound.fetch()


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


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_pairs_are_those_of_the_neighbor_list():
    import numpy as np

    from torchmdnet2.neighbors import neighbor_list
    from torchmdnet2.neighbors.compiled import all_pairs

    system = structure([7, 7, 7])
    system.pos[3] = system.pos[5]  # at the same place
    expected = neighbor_list(system, 4.0)
    row_ptr, sender, vec = np.zeros(22, np.int64), np.empty(200, np.int64), np.empty((200, 3), np.float32)
    found = all_pairs(system.pos.numpy().reshape(3, 7, 3), 4.0, row_ptr, sender, vec)
    assert found == expected.num_edges > 20 and np.array_equal(row_ptr, expected.row_ptr.numpy())
    assert np.array_equal(sender[:found], expected.edge_index[1].numpy())
    assert np.array_equal(vec[:found], expected.vectors(system).float().numpy())
    assert all_pairs(system.pos.numpy().reshape(3, 7, 3), 4.0, row_ptr, sender[:5], vec[:5]) == found
    system.pos[6, 2] = float("inf")
    assert all_pairs(system.pos.numpy().reshape(3, 7, 3), 4.0, row_ptr, sender, vec) == -1


@pytest.mark.parametrize("dtype", [NUMBA, torch.float64])
def test_what_changes_between_calls_is_noticed(dtype):
    """Calls keep what they know of a composition; each of its parts may change, also in place."""
    evaluator = Evaluator(make(dtype))
    system = structure([7, 7])
    changes = [
        {"z": system.z.flip(0)},
        {"charge": torch.tensor([0.0, 1.0], dtype=torch.float64)},
        {"batch": torch.zeros(14, dtype=torch.long), "cell": system.cell[:1], "pbc": system.pbc[:1],
         "charge": system.charge[:1], "spin": system.spin[:1]},
        {"cell": 6 * torch.eye(3).double().expand(2, 3, 3), "pbc": torch.ones(2, 3, dtype=torch.bool)},
        {"pos": system.pos.float(), "cell": system.cell.float(), "charge": system.charge.float()},
    ]  # fmt: skip
    for change in changes:
        other = system.replace(**change)
        evaluator(system)
        again, alone = evaluator(other), Evaluator(make(dtype))(other)
        assert torch.equal(again.energy, alone.energy) and torch.equal(again.forces, alone.forces)
        assert again.forces.dtype == other.dtype
    before = evaluator(system).energy
    system.z[1] = 9 - system.z[1]
    assert not torch.equal(evaluator(system).energy, before)
    for name, words in (("spin", "spin multiplicity 3"), ("charge", "charge is not finite"), ("pos", "atom 0")):
        bad = system.replace(**{name: torch.full_like(getattr(system, name), 3 if name == "spin" else float("nan"))})
        with pytest.raises(ValueError, match=words):
            evaluator(bad)
        evaluator(system)


_FORKED = """
import os, sys, numba
sys.path.insert(0, {tests!r})
from engine.test_cpu_bound import make, structure
import torch
from torchmdnet2 import Evaluator
evaluator, system = Evaluator(make(torch.float32)), structure([6])
bound, before = evaluator.bind(system), evaluator(system)
if os.fork() == 0:
    again = evaluator(system)
    bound.replay()
    for result in (again, bound):
        assert torch.allclose(result.energy, before.energy, rtol=0, atol=1e-5)
        assert torch.allclose(result.forces, before.forces, rtol=0, atol=1e-5)
    assert ("forked" in evaluator.report()) == (numba.threading_layer() == "omp"), evaluator.report()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_a_process_that_is_forked_off_goes_on_without_the_kernels():
    """OpenMP would end it, and a pool of processes would wait for it for ever."""
    script = _FORKED.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
