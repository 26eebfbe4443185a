"""Neighbor search of large structures on the GPU: cell lists, O(N).

After the binning (triton_bins.py) atoms lie in columns, ordered along each. A program takes BI atoms that follow each
other in the sorted order, its receivers. What can be near them lies in pieces of the nine columns around: nine runs of
the sorted order, swept as if they were one, LANES candidates at a turn. At the faces of a periodic cell a
column goes on at its other end, as a second or third `side` with runs of its own.

Nothing is reduced across lanes while the candidates pass. Each lane notes for each receiver at which turns its
candidate was a neighbor, a bit each (`bits`), and how many there were; `candidates` tells which atom and image a lane
had at a turn, as the key 32 · atom + image. From these finish_cells (triton_rows.py) makes the list without a second
test. A tile that needs more turns than there are bits is counted here in float64 and listed there by the same tests.

Tests are float32; if any distance of a tile is so close to the cutoff that rounding could decide, the whole tile is
done again in float64. So the list is that of a float64 search.

An image is 9·s0 + 3·s1 + s2 + 13 for the shift s = −1, 0, 1 between wrapped atoms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import after_previous
from .triton_setup import _FREE_BINS, _REALS, _WHOLE

LANES = 32
"""Candidates at a turn, one per lane; also the bits of a word."""

_LANES = tl.constexpr(LANES)
_NO_SHIFT = tl.constexpr(13)
_FAR = tl.constexpr(1e18)  # squares to 1e36: far from everything, finite in float32


@triton.jit
def run_of(starts, c0, c1, n0, n1, n2, p0, p1, s2, low, high, total):
    """The run in bins low … high of column (c0, c1), whose coordinates may lie one outside the cell, appended to
    `total` candidates: (place of the run − total, image, candidates then)."""
    s0 = (c0 >= n0).to(tl.int32) - (c0 < 0).to(tl.int32)
    s1 = (c1 >= n1).to(tl.int32) - (c1 < 0).to(tl.int32)
    bins = starts + ((c0 - s0 * n0) * n1 + c1 - s1 * n1) * n2
    first = tl.load(bins + low)
    last = tl.load(bins + high + 1)
    return first - total, 9 * s0 * p0 + 3 * s1 * p1 + s2 + _NO_SHIFT, total + last - first


@triton.jit
def bits_set(x):
    """How many bits of an int32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@triton.jit
def sweep(
    placed, wrapped, order, row_bin, bin_start, batch, ptr, reals, whole, rc, first, stop, bits_out, candidates, keys,
    edge, N, turns_kept, EXACT: tl.constexpr, LIST: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Pass the candidates by the receivers at places first … stop − 1 (at most BI) of the sorted order.

    Counts, and notes bits and candidates of the first `turns_kept` turns; with LIST instead writes the keys
    32 · sender + image of the neighbors, from `edge` on.

    Returns:
        neighbors of each receiver by lane [BI, LANES]; turns; 1 if a neighbor may be an image, else 0; and 1 if float32
        could not decide, else 0.
    """
    lane = tl.arange(0, _LANES)
    k = first + tl.arange(0, BI)
    count = tl.zeros([BI, _LANES], tl.int32)
    bits = tl.zeros([BI, _LANES], tl.int32)
    words = turns_kept >> 5
    at_bits = bits_out + k.to(tl.int64)[:, None] * (words * _LANES) + lane[None, :]
    turn = 0
    shifted = 0
    in_doubt = 0
    row_at = first
    while row_at < stop:  # receivers of one column at a time
        b = tl.load(batch + row_at)  # the sorted order keeps each structure in its place
        h = reals + b * _REALS
        w = whole + b * _WHOLE
        first_bin = tl.load(ptr + b) + (_FREE_BINS + 1) * b
        starts = bin_start + first_bin
        p0 = tl.load(w + 0)
        p1 = tl.load(w + 1)
        p2 = tl.load(w + 2)
        n0 = tl.load(w + 6)
        n1 = tl.load(w + 7)
        n2 = tl.load(w + 8)
        reach = tl.load(w + 10)
        row_end = tl.minimum(stop, tl.load(ptr + b + 1))
        if row_at < tl.load(
            starts + tl.load(w + 9)
        ):  # what lies past the last bin has none: its position is not finite
            bin_at = tl.load(row_bin + row_at) - first_bin
            column = bin_at // n2
            row_end = tl.minimum(row_end, tl.load(starts + (column + 1) * n2))
            c0 = column // n1
            c1 = column % n1
            lowest = bin_at % n2 - reach
            highest = tl.load(row_bin + row_end - 1) - first_bin - column * n2 + reach
            real = (k >= row_at) & (k < row_end)
            if EXACT:
                i = tl.load(order + k, mask=real, other=0)
                xi = tl.load(wrapped + i * 4 + 0, mask=real, other=-_FAR)[:, None]
                yi = tl.load(wrapped + i * 4 + 1, mask=real, other=0.0)[:, None]
                zi = tl.load(wrapped + i * 4 + 2, mask=real, other=0.0)[:, None]
                limit = rc * rc
                h00, h01, h02 = tl.load(h + 0), tl.load(h + 1), tl.load(h + 2)
                h10, h11, h12 = tl.load(h + 3), tl.load(h + 4), tl.load(h + 5)
                h20, h21, h22 = tl.load(h + 6), tl.load(h + 7), tl.load(h + 8)
            else:
                xi = tl.load(placed + k, mask=real, other=-_FAR)[:, None]
                yi = tl.load(placed + N + k, mask=real, other=0.0)[:, None]
                zi = tl.load(placed + 2 * N + k, mask=real, other=0.0)[:, None]
                limit = (rc * rc).to(tl.float32)
                h00, h01, h02 = tl.load(h).to(tl.float32), tl.load(h + 1).to(tl.float32), tl.load(h + 2).to(tl.float32)
                h10, h11, h12 = (
                    tl.load(h + 3).to(tl.float32),
                    tl.load(h + 4).to(tl.float32),
                    tl.load(h + 5).to(tl.float32),
                )
                h20, h21, h22 = (
                    tl.load(h + 6).to(tl.float32),
                    tl.load(h + 7).to(tl.float32),
                    tl.load(h + 8).to(tl.float32),
                )
            closest = tl.full([_LANES], 1e30, tl.float32)
            imaged = 0
            for side in range(tl.where(lowest < 0, -1, 0), tl.where(highest >= n2, 2, 1)):
                low = tl.maximum(lowest, 0)
                high = tl.minimum(highest, n2 - 1)
                if side == -1:  # the other end of the column, as the image below; along a free direction each bin once
                    low = tl.maximum(n2 + lowest, tl.where(p2 == 1, 0, high + 1))
                    high = n2 - 1
                if side == 1:
                    high = tl.minimum(highest - n2, tl.where(p2 == 1, n2, low) - 1)
                    low = low * 0
                high = tl.maximum(high, low - 1)
                s2 = side * p2
                o0, m0, e0 = run_of(starts, c0 - 1, c1 - 1, n0, n1, n2, p0, p1, s2, low, high, 0)
                o1, m1, e1 = run_of(starts, c0 - 1, c1, n0, n1, n2, p0, p1, s2, low, high, e0)
                o2, m2, e2 = run_of(starts, c0 - 1, c1 + 1, n0, n1, n2, p0, p1, s2, low, high, e1)
                o3, m3, e3 = run_of(starts, c0, c1 - 1, n0, n1, n2, p0, p1, s2, low, high, e2)
                o4, m4, e4 = run_of(starts, c0, c1, n0, n1, n2, p0, p1, s2, low, high, e3)
                o5, m5, e5 = run_of(starts, c0, c1 + 1, n0, n1, n2, p0, p1, s2, low, high, e4)
                o6, m6, e6 = run_of(starts, c0 + 1, c1 - 1, n0, n1, n2, p0, p1, s2, low, high, e5)
                o7, m7, e7 = run_of(starts, c0 + 1, c1, n0, n1, n2, p0, p1, s2, low, high, e6)
                o8, m8, e8 = run_of(starts, c0 + 1, c1 + 1, n0, n1, n2, p0, p1, s2, low, high, e7)
                # images of columns differ from that of the column between them, so two of them tell
                images = (m0 != _NO_SHIFT) | (m8 != _NO_SHIFT) | (m4 != _NO_SHIFT)
                imaged |= images.to(tl.int32)
                for at in range(0, e8, _LANES):
                    v = at + lane
                    inside = v < e8
                    move = tl.where(v < e0, o0, tl.where(v < e1, o1, o2))
                    move = tl.where(v >= e2, o3, move)
                    move = tl.where(v >= e3, o4, move)
                    move = tl.where(v >= e4, o5, move)
                    move = tl.where(v >= e5, o6, move)
                    move = tl.where(v >= e6, o7, move)
                    move = tl.where(v >= e7, o8, move)
                    q = v + move
                    if EXACT:
                        j = tl.load(order + q, mask=inside, other=0)
                        xj = tl.load(wrapped + j * 4 + 0, mask=inside, other=_FAR)
                        yj = tl.load(wrapped + j * 4 + 1, mask=inside, other=0.0)
                        zj = tl.load(wrapped + j * 4 + 2, mask=inside, other=0.0)
                    else:
                        xj = tl.load(placed + q, mask=inside, other=_FAR)
                        yj = tl.load(placed + N + q, mask=inside, other=0.0)
                        zj = tl.load(placed + 2 * N + q, mask=inside, other=0.0)
                    image = tl.full([_LANES], _NO_SHIFT, tl.int32)
                    if images:
                        image = tl.where(v < e0, m0, tl.where(v < e1, m1, m2))
                        image = tl.where(v >= e2, m3, image)
                        image = tl.where(v >= e3, m4, image)
                        image = tl.where(v >= e4, m5, image)
                        image = tl.where(v >= e5, m6, image)
                        image = tl.where(v >= e6, m7, image)
                        image = tl.where(v >= e7, m8, image)
                        s0 = image // 9 - 1
                        s1 = image // 3 % 3 - 1
                        xj += s0 * h00 + s1 * h10 + s2 * h20
                        yj += s0 * h01 + s1 * h11 + s2 * h21
                        zj += s0 * h02 + s1 * h12 + s2 * h22
                    x = xj[None, :] - xi
                    y = yj[None, :] - yi
                    z = zj[None, :] - zi
                    beyond = tl.fma(x, x, tl.fma(y, y, tl.fma(z, z, -limit)))
                    if (side == 0) & (at < e4) & (at + _LANES > e3):  # an atom is not its own neighbor
                        itself = tl.where((v >= e3) & (v < e4), q, -1)
                        beyond = tl.where(itself[None, :] == k[:, None], limit, beyond)
                    if LIST:
                        near = beyond < 0
                        hit = near.to(tl.int32)
                        place = edge[:, None] + tl.cumsum(hit, axis=1) - 1
                        key = tl.load(order + q, mask=inside, other=0) * 32 + image
                        tl.store(keys + place, tl.broadcast_to(key[None, :], [BI, _LANES]), mask=near)
                        edge += tl.sum(hit, axis=1)
                    else:
                        bit = 1 << (turn & 31)
                        if EXACT:
                            bits |= tl.where(beyond < 0, bit, 0)
                        else:
                            closest = tl.minimum(closest, tl.min(tl.abs(beyond), axis=0))
                            bits |= (beyond.to(tl.int32, bitcast=True) >> 31) & bit  # by the sign of it
                        if turn < turns_kept:
                            at_turn = (first // BI).to(tl.int64) * turns_kept + turn
                            key = tl.load(order + q, mask=inside, other=0) * 32 + image
                            tl.store(candidates + at_turn * _LANES + lane, key)
                        if (turn & 31) == 31:
                            count += bits_set(bits)
                            if turn < turns_kept:
                                tl.store(at_bits + (turn >> 5) * _LANES, bits, mask=(k < stop)[:, None])
                            bits = tl.zeros([BI, _LANES], tl.int32)
                    turn += 1
            if not EXACT:
                # u = 2^-24; f: the largest coordinate of the receivers, g = f + cutoff + extent of the cell. Two
                # coordinates and their difference round by u (2 f + 2 cutoff); with images, h·s and its addition by
                # 3 u g more. √3 times that bounds the distance's error, 2 cutoff times that the square's, which itself
                # rounds by 3 u cutoff².
                far = tl.where(real[:, None], tl.maximum(tl.maximum(tl.abs(xi), tl.abs(yi)), tl.abs(zi)), 0.0)
                f = tl.max(tl.max(far, axis=1), axis=0) + 2.0 * rc
                margin = tl.where(imaged != 0, 18.0 * (f + tl.load(h + 21)), 7.0 * f) * rc / 16777216.0
                in_doubt |= (tl.min(closest, axis=0) < margin).to(tl.int32)
            shifted |= imaged
        row_at = row_end
    if not LIST:
        count += bits_set(bits)
        if ((turn & 31) != 0) & (turn < turns_kept):
            tl.store(at_bits + (turn >> 5) * _LANES, bits, mask=(k < stop)[:, None])
    return count, turn, shifted, in_doubt


@triton.jit(do_not_specialize=["N", "B", "turns_kept"])
def count_cells(
    placed, wrapped, order, row_bin, bin_start, batch, ptr, reals, whole, cutoff, counts, bits, lane_start,
    candidates, tiles, keys, N, B, turns_kept, BI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the neighbors of BI receivers, and note them: bits, candidates, and per tile 2 · turns + images.

    lane_start [N, LANES]: how many neighbors of a receiver lie in lanes before.
    """
    after_previous(PDL)
    tile = tl.program_id(0)
    first = tile * BI
    stop = tl.minimum(first + BI, tl.load(ptr + B))
    rc = tl.load(cutoff)
    edge = tl.zeros([BI], tl.int32)
    count, turns, shifted, in_doubt = sweep(
        placed, wrapped, order, row_bin, bin_start, batch, ptr, reals, whole, rc, first, stop, bits, candidates, keys,
        edge, N, turns_kept, False, False, BI,
    )  # fmt: skip
    if (in_doubt != 0) | (turns > turns_kept):
        count, turns, shifted, in_doubt = sweep(
            placed, wrapped, order, row_bin, bin_start, batch, ptr, reals, whole, rc, first, stop, bits, candidates,
            keys, edge, N, turns_kept, True, False, BI,
        )  # fmt: skip
    k = first + tl.arange(0, BI)
    real = k < stop
    lane = tl.arange(0, _LANES)
    before = tl.cumsum(count, axis=1) - count
    tl.store(lane_start + k.to(tl.int64)[:, None] * _LANES + lane[None, :], before, mask=real[:, None])
    i = tl.load(order + k, mask=real, other=-1)
    tl.store(counts + i, tl.sum(count, axis=1), mask=i >= 0)
    tl.store(tiles + tile, turns * 2 + shifted)
