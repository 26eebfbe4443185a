"""Neighbor search of large structures on the GPU: cell lists, O(N).

After the binning atoms lie in columns, ordered along each. A program takes BI atoms that follow each
other in the sorted order, its receivers. What can be near them lies in pieces of the nine columns around: nine runs of
the sorted order, swept as if they were one, LANES candidates at a turn. At the faces of a periodic cell a
column goes on at its other end, as a second or third `side` with further runs.

Nothing is reduced across lanes while the candidates pass. Each lane notes for each receiver at which turns its
candidate was a neighbor, a bit each (`bits`), and how many there were; `candidates` says which atom and image a lane
had at a turn, as the key 32 · atom + image. From these finish_cells makes the list without a second
test. A tile that needs more turns than there are bits is counted here in float64 and listed there by the same tests.

Tests are float32; if any distance of a tile is so close to the cutoff that rounding could decide, the whole tile is
done again in float64. So the list is that of a float64 search.

An image is 9·s0 + 3·s1 + s2 + 13 for the shift s = −1, 0, 1 between wrapped atoms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..core.triton_launch import after_previous
from .triton_setup import _FREE_BINS, _NOT_FINITE, _REALS, _THIN_BINS, _WHOLE, flag_coincident

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


# --- GPU kernels that wrap atoms and sort them into bins: count, prefix sum, place, order ---
#
# Bins are no narrower than the cutoff along the first two lattice vectors, and than a quarter of it along the third, so
# that they form columns of thin bins. The bins of structure b begin at ptr[b] + (FREE_BINS + 1)·b in `bin_count` and
# `bin_start`, in C order of their three coordinates, so that a piece of a column is one run of atoms. Along periodic
# vectors the bins tile the cell. Along free directions they are folded with a period of at least three cutoffs (across
# columns). So no bounding box is needed, and distances distinguish atoms that share a bin without being close.
#
# Atoms enter their bin in any order (atomics). Then each bin is sorted by the numbers of the atoms, so that the order
# is a function of the positions alone.


@triton.jit
def bin_coordinate(f, n, periodic, width):
    """Bin along one lattice vector of wrapped fractional coordinates f (in Å along a free direction)."""
    folded = tl.floor(f / width)
    folded = folded - n * tl.floor(folded / n)
    c = tl.where(periodic, f * n, folded).to(tl.int32)
    return tl.minimum(tl.maximum(c, 0), n - 1)


@triton.jit
def wrapped_fraction(x, y, z, row, k: tl.constexpr, periodic, mask):
    """(wrapped fractional coordinate, what was subtracted, whether it is finite and not absurd), in float64."""
    f = x * tl.load(row + 9 + 3 * k, mask=mask, other=0.0)
    f += y * tl.load(row + 10 + 3 * k, mask=mask, other=0.0)
    f += z * tl.load(row + 11 + 3 * k, mask=mask, other=0.0)
    away = tl.where(periodic, tl.floor(f), tl.load(row + 18 + k, mask=mask, other=0.0))
    return f - away, away, tl.abs(f) < 1073741824.0  # NaN fails every comparison


@triton.jit(do_not_specialize=["N", "B"])
def wrap_atoms(
    pos, batch, ptr, reals, whole, cutoff, wrapped, wraps, flag, fractions, bins, slots, bin_count, counts, N, B,
    CELLS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wrap the atoms: wrapped [N, 4] float64 in Å, wraps [N, 4] int32 whole cells.

    For "pairs" (CELLS = False) also fractions [3, N] float32; for "cells" a bin and a slot in it, and counts = 0.
    """
    after_previous(PDL)
    atoms = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atoms < tl.load(ptr + B)
    system = tl.load(batch + atoms, mask=mask, other=0)
    x = tl.load(pos + atoms * 3 + 0, mask=mask, other=0.0).to(tl.float64)
    y = tl.load(pos + atoms * 3 + 1, mask=mask, other=0.0).to(tl.float64)
    z = tl.load(pos + atoms * 3 + 2, mask=mask, other=0.0).to(tl.float64)
    h = reals + system * _REALS
    w = whole + system * _WHOLE
    p0 = tl.load(w + 0, mask=mask, other=0) == 1
    p1 = tl.load(w + 1, mask=mask, other=0) == 1
    p2 = tl.load(w + 2, mask=mask, other=0) == 1
    f0, away0, fine0 = wrapped_fraction(x, y, z, h, 0, p0, mask)
    f1, away1, fine1 = wrapped_fraction(x, y, z, h, 1, p1, mask)
    f2, away2, fine2 = wrapped_fraction(x, y, z, h, 2, p2, mask)
    fine = fine0 & fine1 & fine2
    if tl.max((mask & (~fine)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(flag, _NOT_FINITE)
    to = wrapped + atoms * 4
    for k in tl.static_range(3):
        shift = away0 * tl.load(h + k, mask=mask, other=0.0)
        shift += away1 * tl.load(h + 3 + k, mask=mask, other=0.0)
        shift += away2 * tl.load(h + 6 + k, mask=mask, other=0.0)
        tl.store(to + k, (x if k == 0 else (y if k == 1 else z)) - shift, mask=mask)
    to_wraps = wraps + atoms * 4
    tl.store(to_wraps + 0, tl.where(p0, away0, 0.0).to(tl.int32), mask=mask & fine)
    tl.store(to_wraps + 1, tl.where(p1, away1, 0.0).to(tl.int32), mask=mask & fine)
    tl.store(to_wraps + 2, tl.where(p2, away2, 0.0).to(tl.int32), mask=mask & fine)
    if CELLS:
        tl.store(counts + atoms, tl.zeros([BLOCK], tl.int32), mask=atoms < N)
        n1 = tl.load(w + 7, mask=mask, other=1)
        n2 = tl.load(w + 8, mask=mask, other=1)
        rc = tl.load(cutoff)
        c0 = bin_coordinate(f0, tl.load(w + 6, mask=mask, other=1), p0, rc)
        c1 = bin_coordinate(f1, n1, p1, rc)
        c2 = bin_coordinate(f2, n2, p2, rc / _THIN_BINS)
        known = mask & fine & (tl.load(w + 9, mask=mask, other=0) > 0)
        first_bin = tl.load(ptr + system, mask=mask, other=0) + (_FREE_BINS + 1) * system
        target = first_bin + (c0 * n1 + c1) * n2 + c2
        slot = tl.atomic_add(bin_count + target, tl.full([BLOCK], 1, tl.int32), mask=known)
        tl.store(bins + atoms, tl.where(known, target, -1), mask=mask)
        tl.store(slots + atoms, slot, mask=mask)
    else:
        tl.store(fractions + atoms, f0, mask=mask)
        tl.store(fractions + N + atoms, f1, mask=mask)
        tl.store(fractions + 2 * N + atoms, f2, mask=mask)


@triton.jit
def bin_starts(bin_count, bin_start, ptr, whole, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Where each bin's atoms begin in the sorted order; bin_start has one entry more than there are bins."""
    after_previous(PDL)
    p = tl.program_id(0)
    b = tl.program_id(1)
    num = tl.load(whole + b * _WHOLE + 9)
    if p * BLOCK <= num:
        first = tl.load(ptr + b)
        offset = first + (_FREE_BINS + 1) * b
        # few programs see many bins before theirs: summing them again is cheaper than another kernel
        before = tl.zeros([BLOCK], tl.int32)
        for at in range(0, p * BLOCK, BLOCK):
            before += tl.load(bin_count + offset + at + tl.arange(0, BLOCK))
        k = p * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(bin_count + offset + k, mask=k < num, other=0)
        start = first + tl.sum(before, axis=0) + tl.cumsum(count, axis=0) - count
        tl.store(bin_start + offset + k, start, mask=k <= num)


@triton.jit(do_not_specialize=["N", "B"])
def place_atoms(bins, slots, bin_start, members, ptr, N, B, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """members [N]: the atoms of each bin in any order."""
    after_previous(PDL)
    atoms = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atoms < tl.load(ptr + B)
    bin_of = tl.load(bins + atoms, mask=mask, other=-1)
    mask &= bin_of >= 0
    to = tl.load(bin_start + bin_of, mask=mask, other=0) + tl.load(slots + atoms, mask=mask, other=0)
    tl.store(members + to, atoms, mask=mask)


@triton.jit(do_not_specialize=["N", "B"])
def order_atoms(
    bins, members, bin_start, batch, whole, wrapped, order, row_bin, placed, ptr, N, B,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sorted order, by bin and atom (−1 past the last bin); the bin of each place; and placed [3, N] float32: the
    wrapped positions."""
    after_previous(PDL)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    listed = k < tl.load(ptr + B)
    mask = listed
    system = tl.load(batch + k, mask=mask, other=0)  # the sorted order keeps each structure in its place
    first_bin = tl.load(ptr + system, mask=mask, other=0) + (_FREE_BINS + 1) * system
    num_bins = tl.load(whole + system * _WHOLE + 9, mask=mask, other=0)
    mask &= k < tl.load(bin_start + first_bin + num_bins, mask=mask, other=0)  # the others have no bin
    atom = tl.load(members + k, mask=mask, other=0)
    bin_of = tl.load(bins + atom, mask=mask, other=0)
    start = tl.load(bin_start + bin_of, mask=mask, other=0)
    size = tl.where(mask, tl.load(bin_start + bin_of + 1, mask=mask, other=0) - start, 0)
    to = start
    for m in range(0, tl.max(size, axis=0)):
        other = tl.load(members + start + m, mask=m < size, other=2147483647)
        to += (other < atom).to(tl.int32)
    tl.store(order + k, tl.full([BLOCK], -1, tl.int32), mask=listed & (~mask))
    tl.store(order + to, atom, mask=mask)
    tl.store(row_bin + to, bin_of, mask=mask)
    for c in tl.static_range(3):
        tl.store(placed + c * N + to, tl.load(wrapped + atom * 4 + c, mask=mask, other=0.0), mask=mask)


# --- GPU kernels that complete the rows of a list: order, receivers, shifts, vectors and distances, in float64 ---
#
# There is one program for each receiver. Rows of the cell list are made from the bits above and, on request, sorted by
# the keys 32 · sender + image; a row of n edges that is longer than a tile costs n² comparisons. Rows of "pairs" arrive
# in order, as sender and image (triton_pairs.py).


@triton.jit
def list_row(k, tile, turns, turns_kept, first, bits, lane_start, candidates, keys):
    """Write the keys of the receiver at place k of the sorted order, from `first` on, those of a lane together."""
    words = turns_kept >> 5
    lane = tl.arange(0, _LANES)
    edge = first + tl.load(lane_start + k.to(tl.int64) * _LANES + lane)
    at_bits = bits + k.to(tl.int64) * (words * _LANES) + lane
    at_turns = candidates + tile.to(tl.int64) * (turns_kept * _LANES) + lane
    for w in range((turns + 31) >> 5):
        word = tl.load(at_bits + w * _LANES)
        for _ in range(tl.max(bits_set(word), axis=0)):
            some = word != 0
            lowest = (word & (-word)).to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True)  # a power of two, exactly
            turn = (lowest >> 23) - 127 + (w << 5)
            tl.store(keys + edge, tl.load(at_turns + turn * _LANES, mask=some, other=0), mask=some)
            edge += some.to(tl.int32)
            word &= word - 1


@triton.jit
def order_row(first, last, keys, sender, K: tl.constexpr):
    """sender[first … last − 1] = the keys in order; each goes where as many smaller ones are before it."""
    for at in range(first, last, K):
        e = at + tl.arange(0, K)
        mask = e < last
        key = tl.load(keys + e, mask=mask, other=2147483647)
        rank = tl.zeros([K], tl.int32)
        for other_at in range(first, last, K):
            f = other_at + tl.arange(0, K)
            other = tl.load(keys + f, mask=f < last, other=2147483647)
            rank -= tl.sum((other[:, None] - key[None, :]) >> 31, axis=0)  # −1 where other < key
        tl.store(sender + first + rank, key, mask=mask)


@triton.jit
def write_edges(
    i, first, r, mask, j, s0, s1, s2, imaged, h, wrapped, wraps, receiver, shift, vectors, distances, flag,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """What is wanted of the edges first + r from receiver i to senders j in images s; `imaged` = 0 says that s = 0."""
    if RECEIVER:
        tl.store(receiver + first + r, tl.zeros([K], tl.int32) + i, mask=mask)
    first3 = first.to(tl.int64) * 3  # may pass 2^31
    if SHIFT:
        own, theirs, to = wraps + i * 4, wraps + j * 4, shift + first3 + r * 3
        tl.store(to, s0 + tl.load(own) - tl.load(theirs, mask=mask), mask=mask)
        tl.store(to + 1, s1 + tl.load(own + 1) - tl.load(theirs + 1, mask=mask), mask=mask)
        tl.store(to + 2, s2 + tl.load(own + 2) - tl.load(theirs + 2, mask=mask), mask=mask)
    if VECTORS or DISTANCES:
        # a lane per component: the loads of an atom and the stores of an edge fall together
        c = tl.arange(0, 4)
        some = mask[:, None] & (c < 3)[None, :]
        d = tl.load(wrapped + (j[:, None] * 4 + c[None, :]), mask=some, other=0.0)
        d -= tl.load(wrapped + i * 4 + c)[None, :]
        if imaged != 0:
            h0 = tl.load(h + c, mask=c < 3, other=0.0)[None, :]
            h1 = tl.load(h + 3 + c, mask=c < 3, other=0.0)[None, :]
            h2 = tl.load(h + 6 + c, mask=c < 3, other=0.0)[None, :]
            d += s0[:, None] * h0 + s1[:, None] * h1 + s2[:, None] * h2
        if VECTORS:
            tl.store(vectors + first3 + (r[:, None] * 3 + c[None, :]), d, mask=some)
        d = tl.where(some, d, 0.0)
        square = tl.sum(d * d, axis=1)
        flag_coincident(flag, square, mask)
        if DISTANCES:
            tl.store(distances + first + r, tl.sqrt(square), mask=mask)


@triton.jit(do_not_specialize=["N", "B", "turns_kept"])
def finish_cells(
    placed, wrapped, wraps, order, row_bin, bin_start, batch, ptr, reals, whole, cutoff, row_ptr, bits,
    lane_start, candidates, tiles, keys, sender, receiver, shift, vectors, distances, flag, N, B, turns_kept,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr,
    ORDERED: tl.constexpr, BI: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The row of the receiver at place program_id(0) of the sorted order."""
    after_previous(PDL)
    k = tl.program_id(0)
    if k < tl.load(ptr + B):
        i = tl.load(order + k)
        if i >= 0:
            first = tl.load(row_ptr + i)
            last = tl.load(row_ptr + i + 1)
            if last > first:
                tile = k // BI
                state = tl.load(tiles + tile)
                turns = state >> 1
                if turns > turns_kept:
                    edge = tl.zeros([1], tl.int32) + first
                    sweep(
                        placed, wrapped, order, row_bin, bin_start, batch, ptr, reals, whole, tl.load(cutoff), k, k + 1,
                        bits, candidates, keys, edge, N, turns_kept, True, True, 1,
                    )  # fmt: skip
                else:
                    list_row(k, tile, turns, turns_kept, first, bits, lane_start, candidates, keys)
                tl.debug_barrier()  # other lanes read what was written here
                if ORDERED and last - first > K:
                    order_row(first, last, keys, sender, K)
                    tl.debug_barrier()
                h = reals + tl.load(batch + k) * _REALS
                for at in range(0, last - first, K):
                    r = at + tl.arange(0, K)
                    mask = r < last - first
                    if not ORDERED:
                        key = tl.load(keys + first + r, mask=mask, other=2147483647)
                    elif last - first > K:
                        key = tl.load(sender + first + r, mask=mask, other=2147483647)
                    else:
                        key = tl.sort(tl.load(keys + first + r, mask=mask, other=2147483647))
                    j = key >> 5
                    image = key & 31
                    s0 = image // 9 - 1
                    s1 = image // 3 % 3 - 1
                    s2 = image % 3 - 1
                    write_edges(
                        i, first, r, mask, j, s0, s1, s2, state & 1, h, wrapped, wraps, receiver, shift, vectors,
                        distances, flag, RECEIVER, SHIFT, VECTORS, DISTANCES, K,
                    )  # fmt: skip
                    tl.store(sender + first + r, j, mask=mask)


@triton.jit
def finish_pairs(
    images, row_ptr, batch, wrapped, wraps, reals, sender, receiver, shift, vectors, distances, flag,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The row of receiver program_id(0), whose senders are in place."""
    after_previous(PDL)
    i = tl.program_id(0)
    first = tl.load(row_ptr + i)
    last = tl.load(row_ptr + i + 1)
    if last > first:
        h = reals + tl.load(batch + i) * _REALS
        for at in range(0, last - first, K):
            r = at + tl.arange(0, K)
            mask = r < last - first
            j = tl.load(sender + first + r, mask=mask, other=0)
            image = tl.load(images + first + r, mask=mask, other=0)
            s0 = (image >> 12) - 32
            s1 = ((image >> 6) & 63) - 32
            s2 = (image & 63) - 32
            write_edges(
                i, first, r, mask, j, s0, s1, s2, 1, h, wrapped, wraps, receiver, shift, vectors, distances, flag,
                RECEIVER, SHIFT, VECTORS, DISTANCES, K,
            )  # fmt: skip
