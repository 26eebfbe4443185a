"""Per-atom blocks of TensorNet fused around the channel-mixing matrix products: Triton kernels.

A program holds BM atoms × 9 components × BN channels in registers: the three maps of I, A and S run over the
matrix units, and everything that is done channel by channel (norms, gates, tensor products, their gradients) is
done on the result before it is written.

PREC is Triton's input precision of the products: "tf32x3" is as accurate as float32, "tf32" is faster, "ieee" uses
the ordinary units.

Shapes: N atoms, F channels. Fields are [N, 9, F]; mixing weights W [3, F, F] are applied as X_part @ W[part].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .algebra import (
    add_square_adjoint,
    load9,
    norm_gradient,
    normalise_adjoint,
    product,
    product_adjoint,
    square,
    squared_norm,
    store9,
)
from .dense import dense, silu, silu_slope, statistics
from .launch import after_previous

__all__ = [
    "embedding_mix_kernel",
    "gradient_embedding_kernel",
    "gradient_mix_kernel",
    "gradient_product_kernel",
    "mix_kernel",
    "update_kernel",
]


@triton.jit
def mix9(
    x, w, rows, cols, mask_rows, num_atoms, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """X @ W by parts for the rows and columns of this program: nine [BM, BN] tiles."""
    if BM < 16:
        # few atoms: the ordinary units; a lane is one atom and one column, K runs over the threads
        lane = tl.arange(0, BM * BN)
        col = tl.program_id(1) * BN + lane % BN
        atom = tl.minimum(tl.program_id(0) * BM + lane // BN, num_atoms - 1)
        y0 = tl.zeros([BK, BM * BN], tl.float32)
        y1, y2, y3, y4, y5, y6, y7, y8 = y0, y0, y0, y0, y0, y0, y0, y0
        for k0 in tl.static_range(0, F, BK):
            k = k0 + tl.arange(0, BK)
            a = x + atom[None, :].to(tl.int64) * (9 * F) + k[:, None]
            b = w + k[:, None] * F + col[None, :]
            wi, wa, ws = tl.load(b), tl.load(b + F * F), tl.load(b + 2 * F * F)
            y0 += tl.load(a) * wi
            y1 += tl.load(a + F) * wa
            y2 += tl.load(a + 2 * F) * wa
            y3 += tl.load(a + 3 * F) * wa
            y4 += tl.load(a + 4 * F) * ws
            y5 += tl.load(a + 5 * F) * ws
            y6 += tl.load(a + 6 * F) * ws
            y7 += tl.load(a + 7 * F) * ws
            y8 += tl.load(a + 8 * F) * ws
        y0, y1 = tl.reshape(tl.sum(y0, 0), (BM, BN)), tl.reshape(tl.sum(y1, 0), (BM, BN))
        y2, y3 = tl.reshape(tl.sum(y2, 0), (BM, BN)), tl.reshape(tl.sum(y3, 0), (BM, BN))
        y4, y5 = tl.reshape(tl.sum(y4, 0), (BM, BN)), tl.reshape(tl.sum(y5, 0), (BM, BN))
        y6, y7 = tl.reshape(tl.sum(y6, 0), (BM, BN)), tl.reshape(tl.sum(y7, 0), (BM, BN))
        y8 = tl.reshape(tl.sum(y8, 0), (BM, BN))
    else:
        y0 = tl.zeros([BM, BN], tl.float32)
        y1, y2, y3, y4, y5, y6, y7, y8 = y0, y0, y0, y0, y0, y0, y0, y0
        for k0 in range(0, F, BK):
            k = k0 + tl.arange(0, BK)
            a = x + rows[:, None].to(tl.int64) * (9 * F) + k[None, :]
            m = mask_rows[:, None]
            b = w + k[:, None] * F + cols[None, :]
            wi, wa, ws = tl.load(b), tl.load(b + F * F), tl.load(b + 2 * F * F)
            y0 = tl.dot(tl.load(a, m, other=0.0), wi, y0, input_precision=PREC)
            y1 = tl.dot(tl.load(a + F, m, other=0.0), wa, y1, input_precision=PREC)
            y2 = tl.dot(tl.load(a + 2 * F, m, other=0.0), wa, y2, input_precision=PREC)
            y3 = tl.dot(tl.load(a + 3 * F, m, other=0.0), wa, y3, input_precision=PREC)
            y4 = tl.dot(tl.load(a + 4 * F, m, other=0.0), ws, y4, input_precision=PREC)
            y5 = tl.dot(tl.load(a + 5 * F, m, other=0.0), ws, y5, input_precision=PREC)
            y6 = tl.dot(tl.load(a + 6 * F, m, other=0.0), ws, y6, input_precision=PREC)
            y7 = tl.dot(tl.load(a + 7 * F, m, other=0.0), ws, y7, input_precision=PREC)
            y8 = tl.dot(tl.load(a + 8 * F, m, other=0.0), ws, y8, input_precision=PREC)
    return y0, y1, y2, y3, y4, y5, y6, y7, y8


@triton.jit(do_not_specialize=["num_atoms"])
def mix_kernel(
    x, w, y, num_atoms, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Y = mix(X)."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix9(x, w, rows, cols, ok, num_atoms, F, BM, BN, BK, PREC)
    out = y + rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    store9(out, ok[:, None], F, y0, y1, y2, y3, y4, y5, y6, y7, y8)


@triton.jit(do_not_specialize=["num_atoms"])
def embedding_mix_kernel(
    x0, w, gate, mixed, x_out, inverse_out, num_atoms,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """X = silu(gate) ⊙ mix(X⁰); writes mix(X⁰), X/(‖X‖²+1) and 1/(‖X‖²+1). gate [N, 3, F] before activation."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = mix9(x0, w, rows, cols, ok, num_atoms, F, BM, BN, BK, PREC)
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    store9(mixed + at, m, F, y0, y1, y2, y3, y4, y5, y6, y7, y8)
    h = gate + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
    gi = silu(tl.load(h, m, other=0.0))
    ga = silu(tl.load(h + F, m, other=0.0))
    gs = silu(tl.load(h + 2 * F, m, other=0.0))
    y0, y1, y2, y3, y4 = y0 * gi, y1 * ga, y2 * ga, y3 * ga, y4 * gs
    y5, y6, y7, y8 = y5 * gs, y6 * gs, y7 * gs, y8 * gs
    f = 1.0 / (squared_norm(y0, y1, y2, y3, y4, y5, y6, y7, y8) + 1.0)
    store9(x_out + at, m, F, y0 * f, y1 * f, y2 * f, y3 * f, y4 * f, y5 * f, y6 * f, y7 * f, y8 * f)
    tl.store(inverse_out + rows[:, None].to(tl.int64) * F + cols[None, :], f, m)


@triton.jit(do_not_specialize=["num_atoms"])
def update_kernel(
    p, w, x, charge_factor, d_out, x_out, inverse_out, norms_out, num_atoms, LAST: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """D = mix(P), X' = X + D + q D²; writes D and, for the next layer, X'/(‖X'‖²+1) and 1/(‖X'‖²+1);
    for the read-out (LAST), X' and its ‖I‖², ‖A‖², ‖S‖² [N, 3F]."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = mix9(p, w, rows, cols, ok, num_atoms, F, BM, BN, BK, PREC)
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    store9(d_out + at, m, F, d0, d1, d2, d3, d4, d5, d6, d7, d8)
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = square(q, d0, d1, d2, d3, d4, d5, d6, d7, d8)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + at, m, F)
    x0, x1, x2, x3, x4 = x0 + d0 + r0, x1 + d1 + r1, x2 + d2 + r2, x3 + d3 + r3, x4 + d4 + r4
    x5, x6, x7, x8 = x5 + d5 + r5, x6 + d6 + r6, x7 + d7 + r7, x8 + d8 + r8
    if LAST:
        norms = norms_out + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
        tl.store(norms, 3.0 * x0 * x0, m)
        tl.store(norms + F, 2.0 * (x1 * x1 + x2 * x2 + x3 * x3), m)
        tl.store(norms + 2 * F, 2.0 * (x4 * x4 + x7 * x7 + x4 * x7 + x5 * x5 + x6 * x6 + x8 * x8), m)
    else:
        f = 1.0 / (squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8) + 1.0)
        tl.store(inverse_out + rows[:, None].to(tl.int64) * F + cols[None, :], f, m)
        x0, x1, x2, x3, x4 = x0 * f, x1 * f, x2 * f, x3 * f, x4 * f
        x5, x6, x7, x8 = x5 * f, x6 * f, x7 * f, x8 * f
    store9(x_out + at, m, F, x0, x1, x2, x3, x4, x5, x6, x7, x8)


@triton.jit(do_not_specialize=["num_atoms"])
def gradient_product_kernel(
    dd, w, y, message, charge_factor, dm_out, dy_out, num_atoms, O3: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """From dD: gradient of P/(‖P‖²+1), of P (recomputed from Y and M), then of M and of Y through the product."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dd, w, rows, cols, ok, num_atoms, F, BM, BN, BK, PREC)
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + at, m, F)
    m0, m1, m2, m3, m4, m5, m6, m7, m8 = load9(message + at, m, F)
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
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
    store9(dy_out + at, m, F, a0, a1, a2, a3, a4, a5, a6, a7, a8)
    store9(dm_out + at, m, F, b0, b1, b2, b3, b4, b5, b6, b7, b8)


@triton.jit(do_not_specialize=["num_atoms"])
def gradient_mix_kernel(
    dy, w, g, x, inverse, d_before, charge_factor, g_out, dd_out, mixed, gate, dgate_out, num_atoms,
    FIRST: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """From dY and the gradient g of the residual stream: through x = X/(‖X‖²+1) to the block before.

    Before an interaction stands another one (FIRST false): writes g_out = dX and dd_out = gradient of its D.
    Before the first stands the embedding: writes dd_out = gradient of mix(X⁰) and dgate_out, that of its gate.
    """
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dy, w, rows, cols, ok, num_atoms, F, BM, BN, BK, PREC)
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(g + at, m, F)
    g0, g1, g2, g3, g4 = g0 + x0, g1 + x1, g2 + x2, g3 + x3, g4 + x4
    g5, g6, g7, g8 = g5 + x5, g6 + x6, g7 + x7, g8 + x8
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + at, m, F)
    f = tl.load(inverse + rows[:, None].to(tl.int64) * F + cols[None, :], m, other=1.0)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = normalise_adjoint(
        f, x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    if FIRST:
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(mixed + at, m, F)
        h = rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
        hi = tl.load(gate + h, m, other=0.0)
        ha = tl.load(gate + h + F, m, other=0.0)
        hs = tl.load(gate + h + 2 * F, m, other=0.0)
        tl.store(dgate_out + h, silu_slope(hi) * (g0 * x0), m)
        tl.store(dgate_out + h + F, silu_slope(ha) * (g1 * x1 + g2 * x2 + g3 * x3), m)
        dot = g4 * x4 + g5 * x5 + g6 * x6 + g7 * x7 + g8 * x8
        tl.store(dgate_out + h + 2 * F, silu_slope(hs) * dot, m)
        gi, ga, gs = silu(hi), silu(ha), silu(hs)
        store9(dd_out + at, m, F, g0 * gi, g1 * ga, g2 * ga, g3 * ga, g4 * gs, g5 * gs, g6 * gs, g7 * gs, g8 * gs)
    else:
        store9(g_out + at, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
        q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(d_before + at, m, F)
        e0, e1, e2, e3, e4, e5, e6, e7, e8 = add_square_adjoint(
            q, x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8
        )
        store9(dd_out + at, m, F, e0, e1, e2, e3, e4, e5, e6, e7, e8)


@triton.jit(do_not_specialize=["num_atoms"])
def gradient_embedding_kernel(
    dmixed, w, x0_field, dhidden, hidden, norm, w1t, gamma, w1_gamma, w1_offset, dx_out, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dX⁰ = mixᵀ(dmixed) + d‖X⁰‖² · ∂‖X⁰‖²/∂X⁰, the gradient of the norm coming back through the gate's W1 and LN.

    dhidden [N, 2F] is the gradient of the gate's hidden layer, W1ᵀ [2F, F]; see scalar.py for w1_gamma, w1_offset.
    """
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = mix9(dmixed, w, rows, cols, ok, num_atoms, F, BM, BN, BK, PREC)
    t = (
        dense(dhidden, w1t, rows, cols, ok, num_atoms, 2 * F, F, False, True, BM, BN, BK, PREC)
        * tl.load(gamma + cols)[None, :]
    )
    mean, rstd = statistics(norm, rows, ok, eps, F, F)
    k = tl.arange(0, 2 * F)
    a = tl.load(dhidden + rows[:, None].to(tl.int64) * (2 * F) + k[None, :], m, other=0.0)
    h = tl.load(hidden + rows[:, None].to(tl.int64) * (2 * F) + k[None, :], m, other=0.0)
    sum_g = (tl.sum(a * tl.load(w1_gamma + k)[None, :], 1) / F)[:, None]
    sum_gn = (tl.sum(a * (h - tl.load(w1_offset + k)[None, :]), 1) / F)[:, None]
    n = (tl.load(norm + rows[:, None].to(tl.int64) * F + cols[None, :], m, other=0.0) - mean) * rstd
    t = (t - sum_g - n * sum_gn) * rstd
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x0_field + at, m, F)
    n0, n1, n2, n3, n4, n5, n6, n7, n8 = norm_gradient(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    store9(
        dx_out + at, m, F, g0 + t * n0, g1 + t * n1, g2 + t * n2, g3 + t * n3, g4 + t * n4, g5 + t * n5,
        g6 + t * n6, g7 + t * n7, g8 + t * n8,
    )  # fmt: skip
