"""Options of a simulation, checked before anything is computed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import BadConfig
from ..registry import did_you_mean
from .integrators import DIRECTIONS

__all__ = ["BAROSTAT", "FORMATS", "FRICTION", "MDOptions"]

FRICTION = 1.0
"""1/ps, of a Langevin bath where none is given."""

BAROSTAT: dict[str, Any] = {
    "pressure": 1.0, "barostat": "isotropic", "barostat_time": 1.0, "barostat_compressibility": 4.6e-5,
}  # fmt: skip
"""Settings of constant pressure where none are given: bar, a kind, ps, 1/bar of water."""

FEWEST = 20  # time steps in the time of a barostat

_ENSEMBLES = {"nve": "constant energy", "nvt": "Langevin", "npt": "Langevin at constant pressure"}

FORMATS = (".xyz", ".extxyz", ".traj", ".dcd", ".xtc")
"""Trajectory formats, by the file's extension: extended XYZ, ASE's own, DCD (positions in float32 and cell) and XTC
(positions to 0.01 Å and cell)."""


@dataclass(frozen=True)
class MDOptions:
    """Options of a simulation, and the files to write.

    Args:
        steps: number of time steps in all, also when continuing from a restart file.
        timestep: fs.
        ensemble: "nve" (constant energy, velocity Verlet), "nvt" (Langevin, BAOAB splitting) or "npt" (the same in a
            cell that is rescaled stochastically).
        temperature: K, of the first velocities and of the Langevin bath; None takes the velocities of the start
            structure when it has some, and 300 K.
        friction: 1/ps, of the Langevin bath; None means 1. Constant energy has none.
        seed: of velocities and noise; the same seed gives the same trajectory. Replica k has seed + k.
        replicas: independent copies of the start structure that are simulated together, in one batch; each has
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
            and check the frames ten times as often.
        pressure: bar, of "npt"; None means 1.
        barostat: how the cell may change in "npt": "isotropic" (the volume; default), "semi-isotropic" (x and y
            together, z), "anisotropic" (lengths along x, y and z) or "flexible" (also the angles).
        barostat_time: ps, in which the volume relaxes; None means 1.
        barostat_compressibility: 1/bar, about that of the material; None means 4.6e-5, that of water. It does not
            change averages, only how fast the volume changes.
        remove_drift: steps between those before which the motion of the centre of mass is removed; None: never.
        hydrogen_mass: amu, of every hydrogen; the atom that it is bonded to becomes lighter by as much. None:
            masses stay.
        inner_steps: with an inner model (`run_md`), steps by its forces in each step; None means 4.
        precision: of the model's kernels on a GPU, "native" or "mixed" (faster), as for `Evaluator`; an inner model
            keeps "native".

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
    pressure: float | None = None
    barostat: str | None = None
    barostat_time: float | None = None
    barostat_compressibility: float | None = None
    remove_drift: int | None = None
    hydrogen_mass: float | None = None
    inner_steps: int | None = None
    precision: Literal["native", "mixed"] = "native"

    def __post_init__(self) -> None:
        if self.precision not in ("native", "mixed"):
            raise BadConfig(f"precision: must be native or mixed, got {self.precision!r}")
        if self.ensemble not in _ENSEMBLES:
            hint = did_you_mean(self.ensemble.lower(), list(_ENSEMBLES)) or "."
            known = ", ".join(f"{name} ({words})" for name, words in _ENSEMBLES.items())
            raise BadConfig(f"ensemble: '{self.ensemble}' is unknown{hint} Known: {known}")
        whole = ("every", "restart_every", "replicas", "remove_drift", "inner_steps")
        for name, least in (("steps", 0), *((name, 1) for name in whole)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise BadConfig(f"{name}: must be a whole number, at least {least}, got {value}")
        positive = ("barostat_time", "barostat_compressibility", "hydrogen_mass")
        for name in ("timestep", "temperature", "friction", *positive):
            value = getattr(self, name)
            zero_is_fine = name == "temperature" and self.ensemble == "nve"
            if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and zero_is_fine))):
                raise BadConfig(f"{name}: must be a positive number, got {value}")
        if self.ensemble == "nve" and self.friction is not None:
            raise BadConfig("friction has no effect at constant energy; leave it out, or give the ensemble nvt")
        for name in BAROSTAT:
            if self.ensemble != "npt" and getattr(self, name) is not None:
                raise BadConfig(
                    f"{name} has no effect, since this run is not at constant pressure; leave it out, or give the "
                    "ensemble npt"
                )
        if self.pressure is not None and not math.isfinite(self.pressure):
            raise BadConfig(f"pressure: must be a number of bar, got {self.pressure}")
        if self.barostat_time is not None and self.barostat_time * 1e3 < FEWEST * self.timestep:
            raise BadConfig(
                f"barostat_time: {self.barostat_time:g} ps are fewer than {FEWEST} time steps of {self.timestep:g} fs, "
                "in which the cell cannot follow; about 1 ps suits liquids"
            )
        if self.barostat is not None and self.barostat not in DIRECTIONS:
            hint = did_you_mean(self.barostat.lower(), list(DIRECTIONS)) or "."
            raise BadConfig(f"barostat: '{self.barostat}' is unknown{hint} Known: {', '.join(DIRECTIONS)}")
        if not 1e-3 <= self.timestep <= 20:
            length = "long" if self.timestep > 20 else "short"
            raise BadConfig(
                f"timestep: {self.timestep:g} fs is too {length} for atoms; 0.5 fs suits molecules with H (unit: fs)"
            )
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63 - self.replicas:
            raise BadConfig(f"seed: must be a whole number between −2^63 and 2^63, got {self.seed}")
        if len({Path(path).name for path in self.trajectories}) < len(self.trajectories):
            raise BadConfig("trajectory: two files have the same name")
        for path in self.trajectories:
            if Path(path).suffix not in FORMATS:
                raise BadConfig(f"trajectory: '{path}' must end in one of {', '.join(FORMATS)}")

    @property
    def interval(self) -> int:
        """`every`, with its default filled in."""
        return self.every or min(100, max(10, self.steps // 1000))

    @property
    def target_temperature(self) -> float:
        """K, of the thermostat and of drawn velocities."""
        return 300.0 if self.temperature is None else self.temperature

    @property
    def bath_friction(self) -> float:
        """1/ps, of the thermostat."""
        return FRICTION if self.friction is None else self.friction

    def of_barostat(self, name: str) -> Any:
        """Return a setting of constant pressure, or its default.

        Args:
            name: one of BAROSTAT.
        """
        given = getattr(self, name)
        return BAROSTAT[name] if given is None else given

    @property
    def count(self) -> int:
        """`inner_steps`, with its default filled in."""
        return 4 if self.inner_steps is None else self.inner_steps

    # --- files ---------------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> Path:
        """Prefix of all files, as a path without extension."""
        path = Path(self.output)
        if self.output.endswith(("/", "\\")) or path.is_dir():
            return path / "md"
        return path.with_suffix("") if path.suffix in FORMATS else path

    def file(self, extension: str, replica: int | None = None) -> Path:
        """Return the output file with this extension, as in file(".csv"); with several replicas, that of one.

        Args:
            extension: with its dot, ".csv".
            replica: its number, from 0; None: the file of all.
        """
        return self._numbered(self.prefix.with_name(self.prefix.name + extension), replica)

    def trajectory_files(self, replica: int) -> tuple[Path, ...]:
        """Return trajectory files of a replica.

        Args:
            replica: its number, from 0.
        """
        suffix = Path(self.output).suffix
        paths = [Path(path) for path in self.trajectories] or [self.file(suffix if suffix in FORMATS else ".xyz")]
        return tuple(self._numbered(path, replica) for path in paths)

    def files(self) -> list[Path]:
        """Return all files that a run may write."""
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
        """Return the options that must not change at a restart, as plain data."""
        kept = ("timestep", "ensemble", "temperature", "friction", "seed", "replicas", "remove_drift")
        chosen = {name: value for name, value in asdict(self).items() if name in kept}
        if self.ensemble != "nve":
            chosen["friction"] = self.bath_friction
        else:
            chosen.pop("friction")
        if self.ensemble == "npt":
            chosen.update({name: self.of_barostat(name) for name in BAROSTAT})
        return chosen
