"""One model, every way to it: the same energies and forces (bars R26, R27)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read, write

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.cli import main

CELLS = {
    "vacuum": None,
    "orthorhombic": [5.0, 5.5, 6.0],
    "triclinic": [[6, 0, 0], [1.5, 5.5, 0], [-1.0, 2.0, 5.0]],
}
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # relative


def structure(cell: str) -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    if CELLS[cell] is not None:
        atoms.set_cell(CELLS[cell])
        atoms.pbc = True
    return atoms


def through_potential(model, atoms, dtype, folder):
    result = load(model, dtype=getattr(torch, dtype)).reference(System.from_ase(atoms))
    return float(result.energy.detach()), result.forces.numpy()


def through_evaluator(model, atoms, dtype, folder):
    result = Evaluator(load(model, dtype=getattr(torch, dtype)))(System.from_ase(atoms))
    return float(result.energy), result.forces.numpy()


def through_ase(model, atoms, dtype, folder):
    calc = TorchMDNet2Calculator(model, dtype=dtype)
    return calc.get_property("energy", atoms), calc.get_property("forces", atoms)


def through_openmm(model, atoms, dtype, folder):
    pytest.importorskip("openmm")
    from openmm_cases import KJ_MOL, context_of, evaluate, ml_system

    energy, forces = evaluate(context_of(ml_system(model, atoms, dtype=dtype), atoms))
    return energy / KJ_MOL, forces / KJ_MOL / 10


def through_the_command_line(model, atoms, dtype, folder):
    write(folder / "start.traj", atoms)
    common = ["--steps", "1", "--every", "1", "--dtype", dtype, "--device", "cpu", "--temperature", "10"]
    assert main(["md", str(model), str(folder / "start.traj"), *common, "--output", str(folder / "out.traj")]) == 0
    frame = read(folder / "out.traj", 0)
    np.testing.assert_array_equal(frame.positions, atoms.positions)
    return frame.get_potential_energy(), frame.get_forces()


WAYS = [through_potential, through_evaluator, through_ase, through_openmm, through_the_command_line]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_same_energy_and_forces(potential, model_file, tmp_path, way, cell, dtype):
    """Against the Potential in float64."""
    atoms = structure(cell)
    exact = potential(System.from_ase(atoms))
    energy, forces = way(model_file, atoms, dtype, tmp_path)
    assert energy == pytest.approx(float(exact.energy.detach()), rel=TOLERANCE[dtype])
    largest = float(exact.forces.abs().max())
    np.testing.assert_allclose(forces, exact.forces.numpy(), rtol=0, atol=TOLERANCE[dtype] * largest)
    assert largest > 0.3
