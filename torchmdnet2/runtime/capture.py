"""Recording CUDA graphs, one at a time in a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["captured"]

_ONE = threading.Lock()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
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
