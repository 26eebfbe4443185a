"""Python programs of tests as copies of a process that has PyTorch loaded: each would take three seconds to load it.

A program has its own arguments, working directory, environment, standard streams and exit code, and mpiexec can start
it. It is sent SIGINT and SIGTERM, and killed when its client is. What happens at the start and end of Python is tested
with Python itself.

    python warm.py serve SOCKET                 load, then start a copy for each client, until the standard input ends
    python warm.py SOCKET -m module ARGUMENTS   run a program in a copy, as `python -m module ARGUMENTS` would; also
                                                -c CODE ARGUMENTS, and FILE ARGUMENTS
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any


@cache
def warm_python() -> Path:
    """A `python` whose programs are such copies, and `torchmdnet2` beside it; where there is no fork, Python itself."""
    if not hasattr(os, "fork"):
        return Path(sys.executable)
    folder = tempfile.mkdtemp()
    place = os.path.join(folder, "socket")
    command = [sys.executable, __file__, "serve", place]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    assert server.stdout and server.stdout.readline() == "ready\n"
    for name, program in (("python", ""), ("torchmdnet2", "-m torchmdnet2 ")):
        file = Path(folder, name)
        file.write_text(f'#!/bin/sh\nexec {sys.executable!r} -I -S {__file__!r} {place!r} {program}"$@"\n')
        file.chmod(0o755)
    return Path(folder, "python")


def ask(place: str, arguments: list[str]) -> None:
    """Run a program in a copy, and end as it does."""
    passed_on = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # they wait until there is a program to pass them on to
    request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        streams = [0, 1, 2]
        if "PMI_FD" in os.environ:  # mpiexec started it, and talks to it
            streams.append(int(os.environ["PMI_FD"]))
        socket.send_fds(server, [len(request).to_bytes(4, "big")], streams)
        server.sendall(request)
        answers = server.makefile()
        program = int(answers.readline())
        for number in passed_on:
            signal.signal(number, lambda number, _: os.kill(program, number))
        came, wakes = os.pipe()  # or a signal just before a call of `recv` would be noticed after it only
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        while server not in select.select([server, came], [], [])[0]:
            os.read(came, 1)
        code = int(answers.readline())
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)  # not of SIGKILL
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(place: str) -> None:
    import shutil

    import ase.io
    import scipy.special
    import torch

    import torchmdnet2.cli
    import torchmdnet2.md.run
    import torchmdnet2.streams  # but nothing that loads Triton, whose interpreter is chosen by the program

    del ase, scipy, torch, torchmdnet2
    with contextlib.suppress(ImportError):
        import matplotlib.figure
        import numba

        del matplotlib, numba
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(client)
                os._exit(0)
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # copies that have ended
                    pass
    shutil.rmtree(Path(place).parent)


def answer(client: socket.socket) -> None:
    """Run what a client asks for, and tell it the number of the process and the exit code."""
    size, streams, _, _ = socket.recv_fds(client, 4, 4)
    request = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
    program = os.fork()
    if program == 0:
        client.close()
        for number, stream in enumerate(streams[:3]):
            os.dup2(stream, number)
            os.close(stream)
        for stream in streams[3:]:
            request[2]["PMI_FD"] = str(stream)
        os._exit(run(*request))
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(f"{program}\n".encode())
        if hasattr(os, "pidfd_open"):
            with open(os.pidfd_open(program), "rb", buffering=0) as end:
                if client in select.select([end, client], [], [])[0]:
                    os.kill(program, signal.SIGKILL)  # the client is gone
        client.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])}\n".encode())


def run(arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run a program in this process; returns its exit code."""
    import random
    import runpy
    import traceback

    import numpy as np

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    random.seed()
    np.random.seed()
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    code: Any = 0
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], folder
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv, sys.path[0] = arguments[1:], ""
            with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                file.write(arguments[1])
                file.flush()
                runpy.run_path(file.name, run_name="__main__")
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent.resolve())
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized():
        if not mpi.Is_finalized():
            mpi.Finalize()
        ctypes.CDLL(None).exit(code or 0)  # where MPI tells mpiexec
    return code or 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[1], sys.argv[2:])
