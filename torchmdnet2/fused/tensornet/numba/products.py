"""Matrix products of a few rows on the CPU, at the full rate of one core: numba functions, called by the kernels.

Weights W [K, N] are stored in panels of LANES columns, [N/LANES, K, LANES], which are read from front to back. The sums
of ROWS rows and LANES columns stay in registers for all of K: numba would write them to memory after each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from .algebra import call

__all__ = ["LANES", "ROWS", "dense", "mix", "panels"]

ROWS = 4
"""Atoms at a time. With 16 columns their sums fill half of the registers of AVX2, and all of its arithmetic units."""

LANES = 16

ZERO = np.float32(0)

intrinsic: Any = extending.intrinsic  # by its type, callers would have to give the context too


def panels(w: Any) -> Any:
    """W [..., K, N] → [..., N/LANES, K, LANES]."""
    return np.ascontiguousarray(np.moveaxis(w.reshape(*w.shape[:-1], -1, LANES), -2, -3))


@intrinsic
def _add_product(_context, x, at_x, x_stride, w, at_w, y, at_y, y_stride, K):
    """y += x @ w for ROWS rows of K numbers from at_x on, the panel of w from at_w on, and LANES columns of y.

    Places and strides count numbers of the arrays, which are contiguous and float32.
    """

    def generate(context, builder, signature, arguments):
        _x, at_x, x_stride, _w, at_w, _y, at_y, y_stride, size = arguments
        x, w, y = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 3, 5))
        index, lane = ir.IntType(64), ir.IntType(32)
        vector = ir.VectorType(ir.FloatType(), LANES)
        nothing, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(lane, LANES), [0] * LANES)

        def place(start, stride, row):
            return builder.add(start, builder.mul(stride, ir.Constant(index, row)))

        def lanes(base, at):
            return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())

        rows = [lanes(y, place(at_y, y_stride, row)) for row in range(ROWS)]
        sums = [cgutils.alloca_once_value(builder, builder.load(row, align=4)) for row in rows]
        with cgutils.for_range(builder, size) as loop:
            panel = builder.load(lanes(w, place(at_w, loop.index, LANES)), align=4)
            for row, total in enumerate(sums):
                number = builder.load(builder.gep(x, [builder.add(place(at_x, x_stride, row), loop.index)]))
                number = builder.insert_element(nothing, number, ir.Constant(lane, 0))
                product = builder.fmul(builder.shuffle_vector(number, nothing, first), panel, flags=("fast",))
                builder.store(builder.fadd(builder.load(total), product, flags=("fast",)), total)
        for row, total in zip(rows, sums, strict=True):
            builder.store(builder.load(total), row, align=4)
        return context.get_dummy_value()

    for array in (x, w, y):
        if array.layout != "C" or array.dtype != types.float32:
            raise TypeError(f"the product needs contiguous arrays of float32, not {array}")
    return types.void(x, types.intp, types.intp, w, types.intp, y, types.intp, types.intp, types.intp), generate


@call
def dense(x, at_x, w, bias, y, at_y, K, N, rows=ROWS):
    """Y = X @ W + bias of `rows` rows, a multiple of ROWS, from row at_x of x and at_y of y on.

    A panel of W stays in the L1 cache for all of them.
    """
    for r in range(rows):
        a = y[at_y + r]
        for c in range(N):
            a[c] = bias[c]
    for n in range(0, N, LANES):
        for r in range(0, rows, ROWS):
            _add_product(
                x, (at_x + r) * x.shape[1], x.shape[1], w, n * K, y, (at_y + r) * y.shape[1] + n, y.shape[1], K
            )


@call
def mix(x, at_x, w, y, at_y, F):
    """Y = mix(X) of ROWS atoms from row at_x of x and at_y of y; w are the panels of the maps [3, F, F] of I, A, S."""
    for r in range(ROWS):
        y[at_y + r, :] = ZERO
    for part in range(3):
        for n in range(0, F, LANES):
            for block in range(part * part, (part + 1) * (part + 1)):
                i, o = at_x * 9 * F + block * F, at_y * 9 * F + block * F + n
                _add_product(x, i, 9 * F, w, (part * F + n) * F, y, o, 9 * F, F)
