"""scripts/organic/dft_structures.py: relaxed conformers and pairs, without those of files."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.io import write

from torchmdnet2 import relax

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


def test_pairs_are_relaxed_and_every_second_moved(run, pair, scripts, structures, tmp_path):
    path = tmp_path / "train-dimers-0000.npz"
    given = {
        "O.O": pair("O.O", 3.4),
        "O.N": pair("O.N", 3.6, molecule("NH3")),
        "O.C": pair("O.C", 4.0, molecule("CH4")),
    }
    scripts("shards").write_shard(path, [*given.values(), *given.values()])
    found = run("pairs", path)
    assert sorted(g.name for g in found) == ["O.C", "O.N", "O.O"]  # one of each name
    for k, one in enumerate(found):
        rounded = next(g for g in scripts("shards").read_shard(path) if g.name == one.name)
        (outcome,) = relax("organic-small", [Atoms(one.numbers, rounded.positions, info={"charge": 0})], steps=40)
        expected = outcome.structures[0].positions
        change = (one.positions - expected) - (one.positions - expected)[0]  # shards are centred
        assert np.allclose(change[:3], 0, atol=3e-3) and np.allclose(change[3:], change[3], atol=3e-3)
        assert (np.linalg.norm(change[3]) < 3e-3) == bool(k % 2)
    write(tmp_path / "known.xyz", WATER + molecule("NH3"))
    (tmp_path / "found.npz").unlink()
    found = run("pairs", path, "--without", tmp_path / "known.xyz", "--atoms", 7)
    assert [g.name for g in found] == ["O.O"]


def test_pairs_of_smiles_touch(run, structures, tmp_path):
    pytest.importorskip("rdkit")
    (tmp_path / "pairs.smi").write_text("CO.CC(=O)[O-]\nC[NH3+].O\n")
    given = {g.name: g for g in structures.placed(tmp_path / "pairs.smi")}
    found = run("pairs", tmp_path / "pairs.smi")
    assert {g.name: g.charge for g in found} == {"CO.CC(=O)[O-]": -1, "C[NH3+].O": 1}
    for one in (*given.values(), *found):
        first = {"CO.CC(=O)[O-]": 6, "C[NH3+].O": 8}[one.name]  # atoms
        distances = np.linalg.norm(one.positions[:first, None] - one.positions[None, first:], axis=-1)
        assert 1.3 < distances.min() < 4.5
    assert all(np.array_equal(given[g.name].numbers, g.numbers) for g in found)


@pytest.mark.parametrize("line", ["CO", "CO.not-a-molecule", ""])
def test_a_line_that_is_no_pair_is_named(run, tmp_path, line):
    pytest.importorskip("rdkit")
    (tmp_path / "pairs.smi").write_text(f"CO.O its name\n{line}\nO.O\n")
    with pytest.raises(SystemExit, match=r"pairs.smi, line 2: .* not SMILES as A.B"):
        run("pairs", tmp_path / "pairs.smi")


def test_neighbors_in_a_liquid(run, tmp_path):
    """Whole molecules that are nearest to one, across the walls of the cell; as many atoms as accepted."""
    from torchmdnet2.benchmark import water_box

    cell = water_box(3)
    atoms = Atoms(cell.z.numpy(), cell.pos.numpy(), cell=cell.cell[0].numpy(), pbc=True)
    write(tmp_path / "box.traj", [atoms, atoms])
    found = run("liquid", tmp_path / "box.traj", "--number", 6, "--molecules", 4, 6, "--atoms", 18)
    assert len(found) == 6 and {len(g.numbers) for g in found} <= {12, 15, 18}
    lengths = atoms.get_all_distances(mic=True)
    nearest = np.sort(lengths[np.ix_(atoms.numbers == 8, atoms.numbers == 8)], 1)
    for one in found:
        count = len(one.numbers) // 3
        assert one.name == ".".join(["O"] * count) and sorted(one.numbers) == [1] * 2 * count + [8] * count
        apart = np.linalg.norm(one.positions[:, None] - one.positions[None], axis=2)
        assert ((0 < apart) & (apart < 1.2)).sum() == 4 * count  # O–H of both atoms: no molecule is torn
        oxygen = apart[np.ix_(one.numbers == 8, one.numbers == 8)]
        assert np.abs(np.sort(oxygen[0])[:2, None] - nearest[:, :2].T).min(1).max() < 0.02


def test_groups_of_three_touch(structures, tmp_path):
    pytest.importorskip("rdkit")
    (tmp_path / "groups.smi").write_text("C1CCCC1.C1CCCC1.O\n")
    (one,) = structures.placed(tmp_path / "groups.smi")
    assert len(one.numbers) == 33
    apart = np.linalg.norm(one.positions[:, None] - one.positions[None], axis=2)
    for part in (slice(0, 15), slice(15, 30), slice(30, 33)):
        rest = np.ones(33, dtype=bool)
        rest[part] = False
        assert 1.5 < apart[part][:, rest].min() < 3.5
    moved = structures.moved_apart(one, np.random.default_rng(0))
    scale = [np.linalg.norm(g.positions[30:].mean(0) - g.positions[:15].mean(0)) for g in (one, moved)]
    assert scale[1] / scale[0] == pytest.approx(np.random.default_rng(0).uniform(0.9, 1.8))


def test_a_shard_that_is_there_is_kept(run, pair, scripts, tmp_path):
    """Its energies would be those of other structures."""
    path = tmp_path / "found.npz"
    scripts("shards").write_shard(path, [pair("O.O", 3.4)])
    with pytest.raises(SystemExit, match="give another name"):
        run("pairs", path)


def test_two_molecules_are_moved_apart_along_their_centres(structures, pair):
    rng = np.random.default_rng(0)
    one = pair("O.O", 3.0)
    other = structures.moved_apart(one, rng)
    assert np.array_equal(other.positions[:3], one.positions[:3])
    change = other.positions[3:] - one.positions[3:]
    assert np.allclose(change, change[0]) and np.allclose(change[0, :2], 0) and 3 * 0.9 - 3 <= change[0, 2] <= 3 * 0.8
    together = one._replace(positions=one.positions * 0.3)
    assert structures.moved_apart(together, rng) is together


def test_conformers_differ_and_a_fourth_is_displaced(run, tmp_path, capsys):
    pytest.importorskip("rdkit")
    (tmp_path / "two.smi").write_text("OCCCO\nCC(=O)[O-]\nnot-a-molecule\n")
    found = run("conformers", tmp_path / "two.smi")
    assert "1 failed" in capsys.readouterr().out
    kinds = {name: [g for g in found if g.name == name] for name in ("OCCCO", "CC(=O)[O-]")}
    assert len(kinds["OCCCO"]) == 4 and 1 <= len(kinds["CC(=O)[O-]"]) < 4
    assert {g.charge for g in kinds["CC(=O)[O-]"]} == {-1}
    lengths = [np.linalg.norm(g.positions[0] - g.positions[1]) for g in kinds["OCCCO"]]
    assert np.ptp(lengths[:3]) < 0.03 and abs(lengths[3] - np.mean(lengths[:3])) > 1e-3
