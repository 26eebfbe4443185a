"""Neighbor search of large structures on the GPU: cell lists, O(N).

After the binning (triton_bins.py) one kernel runs twice: it counts the neighbors of each atom, then lists them in any
order as packed keys (FILL = True). A program takes the atoms of one bin, BI at a time, and tests them against the 27
bins around it; bins that are adjacent in memory are read as one run. `finish_rows` (triton_rows.py) orders the rows.

A tile is BI receivers times BJ candidates, and each of its places counts for itself. Nothing is reduced across threads
while the candidates pass. The count pass stores for each place which of its candidates are neighbors, a bit each, and
how many (`parts`); the prefix sum of the numbers tells the fill pass where each place writes, the bits what.

Tests are float32; if any distance of a tile is so close to the cutoff that rounding could decide, the whole tile is
done again in float64. So the list is that of a float64 search. Where a tile sees more candidates than there are bits
(`crowded`), both passes test in float64.

A key is sender · 32 + image, image = 9·s0 + 3·s1 + s2 + 13 for the shift s = −1, 0, 1 between wrapped atoms: keys sort
by sender, then shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _FREE_BINS, _REALS, _WHOLE

_NO_SHIFT = tl.constexpr(13)
_BITS = tl.constexpr(27)  # of a word of parts; the other five hold the number of them that are set
_FAR = tl.constexpr(1e18)  # squares to 1e36: far from everything, finite in float32


@triton.jit
def neighbor_bin(c, n, periodic):
    """(bin, shift) of a bin coordinate that may lie one outside 0 … n−1."""
    s = (c >= n).to(tl.int32) - (c < 0).to(tl.int32)
    return c - s * n, s * periodic


@triton.jit
def sweep(
    placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, edge, bits, N,
    FILL: tl.constexpr, EXACT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Pass the candidates of 27 bins by the receivers k (in sorted order; i = their atom numbers).

    Returns:
        edge + hits of each place, [BI, BJ] int32; the bits of its hits; its least |d² − cutoff²| in Å²; and the number
        of candidates that passed each place. With FILL and not EXACT, the hits are not tested but read from the bits.
    """
    BY_BITS: tl.constexpr = FILL and not EXACT
    turn = 0
    p0 = tl.load(w + 0)
    p1 = tl.load(w + 1)
    p2 = tl.load(w + 2)
    n0 = tl.load(w + 6)
    n1 = tl.load(w + 7)
    n2 = tl.load(w + 8)
    c2 = bin_at % n2
    c1 = bin_at // n2 % n1
    c0 = bin_at // (n2 * n1)
    if EXACT:
        xi = tl.load(wrapped + i * 4 + 0, mask=real, other=-_FAR)[:, None]
        yi = tl.load(wrapped + i * 4 + 1, mask=real, other=0.0)[:, None]
        zi = tl.load(wrapped + i * 4 + 2, mask=real, other=0.0)[:, None]
        limit = rc * rc
    elif not BY_BITS:
        xi = tl.load(placed + k, mask=real, other=-_FAR)[:, None]
        yi = tl.load(placed + N + k, mask=real, other=0.0)[:, None]
        zi = tl.load(placed + 2 * N + k, mask=real, other=0.0)[:, None]
        limit = (rc * rc).to(tl.float32)
    closest = tl.full([BI, BJ], 1e30, tl.float32)
    # bins along the last lattice vector: those inside the cell are one run; at its faces, one more from the other side
    sides = tl.where((c2 > 0) & (c2 < n2 - 1), 1, 3)
    for line in range(9):
        a0, s0 = neighbor_bin(c0 + line // 3 - 1, n0, p0)
        a1, s1 = neighbor_bin(c1 + line % 3 - 1, n1, p1)
        bins = starts + (a0 * n1 + a1) * n2
        for side in range(sides):
            low = tl.maximum(c2 - 1, 0)
            high = tl.minimum(c2 + 1, n2 - 1)
            s2 = 0
            if side == 1:  # from the front
                low = n2 - 1
                high = tl.where(c2 == 0, low, low - 1)
                s2 = -p2
            if side == 2:  # from the back
                low = 0
                high = tl.where(c2 == n2 - 1, 0, -1)
                s2 = p2
            first = tl.load(bins + low)
            last = tl.load(bins + high + 1)
            image = 9 * s0 + 3 * s1 + s2 + _NO_SHIFT
            dx = rc * 0
            dy = rc * 0
            dz = rc * 0
            if (not BY_BITS) and image != _NO_SHIFT:
                dx = s0 * tl.load(h + 0) + s1 * tl.load(h + 3) + s2 * tl.load(h + 6)
                dy = s0 * tl.load(h + 1) + s1 * tl.load(h + 4) + s2 * tl.load(h + 7)
                dz = s0 * tl.load(h + 2) + s1 * tl.load(h + 5) + s2 * tl.load(h + 8)
            if not EXACT:
                dx = dx.to(tl.float32)
                dy = dy.to(tl.float32)
                dz = dz.to(tl.float32)
            for at in range(first, last, BJ):
                q = at + tl.arange(0, BJ)
                inside = q < last
                if BY_BITS:
                    near = (bits >> turn) & 1 == 1
                else:
                    if EXACT:
                        j = tl.load(order + q, mask=inside, other=0)
                        xj = tl.load(wrapped + j * 4 + 0, mask=inside, other=_FAR) + dx
                        yj = tl.load(wrapped + j * 4 + 1, mask=inside, other=0.0) + dy
                        zj = tl.load(wrapped + j * 4 + 2, mask=inside, other=0.0) + dz
                    else:
                        xj = tl.load(placed + q, mask=inside, other=_FAR) + dx
                        yj = tl.load(placed + N + q, mask=inside, other=0.0) + dy
                        zj = tl.load(placed + 2 * N + q, mask=inside, other=0.0) + dz
                    x = xj[None, :] - xi
                    y = yj[None, :] - yi
                    z = zj[None, :] - zi
                    beyond = tl.fma(x, x, tl.fma(y, y, tl.fma(z, z, -limit)))
                    near = beyond < 0
                    if (image == _NO_SHIFT) & (line == 4):  # the run that holds the receivers themselves
                        near &= q[None, :] != k[:, None]
                    if not EXACT:
                        closest = tl.minimum(closest, tl.abs(beyond))
                if FILL:
                    key = tl.load(order + q, mask=inside, other=0) * 32 + image
                    tl.store(keys + edge, tl.broadcast_to(key[None, :], [BI, BJ]), mask=near)
                else:
                    bits = tl.where(near, bits | tl.where(turn < _BITS, 1 << turn, 0), bits)
                edge += near.to(tl.int32)
                turn += 1
    return edge, bits, closest, turn


@triton.jit(do_not_specialize=["N", "capacity"])
def search_cells(
    placed, wrapped, order, bin_start, ptr, reals, whole, cutoff, counts, parts, doubts, row_ptr, needed,
    keys, N, capacity, FILL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Count or list the neighbors of structure program_id(1), bin by bin; SPLIT programs share the atoms of a bin."""
    b = tl.program_id(1)
    share = tl.program_id(0) % SPLIT
    h = reals + b * _REALS
    w = whole + b * _WHOLE
    starts = bin_start + tl.load(ptr + b) + (_FREE_BINS + 1) * b
    rc = tl.load(cutoff)
    num_bins = tl.load(w + 9)
    if FILL:
        if tl.load(needed) > capacity:
            num_bins = 0  # every row is empty then, and nothing may be written
    for bin_at in range(tl.program_id(0) // SPLIT, num_bins, tl.num_programs(0) // SPLIT):
        end = tl.load(starts + bin_at + 1)
        for row_at in range(tl.load(starts + bin_at) + share * BI, end, SPLIT * BI):
            k = row_at + tl.arange(0, BI)
            real = k < end
            i = tl.load(order + k, mask=real, other=0)
            parts_at = parts + k.to(tl.int64)[:, None] * BJ + tl.arange(0, BJ)[None, :]
            none = tl.zeros([BI, BJ], tl.int32)
            if FILL:
                crowded = tl.load(doubts + row_at) != 0
                word = tl.load(parts_at, mask=real[:, None], other=0)
                part = tl.where(crowded, word, (word >> _BITS) & 31)
                edge = tl.load(row_ptr + i, mask=real, other=0)[:, None] + tl.cumsum(part, axis=1) - part
                if crowded:
                    sweep(
                        placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, edge, none, N,
                        True, True, BI, BJ,
                    )  # fmt: skip
                else:
                    sweep(
                        placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, edge, word, N,
                        True, False, BI, BJ,
                    )  # fmt: skip
            else:
                part, bits, closest, turns = sweep(
                    placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, none, none, N,
                    False, False, BI, BJ,
                )  # fmt: skip
                # coordinates and shifts up to M = extent + |x_i| + cutoff round by 2^-25 M each: 2^-22 M bounds the
                # distance's error, 2 cutoff times that the square's
                far = tl.abs(tl.load(placed + k, mask=real, other=0.0))
                far = tl.maximum(far, tl.abs(tl.load(placed + N + k, mask=real, other=0.0)))
                far = tl.max(tl.maximum(far, tl.abs(tl.load(placed + 2 * N + k, mask=real, other=0.0))), axis=0)
                margin = 2.2 * rc * (tl.load(h + 21) + rc + far) / 4194304.0
                crowded = turns > _BITS
                if crowded | (tl.min(tl.min(closest, axis=1), axis=0) < margin):
                    part, bits, _, _ = sweep(
                        placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, none, none, N,
                        False, True, BI, BJ,
                    )  # fmt: skip
                tl.store(doubts + row_at, crowded.to(tl.int32))
                tl.store(parts_at, tl.where(crowded, part, bits | (part << _BITS)), mask=real[:, None])
                tl.store(counts + i, tl.sum(part, axis=1), mask=real)
