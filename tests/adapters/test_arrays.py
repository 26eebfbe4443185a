"""The array evaluator on static buffers: every step is right, whatever changes between two."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from ase_cases import crystal, ethanol

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.adapters.arrays import ArrayEvaluator, NonFiniteResult, Structure
from torchmdnet2.engine.bound import ReferenceBoundStep


@pytest.fixture
def arrays(potential):
    return ArrayEvaluator(Evaluator(potential), potential.device)


def structure(atoms, charge=0):
    pbc = np.array(atoms.pbc)
    return Structure(atoms.numbers.copy(), atoms.positions.copy(), atoms.cell.array.copy(), pbc, charge)


def assert_right(arrays, potential, atoms, stress=False, charge=0):
    results = arrays(structure(atoms, charge), stress)
    system = System.from_ase(atoms).replace(charge=torch.tensor([float(charge)], dtype=torch.float64))
    expected = potential(system, stress=stress)
    assert results["energy"] == pytest.approx(float(expected.energy.detach()), abs=1e-10)
    np.testing.assert_allclose(results["forces"], expected.forces, atol=1e-10)
    np.testing.assert_allclose(results["energies"], expected.atom_energies.detach(), atol=1e-10)
    if stress:
        np.testing.assert_allclose(results["stress"], expected.stress[0], atol=1e-12)
    return results


def test_moving_atoms_changing_cells_and_stress(arrays, potential):
    atoms, rng = crystal(), np.random.default_rng(0)
    kept = []
    for step in range(9):
        atoms.rattle(0.03, rng=rng)
        if step % 3 == 2:
            atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.02 * rng.normal(size=(3, 3))), scale_atoms=True)
        forces = assert_right(arrays, potential, atoms, stress=step % 4 > 1)["forces"]
        kept.append((forces, forces.copy()))
    assert all(np.array_equal(forces, then) for forces, then in kept)  # nothing is overwritten
    assert all(step is not None for step in arrays._steps.values()) and len(arrays._steps) == 2


def test_another_composition_in_between(arrays, potential):
    first, second = ethanol(), crystal()
    for _ in range(2):
        for atoms, charge in ((first, 0), (first, 0), (first, 1), (first, 1), (second, 0), (second, 0), (second, 0)):
            atoms.rattle(0.02, seed=1)
            assert_right(arrays, potential, atoms, charge=charge)
        first.numbers[[0, 2]] = first.numbers[[2, 0]]
    for pbc in ([True, True, False], [True, True, False], [False, True, True]):
        second.pbc = pbc
        assert_right(arrays, potential, second)


def test_a_step_without_room_is_repeated(arrays, potential, monkeypatch):
    atoms = ethanol()
    for _ in range(3):
        assert_right(arrays, potential, atoms)
    fetch, answers = ReferenceBoundStep.fetch, [None, None]
    monkeypatch.setattr(ReferenceBoundStep, "fetch", lambda self: answers.pop() if answers else fetch(self))
    atoms.rattle(0.1)
    assert_right(arrays, potential, atoms)
    assert not answers


def test_errors_leave_nothing_behind(arrays, potential):
    atoms = ethanol()
    for _ in range(3):
        assert_right(arrays, potential, atoms)
    bad = ethanol()
    bad.positions[4, 0] = np.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="atom 4"):
            arrays(structure(bad))
        assert_right(arrays, potential, atoms)
    assert_right(arrays, potential, atoms)
    flat = crystal()
    flat.cell[2] = 0
    with pytest.raises(ValueError, match="lattice vector that is zero"):
        arrays(structure(flat))


def test_without_memory_for_a_second_set_of_buffers(arrays, potential, monkeypatch):
    def full(self, system, stress=None):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(Evaluator, "bind", full)
    for _ in range(3):
        assert_right(arrays, potential, ethanol())


def test_charges_and_dipole_at_every_step(potential):
    """Also from the bound step, which runs from the second evaluation on."""
    config = {**potential.config, "properties": [{"name": "charges"}, {"name": "dipole"}]}
    with torch.random.fork_rng(devices=[]):
        made = Potential.from_config(config).double().eval()
    arrays, atoms = ArrayEvaluator(Evaluator(made), made.device), ethanol()
    for seed in range(3):
        atoms.rattle(0.05, seed=seed)
        results, expected = assert_right(arrays, made, atoms), made(System.from_ase(atoms))
        np.testing.assert_allclose(results["charges"], expected.charges, atol=1e-10)
        np.testing.assert_allclose(results["dipole"], expected.properties["dipole"][0], atol=1e-10)
    assert arrays._steps[False] is not None


@pytest.mark.parametrize("make", [ethanol, crystal])
def test_compiled_for_the_cpu(potential, make):
    """In float32, on numba's kernels where they are there."""
    pytest.importorskip("numba")
    config = {**potential.config, "model": {**potential.config["model"], "hidden_channels": 32}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        single = Potential.from_config(config).eval()
    exact, evaluator = copy.deepcopy(single).double(), Evaluator(single)
    arrays, atoms = ArrayEvaluator(evaluator, single.device), make()
    for seed in range(5):
        atoms.rattle(0.03, seed=seed)
        atoms.set_cell(atoms.cell.array * (1 + 0.02 * (seed % 3)), scale_atoms=True)
        stress = seed % 2 == 1 and bool(atoms.pbc.all())
        results = arrays(structure(atoms), stress)
        expected = exact(System.from_ase(atoms), stress=stress)
        assert results["energy"] == pytest.approx(float(expected.energy.detach()), abs=2e-5 * len(atoms))
        np.testing.assert_allclose(results["forces"], expected.forces, atol=2e-5)
        if stress:
            np.testing.assert_allclose(results["stress"], expected.stress[0], atol=1e-6)
    assert "numba" in evaluator.report()


def test_not_finite_says_where():
    from torchmdnet2.adapters.arrays import _finite

    fine = {"forces": np.full((2, 3), 1e308), "energy": 0.0}
    assert _finite(fine) is fine
    with pytest.raises(NonFiniteResult, match="'forces' is not finite at atom 1"):
        _finite({"forces": np.array([[0, 0, 0], [0, np.inf, 0]])})
    with pytest.raises(NonFiniteResult, match="'dipole' is not finite: "):
        _finite({"dipole": np.array([np.inf, -np.inf, 0])})
