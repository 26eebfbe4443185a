"""Faults of files that trials by hand found, one test each: what commands read and write."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import yaml
from ase import Atoms
from ase.build import molecule
from ase.io import read, write
from commands import MODEL, contents, fill, labelled, run, tiny

from torchmdnet2 import load
from torchmdnet2.checkpoint import save
from torchmdnet2.importers.torchmd_net import export_checkpoint


@pytest.fixture(scope="module")
def potential():
    return tiny()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with what `fill` makes."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


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
        ["import", "l.ckpt", "a.xyz"], ["import", "theirs.yaml", "theirs.tmn"],
        ["import", "theirs.yaml", "theirs.yaml"],
        ["evaluate", "m.tmn", "data.xyz", "--output", "m.tmn"], ["evaluate", "m.tmn", "data.xyz", "--output", "a.csv"],
        ["evaluate", "m.tmn", "da*.xyz", "--output", "data.xyz"], ["export", "m.tmn", "folder.ckpt"],
        ["evaluate", "m.tmn", "data.xyz@0:2", "--output", "data.xyz"],
        ["evaluate", "m.tmn", "data.xyz", "--split", "splits.xyz", "--output", "splits.xyz"],
        ["md", "m.tmn", "data.xyz", "--trajectory", "data.xyz"], ["md", "m.tmn", "md.png"],
        ["md", "m.tmn", "md.restart"],
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
        assert code == 0 and f"note: the earlier {arguments[-1]} was renamed to {arguments[-1]}.old" in err
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


# --- evaluate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (["data.xyz@1:4"], [1, 2, 3]), (["data.xyz@-1"], [5]), (["data.xyz@::2"], [0, 2, 4]), (["data.xyz@3"], [3]),
        (["more@home/a@b.xyz", "data.xyz@4:"], [0, 1, 4, 5]), (["more@home/a@b.xyz@1"], [1]),
    ],
)  # fmt: skip
def test_evaluate_takes_some_frames_of_a_file(capsys, folder, data, kept):
    """As md and stability do, and the names of the frames are those of the file."""
    (folder / "more@home").mkdir()
    write("frames.xyz", [labelled(k) for k in range(2)])
    os.rename("frames.xyz", "more@home/a@b.xyz")
    code, out, _ = run(capsys, "evaluate", "m.tmn", *data, "--json", "--output", "out.xyz")
    assert code == 0 and json.loads(out)["frames"] == len(kept)
    frames = read("out.xyz", ":")
    assert [frame.info["reference_energy"] for frame in frames] == kept
    assert [int(frame.info["frame"].rpartition(" ")[2]) for frame in frames] == kept
    start = [*data[:1], "--steps", 1, "--output", "o/"] if len(kept) == 1 else None
    if start is not None:
        assert run(capsys, "md", "m.tmn", *start)[0] == 0


def test_evaluate_refuses_frames_that_are_not_there(capsys, folder):
    for index in ("6", "7:9", "x", "1:x", ""):
        code, _, err = run(capsys, "evaluate", "m.tmn", f"data.xyz@{index}")
        assert code == 2 and err.startswith(f"torchmdnet2 evaluate: data.xyz@{index}: "), index
    assert "no such frame; there are 6, counted from 0 on" in run(capsys, "evaluate", "m.tmn", "data.xyz@6")[2]
    (folder / "splits.json").write_text(json.dumps({"test": {"files": ["data.xyz"], "indices": [1]}}))
    code, _, err = run(capsys, "evaluate", "m.tmn", "data.xyz@0", "--split", "splits.json")
    assert code == 2 and "--split" in err


def crystals(**labels) -> list[Atoms]:
    frames = []
    for k in range(2):
        atoms = Atoms("H2O", molecule("H2O").positions, cell=[5, 5, 5], pbc=True)
        atoms.rattle(0.02, seed=k)
        atoms.info.update({"E": 0.0, **labels})
        atoms.arrays["F"] = np.zeros((3, 3))
        frames.append(atoms)
    return frames


def test_evaluate_does_not_need_virials(capsys, folder, potential):
    """A model trained with data.keys.virial: on data with them, with stresses, with neither, and of another name."""
    keys = {"energy": "E", "forces": "F", "virial": "v"}
    save(potential, "v.tmn", {"config": {"data": {"keys": keys}}})
    virial = np.diag([1.0, 2.0, 3.0])
    write("v.xyz", crystals(v=virial))
    write("w.xyz", crystals(w=virial))
    write("s.xyz", crystals(st=-virial / 125))
    write("none.xyz", crystals())
    write("nothing.xyz", molecule("H2O"))

    def errors(*arguments):
        code, out, err = run(capsys, "evaluate", "v.tmn", *arguments, "--json")
        assert code == 0, err
        return json.loads(out), err

    whole, err = errors("v.xyz")
    assert "stress" in whole and err == ""
    assert errors("w.xyz", "--virial-key", "w")[0] == whole
    assert errors("s.xyz", "--stress-key", "st")[0]["stress"]["mae"] == pytest.approx(whole["stress"]["mae"], rel=1e-5)
    found, err = errors("none.xyz")
    assert found.keys() == whole.keys() - {"stress"} and "note: no frame has 'v'" in err
    assert errors("v.xyz", "--virial-key", "null")[1] == ""
    save(potential, "s.tmn", {"config": {"data": {"keys": {**keys, "virial": None, "stress": "st"}}}})
    code, out, _ = run(capsys, "evaluate", "s.tmn", "w.xyz", "--virial-key", "w", "--json")
    assert code == 0 and json.loads(out) == whole
    for asked in (["none.xyz", "--virial-key", "v"], ["nothing.xyz"]):
        code, _, err = run(capsys, "evaluate", "v.tmn", *asked)
        assert code == 1 and "no frame has" in err


# --- numbers in messages are those of the user's file ------------------------------------------------------------


@pytest.fixture
def odd(folder):
    """el.xyz, clash.xyz and flat.xyz: frame 4 of 7 has an unknown element, overlapping atoms, no cell."""
    methane, clash, flat = labelled(0), labelled(0), labelled(0)
    methane.numbers[2] = 6
    clash.positions[1] = clash.positions[0] + 0.05
    flat.pbc = True
    for name, atoms in (("el", methane), ("clash", clash), ("flat", flat)):
        frames = [labelled(k) for k in range(6)]
        write(f"{name}.xyz", [*frames[:4], atoms, *frames[4:]])
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "m.tmn", "el.xyz"], "el.xyz, frame 4: atom 2 is C"),
        (["evaluate", "m.tmn", "data.xyz", "el.xyz@3:", "--batch-size", "3"], "el.xyz, frame 4: atom 2 is C"),
        (["evaluate", "m.tmn", "flat.xyz"], "flat.xyz, frame 4: "),
        (["stability", "m.tmn", "el.xyz@2:", "--time", "0.01"], "frame 4: atom 2 is C"),
        (["stability", "m.tmn", "clash.xyz@3:", "--time", "0.01"], "frame 4: atom 0 (O) and atom 1 (H) are"),
        (["stability", "m.tmn", "flat.xyz@3:", "--time", "0.01"], "frame 4: "),
        (["stability", "m.tmn", "data.xyz@9"], "data.xyz@9: no such frame; there are 6, counted from 0 on"),
        (["md", "m.tmn", "data.xyz@9"], "data.xyz@9: no such frame; there are 6, counted from 0 on"),
        (["md", "m.tmn", "el.xyz@4"], "atom 2 is C"),
    ],
)
def test_messages_count_as_the_file_does(capsys, odd, arguments, words):
    code, _, err = run(capsys, *arguments)
    assert code != 0 and words in err


def test_the_report_of_stability_counts_as_the_file_does(capsys, folder):
    some = ["--time", 0.01, "--replicas", 2, "--temperatures", 10]
    assert run(capsys, "stability", "m.tmn", "data.xyz@3::2", *some)[0] == 0
    assert [found["frame"] for found in json.loads((folder / "stability.json").read_text())["runs"]] == [3, 5]
