"""scripts/organic/distil.py: turned bonds, copies of scans and their labels; the mean of several teachers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from ase.build import molecule
from organic_world import FOLDER, ROOT
from test_large import CHAINS, arrays_of, scan_of
from warm import warm_python

from torchmdnet2 import checkpoint, load
from torchmdnet2.data import open_dataset


@pytest.fixture
def world(scripts):
    """The scripts, and a function that returns a molecule of ASE as a geometry."""
    distil, shards = scripts("distil"), scripts("shards")

    def geometry(name):
        atoms = molecule(name)
        return shards.Geometry(name, atoms.numbers, atoms.positions, 0)

    return SimpleNamespace(
        distil=distil, large=scripts("large"), shards=shards, Model=scripts("teachers").Model, geometry=geometry
    )


def test_axes_are_bonds_that_turn(world):
    butane = world.geometry("trans-butane")
    axes = world.distil.axes_of(butane)
    assert len(axes) == 3  # each C-C bond; methyl groups turn too
    for axis in axes:
        assert axis.side[axis.j] and not axis.side[axis.i]
        crossing = world.shards.bonded(butane)[axis.side][:, ~axis.side].sum()
        assert crossing == 1  # the sides are joined by this bond alone
    assert world.distil.axes_of(world.geometry("C6H6")) == []  # a ring
    assert world.distil.axes_of(world.geometry("CH3OH")) != [] and world.distil.axes_of(world.geometry("CH4")) == []
    assert world.distil.axes_of(world.geometry("HCN")) == []  # N has no other atom


@pytest.mark.parametrize("angle", [0.3, np.pi, 2 * np.pi])
def test_a_turned_bond_changes_only_torsions(world, angle):
    butane = world.geometry("trans-butane")
    axis = max(world.distil.axes_of(butane), key=lambda found: min(found.side.sum(), (~found.side).sum()))
    moved = world.distil.turned_by(butane.positions, axis, angle)

    def distances(x):
        return np.linalg.norm(x[:, None] - x[None], axis=2)

    old, new = distances(butane.positions), distances(moved)
    for part in (axis.side, ~axis.side):
        np.testing.assert_allclose(new[np.ix_(part, part)], old[np.ix_(part, part)], atol=1e-12)
    bonds = world.shards.bonded(butane)
    near = bonds | (bonds.astype(int) @ bonds.astype(int) > 0)
    np.testing.assert_allclose(new[near], old[near], atol=1e-12)  # lengths and angles
    ends = [int(np.flatnonzero(bonds[k] & (butane.numbers > 1) & part)[0])
            for k, part in ((axis.i, ~axis.side), (axis.j, axis.side))]  # fmt: skip
    before, after = (torsion(x, ends[0], axis.i, axis.j, ends[1]) for x in (butane.positions, moved))
    assert np.cos(after - before - angle) == pytest.approx(1, abs=1e-9)


def test_molecules_of_a_pair_apart(world):
    """Dimers stay as they are within, other pairs become conformers; one molecule need not be known. No ions."""
    rng, make = np.random.default_rng(0), world.shards.Geometry
    water, methanol = world.geometry("H2O"), world.geometry("CH3OH")
    bent = methanol._replace(positions=methanol.positions + rng.normal(0, 0.1, (6, 3)))
    place = water.positions + np.array([3.0, 1, 0])
    pair = make("CH3OH.H2O", np.append(bent.numbers, water.numbers), np.append(bent.positions, place, 0), 0)
    atom = make("CH3OH.[Ar]", np.append(bent.numbers, 18), np.append(bent.positions, [[3.0, 0, 0]], 0), 0)
    salt = make("[Na+].[F-]", np.array([11, 9]), np.array([[0.0, 0, 0], [3, 0, 0]]), 0)
    known = {"CH3OH": [methanol], "H2O": [water]}

    def distances(x):
        return np.linalg.norm(x[:, None] - x[None], axis=2)

    for given, rigid, first in ((pair, True, bent), (pair, False, methanol), (atom, False, methanol)):
        found = world.distil.pair_apart(given, known, rng, rigid)
        assert (found.numbers == given.numbers).all() and (found.name, found.charge) == (given.name, given.charge)
        between = distances(found.positions)
        np.testing.assert_allclose(between[:6, :6], distances(first.positions), atol=1e-12)
        np.testing.assert_allclose(between[6:, 6:], distances(given.positions[6:]), atol=1e-12)
        assert between[:6, 6:].min() >= world.distil.DISTANCE - 1e-9
    for name in ("CH3OH", "A.B", "CH3OH.H2O.H2O", "H2O.CH4O"):  # H2O has not as many atoms as it should
        assert world.distil.pair_apart(pair._replace(name=name), {**known, "CH4O": [water]}, rng, False) is None
    sodium = make("[Na+]", np.array([11]), np.zeros((1, 3)), 1)
    assert world.distil.pair_apart(pair._replace(charge=1), known, rng, False) is None
    assert world.distil.pair_apart(salt, {"[Na+]": [sodium]}, rng, False) is None


def test_pairs_apart_are_a_kind_of_their_own(world, scripts, tmp_path, monkeypatch):
    shards, label = world.shards, scripts("label")
    water, methanol = world.geometry("H2O"), world.geometry("CH3OH")
    numbers, place = np.append(methanol.numbers, water.numbers), water.positions + np.array([4.0, 1, 0])
    pair = shards.Geometry("CH3OH.H2O", numbers, np.append(methanol.positions, place, 0), 0)
    for kind, geometries in (("conformers", [water, methanol]), ("dimers", [pair]), ("protons", [methanol, pair])):
        shards.write_shard(tmp_path / f"train-{kind}-0000.npz", geometries)
    monkeypatch.setattr(sys, "argv", ["distil.py", "apart", str(tmp_path)])
    world.distil.main()
    names = sorted(path.name for path in tmp_path.glob("train-apart-*"))
    assert names == ["train-apart-dimers-0000.npz", "train-apart-protons-0000.npz"]
    jobs = label.jobs_of(tmp_path, 1, 0)
    groups = {kind: {group for job in jobs for k, group in zip(job.kinds, job.groups, strict=True) if k == kind}
              for kind in ("conformers", "dimers", "protons", "apart")}  # fmt: skip
    assert groups["apart"] == groups["dimers"] < groups["protons"]  # the pair, and methanol alone
    assert not groups["conformers"] & groups["protons"]


def test_clusters_of_water_apart(world, scripts, tmp_path, monkeypatch):
    """Each fourth cluster: its molecules are as they were, beyond the network's cutoff, in a group of such clusters."""
    shards, label, rng = world.shards, scripts("label"), np.random.default_rng(4)
    water, ion = world.geometry("H2O"), np.array([8, 1])
    places = rng.normal(0, 1, (5, 29, 3))
    numbers = np.concatenate([ion, *[water.numbers] * 9])
    clusters = [shards.Geometry("[OH-]" + 9 * ".O", numbers, place, -1) for place in places]
    shards.write_shard(tmp_path / "train-water-0000.npz", clusters)
    monkeypatch.setattr(sys, "argv", ["distil.py", "apart", str(tmp_path)])
    for _ in range(2):
        world.distil.main()
    assert sorted(path.name for path in tmp_path.glob("*")) == ["train-water-0000.npz", "train-water-apart-0000.npz"]
    found = list(shards.read_shard(tmp_path / "train-water-apart-0000.npz"))
    assert len(found) == 2
    of = np.append([0, 0], np.repeat(np.arange(1, 10), 3))  # the molecule of each atom
    same = of[:, None] == of
    for one, place in zip(found, places[::4], strict=True):
        between, before = (np.linalg.norm(x[:, None] - x, axis=2) for x in (one.positions, place))
        np.testing.assert_allclose(between[same], before[same], atol=2e-3)
        assert between[~same].min() > 8 and one.charge == -1
    (job,) = label.jobs_of(tmp_path, 99, 0)
    assert set(job.kinds) == {"water"} and len(job.geometries) == 7 and len(set(job.groups)) == 2


def test_ions_alone_have_one_label(world, tmp_path):
    """Those among the separated ions stay there; the same ions go from other kinds, whatever their names are."""
    make, water = world.shards.Geometry, world.geometry("H2O")
    alone, same = (make(name, np.array([9]), np.zeros((1, 3)), -1) for name in ("[F-]", "fluoride"))
    pair = make("O.[F-]", np.append(water.numbers, 9), np.append(water.positions, [[3.0, 0, 0]], 0), -1)
    other = make("[Cl-]", np.array([17]), np.zeros((1, 3)), -1)
    shards = {"separated": [alone, pair], "conformers": [water, same, other], "dimers": [pair]}
    for kind, geometries in shards.items():
        world.shards.write_shard(tmp_path / f"train-{kind}-0000.npz", geometries)
    world.distil.ions(SimpleNamespace(geometries=tmp_path))
    left = {kind: [g.name for g in world.shards.read_shard(tmp_path / f"train-{kind}-0000.npz")] for kind in shards}
    assert left == {"separated": ["[F-]", "O.[F-]"], "conformers": ["H2O", "[Cl-]"], "dimers": ["O.[F-]"]}


def torsion(x, a, b, c, d):
    u, v, w = x[b] - x[a], x[c] - x[b], x[d] - x[c]
    return np.arctan2(np.linalg.norm(v) * u @ np.cross(v, w), np.cross(u, v) @ np.cross(v, w))


def test_turned_geometries(world, tmp_path):
    world.shards.write_shard(
        tmp_path / "train-conformers-0000.npz", [world.geometry(name) for name in ("trans-butane", "CH4", "CH3CH2OH")]
    )
    world.shards.write_shard(tmp_path / "test-conformers-0000.npz", [world.geometry("trans-butane")])
    world.distil.turned(SimpleNamespace(geometries=tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*turned*")) == ["train-turned-0000.npz"]
    first = [list(world.shards.read_shard(tmp_path / "train-turned-0000.npz"))]
    world.distil.turned(SimpleNamespace(geometries=tmp_path))
    again = list(world.shards.read_shard(tmp_path / "train-turned-0000.npz"))
    assert [g.name for g in again] == ["trans-butane", "CH3CH2OH"]  # methane has no bond to turn
    for one, other in zip(first[0], again, strict=True):
        np.testing.assert_array_equal(one.positions, other.positions)
        assert (world.shards.bonded(one) == world.shards.bonded(world.geometry(one.name))).all()
        assert np.abs(one.positions - (x := world.geometry(one.name).positions) + x.mean(0)).max() > 0.05


def test_no_atoms_collide_in_turned_geometries(world):
    rng, crowded = np.random.default_rng(0), world.geometry("C3H9C")  # (CH3)3C
    for _ in range(20):
        moved = world.distil.with_a_bond_turned(crowded, rng)
        if moved is not None:
            assert (world.shards.bonded(moved) == world.shards.bonded(crowded)).all()


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """Two models of one level: organic-small, and the same with a scaled read-out."""
    folder, found = tmp_path_factory.mktemp("members"), []
    for name, factor in (("a", 1.0), ("b", 1.02)):
        potential = load("organic-small")
        with torch.no_grad():
            for parameter in potential.head.parameters():
                parameter *= factor
        checkpoint.save(
            potential, folder / f"{name}.tmn", {k: v for k, v in potential.metadata.items() if k != "calibration"}
        )
        found.append(str(folder / f"{name}.tmn"))
    return found


def test_a_teacher_of_several_models_gives_their_mean(world, members):
    atoms = molecule("CH3OH")
    given = torch.as_tensor(atoms.numbers)[None], torch.as_tensor(atoms.positions)[None], torch.zeros(1)
    both, one, other = (world.Model(name, "cpu") for name in (",".join(members), *members))
    mean, first, second = (teacher.label(*given) for teacher in (both, one, other))
    for name in ("energy", "forces", "charges"):
        a, b = getattr(first, name), getattr(second, name)
        torch.testing.assert_close(getattr(mean, name), (a + b) / 2)
    assert (first.forces - second.forces).abs().max() > 1e-3
    worst = (first.forces - second.forces).double().norm(dim=2).max() / 2**0.5  # of two values
    torch.testing.assert_close(mean.spread, worst[None], rtol=1e-5, atol=1e-7)
    assert first.spread.tolist() == [0.0]
    torch.testing.assert_close(both.forces(*given), first.forces)  # of dynamics: the first alone
    assert both.sha256.split() == [one.sha256, other.sha256] and both.level == one.level


def test_models_of_several_levels_are_no_teacher(world, members):
    with pytest.raises(SystemExit, match="different levels of theory"):
        world.Model(f"{members[0]},aimnet2", "cpu")


def gentle(scan):
    """The scan with a third of its displacements: forces of no copy are too large."""
    smiles, z, positions, energies, charge = scan
    first = molecule("CH3CH2OH").positions
    return smiles, z, first + (positions - first) / 3, energies, charge


@pytest.fixture
def written(world, members, tmp_path):
    """A scan for training and one for validation, and the frames that are made of them."""
    rows, wanted = [], {"train", "validation", "test"}
    for k in range(1, 200):  # a SMILES for each subset
        subset = world.large.subset_of("C" * k)
        if subset in wanted:
            wanted.discard(subset)
            rows.append(gentle(scan_of("C" * k, "CH3CH2OH", k, k=3)))
    np.savez(tmp_path / "torsions.npz", **arrays_of(rows))
    paths = {"scans": tmp_path / "torsions.npz", "output": tmp_path / "scans"}
    world.distil.scans(SimpleNamespace(**paths, model=",".join(members), start="organic-small", device="cpu"))
    return tmp_path, {world.large.subset_of(scan.smiles): scan for scan in world.large.read_scans(paths["scans"])}


def frames_of(path):
    return list(open_dataset([str(path)], keys={name: name for name in ("energy", "forces", "charges")}))


def test_frames_of_scans(world, written, members):
    folder, scans = written
    assert sorted(path.name for path in (folder / "scans").iterdir()) == ["copies.h5", "train.h5", "validation.h5"]
    teacher, start = world.Model(",".join(members), "cpu"), world.Model("organic-small", "cpu")
    for subset in ("train", "validation"):
        scan, frames = scans[subset], frames_of(folder / "scans" / f"{subset}.h5")
        assert len(frames) == 3
        given = torch.as_tensor(np.tile(scan.z, (3, 1))), torch.as_tensor(scan.positions), torch.zeros(3)
        labels, own = teacher.label(*given), start.label(*given).energy.numpy()
        energies = np.array([float(frame.labels["energy"]) for frame in frames])
        np.testing.assert_allclose(energies - energies.mean(), scan.energies - scan.energies.mean(), atol=1e-6)
        assert energies.mean() == pytest.approx(own.mean(), abs=1e-6)  # that of the start
        for k, frame in enumerate(frames):
            np.testing.assert_allclose(frame.labels["forces"], labels.forces[k], atol=1e-5)
            np.testing.assert_allclose(frame.labels["charges"], labels.charges[k], atol=1e-6)
            np.testing.assert_allclose(frame.system.pos, scan.positions[k], atol=1e-6)


def test_copies_of_scans(world, written, members):
    folder, scans = written
    scan, frames, teacher = (
        scans["train"],
        frames_of(folder / "scans" / "copies.h5"),
        world.Model(",".join(members), "cpu"),
    )
    positions = world.distil.copies_of(scan)
    assert len(frames) == len(positions) == 6  # two of each structure
    moved = positions - np.tile(scan.positions, (2, 1, 1))
    assert 0.02 < moved[:3].std() < 0.04 and np.abs(moved[3:]).max() > 0.05
    original = [float(frame.labels["energy"]) for frame in frames_of(folder / "scans" / "train.h5")]

    def energies(x):
        count = len(x)
        return teacher.label(
            torch.as_tensor(np.tile(scan.z, (count, 1))), torch.as_tensor(x), torch.zeros(count)
        ).energy.numpy()

    differs = np.array(original) - energies(scan.positions)
    expected = energies(positions) + np.tile(differs, 2)
    np.testing.assert_allclose([float(frame.labels["energy"]) for frame in frames], expected, atol=1e-5)
    np.testing.assert_allclose(np.array([frame.system.pos.numpy() for frame in frames]), positions, atol=1e-6)


def test_merged_labels_are_those_of_all_files(world, scripts, tmp_path, monkeypatch):
    """Rows stay together, kinds apart; --part divides the sizes; other teachers and missing labels are refused."""
    merge, rng = scripts("merge"), np.random.default_rng(0)

    def label_file(name, kinds, teacher="A", drop=()):
        with h5py.File(tmp_path / "labels" / name, "w") as file:
            for kind, count in kinds.items():
                energy = rng.normal(size=count)
                data = {"energy": energy, "pos": np.tile(energy[:, None, None], (1, 3, 3)), "group": energy + 1}
                for key, values in data.items():
                    if key not in drop:
                        file.create_dataset(f"{kind}/{key}", data=values).attrs["units"] = f"unit of {key}"
            facts = {"teacher": teacher, "level_of_theory": "B", "dynamics": name, "frames": 0}
            file.create_group("_metadata").attrs["json"] = json.dumps(facts)

    def run(*more):
        monkeypatch.setattr(sys, "argv", ["merge.py", str(tmp_path / "labels"), str(tmp_path / "merged"), *more])
        merge.main()

    (tmp_path / "labels").mkdir()
    with pytest.raises(SystemExit, match=r"no files of label\.py"):
        run()
    label_file("train-003-0000.h5", {"dimers": 4, "water": 2})
    label_file("train-003-0001.h5", {"dimers": 3})
    label_file("validation-003-0000.h5", {"water": 5})
    for part in ("0/3", "1/3", "2/3"):
        run("--part", part)
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == ["train-003.h5", "validation-003.h5"]
    with h5py.File(tmp_path / "merged" / "train-003.h5") as file:
        assert {kind: len(group["energy"]) for kind, group in file.items() if kind[0] != "_"} == {
            "dimers": 7,
            "water": 2,
        }
        for group in (file["dimers"], file["water"]):
            np.testing.assert_array_equal(group["pos"][:, 1, 2], group["energy"][:])
            np.testing.assert_array_equal(group["group"][:], group["energy"][:] + 1)
            assert group["pos"].attrs["units"] == "unit of pos"
        facts = json.loads(file["_metadata"].attrs["json"])
    assert facts["frames"] == 9 and facts["dynamics"] == ["train-003-0000.h5", "train-003-0001.h5"]
    label_file("train-003-0002.h5", {"dimers": 1}, drop=("group",))
    with pytest.raises(SystemExit, match=r"0002\.h5: dimers does not have the same labels"):
        run()
    label_file("train-003-0002.h5", {"dimers": 1}, teacher="C")
    with pytest.raises(SystemExit, match="train-003: the files have different teachers"):
        run()


@pytest.mark.slow
def test_the_training_of_its_description(world, members, monkeypatch, tmp_path):
    """distil.sh: geometries, labels and scans, as the scripts make them, train organic further."""
    monkeypatch.chdir(tmp_path)
    np.savez("torsions.npz", **arrays_of([gentle(scan_of(word, "CH3CH2OH", k)) for k, word in enumerate(CHAINS)]))
    Path("geometries").mkdir()
    for name, molecules in (
        ("train-conformers", ("trans-butane", "CH3Cl")),
        ("train-water", ("H2O",)),
        ("validation-conformers", ("CH3CH2OH",)),
        ("validation-water", ("H2O",)),
    ):
        world.shards.write_shard(Path(f"geometries/{name}-0000.npz"), [world.geometry(name) for name in molecules])
    ethanol = world.geometry("CH3CH2OH")  # compiles the kernels of organic once: three programs would at the same time
    given = torch.as_tensor(ethanol.numbers)[None], torch.as_tensor(ethanol.positions)[None], torch.zeros(1)
    world.Model("organic", "cpu").forces(*given)
    settings = ["batch_size=50", "max_epochs=1", "warmup_steps=0", "num_threads=1", "device=cpu", "precision=float32"]
    subprocess.run(
        ["bash", FOLDER / "distil.sh", "geometries", "torsions.npz", ",".join(members)]
        + [word for setting in settings for word in ("--set", f"training.{setting}")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": str(warm_python()), "DEVICE": "cpu", "GPUS": "1",
             "PER_GPU": "1"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    path = Path("work/distilled/best.tmn")
    metrics = json.loads((path.parent / "metrics.json").read_text())
    # a scan; ethanol as built and with a bond turned, and water, each with a frame of dynamics
    assert metrics["validation"]["energy"]["count"] == 4 + 3 * 2
    start, trained = load("organic"), load(path)
    assert "ωB97X-D3(BJ)" in trained.level_of_theory
    assert len(list(trained.representation.parameters())) == len(list(start.representation.parameters()))
    assert [type(prior) for prior in trained.priors] == [type(prior) for prior in start.priors]
