"""Programs in copies of a process that has PyTorch loaded are as those that Python starts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from warm import warm_python

PROGRAM = """
import os, sys
print(sys.argv, os.getcwd(), __name__, os.environ["WORD"], os.environ.get("OTHER"), input(), sys.path[0])
print("said", file=sys.stderr)
if sys.argv[1] == "wait":
    sys.stdout.flush()
    import time
    time.sleep(100)
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
if sys.argv[1] == "raise":
    raise ValueError("wrong")
sys.exit({"three": 3, "text": "a text"}.get(sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["none", "three", "text", "raise", "kill"])
def test_the_same_as_a_process_of_its_own(how, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "x")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "WORD": "w"}
    del environment["OTHER"]
    found = [
        subprocess.run(
            [python, "program.py", how, "a b", ""], cwd=tmp_path, env=environment, input="line\n", text=True,
            capture_output=True,
        )
        for python in (warm_python(), sys.executable)
    ]  # fmt: skip
    assert [run.returncode for run in found] == [{"three": 3, "text": 1, "raise": 1, "kill": -9}.get(how, 0)] * 2
    assert found[0].stdout == found[1].stdout and "line" in found[0].stdout
    ends = [run.stderr.splitlines()[-1] for run in found]
    assert ends[0] == ends[1] and ("said" in ends[0] or how in ("text", "raise"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_command():
    run = subprocess.run([warm_python().parent / "torchmdnet2", "info", "nothing"], capture_output=True, text=True)

    assert run.returncode == 1 and "no potential has this name" in run.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_signal_reaches_the_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [warm_python(), "program.py", "wait"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "WORD": "w"}, text=True, **streams)
    process.stdin.write("line\n")
    process.stdin.flush()
    assert "line" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)  # SIGINT is ignored in programs that a shell started in the background
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_triton_is_not_loaded(tmp_path):
    """Whether its kernels run in the interpreter is decided when it is loaded: by the program, not before."""
    (tmp_path / "program.py").write_text("import sys\nprint('triton' in sys.modules)\n")
    assert subprocess.check_output([warm_python(), "program.py"], cwd=tmp_path, text=True) == "False\n"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")
def test_a_program_ends_with_its_client():
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n"
    process = subprocess.Popen([warm_python(), "-c", code], stdout=subprocess.PIPE, text=True)
    program = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    assert select.select([program], [], [], 60)[0]
    process.communicate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_code_with_arguments_and_modules_of_the_environment(tmp_path):
    (tmp_path / "of_the_environment.py").write_text("word = 'found'\n")
    command = ["-c", "import sys, of_the_environment as one\nprint(one.word, sys.argv[1:])", "a", "b"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    for python in (warm_python(), sys.executable):
        said = subprocess.check_output([python, *command], env=environment, text=True)
        assert said == "found ['a', 'b']\n"
