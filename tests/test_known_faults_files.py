"""Faults of files and of the command line that trials by hand found, one test each."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import Potential, load
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.console import SteadyConsole
from torchmdnet2.importers.export import export_checkpoint
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.training.reporting.log import TrainingLog

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


# --- md and what is printed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".xyz", ".traj", ".dcd"])
def test_a_full_disk_leaves_whole_frames(potential, folder, suffix):
    """A file may grow to a size that ends within a frame, as a disk has. What is there can be read, and continued."""
    resource = pytest.importorskip("resource")

    def options(name, restart=False):
        trajectories = (f"{name}{suffix}",)
        return MDOptions(
            steps=60, every=2, restart_every=4, output=name, trajectories=trajectories, restart=restart
        )  # fmt: skip

    def count(name):
        if suffix != ".dcd":
            return len(read(f"{name}{suffix}", ":"))
        blob = (folder / f"{name}{suffix}").read_bytes()
        frames, size = int.from_bytes(blob[8:12], "little"), 3 * (3 * 4 + 8)
        assert len(blob) == 92 + 92 + 12 + frames * size
        return frames

    run_md(potential, molecule("H2O"), options("whole"))
    assert count("whole") == 31
    largest = (folder / f"whole{suffix}").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # restart files are smaller
    limit = max(largest // 2 + 17, (folder / "whole.restart").stat().st_size)
    if limit >= largest:
        pytest.skip("the trajectory is smaller than the restart file")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(OSError, match=r"could not be written.*make room, and continue"):
            run_md(potential, molecule("H2O"), options("cut"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 0 < count("cut") < 31
    rows = (folder / "cut.csv").read_text()
    assert rows.endswith("\n") and all(line.count(",") == 5 for line in rows.splitlines())
    run_md(potential, molecule("H2O"), options("cut", restart=True))
    assert count("cut") == 31
    if suffix != ".traj":
        assert (folder / f"cut{suffix}").read_bytes() == (folder / f"whole{suffix}").read_bytes()


def test_a_row_is_written_whole_or_not_at_all(tmp_path):
    resource = pytest.importorskip("resource")
    from torchmdnet2.files import append

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "table", "ab", buffering=0) as file:
        append(file, b"0123456789")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
            with pytest.raises(OSError, match="File too large"):
                append(file, b"0123456789")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "table").read_bytes() == b"0123456789"


def test_a_reader_that_leaves_does_not_end_a_simulation(folder):
    """As in `torchmdnet2 md … | head -1`."""
    command = [sys.executable, "-m", "torchmdnet2", "md", "m.tmn", "data.xyz", "--steps", "400", "--every", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("step")
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0
    assert len((folder / "md.csv").read_text().splitlines()) == 42


def test_a_reader_that_leaves_does_not_end_a_training(monkeypatch):
    assert isinstance(TrainingLog(None).console, SteadyConsole)
    reading, writing = os.pipe()
    os.close(reading)
    closed = open(writing, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", closed)
    log = TrainingLog(None)
    for _ in range(3):
        log.say("a line")
    closed.close()  # flushes what is left


def test_a_stdout_that_the_shell_has_closed(monkeypatch, folder):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info", "m.tmn"]) == 0


def test_the_restart_of_a_finished_run_has_no_speed(capsys, folder):
    arguments = ["md", "m.tmn", "data.xyz", "--steps", 20]
    assert "ns/day" in run(capsys, *arguments)[1]
    code, out, _ = run(capsys, *arguments, "--restart")
    assert code == 0 and "nothing is left to do" in out and "nan" not in out and "ns/day" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "m.tmn", "data.xyz"], ["evaluate", "m.tmn", "data.xyz", "--json"], ["card", "m.tmn"],
        ["info", "m.tmn"], ["info", "m.tmn", "--json"], ["config"], ["md", "m.tmn", "data.xyz", "--steps", "10"],
        ["stability", "m.tmn", "data.xyz", "--time", "0.01", "--replicas", "1", "--temperatures", "10"],
        ["export", "m.tmn", "Å\udce9.ckpt"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_every_character_can_be_printed(potential, folder, monkeypatch, arguments, encoding):
    save(potential, "m.tmn", {"licence": "CC0 – für alle", "units": "eV/Å³"})
    written = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding=encoding, errors="strict"))
    assert main(arguments) == 0
    sys.stdout.flush()
    if "--json" in arguments:
        facts = json.loads(written.getvalue().decode(encoding))
        assert "eV/Å" in json.dumps(facts, ensure_ascii=False)
    elif arguments[0] == "evaluate":
        assert "meV/A" in written.getvalue().decode(encoding).replace("Å", "A")


@pytest.mark.parametrize("verb", ["evaluate", "md", "export"])
def test_messages_of_errors_can_be_printed(folder, monkeypatch, verb):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii", errors="strict"))
    assert main([verb, "Å.tmn", "Å.xyz"]) in (1, 2)
    sys.stderr.flush()
    assert b"A.tmn" in written.getvalue() or b"A.xyz" in written.getvalue()


def test_constant_pressure_is_pointed_elsewhere(capsys, folder):
    code, _, err = run(capsys, "md", "m.tmn", "data.xyz", "--ensemble", "npt")
    assert code == 2 and "ASE" in err and "OpenMM" in err and "docs/openmm.md" in err


def test_time_is_in_ps_everywhere(potential, folder):
    """Also when a run goes on whose first frames, of an earlier version, tell it in fs."""
    run_md(potential, molecule("H2O"), MDOptions(steps=20, every=10, timestep=0.3, output="a"))
    frames, rows = read("a.xyz", ":"), (folder / "a.csv").read_text().splitlines()[1:]
    assert [frame.info["time_ps"] for frame in frames] == pytest.approx([float(row.split(",")[1]) for row in rows])
    assert all("time_fs" not in frame.info for frame in frames)
    text = (folder / "a.xyz").read_text()
    for time in (0.003, 0.006):
        assert f"time_ps={time}" in text
        text = text.replace(f"time_ps={time}", f"time_fs={1e3 * time:.3f}")
    text = text.replace("time_ps=0.0", "time_fs=0.0")
    assert len(text) == len((folder / "a.xyz").read_text())  # as far as the restart file says
    (folder / "a.xyz").write_text(text)
    run_md(potential, molecule("H2O"), MDOptions(steps=30, every=10, timestep=0.3, output="a", restart=True))
    assert [sorted(frame.info.keys() & {"time_fs", "time_ps"}) for frame in read("a.xyz", ":")] == [
        ["time_fs"], ["time_fs"], ["time_fs"], ["time_ps"],
    ]  # fmt: skip
