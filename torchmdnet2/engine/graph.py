"""CUDA graphs: capture, replay, and search for operations that synchronise with the host, which no graph can hold.

Before the first launch, kernels are compiled in parallel.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core import announce
from ..core.devices import ProcessLock, capture_stream, usable_cores

__all__ = [
    "CudaGraph", "ForbidHostSync", "GraphMemory", "HostSync", "NotCapturable", "ReplayDiffers", "compile_side_by_side",
    "exclusive_capture", "graph_capacity", "same_bytes",
]  # fmt: skip


_ATEN = torch.ops.aten
# their result, or its size, is a value that the host must know
_LOOK = {
    _ATEN._local_scalar_dense, _ATEN.item, _ATEN.is_nonzero, _ATEN.equal, _ATEN.nonzero, _ATEN.masked_select,
    _ATEN.bincount, _ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.lift_fresh,
}  # fmt: skip
_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_, _ATEN._unsafe_index}
_HERE = (str(Path(torch.__file__).parent), __file__)


def graph_capacity(needed: int, step: float = 19 / 16) -> int:
    """Return how much the buffers of a graph hold: the first that is enough in a series of multiples of 16 that begins
    at 64 and grows by about this factor. The series has few numbers, so that there are few graphs."""
    capacity = 64
    while capacity < needed:
        capacity = 16 * math.ceil(capacity * step / 16)
    return capacity


class NotCapturable(RuntimeError):
    """No CUDA graph can hold this computation; the message says why."""


class HostSync(NotCapturable):
    """An operation synchronises the host with the GPU; the message names the function and the operation."""


class ForbidHostSync(TorchDispatchMode):
    """A context in which operations of this thread that would synchronise with the GPU raise HostSync, on a CPU too.

    Such operations copy values to the host, have results whose size depends on values, or copy constants to the device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        waits = packet in _LOOK
        if packet is _ATEN.repeat_interleave:
            waits = kwargs.get("output_size") is None and func._overloadname.endswith("Tensor")
        elif packet in _INDEXED:
            waits = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        elif packet in (_ATEN._to_copy, _ATEN.copy_, _ATEN._copy_from):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            kinds = {t.device.type for t in tensors if t.numel()}
            if kwargs.get("device") is not None:
                kinds.add(torch.device(kwargs["device"]).type)
            waits = len(kinds) > 1
        if waits:
            raise HostSync(f"{_where()} copies tensor values to the CPU ({packet})")
        return func(*args, **kwargs)


def _where() -> str:
    """Return the innermost function that does not belong to PyTorch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return "a function"
    code = frame.f_code
    name = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if name is None:
        owner = frame.f_locals.get("self")
        name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
    return f"'{name}' ({Path(code.co_filename).name})"


# --- CUDA graphs: recorded one at a time in a process, and compared with the launches that they were made of ---

_ONE = threading.Lock()


class ReplayDiffers(NotCapturable):
    """A replayed graph gives other numbers than the launches that it captured."""


@contextmanager
def exclusive_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture the launches of the block on this stream.

    Other threads may launch and wait for their streams meanwhile. But `torch.cuda.graph` first waits for the whole
    device, which fails while another thread captures, and breaks that capture too: so they take turns.

    Args:
        graph: a new one.
        stream: not the default one.
        pool: of memory, from `torch.cuda.graph_pool_handle()`; None: a new one.
    """
    with _ONE, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


class GraphMemory:
    """Memory that several graphs share. Only one is replayed at a time, and nothing in it is read after a replay.

    The allocator gives a block of a pool only to its stream, so all graphs are captured on one stream. A block can be
    used for a smaller one, but not for a larger one: capture the largest graph first.
    """

    def __init__(self, device: torch.device):
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._first = torch.cuda.CUDAGraph()  # PyTorch gives up a pool with its last graph: this one stays
        with torch.cuda.device(device), exclusive_capture(self._first, self.stream, self.pool):
            torch.zeros(1, device=device)


class CudaGraph:
    """Launches that the device repeats without the host.

    Attributes:
        nbytes: of its memory if `measure` was set, else 0.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int):
        self._graph, self.nbytes = graph, nbytes

    @classmethod
    def record(
        cls,
        launch: Callable[[], None],
        device: torch.device,
        results: Sequence[Tensor] = (),
        *,
        agree: Callable[[list[Tensor]], bool] | None = None,
        changes_inputs: bool = False,
        warm_up: Callable[[], None] | None = None,
        memory: GraphMemory | None = None,
        measure: bool = False,
    ) -> CudaGraph:
        """Capture the launches of a function.

        Args:
            launch: enqueues the work on the current stream, and waits for nothing.
            device: a CUDA device.
            results: tensors that the work writes. The graph is replayed once, and must give the results of the
                launches.
            agree: compares them with copies of the results of the launches; None: bit by bit.
            changes_inputs: the work also reads `results`, which are restored before and after that replay.
            warm_up: called before the capture instead of the launches, to compile and load kernels and to allocate
                lasting memory, which must not happen inside.
            memory: shared with other graphs; None: not shared.
            measure: find the memory of the graph; waits for the device.

        Raises:
            NotCapturable: the capture failed.
            ReplayDiffers: the replay gives other numbers.
        """
        with torch.cuda.device(device):
            before = [t.clone() for t in results] if changes_inputs else []
            side = capture_stream(device) if memory is None else memory.stream
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                (warm_up or launch)()
            torch.cuda.current_stream().wait_stream(side)
            launched = [t.clone() for t in results]
            reserved = _reserved(device) if measure else 0
            graph = torch.cuda.CUDAGraph()
            try:
                with exclusive_capture(graph, side, memory and memory.pool):
                    launch()
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotCapturable(f"the capture failed: {str(error).splitlines()[0]}") from error
            nbytes = max(0, torch.cuda.memory_reserved(device) - reserved) if measure else 0
            if results:
                _put_back(results, before)
                graph.replay()
                if not (agree(launched) if agree else all(map(same_bytes, results, launched))):
                    raise ReplayDiffers("a replayed CUDA graph gives other numbers than its launches")
                _put_back(results, before)
        return cls(graph, nbytes)

    def replay(self) -> None:
        """Repeat the launches on the current stream, without waiting."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the memory now."""
        self._graph.reset()


def _reserved(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _put_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=False):  # no values where the inputs do not change
        tensor.copy_(value)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit; NaN equals itself, and 0 differs from −0."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --- Kernels compiled in parallel: a first run of a step launches nothing and only collects its kernels ---
#
# Triton compiles them in threads then (its AsyncCompileMode), and keeps them on disk. With a Triton that has no such
# mode each is compiled when it is first launched.

_SECONDS = 2.0
"""Mean time to compile a kernel on one core, s."""

_SERIAL = 0.2
"""Share of that time in which only one thread can work."""

_PATIENCE = 0.5
"""Time in s after which a message says that kernels are compiled. Kernels on disk are loaded sooner."""

_MOST_THREADS = 16
_COMPILING = ProcessLock()


def compile_side_by_side(launch: Callable[[], Any]) -> None:
    """Compile the kernels that would be compiled one after the other.

    Args:
        launch: a function that launches kernels on a CUDA device. It is called while nothing is launched: what it
            does must not depend on what kernels write.
    """
    try:
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # older than 3.5
        return
    threads = min(usable_cores(), _MOST_THREADS)
    # a kernel that cannot be compiled says so when it is launched
    with _COMPILING, ThreadPoolExecutor(threads) as executor, AsyncCompileMode(executor, ignore_errors=True) as mode:
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
    from triton.runtime import driver

    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Prepare kernels in this thread without launching them."""
    from triton.runtime.jit import JITFunction

    run, thread = JITFunction.run, threading.get_ident()

    def prepare(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        here = threading.get_ident() == thread
        return run(self, *arguments, grid=grid, warmup=warmup or here, **options)

    JITFunction.run = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
