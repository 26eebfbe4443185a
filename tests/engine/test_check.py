"""The first-use check of fused paths: rounding of sums whose terms cancel passes, and what is wrong is found."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace

import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from tiny import tiny_potential

from torchmdnet2 import Evaluator, System
from torchmdnet2.engine import check
from torchmdnet2.engine.check import reference, require_result, virial_terms
from torchmdnet2.errors import UndeterminedEnergyWarning

MODEL = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
CELLS = {
    "fcc": bulk("Si", "fcc", a=3.6),
    "bcc": bulk("Si", "bcc", a=2.9),
    "cubic": bulk("Si", "sc", a=2.3),
    "chain": Atoms("C", cell=[1.4, 12, 12], pbc=True),
}


@pytest.mark.parametrize(("most", "by_reference"), [(26, False), (27, True)])
def test_lists_of_few_images_need_no_other_search(most, by_reference, monkeypatch):
    """On a GPU another search would first be compiled. A cutoff below the height of the cell needs 3³ images."""
    system, asked = System.from_ase(bulk("Si", cubic=True) * 2), []
    search = check.neighbor_list
    expected = check.PairLists(system)(4.0)
    monkeypatch.setattr(
        check, "neighbor_list", lambda *given, backend: asked.append(backend) or search(*given, backend)
    )
    monkeypatch.setitem(check._MOST_IMAGES, "cpu", most)
    found = check._ReferenceLists(system)(4.0)
    assert asked == ["reference"] * by_reference
    assert torch.equal(found.edge_index, expected.edge_index) and torch.equal(found.shift, expected.shift)


def test_terms_of_one_pair_are_its_virial():
    system = System.from_ase(molecule("H2"))
    potential = tiny_potential()
    distance = float((system.pos[1] - system.pos[0]).norm())
    assert virial_terms(potential, system) == pytest.approx(distance * float(potential(system).forces[0].norm()))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("prior", [None, {"name": "zbl", "cutoff": 3.0}], ids=["network", "zbl"])
def test_rounding_passes_and_errors_do_not(cell, prior):
    system, priors = System.from_ase(CELLS[cell]), [] if prior is None else [prior]
    for seed in range(4):
        potential = tiny_potential(seed=seed, dtype=torch.float32, model=MODEL, priors=priors)
        expected = reference(potential, system, True)
        found = potential(system, stress=True)
        virial = found.stress.double() * system.volume[:, None, None]
        given = expected, potential, system, "native", 1.0
        require_result(found, virial, *given)
        for name, words in (("atom_energies", "energy of an atom"), ("energy", "of a structure"), ("forces", "force")):
            value = getattr(found, name)
            with pytest.raises(RuntimeError, match=words):
                require_result(replace(found, **{name: value + 1e-3 * max(1.0, value.abs().max())}), virial, *given)
        wrong = virial + 1e-2 * max(1.0, virial_terms(potential, system)) * torch.eye(3)
        with pytest.raises(RuntimeError, match="virial"):
            require_result(found, wrong, *given)


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_compiled_kernels_take_cells_of_one_atom():
    for seed in range(4):
        evaluator = Evaluator(tiny_potential(seed=seed, dtype=torch.float32, model=MODEL))
        for atoms in CELLS.values():
            system = System.from_ase(atoms)
            exact = tiny_potential(seed=seed, model=MODEL)(system, stress=True)
            found = evaluator(system, stress=True)
            assert float((found.stress - exact.stress).abs().max() * system.volume) < 1e-3
            assert float(found.forces.abs().max()) < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_the_cluster_of_the_check_is_no_composition_of_the_user(monkeypatch):
    """It cuts molecules: warnings and refusals of its composition would be about no structure that was given."""
    monkeypatch.setattr("torchmdnet2.engine.check.CHECKED_ATOMS", 10)  # 5 atoms of water
    water, far = System.from_ase(molecule("H2O")), 20 * torch.arange(4.0)
    many = System.concatenate([water] * 4).replace(batch=None, cell=None, pbc=None, charge=None, spin=None)
    many = many.replace(pos=many.pos + far.repeat_interleave(3)[:, None])
    potential = tiny_potential(
        dtype=torch.float32, model=MODEL, compositions=[{"1": 2, "8": 1}], closed_shell=True, total_charges=[0.0]
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Evaluator(potential)(many)
    assert not [warning for warning in seen if warning.category is UndeterminedEnergyWarning]
    with pytest.warns(UndeterminedEnergyWarning, match="structure 0 is H10O4: .* only those of H2O"):
        Evaluator(potential)(System(z=[8, *[1] * 10, 8, 8, 8], pos=2 * torch.eye(3)[0] * torch.arange(14.0)[:, None]))


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_a_model_that_is_not_finite_is_no_fault_of_the_kernels():
    potential = tiny_potential(dtype=torch.float32, model=MODEL)
    with torch.no_grad():
        potential.representation.tensor_embedding.emb.weight[8] = float("nan")  # of oxygen
    with pytest.raises(ValueError, match=r"energy or force is not finite at atom \d: the structure is unphysical"):
        Evaluator(potential)(System.from_ase(molecule("CH3CH2OH")))
    assert bool(Evaluator(potential)(System.from_ase(molecule("C2H6"))).energy.isfinite())
