"""Trajectory files. A restart cuts them back to their length at the restart file."""

from __future__ import annotations

import os
import struct
import zlib
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np

from ..errors import BadData
from ..files import keep_old

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["DCD", "ASETrajectory", "ExtendedXYZ", "TrajectoryFile", "check_trajectory", "open_trajectory"]

_AKMA = 0.04888821  # ps, the unit of time in DCD files
_MOST = 2**31 - 1  # that their numbers can be
_TAIL = 4096  # bytes before a mark by which the file is known again
_HEAD = 48  # bytes at the beginning in which DCD and ASE's format count frames
_NO_FRAMES: dict[str, int] = {"frames": 0, "bytes": 0}


class TrajectoryFile(ABC):
    """Frames on disk.

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
        """Raise BadData unless the file is the one that the mark is of; nothing is cut off a file of somebody else."""
        remedy = "put back the file that the run wrote, or start without restart"
        if not self.path.exists() or self.path.stat().st_size < mark["bytes"]:
            raise BadData(f"{self.path} is not there or shorter than when the restart file was written; {remedy}")
        if mark.get("checksum") not in (None, self._checksum(mark)):  # older restart files have none
            raise BadData(f"{self.path} is not the file that it was when the restart file was written; {remedy}")

    def _checksum(self, mark: dict[str, int]) -> int:
        """Of what the file holds just before a mark, without the head, which later frames change."""
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
        """Cut the file back to the last whole frame, with the head that it had then."""
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
        """For appending."""

    @abstractmethod
    def _write(self, atoms: Atoms) -> None:
        """Append a frame and flush it."""

    @abstractmethod
    def _cut(self, mark: dict[str, int]) -> None:
        """Remove what follows the mark."""


class ExtendedXYZ(TrajectoryFile):
    """Text; positions, momenta, energy, forces."""

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
        """Of the positions in the last frame: where later frames begin is noted between those that are there."""
        from ase.io.trajectory import Trajectory

        try:
            with Trajectory(self.path) as file:
                return zlib.crc32(file[mark["frames"] - 1].positions.tobytes())
        except Exception:  # ASE's errors about what is no such file are of many kinds
            return -1


class DCD(TrajectoryFile):
    """CHARMM's binary format, as OpenMM, VMD, MDAnalysis and mdtraj have it: positions in float32, and the cell.

    The cell is stored as lengths and cosines of angles: its first vector must lie along x, its second in the xy plane.

    Raises:
        BadData: a cell that does not, or a structure that is periodic in some directions only.
    """

    @classmethod
    def check(cls, path: Path, atoms: Atoms) -> None:
        _periodic(atoms, path)

    def _open(self) -> BinaryIO:
        return open(self.path, "rb+" if self.mark["frames"] else "wb+")

    def _write(self, atoms: Atoms) -> None:
        periodic = _periodic(atoms, self.path)
        file: BinaryIO = self._file
        frames = self.mark["frames"]
        if not frames:
            file.write(self._header(len(atoms), atoms.info["step"], periodic))
        _count(file, frames + 1, atoms.info["step"])
        file.seek(0, os.SEEK_END)
        if periodic:
            a, b, c, *angles = atoms.cell.cellpar()
            alpha, beta, gamma = np.sin(np.pi / 2 - np.radians(angles))  # exactly 0 for right angles
            file.write(_record(struct.pack("<6d", a, gamma, b, beta, alpha, c)))
        for axis in atoms.positions.T:
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
    """As Fortran writes it: the length on both sides."""
    length = struct.pack("<i", len(content))
    return length + content + length


def _periodic(atoms: Atoms, path: Path) -> bool:
    if not atoms.pbc.any():
        return False
    if not atoms.pbc.all():
        raise BadData(f"{path}: a DCD file knows only structures that are periodic in all directions or in none")
    upper = np.abs(np.triu(atoms.cell.array, 1)).max()
    if upper > 1e-6 * np.abs(atoms.cell.array).max() or (np.diag(atoms.cell.array) <= 0).any():
        raise BadData(
            f"{path}: a DCD file needs a cell with its first vector along x and its second in the xy plane "
            "(atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True))"
        )
    return True


_FORMATS: dict[str, type[TrajectoryFile]] = {
    ".xyz": ExtendedXYZ,
    ".extxyz": ExtendedXYZ,
    ".traj": ASETrajectory,
    ".dcd": DCD,
}


def check_trajectory(path: Path, atoms: Atoms) -> None:
    """Refuse a structure that the format of this file cannot hold, before anything is computed.

    Raises:
        BadData: it cannot.
    """
    _FORMATS[path.suffix].check(path, atoms)


def open_trajectory(path: Path, timestep: float, interval: int, mark: dict[str, int] | None = None) -> TrajectoryFile:
    """The trajectory file of the kind that its extension names; arguments as for TrajectoryFile."""
    return _FORMATS[path.suffix](path, timestep, interval, mark)
