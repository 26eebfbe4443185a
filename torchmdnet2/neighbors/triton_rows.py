"""GPU kernels that complete the rows of a list: order, receivers, shifts, vectors and distances, in float64.

One program per receiver. Rows of the cell list are made from the bits of triton_cells.py, then sorted by the keys
32 · sender + image where that is asked for: a row of n edges that is longer than a tile costs n² comparisons. Rows of
"pairs" arrive in order, as sender and image (triton_pairs.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import after_previous
from .triton_cells import _LANES, bits_set, sweep
from .triton_setup import _REALS, flag_coincident


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
