"""Faults of files and of the command line that trials by hand found, one test each."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import Potential, load
from torchmdnet2.checkpoint import save, to_bytes
from torchmdnet2.cli import main
from torchmdnet2.importers.export import export_checkpoint

MODEL = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0}


@pytest.fixture(scope="module")
def potential():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Potential.from_config({"model": MODEL, "elements": [1, 8], "energy_scale": 0.2}).eval()


@pytest.fixture
def folder(potential, tmp_path, monkeypatch):
    """The working directory, with m.tmn, l.ckpt, and data.xyz of 6 frames whose energies are 0, 1, … eV."""
    monkeypatch.chdir(tmp_path)
    save(potential, "m.tmn")
    export_checkpoint(potential, "l.ckpt")
    write("data.xyz", [labelled(k) for k in range(6)])
    return tmp_path


def labelled(k: int) -> Atoms:
    atoms = molecule("H2O")
    atoms.rattle(0.03, seed=k)
    atoms.calc = SinglePointCalculator(atoms, energy=float(k), forces=np.zeros((3, 3)))
    return atoms


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- no command destroys what it reads ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["same", "dot", "symlink", "hard link", "absolute"])
@pytest.mark.parametrize("verb", ["export", "import", "evaluate", "md", "stability"])
def test_no_command_writes_over_its_input(capsys, folder, verb, way):
    """Whatever the input is called; the file still loads, nothing else is written, and the exit code is 2."""
    given, output = {
        "export": ("m.tmn", "m.ckpt"), "import": ("l.ckpt", "l.tmn"), "evaluate": ("data.xyz", "out.xyz"),
        "md": ("data.xyz", "md.xyz"), "stability": ("data.xyz", "stability_broken.xyz"),
    }[verb]  # fmt: skip
    os.rename(given, output)  # so that its suffix is the right one
    name = output
    if way == "symlink":
        os.rename(output, given)
        os.symlink(given, output)
        name = given
    elif way == "hard link":
        os.link(output, given)
        name = given
    elif way == "dot":
        (folder / "sub").mkdir()
        name = f"./sub/../{output}"
    elif way == "absolute":
        name = folder / output
    before = contents(folder)
    arguments = {
        "export": [name, output], "import": [name, output], "evaluate": ["m.tmn", name, "--output", output],
        "md": ["m.tmn", f"{name}@0", "--steps", 2, "--output", "md"],
        "stability": ["m.tmn", f"{name}@:", "--time", 0.001],
    }[verb]  # fmt: skip
    code, _, err = run(capsys, verb, *arguments)
    assert code == 2 and f"{output} is read by this command and would be written too" in err
    assert contents(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "m.tmn", "m.tmn"], ["import", "l.ckpt", "l.ckpt"], ["export", "m.tmn", "x.tmn"],
        ["import", "l.ckpt", "a.xyz"], ["import", "theirs.yaml", "theirs.tmn"], ["import", "theirs.yaml", "theirs.yaml"],
        ["evaluate", "m.tmn", "data.xyz", "--output", "m.tmn"], ["evaluate", "m.tmn", "data.xyz", "--output", "a.csv"],
        ["evaluate", "m.tmn", "da*.xyz", "--output", "data.xyz"], ["export", "m.tmn", "folder.ckpt"],
        ["evaluate", "m.tmn", "data.xyz@0:2", "--output", "data.xyz"],
        ["evaluate", "m.tmn", "data.xyz", "--split", "splits.xyz", "--output", "splits.xyz"],
        ["md", "m.tmn", "data.xyz", "--trajectory", "data.xyz"], ["md", "m.tmn", "md.png"], ["md", "m.tmn", "md.restart"],
        ["md", "m.tmn", "md.png", "--replicas", 2], ["md", "m.tmn", "md.1.xyz", "--replicas", 2],
        ["md", "m.tmn", "md.csv.old"],  # where the md.csv that is there would go
    ],
)  # fmt: skip
def test_outputs_that_are_refused(capsys, folder, arguments):
    """Every derived name, patterns of data files, wrong suffixes, folders: with exit code 2 and nothing changed."""
    (folder / "theirs.yaml").write_text("model: tensornet\nembedding_dimension: 16\ncutoff_upper: 4.5\n")
    (folder / "folder.ckpt").mkdir()
    (folder / "splits.xyz").write_text("{}")
    for name in ("md.png", "md.restart", "md.1.xyz", "md.csv", "md.csv.old"):
        write(name, molecule("H2O"), format="extxyz")
    before = contents(folder)
    code, _, err = run(capsys, *arguments)
    assert code == 2 and ("would be written" in err or "must end in" in err)
    assert contents(folder) == before
    load("m.tmn")


def test_existing_files_are_kept(capsys, folder):
    """What has the name of an output is .old afterwards, and export, import and evaluate say so."""
    (folder / "back.tmn").write_text("mine")
    (folder / "out.ckpt").write_text("mine")
    (folder / "out.xyz").write_text("mine")
    for arguments in (
        ["import", "l.ckpt", "back.tmn"],
        ["export", "m.tmn", "out.ckpt"],
        ["evaluate", "m.tmn", "data.xyz", "--output", "out.xyz"],
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 0 and f"note: the earlier {arguments[-1]} is now {arguments[-1]}.old" in err
        assert (folder / f"{arguments[-1]}.old").read_text() == "mine"
    assert load("back.tmn") is not None and len(read("out.xyz", ":")) == 6
    names = ["md.xyz", "md.csv", "md.png", "md.restart"]
    for name in (*names, "stability.json", "stability_broken.xyz"):
        (folder / name).write_text("mine")
    assert run(capsys, "md", "m.tmn", "data.xyz", "--steps", 10)[0] == 0
    assert run(capsys, "stability", "m.tmn", "data.xyz", "--time", 0.01, "--temperatures", 10, "--replicas", 1)[0] == 0
    for name in (*names, "stability.json", "stability_broken.xyz"):
        assert (folder / f"{name}.old").read_text() == "mine"


def test_what_cannot_be_written_leaves_what_was_there(potential, folder, monkeypatch):
    (folder / "out.ckpt").write_text("mine")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"out\.ckpt"):
            export_checkpoint(potential, "out.ckpt")
    assert (folder / "out.ckpt").read_text() == "mine" and not (folder / "out.ckpt.old").exists()


@pytest.mark.parametrize("key", ["train", "test", "split", "energies", "init", "config"])
@pytest.mark.parametrize("way", ["itself", "hard link"])
def test_train_does_not_replace_what_it_reads(capsys, folder, key, way):
    """Data, split, atoms, model and configuration in output.folder under the names of a run's files."""
    (folder / "run").mkdir()
    name = {"split": "splits.json", "init": "best.tmn", "config": "config.yaml"}.get(key, "outliers.xyz")
    target = folder / "run" / name
    config = {
        "data": {"train": "data.xyz"}, "model": MODEL, "training": {"max_epochs": 1, "device": "cpu"},
        "output": {"folder": "run", "overwrite": True},
    }  # fmt: skip
    mine = str(target) if way == "itself" else str(folder / f"mine{target.suffix}")
    if key in ("train", "test"):
        config["data"][key] = mine
    elif key == "split":
        config["data"]["split"] = {"file": mine}
    elif key == "energies":
        config["priors"] = [{"name": "atomref", "energies": mine}]
    elif key == "init":
        config = {**{k: v for k, v in config.items() if k != "model"}, "init": {"file": mine}}
    blob = (folder / ("m.tmn" if key == "init" else "data.xyz")).read_bytes()
    target.write_bytes(yaml.safe_dump(config).encode() if key == "config" else blob)
    if way == "hard link":
        os.link(target, mine)
    if key != "config":
        (folder / "c.yaml").write_text(yaml.safe_dump(config))
    before = contents(folder)
    code, _, err = run(capsys, "train", mine if key == "config" else "c.yaml")
    assert code == 2 and "where this training replaces it" in err
    assert contents(folder) == before
