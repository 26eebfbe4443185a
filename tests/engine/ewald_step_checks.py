"""Ewald and particle-mesh sums in steps that a CUDA graph can hold, in Triton's interpreter.

Run by test_ewald_steps.py. Networks are the toy of kernels/toy.py, TensorNet, and TensorNet2 by autograd: the sums are
those of the package. Each step runs once under ForbidHostSync, which finds what a graph could not hold.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from kernels.pair_prior_cases import CHARGES, system
from kernels.toy import potential

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.potential.prior import Prior
from torchmdnet2.priors import D2, Coulomb

assert os.environ["TRITON_INTERPRET"] == "1"


def coulomb(method, charges=CHARGES, **given):
    return Coulomb(charges, method, cutoff=4.5, accuracy=1e-6, **given)


def assert_same(found, model, atoms, stress=True, error=2e-6):
    """As the Potential in float64: 2e-6 of the largest and twice the error of eager float32.

    A mesh with room is another one, as accurate as the prior's own.
    """
    expected = copy.deepcopy(model).double()(atoms.to(dtype=torch.float64), stress=stress)
    eager = model(atoms.to(dtype=torch.float32), stress=stress)
    for name in ("energy", "atom_energies", "forces", *(["stress"] if stress else [])):
        ours, theirs, truth = (getattr(result, name).double() for result in (found, eager, expected))
        bound = 2 * float((theirs - truth).abs().max()) + error * max(1.0, float(truth.abs().max()))
        torch.testing.assert_close(ours, truth, rtol=0, atol=bound, msg=lambda m, name=name: f"{name}: {m}")
    if expected.charges is not None:
        torch.testing.assert_close(found.charges, expected.charges, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_beside_kernels(method):
    """A batch of cells and a molecule; other cells in the same buffers; cells without room make other plans."""
    model = potential([coulomb(method), D2(cutoff=6.0)])
    atoms = System.concatenate([system(3, 1, 5.0), system(2, 2, 6.0), system(2, 3, 4.0, False)])
    evaluator = Evaluator(model)
    assert_same(evaluator(atoms), model, atoms, stress=False)
    line = "on kernels: Coulomb, D2" if method == "pme" else "by autograd: Coulomb"
    assert evaluator.fused and line in evaluator.report()
    ((graphed, _),) = evaluator._active.steps.values()
    for scale, grown in ((1.02, False), (1.2, True), (1.23, False)):
        version = graphed.step.version
        other = atoms.replace(pos=scale * atoms.pos, cell=scale * atoms.cell)
        assert_same(evaluator(other), model, other, stress=False, error=2e-6 if method == "ewald" else 2e-5)
        assert (graphed.step.version > version) == grown, scale
    assert len(evaluator._active.steps) == 1
    # another composition: as many atoms in other structures
    other = System.concatenate([system(2, 1, 5.0), system(3, 2, 6.0, False), system(2, 3, 4.0)])
    assert_same(evaluator(other), model, other, stress=False, error=2e-5)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_a_cell_without_room_is_flagged(method):
    """A bound step: nothing but NaN until `check`, then the right numbers; stress of a sheared cell."""
    model = potential([coulomb(method)])
    atoms = system(4, 1, 5.0)
    bound = Evaluator(model).bind(atoms, stress=True)
    assert_same(bound, model, atoms)
    shear = torch.tensor([[1.0, 0.2, 0], [0, 1.1, 0], [0, 0, 1.0]], dtype=torch.float64)
    strained = atoms.replace(pos=atoms.pos @ shear, cell=atoms.cell @ shear)
    bound.pos.copy_(strained.pos)
    bound.cell.copy_(strained.cell)
    bound.replay()
    assert bound.forces.isnan().all() and bound.energy.isnan().all()
    # an integrator would have moved on with these
    bound.cell.fill_(float("nan"))
    bound.replay()
    assert not bound.check()
    bound.pos.copy_(strained.pos)
    bound.cell.copy_(strained.cell)
    bound.replay()
    assert bound.check()
    assert_same(bound, model, strained, error=2e-6 if method == "ewald" else 2e-5)


@pytest.mark.parametrize("method", ["ewald", "pme", "reaction_field"])
def test_charges_that_the_network_predicts(method):
    """Two terms give dE/dq, by autograd of one alone and by kernels of the other, or both by kernels."""
    from kernels.tensornet_heads_checks import CHARGES as HEAD
    from kernels.tensornet_heads_checks import assert_same as same
    from kernels.tensornet_heads_checks import make

    listed = [
        {"name": "coulomb", "charges": "predicted", "method": m, "cutoff": 4.5}
        for m in (*(["pme"] if method == "pme" else ["ewald"]), "reaction_field")
    ]
    model = make([HEAD], listed[1:] if method == "reaction_field" else listed)
    if method == "reaction_field":
        model.priors.append(Hardness())
    atoms = system(3, 1, 5.0).replace(charge=torch.tensor([1.0]).double())
    evaluator = Evaluator(model)
    same(evaluator(atoms, stress=True), model, atoms, True)
    assert evaluator.fused


class Hardness(Prior):
    """A user's prior that reads charges: ½ q² of each atom, and none of the positions."""

    uses_charges = True

    def forward(self, system, neighbors, charges=None):
        return 0.5 * charges.double() ** 2 + 0 * system.pos.double().sum(1)


def test_captured_autograd():
    """A model without kernels, and a head that sums by Ewald."""
    torch.manual_seed(0)
    second = {"name": "tensornet2", "hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "q_dim": 2, "cutoff": 4.0}
    head = {"name": "scalar_coulomb", "q_weights": [1.0] * 4, "method": "pme", "coulomb_cutoff": 4.6, "accuracy": 1e-6}
    given = {"model": {**second, "max_z": 10}, "head": head, "elements": [1, 6, 7, 8]}
    fixed = {"name": "coulomb", "charges": CHARGES, "method": "ewald", "cutoff": 4.0}
    model = Potential.from_config({**given, "priors": [fixed]}).eval()
    atoms, evaluator = system(4, 1, 5.0), Evaluator(model, graphs=True)
    assert_same(evaluator(atoms, stress=True), model, atoms, error=5e-6)
    report = evaluator.report()
    assert "autograd in CUDA graphs" in report and "fell back" not in report
    larger = atoms.replace(pos=1.2 * atoms.pos, cell=1.2 * atoms.cell)
    assert_same(evaluator(larger, stress=True), model, larger, error=2e-5)


def test_slabs_are_refused():
    model = potential([coulomb("ewald")])
    slab = system(4, 1, 5.0).replace(pbc=torch.tensor([[True, True, False]]))
    for evaluate in (model, Evaluator(model)):
        with pytest.raises(ValueError, match="periodic in one or two directions only"):
            evaluate(slab)
