"""The compiled AIMNet2 of the CPU against the Potential in float64, in absolute numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from aimnet2_cases import CASES, COULOMB, assert_same, batch, make, structure

from torchmdnet2 import Evaluator, System, load

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

from torchmdnet2.models.aimnet2.cpu import CHUNK


@pytest.mark.parametrize("name", CASES)
def test_structures(name):
    model, atoms = CASES[name]
    evaluator, periodic = Evaluator(model), bool(atoms.pbc.any())
    assert_same(evaluator(atoms, stress=periodic), model, atoms, periodic)
    assert "compiled AIMNet2" in evaluator.report()


def test_a_batch_whose_atoms_take_turns():
    """Charges are equilibrated in each structure alone; energies alone are those with forces."""
    model, atoms = batch()
    order = torch.argsort(torch.rand(atoms.num_atoms, generator=torch.Generator().manual_seed(1)))
    mixed = System(z=atoms.z[order], pos=atoms.pos[order], batch=atoms.batch[order], charge=atoms.charge)
    evaluator = Evaluator(model)
    found = evaluator(mixed)
    assert_same(found, model, mixed, False)
    assert torch.equal(evaluator(mixed, forces=False).energy, found.energy)


def test_atoms_in_several_chunks():
    """54 atoms: the products take them in three chunks."""
    model, molecules = make((COULOMB,)), [structure("CH3CH2OH", charge) for charge in (0.0, 1.0, -1.0, 0.0, 1.0, 0.0)]
    atoms = System.concatenate(molecules)
    assert atoms.num_atoms > 2 * CHUNK
    assert_same(Evaluator(model)(atoms), model, atoms, False)


def test_the_shipped_potential():
    """Forces to 2e-5 eV/Å."""
    potential, atoms = load("aimnet2"), structure("CH3CH2OH", 0.0)
    exact = copy.deepcopy(potential).double().reference(atoms)
    found = Evaluator(potential)(atoms)
    assert float((found.forces - exact.forces).abs().max()) < 2e-5
    assert float((found.energy - exact.energy).abs().max()) < 1e-5


def test_what_the_kernels_do_not_cover_runs_by_autograd():
    assert "gelu" in Evaluator(make(activation="silu")).report()
