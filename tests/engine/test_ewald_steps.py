"""Ewald and particle-mesh sums of fixed sizes: plans, and the steps that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import needs_triton, run_checks
from kernels.pair_prior_cases import CHARGES, system

from torchmdnet2 import System
from torchmdnet2.engine.autograd_term import EwaldPlans
from torchmdnet2.engine.graph import ForbidHostSync
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.priors import Coulomb
from torchmdnet2.priors.coulomb.ewald import with_plans

SKEWED = torch.tensor([[5.0, 0, 0], [1, 6, 0], [0.5, -2.0, 5.5]], dtype=torch.float64)


def cell(seed: int = 0) -> System:
    return system(6, seed, 5.0).replace(cell=SKEWED[None].clone())


def energies(prior: Coulomb, atoms: System) -> torch.Tensor:
    return prior(atoms, neighbor_list(atoms, prior.cutoff))


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_a_plan_gives_what_is_found_without(method):
    """The same waves and the same mesh: to rounding. Of any cell that fits, by Ewald."""
    prior, batch = Coulomb(CHARGES, method, 4.5), System.concatenate([cell(), system(3, 1, 4.0, False)])
    plans = EwaldPlans(prior)
    assert plans.set_composition(batch) and not plans.set_composition(batch.replace(cell=1.1 * batch.cell))
    with plans.use():
        planned = energies(prior, batch)
    torch.testing.assert_close(planned, energies(prior, batch), rtol=1e-12, atol=1e-12)
    if method == "ewald":
        turn = torch.tensor([[1.02, 0.01, 0], [0, 0.9, 0], [0, 0.02, 1.01]], dtype=torch.float64)
        other = batch.replace(pos=batch.pos @ turn, cell=batch.cell @ turn)
        with plans.use():
            planned = energies(prior, other)
        torch.testing.assert_close(planned, energies(prior, other), rtol=1e-12, atol=1e-12)
    assert not plans.lacking


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_cells_without_room(method):
    """They are noted, the first of them; what grows has room for it, also where cells are not finite later."""
    prior, atoms = Coulomb(CHARGES, method, 4.5, accuracy=1e-6), cell()
    plans = EwaldPlans(prior)
    plans.set_composition(atoms)
    wide, wider = atoms.replace(cell=1.3 * atoms.cell), atoms.replace(cell=2 * atoms.cell)
    with plans.use():
        for one in (atoms, wide, wider, atoms):
            energies(prior, one)
    assert plans.lacking
    with plans.use():  # positions and cells after a step with NaN
        prior(atoms.replace(cell=float("nan") * atoms.cell), neighbor_list(atoms, prior.cutoff))
    assert plans.grow() and not plans.lacking
    with plans.use():
        planned = energies(prior, wide)
        assert not plans.lacking and not plans.grow()
        torch.testing.assert_close(planned, energies(Coulomb(CHARGES, "ewald", 4.5), wide), rtol=0, atol=5e-5)
        energies(prior, wider)
    assert plans.lacking
    plans.clear()
    assert not plans.lacking and not plans.grow()


def test_cells_that_are_not_finite_are_not_without_room():
    prior, atoms = Coulomb(CHARGES, "pme", 4.5, accuracy=1e-6), cell()
    plans, pairs = EwaldPlans(prior), neighbor_list(atoms, 4.5)
    plans.set_composition(atoms)
    for value in (float("nan"), float("inf")):
        with plans.use():
            prior(atoms.replace(cell=value * atoms.cell), pairs)
    assert not plans.lacking


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_nothing_waits_for_the_device(method):
    prior, atoms = Coulomb(CHARGES, method, 4.5, accuracy=1e-6), cell()
    plans = EwaldPlans(prior)
    plans.set_composition(atoms)
    q = torch.tensor([0.3, -0.3] * 3).double()[:, None]
    with ForbidHostSync():
        (plan,) = plans._plans.values()
        plan.energies(atoms, q)


def test_plans_are_of_their_module_and_of_the_block():
    one, other, atoms = Coulomb(CHARGES, "ewald", 4.5), Coulomb(CHARGES, "ewald", 3.5), cell()
    expected = energies(other, atoms)
    plans = EwaldPlans(one)
    plans.set_composition(atoms)
    with plans.use():
        with with_plans({}):
            assert torch.equal(energies(other, atoms), expected)
        assert torch.equal(energies(other, atoms), expected)
    assert EwaldPlans(Coulomb(CHARGES, "reaction_field", 4.5)).lacking is None


@needs_triton
@pytest.mark.slow
def test_steps_on_the_gpu():
    run_checks(Path(__file__).with_name("ewald_step_checks.py"))
