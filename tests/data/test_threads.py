"""Threads of the data: the order of the items, each thread's beginning, what an item raises, and shared lists."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.core.pipeline import in_threads
from torchmdnet2.neighbors.frames import EdgeMemory, search


def test_results_come_in_order():
    began = []

    def slow_at_first(k: int) -> int:
        assert threading.get_ident() in began
        time.sleep(0.02 if k % 7 == 0 else 0)
        return k * k

    found = list(in_threads(slow_at_first, iter(range(60)), lambda: began.append(threading.get_ident())))
    assert found == [k * k for k in range(60)]
    assert list(in_threads(slow_at_first, [])) == []


def test_an_error_is_raised_in_its_place():
    found = in_threads(lambda k: 1 // (k - 2), range(9))
    assert [next(found), next(found)] == [-1, -1]
    with pytest.raises(ZeroDivisionError):
        next(found)


@pytest.mark.parametrize("memory", [0, 20_000, 2**20])
def test_neighbor_lists_are_shared_by_threads(memory):
    """All threads need the same frames at once, and there is room for none, some or all."""
    rng, cutoff = np.random.default_rng(0), 3.0
    sizes = rng.integers(1, 12, 60)
    frames = [System(torch.ones(n, dtype=torch.long), torch.from_numpy(rng.normal(0, 1.5, (n, 3)))) for n in sizes]
    orders = [rng.integers(0, len(frames), 8) for _ in range(400)]
    lists = EdgeMemory(cutoff, memory)

    def together(order):
        return System.concatenate([frames[k] for k in order])

    for store in (lists, pickle.loads(pickle.dumps(lists))):
        found = in_threads(lambda order, s=store: s.gather(order, together(order)), orders)
        for order, edges in zip(orders, found, strict=True):
            expected = search(together(order), cutoff)
            for name in ("degree", "sender", "count"):
                np.testing.assert_array_equal(getattr(edges, name), getattr(expected, name))
            assert edges.shift is None
