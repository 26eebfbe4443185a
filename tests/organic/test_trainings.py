"""scripts/organic: trainings in a given time, and networks made of trained ones."""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time

import h5py
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.io import read
from organic_world import FOLDER, ROOT

from torchmdnet2 import System, checkpoint, load
from torchmdnet2.potentials import find_model


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
    """By far less than the errors of the model; the file has half of the size. The other potentials are rounded."""
    scripts("halve").halve(find_model("organic-1"), tmp_path / "half.tmn")
    size = find_model("organic-1").stat().st_size
    assert (tmp_path / "half.tmn").stat().st_size < 0.6 * size
    atoms = read(ROOT / "examples" / "data" / "ibuprofen.xyz")
    whole, half = (load(name)(System.from_ase([atoms])) for name in ("organic-1", tmp_path / "half.tmn"))
    error = (whole.forces - half.forces).abs().mean()
    assert 0 < error < 1e-3 and (whole.energy - half.energy).abs() < 5e-3  # eV/Å, eV


def test_students_drive_in_turn(scripts, monkeypatch, tmp_path):
    """Two processes on each GPU: of "half" every second one has a student, of "all" the students alternate."""
    run, started = scripts("run"), []
    options = argparse.Namespace(
        work=tmp_path, geometries=tmp_path, aimnet2="t.jpt", label_minutes=1, frames=1, every=1, largest_force=1,
        largest_spread=1, batch=1, timestep=1, keep=1, seed=0, first=[], student_every=None, per_gpu=4,
        most_frames=None, student=["a.tmn", "b.tmn"], student_drives="all",
    )  # fmt: skip
    runner = run.Runner([], options)
    monkeypatch.setattr(runner, "start", lambda name, words, gpus, **variables: started.append(words))
    monkeypatch.setattr(runner, "wait", lambda running: True)
    assert run.label(runner, tmp_path)
    options.student_drives = "half"
    assert run.label(runner, tmp_path)
    drivers = [words[words.index("--student") + 1] if "--student" in words else None for words in started]
    assert drivers == ["a.tmn", "b.tmn", "a.tmn", "b.tmn", None, "a.tmn", None, "b.tmn"]


def test_calibration_leaves_kinds_out(scripts, tmp_path):
    """Files with other kinds are copied without these; what has no other frames is passed over."""
    files = [tmp_path / f"train-{k}.h5" for k in range(2)]
    for path, kinds in zip(files, (("conformers", "protons"), ("protons",)), strict=True):
        with h5py.File(path, "w") as file:
            file.create_group("_metadata")
            for kind in kinds:
                file[f"{kind}/energy"] = [1.0, 2.0]
    without, folder = scripts("run").without, tmp_path / "calibration"
    assert len(without([], files, folder)) == 2
    (copy,) = without(["protons"], files, folder)  # the copies of the other choice are there
    with h5py.File(copy) as file:
        assert set(file) == {"_metadata", "conformers"} and file["conformers/energy"][:].tolist() == [1.0, 2.0]


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
    system = System.from_ase([read(ROOT / "examples" / "data" / "ibuprofen.xyz")])
    assert (grow(base, 3)(system).forces - base(system).forces).abs().mean() < 0.05  # eV/Å; of random weights: 0.19
    with pytest.raises(ValueError, match="has 2 layers"):
        grow(base, 2)


def test_free_atoms_change_no_energy(scripts):
    """Only training does that: the energy of a single atom then depends on the weights."""
    free_atoms, base, free = scripts("free_atoms").free_atoms, load("organic-1"), load("organic-1")
    free_atoms(free)
    assert base.subtract_isolated and not free.subtract_isolated
    molecule = System.from_ase([read(ROOT / "examples" / "data" / "ibuprofen.xyz")])
    atom = System.from_ase([Atoms("C")])  # neutral: the network reads the total charge
    for system in (molecule, atom):
        assert abs(float(base(system).energy - free(system).energy)) < 1e-4  # eV: float32 of the network
    with torch.no_grad():
        for potential in (base, free):
            potential.representation.linear_readout[-1] += 0.1
    same, changed = (abs(float(p(atom).energy - load("organic-1")(atom).energy)) for p in (base, free))
    assert same < 1e-4 < 1e-2 < changed
    with pytest.raises(ValueError, match="free already"):
        free_atoms(free)


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


@pytest.mark.parametrize("name", ["organic", "organic-small"])
def test_training_configurations(name):
    from torchmdnet2.training.config.config import load_config

    config = load_config(FOLDER / f"{name}.yaml")
    (d3,) = (prior for prior in config.priors if prior["name"] == "d3")
    assert (d3["s8"], d3["a1"], d3["a2"]) == (0.3908, 0.566, 3.128) and config.output.folder == f"work/{name}"


def test_the_repulsion_is_felt_in_collision_only(scripts, tmp_path):
    """Energies and forces of ibuprofen stay to the last bit; two waters at 0.65 times the radii repel, not attract."""
    script = scripts("repulsion")
    with pytest.raises(ValueError, match="already"):
        script.add_repulsion(load("organic-small"))
    without, shipped = load("organic-small", dtype=torch.float64), load("organic-small", dtype=torch.float64)
    kept = [prior for prior in without.priors if type(prior).__name__ != "ZBL"]
    without.priors = torch.nn.ModuleList(kept)
    without.config["priors"] = [prior for prior in without.config["priors"] if prior["name"] != "zbl"]
    atoms = System.from_ase([read(ROOT / "examples" / "data" / "ibuprofen.xyz")])
    assert torch.equal(without(atoms).forces, shipped(atoms).forces)
    pair = molecule("H2O"), molecule("H2O")
    pair[1].positions[:, 2] *= -1  # oxygen to oxygen, on one line
    shift = pair[0].positions[0] - pair[1].positions[0] + [0, 0, 0.65 * 1.32]
    pair[1].positions += shift
    water = System.from_ase([pair[0] + pair[1]])
    again = script.add_repulsion(without)
    torch.testing.assert_close(again(water).forces, shipped(water).forces, rtol=0, atol=0)
    apart = float(shipped(water).forces[3:, 2].sum())
    again.priors = torch.nn.ModuleList(kept)
    assert apart > 5 > -5 > float(again(water).forces[3:, 2].sum())


def test_radii_of_the_repulsion(scripts):
    """The trainings have it too; the sums are below all bonds, here the shortest ones."""
    script = scripts("repulsion")
    for name in ("organic", "organic-small"):
        listed = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["priors"][-1]
        assert (listed["radii"], listed["scale"]) == (script.RADII, script.SCALE)
        priors = load(name).config["priors"]
        assert [prior["radii"] for prior in priors if prior["name"] == "zbl"] == [script.RADII]
    shortest = {"CC": 1.20, "CN": 1.15, "CO": 1.128, "NN": 1.098, "OO": 1.21, "HH": 0.741, "OH": 0.957, "CH": 1.06}
    shortest |= {"NH": 1.01, "FH": 0.917, "OS": 1.43, "OP": 1.48, "OCl": 1.41, "BO": 1.20, "OSi": 1.6, "IO": 1.78}
    for pair, length in shortest.items():
        first, second = pair[0], pair[1:]
        assert script.RADII[first] + script.RADII[second] < 0.955 * length, pair


def test_mixed_weights(scripts, tmp_path):
    """Half-way and beyond, in every parameter; models of other architectures are refused."""
    start = load("organic-1")
    end = copy.deepcopy(start)
    with torch.no_grad():
        for weight in end.parameters():
            weight += 0.5
    checkpoint.save(end, tmp_path / "end.tmn")
    for share in (0.5, 1.5):
        scripts("mix").mix("organic-1", tmp_path / "end.tmn", share, tmp_path / "mixed.tmn")
        mixed = load(tmp_path / "mixed.tmn")
        assert mixed.calibration is None
        for (name, weight), before in zip(mixed.named_parameters(), start.parameters(), strict=True):
            torch.testing.assert_close(weight, before + 0.5 * share, rtol=0, atol=1e-6, msg=name)
    with pytest.raises(ValueError, match="organic-1 and organic-small have different parameters"):
        scripts("mix").mix("organic-1", "organic-small", 0.5, tmp_path / "none.tmn")
