"""scripts/organic/stretched.py: stretched bonds of every type; needs no RDKit."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import molecule
from organic_world import springs


def geometry(scripts, atoms: Atoms):
    return scripts("shards").Geometry(atoms.get_chemical_formula(), atoms.numbers, atoms.positions, 0)


def test_one_bond_is_longer(scripts):
    """What hangs on it moves with it; no other bond changes by more than thermal displacements."""
    stretched, shards = scripts("stretched"), scripts("shards")
    ethanol = geometry(scripts, molecule("CH3CH2OH"))
    bonds = shards.bonded(ethanol)
    length = np.linalg.norm(ethanol.positions[:, None] - ethanol.positions[None], axis=2)
    found = stretched.stretched_bonds([ethanol], 100, np.random.default_rng(0))
    assert len(found) > 80
    ratios = []
    for made in found:
        ratio = (np.linalg.norm(made.positions[:, None] - made.positions[None], axis=2) / (length + np.eye(9)))[bonds]
        ratio = np.sort(ratio)[::2]  # each bond is there twice
        assert abs(ratio[:-1] - 1).max() < 0.25
        ratios.append(ratio[-1])
    assert min(ratios) < 1.3 and 1.9 < max(ratios) < 2.3


def test_a_ring_opens_at_one_atom(scripts):
    """In a ring the atom moves with what hangs on it alone."""
    stretched, shards = scripts("stretched"), scripts("shards")
    benzene = geometry(scripts, molecule("C6H6"))
    bonds = shards.bonded(benzene)
    moved = stretched.side(bonds, 0, 1)
    assert sorted(moved) == sorted([1, *(k for k in range(6, 12) if bonds[1, k])]) and len(moved) == 2


def test_rare_bonds_come_often(scripts):
    """One S–H bond beside hundreds of C–H bonds."""
    stretched, rng = scripts("stretched"), np.random.default_rng(0)
    propane, thiol = geometry(scripts, molecule("C3H8")), geometry(scripts, molecule("CH3SH"))
    found = stretched.stretched_bonds([propane] * 100 + [thiol], 400, rng)
    assert sum(16 in made.numbers for made in found) > 20  # by chance alone: two
    assert stretched.stretched_bonds([], 10, rng) == []


def test_walls_beside_a_teacher(scripts):
    """A student with half of the teacher's springs lacks half of the energy; no bond of a ring is stretched."""
    walls, teacher = scripts("walls"), springs(scripts)

    class Soft:
        @staticmethod
        def energies(numbers, positions, charge):
            return 0.5 * teacher.label(numbers, positions, charge).energy

    ethanol, rng = geometry(scripts, molecule("CH3CH2OH")), np.random.default_rng(0)
    found = list(walls.scans(ethanol, rng))
    assert sorted(kind for kind, _ in found) == ["C–H", "N–H, O–H, S–H", "heavy atoms", "heavy atoms"]
    for _, positions in found:
        assert np.array_equal(positions[0], ethanol.positions)
        energies = walls.differences(ethanol, positions, teacher, Soft)
        assert energies[0, 0] == 0 and energies[0, -1] > 1
        np.testing.assert_allclose(energies[1], 0.5 * energies[0], rtol=1e-9)
    assert {kind for kind, _ in walls.scans(geometry(scripts, molecule("C6H6")), rng)} == {"C–H"}
