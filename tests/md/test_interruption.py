"""Runs that are ended from outside: killed at any moment, or asked to stop."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from ase.build import molecule
from ase.io import read, write
from warm import warm_python

STEPS = 400  # seconds, so that a signal sent in the middle arrives in the middle


def start(model_file, folder, name, *more, python=sys.executable):
    """The command, in a process of its own; restart files often."""
    write(folder / "water.xyz", molecule("H2O"))
    command = [
        python, "-m", "torchmdnet2", "md", model_file, folder / "water.xyz", "--steps", STEPS, "--every", 10,
        "--restart-every", 40, "--ensemble", "nvt", "--output", folder / name, "--device", "cpu", *more,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # jobs in the background are started with SIGINT ignored
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )


def finish(model_file, folder, name, *more):
    """A run that nothing interrupts."""
    process = start(model_file, folder, name, *more, python=warm_python())
    assert process.wait() == 0, process.stderr.read().decode()


def wait_for(path, size, process):
    """Until a file has grown to a size."""
    for _ in range(12000):
        ended = process.poll() is not None
        if path.exists() and path.stat().st_size > size:
            return
        assert not ended, process.stderr.read().decode()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not grow")


def interrupted(model_file, folder, number, files, *more):
    """Name of a run that a signal ended once these files had their sizes, and its process.

    On a busy machine a run may be over before the signal is sent; then another one is started.
    """
    for name in ("run", "again", "third", "fourth"):
        process = start(model_file, folder, name, *more)
        for kind, size in files.items():
            wait_for(folder / f"{name}.{kind}", size, process)
        process.send_signal(number)
        if process.wait() != 0:
            return name, process
    raise AssertionError("all runs were over before they were interrupted")


@pytest.fixture(scope="module")
def whole(model_file, tmp_path_factory):
    """The trajectory and table of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    finish(model_file, folder, "run")
    assert len(read(folder / "run.xyz", ":")) == STEPS // 10 + 1
    return {kind: (folder / f"run.{kind}").read_bytes() for kind in ("xyz", "csv")}


def test_killed_and_continued(model_file, tmp_path, whole):
    """kill -9 leaves whole files or whole restart points; what comes of it is the uninterrupted run, bit by bit."""
    files = {"restart": 0, "xyz": 0.5 * len(whole["xyz"])}
    name, process = interrupted(model_file, tmp_path, signal.SIGKILL, files)
    assert process.returncode == -signal.SIGKILL
    finish(model_file, tmp_path, name, "--restart")
    for kind, content in whole.items():
        assert (tmp_path / f"{name}.{kind}").read_bytes() == content


def test_asked_to_stop(model_file, tmp_path, whole):
    """As a queueing system does at the end of the time."""
    files = {"xyz": 0.2 * len(whole["xyz"])}
    name, process = interrupted(model_file, tmp_path, signal.SIGTERM, files, "--restart-every", 100000)
    assert process.returncode == 130
    assert process.stderr.read().decode() == "interrupted\n"
    assert (tmp_path / f"{name}.png").exists()
    finish(model_file, tmp_path, name, "--restart")
    assert (tmp_path / f"{name}.xyz").read_bytes() == whole["xyz"]


def test_a_full_disk_is_named_and_leaves_a_restart_file(monkeypatch, potential, water, tmp_path):
    from torchmdnet2.md import MDOptions, run_md
    from torchmdnet2.md.trajectory import ExtendedXYZ

    def options(name, restart=False):
        return MDOptions(steps=120, every=10, restart_every=20, output=str(tmp_path / name), restart=restart)

    written = ExtendedXYZ._write

    def write_until_full(self, atoms):
        if atoms.info["step"] > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, atoms)

    with monkeypatch.context() as full:
        full.setattr(ExtendedXYZ, "_write", write_until_full)
        with pytest.raises(OSError, match=r"step 60.*No space left.*md\.restart holds step 60.*continue") as caught:
            run_md(potential, water, options("md"))
        assert caught.value.errno == errno.ENOSPC
    run_md(potential, water, options("md", restart=True))
    run_md(potential, water, options("whole"))
    for end in (".xyz", ".csv"):
        assert (tmp_path / f"md{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()
