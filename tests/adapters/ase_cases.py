"""Structures that the tests of the ASE calculator share."""

from __future__ import annotations

from ase import Atoms
from ase.build import bulk, molecule

from torchmdnet2.adapters.ase import TorchMDNet2Calculator


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
    evaluate = calc._evaluate

    def counted(structure, stress=False):
        calls.append(bool(stress))
        return evaluate(structure, stress)

    calc._evaluate = counted
    return calls
