"""How far a scan is: a live bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["ScanProgress"]

_EVERY = 10.0  # s between lines


class ScanProgress:
    """Shows how many structures are computed, and the time left.

    Args:
        console: where to; None shows nothing.
    """

    def __init__(self, console: Console | None):
        self.console = console
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f} structures, left"), TimeRemainingColumn(),
                console=console, transient=True,
            )  # fmt: skip
        self.begin("", 0)

    def __enter__(self) -> ScanProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, stage: str, total: int) -> None:
        """Begin a stage.

        Args:
            stage: what is done, in words.
            total: structures in it.
        """
        self._stage, self._total, self._done = stage, total, 0
        self._started = self._told = time.perf_counter()
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            if total:
                self._bar.add_task(stage, total=total)
        elif total:
            self._print(f"{stage}: {total} structures")

    def advance(self, structures: int) -> None:
        """Tell that some more structures are computed."""
        self._done += structures
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=self._done)
            return
        clock = time.perf_counter()
        if self._done < self._total and clock - self._told > _EVERY:
            self._told = clock
            left = (clock - self._started) / self._done * (self._total - self._done)
            self._print(f"{self._stage}: {self._done} of {self._total} structures, {left:.0f} s left")

    def _print(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)
