"""The ASE calculator: bars R11, R13, R14, R26, R28, R29."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import FiniteDifferenceCalculator, calculate_numerical_forces
from ase.calculators.mixing import SumCalculator
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.nptberendsen import NPTBerendsen
from ase.optimize import BFGS
from ase.stress import voigt_6_to_full_3x3_stress

from torchmdnet2 import Potential, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadCheckpoint, UnknownElement


def ethanol() -> Atoms:
    return molecule("CH3CH2OH")


def crystal(pbc=True) -> Atoms:
    """A rattled triclinic carbon-oxygen crystal."""
    atoms = bulk("CO", "zincblende", a=4.4) * (2, 1, 1)
    atoms.rattle(0.1, seed=3)
    atoms.set_cell(atoms.cell.array @ [[1, 0.08, 0.02], [0, 1, -0.05], [0.03, 0, 1]], scale_atoms=True)
    atoms.pbc = pbc
    return atoms


def count_evaluations(calc: TorchMDNet2Calculator) -> list[bool]:
    """A list that grows by one at each evaluation of the model: whether the stress was computed."""
    calls: list[bool] = []
    evaluator = calc._evaluator

    def counted(system, forces=True, stress=None):
        calls.append(bool(stress))
        return evaluator(system, forces=forces, stress=stress)

    counted.potential = evaluator.potential
    calc._evaluator = counted
    return calls


# --- values ------------------------------------------------------------------------------------------------------


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


# --- what is computed when ---------------------------------------------------------------------------------------


def test_stress_is_computed_only_when_asked_for(potential):
    atoms = crystal()
    atoms.calc = TorchMDNet2Calculator(potential)
    calls = count_evaluations(atoms.calc)
    atoms.get_potential_energy()
    atoms.get_forces()
    assert calls == [False] and "stress" not in atoms.calc.results
    atoms.get_stress()
    atoms.get_forces()
    assert calls == [False, True]
    atoms.rattle(0.01)  # as in a cell optimiser: forces, then stress, of each new structure
    atoms.get_forces()
    atoms.get_stress()
    assert calls == [False, True, True]


def test_same_structure_is_computed_once_and_a_changed_one_again(potential):
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    calls = count_evaluations(atoms.calc)
    atoms.get_forces()
    atoms.info["comment"] = np.arange(3)  # does not enter
    atoms.get_forces()
    assert len(calls) == 1
    first = atoms.get_potential_energy()
    atoms.positions[0, 0] += 0.05
    assert atoms.get_potential_energy() != first and len(calls) == 2
    atoms.numbers[2] = 1
    assert atoms.get_potential_energy() != first and len(calls) == 3
    atoms.cell = [3, 3, 3]
    atoms.get_potential_energy()
    atoms.pbc = (False, False, True)
    atoms.get_potential_energy()
    assert len(calls) == 5


def test_results_are_fresh_arrays(potential):
    atoms = crystal()
    atoms.calc = TorchMDNet2Calculator(potential)
    for get in (atoms.get_forces, atoms.get_stress, atoms.get_potential_energies):
        before = get().copy()
        get()[:] = 99
        assert np.array_equal(get(), before)
    kept = atoms.calc.results["forces"]
    copied = kept.copy()
    atoms.rattle(0.1)
    atoms.get_forces()
    assert np.array_equal(kept, copied)


# --- charge and spin ---------------------------------------------------------------------------------------------


def test_charge_from_info_then_constructor_then_zero(potential):
    expected = {}
    for charge in (-1, 0, 2):
        system = System.from_ase(ethanol()).replace(charge=torch.tensor([float(charge)], dtype=torch.float64))
        expected[charge] = pytest.approx(float(potential(system).energy.detach()), rel=1e-12)
    assert len({value.expected for value in expected.values()}) == 3
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    assert atoms.get_potential_energy() == expected[0]
    atoms.info["charge"] = 2  # nothing else changes: the result must
    assert atoms.get_potential_energy() == expected[2]
    atoms.info["charge"] = np.int64(-1)
    assert atoms.get_potential_energy() == expected[-1]
    del atoms.info["charge"]
    assert atoms.get_potential_energy() == expected[0]
    atoms.calc = TorchMDNet2Calculator(potential, charge=2)
    assert atoms.get_potential_energy() == expected[2]
    atoms.info["charge"] = 0  # 0 in info is a value, not "absent"
    assert atoms.get_potential_energy() == expected[0]


def test_spin_and_charge_are_part_of_the_cache(potential):
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    calls = count_evaluations(atoms.calc)
    for key, value in [("spin", 2), ("charge", 1), ("spin", 1)]:
        atoms.info[key] = value
        assert atoms.calc.calculation_required(atoms, ["energy"])
        atoms.get_potential_energy()
        assert not atoms.calc.calculation_required(atoms, ["energy"])
    atoms.info["charge"] = 1.0  # the same charge
    atoms.get_potential_energy()
    assert len(calls) == 3


@pytest.mark.parametrize("value", [0.5, "one", float("nan"), None, [1, 2]])
@pytest.mark.parametrize("key", ["charge", "spin"])
def test_charge_and_spin_must_be_whole_numbers(potential, key, value):
    atoms = ethanol()
    atoms.info[key] = value
    atoms.calc = TorchMDNet2Calculator(potential)
    with pytest.raises(ValueError, match=f"{key} must be a whole number"):
        atoms.get_potential_energy()
    if value is not None:
        with pytest.raises(ValueError, match=f"{key} must be a whole number"):
            TorchMDNet2Calculator(potential, **{key: value})


# --- refusals ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("atoms", [Atoms(), Atoms("H"), Atoms("HH", [[0, 0, 0], [0, 0, 30]])])
def test_no_atoms_one_atom_no_neighbors(potential, atoms):
    atoms.calc = TorchMDNet2Calculator(potential)
    assert atoms.get_potential_energy() == 0.0
    assert atoms.get_forces().shape == (len(atoms), 3)
    assert not atoms.get_forces().any()


@pytest.mark.parametrize("options", [{"device": "cuda:97"}, {"device": "abacus"}, {"dtype": torch.float16}])
def test_unusable_options(potential, options):
    with pytest.raises(ValueError, match=r"device|dtype"):
        TorchMDNet2Calculator(potential, **options)


def test_missing_and_damaged_files(tmp_path, model_file):
    with pytest.raises(FileNotFoundError):
        TorchMDNet2Calculator(tmp_path / "none.tmn")
    (tmp_path / "cut.tmn").write_bytes(model_file.read_bytes()[:-7])
    with pytest.raises(BadCheckpoint):
        TorchMDNet2Calculator(str(tmp_path / "cut.tmn"))
    with pytest.raises(TypeError, match="dict"):
        TorchMDNet2Calculator({"model": 1})


# --- nothing else is touched -------------------------------------------------------------------------------------


def test_the_users_atoms_and_torch_stay_as_they_were(potential, model_file):
    atoms = crystal()
    atoms.info = {"charge": 1, "note": {"a": [1]}}
    atoms.positions[0] += 3 * atoms.cell[1]  # outside of the cell, and must stay there
    before, info = atoms.copy(), copy.deepcopy(atoms.info)

    def state():
        return (
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        )

    torch.get_rng_state()
    was = state()
    training = copy.deepcopy(potential).train()
    for model in (model_file, training):
        atoms.calc = TorchMDNet2Calculator(model, dtype=torch.float32)
        atoms.get_forces()
        atoms.get_stress()
    assert state() == was
    assert training.training and training.dtype == torch.float64
    assert all(p.requires_grad for p in training.parameters())
    assert atoms == before and atoms.info == info and set(atoms.arrays) == set(before.arrays)


def test_works_under_no_grad_and_inference_mode(potential):
    atoms = crystal()
    expected = TorchMDNet2Calculator(potential).get_property("stress", atoms)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            calc = TorchMDNet2Calculator(potential)
            assert np.array_equal(calc.get_property("stress", atoms), expected)
        assert np.array_equal(calc.get_property("stress", atoms * (1, 1, 1)), expected)  # and outside of it
        calc.reset()
        assert np.array_equal(calc.get_property("stress", atoms), expected)


def test_default_dtype_of_torch_is_neither_used_nor_changed(potential, tmp_path):
    save(copy.deepcopy(potential).float(), tmp_path / "f32.tmn")
    expected = TorchMDNet2Calculator(tmp_path / "f32.tmn").get_property("forces", ethanol())
    torch.set_default_dtype(torch.float64)
    try:
        calc = TorchMDNet2Calculator(tmp_path / "f32.tmn")
        assert calc.potential.dtype == torch.float32
        assert np.array_equal(calc.get_property("forces", ethanol()), expected)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_two_calculators_of_different_type_in_one_process(potential):
    single, double = (TorchMDNet2Calculator(potential, dtype=t) for t in (torch.float32, torch.float64))
    first = [c.get_property("energy", ethanol()) for c in (single, double)]
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], rel=1e-5)
    assert [c.get_property("energy", ethanol()) for c in (TorchMDNet2Calculator(potential), single)] == first[::-1]


def test_later_training_of_the_users_potential_has_no_effect(potential):
    mine = copy.deepcopy(potential)
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(mine)
    expected = atoms.get_potential_energy()
    with torch.no_grad():
        for p in mine.parameters():
            p.mul_(1.5)
    atoms.calc.reset()
    assert atoms.get_potential_energy() == expected


# --- copies, pickles, threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("from_file", [True, False])
def test_copies_and_pickles(potential, model_file, duplicate, from_file):
    atoms = crystal()
    calc = TorchMDNet2Calculator(model_file if from_file else potential, dtype="float64", charge=1, spin=2)
    atoms.calc = calc
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    other = duplicate(calc)
    calls = count_evaluations(other)
    assert other.get_property("energy", atoms) == energy and not calls  # the result came along
    other.reset()
    assert np.array_equal(other.get_property("forces", atoms), forces) and len(calls) == 1
    moved = atoms.copy()
    moved.rattle(0.1)
    other.get_property("forces", moved)
    assert np.array_equal(atoms.get_forces(), forces)
    assert (other.charge, other.spin, other.potential.dtype) == (1, 2, torch.float64)


def test_pickle_of_a_file_holds_no_weights_and_no_classes_of_torch(model_file, potential):
    data = pickle.dumps(TorchMDNet2Calculator(model_file))
    assert len(data) < 2000 and b"torch._" not in data and b"Potential" not in data
    assert str(model_file).encode() in data
    assert b"torch._" not in pickle.dumps(TorchMDNet2Calculator(potential))


def test_pickle_refuses_a_replaced_file(potential, tmp_path):
    path = tmp_path / "model.tmn"
    save(potential, path)
    data = pickle.dumps(TorchMDNet2Calculator(path))
    pickle.loads(data)
    save(potential, path, metadata={"trained": "again"})
    with pytest.raises(BadCheckpoint, match="was replaced"):
        pickle.loads(data)


def test_pickle_of_a_hand_built_potential_says_what_to_do(potential):
    built = Potential(copy.deepcopy(potential.representation), copy.deepcopy(potential.head), elements=[1, 6, 8])
    with pytest.raises(ValueError, match="from_config"):
        pickle.dumps(TorchMDNet2Calculator(built))


@pytest.mark.parametrize("shared", ["calculator", "potential"])
def test_eight_threads_equal_serial(potential, shared):
    """Bar R29."""
    frames = []
    for k in range(12):
        atoms = ethanol() if k % 2 else crystal()
        atoms.rattle(0.05, seed=k)
        atoms.info["charge"] = k % 3
        frames.append(atoms)
    serial = TorchMDNet2Calculator(potential)
    expected = [(serial.get_property("energy", a), serial.get_property("forces", a)) for a in frames]
    one = TorchMDNet2Calculator(potential)

    def work(atoms):
        calc = one if shared == "calculator" else TorchMDNet2Calculator(potential)
        return calc.get_property("energy", atoms), calc.get_property("forces", atoms)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, frames * 2))
    for (energy, forces), (e, f) in zip(found, expected * 2, strict=True):
        assert energy == e and np.array_equal(forces, f)


# --- ASE's own machinery -----------------------------------------------------------------------------------------


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
