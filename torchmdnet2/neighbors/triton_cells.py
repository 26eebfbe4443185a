"""Neighbor search of large structures on the GPU: cell lists, O(N).

Three kernels after the binning (triton_bins.py): count the neighbors of each atom, list them in any order as packed
keys (the same kernel with FILL = True), and put every row in order. A program takes the atoms of one bin, BI at a time,
and tests them against the 27 bins around it; bins that are adjacent in memory are read as one run.

Tests are float32, on coordinates relative to an atom of the bin; where the distance is so close to the cutoff that
rounding could decide, the tile is decided again in float64. So the list is that of a float64 search.

A key is sender · 32 + image, image = 9·s0 + 3·s1 + s2 + 13 for the shift s = −1, 0, 1 between wrapped atoms: keys sort
by sender, then shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _FREE_BINS, _REALS, _ROW_BLOCK, _WHOLE

_NO_SHIFT = tl.constexpr(13)
_OWN_RUN = tl.constexpr(12)  # of the 27 runs, the one that holds the bin itself
_FAR = tl.constexpr(1e18)  # squares to 1e36: far from everything, finite in float32


@triton.jit
def neighbor_bin(c, n, periodic):
    """(bin, shift) of a bin coordinate that may lie one outside 0 … n−1."""
    s = (c >= n).to(tl.int32) - (c < 0).to(tl.int32)
    return c - s * n, s * periodic


@triton.jit(do_not_specialize=["N", "capacity"])
def search_cells(
    placed, order, bin_start, ptr, reals, whole, cutoff, counts, block_sums, row_ptr, keys, N, capacity,
    FILL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Count or list the neighbors of the atoms of every num_programs(0)-th bin of structure program_id(1)."""
    b = tl.program_id(1)
    h = reals + b * _REALS
    w = whole + b * _WHOLE
    p0 = tl.load(w + 0)
    p1 = tl.load(w + 1)
    p2 = tl.load(w + 2)
    n0 = tl.load(w + 6)
    n1 = tl.load(w + 7)
    n2 = tl.load(w + 8)
    starts = bin_start + tl.load(ptr + b) + (_FREE_BINS + 1) * b
    rc = tl.load(cutoff)
    rc2 = (rc * rc).to(tl.float32)
    for bin_at in range(tl.program_id(0), tl.load(w + 9), tl.num_programs(0)):
        c2 = bin_at % n2
        c1 = bin_at // n2 % n1
        c0 = bin_at // (n2 * n1)
        end = tl.load(starts + bin_at + 1)
        for row_at in range(tl.load(starts + bin_at), end, BI):
            k = row_at + tl.arange(0, BI)
            real = k < end
            i = tl.load(order + k, mask=real, other=0)
            # coordinates relative to the first receiver of the tile: small numbers, which float32 holds well
            x0 = tl.load(placed + row_at)
            y0 = tl.load(placed + N + row_at)
            z0 = tl.load(placed + 2 * N + row_at)
            xi = tl.load(placed + k, mask=real, other=0.0) - x0
            yi = tl.load(placed + N + k, mask=real, other=0.0) - y0
            zi = tl.load(placed + 2 * N + k, mask=real, other=0.0) - z0
            xi32 = tl.where(real, xi, -_FAR).to(tl.float32)
            yi32 = yi.to(tl.float32)
            zi32 = zi.to(tl.float32)
            # rounding moves a distance by less than 2^-21 (|x_i| + cutoff); the squares by 2 cutoff times that
            reach = tl.abs(xi) + tl.abs(yi) + tl.abs(zi) + rc
            doubt = tl.where(real, 2.2 * rc * reach / 2097152.0, 0.0).to(tl.float32)
            found = tl.zeros([BI], tl.int32)
            start = tl.zeros([BI], tl.int32)
            if FILL:
                start = tl.load(row_ptr + i, mask=real, other=0)
            for run in range(27):
                a0, s0 = neighbor_bin(c0 + run // 9 - 1, n0, p0)
                a1, s1 = neighbor_bin(c1 + run // 3 % 3 - 1, n1, p1)
                side = run % 3  # 0: what lies inside the cell, 1: wrapped from the front, 2: from the back
                low = tl.where(side == 0, tl.maximum(c2 - 1, 0), tl.where(side == 1, n2 - 1, 0))
                high = tl.where(side == 0, tl.minimum(c2 + 1, n2 - 1), low)
                is_empty = ((side == 1) & (c2 > 0)) | ((side == 2) & (c2 < n2 - 1))
                s2 = tl.where(side == 1, -p2, tl.where(side == 2, p2, 0))
                line = starts + (a0 * n1 + a1) * n2
                first = tl.load(line + low)
                last = tl.where(is_empty, first, tl.load(line + high + 1))
                dx = s0 * tl.load(h + 0) + s1 * tl.load(h + 3) + s2 * tl.load(h + 6) - x0
                dy = s0 * tl.load(h + 1) + s1 * tl.load(h + 4) + s2 * tl.load(h + 7) - y0
                dz = s0 * tl.load(h + 2) + s1 * tl.load(h + 5) + s2 * tl.load(h + 8) - z0
                for at in range(first, last, BJ):
                    q = at + tl.arange(0, BJ)
                    inside = q < last
                    xj = tl.load(placed + q, mask=inside, other=_FAR) + dx
                    yj = tl.load(placed + N + q, mask=inside, other=0.0) + dy
                    zj = tl.load(placed + 2 * N + q, mask=inside, other=0.0) + dz
                    x = xj.to(tl.float32)[None, :] - xi32[:, None]
                    y = yj.to(tl.float32)[None, :] - yi32[:, None]
                    z = zj.to(tl.float32)[None, :] - zi32[:, None]
                    square = tl.fma(x, x, tl.fma(y, y, z * z))
                    near = square < rc2
                    doubtful = tl.abs(square - rc2) < doubt[:, None]
                    if tl.max(tl.max(doubtful.to(tl.int32), axis=1), axis=0) > 0:
                        xd = xj[None, :] - xi[:, None]
                        yd = yj[None, :] - yi[:, None]
                        zd = zj[None, :] - zi[:, None]
                        near = tl.where(doubtful, xd * xd + yd * yd + zd * zd < rc * rc, near)
                    if run == _OWN_RUN:
                        near &= q[None, :] != k[:, None]
                    hit = near.to(tl.int32)
                    if FILL:
                        edge = start[:, None] + found[:, None] + tl.cumsum(hit, axis=1) - 1
                        j = tl.load(order + q, mask=inside, other=0)
                        key = j * 32 + (9 * s0 + 3 * s1 + s2 + _NO_SHIFT)
                        tl.store(keys + edge, tl.broadcast_to(key[None, :], [BI, BJ]), mask=near & (edge < capacity))
                    found += tl.sum(hit, axis=1)
            if not FILL:
                tl.store(counts + i, found, mask=real)
                tl.atomic_add(block_sums + i // _ROW_BLOCK, found.to(tl.int64), mask=real)


@triton.jit
def order_rows(
    keys, row_ptr, batch, wrapped, wraps, reals, sender, receiver, shift, vectors, distances,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program per receiver: an edge's place in its row is the number of smaller keys in the row."""
    i = tl.program_id(0)
    first = tl.load(row_ptr + i)
    last = tl.load(row_ptr + i + 1)
    if last > first:
        h = reals + tl.load(batch + i) * _REALS
        for at in range(first, last, K):
            e = at + tl.arange(0, K)
            mask = e < last
            key = tl.load(keys + e, mask=mask, other=2147483647)
            rank = tl.zeros([K], tl.int32)
            for other_at in range(first, last, K):
                f = other_at + tl.arange(0, K)
                other = tl.load(keys + f, mask=f < last, other=2147483647)
                rank += tl.sum((other[None, :] < key[:, None]).to(tl.int32), axis=1)
            edge = first + rank
            edge3 = edge.to(tl.int64) * 3
            j = key // 32
            image = key % 32
            s0 = image // 9 - 1
            s1 = image // 3 % 3 - 1
            s2 = image % 3 - 1
            tl.store(sender + edge, j, mask=mask)
            if RECEIVER:
                tl.store(receiver + edge, tl.zeros([K], tl.int32) + i, mask=mask)
            if SHIFT:
                own, theirs = wraps + i * 4, wraps + j * 4
                tl.store(shift + edge3, s0 + tl.load(own) - tl.load(theirs, mask), mask=mask)
                tl.store(shift + edge3 + 1, s1 + tl.load(own + 1) - tl.load(theirs + 1, mask), mask=mask)
                tl.store(shift + edge3 + 2, s2 + tl.load(own + 2) - tl.load(theirs + 2, mask), mask=mask)
            if VECTORS or DISTANCES:
                x = tl.load(wrapped + j * 4 + 0, mask) - tl.load(wrapped + i * 4 + 0)
                y = tl.load(wrapped + j * 4 + 1, mask) - tl.load(wrapped + i * 4 + 1)
                z = tl.load(wrapped + j * 4 + 2, mask) - tl.load(wrapped + i * 4 + 2)
                x += s0 * tl.load(h + 0) + s1 * tl.load(h + 3) + s2 * tl.load(h + 6)
                y += s0 * tl.load(h + 1) + s1 * tl.load(h + 4) + s2 * tl.load(h + 7)
                z += s0 * tl.load(h + 2) + s1 * tl.load(h + 5) + s2 * tl.load(h + 8)
                if VECTORS:
                    tl.store(vectors + edge3, x, mask=mask)
                    tl.store(vectors + edge3 + 1, y, mask=mask)
                    tl.store(vectors + edge3 + 2, z, mask=mask)
                if DISTANCES:
                    tl.store(distances + edge, tl.sqrt(x * x + y * y + z * z), mask=mask)
