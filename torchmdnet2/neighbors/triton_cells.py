"""Neighbor search of large structures on the GPU: cell lists, O(N).

After the binning (triton_bins.py) one kernel runs twice: it counts the neighbors of each atom, then lists them in any
order as packed keys (FILL = True). A program takes the atoms of one bin, BI at a time, and tests them against the 27
bins around it; bins that are adjacent in memory are read as one run. `finish_rows` (triton_rows.py) orders the rows.

A tile is BJ candidates times BI receivers, and each of its BJ × BI places counts for itself. Nothing is reduced across
threads while the candidates pass; the count pass stores the places' counts, and their prefix sum tells the fill pass
where each place writes.

Tests are float32; if any distance of a tile is so close to the cutoff that rounding could decide, the whole tile is
done again in float64 (`doubts`), alike in both passes. So the list is that of a float64 search.

A key is sender · 32 + image, image = 9·s0 + 3·s1 + s2 + 13 for the shift s = −1, 0, 1 between wrapped atoms: keys sort
by sender, then shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _FREE_BINS, _REALS, _ROW_BLOCK, _WHOLE

_NO_SHIFT = tl.constexpr(13)
_FAR = tl.constexpr(1e18)  # squares to 1e36: far from everything, finite in float32


@triton.jit
def neighbor_bin(c, n, periodic):
    """(bin, shift) of a bin coordinate that may lie one outside 0 … n−1."""
    s = (c >= n).to(tl.int32) - (c < 0).to(tl.int32)
    return c - s * n, s * periodic


@triton.jit
def sweep(
    placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, edge, capacity, N,
    FILL: tl.constexpr, EXACT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Pass the candidates of 27 bins by the receivers k (in sorted order; i = their atom numbers).

    Returns:
        edge + hits of each place, [BJ, BI] int32, and whether any test of a place was in doubt.
    """
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
        xi = tl.load(wrapped + i * 4 + 0, mask=real, other=-_FAR)[None, :]
        yi = tl.load(wrapped + i * 4 + 1, mask=real, other=0.0)[None, :]
        zi = tl.load(wrapped + i * 4 + 2, mask=real, other=0.0)[None, :]
        limit = rc * rc
        margin = rc * 0
    else:
        xi = tl.load(placed + k, mask=real, other=-_FAR)[None, :]
        yi = tl.load(placed + N + k, mask=real, other=0.0)[None, :]
        zi = tl.load(placed + 2 * N + k, mask=real, other=0.0)[None, :]
        limit = (rc * rc).to(tl.float32)
        # coordinates and shifts up to M = extent + |x_i| + cutoff round by 2^-25 M each: 2^-22 M bounds the distance
        far = tl.where(real, tl.maximum(tl.abs(xi), tl.maximum(tl.abs(yi), tl.abs(zi))), 0.0)
        margin = (2.2 * rc * (tl.load(h + 21) + rc + far) / 4194304.0).to(tl.float32)
    doubtful = tl.zeros([BJ, BI], tl.int1)
    for run in range(27):
        a0, s0 = neighbor_bin(c0 + run // 9 - 1, n0, p0)
        a1, s1 = neighbor_bin(c1 + run // 3 % 3 - 1, n1, p1)
        side = run % 3  # 0: what lies inside the cell, 1: wrapped from the front, 2: from the back
        low = tl.where(side == 0, tl.maximum(c2 - 1, 0), tl.where(side == 1, n2 - 1, 0))
        high = tl.where(side == 0, tl.minimum(c2 + 1, n2 - 1), low)
        is_empty = ((side == 1) & (c2 > 0)) | ((side == 2) & (c2 < n2 - 1))
        if not is_empty:
            s2 = tl.where(side == 1, -p2, tl.where(side == 2, p2, 0))
            line = starts + (a0 * n1 + a1) * n2
            first = tl.load(line + low)
            last = tl.load(line + high + 1)
            dx = s0 * tl.load(h + 0) + s1 * tl.load(h + 3) + s2 * tl.load(h + 6)
            dy = s0 * tl.load(h + 1) + s1 * tl.load(h + 4) + s2 * tl.load(h + 7)
            dz = s0 * tl.load(h + 2) + s1 * tl.load(h + 5) + s2 * tl.load(h + 8)
            image = 9 * s0 + 3 * s1 + s2 + _NO_SHIFT
            for at in range(first, last, BJ):
                q = at + tl.arange(0, BJ)
                inside = q < last
                if EXACT:
                    j = tl.load(order + q, mask=inside, other=0)
                    xj = tl.load(wrapped + j * 4 + 0, mask=inside, other=_FAR) + dx
                    yj = tl.load(wrapped + j * 4 + 1, mask=inside, other=0.0) + dy
                    zj = tl.load(wrapped + j * 4 + 2, mask=inside, other=0.0) + dz
                else:
                    xj = tl.load(placed + q, mask=inside, other=_FAR) + dx.to(tl.float32)
                    yj = tl.load(placed + N + q, mask=inside, other=0.0) + dy.to(tl.float32)
                    zj = tl.load(placed + 2 * N + q, mask=inside, other=0.0) + dz.to(tl.float32)
                x = xj[:, None] - xi
                y = yj[:, None] - yi
                z = zj[:, None] - zi
                square = tl.fma(x, x, tl.fma(y, y, z * z))
                itself = tl.where(image == _NO_SHIFT, q, -1)
                near = (square < limit) & (itself[:, None] != k[None, :])
                if not EXACT:
                    doubtful |= tl.abs(square - limit) < margin
                if FILL:
                    key = tl.load(order + q, mask=inside, other=0) * 32 + image
                    tl.store(keys + edge, tl.broadcast_to(key[:, None], [BJ, BI]), mask=near & (edge < capacity))
                edge += near.to(tl.int32)
    return edge, doubtful


@triton.jit(do_not_specialize=["N", "capacity"])
def search_cells(
    placed, wrapped, order, bin_start, ptr, reals, whole, cutoff, counts, parts, doubts, block_sums, row_ptr, keys, N,
    capacity, FILL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Count or list the neighbors of the atoms of every num_programs(0)-th bin of structure program_id(1)."""
    b = tl.program_id(1)
    h = reals + b * _REALS
    w = whole + b * _WHOLE
    starts = bin_start + tl.load(ptr + b) + (_FREE_BINS + 1) * b
    rc = tl.load(cutoff)
    places = tl.arange(0, BJ)[:, None]
    for bin_at in range(tl.program_id(0), tl.load(w + 9), tl.num_programs(0)):
        end = tl.load(starts + bin_at + 1)
        for row_at in range(tl.load(starts + bin_at), end, BI):
            k = row_at + tl.arange(0, BI)
            real = k < end
            i = tl.load(order + k, mask=real, other=0)
            parts_at = parts + places * N + k[None, :]
            if FILL:
                part = tl.load(parts_at, mask=real[None, :], other=0)
                edge = tl.load(row_ptr + i, mask=real, other=0)[None, :] + tl.cumsum(part, axis=0) - part
                in_doubt = tl.load(doubts + row_at) != 0
                if in_doubt:
                    sweep(
                        placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, edge, capacity, N,
                        True, True, BI, BJ,
                    )  # fmt: skip
                else:
                    sweep(
                        placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, edge, capacity, N,
                        True, False, BI, BJ,
                    )  # fmt: skip
            else:
                none = tl.zeros([BJ, BI], tl.int32)
                part, doubtful = sweep(
                    placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, none, capacity, N,
                    False, False, BI, BJ,
                )  # fmt: skip
                in_doubt = tl.max(tl.max((doubtful & real[None, :]).to(tl.int32), axis=1), axis=0)
                if in_doubt > 0:
                    part, _ = sweep(
                        placed, wrapped, order, starts, h, w, bin_at, k, i, real, rc, keys, none, capacity, N,
                        False, True, BI, BJ,
                    )  # fmt: skip
                tl.store(doubts + row_at, in_doubt)
                tl.store(parts_at, part, mask=real[None, :])
                found = tl.sum(part, axis=0)
                tl.store(counts + i, found, mask=real)
                tl.atomic_add(block_sums + i // _ROW_BLOCK, found.to(tl.int64), mask=real)
