"""Operations of single atoms on the CPU: layer norms, activations, products of tensors and their gradients.

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
from .products import ROWS, mix

__all__ = [
    "ascend",
    "descend",
    "layer_norm",
    "layer_norm_adjoint",
    "log_norm",
    "log_norm_adjoint",
    "sigmoid",
    "silu",
    "silu_slope",
]

ZERO = np.float32(0)


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
