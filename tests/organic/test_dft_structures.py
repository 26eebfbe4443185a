"""scripts/organic/dft_structures.py: relaxed conformers and pairs, without those of files."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.io import write

WATER = molecule("H2O")


@pytest.fixture
def structures(scripts):
    return scripts("dft_structures")


@pytest.fixture
def run(structures, scripts, tmp_path, monkeypatch):
    """Calls the program, and reads the shard that it writes."""

    def made(kind, path, *options):
        target = tmp_path / "found.npz"
        words = ["dft_structures.py", kind, path, target, "--model", "organic-small", *options]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        structures.main()
        return list(scripts("shards").read_shard(target))

    return made


@pytest.fixture
def pair(scripts):
    def made(name, distance, other=WATER):
        atoms = WATER + Atoms(other.numbers, np.add(other.positions, [0, 0, distance]))
        return scripts("shards").Geometry(name, atoms.numbers, atoms.positions, 0)

    return made


def test_pairs_are_relaxed_and_every_second_moved_apart(run, pair, scripts, tmp_path):
    path = tmp_path / "train-dimers-0000.npz"
    given = [pair("O.O", 3.4), pair("O.N", 3.6, molecule("NH3")), pair("O.C", 4.0, molecule("CH4"))]
    scripts("shards").write_shard(path, [*given, *given])
    found = run("pairs", path)
    assert sorted(g.name for g in found) == ["O.C", "O.N", "O.O"]  # one of each name
    moved = {g.name: np.linalg.norm(g.positions[3:].mean(0) - g.positions[:3].mean(0)) for g in found}
    assert all(2.2 < distance < 8 for distance in moved.values())
    write(tmp_path / "known.xyz", WATER + molecule("NH3"))
    found = run("pairs", path, "--without", tmp_path / "known.xyz", "--atoms", 7)
    assert [g.name for g in found] == ["O.O"]


def test_two_molecules_are_moved_apart_along_their_centres(structures, pair):
    rng = np.random.default_rng(0)
    one = pair("O.O", 3.0)
    other = structures.moved_apart(one, rng)
    assert np.array_equal(other.positions[:3], one.positions[:3])
    change = other.positions[3:] - one.positions[3:]
    assert np.allclose(change, change[0]) and np.allclose(change[0, :2], 0) and 3 * 0.9 - 3 <= change[0, 2] <= 3 * 0.8
    together = one._replace(positions=one.positions * 0.3)
    assert structures.moved_apart(together, rng) is together


def test_conformers_differ_and_the_last_is_displaced(run, tmp_path):
    pytest.importorskip("rdkit")
    (tmp_path / "two.smi").write_text("OCCCO\nCC(=O)[O-]\n")
    found = run("conformers", tmp_path / "two.smi")
    kinds = {name: [g for g in found if g.name == name] for name in ("OCCCO", "CC(=O)[O-]")}
    assert len(kinds["OCCCO"]) == 4 and 1 <= len(kinds["CC(=O)[O-]"]) < 4
    assert {g.charge for g in kinds["CC(=O)[O-]"]} == {-1}
    lengths = [np.linalg.norm(g.positions[0] - g.positions[1]) for g in kinds["OCCCO"]]
    assert np.ptp(lengths[:3]) < 0.03 and abs(lengths[3] - np.mean(lengths[:3])) > 1e-3
