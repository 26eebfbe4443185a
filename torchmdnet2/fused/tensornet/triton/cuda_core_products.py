"""Products with weights on CUDA cores, for few atoms: inlined into Triton kernels.

Each thread keeps the weights of G output columns in registers, four neighboring entries along K together, and reads the
atom's numbers as a broadcast. The sum over K runs first through the registers, then over the warps. Weights do not
depend on the previous kernel, so they are read while it still runs (triton_launch.py). These products are limited by
the bandwidth from the caches to the registers: with two columns per thread, half as much is read.

Packed weights are [K/4, N, 4] for W [K, N] (packed_weights.py). Shapes: K inputs, N outputs, BN = G·H of them and
BM atoms (1, 2 or 4) per program; G is 1 or 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous

__all__ = ["add9", "dense3_cuda", "dense_cuda", "mix_cuda", "weights"]


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
