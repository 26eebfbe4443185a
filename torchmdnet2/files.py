"""Files that are never torn: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["atomic_write", "umask"]


def atomic_write(path: str | os.PathLike, content: bytes | str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Args:
        path: where the file goes; its folder must exist.
        content: bytes, or text (written as UTF-8).

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~umask())
        os.replace(aside, path)
    except BaseException as error:
        Path(aside).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say what it was full for
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def umask() -> int:
    """The process's mask of permissions."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
