"""The OpenMM force: values (bar R27), and OpenMM's own machinery on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

openmm = pytest.importorskip("openmm")
from openmm import unit  # noqa: E402
from openmm_cases import KJ_MOL, boxed, context_of, ethanol, evaluate, ml_system, topology_of  # noqa: E402

from torchmdnet2 import System  # noqa: E402
from torchmdnet2.adapters.ase import TorchMDNet2Calculator  # noqa: E402
from torchmdnet2.adapters.openmm import create_force  # noqa: E402


@pytest.mark.parametrize("kind", ["vacuum", "orthorhombic", "triclinic"])
@pytest.mark.parametrize("platform", ["Reference", "CPU"])
def test_equals_potential_and_ase(potential, model_file, kind, platform):
    """Bar R27; atoms far outside of the box too."""
    atoms = ethanol() if kind == "vacuum" else boxed(kind)
    if kind != "vacuum":
        atoms.positions[3] += 2 * atoms.cell[0] - atoms.cell[2]
        alone = atoms.copy()
        alone.pbc = False
        alone.positions[3] -= 2 * atoms.cell[0] - atoms.cell[2]
        difference = potential(System.from_ase(atoms)).energy - potential(System.from_ase(alone)).energy
        assert abs(float(difference.detach())) > 1e-3  # the images matter
    energy, forces = evaluate(context_of(ml_system(model_file, atoms), atoms, platform))
    expected = potential(System.from_ase(atoms))
    calc = TorchMDNet2Calculator(model_file)
    tolerance = 1e-9 if platform == "Reference" else 1e-5  # the CPU platform has positions in float32
    assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, rel=tolerance)
    assert energy == pytest.approx(calc.get_property("energy", atoms) * KJ_MOL, rel=tolerance)
    scale = np.abs(forces).max()
    np.testing.assert_allclose(forces, calc.get_property("forces", atoms) * KJ_MOL * 10, atol=tolerance * scale)
    assert scale > 10


@pytest.mark.parametrize("name", ["periodic", "isolated"])
def test_flags_of_a_force(model_file, name):
    with pytest.raises(ValueError, match=f"{name} must be None, True or False, got 'no'"):
        create_force(model_file, topology_of(ethanol()), **{name: "no"})


def test_float32_network(potential, model_file):
    energy, forces = evaluate(context_of(ml_system(model_file, ethanol(), dtype=torch.float32), ethanol()))
    expected = potential(System.from_ase(ethanol()))
    assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, rel=1e-5)
    np.testing.assert_allclose(forces, expected.forces.numpy() * KJ_MOL * 10, atol=1e-5 * np.abs(forces).max())


def test_mixed_precision_needs_a_gpu(model_file):
    with pytest.raises(ValueError, match="precision='mixed': there are kernels for a GPU only"):
        ml_system(model_file, ethanol(), precision="mixed")


@pytest.mark.parametrize("kind", ["vacuum", "triclinic"])
def test_subset(potential, model_file, kind):
    """The model sees the chosen atoms only, in the order given."""
    atoms = (ethanol() if kind == "vacuum" else boxed(kind)) + Atoms("Ar2", [[1, 1, 1], [2, 2, 2]])
    order = [4, 0, 1, 2, 5, 3]
    system = ml_system(model_file, atoms, order)  # argon is unknown to the model, and need not be known
    energy, forces = evaluate(context_of(system, atoms))
    expected = potential(System.from_ase(atoms[order]))
    assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, rel=1e-9)
    np.testing.assert_allclose(forces[order], expected.forces.numpy() * KJ_MOL * 10, atol=1e-7)
    rest = sorted(set(range(len(atoms))) - set(order))
    assert not forces[rest].any()


@pytest.mark.parametrize("kind", ["vacuum", "triclinic"])
def test_forces_are_the_gradient_of_the_energy(model_file, kind):
    """Finite differences through OpenMM; nothing in OpenMM checks that."""
    atoms = ethanol() if kind == "vacuum" else boxed(kind)
    context = context_of(ml_system(model_file, atoms), atoms)
    _, forces = evaluate(context)
    pos, step = atoms.positions / 10, 1e-5
    for atom, axis in [(0, 0), (2, 1), (5, 2), (8, 0)]:
        energies = []
        for sign in (1, -1):
            moved = pos.copy()
            moved[atom, axis] += sign * step
            context.setPositions(moved)
            energies.append(evaluate(context)[0])
        assert forces[atom, axis] == pytest.approx((energies[1] - energies[0]) / (2 * step), abs=1e-4)


def test_box_changes_are_seen(potential, model_file):
    """As a Monte Carlo barostat makes them."""
    atoms = boxed("triclinic")
    context = context_of(ml_system(model_file, atoms), atoms)
    before, _ = evaluate(context)
    atoms.set_cell(atoms.cell.array * 1.05)
    context.setPeriodicBoxVectors(*(atoms.cell.array / 10))
    energy, _ = evaluate(context)
    expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
    assert energy == pytest.approx(expected, rel=1e-9) and energy != pytest.approx(before, rel=1e-4)


def test_charge(potential, model_file):
    system = System.from_ase(ethanol()).replace(charge=torch.tensor([1.0], dtype=torch.float64))
    energy, _ = evaluate(context_of(ml_system(model_file, ethanol(), charge=1), ethanol()))
    assert energy == pytest.approx(float(potential(system).energy.detach()) * KJ_MOL, rel=1e-9)
    with pytest.raises(ValueError, match="whole number"):
        ml_system(model_file, ethanol(), charge=0.5)


@pytest.mark.parametrize(
    ("subset", "words"),
    [
        ([0, 1, 1], "an index is given twice"),
        ([0, 99], "index 99 is outside this topology, which has 9 atoms"),
        ([-1], "index -1 is outside this topology"),
        ([], "the model has no atoms to act on"),
    ],
)
def test_atoms_that_cannot_be_chosen(model_file, subset, words):
    with pytest.raises(ValueError, match=words):
        ml_system(model_file, ethanol(), subset)


def test_units_are_codata():
    from torchmdnet2 import units

    assert 1 / units.KJ_MOL == pytest.approx(KJ_MOL, rel=1e-12) == pytest.approx(96.48533212331, rel=1e-12)
    assert units.factor("length", "nm") == 10


def test_minimiser(model_file):
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms)
    before, _ = evaluate(context)
    openmm.LocalEnergyMinimizer.minimize(context, tolerance=50, maxIterations=20)
    after, forces = evaluate(context)
    assert after < before and np.isfinite(forces).all()


@pytest.mark.parametrize("platform", ["Reference", "CPU"])
def test_constant_energy(model_file, platform):
    """Energies and forces belong together over a trajectory, with OpenMM's masses and times."""
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms, platform, timestep=0.0002)
    context.setVelocitiesToTemperature(100, 1)
    totals, potentials = [], []
    for _ in range(20):
        context.getIntegrator().step(2)
        state = context.getState(getEnergy=True)
        energies = [state.getPotentialEnergy(), state.getKineticEnergy()]
        potential, kinetic = (e.value_in_unit(unit.kilojoule_per_mole) for e in energies)
        totals.append(potential + kinetic)
        potentials.append(potential)
    assert np.ptp(potentials) > 1
    assert np.ptp(totals) < 0.02 * np.ptp(potentials)


def test_two_molecules_in_one_process(potential, model_file):
    contexts = [(context_of(ml_system(model_file, a), a), a) for a in (ethanol(), molecule("H2O"), boxed("triclinic"))]
    for context, atoms in contexts * 2:
        expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
        assert evaluate(context)[0] == pytest.approx(expected, rel=1e-9)
