"""The edges of one atom, on the CPU: numba functions, inlined into the kernels of steps.py.

Each function reads one CSR row and adds to the atom's own row. Threads share nothing, and sums always have the same
order. Filters are cubic polynomials from the tables [knots, 12F] (see triton/message.py). Inner loops run over
contiguous channels, so that the compiler vectorises them.

Shapes: F channels (a constant when compiled), E edges. Rows of fields are [9F], all float32.
"""

from __future__ import annotations

import numpy as np

from .algebra import ONE, THIRD, THREE, TWO, call, inline

__all__ = ["edge_gradients", "embed", "gather", "gather_adjoint", "place_edges", "row_force"]

ZERO = np.float32(0)


@inline
def cubic(p, part, t, c, F):
    """Value of a radial filter of channel c: p [12F] is the segment, t the distance from its knot."""
    c += part * F
    return p[c] + t * (p[c + 3 * F] + t * (p[c + 6 * F] + t * p[c + 9 * F]))


@inline
def cubic_slope(p, part, t, c, F):
    """Derivative of a radial filter by the distance."""
    c += part * F
    return p[c + 3 * F] + t * (TWO * p[c + 6 * F] + t * (THREE * p[c + 9 * F]))


@call
def place_edges(start, end, vec, knots, decay, scale, knot, offset, unit, inverse):
    """Knot below the length of each edge and the distance from it in Å, unit vector and 1/length (0 at length 0)."""
    last = knots.shape[0] - 2
    for e in range(start, end):
        x, y, z = vec[e, 0], vec[e, 1], vec[e, 2]
        d = np.sqrt(x * x + y * y + z * z)
        k = min(max(int(scale * (ONE - np.exp(-decay * d))), 0), last)
        knot[e], offset[e] = k, d - knots[k]
        inverse[e] = ONE / d if d > ZERO else ZERO
        unit[e, 0], unit[e, 1], unit[e, 2] = x * inverse[e], y * inverse[e], z * inverse[e]


@inline
def embed_edge(x, p, t, z_here, z_there, ux, uy, uz, F):
    third = (ux * ux + uy * uy + uz * uz) * THIRD
    xx, xy, xz, yy, yz = ux * ux - third, ux * uy, ux * uz, uy * uy - third, uy * uz
    for c in range(F):
        zz = z_here[c] + z_there[c]
        f1, f2, f3 = zz * cubic(p, 0, t, c, F), zz * cubic(p, 1, t, c, F), zz * cubic(p, 2, t, c, F)
        x[c] += f1
        x[c + F] += uz * f2
        x[c + 2 * F] -= uy * f2
        x[c + 3 * F] += ux * f2
        x[c + 4 * F] += xx * f3
        x[c + 5 * F] += xy * f3
        x[c + 6 * F] += xz * f3
        x[c + 7 * F] += yy * f3
        x[c + 8 * F] += yz * f3


@inline
def embed(start, end, sender, z, knot, offset, unit, table, z_here, z_sender, x, F):
    """x += Σ_j z_ij [f1, f2 skew(u), f3 (uuᵀ − 1/3)]; the sign of skew is in the table."""
    for e in range(start, end):
        z_there = z_sender[z[sender[e]]]
        embed_edge(x, table[knot[e]], offset[e], z_here, z_there, unit[e, 0], unit[e, 1], unit[e, 2], F)


@inline
def gather_edge(m, s, p, t, F):
    for c in range(F):
        g = cubic(p, 0, t, c, F)
        m[c] += g * s[c]
        g = cubic(p, 1, t, c, F)
        m[c + F] += g * s[c + F]
        m[c + 2 * F] += g * s[c + 2 * F]
        m[c + 3 * F] += g * s[c + 3 * F]
        g = cubic(p, 2, t, c, F)
        m[c + 4 * F] += g * s[c + 4 * F]
        m[c + 5 * F] += g * s[c + 5 * F]
        m[c + 6 * F] += g * s[c + 6 * F]
        m[c + 7 * F] += g * s[c + 7 * F]
        m[c + 8 * F] += g * s[c + 8 * F]


@inline
def gather(start, end, sender, knot, offset, table, y, m, F):
    """m += Σ_j g(d_ij) Y_j."""
    for e in range(start, end):
        gather_edge(m, y[sender[e]], table[knot[e]], offset[e], F)


@inline
def gather_adjoint_edge(a, own, s, p, t, F):
    total = ZERO
    for c in range(F):
        x = s[c]
        a[c] += cubic(p, 0, t, c, F) * x
        total += cubic_slope(p, 0, t, c, F) * (x * own[c])
        g = cubic(p, 1, t, c, F)
        x1, x2, x3 = s[c + F], s[c + 2 * F], s[c + 3 * F]
        a[c + F] += g * x1
        a[c + 2 * F] += g * x2
        a[c + 3 * F] += g * x3
        dot = x1 * own[c + F] + x2 * own[c + 2 * F] + x3 * own[c + 3 * F]
        total += cubic_slope(p, 1, t, c, F) * dot
        g = cubic(p, 2, t, c, F)
        x4, x5, x6, x7, x8 = s[c + 4 * F], s[c + 5 * F], s[c + 6 * F], s[c + 7 * F], s[c + 8 * F]
        a[c + 4 * F] += g * x4
        a[c + 5 * F] += g * x5
        a[c + 6 * F] += g * x6
        a[c + 7 * F] += g * x7
        a[c + 8 * F] += g * x8
        dot = x4 * own[c + 4 * F] + x5 * own[c + 5 * F] + x6 * own[c + 6 * F] + x7 * own[c + 7 * F]
        total += cubic_slope(p, 2, t, c, F) * (dot + x8 * own[c + 8 * F])
    return total


@inline
def gather_adjoint(start, end, sender, knot, offset, table, y, dm, dy, slope, F):
    """dy += Σ_j g(d_ij) dM_j, and slope[e] += Σ_c g'(d_ij) ⟨dM_j, Y_i⟩, y being the row Y_i.

    The list holds both directions of each pair, so that the gather over senders is also the transposed scatter; the
    slope of an edge is the share of its reverse in the pair's, and only their sum counts.
    """
    for e in range(start, end):
        slope[e] += gather_adjoint_edge(dy, y, dm[sender[e]], table[knot[e]], offset[e], F)


@inline
def embed_adjoint_edge(g, p, t, z_here, z_there, ux, uy, uz, F):
    """dE/d|vec| and dE/du of the embedding; the part of dE/du along u is without meaning."""
    third = (ux * ux + uy * uy + uz * uz) * THIRD
    xx, xy, xz, yy, yz = ux * ux - third, ux * uy, ux * uz, uy * uy - third, uy * uz
    radial, turn_x, turn_y, turn_z = ZERO, ZERO, ZERO, ZERO
    for c in range(F):
        zz = z_here[c] + z_there[c]
        g1, g2, g3, g4 = g[c + F], g[c + 2 * F], g[c + 3 * F], g[c + 4 * F]
        g5, g6, g7, g8 = g[c + 5 * F], g[c + 6 * F], g[c + 7 * F], g[c + 8 * F]
        along = cubic_slope(p, 0, t, c, F) * g[c]
        along += cubic_slope(p, 1, t, c, F) * (uz * g1 - uy * g2 + ux * g3)
        along += cubic_slope(p, 2, t, c, F) * (xx * g4 + xy * g5 + xz * g6 + yy * g7 + yz * g8)
        radial += zz * along
        f2, f3 = zz * cubic(p, 1, t, c, F), zz * cubic(p, 2, t, c, F)
        turn_x += f2 * g3 + f3 * (TWO * ux * g4 + uy * g5 + uz * g6)
        turn_y += f3 * (ux * g5 + TWO * uy * g7 + uz * g8) - f2 * g2
        turn_z += f2 * g1 + f3 * (ux * g6 + uy * g8)
    return radial, turn_x, turn_y, turn_z


@inline
def edge_gradients(
    start, end, sender, z, knot, offset, unit, inverse, table, z_here, z_sender, dx, slope, gradient, F
):  # fmt: skip
    """gradient[e] = dE/dvec of the directed edges of a row, from its dX⁰ [9F] and the slopes of the messages."""
    for e in range(start, end):
        ux, uy, uz = unit[e, 0], unit[e, 1], unit[e, 2]
        along, tx, ty, tz = embed_adjoint_edge(
            dx, table[knot[e]], offset[e], z_here, z_sender[z[sender[e]]], ux, uy, uz, F
        )
        along += slope[e]
        dot = tx * ux + ty * uy + tz * uz
        gradient[e, 0] = along * ux + (tx - dot * ux) * inverse[e]
        gradient[e, 1] = along * uy + (ty - dot * uy) * inverse[e]
        gradient[e, 2] = along * uz + (tz - dot * uz) * inverse[e]


@call
def lower_bound(values, low, high, value):
    """First index in [low, high) of ascending values that is ≥ value."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@call
def row_force(i, row_ptr, sender, vec, gradient, force, virial):
    """force = Σ_e (G_e − G_reverse(e)) and virial = Σ_e vec ⊗ G_e [9] of atom i.

    Rows are sorted by sender and shift. The edges between i and j are listed in row i by rising shift, in row j by
    the same shifts negated: the reverse of the r-th of m is the (m − 1 − r)-th.
    """
    force[:] = ZERO
    virial[:] = ZERO
    first, end = row_ptr[i], row_ptr[i + 1]
    while first < end:
        j, beyond = sender[first], first + 1
        while beyond < end and sender[beyond] == j:
            beyond += 1
        reverse = lower_bound(sender, row_ptr[j], row_ptr[j + 1], i) + (beyond - 1 - first)
        for e in range(first, beyond):
            for a in range(3):
                force[a] += gradient[e, a] - gradient[reverse, a]
                for b in range(3):
                    virial[3 * a + b] += vec[e, a] * gradient[e, b]
            reverse -= 1
        first = beyond
