"""Neighbor search of small structures on the GPU: every pair of a structure is tested, rows come out in order.

One kernel, run twice: count (FILL = False) and list (FILL = True) by the same tests. A tile is BI receivers times BJ
candidates, where the candidates run over senders and, innermost, over images. Each row therefore meets its senders in
ascending order, and its place in the output is a prefix sum: no sort and no atomics. The work is Σ n_b² over the
structures of the batch.

Tests are float32 on fractional coordinates; if any distance of a tile of rows is so close to the cutoff that rounding
could decide, the rows are done again in float64 (`doubts`), alike in both passes. So the list is that of a float64
search.

Images between wrapped atoms, s = (s0, s1, s2) with |s| ≤ 31, are packed as 64² (s0 + 32) + 64 (s1 + 32) + s2 + 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..core.triton_launch import after_previous, before_next
from .triton_cells import bits_set
from .triton_setup import (
    _NOT_FINITE,
    _OVERFLOW,
    _REALS,
    _TOO_THIN,
    _WHOLE,
    few_images,
    first_image,
    flag_coincident,
    geometry,
)

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds a float32 to the nearest integer
_FARTHEST = tl.constexpr(1073741824.0)  # 2^30 cells or Å


@triton.jit
def row_real(reals, column, system, mask):
    """A column of the float64 table for each receiver, [BI, 1]."""
    return tl.load(reals + system * _REALS + column, mask=mask, other=0.0)[:, None]


@triton.jit
def test_pairs(
    fractions, wrapped, batch, reals, whole, cutoff, rows, real, system, first, last, start, sender, images, N,
    FILL: tl.constexpr, EXACT: tl.constexpr, BATCHED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Pass the candidates first … last − 1 and their images by the receivers `rows`.

    Returns:
        neighbors of each receiver, [BI] int32, and 1 if float32 could not decide, else 0.
    """
    w = whole + system * _WHOLE
    p0 = tl.load(w + 0, mask=real, other=0)[:, None].to(tl.float32)
    p1 = tl.load(w + 1, mask=real, other=0)[:, None].to(tl.float32)
    p2 = tl.load(w + 2, mask=real, other=0)[:, None].to(tl.float32)
    m0 = tl.load(w + 3, mask=real, other=0)
    m1 = tl.load(w + 4, mask=real, other=0)
    m2 = tl.load(w + 5, mask=real, other=0)
    # in a batch, loop over the images that any of the structures needs
    width1 = tl.max(m1, axis=0)
    width2 = tl.max(m2, axis=0)
    num_images = tl.max(m0, axis=0) * width1 * width2
    first0, half0 = first_image(m0[:, None])
    first1, half1 = first_image(m1[:, None])
    first2, half2 = first_image(m2[:, None])

    fi0 = tl.load(fractions + rows, mask=real, other=0.0)[:, None]
    fi1 = tl.load(fractions + N + rows, mask=real, other=0.0)[:, None]
    fi2 = tl.load(fractions + 2 * N + rows, mask=real, other=0.0)[:, None]
    h00 = row_real(reals, 0, system, real).to(tl.float32)
    h01 = row_real(reals, 1, system, real).to(tl.float32)
    h02 = row_real(reals, 2, system, real).to(tl.float32)
    h10 = row_real(reals, 3, system, real).to(tl.float32)
    h11 = row_real(reals, 4, system, real).to(tl.float32)
    h12 = row_real(reals, 5, system, real).to(tl.float32)
    h20 = row_real(reals, 6, system, real).to(tl.float32)
    h21 = row_real(reals, 7, system, real).to(tl.float32)
    h22 = row_real(reals, 8, system, real).to(tl.float32)
    rc = tl.load(cutoff)
    limit = (rc * rc).to(tl.float32)
    closest = tl.full([BI, BJ], 1e30, tl.float32)
    hits = tl.zeros([BI, BJ], tl.int32)
    edge_at = start
    for at in range(0, (last - first) * num_images, BJ):
        candidate = at + tl.arange(0, BJ)
        j = first + candidate
        c0 = tl.zeros([BJ], tl.int32)
        c1 = tl.zeros([BJ], tl.int32)
        c2 = tl.zeros([BJ], tl.int32)
        if num_images > 1:
            j = first + candidate // num_images
            image = candidate % num_images
            c0 = image // (width1 * width2)
            c1 = image // width2 % width1
            c2 = image % width2
        t0 = first0 + c0[None, :]
        t1 = first1 + c1[None, :]
        t2 = first2 + c2[None, :]
        inside = j < last
        d0 = tl.load(fractions + j, mask=inside, other=0.0)[None, :] - fi0
        d1 = tl.load(fractions + N + j, mask=inside, other=0.0)[None, :] - fi1
        d2 = tl.load(fractions + 2 * N + j, mask=inside, other=0.0)[None, :] - fi2
        s0 = (t0.to(tl.float32) - ((d0 - half0 + _ROUND) - _ROUND)) * p0
        s1 = (t1.to(tl.float32) - ((d1 - half1 + _ROUND) - _ROUND)) * p1
        s2 = (t2.to(tl.float32) - ((d2 - half2 + _ROUND) - _ROUND)) * p2
        # an atom is not its own neighbor in the image t = 0, where it is itself
        itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j[None, :], -1)
        near = (inside[None, :] & real[:, None]) & (itself != rows[:, None])
        if BATCHED:
            near &= tl.load(batch + j, mask=inside, other=-1)[None, :] == system[:, None]
            near &= (c0[None, :] < m0[:, None]) & (c1[None, :] < m1[:, None]) & (c2[None, :] < m2[:, None])
        if EXACT:
            square = tl.zeros([BI, BJ], tl.float64)
            for k in tl.static_range(3):
                xj = tl.load(wrapped + j * 4 + k, mask=inside, other=0.0)[None, :]
                xi = tl.load(wrapped + rows * 4 + k, mask=real, other=0.0)[:, None]
                dx = xj - xi + s0 * row_real(reals, k, system, real)
                dx += s1 * row_real(reals, 3 + k, system, real)
                dx += s2 * row_real(reals, 6 + k, system, real)
                square += dx * dx
            near &= square < rc * rc
        else:
            d0 += s0
            d1 += s1
            d2 += s2
            x = tl.fma(d0, h00, tl.fma(d1, h10, d2 * h20))
            y = tl.fma(d0, h01, tl.fma(d1, h11, d2 * h21))
            z = tl.fma(d0, h02, tl.fma(d1, h12, d2 * h22))
            beyond = tl.fma(x, x, tl.fma(y, y, tl.fma(z, z, -limit)))
            if not FILL:
                closest = tl.minimum(closest, tl.where(near, tl.abs(beyond), 1e30))
            near &= beyond < 0
        hit = near.to(tl.int32)
        if FILL:
            edge = edge_at[:, None] + tl.cumsum(hit, axis=1) - 1
            packed = ((s0 + 32.0) * 4096.0 + (s1 + 32.0) * 64.0 + (s2 + 32.0)).to(tl.int32)
            tl.store(sender + edge, tl.broadcast_to(j[None, :], [BI, BJ]), mask=near)
            tl.store(images + edge, packed, mask=near)
            edge_at += tl.sum(hit, axis=1)
        else:
            hits += hit
    in_doubt = 0
    if not (FILL or EXACT):
        # a fraction is off by 2^-23 at most after the difference: Σ_k (1 + |f_k|) |h_k| 2^-21 bounds the distance's
        # error, 2 cutoff times that the square's
        reach = (1 + tl.abs(fi0)) * (tl.abs(h00) + tl.abs(h01) + tl.abs(h02))
        reach += (1 + tl.abs(fi1)) * (tl.abs(h10) + tl.abs(h11) + tl.abs(h12))
        reach += (1 + tl.abs(fi2)) * (tl.abs(h20) + tl.abs(h21) + tl.abs(h22))
        margin = 2.2 * rc * (reach + rc) / 2097152.0
        in_doubt = tl.max(tl.max((closest < margin).to(tl.int32), axis=1), axis=0)
    return tl.sum(hits, axis=1), in_doubt


@triton.jit(do_not_specialize=["N", "B", "capacity"])
def search_pairs(
    fractions, wrapped, batch, ptr, reals, whole, cutoff, counts, doubts, row_ptr, needed, sender, images,
    N, B, capacity, FILL: tl.constexpr, BATCHED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Count or list the neighbors of BI receivers."""
    after_previous(PDL)
    rows = tl.program_id(0) * BI + tl.arange(0, BI)
    real = rows < tl.load(ptr + B)  # atoms past ptr[B] are padding and have no neighbors
    system = tl.zeros([BI], tl.int32)
    first = tl.load(ptr)
    last = tl.load(ptr + 1)
    if BATCHED:  # the rows of a tile may belong to several structures
        system = tl.load(batch + rows, mask=real, other=0)
        first = tl.min(tl.load(ptr + system, mask=real, other=N), axis=0)
        last = tl.max(tl.load(ptr + system + 1, mask=real, other=0), axis=0)
    if FILL:
        if tl.load(needed) > capacity:
            last = first  # every row is empty then, and nothing may be written
        start = tl.load(row_ptr + rows, mask=real, other=0)
        if tl.load(doubts + tl.program_id(0)) != 0:
            test_pairs(
                fractions, wrapped, batch, reals, whole, cutoff, rows, real, system, first, last, start, sender, images,
                N, True, True, BATCHED, BI, BJ,
            )  # fmt: skip
        else:
            test_pairs(
                fractions, wrapped, batch, reals, whole, cutoff, rows, real, system, first, last, start, sender, images,
                N, True, False, BATCHED, BI, BJ,
            )  # fmt: skip
    else:
        none = tl.zeros([BI], tl.int32)
        found, in_doubt = test_pairs(
            fractions, wrapped, batch, reals, whole, cutoff, rows, real, system, first, last, none, sender, images,
            N, False, False, BATCHED, BI, BJ,
        )  # fmt: skip
        if in_doubt != 0:
            found, _ = test_pairs(
                fractions, wrapped, batch, reals, whole, cutoff, rows, real, system, first, last, none, sender, images,
                N, False, True, BATCHED, BI, BJ,
            )  # fmt: skip
        tl.store(doubts + tl.program_id(0), in_doubt)
        tl.store(counts + rows, found, mask=rows < N)


# --- Neighbor search of one small structure on the GPU: everything in one kernel ---
#
# Every program computes the geometry of the cell and takes BI receivers. A candidate is an atom and an image of it.
# Each lane tests consecutive candidates, so that edges in the order of the lanes are in the order of senders and
# images. For each receiver, a lane stores one bit for each turn in which its candidate was a neighbor. Then the
# programs publish their numbers of edges and wait for all others (the launch is cooperative: all run at the same time).
# From these numbers they know where their rows begin and whether all edges fit, and write.
#
# Tests are float32 on fractional coordinates; a turn in which rounding could decide is tested again in float64. A lane
# with more than 64 candidates has no bits for the last of them, which are tested twice.
#
# `lattice` holds what periodicity needs: cell, columns of its inverse, periodic directions, images along each lattice
# vector and in all. It takes so many registers that others go to memory. Structures that are not periodic have None,
# and Å from the first atom instead of fractional coordinates.


@triton.jit
def fraction(x, y, z, column, periodic, origin):
    """Fractional coordinate, the whole cells (or the origin) to take from it, and whether it is finite, not absurd."""
    f = x * column[0] + y * column[1] + z * column[2]
    return f, tl.where(periodic == 1, tl.floor(f), origin), tl.abs(f) < _FARTHEST  # NaN fails every comparison


@triton.jit
def load_atoms(pos, j, mask, origin, lattice):
    """Atoms j: fractional coordinates in the cell (float32), what was taken from them, positions in the cell (float64),
    and whether all is finite."""
    x = tl.load(pos + j * 3 + 0, mask=mask, other=0.0).to(tl.float64)
    y = tl.load(pos + j * 3 + 1, mask=mask, other=0.0).to(tl.float64)
    z = tl.load(pos + j * 3 + 2, mask=mask, other=0.0).to(tl.float64)
    if lattice is None:
        fine = (tl.abs(x) < _FARTHEST) & (tl.abs(y) < _FARTHEST) & (tl.abs(z) < _FARTHEST)
        a0, a1, a2 = origin
        x -= a0
        y -= a1
        z -= a2
        f = (x.to(tl.float32), y.to(tl.float32), z.to(tl.float32))
    else:
        h, inverse, periodic, _images, _num_images = lattice
        f0, a0, fine0 = fraction(x, y, z, inverse[0], periodic[0], origin[0])
        f1, a1, fine1 = fraction(x, y, z, inverse[1], periodic[1], origin[1])
        f2, a2, fine2 = fraction(x, y, z, inverse[2], periodic[2], origin[2])
        x -= a0 * h[0][0] + a1 * h[1][0] + a2 * h[2][0]
        y -= a0 * h[0][1] + a1 * h[1][1] + a2 * h[2][1]
        z -= a0 * h[0][2] + a1 * h[1][2] + a2 * h[2][2]
        f = ((f0 - a0).to(tl.float32), (f1 - a1).to(tl.float32), (f2 - a2).to(tl.float32))
        fine = fine0 & fine1 & fine2
    return f, (a0, a1, a2), (x, y, z), fine


@triton.jit
def candidate(v, lattice):
    """Candidate number v: its atom and the number of its image."""
    j = v
    t = v * 0
    if lattice is not None:
        num_images = lattice[4]
        if num_images > 1:
            j = v // num_images
            t = v % num_images
    return j, t


@triton.jit
def image_of(t, lattice):
    """Image number t along each lattice vector, see `first_image`."""
    t0 = t
    t1 = t
    t2 = t
    if lattice is not None:
        images = lattice[3]
        if lattice[4] > 1:
            t0 = t // (images[1] * images[2]) + first_image(images[0])[0]
            t1 = t // images[2] % images[1] + first_image(images[1])[0]
            t2 = t % images[2] + first_image(images[2])[0]
    return t0, t1, t2


@triton.jit
def shift_along(fi, fj, t, k: tl.constexpr, lattice):
    """The shift from receiver to sender along lattice vector k, of image t."""
    if lattice is None:
        shift = t.to(tl.float32)  # 0
    else:
        _h, _inverse, periodic, images, _num_images = lattice
        d = fj[k] - fi[k] - first_image(images[k])[1]
        shift = (t.to(tl.float32) - ((d + _ROUND) - _ROUND)) * periodic[k]
    return shift


@triton.jit
def shifts(fi, fj, t0, t1, t2, lattice):
    """The shifts from receiver to sender along the three lattice vectors, of the image (t0, t1, t2)."""
    return (
        shift_along(fi, fj, t0, 0, lattice),
        shift_along(fi, fj, t1, 1, lattice),
        shift_along(fi, fj, t2, 2, lattice),
    )


@triton.jit
def difference(xi, xj, s, lattice, k: tl.constexpr):
    """Component k of the vector from receiver to sender, float64."""
    d = xj[k] - xi[k]
    if lattice is not None:
        h = lattice[0]
        d = d + s[0] * h[0][k] + s[1] * h[1][k] + s[2] * h[2][k]
    return d


@triton.jit
def exact_turn(pos, limit, origin, lattice, n, turn, turns, rows, BJ: tl.constexpr):
    """Which candidates of a turn are neighbors of the receivers `rows` [BI, BJ] in float64; atoms and image numbers."""
    v = tl.arange(0, BJ) * turns + turn
    j, t = candidate(v, lattice)
    t0, t1, t2 = image_of(t, lattice)
    real, inside = rows < n, j < n
    fi, _ai, xi, _fine_i = load_atoms(pos, rows[:, None], real[:, None], origin, lattice)
    fj, _aj, xj, _fine_j = load_atoms(pos, j[None, :], inside[None, :], origin, lattice)
    s = shifts(fi, fj, t0[None, :], t1[None, :], t2[None, :], lattice)
    x = difference(xi, xj, s, lattice, 0)
    y = difference(xi, xj, s, lattice, 1)
    z = difference(xi, xj, s, lattice, 2)
    itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j, -1)
    near = inside[None, :] & real[:, None] & (itself[None, :] != rows[:, None])
    return near & (x * x + y * y + z * z < limit), j, t


@triton.jit
def rounding(fi, rc, lattice):
    """Bound of how far rounding to float32 can move the square of a distance near the cutoff, for receivers at fi."""
    # u = 2^-24. Along a lattice vector two fractions and their difference round by 1.5 u (m = w/2 images: m u more),
    # along a free one by u (2 |f| + 2 cutoff); the products and sums of what becomes of that, at most m + 1/2 cells
    # (one cutoff), by 4 u times it. That bounds the distance's error, 2 cutoff times that the square's, which itself
    # rounds by 5 u cutoff² at most.
    rc32 = rc.to(tl.float32)
    error = tl.zeros_like(fi[0])
    for k in tl.static_range(3):
        free = 2.0 * tl.abs(fi[k]) + 6.0 * rc32
        if lattice is None:
            error += free
        else:
            h, _inverse, periodic, images, _num_images = lattice
            x, y, z = h[k][0].to(tl.float32), h[k][1].to(tl.float32), h[k][2].to(tl.float32)
            weight = tl.where(periodic[k] == 1, 4.0 + 5.0 * (images[k] // 2), free)
            error += weight * tl.sqrt(x * x + y * y + z * z)
    return (2.2 * error + 6.0 * rc32) * rc32 / 16777216.0


@triton.jit
def cartesian(d, lattice, k: tl.constexpr):
    """Component k of the vector of fractional coordinates d, float32."""
    if lattice is None:
        x = d[k]
    else:
        h = lattice[0]
        x = tl.fma(d[0], h[0][k].to(tl.float32), tl.fma(d[1], h[1][k].to(tl.float32), d[2] * h[2][k].to(tl.float32)))
    return x


@triton.jit
def sweep(pos, rc, origin, lattice, n, begin, end, turns, rows, BI: tl.constexpr, BJ: tl.constexpr):
    """Pass the candidates of up to 32 turns by the receivers `rows`: the bits of those that were neighbors [BI, BJ]."""
    real = rows < n
    fi, _ai, _xi, _fine_i = load_atoms(pos, rows[:, None], real[:, None], origin, lattice)
    limit = rc * rc
    limit32 = limit.to(tl.float32)
    margin = rounding(fi, rc, lattice)
    bits = tl.zeros([BI, BJ], tl.int32)
    doubts = tl.zeros([BI, BJ], tl.int32)
    one = tl.full([1, 1], 1, tl.int32)
    for turn in range(begin, end):
        v = tl.arange(0, BJ) * turns + turn
        j, t = candidate(v, lattice)
        t0, t1, t2 = image_of(t, lattice)
        inside = j < n
        itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j, -1)
        fj, _aj, _xj, _fine_j = load_atoms(pos, j[None, :], inside[None, :], origin, lattice)
        s = shifts(fi, fj, t0[None, :], t1[None, :], t2[None, :], lattice)
        d = (fj[0] - fi[0] + s[0], fj[1] - fi[1] + s[1], fj[2] - fi[2] + s[2])
        x = cartesian(d, lattice, 0)
        y = cartesian(d, lattice, 1)
        z = cartesian(d, lattice, 2)
        beyond = tl.fma(x, x, tl.fma(y, y, tl.fma(z, z, -limit32)))
        bit = one << (turn - begin)
        known = inside[None, :] & real[:, None] & (itself[None, :] != rows[:, None])
        bits |= tl.where(known & (beyond < 0), bit, 0)
        doubts |= tl.where(known & (tl.abs(beyond) < margin), bit, 0)
    if tl.max(tl.max((doubts != 0).to(tl.int32), axis=1), axis=0) > 0:
        for turn in range(begin, end):
            if tl.max(tl.max((doubts >> (turn - begin)) & 1, axis=1), axis=0) > 0:
                near, _j, _t = exact_turn(pos, limit, origin, lattice, n, turn, turns, rows, BJ)
                bits = (bits & ~(one << (turn - begin))) | (near.to(tl.int32) << (turn - begin))
    return bits


@triton.jit(do_not_specialize=["N", "capacity"])
def search_single(
    pos, cell, pbc, cutoff, ptr, row_ptr, needed, flag, sender, keys, receiver, shift, vectors, distances,
    status, epoch, N, capacity,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr,
    PERIODIC: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The whole search of structure 0; program p has the receivers p·BI …. BE edges at a time get what is optional.

    Args:
        status: [programs] int64, what each program found: number of the launch · 2^32 + edges.
        epoch: [1] int32, launches so far.
        capacity: −1 only counts the edges, and leaves the rows empty.
        PERIODIC: the structure may have periodic directions.
        PROGRAMS: a power of two, not less than the number of programs.
    """
    after_previous(PDL)
    pid = tl.program_id(0)
    launch = tl.load(epoch) + 1
    n = tl.load(ptr + 1)
    rc = tl.load(cutoff)
    x = tl.load(pos, mask=n > 0, other=0.0).to(tl.float64)
    y = tl.load(pos + 1, mask=n > 0, other=0.0).to(tl.float64)
    z = tl.load(pos + 2, mask=n > 0, other=0.0).to(tl.float64)
    if PERIODIC:
        (
            ax, ay, az, bx, by, bz, cx, cy, cz, ux, uy, uz, vx, vy, vz, wx, wy, wz,
            p0, p1, p2, m0, m1, m2, _r0, _r1, _r2, usable,
        ) = geometry(cell, pbc, rc, 0)  # fmt: skip
        h = ((ax, ay, az), (bx, by, bz), (cx, cy, cz))
        inverse = ((ux, uy, uz), (vx, vy, vz), (wx, wy, wz))
        origin = (x * ux + y * uy + z * uz, x * vx + y * vy + z * vz, x * wx + y * wy + z * wz)
        searchable = few_images(m0, m1, m2, n)
        good = (usable & searchable).to(tl.int32)
        images = (m0 * good, m1 * good, m2 * good)
        num_images = images[0] * images[1] * images[2]
        lattice = (h, inverse, (p0, p1, p2), images, num_images)
        turns = (n * num_images + BJ - 1) // BJ * good
    else:
        entry = tl.arange(0, 16)
        unused = tl.load(cell + entry, mask=entry < 9, other=0.0)
        usable = tl.max((unused * 0 != 0).to(tl.int32), axis=0) == 0  # a cell that is not finite is an error here, too
        searchable = (tl.load(pbc) | tl.load(pbc + 1) | tl.load(pbc + 2)) == 0
        origin = (x, y, z)
        lattice = None
        turns = (n + BJ - 1) // BJ * (usable & searchable).to(tl.int32)

    rows = pid * BI + tl.arange(0, BI)
    real = rows < n
    _f, _a, _x, fine = load_atoms(pos, rows, real, origin, lattice)
    if tl.max((real & (~fine)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(flag, _NOT_FINITE)
    bits = tl.zeros([BI, BJ], tl.int32)
    more = tl.zeros([BI, BJ], tl.int32)
    count = tl.zeros([BI, BJ], tl.int32)
    for begin in range(0, turns, 32):
        end = tl.minimum(begin + 32, turns)
        found = sweep(pos, rc, origin, lattice, n, begin, end, turns, rows, BI, BJ)
        count += bits_set(found)
        bits = tl.where(begin == 0, found, bits)
        more = tl.where(begin == 32, found, more)
    length = tl.sum(count, axis=1)
    edges = tl.sum(length, axis=0)

    # tell, and wait for the others; nothing but these words passes between programs
    tl.atomic_xchg(status + pid, (launch.to(tl.int64) << 32) | edges.to(tl.int64), sem="relaxed")
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
        wrong = tl.where(usable, tl.where(searchable, 0, _TOO_THIN), _NOT_FINITE)
        wrong |= tl.where(fits | (capacity < 0), 0, _OVERFLOW)
        if wrong != 0:
            tl.atomic_or(flag, wrong)

    before_next(PDL)
    if fits & (edges > 0):
        edge = (ends - length).to(tl.int32)[:, None] + tl.cumsum(count, axis=1) - count
        for begin in range(0, turns, 32):
            end = tl.minimum(begin + 32, turns)
            if begin == 32:
                bits = more
            elif begin > 32:  # the bits of 64 turns alone are there
                bits = sweep(pos, rc, origin, lattice, n, begin, end, turns, rows, BI, BJ)
            for turn in range(begin, end):
                v = tl.arange(0, BJ) * turns + turn
                j, t = candidate(v, lattice)
                near = (bits >> (turn - begin)) & 1 == 1
                key = t[None, :] * BI + tl.arange(0, BI)[:, None]
                tl.store(sender + edge, tl.broadcast_to(j[None, :], [BI, BJ]), mask=near)
                tl.store(keys + edge, key, mask=near)
                edge += near.to(tl.int32)
        if RECEIVER or SHIFT or VECTORS or DISTANCES:
            tl.debug_barrier()  # other threads read what was written here
            low = first.to(tl.int32)
            high = low + edges
            for at in range(low, high, BE):
                e = at + tl.arange(0, BE)
                mask = e < high
                j = tl.load(sender + e, mask=mask, other=0)
                key = tl.load(keys + e, mask=mask, other=0)
                t = key // BI
                i = pid * BI + key - t * BI
                t0, t1, t2 = image_of(t, lattice)
                fi, ai, xi, _fine_i = load_atoms(pos, i, mask, origin, lattice)
                fj, aj, xj, _fine_j = load_atoms(pos, j, mask, origin, lattice)
                s = shifts(fi, fj, t0, t1, t2, lattice)
                e3 = e.to(tl.int64) * 3  # may pass 2^31
                if RECEIVER:
                    tl.store(receiver + e, i, mask=mask)
                if SHIFT:
                    for k in tl.static_range(3):
                        cells = s[k]
                        if lattice is not None:
                            cells += (ai[k] - aj[k]) * lattice[2][k]
                        tl.store(shift + e3 + k, cells.to(tl.int32), mask=mask)
                if VECTORS or DISTANCES:
                    dx = difference(xi, xj, s, lattice, 0)
                    dy = difference(xi, xj, s, lattice, 1)
                    dz = difference(xi, xj, s, lattice, 2)
                    if VECTORS:
                        tl.store(vectors + e3, dx, mask=mask)
                        tl.store(vectors + e3 + 1, dy, mask=mask)
                        tl.store(vectors + e3 + 2, dz, mask=mask)
                    square = dx * dx + dy * dy + dz * dz
                    flag_coincident(flag, square, mask)
                    if DISTANCES:
                        tl.store(distances + e, tl.sqrt(square), mask=mask)
