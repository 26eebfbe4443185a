"""A cache of frames in flat files, built once from any source: millions of frames are opened without being read.

A cache is a folder. index.json says what is in it and what it was made from; the numbers are columns (see
`columns`): one row per frame (cell, pbc, charge, spin, labels of structures) or per atom (z, pos, labels of atoms),
and the neighbor lists of a cutoff in a folder of their own. It is written aside and renamed, so it is there complete
or not at all.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import BadData
from ..system import System
from .columns import Column, ColumnWriter, expand
from .dataset import Dataset, checked_index
from .edge_cache import CachedEdges, write_edges
from .facts_cache import stored_facts, write_facts
from .folders import build_folder, locked, read_index, write_index
from .frame_facts import FrameFacts
from .labels import LABELS
from .reader import Chunk
from .sample import Sample

__all__ = ["CacheWriter", "CachedDataset", "write_cache"]


_FRAME = {"cell": ("f8", (3, 3)), "pbc": ("u1", (3,)), "charge": ("i4", ()), "spin": ("i4", ()), "has": ("u4", ())}
"""columns with a row per frame; bit k of `has` says whether the frame has label k"""


class CacheWriter:
    """Writes frames to an empty folder, chunk by chunk; memory does not grow with their number.

    Args:
        folder: where the files go.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._columns = {name: ColumnWriter(folder, name, *kind) for name, kind in _FRAME.items()}
        self._columns["starts"] = ColumnWriter(folder, "starts", "i8")
        self._columns["starts"].append(np.zeros(1, dtype=np.int64))
        self._columns["z"] = ColumnWriter(folder, "z", "u1")
        self._columns["pos"] = ColumnWriter(folder, "pos", "f8", (3,))
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
                self._open_label(name)
            per_atom = LABELS[name].per_atom
            column = self._columns[self._column_of(name)]
            column.fill(self.num_atoms if per_atom else self.num_frames)
            column.append(values.numpy())
            has |= 1 << self.labels.index(name)
            absent = torch.isnan(values).reshape(len(values), -1).all(1).numpy()
            self._labelled[name] += int((np.bincount(batch[~absent], minlength=count) > 0).sum()
                                        if per_atom else (~absent).sum())  # fmt: skip
        for name in ("cell", "pbc", "charge", "spin"):
            self._columns[name].append(getattr(system, name).numpy())
        self._columns["has"].append(np.full(count, has))
        self._columns["starts"].append(self.num_atoms + np.cumsum(sizes))
        self._columns["z"].append(z)
        self._columns["pos"].append(system.pos.numpy())
        last = self.places[-1] if self.places else (0, None, 0)
        if last[1] != chunk.where or last[2] + self.num_frames - last[0] != chunk.first:
            self.places.append((self.num_frames, chunk.where, chunk.first))
        self._sizes = [min(self._sizes[0], int(sizes.min())), max(self._sizes[1], int(sizes.max()))]
        self._elements[0] += np.bincount(np.unique(batch * 256 + z) % 256, minlength=256)
        self._elements[1] += np.bincount(z, minlength=256)
        self.num_frames, self.num_atoms = self.num_frames + count, self.num_atoms + len(z)

    def _open_label(self, name: str) -> None:
        if len(self.labels) == 32:
            raise BadData("a cache has room for 32 different labels")
        self.labels.append(name)
        self._columns[self._column_of(name)] = ColumnWriter(self.folder, self._column_of(name), "f8", LABELS[name].row)

    def _column_of(self, name: str) -> str:
        return f"label{self.labels.index(name)}"  # a name like "scalar:gap" is not a good name of a file

    def finish(self, **facts: Any) -> None:
        """Complete the cache.

        Args:
            facts: plain data to store with it.

        Raises:
            BadData: no frame was added.
        """
        if self.num_frames == 0:
            raise BadData("there are no frames to write")
        for name in self.labels:
            self._columns[self._column_of(name)].fill(self.num_atoms if LABELS[name].per_atom else self.num_frames)
        columns = {name: column.finish() for name, column in self._columns.items()}
        write_index(
            self.folder,
            {
                "num_frames": self.num_frames,
                "num_atoms": self.num_atoms,
                "atoms": [self._sizes[0], self.num_atoms / self.num_frames, self._sizes[1]],
                "elements": {str(z): self._elements[:, z].tolist() for z in np.flatnonzero(self._elements[1])},
                "labels": self.labels,
                "labelled": dict(self._labelled),
                "columns": columns,
                "places": self.places,
                **facts,
            },
        )

    def close(self) -> None:
        for column in self._columns.values():
            column.close()


def write_cache(folder: Path, chunks: Iterable[Chunk], facts: Callable[[], dict[str, Any]] = dict) -> None:
    """Make a cache of chunks, all or nothing.

    Args:
        folder: the cache; one that is there is replaced.
        chunks: its frames.
        facts: called when all of them are written: plain data to store with them.
    """
    with build_folder(folder) as aside:
        writer = CacheWriter(aside)
        try:
            for chunk in chunks:
                writer.add(chunk)
            writer.finish(**facts())
        finally:
            writer.close()


class CachedDataset(Dataset):
    """Frames of a cache folder, mapped into memory.

    Processes share the pages of the files; a worker opens them again.

    Args:
        folder: that `write_cache` made.

    Attributes:
        facts: the content of index.json: "num_frames", "num_atoms", "atoms" (least, mean, largest number of a frame),
            "elements" (number → frames that have it, atoms), "labelled" (label → frames that have it), and what the
            maker stored besides.
        asked, counts, available, doubts, kinds, stated: as of the readers that it was made from.

    Raises:
        BadData: a file of the cache is missing, cut off or damaged; names it. Numbers are checked when they are read.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.facts = read_index(self.folder)
        self._columns = {name: Column(self.folder, name, facts) for name, facts in self.facts["columns"].items()}
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
        """The same frames with some of their labels, by other names.

        Args:
            names: label in the cache -> what it is to be called; both of the same shape.
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
        """The neighbor lists of all frames; made on first use and kept with the cache.

        Raises:
            OSError: they are not there, and the folder cannot be written.
            BadData: they are of another cutoff.
        """
        folder = self.folder / f"neighbors-{float(cutoff)!r}"
        self._once(folder, lambda: write_edges(folder, self, float(cutoff)))
        edges = CachedEdges(folder, self._starts)
        if edges.cutoff != float(cutoff):
            raise BadData(f"{folder}: these neighbor lists are of the cutoff {edges.cutoff} Å. Delete the folder")
        return edges

    def facts_of(self, frames: np.ndarray) -> FrameFacts:
        """What some frames contribute to `statistics`; found on first use and kept with the cache, for all frames."""
        folder = self.folder / "statistics"
        other = any(new in ("energy", "forces") and name != new for name, new in self._names.items())
        few = 4 * len(frames) < len(self) and not (folder / "index.json").is_file()
        if other or few:
            return super().facts_of(frames)
        try:
            self._once(folder, lambda: write_facts(folder, CachedDataset(self.folder)))
        except OSError:  # a cache that this user cannot write to
            return super().facts_of(frames)
        facts = stored_facts(folder).of(frames)
        if "energy" not in self._names:
            facts = replace(facts, energies=np.full(len(frames), np.nan))
        if "forces" not in self._names:
            facts = replace(facts, force_square=np.zeros(len(frames)), force_count=np.zeros(len(frames), np.int64))
        labelled = {self._names[name]: has for name, has in facts.labelled.items() if name in self._names}
        return replace(facts, labelled=labelled)

    def _once(self, folder: Path, make: Callable[[], None]) -> None:
        """Make a folder that is not there; one process at a time."""
        if not (folder / "index.json").is_file():
            with locked(self.folder / ".lock"):
                if not (folder / "index.json").is_file():
                    make()
