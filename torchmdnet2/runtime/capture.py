"""CUDA graphs: recorded one at a time in a process, and compared with the launches that they were made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .sync_guard import NotCapturable

__all__ = ["CudaGraph", "GraphMemory", "ReplayDiffers", "exclusive_capture"]

_ONE = threading.Lock()


class ReplayDiffers(NotCapturable):
    """A replayed graph gives other numbers than the launches that it was made of."""


@contextmanager
def exclusive_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """What is launched in the block, on this stream, becomes the graph.

    Other threads may go on launching and waiting for their streams. But `torch.cuda.graph` begins by waiting for the
    whole device, which fails while another thread records, and breaks that recording too: so they take turns.

    Args:
        graph: a new one.
        stream: not the default one.
        pool: of memory, from `torch.cuda.graph_pool_handle()`; None: one of its own.
    """
    with _ONE, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


class GraphMemory:
    """Memory that several graphs use, of which one at a time is replayed; nothing in it is read after a replay.

    The allocator gives a block of a pool to the stream alone that it was made on: all are captured on one stream.
    A block is taken for a smaller one, but not for a larger one: capture the largest graph first.
    """

    def __init__(self, device: torch.device):
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


class CudaGraph:
    """Launches that the device repeats by itself.

    Attributes:
        nbytes: of its memory, where `measure` was asked for, else 0.
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
        """Capture what a function launches.

        Args:
            launch: enqueues the work on the current stream, and waits for nothing.
            device: a CUDA device.
            results: what the work writes. The graph is replayed once, and must give there what the launches gave.
            agree: tells so for copies of what the launches gave; None: they are the same, bit by bit.
            changes_inputs: the work also reads what it writes: `results` are put back as they were, before that replay
                and after it.
            warm_up: done before the capture in the place of the launches: kernels are compiled and loaded, and memory
                that is made only once is made, which must not happen inside.
            memory: shared with other graphs; None: its own.
            measure: find out how much memory the graph takes; waits for the device.

        Raises:
            NotCapturable: the capture failed.
            ReplayDiffers: the replay gives other numbers.
        """
        with torch.cuda.device(device):
            before = [t.clone() for t in results] if changes_inputs else []
            side = torch.cuda.Stream() if memory is None else memory.stream
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
                if not (agree(launched) if agree else all(map(_same_bytes, results, launched))):
                    raise ReplayDiffers("a replayed CUDA graph gives other numbers than the launches it was made of")
                _put_back(results, before)
        return cls(graph, nbytes)

    def replay(self) -> None:
        """Do it all again, on the current stream, without waiting."""
        self._graph.replay()

    def reset(self) -> None:
        """Give the memory back now."""
        self._graph.reset()


def _reserved(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _put_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=False):  # no values where the inputs do not change
        tensor.copy_(value)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
