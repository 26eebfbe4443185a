"""Kernels of the CPU that numba keeps on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

import numba

from torchmdnet2.kernels.compiling_cpu import kernel
from torchmdnet2.models.tensornet.numba_steps import kernels as tensornet
from torchmdnet2.models.tensornet2.numba_kernels import kernels as tensornet2


@pytest.mark.parametrize(
    "kernels", [tensornet(8, True, False), tensornet2(8, 2, True)], ids=["TensorNet", "TensorNet2"]
)
def test_another_process_finds_them(kernels: tuple) -> None:
    """numba compares what a kernel closes over by its pickle, and that of a compiled function differs by process."""
    for one in kernels:
        held = [cell.cell_contents for cell in one.py_func.__closure__ or ()]
        assert all(isinstance(value, int | str) for value in held), (one, held)


def _doubled_and(shift: int) -> Any:
    @kernel
    def add(begin, stop, x, out):
        for i in range(begin, stop):
            out[i] = 2 * x[i] + shift

    return add


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_threads_share_all_passes_of_a_loop(count: int) -> None:
    """And kernels that differ by a number alone are not taken for each other."""
    x, threads = np.arange(1001.0), numba.get_num_threads()
    try:
        for number in {1, threads}:
            numba.set_num_threads(number)
            for shift in (3, 4):
                out = np.full(1001, -1.0)
                _doubled_and(shift)(count, x, out)
                np.testing.assert_array_equal(out[:count], 2 * x[:count] + shift)
                assert (out[count:] == -1).all()
    finally:
        numba.set_num_threads(threads)


def test_symbols_of_kernels_for_other_numbers_differ() -> None:
    """Two of one name, one from the cache and one compiled, would be linked to the same code."""
    found = {}
    for options in [(8, True, False), (8, True, True), (8, False, False), (16, True, False)]:
        for one in tensornet(*options):
            body = one.loop.py_func
            held = tuple(cell.cell_contents for cell in body.__closure__ or ())
            assert found.setdefault((body.__qualname__, body.__code__), held) == held
            assert one.py_func.__qualname__ == body.__qualname__
