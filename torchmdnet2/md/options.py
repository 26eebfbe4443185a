"""Options of a simulation, checked before anything is computed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadConfig
from ..registry import did_you_mean

__all__ = ["FORMATS", "FRICTION", "MDOptions"]

FRICTION = 1.0
"""1/ps, of a Langevin bath where none is given."""

FORMATS = (".xyz", ".extxyz", ".traj", ".dcd")
"""Trajectory formats, by the file's extension: extended XYZ, ASE's own, and DCD (positions in float32 and cell)."""


@dataclass(frozen=True)
class MDOptions:
    """A simulation.

    Args:
        steps: number of time steps in all, also when continuing from a restart file.
        timestep: fs.
        ensemble: "nve" (constant energy, velocity Verlet) or "nvt" (Langevin, BAOAB splitting).
        temperature: K, of the first velocities and of the Langevin bath; None takes the velocities of the start
            structure when it has some, and 300 K.
        friction: 1/ps, of the Langevin bath; None means 1. Constant energy has none.
        seed: of velocities and noise; the same seed gives the same trajectory. Replica k has seed + k.
        replicas: independent copies of the start structure that are simulated side by side, in one batch; each has
            its velocities, noise, trajectory and table.
        every: steps between rows of the table, frames of the trajectory and checks; None means a thousandth of
            `steps`, but 10 at least and 100 at most.
        output: prefix of all files that are written; one that ends in .xyz or .traj also chooses the format, and
            a folder (existing, or written with a slash at the end) holds files named md.*. Of several replicas,
            trajectories and tables have the replica's number before their extension: md.0.xyz.
        trajectories: trajectory files; empty means one, `output` + ".xyz".
        restart: continue from `output` + ".restart".
        restart_every: steps between restart files; None means about twenty in the whole run.
        minimize: relax the start structure first, until all forces are below 0.05 eV/Å.
        report: write a page, `output` + ".html", with the moving molecule and plots.
        stop_if_unknown: of a calibrated model: stop where it would warn that atoms are unlike those of its training,
            and look at the frames ten times as often.

    Raises:
        BadConfig: a value is out of range.
    """

    steps: int
    timestep: float = 0.5
    ensemble: str = "nve"
    temperature: float | None = None
    friction: float | None = None
    seed: int = 0
    replicas: int = 1
    every: int | None = None
    output: str = "md"
    trajectories: tuple[str, ...] = field(default=())
    restart: bool = False
    restart_every: int | None = None
    minimize: bool = False
    report: bool = False
    stop_if_unknown: bool = False

    def __post_init__(self) -> None:
        if self.ensemble.lower() == "npt":
            raise BadConfig(
                "ensemble: npt, constant pressure, is not simulated here; run the model in ASE (docs/ase.md, "
                "examples/ase_npt_water.py) or in OpenMM with a barostat (docs/openmm.md)"
            )
        if self.ensemble not in ("nve", "nvt"):
            hint = did_you_mean(self.ensemble.lower(), ["nve", "nvt"]) or "."
            raise BadConfig(f"ensemble: '{self.ensemble}' is unknown{hint} Known: nve, nvt (Langevin)")
        for name, least in (("steps", 0), ("every", 1), ("restart_every", 1), ("replicas", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise BadConfig(f"{name}: must be a whole number, at least {least}, got {value}")
        for name in ("timestep", "temperature", "friction"):
            value = getattr(self, name)
            zero_is_fine = name == "temperature" and self.ensemble == "nve"
            if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and zero_is_fine))):
                raise BadConfig(f"{name}: must be a positive number, got {value}")
        if self.ensemble == "nve" and self.friction is not None:
            raise BadConfig("friction: is of the Langevin bath, and this run has none; give the ensemble nvt")
        if self.timestep > 20:
            raise BadConfig(f"timestep: {self.timestep:g} fs is too long for atoms; 0.5 fs suits molecules with H")
        if len({Path(path).name for path in self.trajectories}) < len(self.trajectories):
            raise BadConfig("trajectory: two files have the same name")
        for path in self.trajectories:
            if Path(path).suffix not in FORMATS:
                raise BadConfig(f"trajectory: '{path}' must end in one of {', '.join(FORMATS)}")

    @property
    def interval(self) -> int:
        """`every`, as a number."""
        return self.every or min(100, max(10, self.steps // 1000))

    @property
    def target_temperature(self) -> float:
        """K, of the thermostat and of drawn velocities."""
        return 300.0 if self.temperature is None else self.temperature

    @property
    def bath_friction(self) -> float:
        """1/ps, of the thermostat."""
        return FRICTION if self.friction is None else self.friction

    # --- files ---------------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> Path:
        """Prefix of all files, as a path without extension."""
        path = Path(self.output)
        if self.output.endswith(("/", "\\")) or path.is_dir():
            return path / "md"
        return path.with_suffix("") if path.suffix in FORMATS else path

    def file(self, extension: str, replica: int | None = None) -> Path:
        """The output file with this extension, as in file(".csv"); with several replicas, that of one.

        Args:
            extension: with its dot, ".csv".
            replica: its number, from 0; None: the file of all.
        """
        return self._numbered(self.prefix.with_name(self.prefix.name + extension), replica)

    def trajectory_files(self, replica: int) -> tuple[Path, ...]:
        """Trajectory files of a replica.

        Args:
            replica: its number, from 0.
        """
        suffix = Path(self.output).suffix
        paths = [Path(path) for path in self.trajectories] or [self.file(suffix if suffix in FORMATS else ".xyz")]
        return tuple(self._numbered(path, replica) for path in paths)

    def files(self) -> list[Path]:
        """All files that a run may write."""
        own = [path for b in range(self.replicas) for path in (*self.trajectory_files(b), self.file(".csv", b))]
        pages = [self.file(".html")] if self.report else []
        return [*own, self.file(".png"), *pages, self.file(".restart")]

    def _numbered(self, path: Path, replica: int | None) -> Path:
        if replica is None or self.replicas == 1:
            return path
        return path.with_name(f"{path.stem}.{replica}{path.suffix}")

    @property
    def seeds(self) -> range:
        """One for each replica."""
        return range(self.seed, self.seed + self.replicas)

    # --- what a restart must have in common -----------------------------------------------------------------------

    def physics(self) -> dict[str, Any]:
        """The options that must not change at a restart, as plain data."""
        kept = ("timestep", "ensemble", "temperature", "friction", "seed", "replicas")
        chosen = {name: value for name, value in asdict(self).items() if name in kept}
        chosen["friction"] = self.bath_friction
        if self.ensemble == "nve":
            chosen.pop("friction")
        return chosen
