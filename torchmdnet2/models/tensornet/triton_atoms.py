"""Per-atom kernels of TensorNet, fused around the channel-mixing matrix products (Triton).

A program holds BM atoms × 9 components × BN channels in registers. All operations that act channel by channel (norms,
gates, tensor products, their gradients) are applied to the result of the product before it is written.

From 16 atoms per program on, the three maps of I, A and S run on Tensor Cores, BK of K at a time. With 8 atoms they run
on Tensor Cores in split fp16, in KS parts of K, with fewer on CUDA cores (triton_products.py). Kernels that take all of
K at once read their weights, which the previous kernel does not write, before that kernel has ended (triton_launch.py).
PREC is the precision on Tensor Cores from 16 atoms on: "fp16x3" and "tf32x3" are as accurate as float32, "tf32" faster,
"ieee" uses CUDA cores. "fp16" rounds both factors to half precision, with 8 atoms too. "words" is "fp16x3" for a field
that was written in words of two halves (`in_words`), as kernels with WORDS write what only products read.

Shapes: N atoms, F channels. Fields are [N, 9, F]. Mixing weights W [3, F, F] are applied as X_part @ W[part]; they are
packed as [3, F/4, F, 4] for fewer than 8 atoms and as [3, 2, F/16, F/16, 8, 4, 8] for 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous, before_next
from .triton_algebra import (
    add_square_adjoint,
    load9,
    load9_early,
    norm_gradient,
    normalise_adjoint,
    product,
    product_adjoint,
    square,
    squared_norm,
    store9,
    store9_words,
)
from .triton_products import (
    add_dense,
    dense,
    dense3_cuda,
    dense_cuda,
    dense_normed,
    dense_split,
    dot_halves,
    log1p,
    mix_cuda,
    mix_split,
    settle,
    silu,
    silu_slope,
    split_weights,
    statistics,
    sum_split,
    weights,
)

__all__ = [
    "embedding_mix_kernel", "gate_backward_kernel", "gate_kernel", "gradient_embedding_kernel", "gradient_mix_kernel",
    "gradient_product_kernel", "hidden_kernel", "linear_energy_kernel", "mix_kernel", "readout_gradient_kernel",
    "readout_hidden_kernel", "readout_kernel", "update_kernel",
]  # fmt: skip


@triton.jit
def mix9(
    x, w, rows, cols, mask_rows, num_atoms, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KS: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """X @ W by parts for the rows and columns of this program: nine [BM, BN] tiles.

    Waits for the kernel before, where K is taken at once when it has the weights; PDL 0 when that is done elsewhere.
    """
    if BM == 8:
        there = tl.minimum(rows, num_atoms - 1)
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix_split(x, w, there, F, BN, BK, KS, PREC, PDL)
    elif BM < 16:
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix_cuda(x, w, num_atoms, F, BM, BN, KS, PDL)
    else:
        after_previous(PDL)
        y0 = tl.zeros([BM, BN], tl.float32)
        y1, y2, y3, y4, y5, y6, y7, y8 = y0, y0, y0, y0, y0, y0, y0, y0
        for k0 in range(0, F, BK):
            k = k0 + tl.arange(0, BK)
            a = x + rows[:, None].to(tl.int64) * (9 * F) + k[None, :]
            m = mask_rows[:, None]
            b = w + k[:, None] * F + cols[None, :]
            wi, wa, ws = tl.load(b), tl.load(b + F * F), tl.load(b + 2 * F * F)
            vi, va, vs = wi, wa, ws
            if PREC == "fp16x3" or PREC == "words":
                b += 3 * F * F
                vi, va, vs = tl.load(b), tl.load(b + F * F), tl.load(b + 2 * F * F)
            y0 = dot_halves(tl.load(a, m, other=0.0), wi, vi, y0, PREC)
            y1 = dot_halves(tl.load(a + F, m, other=0.0), wa, va, y1, PREC)
            y2 = dot_halves(tl.load(a + 2 * F, m, other=0.0), wa, va, y2, PREC)
            y3 = dot_halves(tl.load(a + 3 * F, m, other=0.0), wa, va, y3, PREC)
            y4 = dot_halves(tl.load(a + 4 * F, m, other=0.0), ws, vs, y4, PREC)
            y5 = dot_halves(tl.load(a + 5 * F, m, other=0.0), ws, vs, y5, PREC)
            y6 = dot_halves(tl.load(a + 6 * F, m, other=0.0), ws, vs, y6, PREC)
            y7 = dot_halves(tl.load(a + 7 * F, m, other=0.0), ws, vs, y7, PREC)
            y8 = dot_halves(tl.load(a + 8 * F, m, other=0.0), ws, vs, y8, PREC)
        y0, y1, y2 = settle(y0, BM, BN), settle(y1, BM, BN), settle(y2, BM, BN)
        y3, y4, y5 = settle(y3, BM, BN), settle(y4, BM, BN), settle(y5, BM, BN)
        y6, y7, y8 = settle(y6, BM, BN), settle(y7, BM, BN), settle(y8, BM, BN)
    return y0, y1, y2, y3, y4, y5, y6, y7, y8


@triton.jit(do_not_specialize=["num_atoms"])
def mix_kernel(
    x, w, y, num_atoms, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Y = mix(X)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix9(x, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, PDL)
    before_next(PDL)
    out = y + rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    store9(out, ok[:, None], F, y0, y1, y2, y3, y4, y5, y6, y7, y8)


@triton.jit(do_not_specialize=["num_atoms"])
def embedding_mix_kernel(
    x0, w, active, w2, b2, gate, mixed, x_out, inverse_out, num_atoms,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """X = silu(gate) ⊙ mix(X⁰); writes mix(X⁰), X/(‖X‖²+1) and 1/(‖X‖²+1). gate [N, 3F] before activation.

    Where K is taken at once the gate is computed here, from active [N, 2F] by W2 [2F, 3F], and written; else read.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    EARLY: tl.constexpr = BM < 8 or KS > 1
    m = ok[:, None]
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    h = gate + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
    if EARLY:
        # X⁰ is older than what the kernel before writes
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix9(x0, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, 0)
        store9(mixed + at, m, F, y0, y1, y2, y3, y4, y5, y6, y7, y8)
        first = tl.program_id(1) * BN
        if BM == 8:
            ih, il = split_weights(w2, first, 0, 2 * F, 3 * F, BN, 2 * F // KS, KS)
            ah, al = split_weights(w2, F + first, 0, 2 * F, 3 * F, BN, 2 * F // KS, KS)
            sh, sl = split_weights(w2, 2 * F + first, 0, 2 * F, 3 * F, BN, 2 * F // KS, KS)
            after_previous(PDL)
            there = tl.minimum(rows, num_atoms - 1)
            hi = dense_split(active, ih, il, there, 2 * F, 2 * F, BN, KS)
            ha = dense_split(active, ah, al, there, 2 * F, 2 * F, BN, KS)
            hs = dense_split(active, sh, sl, there, 2 * F, 2 * F, BN, KS)
        else:
            w_i, w_a = weights(w2, 3 * F, 2 * F, BN, first), weights(w2, 3 * F, 2 * F, BN, F + first)
            w_s = weights(w2, 3 * F, 2 * F, BN, 2 * F + first)
            after_previous(PDL)
            hi, ha, hs = dense3_cuda(active, w_i, w_a, w_s, num_atoms, 2 * F, BM, BN)
        hi += tl.load(b2 + cols)[None, :]
        ha += tl.load(b2 + F + cols)[None, :]
        hs += tl.load(b2 + 2 * F + cols)[None, :]
        before_next(PDL)
        tl.store(h, hi, m)
        tl.store(h + F, ha, m)
        tl.store(h + 2 * F, hs, m)
    else:
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix9(x0, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, PDL)
        before_next(PDL)
        store9(mixed + at, m, F, y0, y1, y2, y3, y4, y5, y6, y7, y8)
        hi = tl.load(h, m, other=0.0)
        ha = tl.load(h + F, m, other=0.0)
        hs = tl.load(h + 2 * F, m, other=0.0)
    gi, ga, gs = silu(hi), silu(ha), silu(hs)
    y0, y1, y2, y3, y4 = y0 * gi, y1 * ga, y2 * ga, y3 * ga, y4 * gs
    y5, y6, y7, y8 = y5 * gs, y6 * gs, y7 * gs, y8 * gs
    f = 1.0 / (squared_norm(y0, y1, y2, y3, y4, y5, y6, y7, y8) + 1.0)
    store9(x_out + at, m, F, y0 * f, y1 * f, y2 * f, y3 * f, y4 * f, y5 * f, y6 * f, y7 * f, y8 * f)
    tl.store(inverse_out + rows[:, None].to(tl.int64) * F + cols[None, :], f, m)


@triton.jit(do_not_specialize=["num_atoms"])
def update_kernel(
    p, w, x, charge_factor, d_out, x_out, inverse_out, norms_out, num_atoms, LAST: tl.constexpr, LOG: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """D = mix(P), X' = X + D + q D²; writes D and, for the next layer, X'/(‖X'‖²+1) and 1/(‖X'‖²+1);
    for the read-out (LAST), X' and its ‖I‖², ‖A‖², ‖S‖² [N, 3F], or log(1 + …) of them (LOG)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    EARLY: tl.constexpr = BM < 8 or KS > 1
    m = ok[:, None]
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
    if EARLY:
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9_early(x + at, m, F)
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = mix9(p, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, PDL)
    before_next(PDL)
    store9(d_out + at, m, F, d0, d1, d2, d3, d4, d5, d6, d7, d8)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = square(q, d0, d1, d2, d3, d4, d5, d6, d7, d8)
    if not EARLY:
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + at, m, F)
    x0, x1, x2, x3, x4 = x0 + d0 + r0, x1 + d1 + r1, x2 + d2 + r2, x3 + d3 + r3, x4 + d4 + r4
    x5, x6, x7, x8 = x5 + d5 + r5, x6 + d6 + r6, x7 + d7 + r7, x8 + d8 + r8
    if LAST:
        norms = norms_out + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
        ni, na = 3.0 * x0 * x0, 2.0 * (x1 * x1 + x2 * x2 + x3 * x3)
        ns = 2.0 * (x4 * x4 + x7 * x7 + x4 * x7 + x5 * x5 + x6 * x6 + x8 * x8)
        if LOG:
            ni, na, ns = log1p(ni), log1p(na), log1p(ns)
        tl.store(norms, ni, m)
        tl.store(norms + F, na, m)
        tl.store(norms + 2 * F, ns, m)
    else:
        f = 1.0 / (squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8) + 1.0)
        tl.store(inverse_out + rows[:, None].to(tl.int64) * F + cols[None, :], f, m)
        x0, x1, x2, x3, x4 = x0 * f, x1 * f, x2 * f, x3 * f, x4 * f
        x5, x6, x7, x8 = x5 * f, x6 * f, x7 * f, x8 * f
    store9(x_out + at, m, F, x0, x1, x2, x3, x4, x5, x6, x7, x8)


@triton.jit(do_not_specialize=["num_atoms"])
def gradient_product_kernel(
    dd, w, y, message, charge_factor, dm_out, dy_out, num_atoms, O3: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From dD: the gradient of P/(‖P‖²+1), then of P (recomputed from Y and M), then of M and Y through the product.

    dd [N, 9, F] is the gradient of D = mix(P/(‖P‖²+1)), w the transposed maps. The gradient of Y is not complete: the
    messages add to it once all dM are written.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    EARLY: tl.constexpr = BM < 8 or KS > 1
    m = ok[:, None]
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
    if EARLY:
        # both are of the forward pass; the kernel before writes dD
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9_early(y + at, m, F)
        m0, m1, m2, m3, m4, m5, m6, m7, m8 = load9_early(message + at, m, F)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dd, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, PDL)
    before_next(PDL)
    if not EARLY:
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + at, m, F)
        m0, m1, m2, m3, m4, m5, m6, m7, m8 = load9(message + at, m, F)
    p0, p1, p2, p3, p4, p5, p6, p7, p8 = product(
        q, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, O3
    )
    f = 1.0 / (squared_norm(p0, p1, p2, p3, p4, p5, p6, p7, p8) + 1.0)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = normalise_adjoint(
        f, p0 * f, p1 * f, p2 * f, p3 * f, p4 * f, p5 * f, p6 * f, p7 * f, p8 * f, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8 = product_adjoint(
        q, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8,
        g0, g1, g2, g3, g4, g5, g6, g7, g8, O3,
    )  # fmt: skip
    # dy_out may be the field of M: only this program reads and writes this tile of it, and M was read above
    store9(dy_out + at, m, F, a0, a1, a2, a3, a4, a5, a6, a7, a8)
    store9(dm_out + at, m, F, b0, b1, b2, b3, b4, b5, b6, b7, b8)


@triton.jit(do_not_specialize=["num_atoms", "num_linear"])
def gradient_mix_kernel(
    dy, w, g, x, inverse, d_before, charge_factor, g_out, dd_out, mixed, gate, dgate_out, num_atoms, num_linear, linear,
    FIRST: tl.constexpr, LINEAR: tl.constexpr, WORDS: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From dY and the gradient g of the residual stream: through x = X/(‖X‖²+1) to the block before.

    Before an interaction stands another one (FIRST false): writes g_out = dX and dd_out = gradient of its D.
    Before the first stands the embedding, X = silu(h) ⊙ mix(X⁰) with the gate h: writes dd_out = silu(h) ⊙ dX, the
    gradient of mix(X⁰), and dgate_out = silu'(h) ⊙ ⟨dX, mix(X⁰)⟩ by parts, that of h.
    g_out may be g, dd_out may be g where FIRST, and dgate_out may be gate: a program writes the tile that it has read.
    dd_out is in words where WORDS.
    linear [F], where LINEAR: the gradient of the linear read-out of that X, which its isotropic part gets in the first
    num_linear rows.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    EARLY: tl.constexpr = BM < 8 or KS > 1
    m = ok[:, None]
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    h = rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
    at_f = inverse + rows[:, None].to(tl.int64) * F + cols[None, :]
    before = mixed if FIRST else d_before
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
    if EARLY:
        # all of these are older than the kernel before, which completes dY
        r0, r1, r2, r3, r4, r5, r6, r7, r8 = load9_early(g + at, m, F)
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9_early(x + at, m, F)
        d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9_early(before + at, m, F)
        f = tl.load(at_f, m, other=1.0, cache_modifier=".cg")
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dy, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, PDL)
    before_next(PDL)
    if not EARLY:
        r0, r1, r2, r3, r4, r5, r6, r7, r8 = load9(g + at, m, F)
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + at, m, F)
        f = tl.load(at_f, m, other=1.0)
    # x went into Y = mix(x) and into the residual stream: the sum of both gradients goes through the normalisation
    g0, g1, g2, g3, g4 = g0 + r0, g1 + r1, g2 + r2, g3 + r3, g4 + r4
    g5, g6, g7, g8 = g5 + r5, g6 + r6, g7 + r7, g8 + r8
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = normalise_adjoint(
        f, x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    # after the normalisation, since the read-out takes X; of rows further on, energies do not count (gpu.py)
    if LINEAR:
        g0 += tl.where((rows < num_linear)[:, None], tl.load(linear + cols)[None, :], 0.0)
    if not EARLY:
        d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9(before + at, m, F)
    if FIRST:
        # all parts of the gate are read before dgate replaces them
        hi = tl.load(gate + h, m, other=0.0)
        ha = tl.load(gate + h + F, m, other=0.0)
        hs = tl.load(gate + h + 2 * F, m, other=0.0)
        tl.store(dgate_out + h, silu_slope(hi) * (g0 * d0), m)
        tl.store(dgate_out + h + F, silu_slope(ha) * (g1 * d1 + g2 * d2 + g3 * d3), m)
        inner = g4 * d4 + g5 * d5 + g6 * d6 + g7 * d7 + g8 * d8
        tl.store(dgate_out + h + 2 * F, silu_slope(hs) * inner, m)
        gi, ga, gs = silu(hi), silu(ha), silu(hs)
        g0, g1, g2, g3, g4 = g0 * gi, g1 * ga, g2 * ga, g3 * ga, g4 * gs
        g5, g6, g7, g8 = g5 * gs, g6 * gs, g7 * gs, g8 * gs
        store9_words(dd_out + at, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8, WORDS)
    else:
        store9(g_out + at, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
        # X = x' + D + q D²: dX goes unchanged to x', and through the square to D of the layer before
        e0, e1, e2, e3, e4, e5, e6, e7, e8 = add_square_adjoint(
            q, d0, d1, d2, d3, d4, d5, d6, d7, d8, g0, g1, g2, g3, g4, g5, g6, g7, g8
        )
        store9_words(dd_out + at, m, F, e0, e1, e2, e3, e4, e5, e6, e7, e8, WORDS)


@triton.jit(do_not_specialize=["num_atoms"])
def gradient_embedding_kernel(
    dmixed, w, x0_field, dhidden, hidden, norm, w1t, gamma, w1_gamma, w1_offset, dx_out, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dX⁰ = mixᵀ(dmixed) + d‖X⁰‖² · ∂‖X⁰‖²/∂X⁰, the gradient of the norm coming back through the gate's W1 and LN.

    dhidden [N, 2F] is the gradient of the gate's hidden layer, W1ᵀ [2F, F]; see below for w1_gamma, w1_offset. dx_out
    may be the field of mix(X⁰), which is no longer needed.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    EARLY: tl.constexpr = BM < 8 or KS > 1
    m = ok[:, None]
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    if EARLY:
        # the kernel before writes dhidden only: the product is done while that one runs
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9_early(x0_field + at, m, F)
        mean, rstd = statistics(norm, rows, ok, eps, F, F, LOG)
        first = tl.program_id(1) * BN
        if BM == 8:
            w_t, w_l = split_weights(w1t, first, 0, 2 * F, F, BN, 2 * F // KS, KS)
        else:
            w_t = weights(w1t, F, 2 * F, BN, first)
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dmixed, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, 0)
        after_previous(PDL)
        if BM == 8:
            t = dense_split(dhidden, w_t, w_l, tl.minimum(rows, num_atoms - 1), 2 * F, 2 * F, BN, KS)
        else:
            zero = tl.zeros([BM, 1], tl.float32)
            t = dense_cuda(dhidden, w_t, w_t, w_t, zero, num_atoms, 2 * F, 2 * F, 1, BM, BN)
    else:
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dmixed, w, rows, cols, ok, num_atoms, F, BM, BN, BK, KS, PREC, PDL)
        if BM == 8:
            w_t, w_l = split_weights(w1t, tl.program_id(1) * BN, 0, 2 * F, F, BN, 2 * F // KS, KS)
            t = dense_split(dhidden, w_t, w_l, tl.minimum(rows, num_atoms - 1), 2 * F, 2 * F, BN, KS)
        else:
            of_floats: tl.constexpr = "fp16x3" if PREC == "words" else PREC
            t = settle(dense(dhidden, w1t, rows, cols, ok, 2 * F, F, BM, BN, BK, of_floats), BM, BN)
        mean, rstd = statistics(norm, rows, ok, eps, F, F, LOG)
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x0_field + at, m, F)
    before_next(PDL)
    t *= tl.load(gamma + cols)[None, :]
    if LOG:
        t /= 1.0 + squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    else:
        # the programs of all columns of a row form these sums in the same order: the same bits, without another kernel
        k = tl.arange(0, 2 * F)
        a = tl.load(dhidden + rows[:, None].to(tl.int64) * (2 * F) + k[None, :], m, other=0.0)
        h = tl.load(hidden + rows[:, None].to(tl.int64) * (2 * F) + k[None, :], m, other=0.0)
        sum_g = (tl.sum(a * tl.load(w1_gamma + k)[None, :], 1) / F)[:, None]
        sum_gn = (tl.sum(a * (h - tl.load(w1_offset + k)[None, :]), 1) / F)[:, None]
        n = (tl.load(norm + rows[:, None].to(tl.int64) * F + cols[None, :], m, other=0.0) - mean) * rstd
        # with n = (norm − mean)/σ: d norm = (t − Σt/F − n Σ(t n)/F)/σ
        t = (t - sum_g - n * sum_gn) * rstd
    n0, n1, n2, n3, n4, n5, n6, n7, n8 = norm_gradient(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    store9(
        dx_out + at, m, F, g0 + t * n0, g1 + t * n1, g2 + t * n2, g3 + t * n3, g4 + t * n4, g5 + t * n5,
        g6 + t * n6, g7 + t * n7, g8 + t * n8,
    )  # fmt: skip


# --- The scalar networks of TensorNet with their gradients: the gate of the embedding and the read-out ---
#
# Each network is divided into kernels where a product needs all channels of an atom. A program computes BN outputs for
# BM atoms, so that few atoms fill the device. The means in the gradient of a layer norm are sums over the outputs of
# the next layer, which is linear; they need no extra pass:
#
#     h = W n̂ + b, n̂ = γ n + β, g = γ ⊙ Wᵀ a   ⇒   Σ g = a · (W γ),   Σ g n = a · (h − b − W β).
#
# Products are as above. Below 16 atoms per program the weights are packed
# (triton_products.py), and W1 after a layer norm is γ ⊙ W1.


@triton.jit(do_not_specialize=["num_atoms"])
def hidden_kernel(
    norm, gamma, beta, w1, b1, offset, hidden, active, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [N, 2F] = W1 LN(‖X⁰‖²) + b1 and active = silu(hidden). W1 [F, 2F], offset = W1 β + b1.

    LOG: γ log(1 + ‖X⁰‖²) + β instead of LN; norm [N, F] is the logarithm then. The same holds for the read-out.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    if BM == 8:
        wh, wl = split_weights(w1, tl.program_id(1) * BN, 0, F, 2 * F, BN, F // KS, KS)
        after_previous(PDL)
        mean, rstd = statistics(norm, rows, ok, eps, F, F, LOG)
        y, small = add_dense(None, None, norm, mean, wh, wl, tl.minimum(rows, num_atoms - 1), F, F, BN, KS)
        h = sum_split(y, small, BN, KS) * rstd + tl.load(offset + cols)[None, :]
    elif BM < 16:
        w = weights(w1, 2 * F, F, BN, tl.program_id(1) * BN)
        b = tl.load(offset + cols)[None, :]
        after_previous(PDL)
        mean, rstd = statistics(norm, rows, ok, eps, F, F, LOG)
        h = dense_cuda(norm, w, w, w, mean, num_atoms, F, F, 1, BM, BN) * rstd + b
    else:
        after_previous(PDL)
        mean, rstd = statistics(norm, rows, ok, eps, F, F, LOG)
        h = dense_normed(norm, mean, rstd, gamma, beta, w1, b1, offset, rows, cols, ok, F, 2 * F, BM, BN, BK, PREC)
    before_next(PDL)
    at = rows[:, None].to(tl.int64) * (2 * F) + cols[None, :]
    tl.store(hidden + at, h, ok[:, None])
    tl.store(active + at, silu(h), ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def gate_kernel(
    active, w2, b2, gate, num_atoms,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate [N, 3F] = W2 active + b2, before activation. W2 [2F, 3F]. From 8 atoms a program."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    if BM == 8:
        wh, wl = split_weights(w2, tl.program_id(1) * BN, 0, 2 * F, 3 * F, BN, 2 * F // KS, KS)
        after_previous(PDL)
        g = dense_split(active, wh, wl, tl.minimum(rows, num_atoms - 1), 2 * F, 2 * F, BN, KS)
    else:
        after_previous(PDL)
        g = dense(active, w2, rows, cols, ok, 2 * F, 3 * F, BM, BN, BK, PREC)
    g += tl.load(b2 + cols)[None, :]
    before_next(PDL)
    tl.store(gate + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :], g, ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def gate_backward_kernel(
    dgate, hidden, w2t, dhidden, num_atoms,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dhidden [N, 2F] = silu'(hidden) ⊙ W2ᵀ dgate. W2ᵀ [3F, 2F]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    at = rows[:, None].to(tl.int64) * (2 * F) + cols[None, :]
    if BM == 8:
        first = tl.program_id(1) * BN
        ih, il = split_weights(w2t, first, 0, F, 2 * F, BN, F // KS, KS)
        ah, al = split_weights(w2t + 4 * F * F, first, 0, F, 2 * F, BN, F // KS, KS)
        sh, sl = split_weights(w2t + 8 * F * F, first, 0, F, 2 * F, BN, F // KS, KS)
        # hidden is of the forward pass; the kernel before writes dgate
        slope = silu_slope(tl.load(hidden + at, ok[:, None], other=0.0, cache_modifier=".cg"))
        after_previous(PDL)
        there = tl.minimum(rows, num_atoms - 1)
        y, small = add_dense(None, None, dgate, None, ih, il, there, 3 * F, F, BN, KS)
        y, small = add_dense(y, small, dgate + F, None, ah, al, there, 3 * F, F, BN, KS)
        y, small = add_dense(y, small, dgate + 2 * F, None, sh, sl, there, 3 * F, F, BN, KS)
        a = sum_split(y, small, BN, KS)
    elif BM < 16:
        first = tl.program_id(1) * BN
        w0 = weights(w2t, 2 * F, F, BN, first)
        w1 = weights(w2t + 2 * F * F, 2 * F, F, BN, first)
        w2 = weights(w2t + 4 * F * F, 2 * F, F, BN, first)
        slope = silu_slope(tl.load(hidden + at, ok[:, None], other=0.0, cache_modifier=".cg"))
        after_previous(PDL)
        a = dense_cuda(dgate, w0, w1, w2, tl.zeros([BM, 1], tl.float32), num_atoms, 3 * F, F, 3, BM, BN)
    else:
        after_previous(PDL)
        a = dense(dgate, w2t, rows, cols, ok, 3 * F, 2 * F, BM, BN, BK, PREC)
        slope = silu_slope(tl.load(hidden + at, ok[:, None], other=0.0))
    before_next(PDL)
    tl.store(dhidden + at, a * slope, ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def readout_hidden_kernel(
    norms, gamma, beta, w1, b1, offset, hidden, active, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [N, F] = W1 LN[‖I‖², ‖A‖², ‖S‖²] + b1 and active = silu(hidden). norms [N, 3F], W1 [3F, F]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    if BM == 8:
        first = tl.program_id(1) * BN
        ih, il = split_weights(w1, first, 0, F, F, BN, F // KS, KS)
        ah, al = split_weights(w1 + 2 * F * F, first, 0, F, F, BN, F // KS, KS)
        sh, sl = split_weights(w1 + 4 * F * F, first, 0, F, F, BN, F // KS, KS)
        after_previous(PDL)
        there = tl.minimum(rows, num_atoms - 1)
        mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F, LOG)
        y, small = add_dense(None, None, norms, mean, ih, il, there, 3 * F, F, BN, KS)
        y, small = add_dense(y, small, norms + F, mean, ah, al, there, 3 * F, F, BN, KS)
        y, small = add_dense(y, small, norms + 2 * F, mean, sh, sl, there, 3 * F, F, BN, KS)
        h = sum_split(y, small, BN, KS) * rstd + tl.load(offset + cols)[None, :]
    elif BM < 16:
        first = tl.program_id(1) * BN
        w_i, w_a = weights(w1, F, F, BN, first), weights(w1 + F * F, F, F, BN, first)
        w_s = weights(w1 + 2 * F * F, F, F, BN, first)
        b = tl.load(offset + cols)[None, :]
        after_previous(PDL)
        mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F, LOG)
        h = dense_cuda(norms, w_i, w_a, w_s, mean, num_atoms, 3 * F, F, 3, BM, BN) * rstd + b
    else:
        after_previous(PDL)
        mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F, LOG)
        h = dense_normed(norms, mean, rstd, gamma, beta, w1, b1, offset, rows, cols, ok, 3 * F, F, BM, BN, BK, PREC)
    before_next(PDL)
    at = rows[:, None].to(tl.int64) * F + cols[None, :]
    tl.store(hidden + at, h, ok[:, None])
    tl.store(active + at, silu(h), ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def readout_kernel(
    hidden, active, w2, b2, w3, b3, w2t, energy, dhidden, num_atoms,
    F: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ε [N] = w3·silu(W2 active + b2) + b3 and its gradient in hidden [N, F]. W2 [F, H], W2ᵀ [H, F]; BM 1 or ≥ 16.

    dhidden = silu'(hidden) ⊙ W2ᵀ (silu'(a) ⊙ w3), a = W2 active + b2. The backward pass begins here: dE/dε is 1 for
    each atom, and a is in the registers. ε is a sum over H, so a program has all columns of its rows.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    k = tl.arange(0, H)
    c = tl.arange(0, F)
    if BM == 1:
        w = weights(w2, H, F, H, 0)
        # W2ᵀ [H, F] read transposed: the products are summed along H where `a` lies
        wt = tl.load(w2t + k[None, :] * F + c[:, None])
        after_previous(PDL)
        a = dense_cuda(active, w, w, w, tl.zeros([BM, 1], tl.float32), num_atoms, F, F, 1, BM, H)
    else:
        after_previous(PDL)
        a = dense(active, w2, rows, k, ok, F, H, BM, H, BK, PREC)
    before_next(PDL)
    a += tl.load(b2 + k)[None, :]
    v = tl.load(w3 + k)[None, :]
    tl.store(energy + rows, tl.sum(silu(a) * v, 1) + tl.load(b3), ok)
    # dε/da
    a = silu_slope(a) * v
    # columns at a time: 32 kB of W2ᵀ pass through shared memory, of which many GPUs have 99 kB
    BC: tl.constexpr = F if BM == 1 or F * H <= 8192 else 8192 // H
    for c0 in tl.static_range(0, F, BC):
        c = c0 + tl.arange(0, BC)
        if BM == 1:
            g = tl.sum(wt * a, 1)[None, :]
        else:
            g = tl.dot(a, tl.load(w2t + k[:, None] * F + c[None, :]), input_precision=PREC)
        at = rows[:, None].to(tl.int64) * F + c[None, :]
        tl.store(dhidden + at, g * silu_slope(tl.load(hidden + at, ok[:, None], other=0.0)), ok[:, None])


@triton.jit(do_not_specialize=["num_atoms", "num_rows"])
def linear_energy_kernel(
    x, inverse, linear, energy, num_atoms, num_rows,
    LAYERS: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """energy [N] += Σ_k linear[k] · (isotropic part of X after the embedding and each layer); linear [L + 1, F].

    x [L + 1, R, 9, F] has X/(‖X‖²+1) of R rows, with inverse [L, R, F] = 1/(‖X‖²+1), and X itself after the last layer.
    """
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, F)
    m = (rows < num_atoms)[:, None]
    total = tl.zeros([BM], tl.float32)
    for k in tl.static_range(LAYERS + 1):
        at = (k * num_rows + rows)[:, None].to(tl.int64)
        part = tl.load(x + at * (9 * F) + cols[None, :], m, other=0.0)
        if k < LAYERS:
            part /= tl.load(inverse + at * F + cols[None, :], m, other=1.0)
        total += tl.sum(part * tl.load(linear + k * F + cols)[None, :], 1)
    before = tl.load(energy + rows, rows < num_atoms, other=0.0)
    before_next(PDL)
    tl.store(energy + rows, before + total, rows < num_atoms)


@triton.jit(do_not_specialize=["num_atoms"])
def readout_gradient_kernel(
    dhidden, hidden, norms, w1t, gamma, w1_gamma, w1_offset, x, d, charge_factor, g_out, dd_out, num_atoms, eps,
    linear, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, LOG: tl.constexpr, LINEAR: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradient g_out [N, 9, F] of the energy in X and dd_out, that in the last D. W1ᵀ [F, 3F].

    With (a_I, a_A, a_S) = the gradient in ‖I‖², ‖A‖², ‖S‖² of X: g = ∂(a_I ‖I‖² + a_A ‖A‖² + a_S ‖S‖²)/∂X. g_out may be
    x and dd_out may be d: a program writes the tiles that it has read. dd_out is in words where WORDS.

    w1_gamma [F] = W1 γ and w1_offset [F] = b1 + W1 β give the means of the layer norm's gradient.
    linear [F], where LINEAR: the gradient of the linear read-out, which the isotropic part gets.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    at9 = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
    if BM < 16:
        first = tl.program_id(1) * BN
        if BM == 8:
            ih, il = split_weights(w1t, first, 0, F, 3 * F, BN, F // KS, KS)
            ah, al = split_weights(w1t, F + first, 0, F, 3 * F, BN, F // KS, KS)
            sh, sl = split_weights(w1t, 2 * F + first, 0, F, 3 * F, BN, F // KS, KS)
        else:
            w_i, w_a = weights(w1t, 3 * F, F, BN, first), weights(w1t, 3 * F, F, BN, F + first)
            w_s = weights(w1t, 3 * F, F, BN, 2 * F + first)
        mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F, LOG)
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9_early(x + at9, m, F)
        d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9_early(d + at9, m, F)
        after_previous(PDL)
        if BM == 8:
            there = tl.minimum(rows, num_atoms - 1)
            gi = dense_split(dhidden, ih, il, there, F, F, BN, KS)
            ga = dense_split(dhidden, ah, al, there, F, F, BN, KS)
            gs = dense_split(dhidden, sh, sl, there, F, F, BN, KS)
        else:
            gi, ga, gs = dense3_cuda(dhidden, w_i, w_a, w_s, num_atoms, F, BM, BN)
    else:
        after_previous(PDL)
        gi = settle(dense(dhidden, w1t, rows, cols, ok, F, 3 * F, BM, BN, BK, PREC), BM, BN)
        ga = settle(dense(dhidden, w1t + F, rows, cols, ok, F, 3 * F, BM, BN, BK, PREC), BM, BN)
        gs = settle(dense(dhidden, w1t + 2 * F, rows, cols, ok, F, 3 * F, BM, BN, BK, PREC), BM, BN)
        mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F, LOG)
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + at9, m, F)
        d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9(d + at9, m, F)
    before_next(PDL)
    gi *= tl.load(gamma + cols)[None, :]
    ga *= tl.load(gamma + F + cols)[None, :]
    gs *= tl.load(gamma + 2 * F + cols)[None, :]
    if LOG:
        # norms holds log(1 + ‖·‖²): the squared norms are formed again from X
        gi /= 1.0 + 3.0 * x0 * x0
        ga /= 1.0 + 2.0 * (x1 * x1 + x2 * x2 + x3 * x3)
        gs /= 1.0 + 2.0 * (x4 * x4 + x7 * x7 + x4 * x7 + x5 * x5 + x6 * x6 + x8 * x8)
    else:
        # Σ g and Σ g n over all 3F norms, though a program has BN of each part: see above
        k = tl.arange(0, F)
        a = tl.load(dhidden + rows[:, None].to(tl.int64) * F + k[None, :], m, other=0.0)
        h = (
            tl.load(hidden + rows[:, None].to(tl.int64) * F + k[None, :], m, other=0.0)
            - tl.load(w1_offset + k)[None, :]
        )
        sum_g = (tl.sum(a * tl.load(w1_gamma + k)[None, :], 1) / (3 * F))[:, None]
        sum_gn = (tl.sum(a * h, 1) / (3 * F))[:, None]
        at = norms + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
        gi = (gi - sum_g - (tl.load(at, m, other=0.0) - mean) * rstd * sum_gn) * rstd
        ga = (ga - sum_g - (tl.load(at + F, m, other=0.0) - mean) * rstd * sum_gn) * rstd
        gs = (gs - sum_g - (tl.load(at + 2 * F, m, other=0.0) - mean) * rstd * sum_gn) * rstd
    g0, g1, g2, g3 = 6.0 * x0 * gi, 4.0 * x1 * ga, 4.0 * x2 * ga, 4.0 * x3 * ga
    g4, g7 = (4.0 * x4 + 2.0 * x7) * gs, (4.0 * x7 + 2.0 * x4) * gs
    g5, g6, g8 = 4.0 * x5 * gs, 4.0 * x6 * gs, 4.0 * x8 * gs
    if LINEAR:
        g0 += tl.load(linear + cols)[None, :]
    store9(g_out + at9, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = add_square_adjoint(
        q, d0, d1, d2, d3, d4, d5, d6, d7, d8, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    store9_words(dd_out + at9, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8, WORDS)
