"""Folders written atomically: complete or absent, with an index.json that has a checksum; locks between processes."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import BadData
from ..files import atomic_write, umask

__all__ = ["build_folder", "locked", "read_index", "write_index"]

_FORMAT = "torchmdnet2 cache 1"
_ABANDONED = 3600.0  # s


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within the block, no other process or thread is in a block of this file, which is made.

    Where there are no locks (Windows, some network file systems), the same work may be done twice.
    """
    with open(path, "ab") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` when the block ends, and vanishes when it raises.

    Those that killed processes left behind are removed after an hour.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        if left.is_dir() and time.time() - _last_change(left) > _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield aside
        aside.chmod(0o777 & ~umask())
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
            os.rename(folder, old / "cache")
            os.rename(aside, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _last_change(folder: Path) -> float:
    """When the folder, or a file in it, was last written."""
    times = []
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):  # gone by now
            times.append(path.stat().st_mtime)
    return max(times, default=time.time())


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """index.json with a checksum of itself."""
    text = json.dumps({"format": _FORMAT, **content}, ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    atomic_write(folder / "index.json", json.dumps({"sha256": digest, "content": text}))


def read_index(folder: Path) -> dict[str, Any]:
    """What `write_index` wrote.

    Raises:
        BadData: it is missing, damaged, or of another version.
    """
    path = folder / "index.json"
    remedy = "Delete the folder, and it is made again"
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        text = outer["content"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its checksum is wrong")
        content = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadData(f"{path}: the cache is damaged: {error}. {remedy}") from error
    if content.get("format") != _FORMAT:
        raise BadData(f"{path}: this cache is of the format {content.get('format')!r}, not '{_FORMAT}'. {remedy}")
    return content
