"""scripts/organic/shifts.py: hydrogen between two atoms of a molecule; needs no RDKit."""

import numpy as np
from ase.build import molecule


def geometry(shards, name):
    atoms = molecule(name)
    return shards.Geometry(name, atoms.numbers.astype(np.int64), atoms.positions, 0)


def test_which_shifts(scripts):
    """The methyl group of acetaldehyde gives hydrogen to the other carbon and to oxygen, CHO to oxygen only."""
    shards, shifts = scripts("shards"), scripts("shifts")
    acetaldehyde = geometry(shards, "CH3CHO")
    bonds = shards.bonded(acetaldehyde)
    methyl = int(np.flatnonzero((acetaldehyde.numbers == 6) & (bonds.sum(0) == 4))[0])
    oxygen = int(np.flatnonzero(acetaldehyde.numbers == 8)[0])
    carbonyl = int(np.flatnonzero((acetaldehyde.numbers == 6) & (bonds.sum(0) == 3))[0])
    found = shifts.shifts(acetaldehyde)
    assert sorted({(d, a) for _, d, a in found}) == sorted([(methyl, carbonyl), (methyl, oxygen), (carbonyl, oxygen)])
    assert len(found) == 3 * 2 + 1
    assert not shifts.shifts(geometry(shards, "H2O"))  # between oxygen atoms it is for protons.py


def test_one_hydrogen_moves(scripts):
    shards, shifts = scripts("shards"), scripts("shifts")
    acetaldehyde, rng = geometry(shards, "CH3CHO"), np.random.default_rng(0)
    made = shifts.hydrogen_shifts(200 * [acetaldehyde], 300, rng)
    assert len(made) > 200
    farthest = []
    for moved in made:
        steps = np.linalg.norm(moved.positions - acetaldehyde.positions, axis=1)
        farthest.append(steps.max())
        assert moved.numbers[steps.argmax()] == 1 and np.sort(steps)[-2] < 0.2
        apart = np.linalg.norm(moved.positions[:, None] - moved.positions[None], axis=2)
        assert apart[np.triu_indices(len(apart), 1)].min() > 0.7
    assert max(farthest) > 1.0


def test_a_test_is_left_out(scripts):
    shards, shifts = scripts("shards"), scripts("shifts")
    assert shifts.shifts(geometry(shards, "HCN"))
    assert shifts.hydrogen_shifts([geometry(shards, "HCN")], 10, np.random.default_rng(0)) == []
