"""Neighbor search of small structures on the GPU: every pair of a structure is tested, rows come out in order.

One kernel, run twice: count (FILL = False) and list (FILL = True) by the same tests. A tile is BI receivers times BJ
candidates, where the candidates run over senders and, innermost, over images. Each row therefore meets its senders in
ascending order, and its place in the output is a prefix sum: no sort and no atomics. The work is Σ n_b² over the
structures of the batch.

Tests are float32 on fractional coordinates; where the distance is so close to the cutoff that rounding could decide,
the tile is decided again in float64. So the list is that of a float64 search.

Images between wrapped atoms, s = (s0, s1, s2) with |s| ≤ 31, are packed as 64² (s0 + 32) + 64 (s1 + 32) + s2 + 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _REALS, _ROW_BLOCK, _WHOLE

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds a float32 to the nearest integer


@triton.jit
def row_real(reals, column, system, mask):
    """A column of the float64 table for each receiver, [BI, 1]."""
    return tl.load(reals + system * _REALS + column, mask=mask, other=0.0)[:, None]


@triton.jit(do_not_specialize=["N", "B", "capacity"])
def search_pairs(
    fractions, wrapped, batch, ptr, reals, whole, cutoff, counts, block_sums, row_ptr, sender, images, N, B, capacity,
    FILL: tl.constexpr, BATCHED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Count or list the neighbors of BI receivers."""
    rows = tl.program_id(0) * BI + tl.arange(0, BI)
    real = rows < tl.load(ptr + B)  # atoms past ptr[B] are padding and have no neighbors
    system = tl.load(batch + rows, mask=real, other=0)
    first = tl.min(tl.load(ptr + system, mask=real, other=N), axis=0)
    last = tl.max(tl.load(ptr + system + 1, mask=real, other=0), axis=0)
    w = whole + system * _WHOLE
    p0 = tl.load(w + 0, mask=real, other=0)[:, None].to(tl.float32)
    p1 = tl.load(w + 1, mask=real, other=0)[:, None].to(tl.float32)
    p2 = tl.load(w + 2, mask=real, other=0)[:, None].to(tl.float32)
    m0 = tl.load(w + 3, mask=real, other=0)
    m1 = tl.load(w + 4, mask=real, other=0)
    m2 = tl.load(w + 5, mask=real, other=0)
    # the rows of a tile may belong to several structures: loop over the images that any of them needs
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
    rc2 = (rc * rc).to(tl.float32)
    # a fraction is off by 2^-23 at most after the difference: Σ_k (1 + |f_k|) |h_k| 2^-21 bounds the distance's error
    reach = (1 + tl.abs(fi0)) * (tl.abs(h00) + tl.abs(h01) + tl.abs(h02))
    reach += (1 + tl.abs(fi1)) * (tl.abs(h10) + tl.abs(h11) + tl.abs(h12))
    reach += (1 + tl.abs(fi2)) * (tl.abs(h20) + tl.abs(h21) + tl.abs(h22))
    doubt = (2.2 * rc * (reach + rc) / 2097152.0).to(tl.float32)

    found = tl.zeros([BI], tl.int32)
    start = tl.zeros([BI], tl.int32)
    if FILL:
        start = tl.load(row_ptr + rows, mask=real, other=0)
    for at in range(0, tl.maximum(last - first, 0) * num_images, BJ):
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
        d0 += s0
        d1 += s1
        d2 += s2
        x = tl.fma(d0, h00, tl.fma(d1, h10, d2 * h20))
        y = tl.fma(d0, h01, tl.fma(d1, h11, d2 * h21))
        z = tl.fma(d0, h02, tl.fma(d1, h12, d2 * h22))
        square = tl.fma(x, x, tl.fma(y, y, z * z))
        near = square < rc2
        doubtful = tl.abs(square - rc2) < doubt
        if tl.max(tl.max(doubtful.to(tl.int32), axis=1), axis=0) > 0:
            exact = tl.zeros([BI, BJ], tl.float64)
            for k in tl.static_range(3):
                xj = tl.load(wrapped + j * 4 + k, mask=inside, other=0.0)[None, :]
                xi = tl.load(wrapped + rows * 4 + k, mask=real, other=0.0)[:, None]
                dx = xj - xi + s0 * row_real(reals, k, system, real)
                dx += s1 * row_real(reals, 3 + k, system, real)
                dx += s2 * row_real(reals, 6 + k, system, real)
                exact += dx * dx
            near = tl.where(doubtful, exact < rc * rc, near)
        # an atom is not its own neighbor in the nearest image
        itself = tl.where((t0 == 0) & (t1 == 0) & (t2 == 0), j, -1)
        near &= (inside[None, :] & real[:, None]) & (itself[None, :] != rows[:, None])
        if BATCHED:
            near &= tl.load(batch + j, mask=inside, other=-1)[None, :] == system[:, None]
            near &= (tl.abs(t0)[None, :] <= m0[:, None]) & (tl.abs(t1)[None, :] <= m1[:, None])
            near &= tl.abs(t2)[None, :] <= m2[:, None]
        hit = near.to(tl.int32)
        if FILL:
            edge = start[:, None] + found[:, None] + tl.cumsum(hit, axis=1) - 1
            near &= edge < capacity
            packed = ((s0 + 32.0) * 4096.0 + (s1 + 32.0) * 64.0 + (s2 + 32.0)).to(tl.int32)
            tl.store(sender + edge, tl.broadcast_to(j[None, :], [BI, BJ]), mask=near)
            tl.store(images + edge, packed, mask=near)
        found += tl.sum(hit, axis=1)
    if not FILL:
        tl.store(counts + rows, found, mask=rows < N)
        tl.atomic_add(block_sums + tl.program_id(0) * BI // _ROW_BLOCK, tl.sum(found.to(tl.int64), axis=0))
