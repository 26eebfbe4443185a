"""Worker processes that label frames.

A worker receives (number, frame, folder) through a pipe and returns (number, labels, error). It imports numerical
libraries only after the number of threads is set; this module imports neither PyTorch nor the configuration, so that
workers start quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .labellers import Labels

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Outcome", "Task", "label_all", "serve"]


def serve(pipe: Connection, section: Mapping[str, Any], threads: int) -> None:
    """Label frames until the other end of the pipe is closed.

    Args:
        pipe: connection to the pool.
        section: name and arguments of the labeller.
        threads: number of threads of each calculation.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)  # set before the libraries that read them are loaded
    if hasattr(os, "setsid"):
        os.setsid()  # a group with the programs that it starts, which can be ended together
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the pool has ended
        while True:
            number, atoms, folder = pipe.recv()
            pipe.send((number, *_attempt(section, atoms, folder)))


_made: dict[str, Any] = {}


def _attempt(section: Mapping[str, Any], atoms: Any, folder: str) -> tuple[Any, str | None]:
    """Return labels and None, or None and the reason of the failure."""
    here = Path.cwd()
    os.chdir(folder)
    with open("output.log", "wb") as log:  # output of programs is kept with the frame
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    try:
        if "labeller" not in _made:
            from .labellers import make_labeller

            os.chdir(here)  # files of the configuration are relative to it
            _made["labeller"] = make_labeller(section)
            os.chdir(folder)
        labels = _made["labeller"](atoms, Path(folder))
        return (float(labels.energy), labels.forces), None
    except Exception as error:  # a labeller may fail in any way; the frame is put aside
        words = " ".join(str(error).split())
        kind = type(error).__name__
        return None, words if kind == "LabellingFailed" else f"{kind}: {words}" if words else kind
    finally:
        os.chdir(here)


# --- The pool of workers; one that hangs or dies costs its frame, not the run ---


@dataclass(frozen=True)
class Task:
    """A frame to label, its number, and the folder for its files."""

    number: int
    atoms: Atoms
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """The result of a task: labels, or the reason of the failure."""

    number: int
    labels: Labels | None
    reason: str = ""


def label_all(
    tasks: Iterable[Task], section: Mapping[str, Any], processes: int, threads: int, timeout: float | None
) -> Iterator[Outcome]:
    """Label frames, several at once, and yield outcomes in the order in which they are ready.

    Args:
        tasks: the frames, which are started in this order.
        section: name and arguments of the labeller.
        processes: number of frames at once.
        threads: number of threads of each calculation.
        timeout: seconds for one frame; None: no limit.
    """
    waiting = list(tasks)[::-1]
    workers = [_Worker(section, threads, timeout) for _ in range(min(processes, len(waiting)))]
    try:
        while waiting or any(worker.task for worker in workers):
            for worker in workers:
                if worker.task is None and waiting:
                    worker.start(waiting.pop())
            busy = [worker for worker in workers if worker.task is not None]
            left = min((worker.left for worker in busy), default=0.0)
            ready = wait([worker.pipe for worker in busy], None if left == float("inf") else max(0.0, left))
            for worker in busy:
                outcome = worker.collect(worker.pipe in ready)
                if outcome is not None:
                    yield outcome
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """One worker process, which is started for its first task and again after it has died."""

    def __init__(self, section: Mapping[str, Any], threads: int, timeout: float | None):
        self.section, self.threads, self.timeout = section, threads, timeout
        self.task: Task | None = None
        self._process: Any = None
        self.pipe: Connection

    def start(self, task: Task) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")  # OpenMP does not survive a fork
            self.pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self.section, self.threads), daemon=True)
            self._process.start()
            theirs.close()
        self.task, self._since = task, time.monotonic()
        with suppress(OSError):  # the process has died, which `collect` finds
            self.pipe.send((task.number, task.atoms, str(task.folder.absolute())))  # the worker changes into it

    @property
    def left(self) -> float:
        """Return the seconds that are left for the task."""
        return float("inf") if self.timeout is None else self._since + self.timeout - time.monotonic()

    def collect(self, ready: bool) -> Outcome | None:
        """Return the outcome of the task; None while it runs."""
        task = self.task
        assert task is not None
        if ready:
            try:
                number, labels, reason = self.pipe.recv()
            except (EOFError, OSError):
                self._process.join()
                reason, labels = f"the process ended with exit code {self._process.exitcode}", None
                self.end()
            else:
                assert number == task.number
        elif self.left <= 0:
            labels, reason = None, f"no result after {self.timeout:g} s"
            self.end()
        else:
            return None
        self.task = None
        return Outcome(task.number, None if labels is None else Labels(*labels), reason or "")

    def end(self) -> None:
        """End the process, and the programs that it started."""
        if self._process is None:
            return
        self.pipe.close()
        if self.task is None:
            self._process.join(1.0)
        if self.task is not None or self._process.is_alive():
            with suppress(OSError, AttributeError):  # the group has ended; Windows has no groups
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._process = None
