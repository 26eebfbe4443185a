"""Files that are never torn and never lost: written aside, flushed to disk, then renamed; inputs are not written to."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import BadConfig

__all__ = [
    "append", "atomic_write", "hold", "keep_old", "old_name", "opened", "refuse_held", "same_file", "spare_inputs",
    "umask", "written_aside",
]  # fmt: skip


def atomic_write(path: str | os.PathLike, content: bytes | str, keep: bool = False) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Args:
        path: where the file goes; its folder must exist.
        content: bytes, or text (written as UTF-8).
        keep: keep a file that is there already under its `old_name`.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    with written_aside(path, keep) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_aside(path: str | os.PathLike, keep: bool = False) -> Iterator[BinaryIO]:
    """A file to fill, which gets its name when the block ends, and vanishes when it raises.

    Args, Raises: as `atomic_write`.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~umask())
        if keep:
            keep_old(path)
        os.replace(aside, path)
    except BaseException as error:
        Path(aside).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk does not say which file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append(file: BinaryIO, content: bytes) -> None:
    """Append to an unbuffered file all of the content or, where it cannot be written, nothing of it.

    Raises:
        OSError: it cannot be written.
    """
    before = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:  # a full disk takes a part first; an interruption may come in between
        file.truncate(before)
        raise


def opened(file: BinaryIO, name: str) -> Any:
    """A file that is open, decompressed where its name ends in .gz, .bz2 or .xz."""
    import bz2
    import gzip
    import lzma

    reader: Any = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}.get(Path(name).suffix.lower())
    if reader is None:
        return nullcontext(file)
    return reader(fileobj=file) if reader is gzip.GzipFile else reader(file)


def old_name(path: Path) -> Path:
    """The name that a file gets when a new file takes its name."""
    return path.with_name(path.name + ".old")


def keep_old(path: Path) -> None:
    """Rename a file, if it is there, to its `old_name`; one of an earlier time is replaced."""
    if os.path.lexists(path):
        os.replace(path, old_name(path))


def hold(file: BinaryIO) -> None:
    """Mark a file, until it is closed or the process ends, as one that a run writes; see `refuse_held`.

    Raises:
        BadConfig: another run holds it.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadConfig(
            f"{file.name}: another run writes to this file; wait for its end, or choose another output"
        ) from None
    except (ImportError, OSError):  # Windows, a file system without locks
        pass


def refuse_held(paths: Iterable[Path]) -> None:
    """Raise BadConfig where another run, of this process or another one, holds one of these files."""
    for path in paths:
        if path.is_file():
            with open(path, "rb") as file:
                hold(file)


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths are the same file: through links of both kinds, and whatever the file system thinks of case."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)


def spare_inputs(written: Iterable[Path], read: Iterable[Path], remedy: str) -> None:
    """Refuse to write where something is read: every command that writes files asks before it computes anything.

    Args:
        written: files that will be written; those that are there are kept by `keep_old`, which replaces a file too.
        read: files that are read.
        remedy: what to do about it.

    Raises:
        BadConfig: a file would be both, or a folder has the name of a file.
    """
    inputs = list(read)
    for path in written:
        if path.is_dir():
            raise BadConfig(f"{path} is a folder, and a file of this name would be written: {remedy}")
        for target in (path, old_name(path)) if os.path.lexists(path) else (path,):
            if any(same_file(target, source) for source in inputs):
                raise BadConfig(f"{target} is read by this command and would be written too: {remedy}")


def umask() -> int:
    """The process's mask of permissions."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
