"""data.threads: the order of the items, each thread's beginning, and what an item raises."""

from __future__ import annotations

import threading
import time

import pytest

from torchmdnet2.data.edges import in_threads


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
