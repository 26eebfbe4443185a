"""The table of a simulation, the drift and the plot."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import BadData
from ..files import append, atomic_write
from ..html_page import figure_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Drift", "Table", "TableRow", "plot"]


class TableRow(NamedTuple):
    """One line of the table. `conserved_eV` is the total energy minus the heat from the thermostat, if there is one."""

    step: int
    time_ps: float
    temperature_K: float
    potential_eV: float
    kinetic_eV: float
    conserved_eV: float


class Table:
    """The rows of a run, in memory and as CSV with every digit.

    Args:
        path: of the CSV file.
        keep_to: keep the file's rows up to this step; None starts a new file.

    Raises:
        BadData: the file to go on with is something else.
    """

    def __init__(self, path: Path, keep_to: int | None = None):
        self.path = path
        self.rows: list[TableRow] = []
        if keep_to is not None and path.exists():
            with open(path, newline="", errors="replace") as old:
                names, *rows = list(csv.reader(old)) or [[]]
            if names != list(TableRow._fields):
                raise BadData(f"{path} is not a table of a simulation; move it away to go on")
            for step, *rest in rows:
                if len(rest) == len(TableRow._fields) - 1 and int(step) <= keep_to:
                    self.rows.append(TableRow(int(step), *map(float, rest)))
        atomic_write(path, "".join(map(_line, [TableRow._fields, *self.rows])))
        self._file = open(path, "ab", buffering=0)

    def add(self, row: TableRow) -> None:
        """Append a row, or where it cannot be written, no part of it."""
        append(self._file, _line(row).encode())
        self.rows.append(row)

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
    """Temperature and conserved energy over time, as a PNG.

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


def _line(values: Sequence[Any]) -> str:
    return ",".join(str(v) if isinstance(v, str | int) else repr(float(v)) for v in values) + "\n"
