"""Neighbor lists of many frames on the CPU: searched once, kept compactly, and joined to batches without a loop over
frames."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch

from ..system import System
from . import NeighborList, neighbor_list

__all__ = ["EdgeMemory", "FrameEdges", "are_small_molecules", "search"]


_DENSE_ATOMS = 128  # up to this size all pairs of a molecule are compared
_DENSE_PAIRS = 2**19  # number of pairs at once


@dataclass(eq=False)
class FrameEdges:
    """Edges of some frames, one frame after the other, in the order of a `NeighborList`.

    Attributes:
        degree: [N] number of edges of each receiver.
        sender: [E] index of the sender within its frame.
        shift: [E, 3] cell shifts, or None where all are zero.
        count: [B] number of edges of each frame.
    """

    degree: np.ndarray
    sender: np.ndarray
    shift: np.ndarray | None
    count: np.ndarray

    def joined(self, sizes: np.ndarray, cutoff: float) -> NeighborList:
        """Return the neighbor list of the batch of these frames.

        Args:
            sizes: [B] number of atoms of each frame.
            cutoff: cutoff of the search in Å.
        """
        degree = torch.from_numpy(self.degree.astype(np.int64))
        num_atoms, num_edges = len(self.degree), len(self.sender)
        row_ptr = torch.zeros(num_atoms + 1, dtype=torch.long)
        torch.cumsum(degree, 0, out=row_ptr[1:])
        edge_index = torch.empty(2, num_edges, dtype=torch.long)
        edge_index[0] = torch.repeat_interleave(degree, output_size=num_edges)
        first_atom = np.cumsum(sizes) - sizes
        np.add(self.sender, np.repeat(first_atom, self.count), out=edge_index[1].numpy(), casting="unsafe")
        if self.shift is None:
            shift = torch.zeros(num_edges, 3, dtype=torch.long)
        else:
            shift = torch.from_numpy(self.shift.astype(np.int64))
        return NeighborList(edge_index, shift, row_ptr, float(cutoff))


def are_small_molecules(system: System) -> bool:
    """Return whether all frames of a batch on the CPU are searched at once: none is large or has a cell."""
    return system.atom_counts.numpy().max(initial=0) <= _DENSE_ATOMS and not bool(system.pbc.any())


def search(system: System, cutoff: float) -> FrameEdges:
    """Return the edges of a batch of frames, as `neighbor_list` finds them.

    Args:
        system: B frames on the CPU, atoms in order.
        cutoff: cutoff in Å; pairs at d < cutoff are listed.
    """
    sizes = system.atom_counts.numpy()
    if are_small_molecules(system):
        return _search_dense(system.pos.detach().numpy(), sizes, cutoff)
    found = neighbor_list(system, cutoff)
    ends = np.cumsum(sizes)
    row_ptr = found.row_ptr.numpy()
    count = np.diff(row_ptr[np.concatenate([[0], ends])])
    sender = found.edge_index[1].numpy() - np.repeat(ends - sizes, count)
    shift = found.shift.numpy()
    return FrameEdges(np.diff(row_ptr), sender, shift if shift.any() else None, count)


def _search_dense(pos: np.ndarray, sizes: np.ndarray, cutoff: float) -> FrameEdges:
    """Return all pairs of molecules without cells, padded to one size."""
    ends = np.cumsum(sizes)
    degrees, senders, counts = [], [], []
    width = int(sizes.max(initial=1))
    step = max(1, _DENSE_PAIRS // width**2)
    for first in range(0, len(sizes), step):
        part = sizes[first : first + step]
        real = np.arange(width) < part[:, None]  # [b, width]
        padded = np.full((len(part), width, 3), np.nan)  # no distance to NaN is below the cutoff
        padded[real] = pos[ends[first] - sizes[first] : ends[first + len(part) - 1]]
        square, delta = np.zeros((2, len(part), width, width))
        for axis in range(3):
            np.subtract(padded[:, None, :, axis], padded[:, :, None, axis], out=delta)
            np.multiply(delta, delta, out=delta)
            square += delta
        near = square < float(cutoff) ** 2
        near[:, np.arange(width), np.arange(width)] = False
        degree = np.count_nonzero(near, axis=2)
        degrees.append(degree[real])
        counts.append(degree.sum(1))
        senders.append(np.flatnonzero(near) % width)
    return FrameEdges(np.concatenate(degrees), np.concatenate(senders), None, np.concatenate(counts))


class EdgeMemory:
    """Neighbor lists that are kept in memory up to a limit and searched again beyond it; threads may share them.

    Args:
        cutoff: cutoff in Å.
        memory: bytes of memory for all lists.
    """

    def __init__(self, cutoff: float, memory: int):
        self.cutoff, self._limit, self._memory = float(cutoff), memory, memory
        self._kept: dict[int, FrameEdges] = {}
        self._lock = Lock()  # of what is kept; lists are searched without it

    def __reduce__(self) -> tuple[Any, ...]:
        return EdgeMemory, (self.cutoff, self._limit)  # another process searches for itself

    def gather(self, frames: np.ndarray, system: System) -> FrameEdges:
        """Return the edges of some frames.

        Args:
            frames: [B] numbers that identify the frames.
            system: their structures.
        """
        names = frames.tolist()
        parts = [self._kept[name] for name in names if name in self._kept]
        if len(parts) < len(names):
            found = search(system, self.cutoff)
            with self._lock:
                self._keep(names, found, system.atom_counts.numpy())
            return found
        shift = None
        if any(part.shift is not None for part in parts):
            shift = np.concatenate(
                [np.zeros((len(p.sender), 3), np.int32) if p.shift is None else p.shift for p in parts]
            )
        return FrameEdges(
            np.concatenate([part.degree for part in parts]),
            np.concatenate([part.sender for part in parts]),
            shift,
            np.concatenate([part.count for part in parts]),
        )

    def _keep(self, names: list[int], edges: FrameEdges, sizes: np.ndarray) -> None:
        atoms, ends = np.cumsum(sizes), np.cumsum(edges.count)
        for k, name in enumerate(names):
            if name in self._kept or self._memory <= 0:
                continue
            rows, own = slice(atoms[k] - sizes[k], atoms[k]), slice(ends[k] - edges.count[k], ends[k])
            part = FrameEdges(
                edges.degree[rows].astype(np.int32),
                edges.sender[own].astype(np.int32),
                None if edges.shift is None else edges.shift[own].astype(np.int32),
                edges.count[k : k + 1],
            )
            size = 600 + part.degree.nbytes + part.sender.nbytes + (0 if part.shift is None else part.shift.nbytes)
            if size <= self._memory:
                self._memory -= size
                self._kept[name] = part
