"""Calls of a loaded potential: on the Evaluator where that gives the same, by autograd where it would not."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.potential.graph import charge_dipole
from torchmdnet2.potential.potential import Result

CONFIG = {
    "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0},
    "properties": [{"name": "charges"}, {"name": "dipole"}],
    "priors": [{"name": "coulomb", "charges": "predicted", "method": "all_pairs"}],
    "elements": [1, 6, 8],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = Potential.from_config(CONFIG)
    found = tmp_path_factory.mktemp("loading") / "model.tmn"
    save(made, found)
    return found


@pytest.fixture
def potential(path):
    return load(path)


@pytest.fixture
def system():
    random = torch.Generator().manual_seed(2)
    pos = 4 * torch.rand(9, 3, generator=random, dtype=torch.float64)
    return System(z=torch.tensor([6, 8, 1, 1, 6, 1, 1, 8, 1]), pos=pos)


@pytest.fixture
def fast(monkeypatch):
    """How often Evaluators are called."""
    calls, call = [], Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", lambda self, *a, **k: (calls.append(self), call(self, *a, **k))[1])
    return calls


def assert_same(found, expected, tolerance=2e-5):
    for name in ("energy", "forces", "atom_energies", "charges", "stress"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or float((ours - theirs).detach().abs().max()) < tolerance, name
    assert list(found.properties) == list(expected.properties)
    for name, theirs in expected.properties.items():
        assert float((found.properties[name] - theirs).detach().abs().max()) < tolerance, name


def test_calls_run_on_one_evaluator(potential, system, fast):
    results = [potential(system), potential(system, False), potential(system, forces=True, stress=False)]
    assert len(fast) == 3 and fast[0] is fast[1] is fast[2]
    assert isinstance(potential, Potential) and potential.elements == [1, 6, 8] and potential.cutoff == 4.0
    exact = copy.deepcopy(potential).double().reference(system)
    assert len(fast) == 3
    for result in (results[0], results[2]):
        assert_same(result, exact)
    assert results[1].forces is None


HOW = ["train", "create_graph", "neighbors", "hook", "functional_call", "requires_grad", "grad"]


@pytest.mark.parametrize("how", HOW)
def test_by_autograd_where_kernels_would_not_do(potential, system, fast, how):
    from torchmdnet2.neighbors import neighbor_list

    expected = potential.reference(system)
    potential(system)
    del fast[:]
    if how == "train":
        result = potential.train()(system)
        assert result.energy.requires_grad
        potential.eval()
    elif how == "create_graph":
        result = potential(system, create_graph=True)
        assert torch.autograd.grad(result.forces.square().sum(), potential.representation.parameters(),
                                   allow_unused=True)[0] is not None  # fmt: skip
    elif how == "neighbors":
        result = potential(system, neighbors=neighbor_list(system, 5.0))
    elif how == "hook":
        seen = []
        handle = potential.representation.register_forward_hook(lambda *a: seen.append(a))
        result = potential(system)
        handle.remove()
        assert seen
    elif how == "requires_grad":
        pos = system.pos.clone().requires_grad_()
        result = potential(system.replace(pos=pos))
        (gradient,) = torch.autograd.grad(result.charges[3], pos)
        assert float(gradient.abs().max()) > 0
        assert result.energy.requires_grad and result.properties["dipole"].requires_grad
    elif how == "grad":
        gradient = torch.func.grad(lambda pos: potential(system.replace(pos=pos)).energy.sum())(system.pos)
        assert_same(Result(expected.energy, -gradient), Result(expected.energy, expected.forces), 5e-6)
        result = expected
    else:
        weights = {name: value.detach().clone() for name, value in potential.named_parameters()}
        result = torch.func.functional_call(potential, weights, (system,))
    assert not fast
    assert_same(result, expected, 5e-6)
    assert_same(potential(system), expected)
    assert len(fast) == 1, "fast again"


def test_what_changes_is_noticed(potential, system):
    def check():
        assert_same(potential(system), copy.deepcopy(potential).double().reference(system))

    check()
    before = potential(system).energy
    with torch.no_grad():
        potential.head.output_network.layers[2].weight.mul_(2)
    check()
    assert not torch.allclose(potential(system).energy, before)
    potential.energy_scale = 0.5
    check()
    potential.load_state_dict({name: 0.9 * value for name, value in potential.state_dict().items()})
    check()
    potential.representation.linear.weight = torch.nn.Parameter(1.1 * potential.representation.linear.weight.detach())
    check()
    potential.properties.pop("dipole")
    check()
    result = potential(system)  # the dipole of the charges now
    assert torch.equal(result.properties["dipole"], charge_dipole(result.charges, system))
    potential.priors.append(copy.deepcopy(potential.priors[0]))
    check()
    potential.priors = torch.nn.ModuleList()
    check()
    potential.total_charges = [0.0]
    with pytest.raises(ValueError, match="charge"):
        potential(system.replace(charge=torch.ones(1, dtype=torch.float64)))
    potential.double()
    assert potential(system).energy == potential.reference(system).energy
    potential.float()
    check()


def test_errors_are_those_of_the_potential(potential, system):
    bad = system.replace(pos=system.pos.clone())
    bad.pos[3, 1] = float("nan")
    for call in (potential, potential.reference):
        with pytest.raises(ValueError, match="atom 3"):
            call(bad)
        with pytest.raises(TypeError, match="System, got str"):
            call("water")


def test_copies_pickles_and_shared_weights(potential, system, fast):
    first = potential(system)
    for other in (copy.deepcopy(potential), pickle.loads(pickle.dumps(potential))):
        assert other.fast_calls is not potential.fast_calls
        with torch.no_grad():
            other.head.output_network.layers[2].weight.mul_(2)
        assert not torch.allclose(other(system).energy, first.energy)
        assert torch.equal(potential(system).energy, first.energy)
    assert len(set(map(id, fast))) == 3


def test_threads(potential, system):
    expected, found = potential(system), {}

    def run(k):
        moved = system.replace(pos=system.pos * (1 + 0.01 * k))
        found[k] = [(potential(moved), potential.reference(moved)) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and torch.equal(found[0][0][0].energy, expected.energy)
    for results in found.values():
        for ours, theirs in results:
            assert_same(ours, theirs)


def test_memory_goes_with_the_last_reference(path, system):
    """Without the search for circles: weights and buffers may fill a GPU."""
    potential = load(path)
    potential(system)
    weights = weakref.ref(potential.representation.linear.weight)
    gc.collect()
    gc.disable()
    try:
        del potential
        assert weights() is None
    finally:
        gc.enable()


def test_inference_mode(potential, system):
    with torch.inference_mode():
        inside = potential(System(z=system.z.clone(), pos=system.pos.clone()))
    assert torch.equal(inside.energy, potential(system).energy) and not inside.energy.is_inference()


def test_a_potential_that_kernels_do_not_cover(tmp_path, system, fast):
    config = {**CONFIG, "model": {"name": "graph_network", "hidden_channels": 8, "num_layers": 1, "num_rbf": 4}}
    save(Potential.from_config(config), tmp_path / "other.tmn")
    other = load(tmp_path / "other.tmn")
    assert_same(other(system), other.reference(system), 1e-6)
    assert len(fast) == 1


def test_arguments_of_the_evaluator_are_named(path):
    with pytest.raises(TypeError, match=r"it is one of Evaluator\(load\(…\), precision='mixed'\)"):
        load(path, precision="mixed")
    with pytest.raises(TypeError, match=r"load has no argument 'colour'$"):
        load(path, colour="red")
