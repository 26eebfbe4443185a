"""Operations of single atoms on the CPU: channel mixing, layer norms, activations, products and their gradients.

These are numba functions, inlined into the kernels of steps.py. They process ROWS atoms at a time: the weights are read
once for all of them, and results are still in the cache for the next function.

Shapes: F channels (a constant when compiled). Fields are [N, 9F], float32, N a multiple of ROWS.
"""

from __future__ import annotations

import numpy as np

from .algebra import (
    ONE,
    add,
    add_square_adjoint,
    call,
    inline,
    load9,
    normalise_adjoint,
    product,
    product_adjoint,
    scale,
    square,
    squared_norm,
    store9,
    store9_scaled,
)

__all__ = [
    "ROWS",
    "ascend",
    "dense",
    "descend",
    "layer_norm",
    "layer_norm_adjoint",
    "log_norm",
    "log_norm_adjoint",
    "mix",
    "sigmoid",
    "silu",
    "silu_slope",
]

ROWS = 4
"""Atoms at a time."""

ZERO = np.float32(0)


@inline
def multiply(p, q, a, b, w, first, low, high, K, N):
    """a += p @ W and b += q @ W for blocks low … high − 1: p, q are rows of blocks of K numbers, a, b of N.

    W [K, N] are the rows of w from `first` on. Four of them at a time: eight products for two numbers written.
    """
    for k in range(0, K, 4):
        w0, w1, w2, w3 = w[first + k], w[first + k + 1], w[first + k + 2], w[first + k + 3]
        for block in range(low, high):
            i, o = block * K + k, block * N
            p0, p1, p2, p3 = p[i], p[i + 1], p[i + 2], p[i + 3]
            q0, q1, q2, q3 = q[i], q[i + 1], q[i + 2], q[i + 3]
            for c in range(N):
                a[o + c] += p0 * w0[c] + p1 * w1[c] + p2 * w2[c] + p3 * w3[c]
                b[o + c] += q0 * w0[c] + q1 * w1[c] + q2 * w2[c] + q3 * w3[c]


@call
def mix(x, at_x, w, y, at_y, F):
    """Y = mix(X) of ROWS atoms from row at_x of x and at_y of y; w [3F, F] are the maps of I, A and S."""
    for r in range(0, ROWS, 2):
        p, q, a, b = x[at_x + r], x[at_x + r + 1], y[at_y + r], y[at_y + r + 1]
        a[:] = ZERO
        b[:] = ZERO
        multiply(p, q, a, b, w, 0, 0, 1, F, F)
        multiply(p, q, a, b, w, F, 1, 4, F, F)
        multiply(p, q, a, b, w, 2 * F, 4, 9, F, F)


@call
def dense(x, at_x, w, bias, y, at_y, K, N, rows=ROWS):
    """Y = X @ W + bias of an even number of rows; W [K, N], K a multiple of 4.

    Four rows of W at a time, for all rows of X: they are read once from the caches beyond the first.
    """
    for r in range(rows):
        a = y[at_y + r]
        for c in range(N):
            a[c] = bias[c]
    for k in range(0, K, 4):
        w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
        for r in range(0, rows, 2):
            p, q, a, b = x[at_x + r], x[at_x + r + 1], y[at_y + r], y[at_y + r + 1]
            p0, p1, p2, p3 = p[k], p[k + 1], p[k + 2], p[k + 3]
            q0, q1, q2, q3 = q[k], q[k + 1], q[k + 2], q[k + 3]
            for c in range(N):
                a[c] += p0 * w0[c] + p1 * w1[c] + p2 * w2[c] + p3 * w3[c]
                b[c] += q0 * w0[c] + q1 * w1[c] + q2 * w2[c] + q3 * w3[c]


@inline
def exp(x):
    """exp(x) in float32, so that it is vectorised: 2^k times the series of the rest, |rest| ≤ ln 2 / 2."""
    x = min(max(x, np.float32(-87)), np.float32(87))
    k = np.int32(np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5)))
    whole = np.float32(k)
    # ln 2 in two parts, the first of few digits: its product with k is exact
    r = (x - whole * np.float32(0.693359375)) - whole * np.float32(-2.12194440054690583e-4)
    series = np.float32(1 / 720) + r * np.float32(1 / 5040)
    series = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * series)
    series = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * series)
    return (ONE + r * (ONE + r * series)) * np.int32((k + np.int32(127)) << np.int32(23)).view(np.float32)


@call
def sigmoid(x, out, width):
    """out = 1/(1 + exp(−x)) of a row."""
    for c in range(width):
        out[c] = ONE / (ONE + exp(-x[c]))


@call
def silu(x, out, width):
    """out = x/(1 + exp(−x)) of a row."""
    for c in range(width):
        out[c] = x[c] / (ONE + exp(-x[c]))


@call
def silu_slope(x, out, width):
    """out *= d silu(x)/dx of a row."""
    for c in range(width):
        s = ONE / (ONE + exp(-x[c]))
        out[c] *= s * (ONE + x[c] * (ONE - s))


@inline
def statistics(x, width, eps):
    """Mean and 1/σ of a row."""
    total = ZERO
    for c in range(width):
        total += x[c]
    mean = total / np.float32(width)
    total = ZERO
    for c in range(width):
        total += (x[c] - mean) * (x[c] - mean)
    return mean, ONE / np.sqrt(total / np.float32(width) + eps)


@call
def layer_norm(x, gamma, beta, eps, out, width):
    """out = γ (x − mean)/σ + β of a row."""
    mean, rstd = statistics(x, width, eps)
    for c in range(width):
        out[c] = (x[c] - mean) * rstd * gamma[c] + beta[c]


@call
def layer_norm_adjoint(x, gamma, eps, g, width):
    """Gradient g of a row's layer norm → that of the row x, in place."""
    mean, rstd = statistics(x, width, eps)
    sum_g, sum_gn = ZERO, ZERO
    for c in range(width):
        f = g[c] * gamma[c]
        sum_g += f
        sum_gn += f * (x[c] - mean)
    sum_g /= np.float32(width)
    sum_gn *= rstd * rstd / np.float32(width)
    for c in range(width):
        g[c] = rstd * (g[c] * gamma[c] - sum_g - (x[c] - mean) * sum_gn)


@call
def log_norm(x, gamma, beta, out, width):
    """out = γ log(1 + x) + β of a row."""
    for c in range(width):
        out[c] = np.log1p(x[c]) * gamma[c] + beta[c]


@call
def log_norm_adjoint(x, gamma, g, width):
    """Gradient g of a row's `log_norm` → that of the row x, in place."""
    for c in range(width):
        g[c] *= gamma[c] / (ONE + x[c])


@inline
def ascend(first, y, m, x, charge_factor, w_out, w_next, last, d, x_next, inverse_next, y_next, F, o3):
    """The products of ROWS atoms: P, D and X' = X + D + q D²; then X'/(‖X'‖²+1) and Y of the next layer, or, after
    the last one, X' itself."""
    p = np.empty((ROWS, 9 * F), np.float32)
    for r in range(ROWS):
        y_row, m_row, p_row, q = y[first + r], m[first + r], p[r], charge_factor[first + r]
        for c in range(F):
            p9 = product(q, load9(y_row, c, F), load9(m_row, c, F), o3)
            store9_scaled(p_row, c, F, p9, ONE / (squared_norm(p9) + ONE))
    mix(p, 0, w_out, d, first, F)
    for r in range(ROWS):
        i = first + r
        d_row, x_row, out, f_row, q = d[i], x[i], x_next[i], inverse_next[i], charge_factor[i]
        for c in range(F):
            d9 = load9(d_row, c, F)
            x9 = add(add(load9(x_row, c, F), d9), square(q, d9))
            f = ONE if last else ONE / (squared_norm(x9) + ONE)
            f_row[c] = f
            store9_scaled(out, c, F, x9, f)
    if not last:
        mix(x_next, first, w_next, y_next, first, F)


@inline
def descend(first, g, d, w, y, m, charge_factor, dm, dy, F, o3):
    """From the gradient g of X + D + q D² (ROWS atoms from row `first` on): those of M and, by the product, of Y.

    D = mix(P/(‖P‖²+1)) with w the transposed maps; P is recomputed from Y and M.
    """
    dd, dp = np.empty((ROWS, 9 * F), np.float32), np.empty((ROWS, 9 * F), np.float32)
    for r in range(ROWS):
        q, g_row, d_row, out = charge_factor[first + r], g[first + r], d[first + r], dd[r]
        for c in range(F):
            store9(out, c, F, add_square_adjoint(q, load9(d_row, c, F), load9(g_row, c, F)))
    mix(dd, 0, w, dp, 0, F)
    for r in range(ROWS):
        q, y_row, m_row, dp_row = charge_factor[first + r], y[first + r], m[first + r], dp[r]
        dy_row, dm_row = dy[first + r], dm[first + r]
        for c in range(F):
            y9, m9 = load9(y_row, c, F), load9(m_row, c, F)
            p9 = product(q, y9, m9, o3)
            f = ONE / (squared_norm(p9) + ONE)
            g9 = normalise_adjoint(f, scale(f, p9), load9(dp_row, c, F))
            u9, v9 = product_adjoint(q, y9, m9, g9, o3)
            store9(dy_row, c, F, u9)
            store9(dm_row, c, F, v9)
