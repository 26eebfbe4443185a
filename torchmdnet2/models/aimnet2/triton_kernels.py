"""Kernels of AIMNet2 on a GPU: radial functions, sums over neighbors and their gradients, equilibrated charges, layers.

The formulas are those of model.py. Both directions of each edge are listed, and a program writes results of its atom
alone, without atomics, so that equal inputs give results that are equal to the bit. Charges are equilibrated in
float64; all other numbers are float32.

Matrix products of many atoms are three products of half precision (PREC "fp16x3"), with weights [2, K, N] in halves.

The third axis of programs are the members: networks of the same form on the same atoms and edges. Arrays of atoms have
M·N rows, member after member; weights have a first dimension M.

Shapes: M members, N atoms, B structures, C edge capacity, A features, R radial functions, H combinations (padded to a
power of two P). An atom's row of what a pass reads, X numbers wide, is [features A·R, sums A·R, squares A·H, charge,
sums R, squares H], and zeros up to the width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous, before_next
from ..tensornet.triton_products import dense, dot, settle

__all__ = [
    "convolve_gradient_kernel", "convolve_kernel", "edge_kernel", "energy_kernel", "equilibrate_gradient_kernel",
    "equilibrate_kernel", "layer_gradient_kernel", "layer_kernel", "spread_gradient_kernel", "sum_slots_kernel",
]  # fmt: skip


@triton.jit
def edge_kernel(
    row_ptr, vec, shifts, radial, slope, direction, num_atoms, eta, inverse_cutoff,
    R: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write, for each edge, radial functions and their slopes [C, R], and direction with 1/d [C, 4]."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    after_previous(PDL)
    before_next(PDL)
    use = e < tl.load(row_ptr + num_atoms)
    e = e.to(tl.int64)
    x = tl.load(vec + e * 3, use, other=1.0)
    y = tl.load(vec + e * 3 + 1, use, other=0.0)
    z = tl.load(vec + e * 3 + 2, use, other=0.0)
    square = x * x + y * y + z * z
    d = tl.sqrt(square)
    inverse = tl.where(square > 0.0, 1.0 / d, 0.0)
    # ½ (cos(π d / r) + 1) = sin²(π/2 (1 − d / r)), without its cancellation at the cutoff
    half = 1.5707963267948966 * tl.maximum(1.0 - d * inverse_cutoff, 0.0)
    sin = tl.sin(half)
    envelope = (sin * sin)[:, None]
    envelope_slope = (-3.141592653589793 * inverse_cutoff * sin * tl.cos(half))[:, None]
    r = tl.arange(0, R)[None, :]
    away = d[:, None] - tl.load(shifts + r)
    bell = tl.exp(-eta * away * away)
    at = e[:, None] * R + r
    tl.store(radial + at, bell * envelope, use[:, None])
    tl.store(slope + at, bell * (envelope_slope - 2.0 * eta * away * envelope), use[:, None])
    tl.store(direction + e * 4, x * inverse, use)
    tl.store(direction + e * 4 + 1, y * inverse, use)
    tl.store(direction + e * 4 + 2, z * inverse, use)
    tl.store(direction + e * 4 + 3, inverse, use)


@triton.jit
def own_row():
    """Return the atom of a program, its row, and the member."""
    i, member = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    return i, member * tl.num_programs(0) + i, member


@triton.jit
def edge_of(e, end, sender, direction):
    """Return, for one edge, 1 if it exists (else 0), its place in the arrays, sender, direction and 1/d."""
    there = (e < end).to(tl.float32)
    e = tl.minimum(e, end - 1).to(tl.int64)
    j = tl.load(sender + e).to(tl.int64)
    at = direction + e * 4
    return there, e, j, tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def combined(v, c):
    """Σ_k C_akh v_ak for v [., R] and C [., R, P]: [., P]."""
    return tl.sum(v[:, :, None] * c, 1)


@triton.jit
def squares_of(vx, vy, vz, c, vectors, i, at, STRIDE: tl.constexpr):
    """Return |V|² of sums with directions; write V to [N, 3, STRIDE] at the places `at`."""
    hx, hy, hz = combined(vx, c), combined(vy, c), combined(vz, c)
    row = vectors + i * (3 * STRIDE) + at
    tl.store(row, hx)
    tl.store(row + STRIDE, hy)
    tl.store(row + 2 * STRIDE, hz)
    return hx * hx + hy * hy + hz * hz


@triton.jit
def convolve_features(
    row_ptr, sender, radial, direction, key, values, combine, x, vectors, part,
    A: tl.constexpr, R: tl.constexpr, H: tl.constexpr, P: tl.constexpr, X: tl.constexpr, VALUES: tl.constexpr,
    BA: tl.constexpr, U: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    i, row, member = own_row()
    values += member * (KEYED if KEYED else tl.num_programs(0)) * VALUES
    combine += member * (A * R * H)
    start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
    r, h = tl.arange(0, R), tl.arange(0, P)
    a = part * BA + tl.arange(0, BA)
    at = a[:, None] * R + r[None, :]
    s = tl.zeros([BA, R], tl.float32)
    vx, vy, vz = s, s, s
    for first in range(start, end, U):
        for k in tl.static_range(U):
            there, e, j, ux, uy, uz, _inverse = edge_of(first + k, end, sender, direction)
            g = tl.load(radial + e * R + r) * there
            if KEYED:
                j = tl.load(key + j).to(tl.int64)
            sent = tl.load(values + j * VALUES + at) * g[None, :]
            s += sent
            vx += sent * ux
            vy += sent * uy
            vz += sent * uz
    c = tl.load(combine + (at[:, :, None] * H + h[None, None, :]), (h < H)[None, None, :], other=0.0)
    squares = squares_of(vx, vy, vz, c, vectors, row, a[:, None] * P + h[None, :], A * P)
    out = x + row * X
    if KEYED:
        tl.store(out + at, tl.load(values + tl.load(key + i).to(tl.int64) * VALUES + at))
    tl.store(out + A * R + at, s)
    tl.store(out + 2 * A * R + a[:, None] * H + h[None, :], squares, (h < H)[None, :])


@triton.jit
def charge_before(predicted, before, i, use, FIRST: tl.constexpr):
    """The charge of atom i, float64, before those of its structure are made to sum up."""
    q = tl.load(predicted + i * 2, use, other=0.0).to(tl.float64)
    if not FIRST:
        q += tl.load(before + i, use, other=0.0)
    return q


@triton.jit
def weight_of(predicted, i, use, EXACT: tl.constexpr):
    """Return u = f² + ε of atom i, float64."""
    f = tl.load(predicted + i * 2 + 1, use, other=0.0).to(tl.float64)
    u = f * f
    if EXACT:
        u += 1e-6
    return u


@triton.jit
def sums_of_charges(predicted, before, start, end, FIRST: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr):
    """Return Σ q of the atoms of a structure, to be summed over BM lanes, and Σ u."""
    sum_q, sum_u = tl.zeros([BM], tl.float64), tl.zeros([BM], tl.float64)
    for first in range(start, end, BM):
        i = first + tl.arange(0, BM)
        use = i < end
        i = i.to(tl.int64)
        q = charge_before(predicted, before, i, use, FIRST)
        u = weight_of(predicted, i, use, EXACT)
        sum_q += q
        sum_u += tl.where(use, u, 0.0)
    largest = tl.sum(sum_u, 0)
    if not EXACT:
        largest += 1e-6
    return sum_q, largest


@triton.jit
def convolve_charges(
    row_ptr, sender, radial, direction, charges, combine, x, vectors, predicted, before, charges64, moments, ptr, batch,
    total_charge,
    A: tl.constexpr, R: tl.constexpr, H: tl.constexpr, P: tl.constexpr, X: tl.constexpr, U: tl.constexpr,
    JOINED: tl.constexpr, FIRST: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i, row, member = own_row()
    charges += row - i
    combine += member * (R * H)
    if JOINED:  # `equilibrate_kernel` of the structure, as far as this atom and its neighbors need it
        predicted, before, charges64 = predicted + (row - i) * 2, before + (row - i), charges64 + row
        s = tl.load(batch + i)
        first_atom, last = tl.load(ptr + s), tl.load(ptr + s + 1)
        sum_q, largest = sums_of_charges(predicted, before, first_atom, last, FIRST, EXACT, BM)
        lacking = (tl.load(total_charge + first_atom).to(tl.float64) - tl.sum(sum_q, 0)) / largest
        q = charge_before(predicted, before, i, i < last, FIRST) + weight_of(predicted, i, i < last, EXACT) * lacking
        tl.store(charges64, q)
        tl.store(charges + i, q.to(tl.float32))
        tl.store(x + row * X + (2 * A * R + A * H), q.to(tl.float32))
        if i == first_atom:
            tl.store(moments + row * 2, lacking)
            tl.store(moments + row * 2 + 1, largest)
    start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
    r, h = tl.arange(0, R)[None, :], tl.arange(0, P)[None, :]
    s = tl.zeros([1, R], tl.float32)
    vx, vy, vz = s, s, s
    for first in range(start, end, U):
        for k in tl.static_range(U):
            there, e, j, ux, uy, uz, _inverse = edge_of(first + k, end, sender, direction)
            if JOINED:
                added = weight_of(predicted, j, j < last, EXACT) * lacking
                charge = (charge_before(predicted, before, j, j < last, FIRST) + added).to(tl.float32)
                sent = tl.load(radial + e * R + r) * (there * charge)
            else:
                sent = tl.load(radial + e * R + r) * (there * tl.load(charges + j))
            s += sent
            vx += sent * ux
            vy += sent * uy
            vz += sent * uz
    c = tl.load(combine + (r[:, :, None] * H + h[:, None, :]), (h < H)[:, None, :], other=0.0)
    squares = squares_of(vx, vy, vz, c, vectors, row, h, P)
    out = x + row * X + (2 * A * R + A * H + 1)
    tl.store(out + r, s)
    tl.store(out + R + h, squares, h < H)


@triton.jit
def convolve_kernel(
    row_ptr, sender, radial, direction, key, values, charges, combine, combine_charges, x, vectors, charge_vectors,
    A: tl.constexpr, R: tl.constexpr, H: tl.constexpr, P: tl.constexpr, X: tl.constexpr, VALUES: tl.constexpr,
    BA: tl.constexpr, U: tl.constexpr, KEYED: tl.constexpr, CHARGES: tl.constexpr, PDL: tl.constexpr,
    predicted=None, before=None, charges64=None, moments=None, ptr=None, batch=None, total_charge=None,
    FIRST: tl.constexpr = False, EXACT: tl.constexpr = True, BM: tl.constexpr = 64,
):  # fmt: skip
    """Program (i, part, member): sums and squares of atom i, of BA features or in the last part of charges (CHARGES).

    Args:
        key: [N] row of the values of each atom, of KEYED ones of a member; KEYED = 0: its own, and the values of atom i
            are in x already.
        values: [., VALUES], the first A·R numbers of a row.
        charges: [N]. combine: [A, R, H], combine_charges: [R, H].
        x: [N, X], written. vectors: [N, 3, A·P], charge_vectors: [N, 3, P], written.
        predicted …: as for `equilibrate_kernel`, which is then not launched; batch: [N] the structure of each atom.
    """
    part = tl.program_id(1)
    after_previous(PDL)
    before_next(PDL)
    if part < A // BA:
        convolve_features(row_ptr, sender, radial, direction, key, values, combine, x, vectors, part, A, R, H, P, X,
                          VALUES, BA, U, KEYED)  # fmt: skip
    elif CHARGES:
        convolve_charges(
            row_ptr, sender, radial, direction, charges, combine_charges, x, charge_vectors, predicted, before,
            charges64, moments, ptr, batch, total_charge, A, R, H, P, X, U, predicted is not None, FIRST, EXACT, BM,
        )  # fmt: skip


@triton.jit
def spread(
    by_sums, by_squares, vectors, combine, to, a, A: tl.constexpr, R: tl.constexpr, H: tl.constexpr, P: tl.constexpr
):
    """For rows a [., 1] of one atom, write the gradient [4, A·R] from those of the sums [A, R] and squares [A, H]."""
    r, h = tl.arange(0, R)[None, :], tl.arange(0, P)[None, :]
    at = a * R + r
    tl.store(to + at, tl.load(by_sums + at))
    twice = 2.0 * tl.load(by_squares + a * H + h, h < H, other=0.0)
    c = tl.load(combine + (at[:, :, None] * H + h[:, None, :]), (h < H)[:, None, :], other=0.0)
    for d in tl.static_range(3):
        dv = twice * tl.load(vectors + d * (A * P) + a * P + h)
        tl.store(to + (d + 1) * (A * R) + at, tl.sum(c * dv[:, None, :], 2))


@triton.jit
def spread_gradient_kernel(
    dx, vectors, charge_vectors, combine, combine_charges, dm, dm_charges,
    A: tl.constexpr, R: tl.constexpr, H: tl.constexpr, P: tl.constexpr, X: tl.constexpr, BA: tl.constexpr,
    CHARGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, part, member): writes the gradients of the sums with radial functions, and with the three directions.

    This comes before `convolve_gradient_kernel`, which reads these gradients of the neighbors.

    Args:
        dx: [N, X] gradient of the input of the pass. dm: [N, 4, A·R], dm_charges: [N, 4, R], written.
    """
    _, i, member = own_row()
    part = tl.program_id(1)
    combine += member * (A * R * H)
    combine_charges += member * (R * H)
    after_previous(PDL)
    before_next(PDL)
    row = dx + i * X
    if part < A // BA:
        rows = part * BA + tl.arange(0, BA)[:, None]
        spread(row + A * R, row + 2 * A * R, vectors + i * (3 * A * P), combine, dm + i * (4 * A * R), rows, A, R, H, P)
    elif CHARGES:
        alone = tl.zeros([1, 1], tl.int32)
        first = row + (2 * A * R + A * H + 1)
        spread(first, first + R, charge_vectors + i * (3 * P), combine_charges, dm_charges + i * (4 * R), alone, 1, R,
               H, P)  # fmt: skip


@triton.jit
def add_edge(
    own, other, m0, mx, my, mz, n0, nx, ny, nz, g, slope, ux, uy, uz, inverse, da, fx, fy, fz, xx, yy, zz, yz, xz, xy,
    VIRIAL: tl.constexpr,
):  # fmt: skip
    """Add one edge to the sums of a row: gradient of the atom's values, force, virial; each lane adds its part.

    own, other: values of atom and neighbor; m, n: gradients of their sums.
    """
    from_own = m0 + ux * mx + uy * my + uz * mz
    from_other = n0 - (ux * nx + uy * ny + uz * nz)
    da += g * from_other
    radial = slope * (other * from_own + own * from_other)
    across = g * inverse
    px = across * (other * mx - own * nx)
    py = across * (other * my - own * ny)
    pz = across * (other * mz - own * nz)
    along = radial - (ux * px + uy * py + uz * pz)
    gx, gy, gz = along * ux + px, along * uy + py, along * uz + pz
    fx += gx
    fy += gy
    fz += gz
    if VIRIAL:
        d = 1.0 / inverse
        xx += gx * (ux * d)
        yy += gy * (uy * d)
        zz += gz * (uz * d)
        yz += gy * (uz * d)
        xz += gx * (uz * d)
        xy += gx * (uy * d)
    return da, fx, fy, fz, xx, yy, zz, yz, xz, xy


@triton.jit
def put_pull(pull, at, fx, fy, fz, xx, yy, zz, yz, xz, xy, VIRIAL: tl.constexpr):
    """Write force and half of the virial, summed over the lanes, to row `at` of pull [., 9]."""
    to = pull + at * 9
    tl.store(to, tl.sum(fx))
    tl.store(to + 1, tl.sum(fy))
    tl.store(to + 2, tl.sum(fz))
    if VIRIAL:
        tl.store(to + 3, 0.5 * tl.sum(xx))
        tl.store(to + 4, 0.5 * tl.sum(yy))
        tl.store(to + 5, 0.5 * tl.sum(zz))
        tl.store(to + 6, 0.5 * tl.sum(yz))
        tl.store(to + 7, 0.5 * tl.sum(xz))
        tl.store(to + 8, 0.5 * tl.sum(xy))


@triton.jit
def gradient_of_features(
    row_ptr, sender, radial, slope, direction, key, values, dm, dx, da, last_slope, gradient, pull, num_atoms, part,
    A: tl.constexpr, R: tl.constexpr, X: tl.constexpr, VALUES: tl.constexpr, G: tl.constexpr, BA: tl.constexpr,
    U: tl.constexpr, KEYED: tl.constexpr, LAST: tl.constexpr, ACTIVATED: tl.constexpr, VIRIAL: tl.constexpr,
):  # fmt: skip
    i, row, member = own_row()
    values += member * (KEYED if KEYED else tl.num_programs(0)) * VALUES
    start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
    r = tl.arange(0, R)
    at = (part * BA + tl.arange(0, BA))[:, None] * R + r[None, :]
    mine = i
    if KEYED:
        mine = tl.load(key + i).to(tl.int64)
    own = tl.load(values + mine * VALUES + at)
    m = dm + row * (4 * A * R) + at
    dm += (row - i) * (4 * A * R)
    m0, mx, my, mz = tl.load(m), tl.load(m + A * R), tl.load(m + 2 * A * R), tl.load(m + 3 * A * R)
    total = tl.zeros([BA, R], tl.float32)
    fx, fy, fz, xx, yy, zz, yz, xz, xy = total, total, total, total, total, total, total, total, total
    for first in range(start, end, U):
        for k in tl.static_range(U):
            there, e, j, ux, uy, uz, inverse = edge_of(first + k, end, sender, direction)
            g = (tl.load(radial + e * R + r) * there)[None, :]
            s = (tl.load(slope + e * R + r) * there)[None, :]
            n = dm + j * (4 * A * R) + at
            n0, nx, ny, nz = tl.load(n), tl.load(n + A * R), tl.load(n + 2 * A * R), tl.load(n + 3 * A * R)
            if KEYED:
                j = tl.load(key + j).to(tl.int64)
            other = tl.load(values + j * VALUES + at)
            total, fx, fy, fz, xx, yy, zz, yz, xz, xy = add_edge(
                own, other, m0, mx, my, mz, n0, nx, ny, nz, g, s, ux, uy, uz, inverse, total, fx, fy, fz, xx, yy, zz,
                yz, xz, xy, VIRIAL,
            )  # fmt: skip
    if not KEYED:
        total += tl.load(dx + row * X + at)
        if not LAST:
            total += tl.load(da + row * (A * R) + at)
        tl.store(da + row * (A * R) + at, total)
        if ACTIVATED:
            total *= tl.load(last_slope + row * G + at)
        tl.store(gradient + row * G + at, total)
    put_pull(pull, part * num_atoms + row, fx, fy, fz, xx, yy, zz, yz, xz, xy, VIRIAL)


@triton.jit
def gradient_of_charges(
    row_ptr, sender, radial, slope, direction, charges, dm, dx, dq, given, pull, num_atoms, part,
    R: tl.constexpr, X: tl.constexpr, U: tl.constexpr, LAST: tl.constexpr, GIVEN: tl.constexpr, VIRIAL: tl.constexpr,
):  # fmt: skip
    i, row, _member = own_row()
    charges += row - i
    start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
    r = tl.arange(0, R)
    own = tl.load(charges + i)
    m = dm + row * (4 * R) + r
    dm += (row - i) * (4 * R)
    m0, mx, my, mz = tl.load(m), tl.load(m + R), tl.load(m + 2 * R), tl.load(m + 3 * R)
    total = tl.zeros([R], tl.float32)
    fx, fy, fz, xx, yy, zz, yz, xz, xy = total, total, total, total, total, total, total, total, total
    for first in range(start, end, U):
        for k in tl.static_range(U):
            there, e, j, ux, uy, uz, inverse = edge_of(first + k, end, sender, direction)
            g, s = tl.load(radial + e * R + r) * there, tl.load(slope + e * R + r) * there
            n = dm + j * (4 * R) + r
            n0, nx, ny, nz = tl.load(n), tl.load(n + R), tl.load(n + 2 * R), tl.load(n + 3 * R)
            other = tl.load(charges + j)
            total, fx, fy, fz, xx, yy, zz, yz, xz, xy = add_edge(
                own, other, m0, mx, my, mz, n0, nx, ny, nz, g, s, ux, uy, uz, inverse, total, fx, fy, fz, xx, yy, zz,
                yz, xz, xy, VIRIAL,
            )  # fmt: skip
    q = tl.sum(total, 0) + tl.load(dx + row * X)
    if GIVEN:
        q += tl.load(given + row)
    if not LAST:
        q += tl.load(dq + row)
    tl.store(dq + row, q)
    put_pull(pull, part * num_atoms + row, fx, fy, fz, xx, yy, zz, yz, xz, xy, VIRIAL)


@triton.jit
def convolve_gradient_kernel(
    row_ptr, sender, radial, slope, direction, key, values, charges, dm, dm_charges, dx, da, dq, given, last_slope,
    gradient, pull, num_atoms,
    A: tl.constexpr, R: tl.constexpr, H: tl.constexpr, X: tl.constexpr, VALUES: tl.constexpr, G: tl.constexpr,
    BA: tl.constexpr, U: tl.constexpr, KEYED: tl.constexpr, CHARGES: tl.constexpr, LAST: tl.constexpr,
    GIVEN: tl.constexpr, ACTIVATED: tl.constexpr, VIRIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, part, member): forces on atom i through the sums, and the gradient in its features or its charge.

    Args:
        da: [N, A·R] the gradient in the features, of the passes above read unless LAST, written; without KEYED alone,
            where the features are those of the elements. dq: [N], the same of the charges (CHARGES).
        given: [N] eV/e, dE/dq of other terms (GIVEN), which the last charges have.
        last_slope: [N, G] slope of the activation of what the pass below gave (ACTIVATED).
        gradient: [N, G] the gradient in what the pass below gave before its activation, written.
        pull: [parts, num_atoms, 9] force and virial, written; num_atoms: M·N.
    """
    part = tl.program_id(1)
    after_previous(PDL)
    before_next(PDL)
    if part < A // BA:
        gradient_of_features(
            row_ptr, sender, radial, slope, direction, key, values, dm, dx, da, last_slope, gradient, pull, num_atoms,
            part, A, R, X, VALUES, G, BA, U, KEYED, LAST, ACTIVATED, VIRIAL,
        )  # fmt: skip
    elif CHARGES:
        gradient_of_charges(
            row_ptr, sender, radial, slope, direction, charges, dm_charges, dx + (2 * A * R + A * H), dq, given, pull,
            num_atoms, part, R, X, U, LAST, GIVEN, VIRIAL,
        )  # fmt: skip


@triton.jit
def sum_slots_kernel(
    pull, forces, virial, num_atoms, SLOTS: tl.constexpr, BM: tl.constexpr, VIRIAL: tl.constexpr, PDL: tl.constexpr
):
    """Sum forces [N, 3] and virial [N, 9] over all slots of pull [SLOTS, N, 9]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    after_previous(PDL)
    before_next(PDL)
    c = tl.arange(0, 16)[None, :]
    ok = (rows < num_atoms)[:, None] & (c < (9 if VIRIAL else 3))
    at = rows[:, None].to(tl.int64) * 9 + c
    total = tl.zeros([BM, 16], tl.float32)
    for slot in range(SLOTS):
        total += tl.load(pull + (num_atoms * slot).to(tl.int64) * 9 + at, ok, other=0.0)
    tl.store(forces + rows[:, None].to(tl.int64) * 3 + c, total, ok & (c < 3))
    if VIRIAL:
        # pull has xx, yy, zz, yz, xz, xy after the force
        first = tl.where(c < 6, (c - 3) * 4, tl.where(c == 6, 5, tl.where(c == 7, 2, 1)))
        second = tl.where(c < 6, first, tl.where(c == 6, 7, tl.where(c == 7, 6, 3)))
        to, ok = virial + rows[:, None].to(tl.int64) * 9, ok & (c >= 3)
        tl.store(to + first, total, ok)
        tl.store(to + second, total, ok)


@triton.jit
def equilibrate_kernel(
    ptr, total_charge, predicted, before, x, charges, charges64, moments,
    X: tl.constexpr, PLACE: tl.constexpr, FIRST: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, 0, member): the charges of structure b, which sum to its total charge.

    Args:
        total_charge: [N] of each atom's structure. predicted: [N, 2] charges, or their change, and weights f.
        before: [N] float64, charges of the pass before (unless FIRST).
        x: [N, X] what the next pass reads; the charge is its number PLACE. charges, charges64: [N], written.
        moments: [N, 2] float64, in the row of the first atom what the charges lack over Σ u, and Σ u, written, where
            u = f² + ε.
    """
    b = tl.program_id(0)
    after_previous(PDL)
    before_next(PDL)
    first_row = tl.program_id(2) * tl.load(ptr + tl.num_programs(0))
    start, end = first_row + tl.load(ptr + b), first_row + tl.load(ptr + b + 1)
    sum_q, largest = sums_of_charges(predicted, before, start, end, FIRST, EXACT, BM)
    if start < end:
        lacking = (tl.load(total_charge + start - first_row).to(tl.float64) - tl.sum(sum_q, 0)) / largest
        tl.store(moments + start * 2, lacking)
        tl.store(moments + start * 2 + 1, largest)
        for first in range(start, end, BM):
            i = first + tl.arange(0, BM)
            use = i < end
            i = i.to(tl.int64)
            q = charge_before(predicted, before, i, use, FIRST) + weight_of(predicted, i, use, EXACT) * lacking
            tl.store(charges64 + i, q, use)
            tl.store(charges + i, q.to(tl.float32), use)
            tl.store(x + i * X + PLACE, q.to(tl.float32), use)


@triton.jit
def equilibrate_gradient_kernel(
    ptr, predicted, moments, dq, last_slope, gradient,
    W: tl.constexpr, G: tl.constexpr, EXACT: tl.constexpr, ACTIVATED: tl.constexpr, BM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, 0, member): from dE/dq of equilibrated charges, dq [N], the gradients of predicted ones and weights.

    Args:
        dq: overwritten by the gradient of the charges before, or of the change of charges in the pass below.
        gradient: [N, G], numbers W and W + 1 of a row are written, times last_slope (ACTIVATED).
    """
    b = tl.program_id(0)
    after_previous(PDL)
    before_next(PDL)
    first_row = tl.program_id(2) * tl.load(ptr + tl.num_programs(0))
    start, end = first_row + tl.load(ptr + b), first_row + tl.load(ptr + b + 1)
    sums = tl.zeros([BM], tl.float64)
    for first in range(start, end, BM):
        i = first + tl.arange(0, BM)
        use = i < end
        i = i.to(tl.int64)
        f = tl.load(predicted + i * 2 + 1, use, other=0.0).to(tl.float64)
        u = f * f
        if EXACT:
            u += 1e-6
        sums += tl.load(dq + i, use, other=0.0).to(tl.float64) * u
    if start < end:
        mean = tl.sum(sums, 0) / tl.load(moments + start * 2 + 1)
        lacking = tl.load(moments + start * 2)
        for first in range(start, end, BM):
            i = first + tl.arange(0, BM)
            use = i < end
            i = i.to(tl.int64)
            f = tl.load(predicted + i * 2 + 1, use, other=0.0).to(tl.float64)
            own = tl.load(dq + i, use, other=0.0).to(tl.float64) - mean
            by_q, by_f = own.to(tl.float32), (2.0 * f * lacking * own).to(tl.float32)
            tl.store(dq + i, by_q, use)
            if ACTIVATED:
                by_q *= tl.load(last_slope + i * G + W, use, other=0.0)
                by_f *= tl.load(last_slope + i * G + W + 1, use, other=0.0)
            tl.store(gradient + i * G + W, by_q, use)
            tl.store(gradient + i * G + W + 1, by_f, use)


@triton.jit
def dense_divided(
    a, w, rows, cols, ok, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KS: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`dense` for few atoms: each of KS warps sums a part of K, so that no warp waits for a long row of products.

    It reads all its weights before it waits for the previous kernel.
    """
    k = (tl.arange(0, KS) * (K // KS))[:, None] + tl.arange(0, BK)[None, :]
    x_at = a + rows[None, :, None].to(tl.int64) * K + k[:, None, :]
    w_at = w + k[:, :, None] * N + cols[None, None, :]
    there = ok[None, :, None]
    y = tl.zeros([KS, BM, BN], tl.float32)
    ahead = ()
    for step in tl.static_range(K // KS // BK):
        ahead = ahead + (tl.load(w_at + step * BK * N),)  # type: ignore[assignment]  # noqa: RUF005
    after_previous(PDL)
    before_next(PDL)
    for step in tl.static_range(K // KS // BK):
        x = tl.load(x_at + step * BK, there, other=0.0, cache_modifier=".cg")
        y = dot(x, ahead[step], y, PREC)
    return settle(tl.sum(y, 0), BM, BN)


@triton.jit
def product(
    a, w, rows, cols, ok, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KS: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A @ W [BM, BN], after the kernel before. K is divided among KS warps, or not (1)."""
    if KS > 1:
        y = dense_divided(a, w, rows, cols, ok, K, N, BM, BN, BK, KS, PREC, PDL)
    else:
        after_previous(PDL)
        before_next(PDL)
        y = dense(a, w, rows, cols, ok, K, N, BM, BN, BK, PREC)
    return y


@triton.jit
def of_member(w, member, K: tl.constexpr, N: tl.constexpr, PREC: tl.constexpr):
    """Return where the weights of a member begin."""
    return w + member * (2 * K * N if PREC == "fp16x3" else K * N)


@triton.jit
def layer_kernel(
    x, w, bias, y, slope, before, predicted, num_atoms,
    K: tl.constexpr, N: tl.constexpr, Y: tl.constexpr, W: tl.constexpr, ACTIVATE: tl.constexpr, UPDATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A linear layer, then GELU, x Φ(x), with its slope (ACTIVATE), of the N = num_atoms rows of each member.

    Args:
        x: [., K]. w: [K, N]. y: [., Y], slope: [., N], written.
        before: [., Y], UPDATE: the first W numbers are added to these; the next two go to predicted [., 2].
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    member = tl.program_id(2).to(tl.int64)
    first = member * num_atoms
    x, y, slope = x + first * K, y + first * Y, slope + first * N
    before, predicted = before + first * Y, predicted + first * 2
    w, bias = of_member(w, member, K, N, PREC), bias + member * N
    ok = rows < num_atoms
    out = product(x, w, rows, cols, ok, K, N, BM, BN, BK, KS, PREC, PDL) + tl.load(bias + cols)[None, :]
    rows = rows[:, None].to(tl.int64)
    if ACTIVATE:
        below = 0.5 * (1.0 + tl.erf(out * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * out * out)
        tl.store(slope + rows * N + cols[None, :], below + out * density, ok[:, None])
        out = out * below
    if UPDATE:
        kept = ok[:, None] & (cols < W)[None, :]
        at = rows * Y + cols[None, :]
        tl.store(y + at, out + tl.load(before + at, kept, other=0.0), kept)
        charges = ok[:, None] & ((cols >= W) & (cols < W + 2))[None, :]
        tl.store(predicted + rows * 2 + (cols - W)[None, :], out, charges)
    else:
        tl.store(y + rows * Y + cols[None, :], out, ok[:, None])


@triton.jit
def layer_gradient_kernel(
    g, w, slope, out, num_atoms,
    K: tl.constexpr, N: tl.constexpr, ACTIVATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradient before the activation of the layer below (ACTIVATED: times its slope [., N]), from g [., K]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    member = tl.program_id(2).to(tl.int64)
    first = member * num_atoms
    g, slope, out, w = g + first * K, slope + first * N, out + first * N, of_member(w, member, K, N, PREC)
    ok = rows < num_atoms
    value = product(g, w, rows, cols, ok, K, N, BM, BN, BK, KS, PREC, PDL)
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    if ACTIVATED:
        value *= tl.load(slope + at, ok[:, None], other=0.0)
    tl.store(out + at, value, ok[:, None])


@triton.jit
def energy_kernel(
    y, slope, w, bias, energy, gradient, num_atoms,
    N: tl.constexpr, LANES: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Energies [N] from the last hidden layer of the head, y [., N], and the gradient before its activation."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, LANES)[None, :]
    member = tl.program_id(2).to(tl.int64)
    first = member * num_atoms
    y, slope, energy, gradient = y + first * N, slope + first * N, energy + first, gradient + first * N
    w, bias = w + member * N, bias + member
    after_previous(PDL)
    before_next(PDL)
    ok = (rows < num_atoms)[:, None] & (c < N)
    at = rows[:, None].to(tl.int64) * N + c
    weight = tl.load(w + c, c < N, other=0.0)
    total = tl.sum(tl.load(y + at, ok, other=0.0) * weight, 1) + tl.load(bias)
    tl.store(energy + rows, total, rows < num_atoms)
    tl.store(gradient + at, tl.load(slope + at, ok, other=0.0) * weight, ok)
