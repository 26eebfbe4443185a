"""Several devices, one training: each process computes its share of every batch, and the sums are those of all.

Losses are means over the labels of the whole batch, on however many devices it is computed, so that a training is the
same on any number of them up to rounding, and can be resumed on another. Started by `torchrun`, which sets RANK,
LOCAL_RANK and WORLD_SIZE.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Devices", "local_rank", "world_size"]


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


class Devices:
    """The processes of a training.

    Args:
        rank: number of this one.
        size: how many there are.

    Attributes:
        main: this process writes files and speaks.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.main = rank == 0
        self._silent = False
        self._releases: list[Callable[[], None]] = []

    @classmethod
    @contextmanager
    def joined(cls, device: torch.device) -> Iterator[Devices]:
        """All processes that torchrun started, until the end of the block.

        Args:
            device: of this process.
        """
        size = world_size()
        if size == 1:
            yield cls()
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        given = dist.is_initialized()
        if not given:
            # Imported once a group exists, this module keeps the group in its default arguments: the group's threads
            # then outlive destroy_process_group and abort the process if they need the interpreter while it ends.
            import_module("torch.distributed.nn.functional")
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        devices = cls(dist.get_rank(), dist.get_world_size())
        try:
            yield devices
        finally:
            if not given:
                devices.release()
                dist.destroy_process_group()

    def at_end(self, release: Callable[[], None]) -> None:
        """What is done before the processes part: NCCL would wait for ever for CUDA graphs that hold its sums."""
        self._releases.append(release)

    def release(self) -> None:
        """Do it."""
        while self._releases:
            self._releases.pop()()

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the processes, in place."""
        if self.size > 1 and not self._silent:
            dist.all_reduce(tensor)
        return tensor

    def sums(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up tensors that all processes have under the same names."""
        if self.size > 1:
            for name in sorted(tensors):
                self.sum(tensors[name])
        return tensors

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Sums are those of this process within the block, which the others do not enter."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def agree(self, value: bool) -> bool:
        """What the main process says."""
        if self.size == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def share(self, chosen: Sequence[int], work: np.ndarray) -> list[int]:
        """The frames of a batch that this process takes: from the largest on, to and fro, so that work is even.

        Args:
            chosen: frame numbers.
            work: of every frame, in any unit.
        """
        if self.size == 1:
            return list(chosen)
        order = sorted(chosen, key=lambda k: (-work[k], k))
        turns = [*range(self.size), *reversed(range(self.size))]
        return [k for n, k in enumerate(order) if turns[n % len(turns)] == self.rank]
