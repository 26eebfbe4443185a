"""Tensor algebra of TensorNet on nine components for the CPU: numba functions, inlined into the kernels.

They are the functions of triton_algebra.py on scalars. A 3×3 tensor is passed as a tuple of its nine components
(model.py); the compiler keeps them in registers and processes several channels at once. Constants are
float32, since numba would compute in float64 otherwise. Gradients are by components, as explained there.
"""

from __future__ import annotations

import numpy as np

from ...kernels.numba_products import (
    LANES,
    PANELS,
    ROWS,
    VECTOR,
    add_product,
    add_products,
    call,
    inline,
    load,
    logistic,
    store,
)

__all__ = [
    "add", "add_square_adjoint", "ascend", "descend", "edge_gradients", "embed", "gather", "gather_adjoint",
    "layer_norm", "layer_norm_adjoint", "load9", "log_norm", "log_norm_adjoint", "mix", "norm_gradient",
    "normalise_adjoint", "part_norms", "place_edges", "product", "product_adjoint", "row_force", "scale",
    "scale_parts", "sigmoid", "silu", "silu_and_slope", "silu_slope", "square", "squared_norm", "store9",
    "store9_scaled",
]  # fmt: skip


ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
TWO, THREE = np.float32(2), np.float32(3)
THIRD, FOUR, SIX = np.float32(1 / 3), np.float32(4), np.float32(6)


@inline
def load9(x, c, F):
    """The nine components of channel c in a row x [9F]."""
    return (
        x[c], x[c + F], x[c + 2 * F], x[c + 3 * F], x[c + 4 * F], x[c + 5 * F], x[c + 6 * F], x[c + 7 * F], x[c + 8 * F]
    )  # fmt: skip


@inline
def store9(x, c, F, v):
    """Write the nine components of channel c."""
    x[c], x[c + F], x[c + 2 * F] = v[0], v[1], v[2]
    x[c + 3 * F], x[c + 4 * F], x[c + 5 * F] = v[3], v[4], v[5]
    x[c + 6 * F], x[c + 7 * F], x[c + 8 * F] = v[6], v[7], v[8]


@inline
def store9_scaled(x, c, F, v, f):
    """Write f times the nine components of channel c."""
    x[c], x[c + F], x[c + 2 * F] = f * v[0], f * v[1], f * v[2]
    x[c + 3 * F], x[c + 4 * F], x[c + 5 * F] = f * v[3], f * v[4], f * v[5]
    x[c + 6 * F], x[c + 7 * F], x[c + 8 * F] = f * v[6], f * v[7], f * v[8]


@inline
def compose(x):
    """Components → the nine entries of the full tensor, row by row."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    return i + s00, s01 + a01, s02 + a02, s01 - a01, i + s11, s12 + a12, s02 - a02, s12 - a12, i - s00 - s11


@inline
def compose_adjoint(t):
    """Gradient of the full tensor → gradient of its components."""
    t00, t01, t02, t10, t11, t12, t20, t21, t22 = t
    return t00 + t11 + t22, t01 - t10, t02 - t20, t12 - t21, t00 - t22, t01 + t10, t02 + t20, t11 - t22, t12 + t21


@inline
def decompose(t):
    """Full tensor → components."""
    t00, t01, t02, t10, t11, t12, t20, t21, t22 = t
    i = (t00 + t11 + t22) / THREE
    return (
        i, HALF * (t01 - t10), HALF * (t02 - t20), HALF * (t12 - t21),
        t00 - i, HALF * (t01 + t10), HALF * (t02 + t20), t11 - i, HALF * (t12 + t21),
    )  # fmt: skip


@inline
def decompose_adjoint(x):
    """Gradient of the components → gradient of the full tensor."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    third = (i - s00 - s11) / THREE
    return (
        third + s00, HALF * (s01 + a01), HALF * (s02 + a02), HALF * (s01 - a01), third + s11,
        HALF * (s12 + a12), HALF * (s02 - a02), HALF * (s12 - a12), third,
    )  # fmt: skip


@inline
def transpose(a):
    return a[0], a[3], a[6], a[1], a[4], a[7], a[2], a[5], a[8]


@inline
def matmul(a, b):
    """A B of full tensors."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = a
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = b
    return (
        a0 * b0 + a1 * b3 + a2 * b6, a0 * b1 + a1 * b4 + a2 * b7, a0 * b2 + a1 * b5 + a2 * b8,
        a3 * b0 + a4 * b3 + a5 * b6, a3 * b1 + a4 * b4 + a5 * b7, a3 * b2 + a4 * b5 + a5 * b8,
        a6 * b0 + a7 * b3 + a8 * b6, a6 * b1 + a7 * b4 + a8 * b7, a6 * b2 + a7 * b5 + a8 * b8,
    )  # fmt: skip


@inline
def add(a, b):
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7],
        a[8] + b[8],
    )  # fmt: skip


@inline
def scale(f, a):
    return f * a[0], f * a[1], f * a[2], f * a[3], f * a[4], f * a[5], f * a[6], f * a[7], f * a[8]


@inline
def scale_parts(i, a, s, x):
    """The parts I, A, S times a factor each."""
    return i * x[0], a * x[1], a * x[2], a * x[3], s * x[4], s * x[5], s * x[6], s * x[7], s * x[8]


@inline
def anticommutator(a, b):
    """A B + B A of full tensors."""
    return add(matmul(a, b), matmul(b, a))


@inline
def part_norms(x):
    """‖I‖², ‖A‖², ‖S‖² from components."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    norm_a = a01 * a01 + a02 * a02 + a12 * a12
    norm_s = s00 * s00 + s11 * s11 + s00 * s11 + s01 * s01 + s02 * s02 + s12 * s12
    return THREE * i * i, TWO * norm_a, TWO * norm_s


@inline
def squared_norm(x):
    """‖X‖² from components."""
    i, a, s = part_norms(x)
    return i + a + s


@inline
def norm_gradient(x, fi, fa, fs):
    """∂(fi ‖I‖² + fa ‖A‖² + fs ‖S‖²)/∂X by components."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    fi, fa, fs = SIX * fi, FOUR * fa, TWO * fs
    return (
        fi * i, fa * a01, fa * a02, fa * a12,
        fs * (TWO * s00 + s11), fs * TWO * s01, fs * TWO * s02, fs * (TWO * s11 + s00), fs * TWO * s12,
    )  # fmt: skip


@inline
def dot(x, y):
    return (
        x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3] + x[4] * y[4] + x[5] * y[5] + x[6] * y[6] + x[7] * y[7]
        + x[8] * y[8]
    )  # fmt: skip


@inline
def normalise_adjoint(inverse, x, g):
    """Gradient of X from the gradient g of x = X/(‖X‖²+1), given x and inverse = 1/(‖X‖²+1).

    X̄ = inverse·g − ⟨x, g⟩ ∂‖x‖²/∂x.
    """
    f = -dot(x, g)
    return add(scale(inverse, g), norm_gradient(x, f, f, f))


@inline
def product(q, y, m, o3):
    """Components of q (Y M + M Y) for O(3), of 2 Y M for SO(3)."""
    a, b = compose(y), compose(m)
    if o3:
        return decompose(scale(q, anticommutator(a, b)))
    return decompose(scale(TWO, matmul(a, b)))


@inline
def product_adjoint(q, y, m, g, o3):
    """Gradients of Y and of M from the gradient g of `product`.

    For full tensors, O(3): Ȳ = q (G Mᵀ + Mᵀ G), M̄ = q (G Yᵀ + Yᵀ G); SO(3): Ȳ = 2 G Mᵀ, M̄ = 2 Yᵀ G.
    """
    a, b, h = compose(y), compose(m), decompose_adjoint(g)
    if o3:
        u, v, f = anticommutator(h, transpose(b)), anticommutator(h, transpose(a)), q
    else:  # P = 2 A B: Ā = 2 G Bᵀ, B̄ = 2 Aᵀ G
        u, v, f = matmul(h, transpose(b)), matmul(transpose(a), h), TWO
    return scale(f, compose_adjoint(u)), scale(f, compose_adjoint(v))


@inline
def square(q, d):
    """Components of q D D."""
    a = compose(d)
    return decompose(scale(q, matmul(a, a)))


@inline
def add_square_adjoint(q, d, g):
    """Gradient of D from the gradient g of D + q D D: for full tensors, G + q (G Dᵀ + Dᵀ G)."""
    u = anticommutator(decompose_adjoint(g), transpose(compose(d)))
    return add(g, scale(q, compose_adjoint(u)))


# --- Mixing products ---


@call
def mix(x, at_x, w, y, at_y, F):
    """Y = mix(X) of ROWS atoms from row at_x of x and at_y of y; w are the panels of the maps [3, F, F] of I, A, S."""
    for r in range(ROWS):
        y[at_y + r, :] = ZERO
    together = F // (PANELS * LANES) * PANELS * LANES
    for part in range(3):
        blocks = range(part * part, (part + 1) * (part + 1))
        for n in range(0, together, PANELS * LANES):
            for block in blocks:
                i, o = at_x * 9 * F + block * F, at_y * 9 * F + block * F + n
                add_products(x, i, 9 * F, w, (part * F + n) * F, y, o, 9 * F, F)
        for n in range(together, F, LANES):
            for block in blocks:
                i, o = at_x * 9 * F + block * F, at_y * 9 * F + block * F + n
                add_product(x, i, 9 * F, w, (part * F + n) * F, y, o, 9 * F, F)


# --- The edges of one atom, on the CPU: numba functions, inlined into the kernels of cpu.py ---
#
# Each function reads one CSR row and adds to the atom's own row. Threads share nothing, and sums always have the same
# order. Filters are cubic polynomials from the tables [knots, 12F] (see triton_edges.py). Inner loops run over
# contiguous channels, so that the compiler vectorises them.


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

    The list has both directions of each pair, so that the gather over senders is also the transposed scatter. The slope
    written at an edge belongs to its reverse; only the sum of both counts. Slopes of all layers add up in one place,
    which is in the row of one thread.
    """
    for e in range(start, end):
        slope[e] += gather_adjoint_edge(dy, y, dm[sender[e]], table[knot[e]], offset[e], F)


@inline
def embed_adjoint_edge(g, p, t, z_here, z_there, ux, uy, uz, F):
    """Return dE/d|vec| and dE/du of the embedding; the part of dE/du along u has no meaning.

    The formulas are those of `embedding_backward_kernel` in triton_edges.py; −|u|²/3 changes along u alone.
    """
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
        dot = tx * ux + ty * uy + tz * uz  # du/dvec = (1 − u uᵀ)/d: what lies along u does not turn it
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
    """force = Σ_e (G_e − G_reverse(e)) and virial = Σ_e vec ⊗ G_e [9] of atom i, with vec = r_j − r_i, G = dE/dvec.

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


# --- Operations of single atoms on the CPU: layer norms, activations, products of tensors and their gradients ---
#
# These are numba functions, inlined into the kernels of cpu.py. They process ROWS atoms at a time: the weights
# are read once for all of them, and results are still in the cache for the next function.


# Rows are given by their numbers: a row that is passed as an array is counted as a reference, by atomic operations.


# Widths are multiples of VECTOR.


@call
def sigmoid(x, at_x, out, at_out, rows, width):
    """out = 1/(1 + exp(−x)) of `rows` rows, from row at_x of x and at_out of out on."""
    for r in range(rows):
        i, o = (at_x + r) * x.shape[1], (at_out + r) * out.shape[1]
        for c in range(0, width, VECTOR):
            store(out, o + c, logistic(load(x, i + c)))


@call
def silu(x, at_x, out, at_out, rows, width):
    """out = x/(1 + exp(−x)), see `sigmoid`."""
    for r in range(rows):
        i, o = (at_x + r) * x.shape[1], (at_out + r) * out.shape[1]
        for c in range(0, width, VECTOR):
            h = load(x, i + c)
            store(out, o + c, h * logistic(h))


@call
def silu_slope(x, at_x, out, at_out, rows, width):
    """out *= d silu(x)/dx, see `sigmoid`."""
    for r in range(rows):
        i, o = (at_x + r) * x.shape[1], (at_out + r) * out.shape[1]
        for c in range(0, width, VECTOR):
            h = load(x, i + c)
            s = logistic(h)
            store(out, o + c, load(out, o + c) * (s * (ONE + h * (ONE - s))))


@call
def silu_and_slope(x, at_x, out, at_out, rows, width):
    """out = x/(1 + exp(−x)), and its slope instead of x, see `sigmoid`."""
    for r in range(rows):
        i, o = (at_x + r) * x.shape[1], (at_out + r) * out.shape[1]
        for c in range(0, width, VECTOR):
            h = load(x, i + c)
            s = logistic(h)
            store(out, o + c, h * s)
            store(x, i + c, s * (ONE + h * (ONE - s)))


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
    """Gradient g of a row's layer norm → that of the row x, in place.

    With n = (x − mean)/σ and a = γ g: (a − mean of a − n · mean of a n)/σ.
    """
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

    D = mix(P/(‖P‖²+1)) with w the transposed maps; P is recomputed from Y and M. dY is not complete: the messages add
    to it, from dM of the neighbors.
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
