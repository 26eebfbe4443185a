"""The ASE calculator: what it refuses (bars R11, R13, R14)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import CalculatorSetupError, PropertyNotImplementedError
from ase_cases import ethanol

from torchmdnet2 import System, load
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator, hessian
from torchmdnet2.errors import BadCheckpoint, BadData, UnknownElement

# --- refusals -----------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_and_leaves_no_result_behind(potential):
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    atoms.get_forces()
    atoms.positions[4, 1] = np.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="atom 4"):
            atoms.get_forces()
    assert atoms.calc.results == {}
    atoms.positions = ethanol().positions
    assert np.isfinite(atoms.get_forces()).all()


def test_result_that_is_not_finite_never_leaves(potential):
    broken = copy.deepcopy(potential)
    broken.energy_scale = float("inf")
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(broken)
    with pytest.raises(ValueError, match="not finite at atom 0"):
        atoms.get_forces()
    assert atoms.calc.results == {}


def test_second_derivatives_that_are_not_finite_or_of_several_structures(potential):
    broken = copy.deepcopy(potential)
    broken.energy_scale = float("inf")
    with pytest.raises(ValueError, match="'hessian' is not finite"):
        TorchMDNet2Calculator(broken).get_hessian(molecule("H2O"))
    with pytest.raises(ValueError, match="a Hessian needs one structure, got 2"):
        hessian(potential, System.from_ase([molecule("H2O")] * 2))


@pytest.mark.parametrize("name", ["isolated", "allow_untrained_charge"])
@pytest.mark.parametrize("given", ["no", 2, None])
def test_flags_are_true_or_false(potential, name, given):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {given!r}"):
        TorchMDNet2Calculator(potential, **{name: given})
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {given!r}"):
        CommitteeCalculator([potential, potential], **{name: given})
    if name != "isolated":
        with pytest.raises(ValueError, match=f"{name} must be True or False, got {given!r}"):
            load("organic-small", **{name: given})


def test_a_calculation_without_a_structure(potential):
    with pytest.raises(CalculatorSetupError, match="no structure was given to the calculator: pass one"):
        TorchMDNet2Calculator(potential).calculate()


def test_stress_without_a_cell(potential):
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    for kind in (ValueError, PropertyNotImplementedError):
        with pytest.raises(kind, match="cell with a volume"):
            atoms.get_stress()
    assert np.isfinite(atoms.get_forces()).all()


def test_periodic_without_a_cell(potential):
    atoms = ethanol()
    atoms.pbc = True
    atoms.calc = TorchMDNet2Calculator(potential)
    with pytest.raises(ValueError, match="lattice vector that is zero"):
        atoms.get_potential_energy()


def test_unknown_element(potential):
    atoms = molecule("CH3SH")
    atoms.calc = TorchMDNet2Calculator(potential)
    with pytest.raises(UnknownElement, match=r"S \(Z = 16\).*H, C, O"):
        atoms.get_potential_energy()


def test_coincident_atoms_give_finite_numbers_or_an_error(potential):
    atoms = ethanol()
    atoms.positions[1] = atoms.positions[0]
    atoms.calc = TorchMDNet2Calculator(potential)
    try:
        assert np.isfinite(atoms.get_forces()).all()
    except ValueError as error:
        assert "atom" in str(error)


@pytest.mark.parametrize("atoms", [Atoms("H"), Atoms("HH", [[0, 0, 0], [0, 0, 30]])])
def test_one_atom_no_neighbors(potential, atoms):
    atoms.calc = TorchMDNet2Calculator(potential)
    assert atoms.get_potential_energy() == 0.0
    assert atoms.get_forces().shape == (len(atoms), 3)
    assert not atoms.get_forces().any()


def test_no_atoms(potential):
    """Of a selection that matches nothing: an error, and not an energy of 0 eV."""
    calculator = TorchMDNet2Calculator(potential)
    for evaluate in (calculator.get_potential_energy, calculator.get_hessian, lambda a: list(calculator.evaluate([a]))):
        with pytest.raises(BadData, match="no atoms: a selection that matches nothing"):
            evaluate(Atoms())


@pytest.mark.parametrize("options", [{"device": "cuda:97"}, {"device": "abacus"}, {"dtype": torch.float16}])
def test_unusable_options(potential, options):
    with pytest.raises(ValueError, match=r"device|dtype"):
        TorchMDNet2Calculator(potential, **options)


def test_a_property_that_the_model_has_not(potential):
    calculator = TorchMDNet2Calculator(potential)
    with pytest.raises(PropertyNotImplementedError, match=r"does not provide 'magmom'; it provides .*energy.*forces"):
        calculator.get_property("magmom", Atoms("H2O", [[0, 0, 0], [0, 0, 1], [0, 0.9, -0.3]]))


def test_missing_and_damaged_files(tmp_path, model_file):
    with pytest.raises(FileNotFoundError):
        TorchMDNet2Calculator(tmp_path / "none.tmn")
    (tmp_path / "cut.tmn").write_bytes(model_file.read_bytes()[:-7])
    with pytest.raises(BadCheckpoint):
        TorchMDNet2Calculator(str(tmp_path / "cut.tmn"))
    with pytest.raises(TypeError, match="dict"):
        TorchMDNet2Calculator({"model": 1})
