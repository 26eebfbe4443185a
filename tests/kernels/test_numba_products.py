"""Matrix products of the CPU kernels against NumPy in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

from numba import njit

from torchmdnet2.kernels import numba_products
from torchmdnet2.kernels.numba_products import LANES, ROWS, TILE_ROWS, TILES, VECTOR, panels, tiles
from torchmdnet2.models.tensornet import numba_kernels


@njit
def dense(*arguments):
    numba_products.dense(*arguments)


@njit
def dense_block(*arguments):
    numba_products.dense_block(*arguments)


@njit
def logistic(x, out):
    for at in range(0, x.size, VECTOR):
        numba_products.store(out, at, numba_products.logistic(numba_products.load(x, at)))


@njit
def exp(x):
    return numba_products.exp(x)


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


def test_parts_of_a_number_are_the_number() -> None:
    w = numbers(32, LANES) * np.float32(10) ** RANDOM.integers(-20, 20, (32, LANES)).astype(np.float32)
    parts = tiles(w)[0, 0].reshape(3, 16, LANES, 2).transpose(0, 1, 3, 2).reshape(3, 32, LANES)
    values = (parts.astype(np.int32) << 16).view(np.float32).astype(float)
    np.testing.assert_array_equal(values.sum(0).astype(np.float32), w)
    assert np.abs(values[1]).max() > 0 and np.abs(values[2]).max() > 0


@pytest.mark.skipif(not TILES, reason="the processor has no matrix unit, or the system does not permit its use")
@pytest.mark.parametrize("rows", [4, TILE_ROWS, TILE_ROWS + 4, 2 * TILE_ROWS])
@pytest.mark.parametrize(("K", "N"), [(32, LANES), (96, 5 * LANES), (384, 256)])
def test_products_by_the_matrix_unit_are_as_accurate_as_float32(rows: int, K: int, N: int) -> None:
    x, w, bias, y = numbers(2 * TILE_ROWS + 1, K), numbers(K, N), numbers(N), numbers(2 * TILE_ROWS + 3, N)
    before, parts = y.copy(), np.empty((3, 2 * TILE_ROWS, K + 32), np.int16)
    dense_block(x, 1, tiles(w), bias, y, 2, K, N, rows, parts)
    exact = x[1 : 1 + rows].astype(float) @ w.astype(float) + bias
    # the bound of any product in float32, and a tenth of it, which sums of random numbers do not reach
    bound = K * 2.0**-24 * (np.abs(x[1 : 1 + rows]).astype(float) @ np.abs(w)).max()
    assert np.abs(y[2 : 2 + rows] - exact).max() < max(0.1 * bound, 4e-6)
    written = 2 + TILE_ROWS * (1 + (rows > TILE_ROWS))
    np.testing.assert_array_equal(y[:2], before[:2])
    np.testing.assert_array_equal(y[written:], before[written:])


@pytest.mark.skipif(not TILES, reason="the processor has no matrix unit, or the system does not permit its use")
def test_tiles_of_other_types_are_refused() -> None:
    x, y, parts = numbers(16, 32), numbers(16, LANES), np.empty((3, 16, 32), np.int32)
    with pytest.raises(TypeError, match="contiguous array of int16"):
        dense_block(x, 0, tiles(numbers(32, LANES)), numbers(LANES), y, 0, 32, LANES, 16, parts)


def test_functions_of_numbers_and_vectors() -> None:
    x = np.concatenate([np.linspace(-100, 100, 4 * 1024), [0, -0.0, 1e-30, 88.5] * 4]).astype(np.float32)
    found = np.empty_like(x)
    logistic(x, found)
    exact = 1 / (1 + np.exp(-x.astype(float)))
    np.testing.assert_allclose(found, exact, rtol=4e-7, atol=2e-38)
    for value in (-86.5, -1.0, 0.0, 0.3, 50.0, 86.5):
        assert exp(np.float32(value)) == pytest.approx(np.exp(float(np.float32(value))), rel=3e-7)


@pytest.mark.skipif(not TILES, reason="the processor has no matrix unit, or the system does not permit its use")
def test_no_tiles_where_numba_compiles_for_another_processor() -> None:
    """LLVM ends the process at an instruction that the processor lacks."""
    program = "from torchmdnet2.kernels.numba_products import TILES; print(TILES)"
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
