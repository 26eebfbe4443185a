"""Processes that are forked off one that has used a potential: one thread, locks that nobody holds, no GPU.

The threads of OpenMP, on which PyTorch runs, are not copied by a fork, and work that was shared out among them would
never end. `multiprocessing` forks on Linux up to Python 3.13; so do data loaders and many servers.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

__all__ = ["ProcessLock", "expect_forks", "refuse_forked_gpu", "usable_threads"]


_expected, _forked = False, False


def expect_forks() -> None:
    """From now on, PyTorch has one thread in processes that are forked off this one."""
    global _expected
    if not _expected and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
    _expected = True


def _in_child() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


def usable_threads(wanted: int) -> int:
    """As many as are wanted; 1 in a forked process."""
    return 1 if _forked else wanted


def refuse_forked_gpu(device: torch.device) -> None:
    """Raise RuntimeError for a GPU in a process that was forked off one that had used it."""
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "this process was forked off one that had used the GPU, which does not work in it: start processes by "
            "'spawn' (multiprocessing.get_context('spawn')), or use the potential on the CPU"
        )


class ProcessLock:
    """A lock that a thread may take several times. A forked process has another one: threads that may have held that of
    its parent do not exist in it."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()
