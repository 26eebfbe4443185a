"""Products with weights for hundreds of atoms, on the matrix units: inlined into Triton kernels.

There are too few atoms to fill the device with blocks that walk along K. A block takes all of K at once, KS parts of it
side by side on as many warps, whose results are added; nothing is loaded or split into its TF32 parts twice. As in
few.py the weights are read while the kernel before still runs.

Shapes: K inputs, N outputs, BN of them and BM atoms a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dense import leading, plus

__all__ = ["dense_split", "mix_split", "normed_split", "split_weights", "sum_split"]


@triton.jit
def parts_of(K: tl.constexpr, KS: tl.constexpr):
    """0 … K − 1 as [KS, K/KS]."""
    return tl.arange(0, KS)[:, None] * (K // KS) + tl.arange(0, K // KS)[None, :]


@triton.jit
def split_weights(w, STRIDE: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr, first):
    """Columns first … first + BN of W [K, N], from Wᵀ [N, STRIDE]: [KS, K/KS, BN].

    Transposed, because the matrix units are fed along K.
    """
    col = first + tl.arange(0, BN)
    w = tl.load(w + col[None, :, None] * STRIDE + parts_of(K, KS)[:, None, :])
    return tl.permute(w, (0, 2, 1))


@triton.jit
def dot_split(a, b, PREC: tl.constexpr):
    """A @ B of each part: [KS, BM, K/KS] × [KS, K/KS, BN]. See `dot` in dense.py."""
    if PREC == "tf32x3":
        a_high, b_high = leading(a), leading(b)
        y = tl.dot(a - a_high, b_high, input_precision="tf32")
        y = tl.dot(a_high, b - b_high, y, input_precision="tf32")
        return tl.dot(a_high, b_high, y, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision=PREC)


@triton.jit
def dense_split(
    a, w, rows, STRIDE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """A @ W for K columns of A [., STRIDE]: [KS, BM, BN], to be added up. rows [BM] must exist."""
    x = tl.load(a + rows[None, :, None].to(tl.int64) * STRIDE + parts_of(K, KS)[:, None, :])
    return dot_split(x, w, PREC)


@triton.jit
def normed_split(
    a, mean, rstd, gamma, beta, w, rows, STRIDE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, PREC: tl.constexpr
):
    """`dense_split` of LN(A), mean and 1/σ [BM, 1]."""
    k = parts_of(K, KS)[:, None, :]
    x = tl.load(a + rows[None, :, None].to(tl.int64) * STRIDE + k)
    x = (x - mean[None, :, :]) * rstd[None, :, :] * tl.load(gamma + k) + tl.load(beta + k)
    return dot_split(x, w, PREC)


@triton.jit
def sum_split(y, BM: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr):
    """Sum of the parts: [BM, BN]. Each thread gathers all parts of its elements (see `settle`) and adds them."""
    y = tl.associative_scan(tl.reshape(y, (1, KS, BM, BN)), 0, plus)
    return tl.sum(tl.reshape(y, (KS, BM, BN)), 0)


@triton.jit
def mix_split(
    x, wi, wa, ws, rows, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """X @ W by parts for atoms `rows` [BM], which must exist: nine [BM, BN]. wi, wa, ws from `split_weights`."""
    a = x + rows[None, :, None].to(tl.int64) * (9 * F) + parts_of(F, KS)[:, None, :]
    y0 = dot_split(tl.load(a), wi, PREC)
    y1 = dot_split(tl.load(a + F), wa, PREC)
    y2 = dot_split(tl.load(a + 2 * F), wa, PREC)
    y3 = dot_split(tl.load(a + 3 * F), wa, PREC)
    y4 = dot_split(tl.load(a + 4 * F), ws, PREC)
    y5 = dot_split(tl.load(a + 5 * F), ws, PREC)
    y6 = dot_split(tl.load(a + 6 * F), ws, PREC)
    y7 = dot_split(tl.load(a + 7 * F), ws, PREC)
    y8 = dot_split(tl.load(a + 8 * F), ws, PREC)
    y0, y1, y2 = sum_split(y0, BM, BN, KS), sum_split(y1, BM, BN, KS), sum_split(y2, BM, BN, KS)
    y3, y4, y5 = sum_split(y3, BM, BN, KS), sum_split(y4, BM, BN, KS), sum_split(y5, BM, BN, KS)
    y6, y7, y8 = sum_split(y6, BM, BN, KS), sum_split(y7, BM, BN, KS), sum_split(y8, BM, BN, KS)
    return y0, y1, y2, y3, y4, y5, y6, y7, y8
