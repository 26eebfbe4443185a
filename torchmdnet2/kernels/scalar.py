"""The scalar networks of TensorNet with their gradients: the gate of the embedding and the read-out. Triton kernels.

Each is cut where a product needs all channels of the atom: a program computes BN outputs for BM atoms, so that few
atoms still fill the device. The means in the gradient of a layer norm are sums over outputs of the layer after it,
which is linear, so that they need no pass of their own:

    h = W n̂ + b, n̂ = γ n + β, g = γ ⊙ Wᵀ a   ⇒   Σ g = a · (W γ),   Σ g n = a · (h − b − W β).

Shapes: N atoms, F channels, H = F/2 in the head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .algebra import add_square_adjoint, load9, store9
from .dense import dense, dense_normed, silu, silu_slope, statistics
from .launch import after_previous

__all__ = [
    "gate_backward_kernel",
    "gate_kernel",
    "hidden_kernel",
    "readout_gradient_kernel",
    "readout_hidden_kernel",
    "readout_kernel",
]


@triton.jit(do_not_specialize=["num_atoms"])
def hidden_kernel(
    norm, gamma, beta, w1, b1, hidden, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden [N, 2F] = W1 LN(‖X⁰‖²) + b1, before activation. W1 [F, 2F]."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    mean, rstd = statistics(norm, rows, ok, eps, F, F)
    h = dense_normed(norm, mean, rstd, gamma, beta, w1, rows, cols, ok, num_atoms, F, 2 * F, BM, BN, BK, PREC)
    h += tl.load(b1 + cols)[None, :]
    tl.store(hidden + rows[:, None].to(tl.int64) * (2 * F) + cols[None, :], h, ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def gate_kernel(
    hidden, w2, b2, gate, num_atoms,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """gate [N, 3F] = W2 silu(hidden) + b2, before activation. W2 [2F, 3F]."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    g = (
        dense(hidden, w2, rows, cols, ok, num_atoms, 2 * F, 3 * F, True, True, BM, BN, BK, PREC)
        + tl.load(b2 + cols)[None, :]
    )
    tl.store(gate + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :], g, ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def gate_backward_kernel(
    dgate, hidden, w2t, dhidden, num_atoms,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dhidden [N, 2F] = silu'(hidden) ⊙ W2ᵀ dgate. W2ᵀ [3F, 2F]."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    a = dense(dgate, w2t, rows, cols, ok, num_atoms, 3 * F, 2 * F, False, True, BM, BN, BK, PREC)
    at = rows[:, None].to(tl.int64) * (2 * F) + cols[None, :]
    tl.store(dhidden + at, a * silu_slope(tl.load(hidden + at, ok[:, None], other=0.0)), ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def readout_hidden_kernel(
    norms, gamma, beta, w1, b1, hidden, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden [N, F] = W1 LN[‖I‖², ‖A‖², ‖S‖²] + b1, before activation. norms [N, 3F], W1 [3F, F]."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F)
    h = dense_normed(norms, mean, rstd, gamma, beta, w1, rows, cols, ok, num_atoms, 3 * F, F, BM, BN, BK, PREC)
    h += tl.load(b1 + cols)[None, :]
    tl.store(hidden + rows[:, None].to(tl.int64) * F + cols[None, :], h, ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def readout_kernel(
    hidden, w2, b2, w3, b3, w2t, energy, dhidden, num_atoms,
    F: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ε [N] = w3·silu(W2 silu(hidden) + b2) + b3 and its gradient in hidden [N, F]. W2 [F, H], W2ᵀ [H, F]."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    k = tl.arange(0, H)
    a = dense(hidden, w2, rows, k, ok, num_atoms, F, H, True, False, BM, H, BK, PREC) + tl.load(b2 + k)[None, :]
    w = tl.load(w3 + k)[None, :]
    tl.store(energy + rows, tl.sum(silu(a) * w, 1) + tl.load(b3), ok)
    a = silu_slope(a) * w
    c = tl.arange(0, F)
    if BM == 1:
        # W2ᵀ [H, F] read transposed: the products are summed along H where `a` lies
        g = tl.sum(tl.load(w2t + k[None, :] * F + c[:, None]) * a, 1)[None, :]
    else:
        g = tl.dot(a, tl.load(w2t + k[:, None] * F + c[None, :]), input_precision=PREC)
    at = rows[:, None].to(tl.int64) * F + c[None, :]
    tl.store(dhidden + at, g * silu_slope(tl.load(hidden + at, ok[:, None], other=0.0)), ok[:, None])


@triton.jit(do_not_specialize=["num_atoms"])
def readout_gradient_kernel(
    dhidden, hidden, norms, w1t, gamma, w1_gamma, w1_offset, x, d, charge_factor, g_out, dd_out, num_atoms, eps,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gradient g_out [N, 9, F] of the energy in X and dd_out, that in the last D. W1ᵀ [F, 3F].

    w1_gamma [F] = W1 γ and w1_offset [F] = b1 + W1 β give the means of the layer norm's gradient.
    """
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = rows < num_atoms
    m = ok[:, None]
    gi = (
        dense(dhidden, w1t, rows, cols, ok, num_atoms, F, 3 * F, False, True, BM, BN, BK, PREC)
        * tl.load(gamma + cols)[None, :]
    )
    ga = (
        dense(dhidden, w1t + F, rows, cols, ok, num_atoms, F, 3 * F, False, True, BM, BN, BK, PREC)
        * tl.load(gamma + F + cols)[None, :]
    )
    gs = dense(dhidden, w1t + 2 * F, rows, cols, ok, num_atoms, F, 3 * F, False, True, BM, BN, BK, PREC)
    gs *= tl.load(gamma + 2 * F + cols)[None, :]
    mean, rstd = statistics(norms, rows, ok, eps, 3 * F, 4 * F)
    k = tl.arange(0, F)
    a = tl.load(dhidden + rows[:, None].to(tl.int64) * F + k[None, :], m, other=0.0)
    h = tl.load(hidden + rows[:, None].to(tl.int64) * F + k[None, :], m, other=0.0) - tl.load(w1_offset + k)[None, :]
    sum_g = (tl.sum(a * tl.load(w1_gamma + k)[None, :], 1) / (3 * F))[:, None]
    sum_gn = (tl.sum(a * h, 1) / (3 * F))[:, None]
    at = norms + rows[:, None].to(tl.int64) * (3 * F) + cols[None, :]
    gi = (gi - sum_g - (tl.load(at, m, other=0.0) - mean) * rstd * sum_gn) * rstd
    ga = (ga - sum_g - (tl.load(at + F, m, other=0.0) - mean) * rstd * sum_gn) * rstd
    gs = (gs - sum_g - (tl.load(at + 2 * F, m, other=0.0) - mean) * rstd * sum_gn) * rstd
    at = rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + at, m, F)
    g0, g1, g2, g3 = 6.0 * x0 * gi, 4.0 * x1 * ga, 4.0 * x2 * ga, 4.0 * x3 * ga
    g4, g7 = (4.0 * x4 + 2.0 * x7) * gs, (4.0 * x7 + 2.0 * x4) * gs
    g5, g6, g8 = 4.0 * x5 * gs, 4.0 * x6 * gs, 4.0 * x8 * gs
    store9(g_out + at, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    q = tl.load(charge_factor + rows, ok, other=1.0)[:, None]
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(d + at, m, F)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = add_square_adjoint(
        q, x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    store9(dd_out + at, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
