"""Neighbor search of one small structure on the GPU: everything in one kernel.

Every program works out the geometry of the cell and takes BI receivers. A candidate is an atom and an image of it;
each lane passes its own candidates, which follow each other, so that edges in the order of the lanes are in the order
of senders and images. A lane notes for each receiver at which turns its candidate was a neighbor, a bit each. Then the
programs tell each other how many edges they found, wait for all of them (the launch is cooperative: all run at the same
time), know thereby where their rows begin and whether all fits, and write.

Tests are float32 on fractional coordinates; a turn in which rounding could decide is tested again in float64. A lane
with more than 32 candidates has no bits for them: counting and listing then both test in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import after_previous
from .triton_cells import bits_set
from .triton_setup import _NOT_FINITE, _OVERFLOW, _TOO_THIN, few_images, flag_coincident, geometry

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds a float32 to the nearest integer


@triton.jit
def fraction(x, y, z, column, periodic, origin):
    """Fractional coordinate, the whole cells (or the origin) to take from it, and whether it is finite, not absurd."""
    f = x * column[0] + y * column[1] + z * column[2]
    return f, tl.where(periodic == 1, tl.floor(f), origin), tl.abs(f) < 1073741824.0  # NaN fails every comparison


@triton.jit
def load_atoms(pos, j, mask, h, inverse, periodic, origin):
    """Atoms j: fractional coordinates in the cell (float32), what was taken from them, positions in the cell (float64),
    and whether all is finite."""
    x = tl.load(pos + j * 3 + 0, mask=mask, other=0.0).to(tl.float64)
    y = tl.load(pos + j * 3 + 1, mask=mask, other=0.0).to(tl.float64)
    z = tl.load(pos + j * 3 + 2, mask=mask, other=0.0).to(tl.float64)
    f0, a0, fine0 = fraction(x, y, z, inverse[0], periodic[0], origin[0])
    f1, a1, fine1 = fraction(x, y, z, inverse[1], periodic[1], origin[1])
    f2, a2, fine2 = fraction(x, y, z, inverse[2], periodic[2], origin[2])
    x -= a0 * h[0][0] + a1 * h[1][0] + a2 * h[2][0]
    y -= a0 * h[0][1] + a1 * h[1][1] + a2 * h[2][1]
    z -= a0 * h[0][2] + a1 * h[1][2] + a2 * h[2][2]
    f = ((f0 - a0).to(tl.float32), (f1 - a1).to(tl.float32), (f2 - a2).to(tl.float32))
    return f, (a0, a1, a2), (x, y, z), fine0 & fine1 & fine2


@triton.jit
def candidate(v, num_images):
    """Candidate number v: its atom and the number of its image."""
    j = v
    t = v * 0
    if num_images > 1:
        j = v // num_images
        t = v % num_images
    return j, t


@triton.jit
def image_of(t, images, num_images):
    """Image number t as whole cells beyond the nearest image."""
    t0 = t
    t1 = t
    t2 = t
    if num_images > 1:
        width1 = 2 * images[1] + 1
        width2 = 2 * images[2] + 1
        t0 = t // (width1 * width2) - images[0]
        t1 = t // width2 % width1 - images[1]
        t2 = t % width2 - images[2]
    return t0, t1, t2


@triton.jit
def shift_along(fi, fj, t, periodic):
    """The shift from receiver to sender along one lattice vector: t cells beyond the nearest image."""
    d = fj - fi
    return (t.to(tl.float32) - ((d + _ROUND) - _ROUND)) * periodic


@triton.jit
def difference(xi, xj, s, h, k: tl.constexpr):
    """Component k of the vector from receiver to sender, float64."""
    return xj[k] - xi[k] + s[0] * h[0][k] + s[1] * h[1][k] + s[2] * h[2][k]


@triton.jit
def exact_turn(pos, limit, h, inverse, periodic, origin, images, num_images, n, turn, turns, rows, BJ: tl.constexpr):
    """Which candidates of a turn are neighbors of the receivers `rows` [BI, BJ] in float64; atoms and image numbers."""
    v = tl.arange(0, BJ) * turns + turn
    j, t = candidate(v, num_images)
    t0, t1, t2 = image_of(t, images, num_images)
    real, inside = rows < n, j < n
    fi, _ai, xi, _fine_i = load_atoms(pos, rows[:, None], real[:, None], h, inverse, periodic, origin)
    fj, _aj, xj, _fine_j = load_atoms(pos, j[None, :], inside[None, :], h, inverse, periodic, origin)
    s = (
        shift_along(fi[0], fj[0], t0[None, :], periodic[0]),
        shift_along(fi[1], fj[1], t1[None, :], periodic[1]),
        shift_along(fi[2], fj[2], t2[None, :], periodic[2]),
    )
    x = difference(xi, xj, s, h, 0)
    y = difference(xi, xj, s, h, 1)
    z = difference(xi, xj, s, h, 2)
    itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j, -1)
    near = inside[None, :] & real[:, None] & (itself[None, :] != rows[:, None])
    return near & (x * x + y * y + z * z < limit), j, t


@triton.jit
def sweep_all(
    pos, rc, h, inverse, periodic, origin, images, num_images, n, turns, rows, BI: tl.constexpr, BJ: tl.constexpr
):
    """Pass all candidates by the receivers `rows`: the bits of the turns at which they were neighbors [BI, BJ]."""
    real = rows < n
    fi, _ai, _xi, _fine_i = load_atoms(pos, rows[:, None], real[:, None], h, inverse, periodic, origin)
    h32 = (
        (h[0][0].to(tl.float32), h[0][1].to(tl.float32), h[0][2].to(tl.float32)),
        (h[1][0].to(tl.float32), h[1][1].to(tl.float32), h[1][2].to(tl.float32)),
        (h[2][0].to(tl.float32), h[2][1].to(tl.float32), h[2][2].to(tl.float32)),
    )
    limit = rc * rc
    limit32 = limit.to(tl.float32)
    # u = 2^-24. Along a lattice vector two fractions and their difference round by 1.5 u (m images beyond: m u more),
    # along a free one by u (2 |f| + 2 cutoff); the products and sums of what becomes of that, at most m + 1/2 cells
    # (one cutoff), by 4 u times it. That bounds the distance's error, 2 cutoff times that the square's, which itself
    # rounds by 5 u cutoff² at most.
    error = tl.zeros([BI, 1], tl.float32)
    for k in tl.static_range(3):
        length = tl.sqrt(h32[k][0] * h32[k][0] + h32[k][1] * h32[k][1] + h32[k][2] * h32[k][2])
        weight = tl.where(periodic[k] == 1, 4.0 + 5.0 * images[k], 2.0 * tl.abs(fi[k]) + 6.0 * rc.to(tl.float32))
        error += weight * length
    rc32 = rc.to(tl.float32)
    margin = (2.2 * error + 6.0 * rc32) * rc32 / 16777216.0
    bits = tl.zeros([BI, BJ], tl.int32)
    doubts = tl.zeros([BI, BJ], tl.int32)
    for turn in range(turns):
        v = tl.arange(0, BJ) * turns + turn
        j, t = candidate(v, num_images)
        t0, t1, t2 = image_of(t, images, num_images)
        inside = j < n
        itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j, -1)
        fj, _aj, _xj, _fine_j = load_atoms(pos, j[None, :], inside[None, :], h, inverse, periodic, origin)
        d0 = fj[0] - fi[0] + shift_along(fi[0], fj[0], t0[None, :], periodic[0])
        d1 = fj[1] - fi[1] + shift_along(fi[1], fj[1], t1[None, :], periodic[1])
        d2 = fj[2] - fi[2] + shift_along(fi[2], fj[2], t2[None, :], periodic[2])
        x = tl.fma(d0, h32[0][0], tl.fma(d1, h32[1][0], d2 * h32[2][0]))
        y = tl.fma(d0, h32[0][1], tl.fma(d1, h32[1][1], d2 * h32[2][1]))
        z = tl.fma(d0, h32[0][2], tl.fma(d1, h32[1][2], d2 * h32[2][2]))
        beyond = tl.fma(x, x, tl.fma(y, y, tl.fma(z, z, -limit32)))
        bit = 1 << (turn & 31)
        known = inside[None, :] & real[:, None] & (itself[None, :] != rows[:, None])
        bits |= tl.where(known & (beyond < 0), bit, 0)
        doubts |= tl.where(known & (tl.abs(beyond) < margin), bit, 0)
    if tl.max(tl.max((doubts != 0).to(tl.int32), axis=1), axis=0) > 0:
        for turn in range(turns):
            if tl.max(tl.max((doubts >> turn) & 1, axis=1), axis=0) > 0:
                near, _j, _t = exact_turn(
                    pos, limit, h, inverse, periodic, origin, images, num_images, n, turn, turns, rows, BJ
                )
                bits = (bits & ~(1 << turn)) | (near.to(tl.int32) << turn)
    return bits


@triton.jit(do_not_specialize=["N", "capacity"])
def search_single(
    pos, cell, pbc, cutoff, ptr, row_ptr, needed, flag, sender, keys, receiver, shift, vectors, distances,
    status, epoch, N, capacity,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr, FILL: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The whole search of structure 0; program p has the receivers p·BI ….

    Args:
        status: [programs] int64, what each program found: number of the launch · 2^32 + edges.
        epoch: [1] int32, launches so far.
        PROGRAMS: a power of two, not less than the number of programs.
    """
    after_previous(PDL)
    pid = tl.program_id(0)
    launch = tl.load(epoch) + 1
    n = tl.load(ptr + 1)
    rc = tl.load(cutoff)
    (
        ax, ay, az, bx, by, bz, cx, cy, cz, ux, uy, uz, vx, vy, vz, wx, wy, wz,
        p0, p1, p2, m0, m1, m2, _r0, _r1, _r2, usable,
    ) = geometry(cell, pbc, rc, 0)  # fmt: skip
    h = ((ax, ay, az), (bx, by, bz), (cx, cy, cz))
    inverse = ((ux, uy, uz), (vx, vy, vz), (wx, wy, wz))
    periodic = (p0, p1, p2)
    x = tl.load(pos, mask=n > 0, other=0.0).to(tl.float64)
    y = tl.load(pos + 1, mask=n > 0, other=0.0).to(tl.float64)
    z = tl.load(pos + 2, mask=n > 0, other=0.0).to(tl.float64)
    origin = (x * ux + y * uy + z * uz, x * vx + y * vy + z * vz, x * wx + y * wy + z * wz)
    searchable = few_images(m0, m1, m2, n)
    good = (usable & searchable).to(tl.int32)
    images = (m0 * good, m1 * good, m2 * good)
    num_images = (2 * images[0] + 1) * (2 * images[1] + 1) * (2 * images[2] + 1)
    turns = (n * num_images + BJ - 1) // BJ * good

    rows = pid * BI + tl.arange(0, BI)
    real = rows < n
    _f, _a, _x, fine = load_atoms(pos, rows, real, h, inverse, periodic, origin)
    if tl.max((real & (~fine)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(flag, _NOT_FINITE)
    limit = rc * rc
    bits = tl.zeros([BI, BJ], tl.int32)
    count = tl.zeros([BI, BJ], tl.int32)
    if turns <= 32:
        bits = sweep_all(pos, rc, h, inverse, periodic, origin, images, num_images, n, turns, rows, BI, BJ)
        count = bits_set(bits)
    else:
        for turn in range(turns):
            near, _j, _t = exact_turn(
                pos, limit, h, inverse, periodic, origin, images, num_images, n, turn, turns, rows, BJ
            )
            count += near.to(tl.int32)
    length = tl.sum(count, axis=1)
    found = tl.sum(length, axis=0)

    # tell, and wait for the others; nothing but these words passes between programs
    tl.atomic_xchg(status + pid, (launch.to(tl.int64) << 32) | found.to(tl.int64), sem="relaxed")
    p = tl.arange(0, PROGRAMS)
    there = p < tl.num_programs(0)
    words = tl.load(status + p, mask=there, other=0, volatile=True)
    while tl.max((there & ((words >> 32).to(tl.int32) != launch)).to(tl.int32), axis=0) > 0:
        words = tl.load(status + p, mask=there, other=0, volatile=True)
    words = words & 0xFFFFFFFF
    total = tl.sum(words, axis=0)
    first = tl.sum(tl.where(p < pid, words, 0), axis=0)
    fits = total <= capacity
    ends = first + tl.cumsum(length, axis=0)
    tl.store(row_ptr + rows + 1, tl.where(fits, ends, 0).to(tl.int32), mask=rows < N)
    if pid == 0:
        tl.store(row_ptr, 0)
        tl.store(needed, total)
        tl.store(epoch, launch)
        wrong = tl.where(usable, tl.where(searchable, 0, _TOO_THIN), _NOT_FINITE) | tl.where(fits, 0, _OVERFLOW)
        if wrong != 0:
            tl.atomic_or(flag, wrong)

    if FILL:
        if fits & (found > 0):
            edge = (ends - length).to(tl.int32)[:, None] + tl.cumsum(count, axis=1) - count
            for turn in range(turns):
                v = tl.arange(0, BJ) * turns + turn
                j, t = candidate(v, num_images)
                near = (bits >> (turn & 31)) & 1 == 1
                if turns > 32:
                    near, j, t = exact_turn(
                        pos, limit, h, inverse, periodic, origin, images, num_images, n, turn, turns, rows, BJ
                    )
                key = t[None, :] * BI + tl.arange(0, BI)[:, None]
                tl.store(sender + edge, tl.broadcast_to(j[None, :], [BI, BJ]), mask=near)
                tl.store(keys + edge, key, mask=near)
                edge += near.to(tl.int32)
            if RECEIVER or SHIFT or VECTORS or DISTANCES:
                tl.debug_barrier()  # other threads read what was written here
                low = first.to(tl.int32)
                high = low + found
                for at in range(low, high, BJ):
                    e = at + tl.arange(0, BJ)
                    mask = e < high
                    j = tl.load(sender + e, mask=mask, other=0)
                    key = tl.load(keys + e, mask=mask, other=0)
                    t = key // BI
                    i = pid * BI + key - t * BI
                    t0, t1, t2 = image_of(t, images, num_images)
                    fi, ai, xi, _fine_i = load_atoms(pos, i, mask, h, inverse, periodic, origin)
                    fj, aj, xj, _fine_j = load_atoms(pos, j, mask, h, inverse, periodic, origin)
                    s = (
                        shift_along(fi[0], fj[0], t0, p0),
                        shift_along(fi[1], fj[1], t1, p1),
                        shift_along(fi[2], fj[2], t2, p2),
                    )
                    e3 = e.to(tl.int64) * 3  # may pass 2^31
                    if RECEIVER:
                        tl.store(receiver + e, i, mask=mask)
                    if SHIFT:
                        for k in tl.static_range(3):
                            cells = (s[k] + (ai[k] - aj[k]) * periodic[k]).to(tl.int32)
                            tl.store(shift + e3 + k, cells, mask=mask)
                    if VECTORS or DISTANCES:
                        dx = difference(xi, xj, s, h, 0)
                        dy = difference(xi, xj, s, h, 1)
                        dz = difference(xi, xj, s, h, 2)
                        if VECTORS:
                            tl.store(vectors + e3, dx, mask=mask)
                            tl.store(vectors + e3 + 1, dy, mask=mask)
                            tl.store(vectors + e3 + 2, dz, mask=mask)
                        square = dx * dx + dy * dy + dz * dz
                        flag_coincident(flag, square, mask)
                        if DISTANCES:
                            tl.store(distances + e, tl.sqrt(square), mask=mask)
