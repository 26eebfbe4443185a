"""The order of frames in an epoch, as batches; a function of (seed, epoch) alone, so a run can be resumed exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["AtomBatchSampler", "BatchSampler", "MoleculeBatchSampler"]


class BatchSampler(ABC):
    """Batches of frame indices, for `torch.utils.data.DataLoader(batch_sampler=…)`.

    Iteration gives the batches of the current epoch that are not done yet. It does not move the position: readers run
    ahead of training, so the position moves when training says `step()`.

        for epoch in range(sampler.epoch, num_epochs):
            for batch in loader:
                ...
                sampler.step()

    Args:
        num_frames: frames 0 … num_frames − 1 are shuffled.
        seed: of the order.
        shuffle: False keeps the order of the frames.

    Attributes:
        epoch: the current epoch.
        position: number of its batches that are done.
    """

    def __init__(self, num_frames: int, seed: int = 0, shuffle: bool = True):
        if num_frames < 1:
            raise ValueError("there must be at least one frame")
        self.num_frames, self.seed, self.shuffle = int(num_frames), int(seed), bool(shuffle)
        self.epoch = self.position = 0
        self._made: tuple[int, list[list[int]]] | None = None

    @abstractmethod
    def _cut(self, order: list[int]) -> list[list[int]]:
        """Divide the order of an epoch into batches."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What the batches depend on, besides the epoch."""

    def batches(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch."""
        order = np.arange(self.num_frames)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_frames)
        return self._cut(order.tolist())

    def _current(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.epoch:
            self._made = (self.epoch, self.batches(self.epoch))
        return self._made[1]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._current()[self.position :])

    def __len__(self) -> int:
        """Number of batches of the current epoch that are not done yet."""
        return len(self._current()) - self.position

    def step(self) -> None:
        """One batch is done; after the last one the next epoch begins."""
        self.position += 1
        if self.position == len(self._current()):
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where training is; plain numbers, strings and booleans."""
        return {"epoch": self.epoch, "position": self.position, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: the state belongs to other settings, so the batches would be others.
        """
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the order of batches was saved with {name} = {state.get(name)}, and now it is {value}"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


class MoleculeBatchSampler(BatchSampler):
    """Batches of a number of frames; they differ by at most one, so that no gradient is much noisier than others.

    Args:
        num_frames: frames in all.
        batch_size: at most so many frames in a batch.
        seed: of the order.
        shuffle: False keeps the order of the frames.
    """

    def __init__(self, num_frames: int, batch_size: int, seed: int = 0, shuffle: bool = True):
        super().__init__(num_frames, seed, shuffle)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = int(batch_size)

    def _cut(self, order: list[int]) -> list[list[int]]:
        num_batches = -(-self.num_frames // self.batch_size)
        return [part.tolist() for part in np.array_split(np.array(order), num_batches)]

    def _settings(self) -> dict[str, Any]:
        return {
            "num_frames": self.num_frames,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }


class AtomBatchSampler(BatchSampler):
    """Batches of as many frames as have at most a number of atoms together: even work and memory for mixed sizes.

    A frame that alone is larger makes a batch of its own.

    Args:
        num_atoms: atoms of each frame.
        max_atoms: at most so many atoms in a batch.
        seed: of the order.
        shuffle: False keeps the order of the frames.
    """

    def __init__(self, num_atoms: Sequence[int], max_atoms: int, seed: int = 0, shuffle: bool = True):
        super().__init__(len(num_atoms), seed, shuffle)
        if max_atoms < 1:
            raise ValueError(f"max_atoms must be at least 1, got {max_atoms}")
        self.num_atoms, self.max_atoms = [int(n) for n in num_atoms], int(max_atoms)

    def _cut(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for frame in order:
            size = self.num_atoms[frame]
            if not batches or size > room:
                batches.append([])
                room = self.max_atoms
            batches[-1].append(frame)
            room -= size
        return batches

    def _settings(self) -> dict[str, Any]:
        return {
            "num_frames": self.num_frames,
            "total_atoms": sum(self.num_atoms),
            "max_atoms": self.max_atoms,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
