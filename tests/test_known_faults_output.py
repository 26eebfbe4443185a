"""Faults of what is written and printed on the way that trials by hand found, one test each."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from ase.build import molecule
from ase.io import read
from commands import fill, run, tiny

from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.core.console import SteadyConsole
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.trajectory import read_restart, write_restart
from torchmdnet2.training.reporting.log import TrainingLog


@pytest.fixture(scope="module")
def potential():
    return tiny()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with what `fill` makes."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


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
    from torchmdnet2.core.files import append

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
    command = [sys.executable, "-m", "torchmdnet2", "md", "m.tmn", "data.xyz@-1", "--steps", "400", "--every", "10"]
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
    arguments = ["md", "m.tmn", "data.xyz@-1", "--steps", 20]
    assert "ns/day" in run(capsys, *arguments)[1]
    code, out, _ = run(capsys, *arguments, "--restart")
    assert code == 0 and "already complete" in out and "nan" not in out and "ns/day" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "m.tmn", "data.xyz"], ["evaluate", "m.tmn", "data.xyz", "--json"], ["card", "m.tmn"],
        ["info", "m.tmn"], ["info", "m.tmn", "--json"], ["config"], ["md", "m.tmn", "data.xyz@-1", "--steps", "10"],
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


def test_constant_pressure_of_a_molecule_is_refused(capsys, folder):
    """The message says what the structure lacks, and what to do."""
    code, _, err = run(capsys, "md", "m.tmn", "data.xyz", "--ensemble", "npt")
    assert code == 1 and "has no periodic cell" in err and "Give the ensemble nvt" in err


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
    state, facts = read_restart("a.restart", {})
    for mark in facts["trajectories"].values():
        del mark["checksum"]  # nor had restart files of that version one
    write_restart("a.restart", state, facts)
    run_md(potential, molecule("H2O"), MDOptions(steps=30, every=10, timestep=0.3, output="a", restart=True))
    assert [sorted(frame.info.keys() & {"time_fs", "time_ps"}) for frame in read("a.xyz", ":")] == [
        ["time_fs"], ["time_fs"], ["time_fs"], ["time_ps"],
    ]  # fmt: skip
