"""The filters of TensorNet2 on the CPU, for SLOTS edges at a time: numba functions, called by the kernels of steps.py.

A filter is a network F → 2F → 3F on every directed edge. Its first layer is linear in the radial basis and the charges:
a cubic from a table of the distance, and one row of numbers per atom for the receiver and one for the sender.

Shapes: F channels (a constant when compiled), C charge channels. Blocks are [SLOTS, …] float32; `h` are what the
activations act on.
"""

from __future__ import annotations

import numpy as np

from ...tensornet.numba.algebra import ONE, THREE, call, inline
from ...tensornet.numba.node import sigmoid, silu, silu_slope
from ...tensornet.numba.products import ROWS, dense

__all__ = [
    "SLOTS",
    "add_message",
    "first_layer",
    "first_slope",
    "gradient_layers",
    "layers",
    "message_adjoint",
    "whole",
]

SLOTS = 16
"""Edges at a time: weights are read once for all of them, and results stay in the cache."""

ZERO = np.float32(0)


@call
def first_layer(p, t, receiver, sender, h, F):
    """h [F] of one edge: the cubic p [4F] at t, and the charges' share [2F] of receiver (first F) and sender."""
    for c in range(F):
        h[c] = p[c] + t * (p[c + F] + t * (p[c + 2 * F] + t * p[c + 3 * F])) + (receiver[c] + sender[c + F])


@inline
def whole(slots):
    """The number of rows that products take for so many edges; what those beyond them hold does not matter."""
    return -(-slots // ROWS) * ROWS


@call
def layers(slots, h1, active1, w2, b2, h2, active2, w3, b3, h3, F):
    """h2 and h3 from h1."""
    for s in range(slots):
        silu(h1[s], active1[s], F)
    dense(active1, 0, w2, b2, h2, 0, F, 2 * F, whole(slots))
    for s in range(slots):
        silu(h2[s], active2[s], 2 * F)
    dense(active2, 0, w3, b3, h3, 0, 2 * F, 3 * F, whole(slots))


@call
def gradient_layers(slots, g3, w3t, h2, g2, w2t, h1, g1, none, F):
    """g1 [slots, F], the gradient of h1, from g3, that of h3."""
    dense(g3, 0, w3t, none, g2, 0, 3 * F, 2 * F, whole(slots))
    for s in range(slots):
        silu_slope(h2[s], g2[s], 2 * F)
    dense(g2, 0, w2t, none, g1, 0, 2 * F, F, whole(slots))
    for s in range(slots):
        silu_slope(h1[s], g1[s], F)


@call
def add_message(envelope, h, g, y, m, F):
    """m [9F] += envelope · silu(h) ⊙ y; g [3F] is scratch."""
    silu(h, g, 3 * F)
    for c in range(F):
        i, a, s = envelope * g[c], envelope * g[c + F], envelope * g[c + 2 * F]
        m[c] += i * y[c]
        m[c + F] += a * y[c + F]
        m[c + 2 * F] += a * y[c + 2 * F]
        m[c + 3 * F] += a * y[c + 3 * F]
        m[c + 4 * F] += s * y[c + 4 * F]
        m[c + 5 * F] += s * y[c + 5 * F]
        m[c + 6 * F] += s * y[c + 6 * F]
        m[c + 7 * F] += s * y[c + 7 * F]
        m[c + 8 * F] += s * y[c + 8 * F]


@call
def message_adjoint(envelope, envelope_slope, h, g, dm, y, dy, F):
    """Backwards from dm: dy [9F] += filter ⊙ dm; g [3F] the gradient of h. Returns the slope by the envelope."""
    along = ZERO
    sigmoid(h, g, 3 * F)
    for c in range(F):
        si, sa, ss = g[c], g[c + F], g[c + 2 * F]
        hi, ha, hs = h[c], h[c + F], h[c + 2 * F]
        i, a, s = envelope * (si * hi), envelope * (sa * ha), envelope * (ss * hs)
        m0, m1, m2, m3, m4 = dm[c], dm[c + F], dm[c + 2 * F], dm[c + 3 * F], dm[c + 4 * F]
        m5, m6, m7, m8 = dm[c + 5 * F], dm[c + 6 * F], dm[c + 7 * F], dm[c + 8 * F]
        dy[c] += i * m0
        dy[c + F] += a * m1
        dy[c + 2 * F] += a * m2
        dy[c + 3 * F] += a * m3
        dy[c + 4 * F] += s * m4
        dy[c + 5 * F] += s * m5
        dy[c + 6 * F] += s * m6
        dy[c + 7 * F] += s * m7
        dy[c + 8 * F] += s * m8
        by_i = m0 * y[c]
        by_a = m1 * y[c + F] + m2 * y[c + 2 * F] + m3 * y[c + 3 * F]
        by_s = m4 * y[c + 4 * F] + m5 * y[c + 5 * F] + m6 * y[c + 6 * F] + m7 * y[c + 7 * F] + m8 * y[c + 8 * F]
        along += si * hi * by_i + sa * ha * by_a + ss * hs * by_s
        g[c] = envelope * by_i * (si * (ONE + hi * (ONE - si)))
        g[c + F] = envelope * by_a * (sa * (ONE + ha * (ONE - sa)))
        g[c + 2 * F] = envelope * by_s * (ss * (ONE + hs * (ONE - ss)))
    return envelope_slope * along


@call
def first_slope(p, t, g, F):
    """Derivative by the distance through the cubic, g [F] being the gradient of h1."""
    total = ZERO
    for c in range(F):
        slope = p[c + F] + t * ((p[c + 2 * F] + p[c + 2 * F]) + t * (THREE * p[c + 3 * F]))
        total += g[c] * slope
    return total
