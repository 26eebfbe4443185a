"""Output of a simulation: trajectories, tables and the plot, with the positions at which restarts continue them.

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import keep_old
from ..units import AMU_A2_FS2
from .options import MDOptions
from .output import Drift, Table, TableRow, plot
from .page import Simulated, read_frames, write_page
from .state import AtomConstants, State
from .trajectory import TrajectoryFile, open_trajectory

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["VELOCITY", "Marks", "Recorder"]

VELOCITY = math.sqrt(AMU_A2_FS2)
"""Å/fs in ASE's unit of velocity, sqrt(eV/amu)."""

Marks = dict[str, dict[str, int]]
"""File name -> frames and bytes of a trajectory file."""


class Recorder:
    """Writes all files except restart files.

    Args:
        options: which files.
        start: the structure; its elements, cell, constraints and info are those of all frames.
        atoms: on the CPU.
        last: the step of the restart file that is continued; None begins new files, and keeps older ones as ….old.
        marks: of the restart file.

    Attributes:
        rows: of each replica, also of earlier runs when continued.
    """

    def __init__(self, options: MDOptions, start: Atoms, atoms: AtomConstants, last: int | None, marks: Marks | None):
        self.options, self.start, self.atoms = options, start, atoms
        paths = [options.trajectory_files(b) for b in range(atoms.replicas)]
        for path in (options.prefix, *(p for own in paths for p in own)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if last is None:
            for path in options.files():
                keep_old(path)
        self._trajectories = [
            [
                open_trajectory(p, options.timestep, options.interval, None if marks is None else marks[p.name])
                for p in own
            ]
            for own in paths
        ]
        self._tables = [Table(options.file(".csv", b), last) for b in range(atoms.replicas)]
        self.rows = [table.rows for table in self._tables]
        self._drifts = [Drift(atoms.num_atoms) for _ in self._tables]
        for drift, rows in zip(self._drifts, self.rows, strict=True):
            for row in rows:
                drift.add(row)

    def add(self, state: State, rows: Sequence[TableRow]) -> None:
        """A frame and a row for each replica."""
        for b, row in enumerate(rows):
            self._tables[b].add(row)
            self._drifts[b].add(row)
            frame = self.frame(state, b)
            for trajectory in self._trajectories[b]:
                trajectory.write(frame)

    def frame(self, state: State, replica: int) -> Atoms:
        """A replica as Atoms: positions as they are (not wrapped), momenta, energy, forces."""
        from ase.calculators.singlepoint import SinglePointCalculator

        n = self.atoms.num_atoms
        own = slice(replica * n, (replica + 1) * n)
        frame = self.start.copy()
        frame.set_positions(state.pos[own].numpy(), apply_constraint=False)
        momenta = (self.atoms.masses[own] * state.vel[own]).numpy() * VELOCITY
        frame.set_momenta(momenta, apply_constraint=False)
        frame.info.update(step=state.step, time_ps=state.step * self.options.timestep * 1e-3)
        frame.calc = SinglePointCalculator(
            frame, energy=float(state.energy[replica]), forces=state.forces[own].double().numpy().copy()
        )
        return frame

    @property
    def drifts(self) -> list[float]:
        """Of each replica, eV/atom/ps; nan for short runs."""
        return [drift.slope for drift in self._drifts]

    @property
    def worst_drift(self) -> float:
        """The largest, with its sign."""
        return max(self.drifts, key=abs)

    @property
    def marks(self) -> Marks:
        """Current ends of the trajectory files."""
        return {t.path.name: t.mark for own in self._trajectories for t in own}

    def sync(self) -> None:
        """Flush everything to disk."""
        for file in self._written:
            file.sync()

    def close(self) -> None:
        for file in self._written:
            file.close()

    @property
    def _written(self) -> list[Table | TrajectoryFile]:
        return [*(t for own in self._trajectories for t in own), *self._tables]

    def plot(self, title: str) -> str:
        """Write the plot; returns why it could not be written, else ""."""
        if len(self.rows[0]) < 2:
            return ""
        try:
            plot(self.options.file(".png"), self.rows, self.atoms.num_atoms, title, self.drifts)
        except ImportError as error:
            return f"no plot: {error.name} is not installed (pip install matplotlib)"
        return ""

    def write_page(self, title: str, settings: str, ns_per_day: float) -> None:
        """Write the page, if it is asked for; after `close` and `plot`."""
        if not self.options.report:
            return
        curves = self.options.file(".png")
        frames = read_frames(self.options.trajectory_files(0), len(self.rows[0]))
        drawn = curves.read_bytes() if curves.exists() else None
        found = Simulated(title, settings, frames, self.rows, self.drifts, ns_per_day, drawn)
        write_page(self.options.file(".html"), found)

    def files(self) -> list[Path]:
        """All files that exist."""
        paths = [file.path for file in self._written]
        others = [self.options.file(extension) for extension in (".png", ".html", ".restart")]
        return [path for path in (*paths, *others) if path.exists()]
