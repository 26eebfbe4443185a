"""Whole steps with the kernels of priors, in Triton's interpreter. Run by test_prior_steps.py in a process of its own.

The network is the toy of toy.py, whose "kernels" are plain PyTorch: searches, terms and sums are those of the package.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from kernels.pair_prior_cases import CHARGES, ELEMENTS, PBE0, closed_shell, system
from kernels.toy import potential

from torchmdnet2 import Evaluator, System
from torchmdnet2.engine import check
from torchmdnet2.engine import step as steps
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.engine.step import GraphedStep, StaticInputs
from torchmdnet2.errors import UntrainedCharge
from torchmdnet2.potential.prior import Prior
from torchmdnet2.priors import D2, D3, ZBL, Atomref, Coulomb
from torchmdnet2.priors.pair_kernels import gpu

assert os.environ["TRITON_INTERPRET"] == "1"
FIELD = Coulomb(CHARGES, "reaction_field", cutoff=5.5)
COMBINATIONS = {
    "zbl and references": [ZBL(cutoff=3.5), Atomref({"H": -13.6, "O": -2041.3})],
    "two lists": [ZBL(envelope="covalent"), D2(cutoff=6.0), FIELD],
    "three lists": [D3(ELEMENTS, **PBE0, cutoff=7.0), Coulomb(CHARGES, "reaction_field", cutoff=4.5)],
}


def assert_same(found, model, atoms, stress=False):
    """As the Potential in float64: 1e-6 of the energy, 5e-6 of the largest force."""
    expected = copy.deepcopy(model).double()(atoms.to(dtype=torch.float64), stress=stress)
    largest = float(expected.forces.abs().max())
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.atom_energies, expected.atom_energies, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.forces.double(), expected.forces, rtol=0, atol=5e-6 * max(1.0, largest))
    if stress:
        torch.testing.assert_close(found.stress.double(), expected.stress, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_batches_of_cells(name):
    """A cell, one so thin that atoms see their own images, one with atoms far apart, charged; then other cells."""
    model = potential(COMBINATIONS[name])
    atoms = System.concatenate([system(4, 1, 5.0), system(1, 2, 2.6), system(2, 3, 30.0)])
    atoms.charge[2] = 1.0
    evaluator = Evaluator(model)
    found = evaluator(atoms, stress=True)
    assert evaluator.fused and len(next(iter(evaluator._active.steps.values()))[0].step.searches) == {
        "zbl and references": 1, "two lists": 2, "three lists": 3
    }[name]  # fmt: skip
    assert_same(found, model, atoms, stress=True)
    other = atoms.replace(z=atoms.z.flip(0), cell=atoms.cell * 1.1, pos=atoms.pos * 1.1)
    assert_same(evaluator(other, stress=True), model, other, stress=True)
    again = evaluator(atoms, stress=True)
    for what in ("energy", "forces", "stress", "atom_energies"):
        assert torch.equal(getattr(again, what), getattr(found, what)), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_molecules_with_all_pairs(dtype):
    model = potential([Coulomb(CHARGES), D2(cutoff=6.0), Coulomb([0.1, -0.3, 0.4], "reaction_field", cutoff=6.0)])
    atoms = System.concatenate([system(3, 1, 3.0, False, dtype), system(3, 2, 12.0, False, dtype)])
    assert_same(Evaluator(model)(atoms), model, atoms)
    periodic = system(3, 5, 5.0)
    assert_same(Evaluator(model)(periodic), model, periodic)


def test_atoms_in_spatial_order():
    """Fixed charges belong to atoms, not to the places that they are moved to."""
    model = potential([Coulomb([0.3, -0.2, 0.7, -0.5, -0.3], "reaction_field", cutoff=5.0), ZBL(cutoff=3.0)])
    atoms = System.concatenate([system(5, 1, 7.0), system(5, 2, 6.0)])
    fused = FusedModel(model, "native")
    step = fused.step(10, 2, torch.float64, True, sort=True, parts=2)
    inputs, graphed = StaticInputs(fused, step), GraphedStep(step)
    inputs.load(atoms)
    graphed.make_room()
    graphed.run()
    assert not torch.equal(step.order.order, torch.arange(10))
    assert_same(step.results(), model, atoms, stress=True)


def test_charges_of_atoms_are_checked_on_a_part_of_a_large_structure(monkeypatch):
    monkeypatch.setattr(check, "CHECKED_ATOMS", 6)
    model = potential([Coulomb(torch.linspace(-0.5, 0.5, 9).tolist(), "reaction_field", cutoff=6.0)])
    atoms = system(9, 3, 7.0)
    assert_same(Evaluator(model)(atoms), model, atoms)


def test_a_part_of_a_closed_shell_may_have_an_odd_number_of_electrons(monkeypatch):
    monkeypatch.setattr(check, "CHECKED_ATOMS", 6)
    model, atoms = potential([ZBL(cutoff=3.0)]), closed_shell(9, 3, 7.0)
    model.closed_shell = True
    part, cluster = check.extract_checked(model, atoms, False)
    assert (cluster.z.sum() - cluster.charge) % 2 == 1 and model.closed_shell and not part.closed_shell
    assert_same(Evaluator(model)(atoms), model, atoms)
    with pytest.raises(UntrainedCharge, match="odd number of electrons"):
        Evaluator(model)(atoms.replace(charge=atoms.charge + 1))


def test_each_list_grows(monkeypatch):
    """Overflows of the list that only a prior has, and of both: nothing but NaN is given, then the right numbers."""
    monkeypatch.setattr(steps, "next_capacity", lambda edges: max(16, -(-edges // 16) * 16))
    model = potential([D2(cutoff=6.0)])
    far = system(6, 1, 60.0, False)
    bound = Evaluator(model).bind(far)
    for edge, rooms in ((9.0, [16, 32]), (3.0, [32, 32])):  # 12 and 24 edges, then 30 and 30
        close = far.replace(pos=system(6, 1, edge, False).pos)
        bound.pos.copy_(close.pos)
        bound.replay()
        assert bound.forces.isnan().all() and bound.energy.isnan().all()
        while not bound.check():
            bound.replay()
        assert [search.capacity for search in bound._graphed.step.searches.values()] == rooms
        assert_same(bound, model, close)


def test_a_prior_that_disagrees_is_refused(monkeypatch):
    describe = gpu.describe

    def wrong(prior, elements):
        parameters = describe(prior, elements)
        object.__setattr__(parameters, "strength", parameters.strength * 1.01)
        return parameters

    monkeypatch.setattr(gpu, "describe", wrong)
    with pytest.raises(RuntimeError, match="does not agree with the reference"):
        Evaluator(potential([ZBL(cutoff=3.5)]))(system(4, 1, 4.0))


def test_charges_that_the_network_does_not_predict():
    report = Evaluator(potential([Coulomb("predicted", "reaction_field", cutoff=5.0)])).report()
    assert "Coulomb needs" in report


class Morse(Prior):
    """A user's prior, whose energy does not vanish beyond its cutoff."""

    cutoff = 3.0

    def forward(self, system, neighbors):
        d = neighbors.distances(system).double()
        pair = 0.2 * (1 - torch.exp(-1.5 * (d - 1.2))) ** 2 * (1 - (d / self.cutoff) ** 2)
        return pair.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], pair / 2)


class Well(Prior):
    """A prior of positions and cells, without a list."""

    def forward(self, system, neighbors):
        shape = system.cell.double().diagonal(dim1=1, dim2=2).sum(1)[system.batch]
        return 0.01 * system.pos.double().square().sum(1) + 1e-3 * shape


class Host(Morse):
    """Looks at a value on the host, which no graph can hold."""

    def forward(self, system, neighbors):
        return super().forward(system, neighbors) * float(system.z.max())


def test_priors_without_kernels_run_by_autograd_of_themselves_alone():
    model = potential([Morse(), ZBL(cutoff=3.5), Well(), D2(cutoff=6.0)])
    atoms = System.concatenate([system(4, 1, 5.0), system(1, 2, 2.6), system(2, 3, 30.0)])
    evaluator = Evaluator(model)
    for one in (atoms, atoms.replace(z=atoms.z.flip(0), cell=atoms.cell * 1.1, pos=atoms.pos * 1.1), atoms):
        assert_same(evaluator(one, stress=True), model, one, stress=True)
    assert evaluator.fused
    ((graphed, _),) = evaluator._active.steps.values()
    assert list(graphed.step.searches) == [4.0, 6.0, 3.0]


def test_a_prior_that_no_graph_can_hold_takes_another_path():
    model, atoms = potential([Host()]), system(4, 1, 4.0)
    evaluator = Evaluator(model)
    torch.testing.assert_close(evaluator(atoms).forces, model(atoms).forces)
    assert not evaluator.fused and "Host" in evaluator.report()
