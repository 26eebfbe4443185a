"""Caches of data files: their folders, and whether an existing cache is up to date."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import BadData
from .cache import CACHE_FORMAT, CachedDataset, locked, read_index, write_cache, write_index
from .labels import missing_key
from .reader import Reader

__all__ = ["AUTO_BYTES", "cache_folder", "cache_root", "cached", "file_facts", "missing_keys"]

AUTO_BYTES = 200 * 2**20
"""Default: larger sources are cached, smaller ones are read into memory."""


def cache_root() -> Path:
    """Return the default folder of caches: $TORCHMDNET2_CACHE, else the user's cache folder."""
    own = os.environ.get("TORCHMDNET2_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchmdnet2" / "data"


def cache_folder(names: Sequence[str], options: Mapping[str, Any], root: Path) -> Path:
    """Return the folder of the cache of some files; it depends on their names and the options.

    Args:
        names: of the files.
        options: plain data.
        root: folder of caches.
    """
    key = json.dumps([CACHE_FORMAT, list(names), options], sort_keys=True)
    return root / f"{Path(names[0]).stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def cached(make: Callable[[], Sequence[Reader]], files: Sequence[str], folder: Path) -> CachedDataset:
    """Open the cache of some files; it is made if it is missing or was made from other files or options.

    It is used when all files have the size and the time of change that they had; when only a time differs, their
    sha256 decides.

    Args:
        make: readers of the files, in order; called only when the cache has to be made.
        files: all that is read.
        folder: of the cache, from `cache_folder`.

    Raises:
        BadData: a source cannot be used, or the cache is damaged.
        OSError: the folder cannot be written.
    """
    try:
        if not _is_current(folder, files):  # looked at first, so that folders that cannot be written can be used
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f".{folder.name}.lock")):
                if not _is_current(folder, files):
                    _build(folder, make(), files)
    except OSError as error:
        if not all(map(os.path.exists, files)):
            raise
        raise OSError(
            f"the cache {folder} cannot be written: {error}; choose another folder with data.cache"
        ) from error
    return CachedDataset(folder)


def file_facts(path: str) -> dict[str, Any]:
    """Return name, size, time of change and sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        while block := file.read(2**22):
            digest.update(block)
    return {"path": path, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest.hexdigest()}


def missing_keys(parts: Sequence[Any], optional: Collection[str] = ()) -> None:
    """Raise BadData if a given key is in none of several files.

    Args:
        parts: readers or data sets, with the attributes asked, counts, available and path.
        optional: labels that need not be there.
    """
    available = {key for part in parts for key in part.available}
    for name, key in parts[0].asked.items():
        if name not in optional and not any(part.counts[name] for part in parts):
            raise missing_key(name, key, available, ", ".join(part.path for part in parts))


def _is_current(folder: Path, files: Sequence[str]) -> bool:
    if not (folder / "index.json").exists():
        return False
    content = read_index(folder)
    touched = []
    for then, path in zip(content["sources"], files, strict=True):
        stat = os.stat(path)
        if stat.st_size != then["size"]:
            return False
        if stat.st_mtime_ns != then["mtime_ns"]:
            touched.append((then, path))
    for then, path in touched:
        now = file_facts(path)
        if now["sha256"] != then["sha256"]:
            return False
        then.update(now)
    moved = [then["path"] for then in content["sources"]] != list(files)
    if touched or moved:  # the same content elsewhere or with another time: not to be hashed again
        for then, path in zip(content["sources"], files, strict=True):
            then["path"] = path
        with suppress(OSError):
            write_index(folder, content)
    return True


def _build(folder: Path, readers: Sequence[Reader], files: Sequence[str]) -> None:
    sources = [file_facts(path) for path in files]

    def facts() -> dict[str, Any]:
        missing_keys(readers)
        for source in sources:
            stat = os.stat(source["path"])
            if (stat.st_size, stat.st_mtime_ns) != (source["size"], source["mtime_ns"]):
                raise BadData(f"{source['path']}: the file changed while it was read")
        counts: Counter[str] = Counter()
        for reader in readers:
            counts.update(reader.counts)
        return {
            "sources": sources,
            "asked": readers[0].asked,
            "counts": dict(counts),
            "available": sorted(set().union(*(reader.available for reader in readers))),
            "kinds": sorted(set().union(*(reader.kinds for reader in readers))),
            "doubts": [doubt for reader in readers for doubt in reader.doubts],
            "stated": {name: source for reader in readers for name, source in reader.stated.items()},
            "summary": "\n".join(reader.summary() for reader in readers),
        }

    write_cache(folder, (chunk for reader in readers for chunk in reader.chunks()), facts)
