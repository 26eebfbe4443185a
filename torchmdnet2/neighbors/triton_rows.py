"""GPU kernel that completes the rows of a list: order, receivers, shifts, vectors and distances, in float64.

One program per receiver. Rows of the cell list arrive unordered, as keys (triton_cells.py): an edge's place in its row
is the number of smaller keys. Rows of "pairs" arrive in order, as sender and image (triton_pairs.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _REALS


@triton.jit
def finish_rows(
    keys, row_ptr, batch, wrapped, wraps, reals, sender, receiver, shift, vectors, distances,
    ORDER: tl.constexpr, RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    first = tl.load(row_ptr + i)
    last = tl.load(row_ptr + i + 1)
    if last > first:
        h = reals + tl.load(batch + i) * _REALS
        for at in range(first, last, K):
            e = at + tl.arange(0, K)
            mask = e < last
            key = tl.load(keys + e, mask=mask, other=2147483647)
            if ORDER:
                rank = tl.zeros([K], tl.int32)
                for other_at in range(first, last, K):
                    f = other_at + tl.arange(0, K)
                    other = tl.load(keys + f, mask=f < last, other=2147483647)
                    rank -= tl.sum((other[:, None] - key[None, :]) >> 31, axis=0)  # −1 where other < key
                edge = first + rank
                j = key // 32
                image = key % 32
                s0 = image // 9 - 1
                s1 = image // 3 % 3 - 1
                s2 = image % 3 - 1
                tl.store(sender + edge, j, mask=mask)
            else:
                edge = e
                j = tl.load(sender + e, mask=mask, other=0)
                s0 = key // 4096 - 32
                s1 = key // 64 % 64 - 32
                s2 = key % 64 - 32
            edge3 = edge.to(tl.int64) * 3  # may pass 2^31
            if RECEIVER:
                tl.store(receiver + edge, tl.zeros([K], tl.int32) + i, mask=mask)
            if SHIFT:
                own, theirs = wraps + i * 4, wraps + j * 4
                tl.store(shift + edge3, s0 + tl.load(own) - tl.load(theirs, mask=mask), mask=mask)
                tl.store(shift + edge3 + 1, s1 + tl.load(own + 1) - tl.load(theirs + 1, mask=mask), mask=mask)
                tl.store(shift + edge3 + 2, s2 + tl.load(own + 2) - tl.load(theirs + 2, mask=mask), mask=mask)
            if VECTORS or DISTANCES:
                x = tl.load(wrapped + j * 4 + 0, mask=mask) - tl.load(wrapped + i * 4 + 0)
                y = tl.load(wrapped + j * 4 + 1, mask=mask) - tl.load(wrapped + i * 4 + 1)
                z = tl.load(wrapped + j * 4 + 2, mask=mask) - tl.load(wrapped + i * 4 + 2)
                x += s0 * tl.load(h + 0) + s1 * tl.load(h + 3) + s2 * tl.load(h + 6)
                y += s0 * tl.load(h + 1) + s1 * tl.load(h + 4) + s2 * tl.load(h + 7)
                z += s0 * tl.load(h + 2) + s1 * tl.load(h + 5) + s2 * tl.load(h + 8)
                if VECTORS:
                    tl.store(vectors + edge3, x, mask=mask)
                    tl.store(vectors + edge3 + 1, y, mask=mask)
                    tl.store(vectors + edge3 + 2, z, mask=mask)
                if DISTANCES:
                    tl.store(distances + edge, tl.sqrt(x * x + y * y + z * z), mask=mask)
