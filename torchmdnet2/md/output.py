"""The table of a simulation, the drift and the plot."""

from __future__ import annotations

import csv
import math
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..core.files import append, atomic_write
from ..core.html_page import figure_png
from ..errors import BadData

__all__ = [
    "Conservation", "Drift", "EnergyJumpWarning", "Reporter", "Table", "TableRow", "drift_text", "largest_jump",
    "plot", "speed_text",
]  # fmt: skip


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TableRow(NamedTuple):
    """One line of the table. `conserved_eV` is the total energy minus what thermostat and barostat have added.
    Volume, density and pressure are those of runs at constant pressure."""

    step: int
    time_ps: float
    temperature_K: float
    potential_eV: float
    kinetic_eV: float
    conserved_eV: float
    volume_A3: float = math.nan
    density_g_cm3: float = math.nan
    pressure_bar: float = math.nan


_OF_CELLS = 3
"""Last columns that only runs at constant pressure have."""


class Table:
    """The rows of a run, in memory and as CSV with every digit.

    Args:
        path: of the CSV file.
        keep_to: keep the file's rows up to this step; None starts a new file.
        cells: whether the rows have what belongs to a cell that changes.

    Raises:
        BadData: the file to continue is no such table.
    """

    def __init__(self, path: Path, keep_to: int | None = None, cells: bool = False):
        self.path = path
        self.rows: list[TableRow] = []
        self._columns = TableRow._fields if cells else TableRow._fields[:-_OF_CELLS]
        if keep_to is not None and path.exists():
            with open(path, newline="", errors="replace") as old:
                names, *rows = list(csv.reader(old)) or [[]]
            if names != list(self._columns):
                raise BadData(f"{path} is not a table of a simulation; move it away to go on")
            for step, *rest in rows:
                if len(rest) == len(self._columns) - 1 and int(step) <= keep_to:
                    self.rows.append(TableRow(int(step), *map(float, rest)))
        atomic_write(path, "".join(map(self._line, [TableRow._fields, *self.rows])))
        self._file = open(path, "ab", buffering=0)

    def add(self, row: TableRow) -> None:
        """Append a row, or where it cannot be written, no part of it."""
        append(self._file, self._line(row).encode())
        self.rows.append(row)

    def _line(self, values: Sequence[Any]) -> str:
        shown = values[: len(self._columns)]
        return ",".join(str(v) if isinstance(v, str | int) else repr(float(v)) for v in shown) + "\n"

    def sync(self) -> None:
        """Flush everything to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Drift:
    """Slope of the conserved energy by a linear fit to all rows so far, updated row by row.

    Args:
        num_atoms: N.
    """

    def __init__(self, num_atoms: int):
        self.num_atoms = num_atoms
        self.count, self.time, self.energy, self.tt, self.te = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, row: TableRow) -> None:
        # running means and sums of products about them: no loss of digits in long runs
        self.count += 1
        before = row.time_ps - self.time
        self.time += before / self.count
        self.energy += (row.conserved_eV - self.energy) / self.count
        self.tt += before * (row.time_ps - self.time)
        self.te += before * (row.conserved_eV - self.energy)

    @property
    def slope(self) -> float:
        """eV/atom/ps; nan for fewer than three rows."""
        return self.te / self.tt / self.num_atoms if self.count > 2 else float("nan")


def plot(
    path: Path, replicas: Sequence[Sequence[TableRow]], num_atoms: int, title: str, drifts: Sequence[float]
) -> None:
    """Draw temperature and conserved energy over time, as a PNG.

    Args:
        path: of the file.
        replicas: rows of each replica.
        num_atoms: of one replica.
        title: above all.
        drifts: of each replica, eV/atom/ps.

    Raises:
        ImportError: matplotlib is not installed.
    """
    mean = float(np.mean([row.temperature_K for rows in replicas for row in rows]))
    worst = max(drifts, key=abs)
    words = "" if np.isnan(worst) else f"drift {worst:+.1e} eV/atom/ps" + (" at most" if len(drifts) > 1 else "")

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, sharex=True)
        for rows in replicas:
            time = [row.time_ps for row in rows]
            above.plot(time, [row.temperature_K for row in rows], lw=0.8)
            below.plot(time, [1e3 * (row.conserved_eV - rows[0].conserved_eV) / num_atoms for row in rows], lw=0.8)
        above.axhline(mean, color="gray", lw=0.8, ls="--", label=f"mean {mean:.0f} K")
        above.set(ylabel="temperature (K)", title=title)
        above.legend(loc="upper right")
        below.set(xlabel="time (ps)", ylabel="conserved energy − first (meV/atom)")
        below.set_title(words, fontsize="medium")

    path.write_bytes(figure_png(draw, (7, 5)))


# --- A warning where the conserved energy jumps: the limits of guard.py let pass a hole in a model's energy ---

JUMP = 0.02
"""eV/√atom between two checks. Errors of the timestep and rounding move each atom's part independently. The largest in
good dynamics was 0.0013: 18 drug-like molecules for 10 ps at 0.5 fs, and ibuprofen for 2 ps at 1 fs."""

_WHY = "the energy of the model has a hole or a step there, or the timestep is too long; what follows is not valid"


def largest_jump(num_atoms: int) -> float:
    """Return the largest change of the conserved energy between two checks in good dynamics, eV.

    Args:
        num_atoms: of a replica.
    """
    return JUMP * num_atoms**0.5


class EnergyJumpWarning(UserWarning):
    """The conserved energy has jumped."""


class Conservation:
    """Warns once when the conserved energy of a replica has jumped since the last check.

    Args:
        num_atoms: of a replica.
        replicas: how many.
    """

    def __init__(self, num_atoms: int, replicas: int):
        self.limit, self.replicas = largest_jump(num_atoms), replicas
        self._last: list[float] | None = None
        self._warned: set[int] = set()

    def __call__(self, rows: Sequence[TableRow]) -> None:
        """Check the next rows, one for each replica.

        Warns:
            EnergyJumpWarning: says when and by how much.
        """
        now = [row.conserved_eV for row in rows]
        for b, (row, energy, before) in enumerate(zip(rows, now, self._last or now, strict=True)):
            if abs(energy - before) > self.limit and b not in self._warned:
                self._warned.add(b)
                whose = f" of replica {b}" if self.replicas > 1 else ""
                words = (
                    f"at {row.time_ps:.3f} ps the conserved energy{whose} jumped by {energy - before:+.2f} eV: {_WHY}"
                )
                warnings.warn(words, EnergyJumpWarning, stacklevel=2)
        self._last = now


# --- How far a simulation is: a live bar in a terminal, a line now and then elsewhere ---


def drift_text(drift: float) -> str:
    """Return a drift as text, also nan, which short runs have."""
    return "not known" if math.isnan(drift) else f"{drift:+.1e} eV/atom/ps"


def speed_text(ns_per_day: float) -> str:
    """Return a speed as text; empty for nan, where no step was made."""
    return "" if math.isnan(ns_per_day) else f"{ns_per_day:.3g} ns/day"


class Reporter:
    """Shows temperature, drift, speed and the time left.

    Args:
        console: where to print; None prints nothing.
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
        """Return the simulated time per day of computing, from the speed between start and end; nan at the start."""
        elapsed = (self.ended or time.perf_counter()) - self.started
        return (step - self.first) * self.timestep * 1e-6 * 86400 / elapsed if step > self.first else float("nan")

    def update(self, rows: Sequence[TableRow], drift: float) -> None:
        """Show a step: the mean temperature of the replicas, and their largest drift."""
        if self.console is None:
            return
        row = rows[0]._replace(temperature_K=sum(row.temperature_K for row in rows) / len(rows))
        clock = time.perf_counter()
        if self.bar is not None and clock - self.shown < 0.1 and row.step != self.last:
            return
        self.shown = clock
        now = f"{row.time_ps:8.3f} ps {row.temperature_K:6.0f} K  drift {drift_text(drift)}"
        if not math.isnan(row.density_g_cm3):
            now += f"  {sum(row.density_g_cm3 for row in rows) / len(rows):.3f} g/cm³"
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
