"""scripts/organic/dft.py: which molecules a structure has, energies that resume, labels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from ase.build import molecule
from ase.units import Bohr, Hartree
from organic_world import FOLDER, malonaldehyde

from torchmdnet2 import load
from torchmdnet2.data import open_dataset
from torchmdnet2.data.labels import GROUP
from torchmdnet2.training.config.config import load_config

WATER = np.array([[0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]])


@pytest.fixture
def dft(scripts):
    return scripts("dft")


@pytest.fixture
def geometry(scripts):
    def made(name, numbers, positions, charge=0):
        return scripts("shards").Geometry(name, np.array(numbers), np.array(positions, dtype=float), charge)

    return made


def pair(geometry, distance, name="O.[OH-]"):
    """A molecule of water and hydroxide."""
    positions = [*WATER, [distance, 0, 0], [distance, 0, 0.965]]
    return geometry(name, [8, 1, 1, 8, 1], positions, -1)


def test_molecules_are_told_by_bonds_and_electrons(dft, geometry):
    water, hydroxide = dft.molecules(pair(geometry, 3.0))
    assert water.numbers.tolist() == [8, 1, 1] and water.charge == 0
    assert hydroxide.numbers.tolist() == [8, 1] and hydroxide.charge == -1
    assert dft.molecules(pair(geometry, 1.4)) is None  # bonded
    assert dft.molecules(pair(geometry, 3.0)._replace(charge=0)) is None  # a radical and no charge
    assert dft.molecules(pair(geometry, 3.0, "O.O.[OH-]")) is None  # three names
    assert dft.molecules(pair(geometry, 3.0, "O.[F-]")) is None  # other molecules


@pytest.mark.parametrize(
    ("name", "atoms"),
    [("O", "O"), ("[OH3+]", "O"), ("ClCCl", "C Cl Cl"), ("c1[nH]cc[nH+]1", "C C C N N"), ("[se]1cccc1", "C C C C Se"),
     ("[O-][Cl+3]([O-])([O-])[O-]", "Cl O O O O"), ("C[Si](C)(C)Br", "Br C C C Si")],
)  # fmt: skip
def test_atoms_of_a_name(dft, name, atoms):
    assert dft.heavy_atoms(name) == atoms.split()


def test_dispersion_is_that_of_the_trainings(dft, geometry):
    """The prior of distil.yaml, in eV: the parameters, and a pair of waters."""
    prior = next(p for p in yaml.safe_load((FOLDER / "distil.yaml").read_text())["priors"] if p["name"] == "d3")
    ours = dft.DISPERSION
    assert (prior["s8"], prior["a1"]) == (ours.s8, ours.a1) and prior["elements"] == ours.elements
    assert ours.a2 / 0.529177 == pytest.approx(prior["a2"], abs=1e-5)
    two = geometry("O.O", [8, 1, 1] * 2, [*WATER, *np.add(WATER, [0, 0, 2.9])])
    here = dft.dispersion(two).forces
    for atom, axis in ((0, 2), (4, 1)):
        moved = [np.array(two.positions) for _ in range(2)]
        moved[0][atom, axis] -= 1e-3
        moved[1][atom, axis] += 1e-3
        left, right = (dft.dispersion(two._replace(positions=positions)).energy for positions in moved)
        assert here[atom, axis] == pytest.approx((left - right) / 2e-3, rel=1e-4, abs=1e-7)
    assert dft.dispersion(geometry("[F-]", [9], [[0, 0, 0]], -1)).energy == 0
    value = dft.dispersion(two).energy - 2 * dft.dispersion(geometry("O", [8, 1, 1], WATER)).energy
    tad_dftd3 = pytest.importorskip("tad_dftd3")
    parameters = {
        k: torch.tensor(float(v)) for k, v in {"s6": 1, "s9": 0, "s8": 0.3908, "a1": 0.566, "a2": 3.128}.items()
    }
    energy = [
        float(tad_dftd3.dftd3(torch.tensor(g[0]), torch.tensor(np.array(g[1]) / Bohr).float(), parameters).sum())
        for g in ((two.numbers.tolist(), two.positions), ([8, 1, 1], WATER))
    ]
    assert value == pytest.approx((energy[0] - 2 * energy[1]) * Hartree, rel=1e-3) and value < -0.01


def options(path, **changed):
    """Of `energies`, for a shard."""
    usual = {"output": path.parent / "energies.jsonl", "part": "0/1", "minutes": 1.0, "most": 100, "forces": False}
    return SimpleNamespace(**{"shards": [path], "device": "cpu", **usual, **changed})


def lines_of(folder):
    return [json.loads(line) for line in (folder / "energies.jsonl").read_text().splitlines()]


def labels_of(dft, folder, start="organic-small"):
    """Samples of the files that `labels` writes, by name of the file."""
    dft.labels(SimpleNamespace(folder=folder, output=folder / "labels", start=start))
    return {path.stem: list(open_dataset(path)) for path in (folder / "labels").glob("*.h5")}


@pytest.mark.parametrize("forces", [False, True])
def test_energies_resume(dft, geometry, scripts, tmp_path, monkeypatch, forces):
    """The lines of a second call are those that are missing; the molecules have their energies and forces, too."""
    computed = []

    def solved(one, forces, device):
        computed.append(one.name)
        return dft.Field(-5.0 * len(one.numbers), np.full((len(one.numbers), 3), 0.123456) if forces else None)

    monkeypatch.setattr(dft, "self_consistent", solved)
    monkeypatch.setattr(dft, "molecule", lambda one: SimpleNamespace(nao=20 * len(one.numbers)))
    monkeypatch.setitem(sys.modules, "pyscf", SimpleNamespace(lib=SimpleNamespace(num_threads=int)))
    path = tmp_path / "train-water-0000.npz"
    scripts("shards").write_shard(path, [pair(geometry, 2.6 + 0.1 * k) for k in range(12)])
    dft.energies(options(path, part="0/2", forces=forces))
    assert len(lines_of(tmp_path)) == 6
    dft.energies(options(path, forces=forces))
    rows = lines_of(tmp_path)
    assert sorted(row["index"] for row in rows) == list(range(12)) and len(computed) == 36
    for row in rows:
        assert row["energy"] == -25 and row["alone"] == [-15, -10]
        assert row.get("forces") == ([[0.12346] * 3] * 5 if forces else None)
        assert row.get("forces_alone") == ([[[0.12346] * 3] * n for n in (3, 2)] if forces else None)


@pytest.fixture
def folder(dft, geometry, scripts, tmp_path, monkeypatch):
    """Neutral molecules, an ion, and a pair with forces: energies are those of `organic-small` but for a constant of
    each element and changes of the ion and the pair."""
    monkeypatch.setattr(
        dft, "dispersion", lambda one: dft.Field(0.01 * len(one.numbers) ** 2, np.full(one.positions.shape, 0.5))
    )
    model = load("organic-small")

    def row(shard, index, one, change, **more):
        energy = float(model(dft.system_of(one)).energy) - dft.dispersion(one).energy + change
        higher = sum({1: 0.2, 6: -0.5, 7: 0.3, 8: 1.0}[z] for z in one.numbers.tolist())
        return {"shard": shard, "index": index, "name": one.name, "energy": energy - higher, **more}

    shards, conformers = scripts("shards"), []
    for name in ("H2O", "CH4", "NH3", "CH3OH", "CH3CH2NH2", "H2", "OH"):
        atoms = molecule(name)
        conformers.append(geometry(name, atoms.numbers, atoms.positions, -(name == "OH")))
    shards.write_shard(tmp_path / "train-conformers-0000.npz", conformers)
    shards.write_shard(tmp_path / "train-water-0000.npz", [pair(geometry, 3.0)])
    conformers = list(shards.read_shard(tmp_path / "train-conformers-0000.npz"))  # their places are rounded
    (one,) = shards.read_shard(tmp_path / "train-water-0000.npz")
    rows = [row("train-conformers-0000", k, g, -0.4 if g.charge else 0.0) for k, g in enumerate(conformers)]
    alone = [row("", 0, part, -0.4 if part.charge else 0.0)["energy"] for part in dft.molecules(one)]
    forces = {"forces": [[1.0, 0, 0]] * 5, "forces_alone": [[[0, 1.0, 0]] * 3, [[0, 0, 1.0]] * 2]}
    rows.append(row("train-water-0000", 0, one, -0.7, alone=alone, **forces))
    (tmp_path / "energies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return tmp_path


def test_lines_without_forces_are_computed_again_where_forces_are_wanted(
    dft, geometry, scripts, tmp_path, monkeypatch, capsys
):
    """Failures are not; large structures are counted."""

    def solved(one, forces, device):
        if len(one.numbers) == 2:
            raise dft.Unsolved("the density does not converge")
        return dft.Field(-1.0, np.zeros((len(one.numbers), 3)) if forces else None)

    monkeypatch.setattr(dft, "self_consistent", solved)
    monkeypatch.setattr(dft, "molecule", lambda one: SimpleNamespace(nao=20 * len(one.numbers)))
    monkeypatch.setitem(sys.modules, "pyscf", SimpleNamespace(lib=SimpleNamespace(num_threads=int)))
    path = tmp_path / "train-conformers-0000.npz"
    ion, water = geometry("[OH-]", [8, 1], WATER[:2], -1), geometry("O", [8, 1, 1], WATER)
    scripts("shards").write_shard(path, [ion, water, geometry("C" * 9, [6] * 9, 1.5 * np.arange(27).reshape(9, 3))])
    for forces in (False, True, True):
        dft.energies(options(path, forces=forces))
    rows = lines_of(tmp_path)
    assert sorted((row["index"], "failed" in row, "forces" in row) for row in rows) == [
        (0, True, False), (1, False, False), (1, False, True)]  # fmt: skip
    assert "1 structures have more than 100 basis functions" in capsys.readouterr().out
    with (tmp_path / "energies.jsonl").open("a") as file:
        file.write('{"shard": "train-conf')
    with pytest.raises(SystemExit, match="line 4 is not complete"):
        dft.energies(options(path, forces=True))


def test_labels_are_at_the_level_of_the_start_for_neutral_molecules(dft, folder):
    """A constant for each element; ions, which the start has without diffuse functions, do not change it."""
    model, found, seen = load("organic-small"), labels_of(dft, folder), 0
    for name, samples in found.items():
        for sample in samples:
            energy = float(model(sample.system).energy)
            change = {5: -0.7, 2: -0.4}[len(sample.system.z)] if float(sample.system.charge) else 0.0
            assert float(sample.labels["energy"]) == pytest.approx(energy + change, abs=2e-3)
            assert ("forces" in sample.labels) != name.endswith("-energies")
            seen += 1
    assert seen == 7 + 3


def test_forces_are_those_with_dispersion(dft, folder):
    found = labels_of(dft, folder)
    samples = {len(s.system.z): s for name in ("train", "validation") for s in found.get(name, [])}
    expected = {5: [1.5, 0.5, 0.5], 3: [0.5, 1.5, 0.5], 2: [0.5, 0.5, 1.5]}
    assert set(samples) == set(expected)
    for atoms, force in expected.items():
        assert samples[atoms].labels["forces"].tolist() == [force] * atoms


def test_elements_that_no_neutral_molecule_has_are_left_out(dft, folder, geometry, scripts, capsys):
    scripts("shards").write_shard(folder / "train-conformers-ions.npz", [geometry("[F-]", [9], [[0, 0, 0]], -1)])
    line = {"shard": "train-conformers-ions", "index": 0, "name": "[F-]", "energy": -2700.0}
    (folder / "more.jsonl").write_text(json.dumps(line) + "\n")
    found = labels_of(dft, folder)
    assert all(9 not in sample.system.z.tolist() for samples in found.values() for sample in samples)
    assert "1 left out" in capsys.readouterr().out


def test_the_training_reads_what_labels_writes(dft, folder):
    """dft.yaml is a valid configuration; of the labels it names the files that are written, with their entries."""
    sources = [part for part in load_config(FOLDER / "dft.yaml").data.parts if "dft-labels" in str(part.train)]
    assert [Path(str(part.train)).name for part in sources] == ["train.h5", "train-energies.h5"]
    written = labels_of(dft, folder)
    for part, name in zip(sources, ("train", "train-energies"), strict=True):
        assert part.keys.group == "group" and (part.keys.forces is not None) == ("forces" in written[name][0].labels)


def test_a_line_with_forces_counts_whatever_its_file(dft, folder):
    """Beside an older one without, of a file that comes later in the alphabet."""
    lines = (folder / "energies.jsonl").read_text().splitlines()
    old = {name: value for name, value in json.loads(lines[-1]).items() if "forces" not in name}
    (folder / "energies.jsonl").write_text("\n".join([*lines[:-1], json.dumps(old)]) + "\n")
    (folder / "energies-0.jsonl").write_text(lines[-1] + "\n")
    found = labels_of(dft, folder)
    assert sorted(len(s.system.z) for name in ("train", "validation") for s in found.get(name, [])) == [2, 3, 5]


def test_a_molecule_is_on_one_side_of_the_split(dft, folder, monkeypatch):
    """Its conformers and those of a pair, by composition and charge."""
    for held_out in ("H2O 0", "HO -1"):
        monkeypatch.setattr(dft, "seed_of", lambda _, word, held_out=held_out: int(word != held_out))
        ours = [one for one in dft.computed(folder) if dft.composition(one.geometry) == held_out]
        assert len(ours) == 2 and all(one.held_out for one in ours)
        assert sum(one.held_out for one in dft.computed(folder)) == 2


def test_ions_of_one_atom_are_trained_on(dft, folder, geometry, scripts, monkeypatch):
    scripts("shards").write_shard(folder / "train-conformers-ions.npz", [geometry("[F-]", [9], [[0, 0, 0]], -1)])
    line = {"shard": "train-conformers-ions", "index": 0, "name": "[F-]", "energy": -2700.0}
    (folder / "more.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(dft, "seed_of", lambda *words: 0)
    assert {len(one.geometry.numbers) for one in dft.computed(folder) if not one.held_out} == {1}


def test_groups_are_small(dft, folder, geometry, scripts):
    shards = scripts("shards")
    shards.write_shard(folder / "train-conformers-more.npz", [geometry("O", [8, 1, 1], WATER)] * 7)
    line = {"shard": "train-conformers-more", "name": "O", "energy": -2000.0}
    (folder / "more.jsonl").write_text("".join(json.dumps(line | {"index": k}) + "\n" for k in range(7)))
    labels_of(dft, folder)
    samples = [
        sample
        for path in (folder / "labels").glob("*-energies.h5")
        for sample in open_dataset(path, keys={"energy": "energy", GROUP: "group"})
    ]
    groups = [float(sample.labels[GROUP]) for sample in samples if len(sample.system.z) == 3]
    assert sorted(groups.count(group) for group in set(groups)) == [1, 2, 5]  # another molecule, and seven of this one


def test_too_few_molecules_and_energies_of_others_are_refused(dft, folder):
    shard = folder / "train-water-0000.npz"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(SystemExit, match=r"add train-water-0000\.npz"):
        labels_of(dft, folder)
    shard.write_bytes(content)
    lines = (folder / "energies.jsonl").read_text().splitlines()
    (folder / "energies.jsonl").write_text("\n".join(lines[-2:]) + "\n")
    with pytest.raises(SystemExit, match="more neutral molecules"):
        labels_of(dft, folder)
    row = json.loads(lines[-1])
    (folder / "energies.jsonl").write_text(json.dumps(row | {"alone": row["alone"][:1]}) + "\n")
    with pytest.raises(SystemExit, match="its molecules are not those"):
        labels_of(dft, folder)
    (folder / "energies.jsonl").write_text(lines[0].replace('"H2O"', '"CH4"') + "\n")
    with pytest.raises(SystemExit, match="the energy is of CH4, the shard has H2O"):
        labels_of(dft, folder)


def test_what_stays_is_copied(dft, geometry, scripts, tmp_path):
    """Small single molecules, or ions; no pairs."""
    shards, one = scripts("shards"), geometry("O", [8, 1, 1], WATER)
    ion = geometry("[OH-]", [8, 1], WATER[:2], -1)
    large = geometry("C" * 11, [6] * 11, 1.5 * np.arange(33).reshape(11, 3))
    methane = [[0, 0, 0], [0.63, 0.63, 0.63], [-0.63, -0.63, 0.63], [-0.63, 0.63, -0.63], [0.63, -0.63, -0.63]]

    def two(name):
        return geometry(name, [6, 1, 1, 1, 1] * 2, [*methane, *np.add(methane, [5, 0, 0])])

    for kind in ("dimers", "substitutions", "water"):
        shards.write_shard(tmp_path / f"train-{kind}-0000.npz", [one, ion, two("C.C"), two("C.[NH4+]"), large])
    for charged, name in ((False, "O"), (True, "[OH-]")):
        rest = tmp_path / f"rest {charged}"
        dft.rest(SimpleNamespace(folder=tmp_path, output=rest, number=30, atoms=10, charged=charged))
        found = {path.stem: sorted(g.name for g in shards.read_shard(path)) for path in rest.glob("*.npz")}
        assert found == {f"train-{kind}-0000": [name] for kind in ("dimers", "substitutions", "water")}


@pytest.mark.parametrize("charged", [False, True])
def test_molecules_with_a_proton_on_its_way(dft, geometry, scripts, tmp_path, charged):
    """Ways of each single molecule that has one, without or with a charge; no pairs, and none of validation."""
    shards = scripts("shards")
    aldehyde = malonaldehyde(shards)
    given = [aldehyde, aldehyde, aldehyde._replace(name="O.C=CC=O"), aldehyde._replace(name="ion", charge=-1),
             geometry("O", [8, 1, 1], WATER)]  # fmt: skip
    shards.write_shard(tmp_path / "train-conformers-0000.npz", given)
    of_validation = [g._replace(name=f"other {g.name}") for g in given]
    shards.write_shard(tmp_path / "validation-conformers-0000.npz", of_validation)
    places = {}
    for conformers, seed in ((1, 0), (1, 1), (2, 0)):
        options = SimpleNamespace(
            folder=tmp_path, output=tmp_path / f"{conformers} {seed}", number=30, atoms=10, charged=charged,
            conformers=conformers, seed=seed,
        )  # fmt: skip
        dft.ways(options)
        assert [path.name for path in options.output.iterdir()] == ["train-ways-0000.npz"]
        found = list(shards.read_shard(options.output / "train-ways-0000.npz"))
        assert {g.name for g in found} == {"ion" if charged else "O=CC=CO"}
        places[conformers, seed] = [g.positions.tolist() for g in found]
    assert 2 <= len(places[1, 0]) <= 6 and places[1, 0] != places[1, 1]
    assert len(places[2, 0]) == len(places[1, 0]) if charged else 4 <= len(places[2, 0]) <= 12  # one ion is given


def test_density_functional_theory(dft, geometry):
    """Two atoms of hydrogen, 0.8 Å apart: near −1.17 hartree, and forces are the slope of the energy; with an electron
    too few they are refused."""
    pytest.importorskip("pyscf")

    def hydrogen(distance):
        return geometry("[H][H]", [1, 1], [[0, 0, 0], [0, 0, distance]])

    left, here, right = (dft.self_consistent(hydrogen(d), True, "cpu") for d in (0.79, 0.80, 0.81))
    assert here.energy / Hartree == pytest.approx(-1.17, abs=0.01)
    assert here.forces[1, 2] == pytest.approx((left.energy - right.energy) / 0.02, abs=0.01)
    with pytest.raises(dft.Unsolved):
        dft.self_consistent(hydrogen(0.8)._replace(charge=1), True, "cpu")
