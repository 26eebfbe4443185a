"""Batches of frames with their neighbor lists, in an order that depends on (seed, epoch) alone.

Positions of a data set do not change, so each frame's neighbor list is searched once and kept while memory allows;
a batch's list is made by joining those of its frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from ..data import Dataset, Sample, collate
from ..neighbors import NeighborList, neighbor_list

__all__ = ["Batch", "Frames", "Loader", "epoch_order", "in_order"]


@dataclass(eq=False)
class Batch:
    """Some frames as one batch.

    Attributes:
        sample: the structures (B of them) and their labels.
        neighbors: edges within the model's cutoff.
        frames: [B] indices of the frames in their data set.
    """

    sample: Sample
    neighbors: NeighborList
    frames: list[int]

    def to(self, device: torch.device) -> Batch:
        return Batch(self.sample.to(device), self.neighbors.to(device), self.frames)


class Frames(TorchDataset):
    """Chosen frames of a data set, each with its neighbor list.

    Args:
        data: the data set.
        indices: which of its frames.
        cutoff: Å.
        cache_bytes: room for frames and lists that are kept for the next epoch.
    """

    def __init__(self, data: Dataset, indices: Sequence[int], cutoff: float, cache_bytes: int = 2**30):
        self.data, self.indices, self.cutoff = data, [int(i) for i in indices], float(cutoff)
        self._room = cache_bytes
        self._kept: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> Batch:
        index = self.indices[item]
        if index in self._kept:
            return self._kept[index]
        sample = self.data[index]
        batch = Batch(sample, neighbor_list(sample.system, self.cutoff), [index])
        size = 40 * batch.neighbors.num_edges + 100 * sample.system.num_atoms + 2000
        if size <= self._room:
            self._room -= size
            self._kept[index] = batch
        return batch


def join(parts: list[Batch]) -> Batch:
    """Several batches as one, in order."""
    return Batch(
        collate([part.sample for part in parts]),
        NeighborList.concatenate([part.neighbors for part in parts]),
        [index for part in parts for index in part.frames],
    )


def epoch_order(num_frames: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of one epoch as positions 0 … num_frames − 1, a function of the arguments alone.

    Batches differ in size by at most one frame, so that none has a much noisier gradient than the others.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(num_frames, generator=generator)
    num_batches = -(-num_frames // batch_size)
    return [part.tolist() for part in torch.tensor_split(order, num_batches)]


def in_order(num_frames: int, batch_size: int) -> list[list[int]]:
    """Batches of consecutive positions."""
    return [list(range(i, min(i + batch_size, num_frames))) for i in range(0, num_frames, batch_size)]


class _Order(Sampler[list[int]]):
    """The batches of the coming pass; replaced before each one."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loader:
    """Reads batches in a given order; the same batches come whatever the number of workers.

    Args:
        frames: what to read.
        num_workers: reading processes, 0 for none; they live until the loader does, and keep their caches.
    """

    def __init__(self, frames: Frames, num_workers: int = 0):
        self.frames = frames
        self._order = _Order()
        self._workers: DataLoader | None = None
        if num_workers:
            self._workers = DataLoader(
                frames,
                batch_sampler=self._order,
                num_workers=num_workers,
                collate_fn=join,
                persistent_workers=True,
                generator=torch.Generator(),  # an own one: torch's is not to be advanced by reading
            )

    def __call__(self, order: list[list[int]]) -> Iterator[Batch]:
        """The batches of one pass.

        Args:
            order: positions of the frames of each batch.
        """
        if self._workers is None:
            return (join([self.frames[position] for position in batch]) for batch in order)
        self._order.batches = order
        return iter(self._workers)
