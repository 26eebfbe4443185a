"""Whole steps with the kernels of priors: on the GPU (Triton's interpreter) and on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton, run_checks
from kernels.pair_prior_cases import CHARGES, ELEMENTS, PBE0, closed_shell, system
from kernels.toy import potential

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine import check
from torchmdnet2.engine.select import list_cutoffs
from torchmdnet2.errors import UntrainedCharge
from torchmdnet2.potential.prior import Prior
from torchmdnet2.priors import D2, D3, ZBL, Atomref, Coulomb

TENSORNET = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0, "max_z": 10}
BATCH = System.concatenate([system(5, 1, 6.0), system(1, 2, 2.6), system(5, 3, 30.0)])
MOLECULES = System.concatenate([system(3, 1, 3.0, False), system(3, 2, 12.0, False)])
COMBINATIONS = {
    "zbl, references": ([ZBL(cutoff=3.5), Atomref({"H": -13.6, "O": -2041.3})], BATCH),
    "zbl, d2, reaction field": (
        [ZBL(envelope="covalent"), D2(cutoff=6.0), Coulomb(CHARGES, "reaction_field", cutoff=5.5)], BATCH,
    ),
    "d3, reaction field": (
        [D3(ELEMENTS, **PBE0, cutoff=7.0), Coulomb(CHARGES, "reaction_field", cutoff=4.5)], BATCH,
    ),
    "all pairs, d2, charges of atoms": (
        [Coulomb(CHARGES), D2(cutoff=6.0), Coulomb([0.1, -0.3, 0.4], "reaction_field", cutoff=6.0)], MOLECULES,
    ),
}  # fmt: skip


@needs_triton
def test_steps_on_the_gpu():
    run_checks(Path(__file__).with_name("prior_step_checks.py"))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_steps_on_the_cpu(name):
    pytest.importorskip("numba")
    priors, atoms = COMBINATIONS[name]
    model, stress = potential(priors), bool(atoms.pbc.any())
    exact, evaluator = copy.deepcopy(model).double(), Evaluator(model)
    others = [atoms.replace(pos=atoms.pos * 1.03, cell=atoms.cell * 1.03), atoms.replace(z=atoms.z.flip(0)), atoms]
    for one in (atoms, *others):
        found, expected = evaluator(one, stress=stress), exact(one, stress=stress)
        largest = float(expected.forces.abs().max())
        torch.testing.assert_close(found.energy, expected.energy, rtol=1e-7, atol=2e-6)
        torch.testing.assert_close(found.atom_energies, expected.atom_energies, rtol=1e-7, atol=2e-6)
        torch.testing.assert_close(found.forces, expected.forces, rtol=0, atol=2e-6 * max(1.0, largest))
        if stress:
            torch.testing.assert_close(found.stress, expected.stress, rtol=1e-5, atol=1e-7)
    assert "compiled Toy kernels" in evaluator.report()


def test_tensornet_with_priors_on_the_cpu():
    """Bound steps and stress, one thread; energies of atoms without edges are those of the priors."""
    pytest.importorskip("numba")
    torch.manual_seed(0)
    priors = [{"name": "zbl", "cutoff": 3.0}, {"name": "d2", "cutoff": 6.0}]
    model = Potential.from_config({"model": TENSORNET, "priors": priors, "elements": ELEMENTS}).eval()
    atoms = system(6, 4, 7.0)
    evaluator = Evaluator(model)
    found, expected = evaluator(atoms, stress=True), copy.deepcopy(model).double()(atoms, stress=True)
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.forces, expected.forces, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.stress, expected.stress, rtol=1e-5, atol=1e-7)
    assert "compiled TensorNet kernels" in evaluator.report()
    bound = evaluator.bind(atoms)
    assert torch.equal(bound.forces, found.forces) and torch.equal(bound.energy, found.energy)
    apart = System(z=torch.tensor([6, 8]), pos=torch.tensor([[0.0, 0, 0], [4.5, 0, 0]], dtype=torch.float64))
    result = evaluator(apart)
    torch.testing.assert_close(result.atom_energies, model.prior_energies(apart).detach(), rtol=1e-9, atol=0)
    assert float(result.energy) < 0


def test_charges_of_atoms_are_checked_on_a_part_of_a_large_structure(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(check, "CHECKED_ATOMS", 6)
    model = potential([Coulomb(torch.linspace(-0.5, 0.5, 9).tolist(), "reaction_field", cutoff=6.0)])
    atoms = system(9, 3, 7.0)
    torch.testing.assert_close(Evaluator(model)(atoms).forces, model(atoms).forces, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_closed_shell_may_have_an_odd_number_of_electrons(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(check, "CHECKED_ATOMS", 6)
    model, atoms = potential([ZBL(cutoff=3.0)]), closed_shell(9, 3, 7.0)
    model.closed_shell = True
    part, cluster = check.extract_checked(model, atoms, False)
    assert (cluster.z.sum() - cluster.charge) % 2 == 1 and model.closed_shell and not part.closed_shell
    torch.testing.assert_close(Evaluator(model)(atoms).forces, model(atoms).forces, rtol=1e-5, atol=1e-5)
    with pytest.raises(UntrainedCharge, match="odd number of electrons"):
        Evaluator(model)(atoms.replace(charge=atoms.charge + 1))


def test_lists_that_terms_share():
    assert list_cutoffs(5.0, [4.0, 5.0, float("inf")]) == [5.0]
    assert list_cutoffs(5.0, [9.0, 4.0, 10.0]) == [5.0, 10.0]
    assert list_cutoffs(5.0, [9.0, 20.0]) == [5.0, 20.0, 9.0]


class Morse(Prior):
    """A user's prior, whose energy does not vanish beyond its cutoff."""

    cutoff = 3.0

    def forward(self, system, neighbors):
        d = neighbors.distances(system).double()
        pair = 0.2 * (1 - torch.exp(-1.5 * (d - 1.2))) ** 2 * (1 - (d / self.cutoff) ** 2)
        return pair.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], pair / 2)


@pytest.mark.parametrize("priors", [[Morse()], [Morse(), ZBL(cutoff=3.5)]], ids=["alone", "beside kernels"])
def test_a_prior_without_kernels_does_not_take_the_network_off_its_kernels(priors):
    pytest.importorskip("numba")
    model = potential(priors)
    evaluator, expected = Evaluator(model), copy.deepcopy(model).double()(BATCH, stress=True)
    found = evaluator(BATCH, stress=True)
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-7, atol=2e-6)
    torch.testing.assert_close(found.forces, expected.forces, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.stress, expected.stress, rtol=1e-5, atol=1e-7)
    report = evaluator.report()
    assert "compiled Toy kernels" in report and "priors by autograd: Morse" in report
    assert ("priors on kernels: ZBL" in report) == (len(priors) == 2)
