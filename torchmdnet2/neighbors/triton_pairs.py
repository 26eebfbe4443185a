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

from ..triton_launch import after_previous
from .triton_setup import _REALS, _WHOLE

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds a float32 to the nearest integer


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
    most0 = tl.max(m0, axis=0)
    most1 = tl.max(m1, axis=0)
    most2 = tl.max(m2, axis=0)
    width1 = 2 * most1 + 1
    width2 = 2 * most2 + 1
    num_images = (2 * most0 + 1) * width1 * width2

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
        t0 = tl.zeros([BJ], tl.int32)
        t1 = tl.zeros([BJ], tl.int32)
        t2 = tl.zeros([BJ], tl.int32)
        if num_images > 1:
            j = first + candidate // num_images
            image = candidate % num_images
            t0 = image // (width1 * width2) - most0
            t1 = image // width2 % width1 - most1
            t2 = image % width2 - most2
        inside = j < last
        d0 = tl.load(fractions + j, mask=inside, other=0.0)[None, :] - fi0
        d1 = tl.load(fractions + N + j, mask=inside, other=0.0)[None, :] - fi1
        d2 = tl.load(fractions + 2 * N + j, mask=inside, other=0.0)[None, :] - fi2
        # the nearest image, then t beyond it
        s0 = (t0.to(tl.float32)[None, :] - ((d0 + _ROUND) - _ROUND)) * p0
        s1 = (t1.to(tl.float32)[None, :] - ((d1 + _ROUND) - _ROUND)) * p1
        s2 = (t2.to(tl.float32)[None, :] - ((d2 + _ROUND) - _ROUND)) * p2
        # an atom is not its own neighbor in the nearest image
        itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j, -1)
        near = (inside[None, :] & real[:, None]) & (itself[None, :] != rows[:, None])
        if BATCHED:
            near &= tl.load(batch + j, mask=inside, other=-1)[None, :] == system[:, None]
            near &= (tl.abs(t0)[None, :] <= m0[:, None]) & (tl.abs(t1)[None, :] <= m1[:, None])
            near &= tl.abs(t2)[None, :] <= m2[:, None]
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
