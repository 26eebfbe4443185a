"""Matrix products of the CPU kernels against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

from numba import njit

from torchmdnet2.models.tensornet import numba_kernels
from torchmdnet2.models.tensornet.numba_kernels import LANES, ROWS, panels


@njit
def dense(*arguments):
    numba_kernels.dense(*arguments)


@njit
def mix(*arguments):
    numba_kernels.mix(*arguments)


RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_rows_of_a_product_and_no_others_are_written() -> None:
    x, w, bias = numbers(3 * ROWS, 24), numbers(24, 3 * LANES), numbers(3 * LANES)
    y = numbers(4 * ROWS, 3 * LANES)
    before = y.copy()
    dense(x, 1, panels(w), bias, y, 2, 24, 3 * LANES, 2 * ROWS)
    exact = x[1 : 1 + 2 * ROWS].astype(float) @ w + bias
    np.testing.assert_allclose(y[2 : 2 + 2 * ROWS], exact, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(y[:2], before[:2])
    np.testing.assert_array_equal(y[2 + 2 * ROWS :], before[2 + 2 * ROWS :])


def test_the_parts_of_a_tensor_have_maps_of_their_own() -> None:
    f = 32
    x, w, y = numbers(2 * ROWS, 9 * f), numbers(3, f, f), numbers(2 * ROWS, 9 * f)
    before = y.copy()
    mix(x, 0, panels(w), y, ROWS, f)
    part = [0, 1, 1, 1, 2, 2, 2, 2, 2]
    exact = np.einsum("nbf,bfg->nbg", x[:ROWS].reshape(ROWS, 9, f).astype(float), w[part].astype(float))
    np.testing.assert_allclose(y[ROWS:], exact.reshape(ROWS, 9 * f), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(y[:ROWS], before[:ROWS])


def test_arrays_that_are_not_contiguous_are_refused() -> None:
    x, w, y = numbers(ROWS, 32), numbers(16, LANES), numbers(ROWS, LANES)
    with pytest.raises(TypeError, match="contiguous arrays of float32"):
        dense(x[:, ::2], 0, panels(w), np.zeros(LANES, np.float32), y, 0, 16, LANES)
