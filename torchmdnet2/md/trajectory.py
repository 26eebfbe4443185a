"""Trajectory files. A restart cuts them back to their length at the restart file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core.files import atomic_write, keep_old
from ..core.html_page import missing_plots
from ..errors import BadCheckpoint, BadConfig, BadData, needs_extra
from ..units import AMU_A2_FS2
from .integrators import AtomConstants, State
from .options import MDOptions
from .output import Drift, Table, TableRow, plot
from .page import Simulated, read_frames, write_page

if TYPE_CHECKING:
    from ase import Atoms


__all__ = [
    "DCD", "VELOCITY", "XTC", "ASETrajectory", "ExtendedXYZ", "Marks", "Recorder", "TrajectoryFile", "check_trajectory",
    "open_trajectory", "read_restart", "turned_back", "write_restart",
]  # fmt: skip


_AKMA = 0.04888821  # ps, the unit of time in DCD files
_MOST = 2**31 - 1  # that their numbers can be
_TAIL = 4096  # bytes before a mark by which the file is known again
_HEAD = 48  # bytes at the beginning in which DCD and ASE's format count frames
_NO_FRAMES: dict[str, int] = {"frames": 0, "bytes": 0}


class TrajectoryFile(ABC):
    """A trajectory on disk, which a restart can continue.

    Args:
        path: of the file; one that is there already is renamed to end in .old, unless `mark` is given.
        timestep, interval: fs, and steps between frames.
        mark: of an earlier run: keep the frames up to there and go on.

    Attributes:
        mark: where the file ends after the last frame: how many there are, bytes, and a checksum of the last frame.

    Raises:
        BadData: the file holds less than the mark says, or something else.
    """

    def __init__(self, path: Path, timestep: float, interval: int, mark: dict[str, int] | None = None):
        self.path, self.timestep, self.interval = path, timestep, interval
        self.mark = mark or dict(_NO_FRAMES)
        self._file: Any = None
        if mark and mark["frames"]:
            self._require_known(mark)
            self._cut(mark)
            self.mark = {**mark, "bytes": path.stat().st_size}
        else:
            keep_old(path)

    def _require_known(self, mark: dict[str, int]) -> None:
        """Raise BadData unless the mark was made for this file: other files are never cut."""
        remedy = "put back the file that the run wrote, or start without restart"
        if not self.path.exists() or self.path.stat().st_size < mark["bytes"]:
            raise BadData(f"{self.path} is not there or shorter than when the restart file was written; {remedy}")
        if mark.get("checksum") not in (None, self._checksum(mark)):  # older restart files have none
            raise BadData(f"{self.path} is not the file that it was when the restart file was written; {remedy}")

    def _checksum(self, mark: dict[str, int]) -> int:
        """Return the checksum of the bytes before a mark, without the header, which later frames change."""
        start = max(_HEAD, mark["bytes"] - _TAIL)
        with open(self.path, "rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(max(0, mark["bytes"] - start)))

    @classmethod  # noqa: B027
    def check(cls, path: Path, atoms: Atoms) -> None:
        """Raise BadData when the format cannot hold such a structure."""

    def write(self, atoms: Atoms) -> None:
        """Append one frame, or where it cannot be written, or is interrupted, nothing of it."""
        head = b""
        if self.mark["frames"]:
            with open(self.path, "rb") as file:
                head = file.read(_HEAD)
        try:
            if self._file is None:
                self._file = self._open()
            self._write(atoms)
        except BaseException:
            self._take_back(head)
            raise
        mark = {"frames": self.mark["frames"] + 1, "bytes": self.path.stat().st_size}
        self.mark = {**mark, "checksum": self._checksum(mark)}

    def _take_back(self, head: bytes) -> None:
        """Cut the file back to the last whole frame, with the header that it had then."""
        with suppress(OSError):  # what could not be written still cannot
            self.close()
        self._file = None
        if not self.mark["frames"]:
            self.path.unlink(missing_ok=True)
            return
        os.truncate(self.path, self.mark["bytes"])
        with open(self.path, "rb+") as file:
            file.write(head)

    def close(self) -> None:
        """Close the file; the next frame opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def sync(self) -> None:
        """Flush everything to disk."""
        self.close()
        if self.path.exists():
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    @abstractmethod
    def _open(self) -> Any:
        """Open the file to append to it."""

    @abstractmethod
    def _write(self, atoms: Atoms) -> None:
        """Append a frame and flush it."""

    @abstractmethod
    def _cut(self, mark: dict[str, int]) -> None:
        """Remove what follows the mark."""


class ExtendedXYZ(TrajectoryFile):
    """Extended XYZ: text with positions, momenta, energy and forces."""

    def _open(self) -> TextIO:
        return open(self.path, "a", encoding="utf-8")

    def _write(self, atoms: Atoms) -> None:
        from ase.io.extxyz import write_xyz

        write_xyz(self._file, [atoms])
        self._file.flush()

    def _cut(self, mark: dict[str, int]) -> None:
        os.truncate(self.path, mark["bytes"])


class ASETrajectory(TrajectoryFile):
    """ASE's binary format, in full precision."""

    def _open(self) -> Any:
        from ase.io.trajectory import Trajectory

        return Trajectory(self.path, "a")

    def _write(self, atoms: Atoms) -> None:
        self._file.write(atoms)

    def _cut(self, mark: dict[str, int]) -> None:
        from ase.io.trajectory import Trajectory

        aside = self.path.with_name(f".{self.path.name}.part")
        with Trajectory(self.path) as old, Trajectory(aside, "w") as new:
            for k in range(mark["frames"]):
                new.write(old[k])
        os.replace(aside, self.path)

    def _checksum(self, mark: dict[str, int]) -> int:
        """Return the checksum of the positions in the last frame; other bytes before a mark change when frames are
        added."""
        from ase.io.trajectory import Trajectory

        try:
            with Trajectory(self.path) as file:
                return zlib.crc32(file[mark["frames"] - 1].positions.tobytes())
        except Exception:  # ASE's errors about what is no such file are of many kinds
            return -1


class DCD(TrajectoryFile):
    """CHARMM's binary format, which OpenMM, VMD, MDAnalysis and mdtraj read: positions in float32, and the cell.

    The cell is stored as lengths and cosines of angles: its first vector must lie along x, its second in the xy plane.
    Frames whose cell has turned since the first are turned back.

    Raises:
        BadData: the first cell is another, or a structure is periodic in some directions only.
    """

    @classmethod
    def check(cls, path: Path, atoms: Atoms) -> None:
        _periodic(atoms, path)

    def _open(self) -> BinaryIO:
        return open(self.path, "rb+" if self.mark["frames"] else "wb+")

    def _write(self, atoms: Atoms) -> None:
        file: BinaryIO = self._file
        frames = self.mark["frames"]
        positions, periodic = atoms.positions, bool(atoms.pbc.any())
        if not frames:
            periodic = _periodic(atoms, self.path)
            file.write(self._header(len(atoms), atoms.info["step"], periodic))
        _count(file, frames + 1, atoms.info["step"])
        file.seek(0, os.SEEK_END)
        if periodic:
            a, b, c, *angles = atoms.cell.cellpar()
            alpha, beta, gamma = np.sin(np.pi / 2 - np.radians(angles))  # exactly 0 for right angles
            file.write(_record(struct.pack("<6d", a, gamma, b, beta, alpha, c)))
            positions = turned_back(atoms)[1]
        for axis in positions.T:
            file.write(_record(axis.astype("<f4").tobytes()))
        file.flush()

    def _header(self, num_atoms: int, step: int, periodic: bool) -> bytes:
        control = struct.pack(
            "<4s9if10i", b"CORD", 0, min(step, _MOST), self.interval, 0, 0, 0, 0, 0, 0, self.timestep * 1e-3 / _AKMA,
            periodic, 0, 0, 0, 0, 0, 0, 0, 0, 24,
        )  # fmt: skip
        title = struct.pack("<i80s", 1, b"Created by torchmdnet2")
        return _record(control) + _record(title) + _record(struct.pack("<i", num_atoms))

    def _cut(self, mark: dict[str, int]) -> None:
        os.truncate(self.path, mark["bytes"])
        with open(self.path, "rb+") as file:
            file.seek(12)
            first, interval = struct.unpack("<2i", file.read(8))
            _count(file, mark["frames"], first + (mark["frames"] - 1) * interval)


def _count(file: BinaryIO, frames: int, step: int) -> None:
    """Note the number of frames and the last step in the header."""
    for offset, value in ((8, frames), (20, step)):
        file.seek(offset)
        file.write(struct.pack("<i", min(value, _MOST)))


def _record(content: bytes) -> bytes:
    """Return a record as Fortran writes it: with the length on both sides."""
    length = struct.pack("<i", len(content))
    return length + content + length


class XTC(TrajectoryFile):
    """GROMACS's compressed format, by chemfiles: positions to 0.01 Å, cell, step, time in ps. Otherwise as DCD.

    Raises:
        MissingBackend: chemfiles is not installed.
    """

    @classmethod
    def check(cls, path: Path, atoms: Atoms) -> None:
        with needs_extra("xtc"):
            import chemfiles  # noqa: F401
        _periodic(atoms, path)

    def _open(self) -> None:
        """Open the file anew for each frame: chemfiles writes its buffer when it closes a file."""

    def _write(self, atoms: Atoms) -> None:
        import chemfiles

        frame = chemfiles.Frame()
        frame.resize(len(atoms))
        frame.step, frame["time"] = atoms.info["step"], float(atoms.info["step"] * self.timestep * 1e-3)
        if not self.mark["frames"]:
            _periodic(atoms, self.path)
        cell, frame.positions[:] = turned_back(atoms)
        if atoms.pbc.any():
            frame.cell = chemfiles.UnitCell(cell.T)
        with chemfiles.Trajectory(str(self.path), "a" if self.mark["frames"] else "w", "XTC") as file:
            file.write(frame)

    def _cut(self, mark: dict[str, int]) -> None:
        os.truncate(self.path, mark["bytes"])


def turned_back(atoms: Atoms) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cell [3, 3] and positions [n, 3], Å, turned so that the first vector lies along x and the second in the xy
    plane; unchanged where they do, or without a cell."""
    cell = atoms.cell.array
    if not atoms.pbc.any() or not np.triu(cell, 1).any():
        return cell, atoms.positions
    standard, rotation = atoms.cell.standard_form()
    return np.asarray(standard), atoms.positions @ rotation.T


def _periodic(atoms: Atoms, path: Path) -> bool:
    """Return whether a file has cells.

    Raises:
        BadData: the format cannot hold this one.
    """
    if not atoms.pbc.any():
        return False
    kind = path.suffix[1:].upper()
    if not atoms.pbc.all():
        raise BadData(f"{path}: a {kind} file knows only structures that are periodic in all directions or in none")
    upper = np.abs(np.triu(atoms.cell.array, 1)).max()
    if upper > 1e-6 * np.abs(atoms.cell.array).max() or (np.diag(atoms.cell.array) <= 0).any():
        raise BadData(
            f"{path}: a {kind} file needs a cell with its first vector along x and its second in the xy plane "
            "(atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True))"
        )
    return True


_FORMATS: dict[str, type[TrajectoryFile]] = {
    ".xyz": ExtendedXYZ,
    ".extxyz": ExtendedXYZ,
    ".traj": ASETrajectory,
    ".dcd": DCD,
    ".xtc": XTC,
}


def check_trajectory(path: Path, atoms: Atoms) -> None:
    """Refuse a structure that the format of this file cannot hold, before anything is computed.

    Raises:
        BadData: it cannot.
    """
    _FORMATS[path.suffix].check(path, atoms)


def open_trajectory(path: Path, timestep: float, interval: int, mark: dict[str, int] | None = None) -> TrajectoryFile:
    """Return the trajectory file of the format that its extension names; arguments as for TrajectoryFile."""
    return _FORMATS[path.suffix](path, timestep, interval, mark)


# --- Restart files: the state bit by bit, bound to the model and the physics of the run ---
#
# Safetensors with a JSON header and a checksum, written atomically.

_FORMAT = "torchmdnet2-md-2"


def write_restart(path: str | os.PathLike, state: State, facts: dict[str, Any]) -> None:
    """Write a restart file.

    Args:
        path: replaced in one piece.
        state: of the simulation. Noise needs none: it is a function of the seed and the step.
        facts: plain data: what a continuation must agree with, and the lengths of the output files.
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in state.tensors().items()}
    stated = json.dumps({**facts, "step": state.step}, sort_keys=True)
    atomic_write(path, save(tensors, metadata={"format": _FORMAT, "facts": stated, "digest": _digest(tensors, stated)}))


def read_restart(path: str | os.PathLike, expected: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    """Return the state (on the CPU) and the facts of a restart file.

    Args:
        path: of the file.
        expected: facts that must be the same as when it was written.

    Raises:
        FileNotFoundError: there is no such file.
        BadCheckpoint: it is damaged.
        BadConfig: it belongs to another model, structure or setting.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such restart file; start without --restart")
    blob = Path(path).read_bytes()
    try:
        tensors = load(blob)
        size = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + size])["__metadata__"]
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']}, and this version reads {_FORMAT}")
        if header["digest"] != _digest(tensors, header["facts"]):
            raise ValueError("the checksum does not match")
        facts = json.loads(header["facts"])
        state = State(**tensors, step=facts["step"])
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{path}: not a restart file, or damaged: {error}") from error
    differing = [name for name, value in expected.items() if facts.get(name) != value]
    if differing:
        words = "; ".join(_difference(name, facts.get(name), expected[name]) for name in differing)
        raise BadConfig(
            f"{path} is of another simulation: {words}. A restart continues the same one: give the same model, "
            "structure and options, or start without --restart"
        )
    return state, facts


_WORDS = {
    "timestep": "the time step",
    "ensemble": "the ensemble",
    "temperature": "the temperature",
    "friction": "the friction",
    "seed": "the seed",
    "replicas": "the number of replicas",
    "dtype": "the precision (--dtype, --precision)",
    "device": "the kind of device",
    "cell": "the cell",
    "pbc": "the periodicity (pbc)",
    "fixed atoms": "the list of fixed atoms",
    "charge": "the total charge",
    "spin": "the multiplicity 2S+1",
    "coulomb": "the sum of Coulomb energies (--coulomb)",
    "pressure": "the pressure",
    "barostat": "the barostat",
    "barostat_time": "the time of the barostat",
    "barostat_compressibility": "the compressibility of the barostat",
    "remove_drift": "the interval of --remove-drift",
    "inner_steps": "the number of inner steps",
}
_UNITS = {
    "timestep": " fs", "temperature": " K", "friction": " per ps", "cell": " Å", "charge": " e", "pressure": " bar",
    "barostat_time": " ps", "barostat_compressibility": " per bar",
}  # fmt: skip
_UNSHOWN = {
    "model": "its model has other weights",
    "inner": "its inner model has other weights, or only one of the two runs has one",
    "elements": "it has other atoms, or another order of atoms",
    "masses": "its atoms have other masses",
}
"""Facts of which the file holds a checksum only, and what differs, in words."""


def _difference(name: str, before: Any, now: Any) -> str:
    """Return what differs, in words."""
    if name in _UNSHOWN:
        return _UNSHOWN[name]
    return f"{_WORDS.get(name, name)} was {_shown(name, before)} there and is {_shown(name, now)} here"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not given"
    if value == []:
        return "none"
    return str(value).removeprefix("torch.") + _UNITS.get(name, "")


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


# --- Output of a simulation: trajectories, tables and the plot, with the positions at which restarts continue them ---

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
        cells = options.ensemble == "npt"
        self._tables = [Table(options.file(".csv", b), last, cells) for b in range(atoms.replicas)]
        self.rows = [table.rows for table in self._tables]
        self._drifts = [Drift(atoms.num_atoms) for _ in self._tables]
        for drift, rows in zip(self._drifts, self.rows, strict=True):
            for row in rows:
                drift.add(row)

    def add(self, state: State, rows: Sequence[TableRow]) -> None:
        """Write a frame and a row for each replica."""
        for b, row in enumerate(rows):
            self._tables[b].add(row)
            self._drifts[b].add(row)
            frame = self.frame(state, b)
            for trajectory in self._trajectories[b]:
                trajectory.write(frame)

    def frame(self, state: State, replica: int) -> Atoms:
        """Return a replica as Atoms: positions (not wrapped), momenta, energy, forces; stress of a cell that
        changes."""
        from ase.calculators.singlepoint import SinglePointCalculator
        from ase.stress import full_3x3_to_voigt_6_stress

        n = self.atoms.num_atoms
        own = slice(replica * n, (replica + 1) * n)
        frame = self.start.copy()
        if state.cell is not None:
            frame.set_cell(state.cell[replica].numpy())
        frame.set_positions(state.pos[own].numpy(), apply_constraint=False)
        momenta = (self.atoms.masses[own] * state.vel[own]).numpy() * VELOCITY
        frame.set_momenta(momenta, apply_constraint=False)
        frame.info.update(step=state.step, time_ps=state.step * self.options.timestep * 1e-3)
        results = {"energy": float(state.energy[replica]), "forces": state.forces[own].double().numpy().copy()}
        if state.stress is not None:
            results["stress"] = full_3x3_to_voigt_6_stress(state.stress[replica].double().numpy())
        frame.calc = SinglePointCalculator(frame, **results)
        return frame

    @property
    def drifts(self) -> list[float]:
        """The drift of each replica, eV/atom/ps; nan for short runs."""
        return [drift.slope for drift in self._drifts]

    @property
    def worst_drift(self) -> float:
        """The largest drift, with its sign."""
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
        why = missing_plots()
        if not why:
            plot(self.options.file(".png"), self.rows, self.atoms.num_atoms, title, self.drifts)
        return why

    def write_page(self, title: str, settings: str, origin: Mapping[str, str], ns_per_day: float) -> None:
        """Write the page, if it is wanted; after `close` and `plot`. Arguments: see `Simulated`."""
        if not self.options.report:
            return
        curves = self.options.file(".png")
        frames = read_frames(self.options.trajectory_files(0), len(self.rows[0]))
        drawn = curves.read_bytes() if curves.exists() else None
        found = Simulated(title, settings, origin, frames, self.rows, self.drifts, ns_per_day, drawn)
        write_page(self.options.file(".html"), found)

    def files(self) -> list[Path]:
        """Return all files that exist."""
        paths = [file.path for file in self._written]
        others = [self.options.file(extension) for extension in (".png", ".html", ".restart")]
        return [path for path in (*paths, *others) if path.exists()]
