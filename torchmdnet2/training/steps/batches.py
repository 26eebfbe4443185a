"""Batches of frames, and the processes that load them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from ...core.pipeline import in_threads
from ...data import Dataset, Sample
from ...data.cache import CachedDataset, CachedEdges
from ...data.labels import GROUP, LEVEL
from ...data.splits import epoch_batches, epoch_order, group_batches, in_order
from ...neighbors import NeighborList
from ...neighbors.frames import EdgeMemory
from ...potential.potential import Potential
from ...potential.refusals import rename
from ...system import System
from ..config.config import TrainingConfig

__all__ = [
    "Batch", "BatchMessage", "Frames", "Loader", "epoch_order", "frame_labels", "in_order", "measured_batches",
    "most_frames", "require_known", "training_batches", "trains_groups",
]  # fmt: skip


@dataclass(eq=False)
class BatchMessage:
    """A batch in one buffer, which a data-loading process sends in half of the time of separate tensors.

    Attributes:
        buffer: all numbers, uint8.
        layout: of each tensor its name, dtype, shape and first byte.
        rest: anything else.
    """

    buffer: Tensor
    layout: list[tuple[str, torch.dtype, tuple[int, ...], int]]
    rest: Any

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], rest: Any) -> BatchMessage:
        """Copy tensors into a buffer."""
        layout, first = [], 0
        for name, tensor in tensors.items():
            layout.append((name, tensor.dtype, tuple(tensor.shape), first))
            first += -(-tensor.nbytes // 8) * 8  # so that every tensor begins at a multiple of its item's size
        message = cls(torch.empty(first, dtype=torch.uint8), layout, rest)
        for name, view in message.tensors().items():
            view.copy_(tensors[name])
        return message

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, as views of the buffer."""
        views = {}
        for name, dtype, shape, first in self.layout:
            size = dtype.itemsize
            for length in shape:
                size *= length
            views[name] = self.buffer[first : first + size].view(dtype).view(shape)
        return views


# --- Batches of frames with their neighbor lists ---
#
# Positions of a data set do not change, so each frame's neighbor list is searched once: a cache keeps it on disk, other
# data sets in memory while there is room. A batch is gathered from packed arrays, without a loop over its frames.


@dataclass(eq=False)
class Batch:
    """Frames that are trained on together.

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
        cache_bytes: memory for the lists of a data set that cannot store them.

    Attributes:
        indices: [len(self)] as given.
        lists: the store of the neighbor lists.
    """

    def __init__(self, data: Dataset, indices: Sequence[int] | np.ndarray, cutoff: float, cache_bytes: int = 2**30):
        self.data, self.cutoff = data, float(cutoff)
        self.indices = np.array(indices, dtype=np.int64)
        self.lists = _lists_of(data, self.cutoff, cache_bytes)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> Batch:
        return self.batch([item])

    def __getitems__(self, items: Sequence[int]) -> Batch:
        """Return a batch, as a `DataLoader` asks for it."""
        return self.batch(items)

    def batch(self, items: Sequence[int] | np.ndarray) -> Batch:
        """Return some frames as one batch.

        Args:
            items: positions 0 … len(self) − 1, at least one.
        """
        frames = self.indices[np.asarray(items, dtype=np.int64)]
        return self.with_edges(frames, self.data.batch(frames))

    def with_edges(self, frames: np.ndarray, sample: Sample) -> Batch:
        """Return frames of the data set that were read, with their neighbor lists.

        Args:
            frames: [B] their indices in the data set.
            sample: what it has of them.
        """
        edges = self.lists.gather(frames, sample.system)
        sizes = np.bincount(sample.system.batch.numpy(), minlength=len(frames))
        return Batch(sample, edges.joined(sizes, self.cutoff), frames.tolist())

    def read(self, order: Iterable[Sequence[int] | np.ndarray]) -> Iterator[tuple[np.ndarray, Sample]]:
        """Yield the indices of the frames at some positions, and what the data set has of them.

        For threads that search neighbors: not every data set can be read by several threads, so this one reads.
        """
        for items in order:
            frames = self.indices[np.asarray(items, dtype=np.int64)]
            yield frames, self.data.batch(frames)

    @cached_property
    def once(self) -> tuple[Frames, np.ndarray]:
        """These frames without repetitions, which sources with a share and bootstraps have; and the position of each of
        these among them, [len(self)]."""
        distinct, place = np.unique(self.indices, return_inverse=True)
        if len(distinct) == len(self):
            return self, np.arange(len(self))
        frames = Frames(self.data, distinct, self.cutoff)
        frames.lists = self.lists
        return frames, place

    @cached_property
    def atoms(self) -> np.ndarray:
        """Number of atoms of each frame, [len(self)]."""
        return self.data.sizes()[self.indices]

    @cached_property
    def edges(self) -> np.ndarray:
        """Number of directed edges of each frame, [len(self)]; unknown ones are searched."""
        if not isinstance(self.lists, EdgeMemory):
            return self.lists.count[self.indices]
        frames, place = self.once
        if frames is not self:
            return frames.edges[place]
        lists, parts = self.lists, self.read(in_order(len(self), 256))
        counts = in_threads(lambda part: lists.gather(part[0], part[1].system).count, parts)
        return np.concatenate([np.zeros(0, dtype=np.int64), *counts])

    @cached_property
    def levels(self) -> np.ndarray:
        """Index of the level of theory of each frame in the list of their names, [len(self)]; 0 without levels."""
        return np.nan_to_num(self._labels(LEVEL)).astype(np.int64)

    @cached_property
    def groups(self) -> np.ndarray:
        """Number of the group of each frame, [len(self)]; frames without a group are alone in theirs. Where frames are
        repeated, so is their group."""
        order = np.argsort(self.indices, kind="stable")
        first = np.searchsorted(self.indices[order], self.indices[order])
        repetition = np.empty(len(self), dtype=np.int64)
        repetition[order] = np.arange(len(self)) - first
        _, numbers = np.unique(np.stack([self.loss_groups, repetition]), axis=1, return_inverse=True)
        return numbers.reshape(-1)

    @cached_property
    def loss_groups(self) -> np.ndarray:
        """As `groups`, and repetitions of a group have one number: in a batch of several, the loss takes their mean
        together."""
        groups = self.group_entries
        alone = np.isnan(groups)
        _, found = np.unique(np.stack([groups, self.levels])[:, ~alone], axis=1, return_inverse=True)
        numbers = np.arange(len(self)) + len(self)
        numbers[~alone] = found.reshape(-1)
        return numbers

    @cached_property
    def group_entries(self) -> np.ndarray:
        """What the data say of the group of each frame, as a number, [len(self)]; NaN where nothing."""
        return self._labels(GROUP)

    def _labels(self, name: str) -> np.ndarray:
        frames, place = self.once
        return frame_labels(self.data, frames.indices, name)[place]

    @property
    def has_groups(self) -> bool:
        """Whether any two frames are of one group."""
        return len(np.unique(self.groups)) < len(self)

    def of(self, chosen: np.ndarray) -> Frames:
        """Return a selection of the frames.

        Args:
            chosen: [len(self)] which, or their positions.
        """
        return Frames(self.data, self.indices[chosen], self.cutoff)

    def name(self, item: int) -> str:
        """Return the source of the frame at a position, for messages."""
        return self.data.name(int(self.indices[item]))


def frame_labels(data: Dataset, indices: np.ndarray, name: str) -> np.ndarray:
    """Return a label of each of these frames, [len(indices)]; NaN where there is none."""
    parts = []
    for part in in_order(len(indices), 1024):
        labels = data.batch(indices[part]).labels
        parts.append(labels[name].numpy() if name in labels else np.full(len(part), np.nan))
    return np.concatenate([np.zeros(0), *parts])


def require_known(potential: Potential, frames: Frames, items: Sequence[int]) -> None:
    """Raise the potential's error for a structure that it cannot evaluate, with the name and atoms of the frame.

    Args:
        potential: on any device.
        frames: labelled or not.
        items: positions of frames; those of a batch that was refused, or all.
    """
    for item in items:
        system = frames.data.batch(frames.indices[[item]]).system.to(potential.device)
        try:
            potential.check(system, charge=False)  # a training may take any
        except ValueError as error:
            rename(error, frames.name(item))
            raise


def _lists_of(data: Dataset, cutoff: float, memory: int) -> EdgeMemory | CachedEdges:
    if isinstance(data, CachedDataset):
        try:
            return data.edges(cutoff)
        except OSError:  # a cache that this user cannot write to
            pass
    return EdgeMemory(cutoff, memory)


def trains_groups(config: TrainingConfig) -> bool:
    """Return whether energies relative to the mean of a group are trained: a group must be in one batch."""
    return config.loss.relative_energy > 0 or config.loss.final.relative_energy > 0


def training_batches(frames: Frames, config: TrainingConfig, epoch: int) -> list[list[int]]:
    """Return the batches of an epoch, the same for any number of devices: see `epoch_batches`.

    Args:
        frames: the training frames.
        config: its batch_size, or else max_atoms and max_edges; its seed.
        epoch: counted from 0.

    Raises:
        BadData: a frame alone is larger than the budget.
    """
    budget = config.max_atoms is not None or config.max_edges is not None
    if trains_groups(config):
        return _batches_of_groups(frames, config, epoch)
    return epoch_batches(
        frames.atoms,
        frames.edges,
        seed=config.seed,
        epoch=epoch,
        batch_size=None if budget else config.batch_size,
        max_atoms=config.max_atoms,
        max_edges=config.max_edges,
        name=frames.name,
    )


def _batches_of_groups(frames: Frames, config: TrainingConfig, epoch: int) -> list[list[int]]:
    """Return batches as `training_batches`, with a group in one batch; groups larger than a batch are divided."""
    pieces = _groups(frames, config)
    edges = np.array([frames.edges[piece].sum() for piece in pieces])
    order = {"seed": config.seed, "epoch": epoch}

    def name(piece: int) -> str:
        return frames.name(int(pieces[piece][0]))

    if config.max_atoms is None and config.max_edges is None:
        sizes = np.array([len(piece) for piece in pieces])
        batches = group_batches(sizes, edges, batch_size=config.batch_size, **order)
    else:
        atoms = np.array([frames.atoms[piece].sum() for piece in pieces])
        batches = epoch_batches(
            atoms, edges, max_atoms=config.max_atoms, max_edges=config.max_edges, name=name, **order
        )
    return [np.concatenate([pieces[k] for k in batch]).tolist() for batch in batches]


def _groups(frames: Frames, config: TrainingConfig) -> list[np.ndarray]:
    """Return positions of the frames of each group, in parts that fit into a batch."""
    order = np.argsort(frames.groups, kind="stable")
    starts = np.flatnonzero(np.diff(frames.groups[order])) + 1
    pieces: list[np.ndarray] = []
    for group in np.split(order, starts):
        budgets = [(config.max_atoms, frames.atoms), (config.max_edges, frames.edges)]
        given = [int(np.floor(most / max(1, values[group].max()))) for most, values in budgets if most is not None]
        most = max(1, min(given)) if given else config.batch_size
        pieces += np.array_split(group, -(-len(group) // most))
    return pieces


def measured_batches(frames: Frames, config: TrainingConfig) -> list[list[int]]:
    """Return batches of frames in order, for errors, twice as large as in training: forces are not differentiated.

    A frame that is larger than the budget is a batch alone.
    """
    if trains_groups(config):  # whole groups, as training has them
        return _batches_of_groups(frames, config, 0)
    budgets = [(2 * most, what) for most, what in ((config.max_atoms, "atoms"), (config.max_edges, "edges")) if most]
    if not budgets:
        return in_order(len(frames), 2 * config.batch_size)
    share = np.max([getattr(frames, what) / most for most, what in budgets], axis=0)
    batches: list[list[int]] = []
    load = np.inf
    for frame, own in enumerate(share.tolist()):
        if load + own > 1:
            batches.append([])
            load = 0.0
        batches[-1].append(frame)
        load += own
    return batches


def most_frames(frames: Frames, config: TrainingConfig) -> int:
    """Return an upper bound of the number of frames in a batch of `training_batches`."""
    budgets = ((config.max_atoms, frames.atoms), (config.max_edges, frames.edges))
    given = [most // max(1, int(values.min())) for most, values in budgets if most is not None and len(frames)]
    return max(1, min(len(frames), *given)) if given else config.batch_size


class _Order(Sampler[list[int]]):
    """The batches of the next pass, for a `DataLoader`; replaced before each pass."""

    def __init__(self) -> None:
        self.batches: Sequence[Sequence[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(map(list, self.batches))

    def __len__(self) -> int:
        return len(self.batches)


def _sent(batch: Batch) -> BatchMessage:
    """Return the message of a batch; shifts that are all zero are not sent."""
    neighbors = batch.neighbors
    tensors = {f"system.{name}": value for name, value in vars(batch.sample.system).items()}
    tensors |= {f"labels.{name}": value for name, value in batch.sample.labels.items()}
    tensors |= {"edge_index": neighbors.edge_index, "row_ptr": neighbors.row_ptr}
    if bool(neighbors.shift.any()):
        tensors["shift"] = neighbors.shift
    return BatchMessage.of(tensors, (neighbors.cutoff, batch.frames))


def _received(message: BatchMessage) -> Batch:
    tensors = message.tensors()
    cutoff, frames = message.rest

    def part(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    edge_index = tensors["edge_index"]
    shift = tensors["shift"] if "shift" in tensors else torch.zeros(edge_index.shape[1], 3, dtype=torch.long)
    neighbors = NeighborList(edge_index, shift, tensors["row_ptr"], cutoff)
    return Batch(Sample(System(**part("system.")), part("labels.")), neighbors, frames)


class Loader:
    """Reads batches in a given order, the same ones for any number of workers.

    Args:
        frames: what to read.
        num_workers: data-loading processes, 0 for none; they live as long as the loader, and keep their neighbor lists.
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
                collate_fn=_sent,  # type: ignore[arg-type] # which gets what __getitems__ gives
                persistent_workers=True,
                prefetch_factor=4,
                generator=torch.Generator(),  # an own one: torch's is not to be advanced by reading
            )

    def __call__(self, order: Sequence[Sequence[int]]) -> Iterable[Batch]:
        """Return the batches of one pass.

        Args:
            order: positions of the frames of each batch.
        """
        if self._workers is not None:
            self._order.batches = order
            return map(_received, self._workers)
        return map(self.frames.batch, order)
