"""Building blocks of the scalar networks, inlined into Triton kernels: products with weights, layer norm, silu.

A program computes BM rows × BN columns: below 16 rows by the ordinary units, a lane being one atom and one column
and the sum over K spread over the threads; from 16 rows by the matrix units in the precision PREC.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dense", "dense_normed", "silu", "silu_slope", "statistics"]


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_slope(x):
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def dense(
    a, w, rows, cols, ok, num_atoms, K: tl.constexpr, N: tl.constexpr, SILU: tl.constexpr, COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """act(A) @ W for A [., K] and W [K, N]: [BM, BN]."""
    if BM < 16:
        lane = tl.arange(0, BM * BN)
        col = tl.program_id(1) * BN + lane % BN if COLUMNS else lane % BN
        atom = tl.minimum(tl.program_id(0) * BM + lane // BN, num_atoms - 1)
        y = tl.zeros([BK, BM * BN], tl.float32)
        for k0 in tl.static_range(0, K, BK):
            k = k0 + tl.arange(0, BK)[:, None]
            x = tl.load(a + atom[None, :].to(tl.int64) * K + k)
            if SILU:
                x = silu(x)
            y += x * tl.load(w + k * N + col[None, :])
        y = tl.reshape(tl.sum(y, 0), (BM, BN))
    else:
        y = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], ok[:, None], other=0.0)
            if SILU:
                x = silu(x)
            y = tl.dot(x, tl.load(w + k[:, None] * N + cols[None, :]), y, input_precision=PREC)
    return y


@triton.jit
def dense_normed(
    a, mean, rstd, gamma, beta, w, rows, cols, ok, num_atoms, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """LN(A) @ W with the mean and 1/σ of each row given as [BM, 1]."""
    if BM < 16:
        lane = tl.arange(0, BM * BN)
        col = tl.program_id(1) * BN + lane % BN
        atom = tl.minimum(tl.program_id(0) * BM + lane // BN, num_atoms - 1)
        mean = tl.reshape(tl.broadcast_to(mean, (BM, BN)), (BM * BN,))[None, :]
        rstd = tl.reshape(tl.broadcast_to(rstd, (BM, BN)), (BM * BN,))[None, :]
        y = tl.zeros([BK, BM * BN], tl.float32)
        for k0 in tl.static_range(0, K, BK):
            k = k0 + tl.arange(0, BK)[:, None]
            x = tl.load(a + atom[None, :].to(tl.int64) * K + k)
            x = (x - mean) * rstd * tl.load(gamma + k) + tl.load(beta + k)
            y += x * tl.load(w + k * N + col[None, :])
        y = tl.reshape(tl.sum(y, 0), (BM, BN))
    else:
        y = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], ok[:, None], other=0.0)
            x = (x - mean) * rstd * tl.load(gamma + k)[None, :] + tl.load(beta + k)[None, :]
            y = tl.dot(x, tl.load(w + k[:, None] * N + cols[None, :]), y, input_precision=PREC)
    return y


@triton.jit
def statistics(a, rows, ok, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Mean and 1/σ of the rows of A [., WIDTH]: two [BM, 1]. PADDED is the power of two from WIDTH on."""
    c = tl.arange(0, PADDED)[None, :]
    inside = ok[:, None] & (c < WIDTH)
    x = tl.load(a + rows[:, None].to(tl.int64) * WIDTH + c, inside, other=0.0)
    mean = (tl.sum(x, 1) / WIDTH)[:, None]
    x = tl.where(inside, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
