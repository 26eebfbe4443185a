"""scripts/organic/dft.py: which molecules a structure has, what its energy is relative to, labels."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from ase.build import molecule
from ase.units import Bohr, Hartree
from organic_world import FOLDER

from torchmdnet2 import System, load
from torchmdnet2.data import open_dataset

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
    assert dft.dispersion(geometry("[F-]", [9], [[0, 0, 0]], -1)) == 0
    two = geometry("O.O", [8, 1, 1] * 2, [*WATER, *np.add(WATER, [0, 0, 2.9])])
    value = dft.dispersion(two) - 2 * dft.dispersion(geometry("O", [8, 1, 1], WATER))
    tad_dftd3 = pytest.importorskip("tad_dftd3")
    parameters = {
        k: torch.tensor(float(v)) for k, v in {"s6": 1, "s9": 0, "s8": 0.3908, "a1": 0.566, "a2": 3.128}.items()
    }
    energy = [
        float(tad_dftd3.dftd3(torch.tensor(g[0]), torch.tensor(np.array(g[1]) / Bohr).float(), parameters).sum())
        for g in ((two.numbers.tolist(), two.positions), ([8, 1, 1], WATER))
    ]
    assert value == pytest.approx((energy[0] - 2 * energy[1]) * Hartree, rel=1e-3) and value < -0.01


def test_energies_are_relative_to_the_molecules(dft, geometry, monkeypatch):
    monkeypatch.setattr(dft, "dispersion", lambda g: -0.01 * len(g.numbers) ** 2)
    apart, bonded = pair(geometry, 3.0), pair(geometry, 1.4)
    parts, energy = dft.against(apart, {"energy": -10.0, "alone": [-6.0, -3.5]}, {}, False)
    assert len(parts) == 2 and energy == pytest.approx(-0.5 - 0.25 + 0.09 + 0.04)
    known = {part.name: (part, value) for part, value in zip(parts, (-6.1, -3.6), strict=True)}
    known = {"O": known[parts[0].name], "[OH-]": known[parts[1].name]}
    _, energy = dft.against(bonded, {"energy": -10.0}, known, False)
    assert energy == pytest.approx(-0.3 - 0.12)
    assert dft.against(bonded, {"energy": -10.0}, {"O": known["O"]}, False) is None
    other = known | {"O": (known["[OH-]"][0], -1.0)}  # a molecule of other atoms
    assert dft.against(bonded, {"energy": -10.0}, other, False) is None
    row = {"energy": -10.0, "alone": [-6.0, -3.5]}
    assert dft.against(apart, row, known, True)[1] == pytest.approx(-0.3 - 0.12)  # of a kind that reacts


def test_energies_resume_and_become_labels(dft, geometry, scripts, tmp_path, monkeypatch):
    """The lines of a second call are those that are missing; labels are the model's molecules and the interaction."""
    computed = []

    def energy(one):
        computed.append(one.name)
        return -5.0 * len(one.numbers) - (0.3 if "." in one.name and " " not in one.name else 0.0)

    monkeypatch.setattr(dft, "scf_energy", energy)
    monkeypatch.setattr(dft, "molecule", lambda one: SimpleNamespace(nao=20 * len(one.numbers)))
    monkeypatch.setattr(dft, "dispersion", lambda one: 0.0)
    monkeypatch.setitem(sys.modules, "pyscf", SimpleNamespace(lib=SimpleNamespace(num_threads=int)))
    scripts("shards").write_shard(tmp_path / "train-water-0000.npz", [pair(geometry, 2.6 + 0.1 * k) for k in range(12)])
    lines = tmp_path / "energies.jsonl"

    def run(part):
        dft.energies(SimpleNamespace(
            shards=[tmp_path / "train-water-0000.npz"], output=lines, part=part, minutes=1.0, most=100
        ))  # fmt: skip

    run("0/2")
    assert len(lines.read_text().splitlines()) == 6
    run("0/1")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(12)) and len(computed) == 36
    dft.labels(SimpleNamespace(folder=tmp_path, output=tmp_path / "labels", start="organic-small", kinds=["water"]))
    model, count = load("organic-small"), 0
    for subset in ("train", "validation"):
        for sample in open_dataset(tmp_path / "labels" / f"{subset}.h5"):
            alone = sum(
                float(model(System(z=torch.as_tensor(part.numbers), pos=torch.as_tensor(part.positions),
                                   charge=torch.tensor([float(part.charge)]))).energy)
                for part in dft.molecules(geometry("O.[OH-]", sample.system.z.numpy(), sample.system.pos.numpy(), -1))
            )  # fmt: skip
            assert float(sample.labels["energy"]) == pytest.approx(alone - 0.3, abs=1e-3)
            count += 1
    assert count == 12
    alone = list(open_dataset(tmp_path / "labels" / "alone.h5"))
    assert sorted(len(sample.system.z) for sample in alone) == [2] * 12 + [3] * 12
    for sample in alone:
        assert float(sample.labels["energy"]) == pytest.approx(float(model(sample.system).energy), abs=1e-3)


def test_ions_at_the_same_place_are_all_kept(dft, geometry, scripts, tmp_path):
    """Molecules by name are centred, so that bare ions differ by their elements only."""
    ions = [geometry(name, [z], [[0, 0, 0]], -1) for name, z in (("[F-]", 9), ("[Cl-]", 17))]
    both = geometry("[F-].[Cl-]", [9, 17], [[0, 0, 0], [4, 0, 0]], -2)
    scripts("shards").write_shard(tmp_path / "train-conformers-0000.npz", ions)
    scripts("shards").write_shard(tmp_path / "train-substitutions-0000.npz", [both])
    rows = [("train-conformers-0000", 0, "[F-]"), ("train-conformers-0000", 1, "[Cl-]"),
            ("train-substitutions-0000", 0, both.name)]  # fmt: skip
    lines = [{"shard": shard, "index": index, "name": name, "energy": -9.0} for shard, index, name in rows]
    (tmp_path / "energies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dft.labels(
        SimpleNamespace(folder=tmp_path, output=tmp_path / "labels", start="organic-small", kinds=["substitutions"])
    )
    alone = open_dataset(tmp_path / "labels" / "alone.h5")
    assert sorted(sample.system.z.tolist() for sample in alone) == [[9], [17]]


def test_hydrogen_is_relative_to_its_atoms_in_other_molecules(dft, geometry, scripts, tmp_path, monkeypatch):
    """The levels differ by a constant for each element; the start's energy of H2 is not used."""
    monkeypatch.setattr(dft, "dispersion", lambda one: 0.01 * len(one.numbers) ** 2)
    model, shift = load("organic-small"), {1: 0.2, 6: -0.5, 7: 0.3, 8: 1.0}
    molecules = []
    for name in ("H2O", "CH4", "NH3", "CH3OH", "CH3CH2NH2", "H2"):
        atoms = molecule(name)
        molecules.append(geometry("[H][H]" if name == "H2" else name, atoms.numbers, atoms.positions))
    scripts("shards").write_shard(tmp_path / "train-conformers-0000.npz", molecules)
    scripts("shards").write_shard(tmp_path / "train-hydrogen-0000.npz", molecules[-1:])
    rows = [{"shard": "train-hydrogen-0000", "index": 0, "name": "[H][H]", "energy": -32.0}]
    for index, one in enumerate(scripts("shards").read_shard(tmp_path / "train-conformers-0000.npz")):
        higher = sum(shift[z] for z in one.numbers.tolist()) if one.name != "[H][H]" else 0.7
        energy = float(model(dft.system_of(one)).energy) - dft.dispersion(one) - higher
        rows.append({"shard": "train-conformers-0000", "index": index, "name": one.name, "energy": energy})
    (tmp_path / "energies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dft.labels(SimpleNamespace(folder=tmp_path, output=tmp_path / "labels", start="organic-small", kinds=["hydrogen"]))
    (sample,) = [
        sample for subset in ("train", "validation") if (tmp_path / "labels" / f"{subset}.h5").exists()
        for sample in open_dataset(tmp_path / "labels" / f"{subset}.h5")
    ]  # fmt: skip
    assert float(sample.labels["energy"]) == pytest.approx(-32.0 + 0.04 + 2 * 0.2, abs=1e-3)


def test_what_stays_is_copied(dft, geometry, scripts, tmp_path):
    """Small single molecules; no pairs."""
    shards, one = scripts("shards"), geometry("O", [8, 1, 1], WATER)
    large = geometry("C" * 11, [6] * 11, 1.5 * np.arange(33).reshape(11, 3))
    methane = [[0, 0, 0], [0.63, 0.63, 0.63], [-0.63, -0.63, 0.63], [-0.63, 0.63, -0.63], [0.63, -0.63, -0.63]]

    def two(name):
        return geometry(name, [6, 1, 1, 1, 1] * 2, [*methane, *np.add(methane, [5, 0, 0])])

    for kind in ("dimers", "substitutions", "water"):
        shards.write_shard(tmp_path / f"train-{kind}-0000.npz", [one, two("C.C"), two("C.[NH4+]"), large])
    dft.rest(SimpleNamespace(folder=tmp_path, output=tmp_path / "rest", number=30, atoms=10))
    found = {path.stem: sorted(g.name for g in shards.read_shard(path)) for path in (tmp_path / "rest").glob("*.npz")}
    assert found == {f"train-{kind}-0000": ["O"] for kind in ("dimers", "substitutions", "water")}


def test_density_functional_theory(dft, geometry):
    """Two atoms of hydrogen, 0.74 Å apart: near −1.17 hartree; with an electron too few it is refused."""
    pytest.importorskip("pyscf")
    hydrogen = geometry("[H][H]", [1, 1], [[0, 0, 0], [0, 0, 0.741]])
    assert dft.scf_energy(hydrogen) / Hartree == pytest.approx(-1.17, abs=0.01)
    with pytest.raises(RuntimeError):
        dft.scf_energy(hydrogen._replace(charge=1))
