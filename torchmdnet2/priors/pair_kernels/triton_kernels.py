"""One kernel for priors that are sums over pairs: energies, forces, virials and dE/dA in one pass over the edges.

E = ½ strength Σ_i Σ_j A_i A_j g(d_ij, b_i + b_j, c_i + c_j), see below. Both directions of each pair are listed, so
that the force on an atom is a sum over its row. This needs no atomics, and equal inputs give results that are equal to
the bit. Energies are summed in float64; all other numbers are float32.

Shapes: N atoms, B structures, C edge capacity, K rows of the table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous

__all__ = [
    "MIN_DISTANCE", "all_pairs", "coordination_force_kernel", "coordination_kernel", "d2", "dispersion_kernel",
    "ewald", "neighbor", "pair_kernel", "pair_potential", "put", "put_row", "reaction_field", "row_of",
    "shifted_force", "taper", "zbl",
]  # fmt: skip


MIN_DISTANCE = tl.constexpr(1e-3)  # Å, as neighbors/pairs.py


@triton.jit
def edge_geometry(vec, e, mask):
    """Return vectors x, y, z of edges, distance d ≥ MIN_DISTANCE, and 1/d, which is 0 where d is clamped."""
    at = e.to(tl.int64) * 3
    x = tl.load(vec + at, mask, other=1.0)
    y = tl.load(vec + at + 1, mask, other=0.0)
    z = tl.load(vec + at + 2, mask, other=0.0)
    d, inverse = length(x, y, z)
    return x, y, z, d, inverse


@triton.jit
def length(x, y, z):
    """Return d ≥ MIN_DISTANCE of vectors in Å, and 1/d, which is 0 for shorter vectors."""
    d = tl.sqrt(x * x + y * y + z * z)
    short = d < MIN_DISTANCE
    d = tl.where(short, MIN_DISTANCE, d)
    return d, tl.where(short, 0.0, 1.0 / d)


@triton.jit
def row_of(i, row_ptr, pos, batch, ptr, LISTED: tl.constexpr):
    """First and last + 1 of the edges of atom i (LISTED), or of the atoms of its structure; and its position then."""
    if LISTED:
        start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
        x, y, z = 0.0, 0.0, 0.0
    else:
        b, at = tl.load(batch + i), pos + i.to(tl.int64) * 3
        start, end = tl.load(ptr + b), tl.load(ptr + b + 1)
        x, y, z = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return start, end, x, y, z


@triton.jit
def neighbor(e, use, i, sender, vec, pos, px, py, pz, cutoff, LISTED: tl.constexpr):
    """Of the entries e of `row_of`: which count, the atom j, vector x, y, z, distance d and 1/d, see `length`."""
    if LISTED:
        j = tl.load(sender + e, use, other=0).to(tl.int64)
        x, y, z, d, inverse = edge_geometry(vec, e, use)
        use = use & (d < cutoff)
    else:
        use = use & (e != i)
        j = e.to(tl.int64)
        x = (tl.load(pos + j * 3, use, other=0.0) - px).to(tl.float32)
        y = (tl.load(pos + j * 3 + 1, use, other=0.0) - py).to(tl.float32)
        z = (tl.load(pos + j * 3 + 2, use, other=0.0) - pz).to(tl.float32)
        # lanes without a neighbor get at least 1 Å, where nothing overflows; their results are dropped
        x = tl.where(use, x, 1.0)
        d, inverse = length(x, y, z)
    return use, j, x, y, z, d, inverse


@triton.jit
def put(to, value, FIRST: tl.constexpr):
    """Write a number (FIRST), or add it to the present value."""
    if FIRST:
        tl.store(to, value)
    else:
        tl.store(to, tl.load(to) + value)


@triton.jit
def put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, factor, FIRST: tl.constexpr, VIRIAL: tl.constexpr):
    """Force and virial of atom i from the sums (vectors of lanes) of u' r/d and r ⊗ u' r/d over its edges.

    r = r_j − r_i, so that −dE/dr_i is + u' r/d, whole for each pair: the other direction has the opposite force, on j.
    Virials of both directions are equal, so that each row has half.
    """
    i = i.to(tl.int64)
    put(forces + i * 3, tl.sum(fx, 0) * factor, FIRST)
    put(forces + i * 3 + 1, tl.sum(fy, 0) * factor, FIRST)
    put(forces + i * 3 + 2, tl.sum(fz, 0) * factor, FIRST)
    if VIRIAL:
        half = 0.5 * factor
        syz, sxz, sxy = tl.sum(yz, 0) * half, tl.sum(xz, 0) * half, tl.sum(xy, 0) * half
        row = virial + i * 9
        put(row, tl.sum(xx, 0) * half, FIRST)
        put(row + 1, sxy, FIRST)
        put(row + 2, sxz, FIRST)
        put(row + 3, sxy, FIRST)
        put(row + 4, tl.sum(yy, 0) * half, FIRST)
        put(row + 5, syz, FIRST)
        put(row + 6, sxz, FIRST)
        put(row + 7, syz, FIRST)
        put(row + 8, tl.sum(zz, 0) * half, FIRST)


@triton.jit(do_not_specialize=["strength", "alone", "cutoff", "c0", "c1", "c2", "c3", "c4", "c5"])
def pair_kernel(
    row_ptr, sender, vec, pos, batch, ptr, key, table, energy, forces, virial, slope, strength, alone, cutoff,
    c0, c1, c2, c3, c4, c5,
    RADIAL: tl.constexpr, MODE: tl.constexpr, COLUMNS: tl.constexpr, KEYED: tl.constexpr, LISTED: tl.constexpr,
    FIRST: tl.constexpr, VIRIAL: tl.constexpr, SLOPE: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: the row of atom i.

    Args:
        row_ptr [N + 1], sender [C], vec [C, 3]: edges within `cutoff` or further (LISTED); else all pairs of
            a structure count, by pos [N, 3], batch [N] and ptr [B + 1], the first atom of each structure.
        key: [N] the row of the table for each atom (KEYED); else its own index.
        table: [K, COLUMNS] float32: A, b, c.
        energy [N] float64, forces [N, 3], virial [N, 9] float32: written when FIRST, else added to; virial if VIRIAL.
        slope: [N] float32 dE/dA: not computed (SLOPE 0), written (1) or added to (2).
        strength, cutoff, c0 … c5: see `radial`. Edges from `cutoff` on do not count.
        alone: 1/Å; strength · alone · A² is subtracted for each atom.
    """
    i = tl.program_id(0)
    after_previous(PDL)
    own = i.to(tl.int64)
    start, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    if KEYED:
        own = tl.load(key + i).to(tl.int64)
    own_a = tl.load(table + own * COLUMNS)
    own_b, own_c = own_a, own_a
    if COLUMNS > 1:
        own_b = tl.load(table + own * COLUMNS + 1)
    if COLUMNS > 2:
        own_c = tl.load(table + own * COLUMNS + 2)
    potential = tl.zeros([BE], tl.float64)
    fx = tl.zeros([BE], tl.float32)
    fy, fz, xx, yy, zz, yz, xz, xy = fx, fx, fx, fx, fx, fx, fx, fx
    for first in range(start, end, BE):
        e = first + tl.arange(0, BE)
        use, j, x, y, z, d, inverse = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        if KEYED:
            j = tl.load(key + j, use, other=0).to(tl.int64)
        a = tl.load(table + j * COLUMNS, use, other=0.0)
        b_sum, c_sum = a, a
        if COLUMNS > 1:
            b_sum = own_b + tl.load(table + j * COLUMNS + 1, use, other=1.0)
        if COLUMNS > 2:
            c_sum = own_c + tl.load(table + j * COLUMNS + 2, use, other=1.0)
        g, g_slope = RADIAL(d, b_sum, c_sum, c0, c1, c2, c3, c4, c5, MODE)
        potential += tl.where(use, a * g, 0.0).to(tl.float64)
        along = tl.where(use, a * g_slope * inverse, 0.0)
        gx, gy, gz = along * x, along * y, along * z
        fx += gx
        fy += gy
        fz += gz
        if VIRIAL:
            xx += gx * x
            yy += gy * y
            zz += gz * z
            yz += gy * z
            xz += gx * z
            xy += gx * y
    from_others = tl.sum(potential, 0) * strength
    # E_i = ½ A_i Σ_j A_j g − alone A_i²; dE/dA_i has no ½, since A_i is also in the energies of the neighbors
    from_itself = own_a.to(tl.float64) * (alone * strength)
    put(energy + i, (0.5 * from_others - from_itself) * own_a, FIRST)
    if SLOPE > 0:
        put(slope + i, (from_others - 2.0 * from_itself).to(tl.float32), SLOPE == 1)
    put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, strength * own_a, FIRST, VIRIAL)


# --- Functions of the distance, with their slopes ---
#
# The energy of a pair is strength · A_i A_j · g(d, b_i + b_j, c_i + c_j), with numbers A, b, c of each atom. A radial
# function takes the distance d in Å, the two sums, six constants (numbers, or pointers to tables) and a mode, and
# returns g and dg/dd. Differences that cancel in a prior's `forward` (torchmdnet2/priors) are products here, since
# float32 would lose digits.

_PI = tl.constexpr(3.141592653589793)


@triton.jit
def taper(d, start, inverse):
    """`priors.pairs.taper` = (1 − t)³ (1 + 3t + 6t²), and its slope; `inverse` of the switch's width, 1/Å."""
    t = tl.minimum(tl.maximum((d - start) * inverse, 0.0), 1.0)
    rest = 1.0 - t
    square = rest * rest
    return square * rest * (1.0 + t * (3.0 + 6.0 * t)), -30.0 * t * t * square * inverse


@triton.jit
def zbl(d, power, radii, cutoff, _c1, _c2, _c3, _c4, _c5, COVALENT: tl.constexpr):
    """φ(d/a)/d · end; power = 1/a in 1/Å.

    The end is sin²(π/2 (1 − d/cutoff)), or 1 − 28t⁶ + 48t⁷ − 21t⁸ = (1 − t)³ (1 + 3t + … + 21t⁵) with t = d/radii.
    """
    x = d * power
    e0, e1 = 0.1818 * tl.exp(-3.2 * x), 0.5099 * tl.exp(-0.9423 * x)
    e2, e3 = 0.2802 * tl.exp(-0.4029 * x), 0.02817 * tl.exp(-0.2016 * x)
    g = (e0 + e1 + e2 + e3) / d
    slope = -(3.2 * e0 + 0.9423 * e1 + 0.4029 * e2 + 0.2016 * e3) * power / d - g / d
    if COVALENT:
        t = tl.minimum(d / radii, 1.0)
        rest = tl.maximum((radii - d) / radii, 0.0)
        square = rest * rest
        end = square * rest * (1.0 + t * (3.0 + t * (6.0 + t * (10.0 + t * (15.0 + t * 21.0)))))
        end_slope = -168.0 * t * t * t * t * t * square / radii
    else:
        half = _PI / 2 * ((cutoff - d) / cutoff)
        sin = tl.sin(half)
        end = sin * sin
        end_slope = -_PI / cutoff * sin * tl.cos(half)
    return g * end, slope * end + g * end_slope


@triton.jit
def pair_potential(d, place, _sum, table, cutoff, _c2, _c3, _c4, _c5, _MODE: tl.constexpr):
    """(Σ_k A_k exp(−a_k (d − 1)) − Σ_k B_k exp(−b_k (d − 1))) (1 − d²/cutoff²)³; A, B in row `place` of the table."""
    row = table + 8 * place.to(tl.int32)
    x = d - 1.0
    r0, r1 = tl.load(row) * tl.exp(-3.2 * x), tl.load(row + 1) * tl.exp(-4.0 * x)
    r2, r3 = tl.load(row + 2) * tl.exp(-5.0 * x), tl.load(row + 3) * tl.exp(-6.5 * x)
    q0, q1 = tl.load(row + 4) * tl.exp(-x), tl.load(row + 5) * tl.exp(-1.5 * x)
    q2, q3 = tl.load(row + 6) * tl.exp(-2.0 * x), tl.load(row + 7) * tl.exp(-2.6 * x)
    g = (r0 + r1 + r2 + r3) - (q0 + q1 + q2 + q3)
    slope = (q0 + 1.5 * q1 + 2.0 * q2 + 2.6 * q3) - (3.2 * r0 + 4.0 * r1 + 5.0 * r2 + 6.5 * r3)
    rest = tl.maximum((cutoff - d) * (cutoff + d) / (cutoff * cutoff), 0.0)
    end, end_slope = rest * rest * rest, -6.0 * d / (cutoff * cutoff) * rest * rest
    return g * end, slope * end + g * end_slope


@triton.jit
def d2(d, radii, _sum, start, inverse, _c2, _c3, _c4, _c5, _MODE: tl.constexpr):
    """1/d⁶ · 1/(1 + exp(−20 (d/radii − 1))) · taper."""
    r = 1.0 / d
    r3 = r * r * r
    r6 = r3 * r3
    y = d / radii
    near = y < 0.5  # exp(20 − 20 y) is two factors there, since 20 − 20 y would round off most of y
    falling = tl.exp(20.0 * (tl.where(near, 0.0, 1.0) - y)) * tl.where(near, 485165195.4097903, 1.0)
    damping = 1.0 / (1.0 + falling)
    damping_slope = damping * damping * falling * (20.0 / radii)
    end, end_slope = taper(d, start, inverse)
    return r6 * damping * end, r6 * ((damping_slope - 6.0 * r * damping) * end + damping * end_slope)


@triton.jit
def _short_range(d, lower, inverse, DAMPING: tl.constexpr):
    """`Electrostatics.factor` and its slope.

    DAMPING: 0 none; 1 "exp", with inverse = 1/upper; 2 "cosine", with inverse = 1/(upper − lower).
    """
    if DAMPING == 0:
        f = tl.full(d.shape, 1.0, tl.float32)
        slope = tl.zeros_like(d)
    elif DAMPING == 1:
        t = tl.minimum(d * inverse, 1.0 - 1e-6)
        rest = (1.0 - t) * (1.0 + t)
        x = t * t / rest  # f = 1 − exp(−x)
        higher = 1.0 - x * (1.0 / 5 - x * (1.0 / 30 - x * (1.0 / 210 - x / 1680)))
        series = x * (1.0 - x / 2 * (1.0 - x / 3 * (1.0 - x / 4 * higher)))
        falling = tl.exp(-x)
        f = tl.where(x < 0.3, series, 1.0 - falling)
        slope = falling * 2.0 * t * inverse / (rest * rest)
    else:
        phase = tl.minimum(tl.maximum((d - lower) * inverse, 0.0), 1.0) * (_PI / 2)
        sin = tl.sin(phase)
        f = sin * sin
        slope = _PI * inverse * sin * tl.cos(phase)
    return f, slope


@triton.jit
def all_pairs(d, _b, _c, lower, inverse, _c2, _c3, _c4, _c5, DAMPING: tl.constexpr):
    """f(d)/d."""
    f = tl.full(d.shape, 1.0, tl.float32)
    f_slope = tl.zeros_like(d)
    if DAMPING > 0:
        # f is 1 from `upper` on, where nearly all pairs of a large structure are
        if (tl.min(d, 0) - lower) * inverse < 1.0:
            f, f_slope = _short_range(d, lower, inverse, DAMPING)
    r = 1.0 / d
    return f * r, (f_slope - f * r) * r


@triton.jit
def reaction_field(d, _b, _c, lower, inverse, start, taper_inverse, reaction, shift, DAMPING: tl.constexpr):
    """f(d) (1/d + reaction d² − shift) · taper."""
    f, f_slope = _short_range(d, lower, inverse, DAMPING)
    end, end_slope = taper(d, start, taper_inverse)
    r = 1.0 / d
    field = r + reaction * d * d - shift
    slope = 2.0 * reaction * d - r * r
    return f * field * end, f_slope * field * end + f * (slope * end + field * end_slope)


@triton.jit
def ewald(d, _b, _c, lower, inverse, alpha, _c3, _c4, _c5, DAMPING: tl.constexpr):
    """(erfc(αd) − 1 + f(d))/d, the short-range part of an Ewald sum.

    erfc(x) = exp(−x²) Σ_n c_n tⁿ with t = 1/(1 + x/2). The coefficients are fitted on 0 … 6.5 to a relative error of
    3e-8, so that the tail of erfc is not lost to rounding. Where f is not 1, the function is (f − erf)/d.
    """
    r = 1.0 / d
    x = alpha * d
    falling = tl.exp(-x * x)
    t = 1.0 / (1.0 + 0.5 * x)
    high = 0.2309258494 + t * (-0.447302452 + t * (0.2658298796 - t * 0.05531684188))
    middle = 0.2470879183 + t * (0.1877523133 + t * (0.007109868328 + t * high))
    erfc = falling * t * (0.2821224217 + t * (0.2817910121 + t * middle))
    slope = -1.1283791670955126 * alpha * falling
    if DAMPING == 0:
        value = erfc
    else:
        f, f_slope = _short_range(d, lower, inverse, DAMPING)
        value = tl.where(f == 1.0, erfc, f - tl.erf(x))
        slope += f_slope
    return value * r, (slope - value * r) * r


@triton.jit
def shifted_force(d, b, c, lower, inverse, alpha, value, slope, end, DAMPING: tl.constexpr):
    """(erfc(αd) − 1 + f(d))/d − value − slope (d − end)."""
    short, short_slope = ewald(d, b, c, lower, inverse, alpha, value, slope, end, DAMPING)
    return short - value - slope * (d - end), short_slope - slope


# --- D3(BJ) in three passes over the edges ---
#
# The formulas are those of priors/dispersion.py. The passes are coordination numbers; energies, with slopes at fixed
# coordination numbers and dE/dCN; forces through the coordination numbers. The last pass needs dE/dCN of both atoms of
# an edge, which the second pass completes. A pass over the row of an atom writes results of this atom alone, without
# atomics, so that equal inputs give results that are equal to the bit. Coordination numbers, weights and energies are
# summed in float64.


@triton.jit
def _count(d, bond, start, inverse):
    """Return the part of a neighbor at d in the coordination number, and its slope; `bond` is the sum of the radii."""
    falling = tl.exp(-16.0 * (bond / d - 1.0))
    counted = 1.0 / (1.0 + falling)
    end, end_slope = taper(d, start, inverse)
    return counted * end, counted * (end_slope - counted * falling * (16.0 * bond / (d * d)) * end)


@triton.jit(do_not_specialize=["types", "cutoff", "start", "inverse"])
def coordination_kernel(
    row_ptr, sender, vec, pos, batch, ptr, z, elements, reference, c6, weights, mixed, types, cutoff, start, inverse,
    BT: tl.constexpr, LISTED: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: writes the C6 coefficients of atom i for its coordination number, and their slopes.

    Args:
        row_ptr [N + 1], sender [C], vec [C, 3]: edges within `cutoff` or further (LISTED); else all pairs by pos,
            batch and ptr, as for `pair_kernel`. z [N].
        elements: [128, 4] float32 by atomic number: covalent radius, √C8/C6 part, index 0 … T − 1, largest
            coordination number.
        reference: [T, 8] float32 coordination numbers, very large for missing references.
        c6: [T, T, 8, 8] float32 eV Å⁶ by element and reference of both.
        weights: [N, 8] of the references, written.
        mixed: [N, T, 2, 8], written: C6 with each element's references, and its slope in the coordination number.
        types: T. start, inverse: of the taper.
    """
    i = tl.program_id(0)
    after_previous(PDL)
    first_edge, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    own = elements + tl.load(z + i) * 4
    radius = tl.load(own)
    kind = tl.load(own + 2).to(tl.int64)
    count = tl.zeros([BE], tl.float64)
    for first in range(first_edge, end, BE):
        e = first + tl.arange(0, BE)
        use, j, _x, _y, _z, d, _inverse = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        other = tl.load(elements + tl.load(z + j, use, other=1) * 4, use, other=0.0)
        counted, _slope = _count(d, radius + other, start, inverse)
        count += tl.where(use, counted, 0.0).to(tl.float64)
    counted, most = tl.sum(count, 0), tl.load(own + 3).to(tl.float64)
    a = tl.arange(0, 8)
    away = tl.minimum(counted, most) - tl.load(reference + kind * 8 + a).to(tl.float64)
    # exponents count from the largest: far from all references, all weights would be 0/0
    exponent = -4.0 * away * away
    weight = tl.exp(exponent - tl.max(exponent, 0))
    weight = weight / tl.sum(weight, 0)
    # dw_a/dCN = w_a (t_a − Σ_b w_b t_b), t = −8 (CN − CN_a); 0 where CN is clamped
    turn = tl.where(counted < most, -8.0 * away, 0.0)
    turn = weight * (turn - tl.sum(weight * turn, 0))
    tl.store(weights + i.to(tl.int64) * 8 + a, weight.to(tl.float32))
    w, dw = weight.to(tl.float32)[None, :, None], turn.to(tl.float32)[None, :, None]
    # C6_ij = Σ_ab w_a C6_ab w_b: the sum over a is the same for all neighbors of one element
    for first in range(0, types, BT):
        t = first + tl.arange(0, BT)
        ok = t < types
        at = ((kind * types + t[:, None, None]) * 8 + a[None, :, None]) * 8 + a[None, None, :]
        block = tl.load(c6 + at, ok[:, None, None], other=0.0)
        row = mixed + ((i.to(tl.int64) * types + t[:, None]) * 16 + a[None, :])
        tl.store(row, tl.sum(block * w, 1), ok[:, None])
        tl.store(row + 8, tl.sum(block * dw, 1), ok[:, None])


@triton.jit(do_not_specialize=["types", "cutoff", "start", "inverse", "s6", "s8", "a1", "a2"])
def dispersion_kernel(
    row_ptr, sender, vec, pos, batch, ptr, z, elements, weights, mixed, energy, forces, virial, by_coordination,
    types, cutoff, start, inverse, s6, s8, a1, a2,
    LISTED: tl.constexpr, FIRST: tl.constexpr, VIRIAL: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: energy of atom i, forces at fixed coordination numbers, and by_coordination [N] = dE/dCN in eV.

    Args: as `coordination_kernel` and `pair_kernel`; s6, s8, a1 and a2 (Å) of the density functional.
    """
    i = tl.program_id(0)
    after_previous(PDL)
    first_edge, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    own = tl.load(elements + tl.load(z + i) * 4 + 1)
    row = mixed + i.to(tl.int64) * types * 16
    a = tl.arange(0, 8)
    total = tl.zeros([BE], tl.float64)
    turn = tl.zeros([BE], tl.float32)
    fx, fy, fz, xx, yy, zz, yz, xz, xy = turn, turn, turn, turn, turn, turn, turn, turn, turn
    for first in range(first_edge, end, BE):
        e = first + tl.arange(0, BE)
        use, j, x, y, z_vec, d, inverse_d = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        element = elements + tl.load(z + j, use, other=1) * 4
        moments = own * tl.load(element + 1, use, other=1.0)
        kind = tl.load(element + 2, use, other=0.0).to(tl.int32)
        weight = tl.load(weights + j[:, None] * 8 + a[None, :], use[:, None], other=0.0)
        mix = row + kind[:, None] * 16 + a[None, :]
        c6 = tl.sum(tl.load(mix, use[:, None], other=0.0) * weight, 1)
        c6_turn = tl.sum(tl.load(mix + 8, use[:, None], other=0.0) * weight, 1)
        ratio = moments * moments
        f = a1 * moments + a2
        f2, d2 = f * f, d * d
        f6, d6 = f2 * f2 * f2, d2 * d2 * d2
        sixth = 1.0 / (d6 + f6)
        eighth = 1.0 / (d6 * d2 + f6 * f2)
        part6, part8 = s6 * sixth, s8 * ratio * eighth
        g = part6 + part8
        # d/dd of 1/(dⁿ + fⁿ) is −n dⁿ⁻¹/(dⁿ + fⁿ)²
        g_slope = -d6 / d * (6.0 * part6 * sixth + 8.0 * part8 * eighth * d2)
        tapered, taper_slope = taper(d, start, inverse)
        total -= tl.where(use, c6 * g * tapered, 0.0).to(tl.float64)
        # dE/dCN_i of the whole energy: CN_i is in both directions of a pair, each with ½
        turn -= tl.where(use, c6_turn * g * tapered, 0.0)
        along = tl.where(use, -c6 * (g_slope * tapered + g * taper_slope) * inverse_d, 0.0)
        gx, gy, gz = along * x, along * y, along * z_vec
        fx += gx
        fy += gy
        fz += gz
        if VIRIAL:
            xx += gx * x
            yy += gy * y
            zz += gz * z_vec
            yz += gy * z_vec
            xz += gx * z_vec
            xy += gx * y
    put(energy + i, 0.5 * tl.sum(total, 0), FIRST)
    tl.store(by_coordination + i, tl.sum(turn, 0))
    put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, 1.0, FIRST, VIRIAL)


@triton.jit(do_not_specialize=["cutoff", "start", "inverse"])
def coordination_force_kernel(
    row_ptr, sender, vec, pos, batch, ptr, z, elements, by_coordination, forces, virial, cutoff, start, inverse,
    LISTED: tl.constexpr, VIRIAL: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: adds the force on atom i through all coordination numbers, and the virial of its row."""
    i = tl.program_id(0)
    after_previous(PDL)
    first_edge, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    radius = tl.load(elements + tl.load(z + i) * 4)
    own = tl.load(by_coordination + i)
    fx = tl.zeros([BE], tl.float32)
    fy, fz, xx, yy, zz, yz, xz, xy = fx, fx, fx, fx, fx, fx, fx, fx
    for first in range(first_edge, end, BE):
        e = first + tl.arange(0, BE)
        use, j, x, y, z_vec, d, inverse_d = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        other = tl.load(elements + tl.load(z + j, use, other=1) * 4, use, other=0.0)
        _counted, slope = _count(d, radius + other, start, inverse)
        # d_ij is in CN_i and in CN_j
        both = own + tl.load(by_coordination + j, use, other=0.0)
        along = tl.where(use, both * slope * inverse_d, 0.0)
        gx, gy, gz = along * x, along * y, along * z_vec
        fx += gx
        fy += gy
        fz += gz
        if VIRIAL:
            xx += gx * x
            yy += gy * y
            zz += gz * z_vec
            yz += gy * z_vec
            xz += gx * z_vec
            xy += gx * y
    put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, 1.0, False, VIRIAL)
