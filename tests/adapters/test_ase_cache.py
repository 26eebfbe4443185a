"""The ASE calculator: what is computed when; charge and spin (bar R26)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase_cases import count_evaluations, crystal, ethanol

from torchmdnet2 import System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator

# --- what is computed when ----------------------------------------------------------------------------------------


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
    for _ in range(3):  # as in a cell optimiser: forces, then stress, of each new structure
        atoms.rattle(0.01)
        atoms.get_forces()
        atoms.get_stress()
    assert calls == [False, True, True, True, True]
    for _ in range(2):
        atoms.rattle(0.01)
        atoms.get_forces()
    assert calls[5:] == [True, False], "nobody asks for the stress any more"


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


def test_atoms_that_are_assigned_have_no_results_yet(potential):
    calc, other = TorchMDNet2Calculator(potential), TorchMDNet2Calculator(potential)
    moved = ethanol()
    moved.rattle(0.1)
    calc.get_property("energy", ethanol())
    calc.atoms = moved
    assert calc.get_potential_energy() == other.get_property("energy", moved)
    assert calc.get_property("energy", moved) == other.get_property("energy", moved)


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


# --- charge and spin ----------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"charge is 0 by .*, but charge=2 is given"):
        atoms.get_potential_energy()
    atoms.calc.set(charge=None)
    assert atoms.get_potential_energy() == expected[0]


def test_charge_set_the_way_of_ase(potential):
    atoms, charged = ethanol(), ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    charged.calc = TorchMDNet2Calculator(potential, charge=1)
    neutral = atoms.get_potential_energy()
    assert atoms.calc.set(charge=1, spin=0) == {"charge": 1}
    assert atoms.get_potential_energy() == charged.get_potential_energy() != neutral
    with pytest.raises(TypeError, match="not device, label"):
        atoms.calc.set(label="x", charge=2, device="cuda")
    with pytest.raises(ValueError, match="whole number"):
        atoms.calc.set(charge=0.5)
    assert atoms.calc.charge == 1


def test_spin_and_charge_are_part_of_the_cache(potential):
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(potential)
    calls = count_evaluations(atoms.calc)
    for state in [{"spin": 1}, {"charge": 1, "spin": 2}, {"charge": 2, "spin": 1}]:
        atoms.info.update(state)
        assert atoms.calc.calculation_required(atoms, ["energy"])
        atoms.get_potential_energy()
        assert not atoms.calc.calculation_required(atoms, ["energy"])
    atoms.info["charge"] = 2.0  # the same charge
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
