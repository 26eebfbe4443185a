"""Worker processes that label frames side by side; one that hangs or dies costs its frame, not the run."""

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
from .worker import serve

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Outcome", "Task", "label_all"]


@dataclass(frozen=True)
class Task:
    """A frame to label, its number, and the folder that files go to."""

    number: int
    atoms: Atoms
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What became of a task: labels, or the reason why there are none."""

    number: int
    labels: Labels | None
    reason: str = ""


def label_all(
    tasks: Iterable[Task], section: Mapping[str, Any], processes: int, threads: int, timeout: float | None
) -> Iterator[Outcome]:
    """Label frames, several at once; outcomes come in the order in which they are ready.

    Args:
        tasks: frames; started in this order.
        section: name and arguments of the labeller.
        processes: how many frames at once.
        threads: of each calculation.
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
    """One process, started when there is something to do, and anew after it died."""

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
        with suppress(OSError):  # of a process that died: found when its outcome is collected
            self.pipe.send((task.number, task.atoms, str(task.folder)))

    @property
    def left(self) -> float:
        """Seconds until the time of the task is over."""
        return float("inf") if self.timeout is None else self._since + self.timeout - time.monotonic()

    def collect(self, ready: bool) -> Outcome | None:
        """What became of the task; None while it runs."""
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
            with suppress(OSError, AttributeError):  # no such group any more; not on Windows
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._process = None
