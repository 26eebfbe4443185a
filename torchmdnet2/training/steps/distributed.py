"""Training on several devices: each process computes its share of every batch, and sums are those of all processes.

Losses are means over the labels of the whole batch, on however many devices it is computed, so that a training is the
same on any number of them up to rounding, and can be resumed on another. Started by `torchrun`, which sets RANK,
LOCAL_RANK and WORLD_SIZE.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Devices", "ProcessFailed", "local_rank", "world_size"]


class ProcessFailed(RuntimeError):
    """Another process of the training failed or can no longer be reached."""


def world_size() -> int:
    """Return the number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


class Devices:
    """The processes of a training, which add up their sums and fail together.

    Args:
        rank: number of this one, among those of all hosts.
        size: how many there are.
        device: of this one.

    Attributes:
        main: this process writes the files and the log.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu"):
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.main = rank == 0
        self._silent = False
        self._releases: list[Callable[[], None]] = []

    @classmethod
    @contextmanager
    def joined(cls, device: torch.device) -> Iterator[Devices]:
        """Yield all processes that torchrun started, until the end of the block; blocks may be nested.

        Args:
            device: of this process.

        Raises:
            ProcessFailed: one of them is gone before all have found each other.
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
            with _connected():
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        devices = cls(dist.get_rank(), dist.get_world_size(), device)
        # A process that left before the others have found it would take the addresses of all with it.
        devices.sum(torch.zeros(1, device=device))
        try:
            yield devices
        finally:
            devices.release()
            if not given:
                dist.destroy_process_group()

    def at_end(self, release: Callable[[], None]) -> None:
        """Call a function before the group of processes ends: otherwise NCCL waits forever for CUDA graphs that use
        it."""
        self._releases.append(release)

    def release(self) -> None:
        """Call the functions of `at_end`."""
        while self._releases:
            self._releases.pop()()

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the processes, in place.

        Raises:
            ProcessFailed: one of them is gone.
        """
        if self.size > 1 and not self._silent:
            with _connected():
                dist.all_reduce(tensor)
        return tensor

    def sums(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up tensors that have the same names in all processes."""
        if self.size > 1:
            for name in sorted(tensors):
                self.sum(tensors[name])
        return tensors

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Sum over this process only within the block, which no other process enters."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def agree(self, value: bool) -> bool:
        """Return the value of the main process, in all processes."""
        return bool(self.sum(torch.tensor(int(value and self.main), device=self.device)))

    def any(self, ask: Callable[[], int | None], every: int) -> Callable[[], int | None]:
        """Ask all processes: every so many calls, which all must make, the largest answer.

        Args:
            ask: what to ask this process; None and 0 do not count as answers.
            every: number of calls.
        """
        if self.size == 1:
            return ask
        calls = itertools.count(1)

        def answer() -> int | None:
            if next(calls) % every:
                return None
            number = torch.tensor(ask() or 0, device=self.device)
            with _connected():
                dist.all_reduce(number, dist.ReduceOp.MAX)
            return int(number) or None

        return answer

    def from_main(self, content: bytes) -> bytes:
        """Return the value in the main process."""
        if self.size == 1:
            return content
        length = int(self.sum(torch.tensor(len(content) if self.main else 0, device=self.device)))
        if length == 0:
            return b""
        buffer = _as_tensor(content if self.main else bytes(length)).to(self.device)
        with _connected():
            dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    @contextmanager
    def copy_of(self, path: Path) -> Iterator[Path]:
        """Yield a file of the main process, for all processes, which need not share a file system.

        Args:
            path: in the main process.

        Yields:
            The file itself in the main process; in others a copy that is deleted at the end of the block.
        """
        content = self.from_main(path.read_bytes() if self.main else b"")
        if self.main:
            yield path
            return
        with TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            copy.write_bytes(content)
            yield copy

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all processes fail if one of them fails within the block.

        Raises:
            ProcessFailed: in the other processes; names the process, its host and the error.
        """
        try:
            yield
        except Exception as error:
            with suppress(ProcessFailed):
                self._gather(f"process {self.rank} on {socket.gethostname()}: {error or type(error).__name__}")
            raise
        failures = [text for text in self._gather("") if text]
        if failures:
            raise ProcessFailed(failures[0])

    def _gather(self, text: str) -> list[str]:
        """Return a text from each process."""
        if self.size == 1:
            return [text]
        mine = text.encode()
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(mine)
        widths = self.sum(lengths).tolist()
        table = torch.zeros(self.size, max(1, *widths), dtype=torch.uint8, device=self.device)
        table[self.rank, : len(mine)] = _as_tensor(mine).to(self.device)
        rows = self.sum(table).cpu().numpy()
        return [row[:width].tobytes().decode() for row, width in zip(rows, widths, strict=True)]

    def share(self, chosen: Sequence[int], work: np.ndarray, groups: np.ndarray | None = None) -> list[int]:
        """Return the frames of a batch for this process: sorted by work and dealt back and forth, to balance it.

        Args:
            chosen: frame numbers.
            work: of every frame, in any unit.
            groups: number of the group of every frame; a group is dealt as a whole. None: each frame is alone.
        """
        if self.size == 1:
            return list(chosen)
        dealt: dict[int, list[int]] = {}
        for k in chosen:
            dealt.setdefault(k if groups is None else int(groups[k]), []).append(k)
        order = sorted(dealt.values(), key=lambda group: (-work[group].sum(), min(group)))
        turns = [*range(self.size), *reversed(range(self.size))]
        return [k for n, group in enumerate(order) if turns[n % len(turns)] == self.rank for k in group]


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


@contextmanager
def _connected() -> Iterator[None]:
    """Turn errors of the backends about a lost process into ProcessFailed."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistBackendError | dist.DistNetworkError) and "gloo" not in str(error).lower():
            raise
        raise ProcessFailed(
            "another process has stopped; see its output (possibly on another host) for the reason. Continue with "
            "--resume auto"
        ) from error
