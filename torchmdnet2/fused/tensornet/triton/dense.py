"""Building blocks of the scalar networks, inlined into Triton kernels: products with weights, layer norm, silu.

A program computes BM rows × BN columns. From 16 rows on the products here run on Tensor Cores. With 8 rows they run on
Tensor Cores in split fp16 (split_fp16_products.py), with fewer on CUDA cores (cuda_core_products.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dense", "dense_normed", "dot", "log1p", "plus", "settle", "silu", "silu_slope", "statistics"]


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_slope(x):
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def leading(x):
    """x rounded to TF32: 11 bits, so that the rest, x − leading(x), has 11 more that count and is exact."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, y, PREC: tl.constexpr):
    """y + A @ B. "tf32x3" is as accurate as float32: the product of the two rests alone is left out."""
    if PREC == "tf32x3":
        a_high, b_high = leading(a), leading(b)
        # the small terms first, and each block's sum by itself: Tensor Cores do not round sums to the nearest
        part = tl.dot(a - a_high, b_high, input_precision="tf32")
        part = tl.dot(a_high, b - b_high, part, input_precision="tf32")
        return y + tl.dot(a_high, b_high, part, input_precision="tf32")
    else:
        return tl.dot(a, b, y, input_precision=PREC)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def settle(y, BM: tl.constexpr, BN: tl.constexpr):
    """y, laid out as loads and stores want it.

    Triton would keep the layout of Tensor Cores through everything that follows and rearrange each tile that is
    read or written; a scan over one element is where its propagation of layouts ends.
    """
    return tl.reshape(tl.associative_scan(tl.reshape(y, (1, BM, BN)), 0, plus), (BM, BN))


@triton.jit
def dense(
    a, w, rows, cols, ok, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """A @ W for A [., K] and W [K, N]: [BM, BN]."""
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], ok[:, None], other=0.0)
        y = dot(x, tl.load(w + k[:, None] * N + cols[None, :]), y, PREC)
    return y


@triton.jit
def dense_normed(
    a, mean, rstd, gamma, beta, w, rows, cols, ok, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """LN(A) @ W with the mean and 1/σ of each row given as [BM, 1]."""
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], ok[:, None], other=0.0)
        x = (x - mean) * rstd * tl.load(gamma + k)[None, :] + tl.load(beta + k)[None, :]
        y = dot(x, tl.load(w + k[:, None] * N + cols[None, :]), y, PREC)
    return y


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0; what 1 + x rounds off counts too."""
    u = 1.0 + x
    return tl.log(u) + (x - (u - 1.0)) / u


@triton.jit
def statistics(a, rows, ok, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, LOG: tl.constexpr):
    """Mean and 1/σ of the rows of A [., WIDTH]: two [BM, 1]. PADDED is the power of two from WIDTH on.

    0 and 1 where the norm is log(1 + x), which A holds already (LOG).
    """
    if LOG:
        mean = (rows * 0).to(tl.float32)[:, None]
        rstd = mean + 1.0
    else:
        c = tl.arange(0, PADDED)[None, :]
        inside = ok[:, None] & (c < WIDTH)
        x = tl.load(a + rows[:, None].to(tl.int64) * WIDTH + c, inside, other=0.0, cache_modifier=".cg")
        mean = (tl.sum(x, 1) / WIDTH)[:, None]
        x = tl.where(inside, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    return mean, rstd
