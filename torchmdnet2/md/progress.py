"""How far a simulation is: a live bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .output import TableRow

__all__ = ["Reporter", "drift_text", "speed_text"]


def drift_text(drift: float) -> str:
    """A drift in words; nan, of runs that are too short for one, as such."""
    return "not known yet" if math.isnan(drift) else f"{drift:+.1e} eV/atom/ps"


def speed_text(ns_per_day: float) -> str:
    """A speed in words; none for nan, that of no step at all."""
    return "" if math.isnan(ns_per_day) else f"{ns_per_day:.3g} ns/day"


class Reporter:
    """Shows temperature, drift, speed and the time left.

    Args:
        console: where to; None shows nothing.
        first, last: steps.
        timestep: fs.
    """

    def __init__(self, console: Console | None, first: int, last: int, timestep: float):
        self.console, self.first, self.last, self.timestep = console, first, last, timestep
        self.started = self.printed = time.perf_counter()
        self.printed_step, self.shown = first, 0.0
        self.ended: float | None = None
        self.bar: Progress | None = None
        if console is not None and console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.completed:.0f}/{task.total:.0f} steps"), BarColumn(bar_width=24),
                TextColumn("{task.fields[now]}"), TextColumn("left"), TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self.task = self.bar.add_task("md", total=last, completed=first, now="")

    def __enter__(self) -> Reporter:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = time.perf_counter()
        if self.bar is not None:
            self.bar.stop()

    def ns_per_day(self, step: int) -> float:
        """Simulated time per day of computing, from the speed between start and end; nan at the start."""
        elapsed = (self.ended or time.perf_counter()) - self.started
        return (step - self.first) * self.timestep * 1e-6 * 86400 / elapsed if step > self.first else float("nan")

    def update(self, rows: Sequence[TableRow], drift: float) -> None:
        """Tell about a step: the mean temperature of the replicas, and their largest drift."""
        if self.console is None:
            return
        row = rows[0]._replace(temperature_K=sum(row.temperature_K for row in rows) / len(rows))
        clock = time.perf_counter()
        if self.bar is not None and clock - self.shown < 0.1 and row.step != self.last:
            return
        self.shown = clock
        now = f"{row.time_ps:8.3f} ps {row.temperature_K:6.0f} K  drift {drift_text(drift)}"
        speed = speed_text(self.ns_per_day(row.step))
        if self.bar is not None:
            self.bar.update(self.task, completed=row.step, now=f"{now}  {speed}")
            return
        # a line at each tenth of the run, and every 30 s in long ones
        tenth = max(1, self.last // 10)
        if row.step // tenth > self.printed_step // tenth or clock - self.printed > 30 or row.step == self.last:
            self.printed, self.printed_step = clock, row.step
            done = row.step - self.first
            left = (clock - self.started) / done * (self.last - row.step) if done else 0.0
            self.console.print(
                f"step {row.step:>9}/{self.last} {now}  {speed}  {left:.0f} s left", highlight=False, soft_wrap=True
            )
