"""scripts/organic: shards, geometries, dynamics, labels by a teacher that is a formula; RDKit where there is one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.io import read

from torchmdnet2 import System, load
from torchmdnet2.data import open_dataset
from torchmdnet2.potentials import find_model

FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "organic"
NAMES = ("shards", "teachers", "label", "protons", "geometries", "molecules", "halve", "grow", "run")
OPTIONS = argparse.Namespace(
    frames=2, every=3, student_every=None, timestep=0.5, keep=0.5, largest_force=30.0, largest_spread=1.5, batch=4,
    seed=0,
)  # fmt: skip
KEYS = {"energy": "energy", "forces": "forces", "charges": "charges"}


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script by its name; all are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: __import__(name)
    for name in NAMES:
        sys.modules.pop(name, None)


def molecules(scripts):
    shards = scripts("shards")
    water = np.array([[0.0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]])
    rng = np.random.default_rng(0)
    waters = [shards.Geometry(f"w{k}", np.array([8, 1, 1]), water + rng.normal(0, 0.05, (3, 3)), 0) for k in range(6)]
    return [*waters, shards.Geometry("OH", np.array([8, 1]), water[:2], -1)]


def springs(scripts):
    """A teacher: springs of 1 Å between all atoms, 5 eV/Å², and charges that are even."""
    teachers = scripts("teachers")

    class Springs(teachers.Teacher):
        description = level = "springs"
        device = torch.device("cpu")

        def label(self, numbers, positions, charge):
            r = positions.double().detach().requires_grad_()
            n = r.shape[1]
            i, j = torch.triu_indices(n, n, 1)
            energy = (5 / 2 * ((r[:, i] - r[:, j]).norm(dim=2) - 1) ** 2).sum(1)
            (gradient,) = torch.autograd.grad(energy.sum(), r)
            even = (charge.double() / n)[:, None].expand(-1, n)
            return teachers.Labels(energy.detach(), -gradient, even, torch.zeros(len(r)))

    return Springs()


def test_shards(scripts, tmp_path):
    shards, given = scripts("shards"), molecules(scripts)
    assert shards.write_shard(tmp_path / "a.npz", given) == 7
    for found, wanted in zip(shards.read_shard(tmp_path / "a.npz"), given, strict=True):
        assert found.name == wanted.name and found.charge == wanted.charge
        assert np.array_equal(found.numbers, wanted.numbers)
        assert np.abs(found.positions - (wanted.positions - wanted.positions.mean(0))).max() <= 0.00051
    with pytest.raises(ValueError, match="larger than 64"):
        shards.write_shard(tmp_path / "b.npz", [given[0]._replace(positions=np.eye(3) * 60)])
    assert not (tmp_path / "b.npz").exists()
    assert shards.write_shard(tmp_path / "c.npz", []) == 0 and not list(shards.read_shard(tmp_path / "c.npz"))


def test_settings_are_kept(scripts, tmp_path):
    shards = scripts("shards")
    shards.keep_settings(tmp_path, "labels", {"seed": 1}, ["numpy", "not-a-package"])
    shards.keep_settings(tmp_path, "labels", {"seed": 1}, ["numpy", "not-a-package"])
    known = json.loads((tmp_path / "labels.json").read_text())
    assert known["versions"] == [{"numpy": np.__version__, "not-a-package": "not installed"}]
    with pytest.raises(SystemExit, match="other settings"):
        shards.keep_settings(tmp_path, "labels", {"seed": 2}, ["numpy"])


def test_labels_are_those_of_the_teacher(scripts, tmp_path):
    """What training reads is what the teacher says of those positions; the first frame is the geometry itself."""
    shards, label, teacher = scripts("shards"), scripts("label"), springs(scripts)
    given = molecules(scripts)
    shards.write_shard(tmp_path / "train-x-0000.npz", given[:3])
    shards.write_shard(tmp_path / "train-y-0000.npz", given[3:])
    shards.write_shard(tmp_path / "test-x-0000.npz", given[:1])
    jobs = label.jobs_of(tmp_path, 1, 0)  # one structure of 32 atoms, four of up to 8
    assert jobs[0].name == "test-003-0000"  # first
    assert {job.name: len(job.geometries) for job in jobs[1:]} == {
        "train-002-0000": 1,
        "train-003-0000": 3,
        "train-003-0001": 3,
    }
    targets = [tmp_path / f"{name}.h5" for name in ("train-002-0000", "train-003-0000", "train-003-0001")]
    for target in targets:
        (job,) = (job for job in jobs if job.name == target.stem)
        assert label.label_job(job, target, label.Sampler(teacher, None, OPTIONS)) == 3 * len(job.geometries)
    data = open_dataset(targets, keys=KEYS)
    assert len(data) == 21 and [float(data[k].system.charge) for k in (0, 20)] == [-1, 0]
    kinds = [data.name(k).split("'")[1] for k in range(21)]
    assert (kinds.count("x"), kinds.count("y")) == (9, 12)
    for sample in (data[k] for k in range(21)):
        system = sample.system
        found = teacher.label(system.z[None], system.pos[None], system.charge)
        assert abs(float(sample.labels["energy"] - found.energy)) < 1e-5
        assert float((sample.labels["forces"] - found.forces[0]).abs().max()) < 1e-5
        assert abs(float(sample.labels["charges"].sum() - system.charge)) < 1e-6
    first = next(shards.read_shard(tmp_path / "train-x-0000.npz")).positions
    whole = [data[k].system.pos.numpy() for k in range(21) if data[k].system.num_atoms == 3]
    assert len(whole) == 18 and any(np.abs(positions - first).max() < 1e-5 for positions in whole)
    again = tmp_path / "again.h5"
    label.label_job(next(job for job in jobs if job.name == targets[0].stem), again, sampler_of(label, teacher))
    other = open_dataset(again, keys=KEYS)
    assert all(torch.equal(data[k].system.pos, other[k].system.pos) for k in range(3))


def sampler_of(label, teacher):
    return label.Sampler(teacher, None, OPTIONS)


def test_dynamics_has_the_temperatures(scripts):
    """Springs of 300 K have kT/2 for each of their modes, within the error of the mean."""
    label, shards = scripts("label"), scripts("shards")
    pair = shards.Geometry("HH", np.array([1, 1]), np.array([[0.0, 0, 0], [1.0, 0, 0]]), 0)
    options = argparse.Namespace(**{**vars(OPTIONS), "frames": 6, "every": 100, "batch": 4000})
    sampler = label.Sampler(springs(scripts), None, options)
    frames = list(sampler.frames([pair] * 2000, (300.0,), 1))[2:]
    energies = torch.cat([labels.energy for _, labels, _ in frames])
    kT = 300 * label.BOLTZMANN
    assert abs(float(energies.mean()) / (kT / 2) - 1) < 0.06, float(energies.mean())


def test_what_is_left_out(scripts, tmp_path):
    """A frame with huge forces is counted and left out, and the others are not touched by it."""
    shards, label, teacher = scripts("shards"), scripts("label"), springs(scripts)
    given = molecules(scripts)
    wild = given[0]._replace(positions=given[0].positions * 20)
    for name, geometries in (("with", [given[1], wild]), ("alone", [given[1]])):
        shards.write_shard(tmp_path / f"{name}.npz", geometries)
        sampler = label.Sampler(teacher, None, argparse.Namespace(**{**vars(OPTIONS), "frames": 0}))
        geometries = list(shards.read_shard(tmp_path / f"{name}.npz"))
        job = label.Job(name, geometries, ["x"] * len(geometries))
        assert label.label_job(job, tmp_path / f"{name}.h5", sampler) == 1
        assert sampler.left_out["large forces"] == (name == "with")


def test_trainings_follow_each_other(scripts, monkeypatch, tmp_path):
    """The next one starts before one ends, and has what is left; one that fails early is begun again, once."""
    run, started, said = scripts("run"), [], []
    options = argparse.Namespace(
        work=tmp_path, output=tmp_path, geometries=tmp_path,
        models=[("organic-small", 2 / 60, []), ("organic", None, [0, 1])],
        minutes=1.0, reserve=0.5, ahead=1.0, dynamics=0, picoseconds=1, half=False,
        init={"organic": "a.tmn"}, set=[("organic", "training.lr", "1e-4"), (None, "training.precision", "tf32")],
    )  # fmt: skip
    runner = run.Runner([], options)

    def start(name, words, gpus):
        minutes = next(word.split("=")[1] for word in map(str, words) if word.startswith("training.max_minutes="))
        started.append((name, time.monotonic() - runner.began, 60 * float(minutes)))
        given = ("init", "training.lr", "training.precision")
        said.append((gpus, {word for word in map(str, words) if word.startswith(given)}))
        (runner.folder / f"{name}.log").write_text("")
        code = "raise SystemExit(1)" if name == "organic" else "import time; time.sleep(2)"
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    monkeypatch.setattr(runner, "start", start)
    assert run.train(runner, [0])  # the second attempt went well
    assert [name for name, _, _ in started] == ["organic-small", "organic", "organic-again"]
    at, minutes = [row[1] for row in started], [row[2] for row in started]
    assert at[1] >= 0.9 and at[1] + minutes[1] == pytest.approx(30, abs=1)  # seconds; the rest is for the evaluation
    assert at[2] + minutes[2] == pytest.approx(30, abs=1)
    everywhere, own = "training.precision=tf32", {"init.file=a.tmn", "training.lr=1e-4"}
    assert said == [([0], {everywhere}), ([0, 1], {everywhere, *own}), ([1], {everywhere, *own})]
    assert {path.name for path in tmp_path.glob("*.done")} == {"organic-small.done", "organic.done"}


def test_rounded_weights_change_little(scripts, tmp_path):
    """By far less than the errors of the model; the file has half of the size."""
    scripts("halve").halve(find_model("organic-small"), tmp_path / "half.tmn")
    size = find_model("organic-small").stat().st_size
    assert (tmp_path / "half.tmn").stat().st_size < 0.6 * size
    atoms = read(Path(__file__).parents[1] / "examples" / "data" / "ibuprofen.xyz")
    whole, half = (load(name)(System.from_ase([atoms])) for name in ("organic-small", tmp_path / "half.tmn"))
    error = (whole.forces - half.forces).abs().mean()
    assert 0 < error < 1e-3 and (whole.energy - half.energy).abs() < 5e-3  # eV/Å, eV


def test_more_layers(scripts):
    """The new ones add nothing at first, and divide the tensors by their norms; they can be trained."""
    grow, base = scripts("grow").grow, load("organic-small")
    grown = grow(base, 4)
    layers = grown.representation.layers
    assert len(layers) == 4 and grown.config["model"]["num_layers"] == 4 == len(grown.representation.linear_readout) - 1
    for k, old in ((0, 0), (3, 1)):
        for name, weight in base.representation.layers[old].state_dict().items():
            assert torch.equal(layers[k].state_dict()[name], weight)
    x = torch.randn(5, 9, 64)
    for k in (1, 2):
        layers[k].messages = lambda y, *rest: y
        assert torch.equal(layers[k](x, None, None, None, None, torch.ones(5)), layers[k].normalise(x))
    stages = [float(weight.detach().abs().sum()) for weight in grown.representation.linear_readout]
    kept = [float(weight.detach().abs().sum()) for weight in base.representation.linear_readout]
    assert stages == [*kept[:2], 0, 0, kept[2]]
    system = System.from_ase([read(Path(__file__).parents[1] / "examples" / "data" / "ibuprofen.xyz")])
    assert (grow(base, 3)(system).forces - base(system).forces).abs().mean() < 0.05  # eV/Å; of random weights: 0.19
    with pytest.raises(ValueError, match="has 2 layers"):
        grow(base, 2)


def test_words_of_the_command_line(scripts):
    run = scripts("run")
    assert run.turn("organic-small=6.5") == ("organic-small", 6.5, []) and run.numbers("0,1") == [0, 1]
    assert run.turn("organic@0,1") == ("organic", None, [0, 1])
    assert run.begin("organic=old.tmn") == ("organic", "old.tmn")
    assert run.setting("organic:training.lr=1e-3") == ("organic", "training.lr", "1e-3")
    assert run.setting("data.cache=c:/x") == (None, "data.cache", "c:/x")
    for parse, text in ((run.turn, "orgnic"), (run.begin, "organic"), (run.setting, "x:a=1"), (run.setting, "a")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


@pytest.mark.parametrize("subset", ["train", "test"])
def test_a_student_drives_training_frames(scripts, tmp_path, subset):
    """Where it drives: larger steps, frames where it is most wrong, and a structure that runs away is stopped."""
    label, teacher, given = scripts("label"), springs(scripts), molecules(scripts)[:6]

    class Student:
        description, sha256, calls = "student", "0", 0

        def forces(self, numbers, positions, charge):
            self.calls += 1
            forces = teacher.forces(numbers, positions, charge)
            forces[:3] *= 1.5
            forces[5] = float("nan")
            return forces

    student = Student()
    options = argparse.Namespace(**{**vars(OPTIONS), "frames": 4, "every": 4, "timestep": 1.0})
    sampler = label.Sampler(teacher, student, options)
    job = label.Job(f"{subset}-003-0000", given, ["x"] * 6)
    count = label.label_job(job, tmp_path / "a.h5", sampler)
    if subset == "test":  # by the teacher, at most three frames, whatever the seed
        assert student.calls == 0 and count == 6 * (1 + label.HELD_OUT_FRAMES)
        options.seed = 5
        label.label_job(job, tmp_path / "b.h5", sampler)
        one, other = (open_dataset(tmp_path / f"{name}.h5", keys=KEYS) for name in "ab")
        assert all(torch.equal(one[k].system.pos, other[k].system.pos) for k in range(count))
    else:
        assert student.calls == 1 + 4 * 2 and sampler.left_out["ran away"] == 4
        assert count == 6 + 4 * 3 and sampler.left_out["student is right"] == 4 * 2
        options.student_every = 8
        student.calls = 0
        label.label_job(job, tmp_path / "b.h5", sampler)
        assert student.calls == 1 + 4 * 4


def test_kinds_that_come_first(scripts, tmp_path):
    """They are in the first jobs of training, filled up with others of their size; nothing is lost or doubled."""
    shards, label = scripts("shards"), scripts("label")
    given = molecules(scripts)
    shards.write_shard(tmp_path / "train-x-0000.npz", [*given[:6] * 8, *given[6:] * 8])
    shards.write_shard(tmp_path / "train-y-0000.npz", given[:5])
    shards.write_shard(tmp_path / "test-y-0000.npz", given[:1])
    jobs = label.jobs_of(tmp_path, 1, 0, ["y"])  # four to a job
    assert jobs[0].name.startswith("test")
    assert [job.kinds.count("y") for job in jobs[1:3]] in ([4, 1], [1, 4], [3, 2], [2, 3])
    assert all(len(job.kinds) in (3, 4) for job in jobs[1:]) and not any("y" in job.kinds for job in jobs[3:])
    names = [g.name for job in jobs for g in job.geometries]
    assert len(names) == len(set(names)) == 48 + 8 + 5 + 1
    without = label.jobs_of(tmp_path, 1, 0)
    assert any("y" in job.kinds for job in without[3:])  # otherwise this shows nothing
    assert [g.name for g in without[0].geometries] == [g.name for g in jobs[0].geometries]


def test_gfn2_agrees_with_ase(scripts):
    pytest.importorskip("tblite")
    from ase import Atoms
    from tblite.ase import TBLite

    geometry = molecules(scripts)[-1]
    found = (
        scripts("teachers")
        .GFN2()
        .label(torch.as_tensor(geometry.numbers)[None], torch.as_tensor(geometry.positions)[None], torch.tensor([-1.0]))
    )
    atoms = Atoms(geometry.numbers, geometry.positions, calculator=TBLite(method="GFN2-xTB", verbosity=0, charge=-1))
    assert abs(float(found.energy) - atoms.get_potential_energy()) < 1e-5
    assert np.abs(found.forces[0].numpy() - atoms.get_forces()).max() < 1e-5


@pytest.mark.parametrize("name", ["organic", "organic-small"])
def test_training_configurations(name):
    from torchmdnet2.training.config.config import load_config

    config = load_config(FOLDER / f"{name}.yaml")
    (d3,) = (prior for prior in config.priors if prior["name"] == "d3")
    assert (d3["s8"], d3["a1"], d3["a2"]) == (0.3908, 0.566, 3.128) and config.output.folder == f"work/{name}"


# --- with RDKit --------------------------------------------------------------------------------------------------


def test_dimers_touch(scripts):
    pytest.importorskip("rdkit", reason="geometries need RDKit")
    geometries, given = scripts("geometries"), molecules(scripts)
    rng = np.random.default_rng(0)
    for closeness in (0.75, 0.95, 1.5):
        pair = geometries.beside(given[0], given[-1], closeness, rng)
        a, b = pair.positions[:3], pair.positions[3:]
        touching = np.add.outer([geometries.RADII[8], 1.1, 1.1], [geometries.RADII[8], 1.1])
        ratio = np.linalg.norm(a[:, None] - b[None], axis=2) / touching
        assert abs(ratio.min() - closeness) < 1e-6 and pair.charge == -1
        assert abs(np.linalg.norm(b[0] - b[1]) - np.linalg.norm(given[-1].positions[0] - given[-1].positions[1])) < 1e-9


def test_from_smiles_to_shards(scripts, tmp_path, monkeypatch):
    """Protonation states stay with their parent, no scaffold is in two subsets, and a second run makes nothing anew."""
    pytest.importorskip("rdkit", reason="molecules and geometries need RDKit")
    names = [
        "NCC(=O)O",
        "c1ccncc1C",
        "CCO",
        "CC1CCCCC1O",
        "OCC1CCCCC1",
        "[Na+].CC(=O)[O-]",
        "C[CH2]",
        "C(",
        "c1ccccc1Br",
    ]
    (tmp_path / "smiles.txt").write_text("\n".join(names))
    run(
        monkeypatch,
        scripts("molecules"),
        tmp_path / "smiles.txt",
        "--output",
        tmp_path / "m.jsonl.gz",
        "--held-out",
        0.3,
    )
    import gzip

    rows = [json.loads(line) for line in gzip.open(tmp_path / "m.jsonl.gz", "rt")]
    assert {row["smiles"] for row in rows} >= {
        "NCC(=O)O",
        "[NH3+]CC(=O)O",
        "NCC(=O)[O-]",
        "[NH3+]CC(=O)[O-]",
        "CC(=O)[O-]",
    }
    subsets: dict[str, set[str]] = {}
    for row in rows:
        subsets.setdefault(row["scaffold"], set()).add(row["subset"])
    assert all(len(found) == 1 for found in subsets.values()) and not any("Na" in row["smiles"] for row in rows)
    arguments = [
        tmp_path / "m.jsonl.gz",
        tmp_path / "g",
        "--waters",
        2,
    ]
    run(monkeypatch, scripts("geometries"), *arguments)
    made = {path.name: path.read_bytes() for path in (tmp_path / "g").glob("*.npz")}
    assert any(name.startswith("train-protons") for name in made)
    assert any(name.startswith("train-conformers") for name in made)
    for name in made:
        for geometry in scripts("shards").read_shard(tmp_path / "g" / name):
            electrons = int(geometry.numbers.sum()) - geometry.charge
            distances = np.linalg.norm(geometry.positions[:, None] - geometry.positions[None], axis=2)
            assert electrons % 2 == 0 and distances[np.triu_indices(len(distances), 1)].min() > 0.5
    one = "train-conformers-0000.npz"  # the last one of its shard
    (tmp_path / "g" / one).unlink()
    run(monkeypatch, scripts("geometries"), *arguments)
    again = {path.name: path.read_bytes() for path in (tmp_path / "g").glob("*.npz")}
    assert again.keys() == made.keys() and all(again[name] == made[name] for name in made if name != one)
    for found, wanted in zip(*(list_of(scripts, tmp_path, blob) for blob in (again[one], made[one])), strict=True):
        assert np.array_equal(found.positions, wanted.positions)


def test_analogues_have_rare_elements(scripts):
    """Each pattern makes a closed-shell molecule in which one atom has become another one of its group."""
    pytest.importorskip("rdkit", reason="molecules need RDKit")
    from rdkit import Chem

    molecules = scripts("molecules")
    whole = Chem.MolFromSmiles("O=C(O)c1c(Cl)sc(P(C)(C)=O)c1C(C)(CSC)CF")
    found = set()
    for number in range(len(molecules.ANALOGUES)):
        other = molecules.analogue(whole, number)
        if other is not None:
            electrons = sum(a.GetAtomicNum() + a.GetTotalNumHs() for a in other.GetAtoms())
            assert electrons % 2 == 0 and not molecules.Descriptors.NumRadicalElectrons(other), Chem.MolToSmiles(other)
            found |= {a.GetAtomicNum() for a in other.GetAtoms()} & {5, 14, 33, 34, 53}
    assert found == {5, 14, 33, 34, 53}


def list_of(scripts, folder, blob):
    (folder / "x.npz").write_bytes(blob)
    return list(scripts("shards").read_shard(folder / "x.npz"))


def run(monkeypatch, script, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    script.main()
