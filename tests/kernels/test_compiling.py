"""Kernels that are compiled by several processes, and the line that says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

import numba

from torchmdnet2.core import announce
from torchmdnet2.core import compiling_cpu as numba_compiling
from torchmdnet2.models.tensornet.cpu import kernels

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import numpy as np
from torchmdnet2.core import compiling_cpu as numba_compiling
from torchmdnet2.priors.pair_kernels.cpu import _d2, _zbl

numba_compiling.usable_cores = lambda: 2
row_ptr, sender, vec = np.array([0, 1, 2]), np.array([1, 0]), np.array([[1, 0, 0], [-1, 0, 0]], np.float32)
key, table = np.zeros(2, np.int64), np.ones((1, 3))

def step():
    sums = np.zeros(2), np.zeros((2, 3)), np.zeros((2, 9)), np.zeros(2)
    for kernel in (_d2, _zbl):
        kernel(2, row_ptr, sender, vec, key, table, 1.0, 5.0, (1.0,) * 6, 0, *sums)
    return sums

told = []
with numba_compiling.before_compiling(lambda: told.append("told")):
    numba_compiling.compile_side_by_side(step)
    step()
energy = step()[0]
assert np.isfinite(energy).all() and (energy != 0).all(), energy
misses = sum(sum(kernel.stats.cache_misses.values()) for kernel in (_d2, _zbl))
print(misses, *told)
"""


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 3), np.float32), np.zeros(2, np.int64)[::2], np.float32(1), 1.5, 3, True, (1.0, 2.0), (1, 2.5),
     np.broadcast_to(np.zeros(1), 4)],
)  # fmt: skip
def test_types_are_what_they_were_after_they_were_described(value):
    kind = numba.typeof(value)
    assert numba_compiling._read(numba_compiling._describe(kind)) == kind


def test_kernels_know_how_another_process_makes_them():
    for name, kernel in kernels(8, True, False)._asdict().items():
        assert kernel.family == ("kernels", (8, True, False), name)


def test_other_processes_compile_and_the_first_says_so_once(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, env=environment,
            cwd=tmp_path, timeout=300,
        )
        for _ in range(2)
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert "compiling 2 kernels for the CPU, about" in first.stderr and str(tmp_path) in first.stderr
    assert first.stdout.split() == ["0"]  # both were found on disk
    assert (second.returncode, second.stderr, second.stdout.split()) == (0, "", ["0"])


def test_processes_that_start_together_compile_each_kernel_once(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, env=environment, cwd=tmp_path, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    (_, words), (misses, others) = sorted(said, key=lambda texts: "compiling 2 kernels" not in texts[1])
    assert "compiling 2 kernels" in words and int(misses) == 0
    assert "compiling" not in others and (not others or "waiting for another process" in others)
    # and nobody whose kernels are there waits
    (lock,) = tmp_path.glob("*/.compiling.lock")
    with numba_compiling._turn(str(lock.parent)):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    assert (done.returncode, done.stderr, int(done.stdout)) == (0, "", 0)


def test_what_compiles_in_this_process_is_said_before():
    told = []
    with numba_compiling.before_compiling(lambda: told.append("told")):
        for _ in range(2):
            numba.njit(lambda x: x + 1)(1)
    assert told == ["told"]


ENERGY = """
import torch
from torchmdnet2 import System, load

pos = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0], [2.8, 0.1, 0.2], [3.1, 1.0, 0.3], [3.3, -0.7, 0.1]])
result = load("organic")(System(z=torch.tensor([8, 1, 1] * 2), pos=pos))
print(float(result.energy).hex(), [float(f).hex() for f in result.forces.flatten()])
"""


@pytest.mark.slow
def test_the_process_that_compiles_gives_the_bits_of_later_ones(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", ENERGY], capture_output=True, text=True, env=environment, timeout=300)
        for _ in range(2)
    )
    assert "compiling" in first.stderr and "compiling" not in second.stderr
    assert first.stdout and first.stdout == second.stdout


HOLD = """
import sys, time
from torchmdnet2.core.compiling_cpu import _turn

with _turn(sys.argv[1]):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_a_process_that_was_killed_or_stopped_holds_up_nobody_for_long(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(numba_compiling, "_PAUSE", 0.01)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        first.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as short:
            short.setattr(numba_compiling, "_PATIENCE", 0.05)
            with numba_compiling._turn(str(tmp_path)):
                assert first.poll() is None
        first.kill()
        with numba_compiling._turn(str(tmp_path)):
            pass
    place = f"kept in {tmp_path}"
    assert caplog.messages[0] == f"waiting for another process, which compiles kernels for the CPU: {place}"
    assert len(caplog.messages) <= 2


def test_the_line_says_where_kernels_are_kept_and_can_be_switched_off(caplog):
    announce(1, "GPU", 4.2, "/a/folder")
    assert caplog.messages == ["compiling 1 kernel for the GPU, about 4 s on an idle machine, once: kept in /a/folder"]
    announce(2, "CPU", 0.1, "")
    assert caplog.messages[1:] == [
        "compiling 2 kernels for the CPU, about 1 s on an idle machine, in every process: there is no folder where "
        "they can be kept"
    ]
    with caplog.at_level("ERROR", "torchmdnet2"):
        announce(1, "GPU", 4.2, "/a/folder")
    assert len(caplog.messages) == 2
