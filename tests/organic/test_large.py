"""scripts/organic/large.py: torsion scans, their subsets, and errors of models on them; the training of large.yaml."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.data import chemical_symbols
from organic_world import FOLDER, ROOT
from warm import warm_python

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.training.config.config import load_config
from torchmdnet2.training.run.run import run_training

CHAINS = {"CO": "CH3OH", "NN": "N2H4", "OO": "H2O2"}  # two for training, one for validation
EV = 23.060548  # kcal/mol
BASE = -2000.0  # eV, energies of the methods have another zero


def springs(z, positions):
    """The energy of each structure, [k] eV: springs of 1.5 Å, which are stiffer between heavier atoms."""
    i, j = np.triu_indices(len(z), 1)
    return (z[i] * z[j] * (np.linalg.norm(positions[:, i] - positions[:, j], axis=2) - 1.5) ** 2).sum(1) / 20


def scan_of(smiles, name, seed, k=4, charge=0):
    """A molecule in k geometries, in half thousandths of an Å, with energies by springs and another zero."""
    atoms = molecule(name)
    rng = np.random.default_rng(seed)
    positions = np.rint(2000 * (atoms.positions + rng.normal(0, 0.1, (k, len(atoms), 3)))) / 2000
    return smiles, atoms.numbers, positions, BASE + springs(atoms.numbers, positions), charge


def some_scans():
    """Two scans of one molecule, an ion, and molecules for each subset."""
    found = [scan_of("CCO", "CH3CH2OH", 0), scan_of("[CH3+]", "CH3", 1, charge=1), scan_of("CCO", "CH3CH2OH", 2, k=6)]
    return found + [scan_of("C" * k, "C2H6", 2 + k, k=2) for k in range(2, 30)]


def arrays_of(scans):
    smiles, z, positions, energies, charges = zip(*scans, strict=True)
    count = [len(e) for e in energies]
    flat = np.concatenate([p.reshape(-1, 3) for p in positions])
    return {
        "num_atoms": np.repeat([len(x) for x in z], count).astype(np.int16),
        "z": np.concatenate([np.tile(x, k) for x, k in zip(z, count, strict=True)]).astype(np.int8),
        "pos_half_milliangstrom": np.rint(2000 * flat).astype(np.int16),
        "energy_eV": np.concatenate(energies),
        "scan": np.repeat(np.arange(len(z)), count).astype(np.int16),
        "charge": np.repeat(charges, count).astype(np.int8),
        "smiles": np.array(smiles),
    }


class Springs:
    """An evaluator: springs with a factor, and other energies of atoms."""

    def __init__(self, factor=1.0, zero=0.0):
        self.factor, self.zero = factor, zero

    def __call__(self, system, forces):
        count = system.num_systems
        z, positions = system.z.numpy().reshape(count, -1), system.pos.numpy().reshape(count, -1, 3)
        assert not forces and (z == z[0]).all()
        return SimpleNamespace(energy=torch.as_tensor(self.factor * springs(z[0], positions) + self.zero))


class Table(Springs):
    """An evaluator that gives energies from a list."""

    def __call__(self, system, forces):
        return SimpleNamespace(energy=torch.as_tensor(self.factor, dtype=torch.float64))


@pytest.fixture
def large(scripts, monkeypatch, tmp_path):
    """The script on a file of scans: `large.run(words …)`, with models that are springs."""
    script = scripts("large")
    np.savez_compressed(tmp_path / "torsions.npz", **arrays_of(some_scans()))
    models = {"exact": Springs(zero=3.0), "soft": Springs(0.8, -40.0), "stiff": Springs(1.2, 70.0)}
    monkeypatch.setattr(script, "load", lambda name, device: models.get(name) or load(name, device))
    monkeypatch.setattr(script, "Evaluator", lambda model, graphs: model)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["large.py", *map(str, words)])
        script.main()

    monkeypatch.setattr(script, "run", run, raising=False)
    return script


def test_scans_are_read_as_they_were_written(large, tmp_path):
    for k, (scan, given) in enumerate(zip(large.read_scans(tmp_path / "torsions.npz"), some_scans(), strict=True)):
        smiles, z, positions, energies, charge = given
        assert (scan.number, scan.smiles, scan.charge) == (k, smiles, charge)
        assert np.array_equal(scan.z, z) and np.array_equal(scan.energies, energies)
        assert np.abs(scan.positions - positions).max() < 1e-9  # Å


def test_a_download_is_packed(large, tmp_path):
    """Files of structures in Å and hartree, as TorsionTest2000 has them, with another origin."""
    folder = tmp_path / "json"
    folder.mkdir()
    shift = np.array([3, -20, 0.5])
    for k, (smiles, z, positions, energies, charge) in enumerate(some_scans()):
        rows = [
            {"title": "t", "smiles": smiles, "coordinates": (x + shift).tolist(), "charge": charge,
             "elements": [chemical_symbols[n] for n in z], "E[B97](Ha)": e / 27.211386245988, "E[CC](Ha)": 2 * e}
            for x, e in zip(positions, energies, strict=True)
        ]  # fmt: skip
        (folder / f"testcase-{k:02d}.json").write_text(json.dumps(rows))
    large.run("pack", folder, tmp_path / "packed.npz", "--method", "B97")
    packed, given = (large.read_scans(tmp_path / f"{name}.npz") for name in ("packed", "torsions"))
    for one, other in zip(packed, given, strict=True):
        assert one._replace(z=0, positions=0, energies=0) == other._replace(z=0, positions=0, energies=0)
        assert np.array_equal(one.z, other.z) and one.energies == pytest.approx(other.energies, abs=1e-9)
        centred = other.positions - other.positions.mean(1, keepdims=True)
        assert np.abs(one.positions - centred).max() < 1e-3 / 4 + 1e-9  # Å, rounded
    rows[-1]["coordinates"][0][0] += 60
    for content, words, message in (
        (rows, ("--method", "B97"), "a structure larger than 32 Å"),
        (rows, (), r"testcase-00.json is not a scan: KeyError 'E\[wB97X-D3BJ/def2-TZVPD\]\(Ha\)'"),
        (rows[0], ("--method", "B97"), "testcase-00.json is not a scan"),
        ([], ("--method", "B97"), "testcase-00.json is not a scan"),
    ):
        (folder / "testcase-00.json").write_text(json.dumps(content))
        with pytest.raises(SystemExit, match=message):
            large.run("pack", folder, tmp_path / "bad.npz", *words)
    with pytest.raises(SystemExit, match="nothing has no JSON files"):
        large.run("pack", tmp_path / "nothing", tmp_path / "bad.npz")
    assert not (tmp_path / "bad.npz").exists()


def test_subsets_are_of_molecules(large):
    """All scans and stereoisomers of one are together; the subsets are those of the published errors."""
    names = [f"{'C' * (k % 50 + 1)}{'O' * (k // 50)}" for k in range(4000)]
    found = [large.subset_of(name) for name in names]
    assert found == [large.subset_of(name) for name in names]
    share = {subset: found.count(subset) / len(found) for subset in large.SUBSETS}
    assert share == pytest.approx({"train": 0.8, "validation": 0.1, "test": 0.1}, abs=0.02)
    for k in range(1, 40):
        for one, other in (("[C@H](N)O", "[C@@H](N)O"), ("/C=C/C", "/C=C\\C")):
            assert large.subset_of(k * "C" + one) == large.subset_of(k * "C" + other)
    kept = {"CSc1cccc(C)c1B1OCCO1": "train", 27 * "C": "validation", 13 * "C": "test", 15 * "C": "test"}
    assert {smiles: large.subset_of(smiles) for smiles in kept} == kept


@pytest.mark.parametrize(
    "computed, profile, barrier",
    [
        ([0.20, 0.05, 0.42], 0.04, 0.07),  # relative: 0.15, 0, 0.37
        ([0.00, 0.05, 0.42], 0.22 / 3, 0.12),  # the lowest one is another: −0.05, 0, 0.37
        ([-8.90, -9.00, -8.70], 0.0, 0.0),  # another zero
    ],
)
def test_errors_by_hand(large, computed, profile, barrier):
    """The reference is 0.1, 0, 0.3 eV above its lowest structure."""
    scan = large.Scan(0, "[H][H]", np.array([1, 1]), np.zeros((3, 2, 3)), np.array([7.1, 7.0, 7.3]), 0)
    found = large.errors_of([Table(computed)], scan, "cpu")
    assert found == pytest.approx((profile * EV, barrier * EV), rel=1e-6, abs=1e-9)


def test_the_mean_of_models_is_of_their_energies(large, tmp_path, capsys):
    """Errors of springs with a factor are a fifth of the reference's; those of two, too low and too high, cancel."""
    names = ["exact", "soft", "stiff", "soft,stiff", "soft,soft,stiff"]
    large.run("errors", tmp_path / "torsions.npz", *names, "--subset", "train", "--json", tmp_path / "errors.json")
    scans = [scan for scan in some_scans() if large.subset_of(scan[0]) == "train"]
    profile = np.mean([(scan[3] - scan[3].min()).mean() for scan in scans])
    barrier = np.mean([np.ptp(scan[3]) for scan in scans])
    content = json.loads((tmp_path / "errors.json").read_text())
    assert content["subset"] == "train" and list(content["errors"]) == names
    shown = capsys.readouterr().out
    for name, factor in zip(names, (0.0, 0.2, 0.2, 0.0, 0.2 / 3), strict=True):
        found = content["errors"][name]
        assert found["scans"] == len(scans) > 10
        expected = (factor * profile * EV, factor * barrier * EV)
        assert (found["profile"], found["barrier"]) == pytest.approx(expected, rel=1e-6, abs=1e-8)
        assert f"{name:40s} {expected[0]:8.3f} {expected[1]:8.3f}" in shown
    large.run("errors", tmp_path / "torsions.npz", "soft", "--subset", "train", "--every", 3)
    assert f"{-(-len(scans) // 3)} scans, train" in capsys.readouterr().out


FAULTS = {
    "an array": (lambda data: data.pop("charge"), "cannot be read: .*charge"),
    "energies": (lambda data: data.update(energy_eV=data["energy_eV"][:-1]), "energy_eV has 69 rows, and .* for 70"),
    "atoms": (lambda data: data.update(z=data["z"][1:]), r"z has \d+ rows"),
    "smiles": (lambda data: data.update(smiles=data["smiles"][:-1]), "numbered 0 to 30, and smiles has 30"),
    "order": (lambda data: data["scan"].__setitem__(5, 0), "do not follow each other"),
    "other atoms": (lambda data: data["z"].__setitem__(10, 9), "scan 0 have different atoms"),
    "sizes": (lambda data: data["num_atoms"].__setitem__([0, 1], (8, 10)), "scan 0 have different atoms"),
    "charges": (lambda data: data["charge"].__setitem__(2, 1), "scan 0 have different atoms or charges"),
    "nan": (lambda data: data["energy_eV"].__setitem__(5, np.nan), "an energy of scan 1 is not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_file_are_named(large, tmp_path, fault):
    change, message = FAULTS[fault]
    data = arrays_of(some_scans())
    change(data)
    np.savez(tmp_path / "bad.npz", **data)
    with pytest.raises(SystemExit, match=message):
        large.run("errors", tmp_path / "bad.npz", "exact")


def test_other_mistakes_are_named(large, tmp_path, monkeypatch):
    (tmp_path / "text.npz").write_text("scans")
    good = tmp_path / "torsions.npz"
    for words, message in (
        ((tmp_path / "none.npz", "exact"), "none.npz cannot be read"),
        ((tmp_path / "text.npz", "exact"), "text.npz cannot be read"),
        ((good, "exact", "exact,exacd"), "^exacd: no such model file"),
        ((good, "exact,"), "name of the model is empty"),
        ((good, "exact", "--every", 0), "--every: take 1"),
    ):
        with pytest.raises(SystemExit, match=message):
            large.run("errors", *words)
    np.savez(tmp_path / "one.npz", **arrays_of(some_scans()[:1]))
    with pytest.raises(SystemExit, match=r"one.npz has no molecule of the subset test"):
        large.run("errors", tmp_path / "one.npz", "exact", "--subset", "test")

    def refuse(self, system, forces):
        raise ValueError("atom 0 is Fe")

    monkeypatch.setattr(Springs, "__call__", refuse)
    with pytest.raises(SystemExit, match="scan 0, CCO: atom 0 is Fe"):
        large.run("errors", good, "exact", "--subset", "train")


@pytest.mark.slow
def test_the_training_of_its_description(scripts, monkeypatch, tmp_path):
    """Scans and labels, as distil.py and label.py make them, train AIMNet2 further with large.yaml."""
    shards = scripts("shards")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    scans = [scan_of(smiles, name, seed=k) for k, (smiles, name) in enumerate(CHAINS.items())]
    teacher = Evaluator(load("aimnet2"))
    for k, (smiles, z, positions, _, charge) in enumerate(scans):  # deeper wells than those of the teacher
        own = [float(teacher(System.from_ase([Atoms(z, x)])).energy) for x in positions]
        scans[k] = (smiles, z, positions, BASE + 1.3 * np.array(own), charge)
    np.savez("torsions.npz", **arrays_of(scans))
    Path("work/geometries").mkdir(parents=True)
    for subset, names in (("train", ("CH3SH", "CH3Cl")), ("validation", ("CH4",))):
        given = [shards.Geometry(name, (a := molecule(name)).numbers, a.positions, 0) for name in names]
        shards.write_shard(Path(f"work/geometries/{subset}-own-0000.npz"), given)

    def script(*words):
        subprocess.run([warm_python(), *map(str, words)], check=True, capture_output=True, text=True)

    script(FOLDER / "distil.py", "scans", "torsions.npz", "work/scans", "--model", "aimnet2", "--start", "aimnet2")
    script(FOLDER / "label.py", "work/geometries", "work/labels", "--model", "aimnet2", "--frames", 2, "--every", 2)
    settings = ["batch_size=8", "max_epochs=1", "warmup_steps=0", "lr=6e-4", "num_threads=1", "device=cpu"]
    path = run_training(load_config(FOLDER / "large.yaml", [f"training.{setting}" for setting in settings]))
    metrics = json.loads((path.parent / "metrics.json").read_text())
    count = {name: metrics["validation"][name]["count"] for name in ("energy", "relative_energy", "forces", "charges")}
    # a scan of H2O2, of which two of four points are in one group, and CH4 as built with two frames of dynamics
    assert count == {"energy": 4 + 3, "relative_energy": 2 + 3, "forces": 3 * (4 * 4 + 3 * 5), "charges": 4 * 4 + 3 * 5}
    assert "ωB97X-D3(BJ)" in load(path).level_of_theory
    script(FOLDER / "large.py", "errors", "torsions.npz", path, "aimnet2", "--subset", "train", "--json", "errors.json")
    after, before = json.loads(Path("errors.json").read_text())["errors"].values()
    assert after["barrier"] < 0.7 * before["barrier"] and after["profile"] < before["profile"]
