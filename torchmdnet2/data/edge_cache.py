"""Neighbor lists, stored in flat files with the cached frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .columns import Column, ColumnWriter, expand
from .dataset import Dataset
from .edges import FrameEdges, search
from .folders import build_folder, read_index, write_index
from .threads import in_threads

__all__ = ["CachedEdges", "write_edges"]

_CHUNK = 1024  # frames at a time


def write_edges(folder: Path, data: Dataset, cutoff: float) -> None:
    """Search the neighbors in all frames and write them, all or nothing.

    Args:
        folder: where; one that is there is replaced.
        data: the frames.
        cutoff: Å.
    """
    sizes = data.sizes()
    kind = "u2" if sizes.max() < 2**16 else "i4"
    with build_folder(folder) as aside:
        columns = {
            "starts": ColumnWriter(aside, "starts", "i8"),
            "degree": ColumnWriter(aside, "degree", "i4"),
            "sender": ColumnWriter(aside, "sender", kind),
            "shift": ColumnWriter(aside, "shift", "i4", (3,)),
        }
        try:
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
            facts = {name: column.finish() for name, column in columns.items()}
        finally:
            for column in columns.values():
                column.close()
        mean = total / int(sizes.sum())
        write_index(aside, {"cutoff": cutoff, "neighbors": [least, mean, most], "columns": facts})


class CachedEdges:
    """Neighbor lists of a `CachedDataset`, mapped into memory.

    Args:
        folder: that `write_edges` made.
        atoms: [frames + 1] first atom of each frame.

    Attributes:
        cutoff: Å.
        neighbors: least, mean and largest number of neighbors of an atom.
        count: [frames] directed edges of each frame.
    """

    def __init__(self, folder: Path, atoms: np.ndarray):
        self._made_of = (folder, atoms)
        facts = read_index(folder)
        self.cutoff = float(facts["cutoff"])
        self.neighbors: tuple[int, float, int] = tuple(facts["neighbors"])
        self._columns = {name: Column(folder, name, value) for name, value in facts["columns"].items()}
        self._starts, self._atoms, self._sizes = self._columns["starts"].all(), atoms, np.diff(atoms)
        self.count = np.diff(self._starts)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedEdges, self._made_of

    def gather(self, frames: np.ndarray) -> FrameEdges:
        """The edges of some frames."""
        count, first = self.count[frames], self._starts[frames]
        index = expand(first, count)
        shift = self._columns["shift"].ranges(first, count, index) if len(self._columns["shift"]) else None
        return FrameEdges(
            self._columns["degree"].ranges(self._atoms[frames], self._sizes[frames]),
            self._columns["sender"].ranges(first, count, index),
            shift,
            count,
        )
