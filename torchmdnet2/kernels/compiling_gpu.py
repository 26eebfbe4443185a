"""Compile the kernels of the GPU side by side: a first run of a step launches nothing and only asks for its kernels.

Triton compiles them in threads then (its AsyncCompileMode), and keeps them on disk. With a Triton that has no such mode
each is compiled when it is first launched. Importing this needs Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..core.devices import ProcessLock
from .notice import announce, usable_cores

__all__ = ["compile_side_by_side"]


try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # older than 3.5
    AsyncCompileMode = None  # type: ignore[assignment, misc]


_SECONDS = 2.0
"""That a kernel takes to compile, on one core, in the mean."""

_SERIAL = 0.2
"""Share of that time in which one thread at a time works."""

_PATIENCE = 0.5
"""Seconds after which it is said that kernels are compiled: those on disk are loaded sooner."""

_MOST_THREADS = 16
_ONE = ProcessLock()


def compile_side_by_side(launch: Callable[[], Any]) -> None:
    """Compile the kernels that would be compiled one after the other.

    Args:
        launch: launches kernels on a CUDA device. It runs without any of them being launched, and what they would
            write must not decide what is done.
    """
    if AsyncCompileMode is None:
        return
    threads = min(usable_cores(), _MOST_THREADS)
    # a kernel that cannot be compiled says so when it is launched
    with _ONE, ThreadPoolExecutor(threads) as executor, AsyncCompileMode(executor, ignore_errors=True) as mode:
        submit = mode.submit
        mode.submit = lambda key, make, *others: submit(key, lambda: _with_launcher(make()), *others)
        with _nothing_launched():
            launch()
        number = len(wait(mode.raw_futures, _PATIENCE).not_done)
        if number:
            seconds = _SECONDS * number * max(_SERIAL, 1 / threads) + 2
            announce(number, "GPU", seconds, str(knobs.cache.dir))


def _with_launcher(kernel: Any) -> Any:
    """Some versions of Triton launch a kernel by a program in C, which takes as long to compile; it is kept too."""
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Kernels are prepared, and not launched, in this thread."""
    run, thread = JITFunction.run, threading.get_ident()

    def prepare(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        here = threading.get_ident() == thread
        return run(self, *arguments, grid=grid, warmup=warmup or here, **options)

    JITFunction.run = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
