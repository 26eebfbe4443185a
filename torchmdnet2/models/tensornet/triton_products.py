"""Building blocks of the scalar networks, inlined into Triton kernels: products with weights, layer norm, silu.

A program computes BM rows × BN columns. From 16 rows on the products here run on Tensor Cores. With 8 rows they run on
Tensor Cores in split fp16, with fewer on CUDA cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous
from .triton_algebra import halves, halves_of_words

__all__ = [
    "add9", "add_dense", "dense", "dense3_cuda", "dense_cuda", "dense_normed", "dense_split", "dot",
    "dot_halves", "log1p", "mix_cuda", "mix_split", "plus", "settle", "sigmoid", "silu", "silu_and_slope", "silu_slope",
    "split_weights", "statistics", "sum_split", "weights",
]  # fmt: skip


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ) in five instructions; tl.sigmoid has twelve, for numbers below 2⁻¹²⁶ that do not matter here."""
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):
    _value, slope = silu_and_slope(x)
    return slope


@triton.jit
def silu_and_slope(x):
    s = sigmoid(x)
    a = x * s
    return a, s + a * (1.0 - s)


@triton.jit
def leading(x):
    """x rounded to TF32: 11 bits, so that the rest, x − leading(x), has 11 more that count and is exact."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, y, PREC: tl.constexpr):
    """y + A @ B. "tf32x3" is as accurate as float32: the product of the two rests alone is left out.
    "fp16" rounds A and B to half precision."""
    if PREC == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), y)
    elif PREC == "tf32x3":
        a_high, b_high = leading(a), leading(b)
        # small terms first, and a separate sum for each block, since Tensor Cores do not round sums to the nearest
        part = tl.dot(a - a_high, b_high, input_precision="tf32")
        part = tl.dot(a_high, b - b_high, part, input_precision="tf32")
        return y + tl.dot(a_high, b_high, part, input_precision="tf32")
    else:
        return tl.dot(a, b, y, input_precision=PREC)


@triton.jit
def dot_halves(a, w, low, y, PREC: tl.constexpr):
    """`dot` for weights that are in halves: 2048 W = w + low, both of half precision. PREC: "fp16x3" for A in float32,
    "words" for what `in_words` gives; else plain weights w.

    Two float16 numbers hold 22 bits of a float32 number, and take half as many instructions as two of TF32. The factor
    keeps the lower half of small weights from underflow.
    """
    if PREC == "fp16x3" or PREC == "words":
        if PREC == "words":
            high, rest = halves_of_words(a)
        else:
            high, rest = halves(a)
        # small terms first, and a separate sum for each block, as above
        part = tl.dot(high, low)
        part = tl.dot(rest, w * (1.0 / 2048.0), part)
        return y + tl.dot(high, w, part) * (1.0 / 2048.0)
    else:
        return dot(a, w, y, PREC)


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
    """A @ W for A [., K] and W [K, N], or [2, K, N] in halves ("fp16x3"): [BM, BN]."""
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], ok[:, None], other=0.0)
        at = w + k[:, None] * N + cols[None, :]
        y = dot_halves(x, tl.load(at), tl.load(at + K * N) if PREC == "fp16x3" else None, y, PREC)
    return y


@triton.jit
def dense_normed(
    a, mean, rstd, gamma, beta, w, b, offset, rows, cols, ok, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """LN(A) @ W + b with the mean and 1/σ of each row given as [BM, 1]. "fp16x3": W is γ ⊙ W, and offset W β + b."""
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], ok[:, None], other=0.0)
        x = (x - mean) * rstd
        if PREC != "fp16x3":
            x = x * tl.load(gamma + k)[None, :] + tl.load(beta + k)[None, :]
        at = w + k[:, None] * N + cols[None, :]
        y = dot_halves(x, tl.load(at), tl.load(at + K * N) if PREC == "fp16x3" else None, y, PREC)
    return y + tl.load((offset if PREC == "fp16x3" else b) + cols)[None, :]


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
        # the numbers are in the registers: squares of differences, since the difference of two means would cancel
        x = tl.where(inside, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    return mean, rstd


# --- Products with weights on CUDA cores, for few atoms: inlined into Triton kernels ---
#
# Each thread keeps the weights of G output columns in registers, four neighboring entries along K together, and reads
# the atom's numbers as a broadcast. The sum over K runs first through the registers, then over the warps. Weights do
# not depend on the previous kernel, so they are read while it still runs (triton_launch.py). These products are limited
# by the bandwidth from the caches to the registers: with two columns per thread, half as much is read.
#
# Packed weights are [K/4, N, 4] for W [K, N] (weights.py). Shapes: K inputs, N outputs, BN = G·H of them and
# BM atoms (1, 2 or 4) per program; G is 1 or 2.


@triton.jit
def weights(w, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, first):
    """Columns first … first + H of packed W: [H, K/4, 4]."""
    col = (first + tl.arange(0, H))[:, None, None]
    k = tl.arange(0, K // 4)[None, :, None]
    return tl.load(w + k * (4 * N) + col * 4 + tl.arange(0, 4)[None, None, :])


@triton.jit
def along(K: tl.constexpr, H: tl.constexpr):
    """Offsets of K numbers, the same for each column: [H, K/4, 4]."""
    k = tl.arange(0, K // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    return tl.broadcast_to(k, (H, K // 4, 4))


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add9(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8


@triton.jit
def atom_of(i: tl.constexpr, BM: tl.constexpr, num_atoms):
    """The i-th atom of this program; the last one where there are no more."""
    return tl.minimum(tl.program_id(0) * BM + i, num_atoms - 1).to(tl.int64)


@triton.jit
def tile(a0, b0, a1, b1, a2, b2, a3, b3, BM: tl.constexpr, H: tl.constexpr, G: tl.constexpr):
    """Pieces [H] of up to four atoms and two groups of columns as [BM, G·H]."""
    row = tl.arange(0, BM)[:, None, None]
    group = tl.arange(0, G)[None, :, None]
    y = tl.where(group == 0, a0[None, None, :], b0[None, None, :])
    if BM > 1:
        y = tl.where(row == 1, tl.where(group == 0, a1[None, None, :], b1[None, None, :]), y)
    if BM > 2:
        y = tl.where(row == 2, tl.where(group == 0, a2[None, None, :], b2[None, None, :]), y)
        y = tl.where(row == 3, tl.where(group == 0, a3[None, None, :], b3[None, None, :]), y)
    return tl.reshape(y, (BM, G * H))


@triton.jit
def mix_atom(x, atom, wi, wa, ws, vi, va, vs, F: tl.constexpr, H: tl.constexpr):
    """Partial sums of the three maps of one atom for two groups of columns: two times nine [H, F/4]."""
    a = x + atom * (9 * F) + along(F, H)
    x0 = tl.load(a, cache_modifier=".cg")
    x1 = tl.load(a + F, cache_modifier=".cg")
    x2 = tl.load(a + 2 * F, cache_modifier=".cg")
    x3 = tl.load(a + 3 * F, cache_modifier=".cg")
    x4 = tl.load(a + 4 * F, cache_modifier=".cg")
    x5 = tl.load(a + 5 * F, cache_modifier=".cg")
    x6 = tl.load(a + 6 * F, cache_modifier=".cg")
    x7 = tl.load(a + 7 * F, cache_modifier=".cg")
    x8 = tl.load(a + 8 * F, cache_modifier=".cg")
    first = (
        tl.sum(x0 * wi, 2), tl.sum(x1 * wa, 2), tl.sum(x2 * wa, 2), tl.sum(x3 * wa, 2), tl.sum(x4 * ws, 2),
        tl.sum(x5 * ws, 2), tl.sum(x6 * ws, 2), tl.sum(x7 * ws, 2), tl.sum(x8 * ws, 2),
    )  # fmt: skip
    second = (
        tl.sum(x0 * vi, 2), tl.sum(x1 * va, 2), tl.sum(x2 * va, 2), tl.sum(x3 * va, 2), tl.sum(x4 * vs, 2),
        tl.sum(x5 * vs, 2), tl.sum(x6 * vs, 2), tl.sum(x7 * vs, 2), tl.sum(x8 * vs, 2),
    )  # fmt: skip
    return first, second


@triton.jit
def mix_cuda(
    x, w, num_atoms, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """X @ W by parts for the atoms of this program: nine [BM, BN]. Waits for the kernel before when it has W."""
    H: tl.constexpr = BN // G
    col = tl.program_id(1) * BN
    wi, wa, ws = weights(w, F, F, H, col), weights(w + F * F, F, F, H, col), weights(w + 2 * F * F, F, F, H, col)
    vi, va, vs = wi, wa, ws
    if G == 2:
        col += H
        vi, va = weights(w, F, F, H, col), weights(w + F * F, F, F, H, col)
        vs = weights(w + 2 * F * F, F, F, H, col)
    after_previous(PDL)
    # all numbers are read before the first sum over warps, which waits for all of them
    a0, b0 = mix_atom(x, atom_of(0, BM, num_atoms), wi, wa, ws, vi, va, vs, F, H)
    a1, b1, a2, b2, a3, b3 = a0, b0, a0, b0, a0, b0
    if BM > 1:
        a1, b1 = mix_atom(x, atom_of(1, BM, num_atoms), wi, wa, ws, vi, va, vs, F, H)
    if BM > 2:
        a2, b2 = mix_atom(x, atom_of(2, BM, num_atoms), wi, wa, ws, vi, va, vs, F, H)
        a3, b3 = mix_atom(x, atom_of(3, BM, num_atoms), wi, wa, ws, vi, va, vs, F, H)
    a0 = tl.reduce(a0, 1, add9)
    b0 = tl.reduce(b0, 1, add9) if G == 2 else a0
    a1 = tl.reduce(a1, 1, add9) if BM > 1 else a0
    b1 = tl.reduce(b1, 1, add9) if BM > 1 and G == 2 else a1
    a2 = tl.reduce(a2, 1, add9) if BM > 2 else a0
    b2 = tl.reduce(b2, 1, add9) if BM > 2 and G == 2 else a2
    a3 = tl.reduce(a3, 1, add9) if BM > 2 else a0
    b3 = tl.reduce(b3, 1, add9) if BM > 2 and G == 2 else a3
    return (
        tile(a0[0], b0[0], a1[0], b1[0], a2[0], b2[0], a3[0], b3[0], BM, H, G),
        tile(a0[1], b0[1], a1[1], b1[1], a2[1], b2[1], a3[1], b3[1], BM, H, G),
        tile(a0[2], b0[2], a1[2], b1[2], a2[2], b2[2], a3[2], b3[2], BM, H, G),
        tile(a0[3], b0[3], a1[3], b1[3], a2[3], b2[3], a3[3], b3[3], BM, H, G),
        tile(a0[4], b0[4], a1[4], b1[4], a2[4], b2[4], a3[4], b3[4], BM, H, G),
        tile(a0[5], b0[5], a1[5], b1[5], a2[5], b2[5], a3[5], b3[5], BM, H, G),
        tile(a0[6], b0[6], a1[6], b1[6], a2[6], b2[6], a3[6], b3[6], BM, H, G),
        tile(a0[7], b0[7], a1[7], b1[7], a2[7], b2[7], a3[7], b3[7], BM, H, G),
        tile(a0[8], b0[8], a1[8], b1[8], a2[8], b2[8], a3[8], b3[8], BM, H, G),
    )  # fmt: skip


@triton.jit
def row_of(x, i: tl.constexpr, BM: tl.constexpr):
    """The i-th of x [BM, 1], as a number."""
    return tl.sum(tl.where(tl.arange(0, BM)[:, None] == i, x, 0.0))


@triton.jit
def dense_atom(
    a, w0, w1, w2, mean, num_atoms, i: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The i-th atom of `dense_cuda`: partial sums [BN, K/4]."""
    at = a + atom_of(i, BM, num_atoms) * STRIDE + along(K, BN)
    mean = row_of(mean, i, BM)
    y = tl.sum((tl.load(at, cache_modifier=".cg") - mean) * w0, 2)
    if PARTS == 3:
        y += tl.sum((tl.load(at + K, cache_modifier=".cg") - mean) * w1, 2)
        y += tl.sum((tl.load(at + 2 * K, cache_modifier=".cg") - mean) * w2, 2)
    return y


@triton.jit
def dense_cuda(
    a, w0, w1, w2, mean, num_atoms, STRIDE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """(A − mean) @ W [BM, BN] for A [., STRIDE]; K and its weights come in 1 or 3 parts; mean [BM, 1]."""
    r0 = dense_atom(a, w0, w1, w2, mean, num_atoms, 0, STRIDE, K, PARTS, BM, BN)
    r1, r2, r3 = r0, r0, r0
    if BM > 1:
        r1 = dense_atom(a, w0, w1, w2, mean, num_atoms, 1, STRIDE, K, PARTS, BM, BN)
    if BM > 2:
        r2 = dense_atom(a, w0, w1, w2, mean, num_atoms, 2, STRIDE, K, PARTS, BM, BN)
        r3 = dense_atom(a, w0, w1, w2, mean, num_atoms, 3, STRIDE, K, PARTS, BM, BN)
    r0 = tl.sum(r0, 1)
    r1 = tl.sum(r1, 1) if BM > 1 else r0
    r2 = tl.sum(r2, 1) if BM > 2 else r0
    r3 = tl.sum(r3, 1) if BM > 2 else r0
    return tile(r0, r0, r1, r1, r2, r2, r3, r3, BM, BN, 1)


@triton.jit
def dense3_atom(a, w0, w1, w2, atom, K: tl.constexpr, BN: tl.constexpr):
    """Partial sums of three products of one atom: three [BN, K/4]."""
    x = tl.load(a + atom * K + along(K, BN), cache_modifier=".cg")
    return tl.sum(x * w0, 2), tl.sum(x * w1, 2), tl.sum(x * w2, 2)


@triton.jit
def dense3_cuda(a, w0, w1, w2, num_atoms, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A @ W for three W: three [BM, BN]."""
    r0 = dense3_atom(a, w0, w1, w2, atom_of(0, BM, num_atoms), K, BN)
    r1, r2, r3 = r0, r0, r0
    if BM > 1:
        r1 = dense3_atom(a, w0, w1, w2, atom_of(1, BM, num_atoms), K, BN)
    if BM > 2:
        r2 = dense3_atom(a, w0, w1, w2, atom_of(2, BM, num_atoms), K, BN)
        r3 = dense3_atom(a, w0, w1, w2, atom_of(3, BM, num_atoms), K, BN)
    r0 = tl.reduce(r0, 1, add3)
    r1 = tl.reduce(r1, 1, add3) if BM > 1 else r0
    r2 = tl.reduce(r2, 1, add3) if BM > 2 else r0
    r3 = tl.reduce(r3, 1, add3) if BM > 2 else r0
    return (
        tile(r0[0], r0[0], r1[0], r1[0], r2[0], r2[0], r3[0], r3[0], BM, BN, 1),
        tile(r0[1], r0[1], r1[1], r1[1], r2[1], r2[1], r3[1], r3[1], BM, BN, 1),
        tile(r0[2], r0[2], r1[2], r1[2], r2[2], r2[2], r3[2], r3[2], BM, BN, 1),
    )


# --- Products with weights on Tensor Cores in split fp16, with the accuracy of float32 ---
#
# A number is the sum of two float16 numbers, high + low/2048: 23 bits, or an absolute error of 2⁻³⁶ for small numbers.
# The product of the two low parts is omitted, as for TF32 above. One instruction does twice the work of a TF32
# instruction. The weights are split in advance and take as many bytes as in float32. Numbers must be below 65,504.
#
# Results are computed transposed, Yᵀ = Wᵀ Xᵀ, because Tensor Cores take eight columns and sixteen rows. A program has
# eight atoms, so that few atoms fill many multiprocessors; a warp has sixteen channels and one of KS parts of K. The
# order of a sum is chosen such that the four numbers that a thread reads at once are the four that the instruction
# takes from it. Neither weights nor numbers pass through shared memory.
#
# Packed weights are [2, N/16, K/16, 8, 4, 8] float16 for W [K, N] (weights.py). Shapes: K inputs, N outputs, BN of them
# per program, P = KS · BN/16 warps.


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
    return halves(tl.reshape(x, (KS * G, BK, 8)))


@triton.jit
def add_product(y, small, w_high, w_low, x_high, x_low, PREC: tl.constexpr):
    """The sums y + small/2048 with the next Wᵀ Xᵀ; PREC "fp16": of the high parts only."""
    if PREC == "fp16":
        return tl.dot(w_high, x_high, y), small
    small = tl.dot(w_low, x_high, small)
    small = tl.dot(w_high, x_low, small)
    # a separate sum for each block, since Tensor Cores do not round sums to the nearest
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
    return add_product(y, small, w_high, w_low, high, low, "split")


@triton.jit
def dense_split(
    a, w_high, w_low, rows, STRIDE: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr
):  # fmt: skip
    """A @ W for K columns of A [., STRIDE]: [8, BN]. See `add_dense`."""
    y, small = add_dense(None, None, a, None, w_high, w_low, rows, STRIDE, K, BN, KS)
    return sum_split(y, small, BN, KS)


@triton.jit
def mix_split(
    x, w, rows, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """X @ W by parts for atoms `rows` [8], which must exist: nine [8, BN]. PREC "fp16": not split.

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
        y0, s0 = add_product(y0, s0, ih, il, high, low, PREC)
        high, low = numbers(x + F, None, rows, k0, ROW, F, BN, STEP, KS)
        y1, s1 = add_product(y1, s1, ah, al, high, low, PREC)
        high, low = numbers(x + 2 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y2, s2 = add_product(y2, s2, ah, al, high, low, PREC)
        high, low = numbers(x + 3 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y3, s3 = add_product(y3, s3, ah, al, high, low, PREC)
        high, low = numbers(x + 4 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y4, s4 = add_product(y4, s4, sh, sl, high, low, PREC)
        high, low = numbers(x + 5 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y5, s5 = add_product(y5, s5, sh, sl, high, low, PREC)
        high, low = numbers(x + 6 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y6, s6 = add_product(y6, s6, sh, sl, high, low, PREC)
        high, low = numbers(x + 7 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y7, s7 = add_product(y7, s7, sh, sl, high, low, PREC)
        high, low = numbers(x + 8 * F, None, rows, k0, ROW, F, BN, STEP, KS)
        y8, s8 = add_product(y8, s8, sh, sl, high, low, PREC)
    return (
        sum_split(y0, s0, BN, KS), sum_split(y1, s1, BN, KS), sum_split(y2, s2, BN, KS), sum_split(y3, s3, BN, KS),
        sum_split(y4, s4, BN, KS), sum_split(y5, s5, BN, KS), sum_split(y6, s6, BN, KS), sum_split(y7, s7, BN, KS),
        sum_split(y8, s8, BN, KS),
    )  # fmt: skip
