"""Neighbor search of small structures on the GPU: every pair of a structure is tested, rows come out in order.

Two kernels: fractional coordinates once per atom, then count (FILL = False) and fill (FILL = True) by the same tests.
A tile is BI receivers times BJ candidates, where the candidates run over senders and, innermost, over images. Each row
therefore meets its senders in ascending order, and its place in the output is a prefix sum: no sort and no atomics.
The work is Σ n_b² over the structures of the batch. All geometry is float64: at these sizes it costs microseconds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _NOT_FINITE, _REALS, _ROW_BLOCK, _WHOLE, fractional


@triton.jit(do_not_specialize=["N", "B"])
def fractional_coordinates(pos, batch, ptr, reals, frac, flag, N, B, BLOCK: tl.constexpr):
    """frac [3, N] float64; raises the flag where a position is not finite."""
    atoms = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atoms < tl.load(ptr + B)
    system = tl.load(batch + atoms, mask=mask, other=0)
    f0, f1, f2, usable = fractional(pos, system, reals, atoms, mask)
    if tl.max((mask & (~usable)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(flag, _NOT_FINITE)
    tl.store(frac + atoms, f0, mask=mask)
    tl.store(frac + N + atoms, f1, mask=mask)
    tl.store(frac + 2 * N + atoms, f2, mask=mask)


@triton.jit(do_not_specialize=["N", "B", "capacity"])
def search_pairs(
    frac, batch, ptr, reals, whole, cutoff, counts, block_sums, row_ptr,
    sender, receiver, shift, vectors, distances, N, B, capacity,
    FILL: tl.constexpr, RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Count or list the neighbors of BI receivers."""
    rows = tl.program_id(0) * BI + tl.arange(0, BI)
    real = rows < tl.load(ptr + B)  # atoms past ptr[B] are padding and have no neighbors
    system = tl.load(batch + rows, mask=real, other=0)
    first = tl.min(tl.load(ptr + system, mask=real, other=N), axis=0)
    last = tl.max(tl.load(ptr + system + 1, mask=real, other=0), axis=0)
    num_senders = tl.maximum(last - first, 0)

    fi0 = tl.load(frac + rows, mask=real, other=0.0)[:, None]
    fi1 = tl.load(frac + N + rows, mask=real, other=0.0)[:, None]
    fi2 = tl.load(frac + 2 * N + rows, mask=real, other=0.0)[:, None]
    h = reals + system * _REALS
    h00 = tl.load(h + 0, mask=real, other=0.0)[:, None]
    h01 = tl.load(h + 1, mask=real, other=0.0)[:, None]
    h02 = tl.load(h + 2, mask=real, other=0.0)[:, None]
    h10 = tl.load(h + 3, mask=real, other=0.0)[:, None]
    h11 = tl.load(h + 4, mask=real, other=0.0)[:, None]
    h12 = tl.load(h + 5, mask=real, other=0.0)[:, None]
    h20 = tl.load(h + 6, mask=real, other=0.0)[:, None]
    h21 = tl.load(h + 7, mask=real, other=0.0)[:, None]
    h22 = tl.load(h + 8, mask=real, other=0.0)[:, None]
    w = whole + system * _WHOLE
    p0 = tl.load(w + 0, mask=real, other=0)[:, None] == 1
    p1 = tl.load(w + 1, mask=real, other=0)[:, None] == 1
    p2 = tl.load(w + 2, mask=real, other=0)[:, None] == 1
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

    rc = tl.load(cutoff)
    found = tl.zeros([BI], tl.int32)
    start = tl.zeros([BI], tl.int32)
    if FILL:
        start = tl.load(row_ptr + rows, mask=real, other=0)
    for at in range(0, num_senders * num_images, BJ):
        candidate = at + tl.arange(0, BJ)
        j = first + candidate // num_images
        image = candidate % num_images
        t0 = image // (width1 * width2) - most0
        t1 = image // width2 % width1 - most1
        t2 = image % width2 - most2
        inside = j < last
        system_j = tl.load(batch + j, mask=inside, other=-1)
        d0 = tl.load(frac + j, mask=inside, other=0.0)[None, :] - fi0
        d1 = tl.load(frac + N + j, mask=inside, other=0.0)[None, :] - fi1
        d2 = tl.load(frac + 2 * N + j, mask=inside, other=0.0)[None, :] - fi2
        # the nearest image, then t beyond it
        s0 = tl.where(p0, t0[None, :] - tl.floor(d0 + 0.5), 0.0)
        s1 = tl.where(p1, t1[None, :] - tl.floor(d1 + 0.5), 0.0)
        s2 = tl.where(p2, t2[None, :] - tl.floor(d2 + 0.5), 0.0)
        d0 += s0
        d1 += s1
        d2 += s2
        x = d0 * h00 + d1 * h10 + d2 * h20
        y = d0 * h01 + d1 * h11 + d2 * h21
        z = d0 * h02 + d1 * h12 + d2 * h22
        square = x * x + y * y + z * z
        near = (square < rc * rc) & real[:, None] & (system_j[None, :] == system[:, None])
        near &= (tl.abs(t0)[None, :] <= m0[:, None]) & (tl.abs(t1)[None, :] <= m1[:, None])
        near &= tl.abs(t2)[None, :] <= m2[:, None]
        near &= (j[None, :] != rows[:, None]) | (s0 != 0) | (s1 != 0) | (s2 != 0)
        hit = near.to(tl.int32)
        if FILL:
            edge = start[:, None] + found[:, None] + tl.cumsum(hit, axis=1) - 1
            near &= edge < capacity
            # an edge index times three may pass 2^31
            edge3 = edge.to(tl.int64) * 3
            tl.store(sender + edge, tl.broadcast_to(j[None, :], [BI, BJ]), mask=near)
            if RECEIVER:
                tl.store(receiver + edge, tl.broadcast_to(rows[:, None], [BI, BJ]), mask=near)
            if SHIFT:
                tl.store(shift + edge3, s0.to(tl.int32), mask=near)
                tl.store(shift + edge3 + 1, s1.to(tl.int32), mask=near)
                tl.store(shift + edge3 + 2, s2.to(tl.int32), mask=near)
            if VECTORS:
                tl.store(vectors + edge3, x, mask=near)
                tl.store(vectors + edge3 + 1, y, mask=near)
                tl.store(vectors + edge3 + 2, z, mask=near)
            if DISTANCES:
                tl.store(distances + edge, tl.sqrt(square), mask=near)
        found += tl.sum(hit, axis=1)
    if not FILL:
        tl.store(counts + rows, found, mask=rows < N)
        total = tl.sum(found.to(tl.int64), axis=0)
        tl.atomic_add(block_sums + tl.program_id(0) * BI // _ROW_BLOCK, total)
