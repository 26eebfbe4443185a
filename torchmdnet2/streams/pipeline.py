"""Blocks of records through one process a device: reading, computing and writing overlap, and the order is kept."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

__all__ = ["blocks_of", "in_order"]

_AHEAD = 2  # blocks that wait for each device
_Item = TypeVar("_Item")
Work = Callable[[list[Any]], list[Any]]
Setup = Callable[[str], Work]
"""Makes what computes a block on a device; called once in each process, and sent there."""

_work: Work


def blocks_of(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Lists of so many items; the last may be shorter."""
    rest = iter(items)
    while block := list(islice(rest, size)):
        yield block


def in_order(blocks: Iterable[list[Any]], setup: Setup, devices: list[str]) -> Iterator[list[Any]]:
    """The results of each block, in order.

    A single device is used by a thread of this process, each of several by a process: they share a queue, so that the
    faster one computes more. At most three blocks for each device are in memory.

    Args:
        blocks: of records; read in this thread, while others are computed.
        setup: makes what computes a block.
        devices: one for each process.

    Raises:
        RuntimeError: a process was ended by the system, as it does when memory is short.
    """
    with _executor(setup, devices) as executor:
        pending: deque[Future[list[Any]]] = deque()
        try:
            for block in blocks:
                pending.append(executor.submit(_run, block))
                if len(pending) > _AHEAD * len(devices):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a process was ended from outside, as the system does when memory is short; the results so far are "
                "written, and the same command goes on from there"
            ) from None
        finally:
            for future in pending:
                future.cancel()


def _executor(setup: Setup, devices: list[str]) -> Executor:
    if len(devices) == 1:
        return ThreadPoolExecutor(1, initializer=_begin, initargs=(setup, devices[0]))
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    for device in devices:
        queue.put(device)
    return ProcessPoolExecutor(len(devices), context, initializer=_begin_process, initargs=(setup, queue))


def _begin(setup: Setup, device: str) -> None:
    global _work
    _work = setup(device)


def _begin_process(setup: Setup, queue: Any) -> None:
    import torch

    device = queue.get()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device == "cpu":
        torch.set_num_threads(1)  # processes of one core each
    _begin(setup, device)


def _end_with_parent() -> None:
    """A parent that was killed cannot end its processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(block: list[Any]) -> list[Any]:
    return _work(block)
