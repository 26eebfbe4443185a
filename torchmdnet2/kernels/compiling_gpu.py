"""Compile the kernels of the GPU in parallel: a first run of a step launches nothing and only collects its kernels.

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

from ..core.devices import ProcessLock, usable_cores
from . import announce

__all__ = ["compile_side_by_side"]


try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # older than 3.5
    AsyncCompileMode = None  # type: ignore[assignment, misc]


_SECONDS = 2.0
"""Mean time to compile a kernel on one core, s."""

_SERIAL = 0.2
"""Share of that time in which only one thread can work."""

_PATIENCE = 0.5
"""Time in s after which a message says that kernels are compiled. Kernels on disk are loaded sooner."""

_MOST_THREADS = 16
_ONE = ProcessLock()


def compile_side_by_side(launch: Callable[[], Any]) -> None:
    """Compile the kernels that would be compiled one after the other.

    Args:
        launch: a function that launches kernels on a CUDA device. It is called while nothing is launched: what it
            does must not depend on what kernels write.
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
    """Keep the launcher too: some versions of Triton launch a kernel by a C program, which takes as long to compile."""
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Prepare kernels in this thread without launching them."""
    run, thread = JITFunction.run, threading.get_ident()

    def prepare(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        here = threading.get_ident() == thread
        return run(self, *arguments, grid=grid, warmup=warmup or here, **options)

    JITFunction.run = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
