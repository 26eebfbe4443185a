"""What a simulation writes: trajectory files, a table, a plot.

Files can be cut back to where they were when a restart file was made.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import BadData
from ..files import atomic_write

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Drift", "Row", "Table", "TrajectoryFile", "plot"]


class Row(NamedTuple):
    """One line of the table. `conserved` is the total energy less the heat from a thermostat."""

    step: int
    time_ps: float
    temperature_K: float
    potential_eV: float
    kinetic_eV: float
    conserved_eV: float


class TrajectoryFile:
    """Frames on disk, extended XYZ or ASE's .traj by the extension.

    Args:
        path: of the file; one that is there already is renamed to end in .old, unless `mark` is given.
        mark: of an earlier run: keep the frames up to there and go on.

    Raises:
        BadData: the file holds less than the mark says.
    """

    def __init__(self, path: Path, mark: dict[str, int] | None = None):
        self.path = path
        self.binary = path.suffix == ".traj"
        self.frames = 0
        self._file: Any = None
        if path.exists():
            if mark is None:
                os.replace(path, path.with_name(path.name + ".old"))
            else:
                self._cut(mark)

    def write(self, atoms: Atoms) -> None:
        """Append one frame."""
        if self.binary:
            from ase.io.trajectory import Trajectory

            self._file = self._file or Trajectory(self.path, "a")
            self._file.write(atoms)
        else:
            from ase.io.extxyz import write_xyz

            self._file = self._file or open(self.path, "a")
            write_xyz(self._file, [atoms])
            self._file.flush()
        self.frames += 1

    def close(self) -> None:
        """Close the file; the next frame opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def mark(self) -> dict[str, int]:
        """Where the file ends now, on disk for good."""
        self.close()
        if not self.path.exists():
            return {"frames": 0, "bytes": 0}
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        return {"frames": self.frames, "bytes": self.path.stat().st_size}

    def _cut(self, mark: dict[str, int]) -> None:
        self.frames = mark["frames"]
        if self.path.stat().st_size < mark["bytes"]:
            raise BadData(f"{self.path} is shorter than when the restart file was written; move it away to go on")
        if not self.binary:
            os.truncate(self.path, mark["bytes"])
            return
        from ase.io.trajectory import Trajectory

        aside = self.path.with_name(f".{self.path.name}.part")
        with Trajectory(self.path) as old, Trajectory(aside, "w") as new:
            for k in range(self.frames):
                new.write(old[k])
        os.replace(aside, self.path)


class Table:
    """The rows of a run, in memory and as CSV with every digit.

    Args:
        path: of the CSV file.
        keep_to: keep the file's rows up to this step; None starts a new file.
    """

    def __init__(self, path: Path, keep_to: int | None = None):
        self.path = path
        self.rows: list[Row] = []
        if keep_to is not None and path.exists():
            with open(path, newline="") as old:
                for step, *rest in list(csv.reader(old))[1:]:
                    if len(rest) == len(Row._fields) - 1 and int(step) <= keep_to:
                        self.rows.append(Row(int(step), *map(float, rest)))
        atomic_write(path, "".join(map(_line, [Row._fields, *self.rows])))
        self._file = open(path, "a", newline="")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._file.write(_line(row))

    def flush(self) -> None:
        """Everything so far is on disk."""
        self._file.flush()
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

    def add(self, row: Row) -> None:
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


def plot(path: Path, rows: Sequence[Row], num_atoms: int, title: str, slope: float) -> None:
    """Temperature and conserved energy over time, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")  # no pyplot: the user's figures and backend stay alone
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True)
    time = [row.time_ps for row in rows]
    mean = float(np.mean([row.temperature_K for row in rows]))
    above.plot(time, [row.temperature_K for row in rows], lw=0.8)
    above.axhline(mean, color="gray", lw=0.8, ls="--", label=f"mean {mean:.0f} K")
    above.set_ylabel("temperature (K)")
    above.legend(loc="upper right")
    above.set_title(title)
    first = rows[0].conserved_eV
    below.plot(time, [1e3 * (row.conserved_eV - first) / num_atoms for row in rows], lw=0.8)
    below.set_ylabel("total energy − first (meV/atom)")
    below.set_xlabel("time (ps)")
    below.text(
        0.01, 0.95, "" if np.isnan(slope) else f"drift {slope:+.1e} eV/atom/ps", transform=below.transAxes, va="top"
    )
    figure.savefig(path, dpi=120)


def _line(values: Sequence[Any]) -> str:
    return ",".join(str(v) if isinstance(v, str | int) else repr(float(v)) for v in values) + "\n"
