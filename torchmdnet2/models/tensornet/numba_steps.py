"""The kernels of TensorNet on the CPU, compiled by numba for a number of channels: forward and hand-written backward.

Threads share the atoms, ROWS at a time. A kernel ends where atoms need results of their neighbors. Each atom writes its
own rows, and sums always have the same order: results do not depend on the number of threads.

Shapes: N atoms (fields padded to a multiple of ROWS), E edges, F channels, H = F/2. Fields are [N, 9F] float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...kernels.compiling_cpu import kernel, kernel_family
from .numba_kernels import (
    ONE,
    ROWS,
    add,
    ascend,
    dense,
    descend,
    edge_gradients,
    embed,
    gather,
    gather_adjoint,
    layer_norm,
    layer_norm_adjoint,
    load9,
    log_norm,
    log_norm_adjoint,
    mix,
    norm_gradient,
    normalise_adjoint,
    part_norms,
    place_edges,
    row_force,
    scale_parts,
    sigmoid,
    silu,
    silu_slope,
    squared_norm,
    store9,
    store9_scaled,
)

__all__ = ["Kernels", "forces", "kernels"]


ZERO = np.float32(0)


class Kernels(NamedTuple):
    """In the order of a step; `message_backward` follows the layers backwards."""

    embedding: Callable
    interaction: Callable
    readout: Callable
    readout_backward: Callable
    message_backward: Callable
    embedding_backward: Callable


@kernel_family
def kernels(F: int, o3: bool, log: bool) -> Kernels:
    """Kernels for F channels, for O(3) or SO(3), with norms that are logarithms or layer norms.

    Compiled on first use, and kept in numba's cache on disk.
    """
    H = F // 2

    @kernel
    def embedding(
        begin, stop,
        n, row_ptr, sender, vec, z, knots, decay, scale, table, self_filter, z_receiver, z_sender,
        gamma, beta, eps, w1, b1, w2, b2, w_mix, w_in, knot, offset, unit, length, x0, hidden, gate, mixed, x, inverse,
        y,
    ):  # fmt: skip
        """X⁰ from the edges, its gate, X = gate ⊙ mix(X⁰), X/(‖X‖²+1), and Y of the first layer."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            norm, normed = np.empty((ROWS, F), np.float32), np.empty((ROWS, F), np.float32)
            active, opened = np.empty((ROWS, 2 * F), np.float32), np.empty((ROWS, 3 * F), np.float32)
            for r in range(ROWS):
                i = first + r
                row, out = x0[i], norm[r]
                z_here, z_there = z_receiver[z[i]], z_sender[z[i]]
                row[:] = ZERO
                if i < n:
                    start, end = row_ptr[i], row_ptr[i + 1]
                    place_edges(start, end, vec, knots, decay, scale, knot, offset, unit, length)
                    embed(start, end, sender, z, knot, offset, unit, table, z_here, z_sender, row, F)
                for c in range(F):
                    row[c] += self_filter[c] * (z_here[c] + z_there[c])
                    out[c] = squared_norm(load9(row, c, F))
                if log:
                    log_norm(out, gamma, beta, normed[r], F)
                else:
                    layer_norm(out, gamma, beta, eps, normed[r], F)
            dense(normed, 0, w1, b1, hidden, first, F, 2 * F)
            for r in range(ROWS):
                silu(hidden[first + r], active[r], 2 * F)
            dense(active, 0, w2, b2, gate, first, 2 * F, 3 * F)
            mix(x0, first, w_mix, mixed, first, F)
            for r in range(ROWS):
                i = first + r
                out, row, x_row, f_row = opened[r], mixed[i], x[i], inverse[i]
                silu(gate[i], out, 3 * F)
                for c in range(F):
                    x9 = scale_parts(out[c], out[c + F], out[c + 2 * F], load9(row, c, F))
                    f = ONE / (squared_norm(x9) + ONE)
                    f_row[c] = f
                    store9_scaled(x_row, c, F, x9, f)
            mix(x, first, w_in, y, first, F)

    @kernel
    def interaction(
        begin, stop,
        n, row_ptr, sender, knot, offset, table, self_filter, charge_factor, w_out, w_next, last,
        x, y, m, d, x_next, inverse_next, y_next,
    ):  # fmt: skip
        """M, P, D, X' = X + D + q D²; then X'/(‖X'‖²+1) and Y of the next layer, or X' itself after the last."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            for r in range(ROWS):
                i = first + r
                m_row, y_row = m[i], y[i]
                for c in range(F):
                    y9 = load9(y_row, c, F)
                    store9(m_row, c, F, scale_parts(self_filter[c], self_filter[c + F], self_filter[c + 2 * F], y9))
                if i < n:
                    gather(row_ptr[i], row_ptr[i + 1], sender, knot, offset, table, y, m_row, F)
            ascend(first, y, m, x, charge_factor, w_out, w_next, last, d, x_next, inverse_next, y_next, F, o3)

    @kernel
    def readout(begin, stop, gamma, beta, eps, w1, b1, w2, b2, w3, b3, x, hidden, out):
        """What the K heads give: out [N, K]; w2 [K, F, H], w3 [K, H]. The features are silu(hidden)."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            normed, active = np.empty((ROWS, 3 * F), np.float32), np.empty((ROWS, F), np.float32)
            half, s = np.empty((ROWS, H), np.float32), np.empty(H, np.float32)
            norms = np.empty(3 * F, np.float32)
            for r in range(ROWS):
                row = x[first + r]
                for c in range(F):
                    norms[c], norms[c + F], norms[c + 2 * F] = part_norms(load9(row, c, F))
                if log:
                    log_norm(norms, gamma, beta, normed[r], 3 * F)
                else:
                    layer_norm(norms, gamma, beta, eps, normed[r], 3 * F)
            dense(normed, 0, w1, b1, hidden, first, 3 * F, F)
            for r in range(ROWS):
                silu(hidden[first + r], active[r], F)
            for k in range(out.shape[1]):
                dense(active, 0, w2[k], b2[k], half, 0, F, H)
                for r in range(ROWS):
                    silu(half[r], s, H)
                    total = b3[k]
                    for c in range(H):
                        total += s[c] * w3[k, c]
                    out[first + r, k] = total

    @kernel
    def readout_backward(
        begin, stop,
        gamma, eps, w2, b2, w3, w1t, w2t, linear, w_out_t, descends, charge_factor, x, d, y, m, hidden, slope, g, dm, dy
    ):  # fmt: skip
        """From slope [N, K], dE/d(out) of `readout`: g in X; if it `descends`, also dM and the product's part of dY.

        linear [F]: the slope of the linear read-out, in the isotropic part of X.
        """
        for chunk in range(begin, stop):
            first = chunk * ROWS
            active, total = np.empty((ROWS, F), np.float32), np.zeros((ROWS, F), np.float32)
            half, dhalf = np.empty((ROWS, H), np.float32), np.empty((ROWS, H), np.float32)
            share, dnorm = np.empty((ROWS, F), np.float32), np.empty((ROWS, 3 * F), np.float32)
            norms, none = np.empty(3 * F, np.float32), np.zeros(3 * F, np.float32)
            for r in range(ROWS):
                silu(hidden[first + r], active[r], F)
            for k in range(slope.shape[1]):
                dense(active, 0, w2[k], b2[k], half, 0, F, H)
                for r in range(ROWS):
                    out, w, f = dhalf[r], w3[k], slope[first + r, k]
                    for c in range(H):
                        out[c] = f * w[c]
                    silu_slope(half[r], out, H)
                dense(dhalf, 0, w2t[k], none, share, 0, H, F)
                for r in range(ROWS):
                    row, out = share[r], total[r]
                    for c in range(F):
                        out[c] += row[c]
            for r in range(ROWS):
                silu_slope(hidden[first + r], total[r], F)
            dense(total, 0, w1t, none, dnorm, 0, F, 3 * F)
            for r in range(ROWS):
                f, row, out = dnorm[r], x[first + r], g[first + r]
                for c in range(F):
                    norms[c], norms[c + F], norms[c + 2 * F] = part_norms(load9(row, c, F))
                if log:
                    log_norm_adjoint(norms, gamma, f, 3 * F)
                else:
                    layer_norm_adjoint(norms, gamma, eps, f, 3 * F)
                for c in range(F):
                    store9(out, c, F, norm_gradient(load9(row, c, F), f[c], f[c + F], f[c + 2 * F]))
                for c in range(F):
                    out[c] += linear[c]
            if descends:
                descend(first, g, d, w_out_t, y, m, charge_factor, dm, dy, F, o3)

    @kernel
    def message_backward(
        begin, stop,
        n, row_ptr, sender, knot, offset, table, self_filter, charge_factor, w_in_t, linear, w_out_t, is_first,
        x, inverse, y, dm, dy, slope, g, d_before, y_before, m_before, dm_before,
    ):  # fmt: skip
        """dY from the dM around, then g: the gradient of X before this layer; dM and dY of the layer before."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            dx = np.empty((ROWS, 9 * F), np.float32)
            for r in range(ROWS):
                i = first + r
                dm_row, dy_row = dm[i], dy[i]
                for c in range(F):
                    own = scale_parts(self_filter[c], self_filter[c + F], self_filter[c + 2 * F], load9(dm_row, c, F))
                    store9(dy_row, c, F, add(own, load9(dy_row, c, F)))
                if i < n:
                    gather_adjoint(row_ptr[i], row_ptr[i + 1], sender, knot, offset, table, y[i], dm, dy_row, slope, F)
            mix(dy, first, w_in_t, dx, 0, F)
            for r in range(ROWS):
                i = first + r
                g_row, x_row, f_row, dx_row = g[i], x[i], inverse[i], dx[r]
                for c in range(F):
                    g9 = add(load9(dx_row, c, F), load9(g_row, c, F))
                    store9(g_row, c, F, normalise_adjoint(f_row[c], load9(x_row, c, F), g9))
                for c in range(F):
                    g_row[c] += linear[c]
            if not is_first:
                descend(first, g, d_before, w_out_t, y_before, m_before, charge_factor, dm_before, dy, F, o3)

    @kernel
    def embedding_backward(
        begin, stop,
        n, row_ptr, sender, z, knot, offset, unit, length, table, z_receiver, z_sender, gamma, eps, w1t, w2t, w_mix_t,
        x0, hidden, gate, mixed, g, slope, gradient,
    ):  # fmt: skip
        """From g, the gradient of gate ⊙ mix(X⁰): dE/dvec of each directed edge, the messages' slopes included."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            dgate, dhidden = np.empty((ROWS, 3 * F), np.float32), np.empty((ROWS, 2 * F), np.float32)
            dnorm, dx = np.empty((ROWS, F), np.float32), np.empty((ROWS, 9 * F), np.float32)
            norm, s, none = np.empty(F, np.float32), np.empty(3 * F, np.float32), np.zeros(3 * F, np.float32)
            for r in range(ROWS):
                h, g_row, row, out = gate[first + r], g[first + r], mixed[first + r], dgate[r]
                sigmoid(h, s, 3 * F)
                for c in range(F):
                    g9, x9 = load9(g_row, c, F), load9(row, c, F)
                    out[c] = g9[0] * x9[0]
                    out[c + F] = g9[1] * x9[1] + g9[2] * x9[2] + g9[3] * x9[3]
                    out[c + 2 * F] = g9[4] * x9[4] + g9[5] * x9[5] + g9[6] * x9[6] + g9[7] * x9[7] + g9[8] * x9[8]
                for c in range(F):
                    gates = h[c] * s[c], h[c + F] * s[c + F], h[c + 2 * F] * s[c + 2 * F]
                    store9(g_row, c, F, scale_parts(gates[0], gates[1], gates[2], load9(g_row, c, F)))
                for c in range(3 * F):
                    out[c] *= s[c] * (ONE + h[c] * (ONE - s[c]))
            dense(dgate, 0, w2t, none, dhidden, 0, 3 * F, 2 * F)
            for r in range(ROWS):
                silu_slope(hidden[first + r], dhidden[r], 2 * F)
            dense(dhidden, 0, w1t, none, dnorm, 0, 2 * F, F)
            mix(g, first, w_mix_t, dx, 0, F)
            for r in range(ROWS):
                i = first + r
                row, f, dx_row = x0[i], dnorm[r], dx[r]
                for c in range(F):
                    norm[c] = squared_norm(load9(row, c, F))
                if log:
                    log_norm_adjoint(norm, gamma, f, F)
                else:
                    layer_norm_adjoint(norm, gamma, eps, f, F)
                for c in range(F):
                    x9 = norm_gradient(load9(row, c, F), f[c], f[c], f[c])
                    store9(dx_row, c, F, add(load9(dx_row, c, F), x9))
                if i < n:
                    edge_gradients(
                        row_ptr[i], row_ptr[i + 1], sender, z, knot, offset, unit, length, table, z_receiver[z[i]],
                        z_sender, dx_row, slope, gradient, F,
                    )  # fmt: skip

    return Kernels(embedding, interaction, readout, readout_backward, message_backward, embedding_backward)


@kernel
def forces(begin, stop, row_ptr, sender, vec, gradient, force, virial):
    """Forces [N, 3] and row virials [N, 9] from dE/dvec of the directed edges [E, 3]."""
    for i in range(begin, stop):
        row_force(i, row_ptr, sender, vec, gradient, force[i], virial[i])
