"""scripts/organic/substitutions.py: a lone pair takes the place of a leaving group; needs no RDKit."""

from __future__ import annotations

import numpy as np
import pytest
from ase.build import molecule
from ase.data import covalent_radii

RADII = {1: 1.1, 6: 1.7, 7: 1.55, 8: 1.52, 9: 1.47, 17: 1.75, 35: 1.85}


@pytest.fixture
def world(scripts):
    shards = scripts("shards")

    def geometry(name: str):
        atoms = molecule(name)
        return shards.Geometry(name, atoms.numbers, atoms.positions, 0)

    ions = [shards.Geometry(f"[{z}-]", np.array([z]), np.zeros((1, 3)), -1) for z in (9, 17, 35)]
    return scripts("substitutions"), geometry, ions


def distances(made) -> np.ndarray:
    return np.linalg.norm(made.positions[:, None] - made.positions[None], axis=2)


def test_halfway_the_other_groups_are_in_a_plane(world):
    """And after it they are on the other side, all at the lengths that they had."""
    substitutions, geometry, _ = world
    chloride = geometry("CH3Cl")
    ((c, y),) = substitutions.centres(chloride)
    before = chloride.positions - chloride.positions[c]
    along = before[y] / np.linalg.norm(before[y])
    for order in (0.05, 0.5, 0.95):
        moved = substitutions.turned(chloride, c, y, order, 2.3)
        moved = moved - moved[c]
        hydrogens = np.flatnonzero(chloride.numbers == 1)
        assert np.linalg.norm(moved[y]) == pytest.approx(2.3)
        lengths = np.linalg.norm(moved[hydrogens], axis=1)
        assert lengths == pytest.approx(np.linalg.norm(before[hydrogens], axis=1))
        assert moved[hydrogens] @ along / lengths == pytest.approx((2 * order - 1) / 3)
        assert distances(chloride._replace(positions=moved[hydrogens])).max() < 2.0  # still apart from each other
        assert distances(chloride._replace(positions=moved[hydrogens]))[0, 1:].min() > 1.6


def test_bonds_are_long_where_both_are_weak(world):
    substitutions, geometry, ions = world
    chloride, bromide = geometry("CH3CH2Cl"), ions[2]
    ((c, y),) = substitutions.centres(chloride)
    rng, pairs = np.random.default_rng(0), []
    for _ in range(200):
        made = substitutions.substituted(chloride, c, y, bromide, 0, RADII, rng)
        assert made is not None and made.charge == -1 and len(made.numbers) == 9
        apart = distances(made)
        assert np.delete(apart[8, :8], c).min() > 1.5
        assert (apart + 9 * np.eye(9)).min() > 0.9
        x, leaving = made.positions[8] - made.positions[c], made.positions[y] - made.positions[c]
        assert x @ leaving / np.linalg.norm(x) / np.linalg.norm(leaving) < -0.98  # on a line
        pairs.append((apart[c, 8], apart[c, y]))
    new, old = np.array(pairs).T
    assert new.min() < 2.1 and new.max() > 3.2 and old.min() < 1.9 and old.max() > 3.0
    assert ((new > 2.1) | (old > 2.0)).all()  # never two whole bonds


def test_atoms_on_top_of_each_other_are_left_out(world, monkeypatch):
    """Where a group is turned into another one; a higher limit stands for that."""
    substitutions, geometry, ions = world
    chloride, rng = geometry("CH3CH2Cl"), np.random.default_rng(0)
    ((c, y),) = substitutions.centres(chloride)
    monkeypatch.setattr(substitutions, "CLOSEST", 0.94)
    made = [substitutions.substituted(chloride, c, y, ions[2], 0, RADII, rng) for _ in range(100)]
    kept = [one for one in made if one is not None]
    assert 0 < len(kept) < len(made)
    for one in kept:
        radii = covalent_radii[one.numbers]
        apart = distances(one) / (radii[:, None] + radii[None])
        assert apart[~np.eye(9, dtype=bool)].min() >= 0.94


def test_rings_and_crowded_carbons_are_left_out(world):
    substitutions, geometry, _ = world
    assert substitutions.centres(geometry("C2H6CHOH")) != []  # 2-propanol: two groups
    assert substitutions.centres(geometry("CF4")) == [] and substitutions.centres(geometry("C6H6")) == []
    assert substitutions.centres(geometry("CH2OCH2")) == []  # the oxygen of oxirane is in the ring


def test_benchmarks_are_left_out(world):
    """Of CH3Cl only the reactions with Br− and with the molecules are made."""
    substitutions, geometry, ions = world
    rng = np.random.default_rng(0)
    made = substitutions.substitutions([geometry("CH3Cl")], ions, RADII, 100, 64, rng)
    assert made and {35} == {int(g.numbers[-1]) for g in made if len(g.numbers) == 6}
    assert all(len(g.numbers) == 6 for g in made)  # CH3Cl takes no lone pair to itself
    with_water = substitutions.substitutions([geometry("CH3Cl"), geometry("H2O")], ions, RADII, 100, 64, rng)
    assert {len(g.numbers) for g in with_water} == {6, 8}
    assert substitutions.substitutions([geometry("C6H6")], ions, RADII, 10, 64, rng) == []
