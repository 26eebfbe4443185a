"""The scalar networks of TensorNet with their gradients: the gate of the embedding and the read-out (Triton kernels).

Each network is divided into kernels where a product needs all channels of an atom. A program computes BN outputs for BM
atoms, so that few atoms fill the device. The means in the gradient of a layer norm are sums over the outputs of the
next layer, which is linear; they need no extra pass:

    h = W n̂ + b, n̂ = γ n + β, g = γ ⊙ Wᵀ a   ⇒   Σ g = a · (W γ),   Σ g n = a · (h − b − W β).

Products are as in node.py. Below 16 atoms per program the weights are packed (cuda_core_products.py,
split_fp16_products.py), and W1 after a layer norm is γ ⊙ W1.

Shapes: N atoms, F channels, H = F/2 in the head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous, before_next
from .algebra import add_square_adjoint, load9, load9_early, store9
from .cuda_core_products import dense3_cuda, dense_cuda, weights
from .dense import dense, dense_normed, settle, silu, silu_slope, statistics
from .split_fp16_products import add_dense, dense_split, split_weights, sum_split

__all__ = [
    "gate_backward_kernel",
    "gate_kernel",
    "hidden_kernel",
    "linear_energy_kernel",
    "readout_gradient_kernel",
    "readout_hidden_kernel",
    "readout_kernel",
]


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
        h = dense_normed(norm, mean, rstd, gamma, beta, w1, rows, cols, ok, F, 2 * F, BM, BN, BK, PREC)
        h += tl.load(b1 + cols)[None, :]
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
        h = dense_normed(norms, mean, rstd, gamma, beta, w1, rows, cols, ok, 3 * F, F, BM, BN, BK, PREC)
        h += tl.load(b1 + cols)[None, :]
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
    """ε [N] = w3·silu(W2 active + b2) + b3 and its gradient in hidden [N, F]. W2 [F, H], W2ᵀ [H, F]; BM 1 or ≥ 16."""
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
    PREC: tl.constexpr, LOG: tl.constexpr, LINEAR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradient g_out [N, 9, F] of the energy in X and dd_out, that in the last D. W1ᵀ [F, 3F].

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
        gi /= 1.0 + 3.0 * x0 * x0
        ga /= 1.0 + 2.0 * (x1 * x1 + x2 * x2 + x3 * x3)
        gs /= 1.0 + 2.0 * (x4 * x4 + x7 * x7 + x4 * x7 + x5 * x5 + x6 * x6 + x8 * x8)
    else:
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
    store9(dd_out + at9, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
