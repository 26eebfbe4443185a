"""Ensembles: mean, spread, order."""

from __future__ import annotations

import pytest
import torch
from variants import ELEMENTS, variant

from torchmdnet2 import System
from torchmdnet2.checkpoint import load, save
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadCheckpoint
from torchmdnet2.testing import example_systems

SYSTEMS = example_systems(ELEMENTS, 4.5)
BATCH = System.concatenate([SYSTEMS["cubic cell"], SYSTEMS["triclinic cell"]])


def test_mean_and_spread():
    """Against numbers put together by hand, for three different models."""
    members = [variant("graph_network", seed=k) for k in (0, 1)] + [variant("tensornet2")]
    result = Ensemble(members)(BATCH, stress=True)
    singles = [p(BATCH, stress=True) for p in members]
    for name in ("energy", "forces", "stress"):
        values = torch.stack([getattr(s, name) for s in singles])
        mean = values.sum(0) / 3
        spread = (((values - mean) ** 2).sum(0) / 2).sqrt()
        assert torch.allclose(getattr(result, name), mean, rtol=1e-12)
        assert torch.allclose(getattr(result, f"{name}_std"), spread, rtol=1e-10)
        assert float(spread.max()) > 0
    assert result.charges is None  # not all members have charges


def test_bound_step():
    members = [variant("graph_network", seed=k) for k in (0, 1)] + [variant("tensornet2")]
    ensemble = Ensemble(members)
    bound = ensemble.bind(BATCH, stress=True)
    bound.pos.mul_(1.01)
    bound.cell.mul_(1.02)
    bound.replay()
    found = bound.fetch()
    expected = ensemble(BATCH.replace(pos=BATCH.pos * 1.01, cell=BATCH.cell * 1.02), stress=True)
    for name in ("energy", "energy_std", "forces", "forces_std", "stress", "stress_std", "atom_energies_std"):
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12), name
    bound.pos[3] = float("nan")
    bound.replay()
    with pytest.raises(ValueError, match="atom 3"):
        bound.fetch()
    bound.pos.copy_(BATCH.pos * 1.01)
    bound.replay()
    assert torch.equal(bound.fetch().energy, found.energy), "no member remembers an error of other positions"


def test_results_in_inference_mode_are_ordinary_tensors():
    ensemble = Ensemble([variant("graph_network", seed=k) for k in (0, 1)])
    with torch.inference_mode():
        result = ensemble(BATCH)
    assert not result.energy.is_inference() and not result.forces_std.is_inference()
    assert torch.equal(result.energy, ensemble(BATCH).energy)


def test_charges_and_properties_are_means():
    properties = [{"name": "scalar_property", "property": "gap"}]
    members = [variant("tensornet2", seed=k, properties=properties) for k in (0, 1)]
    result = Ensemble(members)(SYSTEMS["ion"], forces=False)
    assert result.forces is None and result.forces_std is None
    singles = [p(SYSTEMS["ion"]) for p in members]
    assert torch.allclose(result.charges, (singles[0].charges + singles[1].charges) / 2)
    assert torch.allclose(result.properties["gap"], (singles[0].properties["gap"] + singles[1].properties["gap"]) / 2)


def test_w20_order_and_a_single_member(tmp_path):
    """W20: members are in the order given; one member is refused, since its spread would be NaN."""
    members = [variant("graph_network", seed=k) for k in range(3)]
    paths = [tmp_path / name for name in ("z.tmn", "a.tmn", "m.tmn")]
    for potential, path in zip(members, paths, strict=True):
        save(potential, path)
    loaded = Ensemble.load(paths, allow_untrained_charge=True)
    for ours, theirs in zip(loaded.members, members, strict=True):
        assert torch.equal(ours(BATCH).energy, theirs(BATCH).energy)
    assert torch.equal(loaded(BATCH).energy, Ensemble(members)(BATCH).energy)
    with pytest.raises(ValueError, match="at least two"):
        Ensemble(members[:1])
    with pytest.raises(ValueError, match="at least two"):
        Ensemble.load([])
    assert bool(torch.isfinite(Ensemble([members[0], members[0]])(BATCH).energy_std).all())
    with pytest.raises(ValueError, match="the potentials of an ensemble must be on one device"):
        Ensemble([members[0], members[1].to("meta")])


def test_a_list_of_models_is_no_model(tmp_path):
    path = tmp_path / "ensemble.json"
    path.write_text('{"format": "torchmdnet2 ensemble 1", "members": []}')
    with pytest.raises(BadCheckpoint, match=r"Ensemble\.load"):
        load(path)


def test_elements_are_those_that_all_know():
    few, many = variant("graph_network", elements=[1, 6]), variant("graph_network", elements=[6, 8])
    assert Ensemble([few, many]).elements == [6]
    with pytest.raises(ValueError, match="no element"):
        Ensemble([few, variant("graph_network", elements=[8])])


def test_priors_are_added():
    """`a + b + c` is the list of priors of a potential, and its energy the sum of theirs."""
    from torchmdnet2.priors import D2, ZBL, Atomref, PriorSum
    from torchmdnet2.testing import without_network

    terms = [ZBL(3.0), D2(6.0), Atomref({"H": -13.6})]
    total = terms[0] + terms[1] + terms[2]
    assert isinstance(total, PriorSum) and list(total) == terms
    assert list(terms[0] + (terms[1] + terms[2])) == terms
    singles = [without_network([term], ELEMENTS)(BATCH) for term in terms]
    result = without_network(total, ELEMENTS)(BATCH)
    assert torch.allclose(result.energy, sum(s.energy for s in singles), rtol=1e-14)
    assert torch.allclose(result.forces, sum(s.forces for s in singles), atol=1e-12)


def test_delta_learning_by_priors():
    """The energy is the network's plus that of the priors, which can be had alone to reduce labels beforehand."""
    priors = [
        {"name": "zbl", "cutoff": 3.0},
        {"name": "d2", "cutoff": 6.0},
        {"name": "atomref", "energies": {1: -13.6}},
    ]
    whole, bare = variant("graph_network", priors=priors), variant("graph_network")
    baseline = whole.prior_energies(BATCH)
    total, network = whole(BATCH), bare(BATCH)
    assert torch.allclose(total.atom_energies - baseline, network.atom_energies, rtol=1e-10, atol=1e-12)
    pos = BATCH.pos.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(whole.prior_energies(BATCH.replace(pos=pos)).sum(), pos)
    assert torch.allclose(total.forces - network.forces, -gradient, atol=1e-10)
    assert float(gradient.abs().max()) > 0.1
