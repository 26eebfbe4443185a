"""The threads of kernels that numba compiled: one user at a time, and none after a fork."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import numba
import torch
from numba.core import config

from ..core.devices import ProcessLock
from .compiling_cpu import finding
from .thread_tuner import ThreadChoice, ThreadTuner

__all__ = ["lost_by_fork", "run_on_threads"]


_Result = TypeVar("_Result")

# one thread at a time: numba's own pool, which is used where there is no other, ends the process otherwise; a network
# calls the terms that read its charges
_POOL = ProcessLock()
_used, _lost = False, False
_MOST_THREADS: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def lost_by_fork() -> str:
    """Why this process cannot use the kernels: GNU's OpenMP would end it. "" where it can."""
    if not _lost:
        return ""
    return (
        "this process was forked off one that had used the kernels, whose threads do not survive that; start processes "
        "by 'spawn' (multiprocessing.get_context('spawn'))"
    )


def _after_fork() -> None:
    global _lost
    _lost = _used and numba.threading_layer() == "omp"  # the other layers survive


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_on_threads(
    function: Callable[[], _Result], choice: ThreadChoice, work: int, most: int, with_forces: bool
) -> _Result:
    """Call a function on as many of numba's threads as `choice` says, and report the time to it.

    Args:
        function: calls compiled kernels.
        choice: of this network.
        work: in the units of `thread_tuner.amount_of_work`.
        most: threads that the function can keep busy.
        with_forces: whether it computes forces.
    """
    global _used
    if finding():  # no kernel runs
        return function()
    with _POOL:
        _used = True
        threads = torch.get_num_threads()
        before = numba.get_num_threads()
        if torch.get_num_threads() != threads:
            # starting numba's pool sets the number of threads of OpenMP, which PyTorch shares
            torch.set_num_threads(threads)
        tuner = choice(work, min(threads, _MOST_THREADS, most), with_forces)
        number = tuner.threads if isinstance(tuner, ThreadTuner) else tuner
        if number != before:
            numba.set_num_threads(number)
        started = time.perf_counter()
        try:
            out = function()
        finally:
            if number != before:
                numba.set_num_threads(before)
        if isinstance(tuner, ThreadTuner):
            tuner.took((time.perf_counter() - started) / work)
        return out
