"""Products with weights on Tensor Cores in split fp16, with the accuracy of float32: inlined into Triton kernels.

A number is the sum of two float16 numbers, high + low/2048: 23 bits, or an absolute error of 2⁻³⁶ for small numbers.
The product of the two low parts is omitted, as for TF32 (dense.py). One instruction does twice the work of a TF32
instruction. The weights are split in advance and take as many bytes as in float32. Numbers must be below 65,504.

Results are computed transposed, Yᵀ = Wᵀ Xᵀ, because Tensor Cores take eight columns and sixteen rows. A program has
eight atoms, so that few atoms fill many multiprocessors; a warp has sixteen channels and one of KS parts of K. The
order of a sum is chosen such that the four numbers that a thread reads at once are the four that the instruction takes
from it. Neither weights nor numbers pass through shared memory.

Packed weights are [2, N/16, K/16, 8, 4, 8] float16 for W [K, N] (packed_weights.py). Shapes: K inputs, N outputs, BN of
them per program, P = KS · BN/16 warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous
from .dense import plus, settle

__all__ = ["add_dense", "dense_split", "mix_split", "split_weights", "sum_split"]


@triton.jit
def split_weights(
    w, first, k0, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr
):  # fmt: skip
    """Columns first … first + BN of packed W and, of each part of K, numbers k0 … k0 + BK: two [P, 16, BK]."""
    G: tl.constexpr = BN // 16
    warp = tl.arange(0, KS * G)[None, None, :, None, None]
    chunk = warp // G * (K // KS // 16) + k0 // 16 + tl.arange(0, BK // 16)[None, None, None, :, None]
    at = w + ((first // 16 + warp % G) * (K // 16) + chunk) * 256
    at += tl.arange(0, 4)[:, None, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None, None] * 32
    at += tl.arange(0, 8)[None, None, None, None, :]
    return weights_of_warps(tl.load(at), BK), weights_of_warps(tl.load(at + K * N), BK)


@triton.jit
def weights_of_warps(w, BK: tl.constexpr):
    """[4, 8, P, BK/16, 8] as Tensor Cores take them: [P, 16, BK]."""
    P: tl.constexpr = w.shape[2]
    w = tl.reshape(w, (4, 8, P, BK // 16, 2, 2, 2))
    return tl.reshape(tl.permute(w, (2, 5, 1, 3, 4, 0, 6)), (P, 16, BK))


@triton.jit
def numbers(
    a, mean, rows, k0, STRIDE: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr
):  # fmt: skip
    """Rows [8] of A [., STRIDE], which must exist: of each part of K, numbers k0 … k0 + BK, as two [P, BK, 8].

    mean [8, 1] is subtracted, or None.
    """
    G: tl.constexpr = BN // 16
    warp = tl.arange(0, KS * G)[None, None, :, None, None]
    k = warp // G * (K // KS) + k0 + tl.arange(0, BK // 16)[None, None, None, :, None] * 16
    k += tl.arange(0, 4)[:, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    # no two warps read the same where K is split; some of it is then read before `after_previous` (triton_launch.py)
    past: tl.constexpr = ".cg" if KS > 1 else ""
    x = tl.load(a + rows[None, :, None, None, None].to(tl.int64) * STRIDE + k, cache_modifier=past)
    if mean is not None:
        x -= tl.reshape(mean, (1, 8, 1, 1, 1))
    x = tl.permute(tl.reshape(x, (4, 8, KS * G, BK // 16, 2, 2)), (2, 3, 4, 0, 5, 1))
    x = tl.reshape(x, (KS * G, BK, 8))
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def add_product(y, small, w_high, w_low, x_high, x_low):
    """The sums y + small/2048 with the next Wᵀ Xᵀ."""
    small = tl.dot(w_low, x_high, small)
    small = tl.dot(w_high, x_low, small)
    # each block's sum by itself: Tensor Cores do not round sums to the nearest
    return y + tl.dot(w_high, x_high), small


@triton.jit
def sum_split(y, small, BN: tl.constexpr, KS: tl.constexpr):
    """y + small/2048 added over the parts of K: [8, BN], laid out anew by a scan (see `settle`)."""
    y = tl.permute(tl.reshape(y + small * (1.0 / 2048.0), (KS, BN, 8)), (0, 2, 1))
    if KS == 1:
        y = settle(tl.reshape(y, (8, BN)), 8, BN)
    else:  # each thread gathers all parts of its numbers
        y = tl.reshape(tl.associative_scan(tl.reshape(y, (1, KS * 8 * BN)), 0, plus), (KS, 8, BN))
        y = tl.sum(y, 0)
    return y


@triton.jit
def add_dense(
    y, small, a, mean, w_high, w_low, rows, STRIDE: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr
):  # fmt: skip
    """The sums y + small/2048 [P, 16, 8] with (A − mean) @ W for K columns of A [., STRIDE]; y None: only this.

    rows [8] must exist; mean [8, 1] or None; all of `split_weights` at once.
    """
    if y is None:
        y = tl.zeros([KS * BN // 16, 16, 8], tl.float32)
        small = y
    high, low = numbers(a, mean, rows, 0, STRIDE, K, BN, K // KS, KS)
    return add_product(y, small, w_high, w_low, high, low)


@triton.jit
def dense_split(
    a, w_high, w_low, rows, STRIDE: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr
):  # fmt: skip
    """A @ W for K columns of A [., STRIDE]: [8, BN]. See `add_dense`."""
    y, small = add_dense(None, None, a, None, w_high, w_low, rows, STRIDE, K, BN, KS)
    return sum_split(y, small, BN, KS)


@triton.jit
def mix_split(
    x, w, rows, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """X @ W by parts for atoms `rows` [8], which must exist: nine [8, BN].

    Waits for the kernel before when it has the first weights; PDL 0 when that is done elsewhere.
    """
    y0 = tl.zeros([KS * BN // 16, 16, 8], tl.float32)
    y1, y2, y3, y4, y5, y6, y7, y8 = y0, y0, y0, y0, y0, y0, y0, y0
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = y0, y0, y0, y0, y0, y0, y0, y0, y0
    first = tl.program_id(1) * BN
    ROW: tl.constexpr = 9 * F
    STEP: tl.constexpr = BK if BK * KS < F else F // KS
    for k0 in tl.static_range(0, F // KS, STEP):
        ih, il = split_weights(w, first, k0, F, F, BN, STEP, KS)
        ah, al = split_weights(w + 2 * F * F, first, k0, F, F, BN, STEP, KS)
        sh, sl = split_weights(w + 4 * F * F, first, k0, F, F, BN, STEP, KS)
        if k0 == 0:
            after_previous(PDL)
        high, low = numbers(x, None, rows, k0, ROW, F, BN, STEP, KS)
        y0, s0 = add_product(y0, s0, ih, il, high, low)
        high, low = numbers(x + F, None, rows, k0, ROW, F, BN, STEP, KS)
        y1, s1 = add_product(y1, s1, ah, al, high, low)
        high, low = numbers(x + 2 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y2, s2 = add_product(y2, s2, ah, al, high, low)
        high, low = numbers(x + 3 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y3, s3 = add_product(y3, s3, ah, al, high, low)
        high, low = numbers(x + 4 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y4, s4 = add_product(y4, s4, sh, sl, high, low)
        high, low = numbers(x + 5 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y5, s5 = add_product(y5, s5, sh, sl, high, low)
        high, low = numbers(x + 6 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y6, s6 = add_product(y6, s6, sh, sl, high, low)
        high, low = numbers(x + 7 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y7, s7 = add_product(y7, s7, sh, sl, high, low)
        high, low = numbers(x + 8 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y8, s8 = add_product(y8, s8, sh, sl, high, low)
    return (
        sum_split(y0, s0, BN, KS), sum_split(y1, s1, BN, KS), sum_split(y2, s2, BN, KS), sum_split(y3, s3, BN, KS),
        sum_split(y4, s4, BN, KS), sum_split(y5, s5, BN, KS), sum_split(y6, s6, BN, KS), sum_split(y7, s7, BN, KS),
        sum_split(y8, s8, BN, KS),
    )  # fmt: skip
