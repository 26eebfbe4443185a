"""The ASE calculator: values, and ASE's own machinery on it (bar R26)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import FiniteDifferenceCalculator, calculate_numerical_forces
from ase.calculators.mixing import SumCalculator
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.nptberendsen import NPTBerendsen
from ase.optimize import BFGS
from ase.stress import voigt_6_to_full_3x3_stress
from ase_cases import count_evaluations, crystal, ethanol

from torchmdnet2 import Potential, System
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator

# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pbc", [True, (True, False, True), False])
def test_equals_the_potential(potential, model_file, pbc):
    atoms = crystal(pbc)
    atoms.calc = TorchMDNet2Calculator(model_file)
    expected = potential(System.from_ase(atoms), stress=True)
    assert atoms.get_potential_energy() == pytest.approx(float(expected.energy.detach()), rel=1e-12)
    assert type(atoms.get_potential_energy()) is float
    assert atoms.calc.get_property("free_energy", atoms) == atoms.get_potential_energy()
    np.testing.assert_allclose(atoms.get_forces(), expected.forces, atol=1e-12)
    np.testing.assert_allclose(voigt_6_to_full_3x3_stress(atoms.get_stress()), expected.stress[0], atol=1e-14)
    assert atoms.get_stress().shape == (6,)
    np.testing.assert_allclose(atoms.get_potential_energies().sum(), float(expected.energy), rtol=1e-13)


@pytest.mark.parametrize("make", [ethanol, crystal, lambda: crystal((True, True, False))])
def test_forces_and_stress_by_finite_differences(potential, make):
    """Sign, order and units as ASE itself sees them."""
    atoms = make()
    calc = TorchMDNet2Calculator(potential)
    atoms.calc = calc
    assert np.abs(atoms.get_forces()).max() > 0.02
    if atoms.cell.rank < 3:
        np.testing.assert_allclose(atoms.get_forces(), calculate_numerical_forces(atoms, eps=1e-4), atol=1e-7)
        return
    numerical = FiniteDifferenceCalculator(calc, eps_disp=1e-4, eps_strain=1e-4)
    expected = numerical.calculate_properties(atoms, ["energy", "forces", "stress"])
    assert np.abs(atoms.get_stress()).min() > 1e-5
    np.testing.assert_allclose(atoms.get_forces(), expected["forces"], atol=1e-7)
    np.testing.assert_allclose(atoms.get_stress(), expected["stress"], atol=1e-8)


def test_tensile_stress_is_positive(potential):
    """Trace of the stress = 3 dE/dV, by isotropic expansion."""
    atoms = crystal()
    atoms.calc = TorchMDNet2Calculator(potential)
    stress = atoms.get_stress()
    energy = []
    for scale in (1 - 1e-5, 1 + 1e-5):
        other = atoms.copy()
        other.calc = atoms.calc
        other.set_cell(atoms.cell * scale, scale_atoms=True)
        energy.append(other.get_potential_energy())
    assert stress[:3].sum() == pytest.approx((energy[1] - energy[0]) / 2e-5 / atoms.get_volume(), rel=1e-6)


def test_float32_network_is_close_and_keeps_positions_in_float64(potential):
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential, dtype=torch.float32)
    exact = potential(System.from_ase(atoms))
    assert atoms.get_potential_energy() == pytest.approx(float(exact.energy), rel=1e-5)
    np.testing.assert_allclose(atoms.get_forces(), exact.forces, atol=1e-4)
    assert atoms.get_forces().dtype == np.float64
    atoms.positions += 1e6  # far from the origin, float32 positions would lose the molecule
    np.testing.assert_allclose(atoms.get_forces(), exact.forces, atol=1e-4)


def test_stress_does_not_change_the_forces(potential):
    atoms = crystal()
    calc = TorchMDNet2Calculator(potential)
    forces = calc.get_property("forces", atoms)
    calc.reset()
    calc.get_property("stress", atoms)
    assert np.array_equal(forces, calc.get_property("forces", atoms))


# --- ASE's own machinery ------------------------------------------------------------------------------------------


def test_relaxation_of_positions_and_cell(potential):
    atoms = crystal()
    atoms.calc = TorchMDNet2Calculator(potential)
    before = atoms.get_potential_energy()
    calls = count_evaluations(atoms.calc)
    optimizer = BFGS(FrechetCellFilter(atoms), logfile=None)
    optimizer.run(fmax=1e-3, steps=10)
    assert atoms.get_potential_energy() < before
    assert len(calls) <= optimizer.nsteps + 3  # one evaluation per step, stress included


def test_langevin_and_npt(potential):
    atoms = crystal()
    atoms.calc = TorchMDNet2Calculator(potential)
    Langevin(atoms, 0.5 * units.fs, temperature_K=200, friction=0.02, rng=np.random.RandomState(1)).run(5)
    volume = atoms.get_volume()
    NPTBerendsen(
        atoms, 0.5 * units.fs, temperature_K=200, pressure_au=1e4 * units.bar, compressibility_au=1e-6 / units.bar
    ).run(5)
    assert atoms.get_volume() != volume and np.isfinite(atoms.get_forces()).all()


def test_sum_calculator_and_files(potential, tmp_path):
    atoms = crystal()
    atoms.calc = TorchMDNet2Calculator(potential)
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    for name in ("frame.xyz", "frame.traj"):
        write(tmp_path / name, atoms)
        back = read(tmp_path / name)
        assert back.get_potential_energy() == pytest.approx(energy, rel=1e-7)
        np.testing.assert_allclose(back.get_forces(), forces, atol=1e-7)
        np.testing.assert_allclose(back.get_stress(), stress, atol=1e-7)
    atoms.calc = SumCalculator([TorchMDNet2Calculator(potential), TorchMDNet2Calculator(potential)])
    np.testing.assert_allclose(atoms.get_stress(), 2 * stress)
    np.testing.assert_allclose(atoms.get_forces(), 2 * forces)


def test_charges_and_dipole_where_the_model_has_them(potential):
    config = {**potential.config, "properties": [{"name": "charges"}, {"name": "dipole"}]}
    with torch.random.fork_rng(devices=[]):
        calc = TorchMDNet2Calculator(Potential.from_config(config), charge=1)
    atoms = ethanol()
    atoms.calc = calc
    assert {"charges", "dipole"} <= set(calc.implemented_properties)
    assert atoms.get_charges().shape == (9,) and atoms.get_charges().sum() == pytest.approx(1, abs=1e-5)
    assert atoms.get_dipole_moment().shape == (3,)
    (batched,) = calc.evaluate([atoms])
    np.testing.assert_allclose(batched["dipole"], atoms.get_dipole_moment(), atol=1e-6)
    with pytest.raises(PropertyNotImplementedError):
        TorchMDNet2Calculator(potential).get_property("charges", ethanol())
    assert "charges" not in TorchMDNet2Calculator.implemented_properties


@pytest.mark.parametrize("make", [ethanol, crystal])
def test_hessian_is_the_derivative_of_the_forces(potential, make):
    atoms = make()
    atoms.calc = calc = TorchMDNet2Calculator(potential)
    found = calc.get_hessian(atoms)
    assert found.shape == (3 * len(atoms),) * 2 and np.array_equal(found, found.T)
    for atom, axis in ((0, 0), (1, 2)):
        sides = []
        for step in (1e-4, -1e-4):
            moved = atoms.copy()
            moved.positions[atom, axis] += step
            moved.calc = calc
            sides.append(-moved.get_forces().flatten())
        np.testing.assert_allclose(found[3 * atom + axis], (sides[0] - sides[1]) / 2e-4, rtol=0, atol=1e-6)
    assert np.abs(found.reshape(-1, len(atoms), 3).sum(1)).max() < 1e-9  # moving all atoms changes nothing
    committee = CommitteeCalculator([potential, potential])
    np.testing.assert_allclose(committee.get_hessian(atoms), found, rtol=0, atol=1e-12)
    far = Atoms("CO", positions=[[0, 0, 0], [50, 0, 0]])
    assert not calc.get_hessian(far).any()
    far.positions[1] = np.nan
    with pytest.raises(ValueError, match="atom 1"):
        calc.get_hessian(far)
