"""Caches of data sets on disk, so that millions of frames are converted once and opened without being read.

A cache is a folder that is complete or absent, with a checksum of its index.json. Locks keep processes apart.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.files import atomic_write, umask, user_cache
from ..core.pipeline import in_threads
from ..errors import BadData
from ..neighbors.frames import FrameEdges, search
from ..system import System
from .dataset import Column, ColumnWriter, Dataset, FrameFacts, Sample, checked_index, expand, read_facts
from .labels import LABELS, missing_key
from .reader import Chunk, Reader

__all__ = [
    "AUTO_BYTES", "CACHE_FORMAT", "CachedDataset", "CachedEdges", "build_folder", "cache_folder", "cache_root",
    "cached", "file_facts", "locked", "missing_keys", "read_index", "stored_facts", "write_cache", "write_edges",
    "write_facts", "write_index",
]  # fmt: skip


CACHE_FORMAT = "torchmdnet2 cache 2"
"""Raise this number when readers return other values for the same file; older caches are then ignored."""
_ABANDONED = 3600.0  # s


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that one process or thread at a time is inside the block. The file is created if needed.

    Without locks (Windows, some network file systems) the same work may be done twice.
    """
    with open(path, "ab") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `folder` when the block ends and is deleted if the block raises.

    Temporary folders that killed processes left behind are removed after an hour.
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
    """Return the time at which the folder, or a file in it, was last written."""
    times = []
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):  # another process has removed it
            times.append(path.stat().st_mtime)
    return max(times, default=time.time())


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """Write index.json with its checksum."""
    text = json.dumps({"format": CACHE_FORMAT, **content}, ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    atomic_write(folder / "index.json", json.dumps({"sha256": digest, "content": text}))


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check what `write_index` wrote.

    Raises:
        BadData: the index is missing, damaged, or of another version.
    """
    path = folder / "index.json"
    remedy = "Delete the folder; it will be made again"
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        text = outer["content"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its checksum is wrong")
        content = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadData(f"{path}: the cache is damaged: {error}. {remedy}") from error
    if content.get("format") != CACHE_FORMAT:
        raise BadData(f"{path}: the format of this cache is {content.get('format')!r}, not '{CACHE_FORMAT}'. {remedy}")
    return content


class _Columns(dict[str, ColumnWriter]):
    """The columns of a folder while they are written: name -> column.

    Args:
        folder: an empty folder.
        kinds: name -> type of the numbers.
        rows: name -> shape of a row, if it is not a single number.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, str], rows: Mapping[str, tuple[int, ...]]):
        super().__init__({name: ColumnWriter(folder, name, kind, rows.get(name, ())) for name, kind in kinds.items()})
        self.folder = folder

    def finish(self, **facts: Any) -> None:
        """Complete the files, and write index.json with these facts, which are plain data."""
        write_index(self.folder, {"columns": {name: column.finish() for name, column in self.items()}, **facts})

    def close(self) -> None:
        for column in self.values():
            column.close()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Column]]:
    """Return the facts and the columns of a folder that `_Columns` wrote."""
    index = read_index(folder)
    return index, {name: Column(folder, name, facts) for name, facts in index["columns"].items()}


# --- Statistics of single frames, stored in flat files with the cached frames ---

_FACTS = {
    "energies": "f8", "charges": "i4", "spins": "i4", "force_square": "f8", "force_count": "i8", "keys": "u8",
    "labelled": "u4", "counts": "i4",
}  # fmt: skip
"""Bit k of `labelled` says whether the frame has label k."""


def write_facts(folder: Path, data: Dataset) -> None:
    """Compute the facts of all frames and write them to a folder that appears when it is complete.

    Args:
        folder: the folder; an existing one is replaced.
        data: the frames.
    """
    facts = read_facts(data.batch, np.arange(len(data)))
    labels = list(facts.labelled)
    bits = np.zeros(len(data), dtype=np.uint32)
    for k, name in enumerate(labels):
        bits |= facts.labelled[name].astype(np.uint32) << np.uint32(k)
    rows = {"counts": (len(facts.elements),)}
    with build_folder(folder) as aside, closing(_Columns(aside, _FACTS, rows)) as columns:
        for name, column in columns.items():
            column.append(bits if name == "labelled" else getattr(facts, name))
        columns.finish(elements=facts.elements.tolist(), labels=labels)


def stored_facts(folder: Path) -> FrameFacts:
    """Read what `write_facts` wrote.

    Raises:
        BadData: a file is missing or damaged.
    """
    index, files = _read(folder)
    columns = {name: column.all() for name, column in files.items()}
    bits = columns.pop("labelled")
    labelled = {name: (bits >> np.uint32(k) & np.uint32(1)).astype(bool) for k, name in enumerate(index["labels"])}
    return FrameFacts(elements=np.array(index["elements"]), labelled=labelled, **columns)


# --- Neighbor lists, stored in flat files with the cached frames ---

_CHUNK = 1024  # frames at a time


def write_edges(folder: Path, data: Dataset, cutoff: float) -> None:
    """Search the neighbors in all frames and write them to a folder that appears when it is complete.

    Args:
        folder: the folder; an existing one is replaced.
        data: the frames.
        cutoff: cutoff in Å.
    """
    sizes = data.sizes()
    kinds = {"starts": "i8", "degree": "i4", "sender": "u2" if sizes.max() < 2**16 else "i4", "shift": "i4"}
    with build_folder(folder) as aside, closing(_Columns(aside, kinds, {"shift": (3,)})) as columns:
        columns["starts"].append(np.zeros(1, dtype=np.int64))
        total, least, most, periodic = 0, 2**62, 0, False
        starts = range(0, len(data), _CHUNK)
        chunks = (np.arange(first, min(first + _CHUNK, len(data))) for first in starts)
        for found in in_threads(lambda frames: search(data.batch(frames).system, cutoff), chunks):
            columns["starts"].append(total + np.cumsum(found.count))
            columns["degree"].append(found.degree)
            columns["sender"].append(found.sender)
            if found.shift is not None:
                columns["shift"].fill(total, 0)
                columns["shift"].append(found.shift)
            total += len(found.sender)
            periodic = periodic or found.shift is not None
            least, most = min(least, int(found.degree.min())), max(most, int(found.degree.max()))
        if periodic:
            columns["shift"].fill(total, 0)
        columns.finish(cutoff=cutoff, neighbors=[least, total / int(sizes.sum()), most])


class CachedEdges:
    """Neighbor lists of a `CachedDataset`, read through memory maps.

    Args:
        folder: a folder from `write_edges`.
        atoms: [frames + 1] first atom of each frame.

    Attributes:
        cutoff: cutoff in Å.
        neighbors: least, mean and largest number of neighbors of an atom.
        count: [frames] number of edges of each frame.
    """

    def __init__(self, folder: Path, atoms: np.ndarray):
        self._made_of = (folder, atoms)
        facts, self._columns = _read(folder)
        self.cutoff = float(facts["cutoff"])
        self.neighbors: tuple[int, float, int] = tuple(facts["neighbors"])
        self._starts, self._atoms, self._sizes = self._columns["starts"].all(), atoms, np.diff(atoms)
        self.count = np.diff(self._starts)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedEdges, self._made_of

    def gather(self, frames: np.ndarray, system: System | None = None) -> FrameEdges:
        """Return the edges of some frames; what `EdgeMemory` searches in a system is read here."""
        count, first = self.count[frames], self._starts[frames]
        index = expand(first, count)
        shift = self._columns["shift"].ranges(first, count, index) if len(self._columns["shift"]) else None
        return FrameEdges(
            self._columns["degree"].ranges(self._atoms[frames], self._sizes[frames]),
            self._columns["sender"].ranges(first, count, index),
            shift,
            count,
        )


# --- Frames in flat files, built once from any source ---
#
# index.json describes the content of the folder and its source. The numbers are columns (see `dataset.Column`) with one
# row per frame (cell, pbc, charge, spin, labels of structures) or per atom (z, pos, labels of atoms). Neighbor lists of
# a cutoff are in a separate folder. A cache is written to a temporary folder and renamed, so that it is never partial.

_FRAMES = {
    "cell": "f8", "pbc": "u1", "charge": "i4", "spin": "i4", "has": "u4", "starts": "i8", "z": "u1", "pos": "f8",
}  # fmt: skip
"""Bit k of `has` says whether the frame has label k."""


class CacheWriter(_Columns):
    """Writes frames to an empty folder in chunks, so that memory does not grow with their number.

    Args:
        folder: the folder for the files.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, _FRAMES, {"cell": (3, 3), "pbc": (3,), "pos": (3,)})
        self["starts"].append(np.zeros(1, dtype=np.int64))
        self.labels: list[str] = []
        self.places: list[tuple[int, str, int]] = []
        self.num_frames = self.num_atoms = 0
        self._sizes = [2**62, 0]  # smallest, largest
        self._elements = np.zeros((2, 256), dtype=np.int64)  # frames that have an element, atoms of it
        self._labelled: Counter[str] = Counter()

    def add(self, chunk: Chunk) -> None:
        """Add the frames of a chunk."""
        system, labels = chunk.sample.system, chunk.sample.labels
        count, batch, z = system.num_systems, system.batch.numpy(), system.z.numpy()
        sizes = np.bincount(batch, minlength=count)
        has = 0
        for name, values in labels.items():
            if name not in self.labels:
                if len(self.labels) == 32:
                    raise BadData("a cache holds at most 32 different labels")
                self.labels.append(name)
                file = self._column_of(name)
                self[file] = ColumnWriter(self.folder, file, "f8", LABELS[name].row)
            per_atom = LABELS[name].per_atom
            column = self[self._column_of(name)]
            column.fill(self.num_atoms if per_atom else self.num_frames)
            column.append(values.numpy())
            has |= 1 << self.labels.index(name)
            absent = torch.isnan(values).reshape(len(values), -1).all(1).numpy()
            self._labelled[name] += int((np.bincount(batch[~absent], minlength=count) > 0).sum()
                                        if per_atom else (~absent).sum())  # fmt: skip
        for name in ("cell", "pbc", "charge", "spin"):
            self[name].append(getattr(system, name).numpy())
        self["has"].append(np.full(count, has))
        self["starts"].append(self.num_atoms + np.cumsum(sizes))
        self["z"].append(z)
        self["pos"].append(system.pos.numpy())
        last = self.places[-1] if self.places else (0, None, 0)
        if last[1] != chunk.where or last[2] + self.num_frames - last[0] != chunk.first:
            self.places.append((self.num_frames, chunk.where, chunk.first))
        self._sizes = [min(self._sizes[0], int(sizes.min())), max(self._sizes[1], int(sizes.max()))]
        self._elements[0] += np.bincount(np.unique(batch * 256 + z) % 256, minlength=256)
        self._elements[1] += np.bincount(z, minlength=256)
        self.num_frames, self.num_atoms = self.num_frames + count, self.num_atoms + len(z)

    def _column_of(self, name: str) -> str:
        return f"label{self.labels.index(name)}"  # names such as "scalar:gap" are not valid file names everywhere

    def finish(self, **facts: Any) -> None:
        """Complete the cache.

        Args:
            facts: plain data to store in index.json.

        Raises:
            BadData: no frame was added.
        """
        if self.num_frames == 0:
            raise BadData("there are no frames to write")
        for name in self.labels:
            self[self._column_of(name)].fill(self.num_atoms if LABELS[name].per_atom else self.num_frames)
        super().finish(
            num_frames=self.num_frames,
            num_atoms=self.num_atoms,
            atoms=[self._sizes[0], self.num_atoms / self.num_frames, self._sizes[1]],
            elements={str(z): self._elements[:, z].tolist() for z in np.flatnonzero(self._elements[1])},
            labels=self.labels,
            labelled=dict(self._labelled),
            places=self.places,
            **facts,
        )


def write_cache(folder: Path, chunks: Iterable[Chunk], facts: Callable[[], dict[str, Any]] = dict) -> None:
    """Write chunks of frames to a cache, which appears when it is complete.

    Args:
        folder: folder of the cache; an existing one is replaced.
        chunks: the frames.
        facts: function that is called when all frames are written; it returns plain data to store in index.json.
    """
    with build_folder(folder) as aside, closing(CacheWriter(aside)) as writer:
        for chunk in chunks:
            writer.add(chunk)
        writer.finish(**facts())


class CachedDataset(Dataset):
    """A data set in a cache folder, read through memory maps.

    Processes share the pages of the files; a worker opens them again.

    Args:
        folder: a folder from `write_cache`.

    Attributes:
        facts: the content of index.json: "num_frames", "num_atoms", "atoms" (least, mean, largest number of a frame),
            "elements" (number → frames that have it, atoms), "labelled" (label → frames that have it), and the facts
            given to `write_cache`.
        asked, counts, available, doubts, kinds, stated: as the readers of the source had them.

    Raises:
        BadData: a file of the cache is missing, cut off or damaged; the message names it. Numbers are checked when they
            are read.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.facts, self._columns = _read(self.folder)
        self._labels: list[str] = self.facts["labels"]
        self._names = {name: name for name in self._labels}
        self._starts, self._has = self._columns["starts"].all(), self._columns["has"].all()
        self._firsts = [place[0] for place in self.facts["places"]]
        self.asked: dict[str, str] = self.facts.get("asked", {})
        self.counts = Counter(self.facts.get("counts", self.facts["labelled"]))
        self.available = set(self.facts.get("available", self._labels))
        self.doubts: list[str] = self.facts.get("doubts", [])
        self.kinds, self.stated = self.facts.get("kinds", ()), self.facts.get("stated", {})

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]
        self._names = state["names"]

    def with_labels(self, names: Mapping[str, str]) -> CachedDataset:
        """Return the same frames with a selection of their labels, under other names.

        Args:
            names: label in the cache -> new name; both labels have the same shape.
        """
        other = CachedDataset(self.folder)
        other._names = dict(names)
        return other

    def __len__(self) -> int:
        return int(self.facts["num_frames"])

    def __getitem__(self, index: int) -> Sample:
        return self.batch([checked_index(index, len(self))])

    def name(self, index: int) -> str:
        index = checked_index(index, len(self))
        start, where, first = self.facts["places"][bisect_right(self._firsts, index) - 1]
        return f"{where}, frame {first + index - start}"

    def sizes(self) -> np.ndarray:
        return np.diff(self._starts)

    def summary(self) -> str:
        found = ", ".join(f"{name} in {n}" for name, n in self.facts["labelled"].items()) or "no labels"
        return self.facts.get("summary") or f"{self.folder}: {len(self)} frames; {found}"

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        frames = np.asarray(indices, dtype=np.int64)
        first = self._starts[frames]
        count = self._starts[frames + 1] - first
        atoms = expand(first, count)
        columns = self._columns

        def per_frame(name: str) -> torch.Tensor:
            return torch.from_numpy(columns[name].rows(frames))

        system = System(
            z=torch.from_numpy(columns["z"].ranges(first, count, atoms).astype(np.int64)),
            pos=torch.from_numpy(columns["pos"].ranges(first, count, atoms)),
            batch=torch.from_numpy(np.repeat(np.arange(len(frames)), count)),
            cell=per_frame("cell"),
            pbc=per_frame("pbc").bool(),
            charge=per_frame("charge").double(),
            spin=per_frame("spin").long(),
        )
        has = int(np.bitwise_or.reduce(self._has[frames]))
        labels = {}
        for k, name in enumerate(self._labels):
            if has >> k & 1 and name in self._names:
                column = columns[f"label{k}"]
                rows = column.ranges(first, count, atoms) if LABELS[name].per_atom else column.rows(frames)
                labels[self._names[name]] = torch.from_numpy(rows)
        return Sample(system, labels)

    def edges(self, cutoff: float) -> CachedEdges:
        """Return the neighbor lists of all frames; computed on first use and stored with the cache.

        Raises:
            OSError: the lists are missing, and the folder cannot be written.
            BadData: the stored lists have another cutoff.
        """
        folder = self.folder / f"neighbors-{float(cutoff)!r}"
        self._once(folder, lambda: write_edges(folder, self, float(cutoff)))
        edges = CachedEdges(folder, self._starts)
        if edges.cutoff != float(cutoff):
            raise BadData(f"{folder}: these neighbor lists have the cutoff {edges.cutoff} Å. Delete the folder")
        return edges

    def facts_of(self, frames: np.ndarray) -> FrameFacts:
        """Return what some frames contribute to `statistics`; computed on first use and stored with the cache."""
        folder = self.folder / "statistics"
        other = any(new in ("energy", "forces") and name != new for name, new in self._names.items())
        few = 4 * len(frames) < len(self) and not (folder / "index.json").is_file()
        if other or few:
            return super().facts_of(frames)
        try:
            self._once(folder, lambda: write_facts(folder, CachedDataset(self.folder)))
        except OSError:  # this user cannot write to the cache
            return super().facts_of(frames)
        facts = stored_facts(folder).of(frames)
        if "energy" not in self._names:
            facts = replace(facts, energies=np.full(len(frames), np.nan))
        if "forces" not in self._names:
            facts = replace(facts, force_square=np.zeros(len(frames)), force_count=np.zeros(len(frames), np.int64))
        labelled = {self._names[name]: has for name, has in facts.labelled.items() if name in self._names}
        return replace(facts, labelled=labelled)

    def _once(self, folder: Path, make: Callable[[], None]) -> None:
        """Make a folder if it does not exist, in one process at a time."""
        if not (folder / "index.json").is_file():
            with locked(self.folder / ".lock"):
                if not (folder / "index.json").is_file():
                    make()


AUTO_BYTES = 200 * 2**20
"""Default: larger sources are cached, smaller ones are read into memory."""


def cache_root() -> Path:
    """Return the default folder of caches: $TORCHMDNET2_CACHE, else the user's cache folder."""
    own = os.environ.get("TORCHMDNET2_CACHE")
    if own:
        return Path(own)
    return user_cache() / "data"


def cache_folder(names: Sequence[str], options: Mapping[str, Any], root: Path) -> Path:
    """Return the folder of the cache of some files; it depends on their names and the options.

    Args:
        names: names of the files.
        options: options of the reading, as plain data.
        root: folder of caches.
    """
    key = json.dumps([CACHE_FORMAT, list(names), options], sort_keys=True)
    return root / f"{Path(names[0]).stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def cached(make: Callable[[], Sequence[Reader]], files: Sequence[str], folder: Path) -> CachedDataset:
    """Open the cache of some files; make it if it is missing, or if the files or options have changed.

    The cache is current if all files still have the size and the time of change that it records. If only a time
    differs, the SHA-256 decides.

    Args:
        make: function that returns the readers of the files, in order; called only if the cache has to be made.
        files: all files that are read.
        folder: folder of the cache, from `cache_folder`.

    Raises:
        BadData: a file cannot be used, or the cache is damaged.
        OSError: the folder cannot be written.
    """
    try:
        if not _is_current(folder, files):  # checked without the lock first: folders that cannot be written can be read
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
        optional: labels that may be missing.
    """
    available = {key for part in parts for key in part.available}
    counts = sum((Counter(part.counts) for part in parts), Counter())
    alone = not any(name in LABELS or name == "virial" for name in counts)
    for name, key in parts[0].asked.items():
        if name not in optional and not counts[name]:
            raise missing_key(name, key, available, ", ".join(part.path for part in parts), alone)


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
    if touched or moved:  # same content at another place or time: store it, so that the file is not hashed again
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
