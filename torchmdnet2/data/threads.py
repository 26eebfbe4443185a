"""Work on many frames in several threads: NumPy and PyTorch let others run while they compute."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads"]

_MOST = 8
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def in_threads(
    function: Callable[[_Item], _Found], items: Iterable[_Item], begin: Callable[[], object] | None = None
) -> Iterator[_Found]:
    """What a function gives for each item, in their order; a few items are computed ahead.

    Args:
        function: called from several threads at a time.
        items: what it is called with.
        begin: called once in each thread before its first item.

    Raises:
        Exception: of the first item whose call failed.
    """
    threads = min(_MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    waiting: deque[Future[_Found]] = deque()
    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
