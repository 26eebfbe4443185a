"""One kernel for the priors that are sums over pairs: energies, forces, virials and dE/dA in one pass over the edges.

E = ½ strength Σ_i Σ_j A_i A_j g(d_ij, b_i + b_j, c_i + c_j), see radial.py. Both directions of each pair are listed, so
that the force on an atom is a sum over its own row: no atomics; same input, same result, bit for bit. Energies are
summed in float64, all else is float32.

Shapes: N atoms, B structures, C edge capacity, K rows of the table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous

__all__ = ["MIN_DISTANCE", "neighbor", "pair_kernel", "put", "put_row", "row_of"]

MIN_DISTANCE = tl.constexpr(1e-3)  # Å, as priors/pairs.py


@triton.jit
def edge_geometry(vec, e, mask):
    """Vectors x, y, z of the edges, distance d ≥ MIN_DISTANCE and 1/d, 0 where the clamp takes the slope away."""
    at = e.to(tl.int64) * 3
    x = tl.load(vec + at, mask, other=1.0)
    y = tl.load(vec + at + 1, mask, other=0.0)
    z = tl.load(vec + at + 2, mask, other=0.0)
    d, inverse = length(x, y, z)
    return x, y, z, d, inverse


@triton.jit
def length(x, y, z):
    """d ≥ MIN_DISTANCE of vectors in Å, and 1/d, 0 for those that are shorter."""
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
        x = tl.where(use, x, 1.0)
        d, inverse = length(x, y, z)
    return use, j, x, y, z, d, inverse


@triton.jit
def put(to, value, FIRST: tl.constexpr):
    """Write a number, or add it to what is there."""
    if FIRST:
        tl.store(to, value)
    else:
        tl.store(to, tl.load(to) + value)


@triton.jit
def put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, factor, FIRST: tl.constexpr, VIRIAL: tl.constexpr):
    """Force and virial of atom i from the sums (vectors of lanes) of u' r/d and r ⊗ u' r/d over its edges."""
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


@triton.jit(do_not_specialize=["strength", "cutoff", "c0", "c1", "c2", "c3", "c4", "c5"])
def pair_kernel(
    row_ptr, sender, vec, pos, batch, ptr, key, table, energy, forces, virial, slope, strength, cutoff,
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
        slope: [N] float32 dE/dA: SLOPE 0 not wanted, 1 written, 2 added to.
        strength, cutoff, c0 … c5: see `radial`. Edges from `cutoff` on do not count.
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
    put(energy + i, 0.5 * from_others * own_a, FIRST)
    if SLOPE > 0:
        put(slope + i, from_others.to(tl.float32), SLOPE == 1)
    put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, strength * own_a, FIRST, VIRIAL)
