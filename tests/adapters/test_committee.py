"""Batches of structures, and committees of potentials."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from torchmdnet2 import Potential
from torchmdnet2.adapters.ase import CommitteeCalculator, NoStress, TorchMDNet2Calculator
from torchmdnet2.errors import UnknownElement


@pytest.fixture(scope="module")
def three(potential):
    """Three potentials with other random weights."""
    made = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(3):
            torch.manual_seed(seed)
            made.append(Potential.from_config(potential.config).double())
    return made


def frames():
    crystal = bulk("CO", "zincblende", a=4.4)
    crystal.rattle(0.1, seed=1)
    charged = molecule("H2O")
    charged.info["charge"] = 1
    return [molecule("CH3CH2OH"), crystal, Atoms("H"), charged, molecule("H2O")]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_batches_equal_singles(potential, batch_size):
    calc = TorchMDNet2Calculator(potential)
    found = list(calc.evaluate(iter(frames()), batch_size=batch_size))
    assert len(found) == 5 and calc.results == {}
    for results, atoms in zip(found, frames(), strict=True):
        assert results["energy"] == pytest.approx(calc.get_property("energy", atoms), abs=1e-10)
        np.testing.assert_allclose(results["forces"], calc.get_property("forces", atoms), atol=1e-10)
        assert results["energies"].shape == (len(atoms),)
    assert found[3]["energy"] != found[4]["energy"]


def test_batches_of_nothing(potential):
    calc = TorchMDNet2Calculator(potential)
    assert list(calc.evaluate([])) == []
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        list(calc.evaluate(frames(), batch_size=0))


def test_batches_with_stress(potential):
    calc = TorchMDNet2Calculator(potential)
    crystal = frames()[1]
    for results in calc.evaluate([crystal, crystal], stress=True):
        np.testing.assert_allclose(results["stress"], calc.get_property("stress", crystal), atol=1e-12)
    with pytest.raises(UnknownElement, match="frame 1: atom 1 is S"):
        list(calc.evaluate([crystal, molecule("CH3SH")]))


def test_mean_and_spread(three):
    atoms = frames()[1]
    atoms.calc = CommitteeCalculator(iter(three))
    singles = [TorchMDNet2Calculator(p) for p in three]
    for name in ("energy", "forces", "stress", "energies"):
        values = np.array([calc.get_property(name, atoms) for calc in singles])
        np.testing.assert_allclose(atoms.calc.get_property(name, atoms), values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(atoms.calc.get_property(f"{name}_std", atoms), values.std(0, ddof=1), rtol=1e-12)
    assert atoms.get_potential_energy() == atoms.calc.get_property("free_energy", atoms)
    assert atoms.calc.get_property("forces_std", atoms).max() > 1e-3


def test_trajectory_of_a_committee(three):
    """On the static buffers of the members."""
    calc, singles, atoms = CommitteeCalculator(three), [TorchMDNet2Calculator(p) for p in three], frames()[1]
    for seed in range(4):
        atoms.rattle(0.05, seed=seed)
        values = np.array([single.get_property("forces", atoms) for single in singles])
        np.testing.assert_allclose(calc.get_property("forces", atoms), values.mean(0), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(calc.get_property("forces_std", atoms), values.std(0, ddof=1), rtol=1e-8, atol=1e-12)


def test_committee_follows_the_structure(three):
    atoms = molecule("H2O")
    atoms.calc = CommitteeCalculator(three)
    first = atoms.get_potential_energy()
    atoms.info["charge"] = 1
    second = atoms.get_potential_energy()
    atoms.positions[0, 2] += 0.1
    assert len({first, second, atoms.get_potential_energy()}) == 3
    with pytest.raises(NoStress):
        atoms.get_stress()
    atoms.positions[1] = np.nan
    with pytest.raises(ValueError, match="atom 1"):
        atoms.get_forces()


def test_copies_and_refusals(three):
    calc = CommitteeCalculator(three)
    expected = calc.get_property("energy_std", molecule("H2O"))
    for other in (copy.deepcopy(calc), pickle.loads(pickle.dumps(calc))):
        assert other.get_property("energy_std", molecule("H2O")) == expected
    for models in (three[:1], [], three[0], "model.tmn"):
        with pytest.raises(ValueError, match="at least two"):
            CommitteeCalculator(models)


def test_identical_members_do_not_disagree(potential):
    calc = CommitteeCalculator([potential, potential])
    assert calc.get_property("energy_std", molecule("H2O")) == 0
