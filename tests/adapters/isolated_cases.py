"""Molecules in boxes whose hosts wrap their atoms, which the tests of isolated molecules share."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule

from torchmdnet2 import Potential

CELLS = {
    "cube": np.eye(3) * 16.0,
    "triclinic": np.array([[17.0, 0, 0], [6.0, 16.0, 0], [-5.0, 7.0, 16.0]]),
    "long": np.diag([14.0, 15.0, 40.0]),
}


@cache
def charged_potential() -> Potential:
    """Predicted charges in a Coulomb energy of all pairs, random weights, float64."""
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0},
        "properties": [{"name": "charges"}],
        "priors": [{"name": "coulomb", "charges": "predicted", "method": "all_pairs"}],
        "elements": [1, 6, 8],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Potential.from_config(config).double().eval()


def acetate() -> Atoms:
    """CH3COO−, seven atoms: C O O C H H H."""
    atoms = molecule("CH3COOH")
    hydroxyl = next(i for i in np.flatnonzero(atoms.numbers == 1) if min(atoms.get_distances(i, [1, 2])) < 1.2)
    del atoms[int(hydroxyl)]
    atoms.rattle(0.03, seed=3)
    return atoms


def wrapped(atoms: Atoms, cell: np.ndarray, seed: int, pbc=True) -> Atoms:
    """The same molecule anywhere in a periodic cell, each atom in some image."""
    rng = np.random.default_rng(seed)
    moved = atoms.copy()
    moved.set_cell(cell)
    moved.pbc = pbc
    images = rng.integers(-2, 3, (len(atoms), 3)) * moved.pbc
    moved.positions += rng.uniform(-1, 1, 3) @ cell + images @ cell
    return moved


def bonds_of(atoms: Atoms) -> list[tuple[int, int]]:
    near = atoms.get_all_distances()
    longest = np.where((atoms.numbers[:, None] == 1) | (atoms.numbers == 1), 1.25, 1.7)
    return [(i, j) for i in range(len(atoms)) for j in range(i) if near[i, j] < longest[i, j]]


def acetate_in_water(box: float = 18.0, copies: int = 1):
    """Topology and positions in nm of acetate in TIP3P water with sodium, and the force field.

    The types of acetate are those of amber14's proteins, which come with OpenMM.
    """
    import openmm
    from openmm import app, unit

    ion = acetate()
    names = [f"{symbol}{k}" for k, symbol in enumerate(ion.symbols)]
    types = ["CO", "O2", "O2", "CT", "HC", "HC", "HC"]
    charges = [0.8, -0.8, -0.8, -0.2, 0.0, 0.0, 0.0]
    members = "".join(
        f'<Atom name="{n}" type="protein-{t}" charge="{q}"/>' for n, t, q in zip(names, types, charges, strict=True)
    )
    members += "".join(f'<Bond atomName1="{names[i]}" atomName2="{names[j]}"/>' for i, j in bonds_of(ion))
    xml = f'<ForceField><Residues><Residue name="ACT">{members}</Residue></Residues></ForceField>'
    field = app.ForceField("amber14/protein.ff14SB.xml", "amber14/tip3p.xml", io.StringIO(xml))
    topology, positions = app.Topology(), []
    for k in range(copies):
        residue = topology.addResidue("ACT", topology.addChain())
        elements = map(app.Element.getBySymbol, ion.symbols)
        atoms = [topology.addAtom(n, e, residue) for n, e in zip(names, elements, strict=True)]
        for i, j in bonds_of(ion):
            topology.addBond(atoms[i], atoms[j])
        positions.append(ion.positions - ion.positions.mean(0) + box / 2 + [5.0 * k, 0, 0])
    modeller = app.Modeller(topology, np.concatenate(positions) * unit.angstrom)
    modeller.addSolvent(field, boxSize=openmm.Vec3(box, box, box) / 10 * unit.nanometer)
    where = np.array(modeller.positions.value_in_unit(unit.nanometer))
    return modeller.topology, where, field
