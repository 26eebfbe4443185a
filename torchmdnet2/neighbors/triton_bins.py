"""GPU kernels that sort atoms into bins no narrower than the cutoff: wrap and count, prefix sum, place.

Bins of structure b lie at ptr[b] + (FREE_BINS + 1)·b … in `bin_count` and `bin_start`, in C order of their three
coordinates, so that neighbors along the last lattice vector are neighbors in memory. Along periodic vectors the bins
tile the cell; along free directions they are cubes of one cutoff, folded with period n ≥ 3: no bounding box is needed,
and atoms that share a bin without being near are told apart by their distance.

Atoms take their place inside a bin in any order (atomics); nothing that leaves the search depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_setup import _FREE_BINS, _NOT_FINITE, _REALS, _WHOLE, fractional


@triton.jit
def bin_coordinate(f, n, periodic, rc, mask):
    """(bin along one lattice vector, whole cells to subtract) of fractional coordinates f."""
    cells = tl.where(periodic, tl.floor(f), 0.0)
    folded = tl.floor(f / rc)
    folded = folded - n * tl.floor(folded / n)
    c = tl.where(periodic, (f - cells) * n, folded).to(tl.int32)
    return tl.minimum(tl.maximum(c, 0), n - 1), cells


@triton.jit(do_not_specialize=["N", "B"])
def bin_atoms(
    pos, batch, ptr, reals, whole, cutoff, wrapped, wraps, bins, slots, bin_count, counts, flag, N, B,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Wrap the atoms (wrapped [N, 4] float64, wraps [N, 4] int32), give each a bin and a slot in it, clear counts."""
    atoms = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + atoms, tl.zeros([BLOCK], tl.int32), mask=atoms < N)
    mask = atoms < tl.load(ptr + B)
    system = tl.load(batch + atoms, mask=mask, other=0)
    f0, f1, f2, usable = fractional(pos, system, reals, atoms, mask)
    if tl.max((mask & (~usable)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(flag, _NOT_FINITE)

    w = whole + system * _WHOLE
    rc = tl.load(cutoff)
    n1 = tl.load(w + 7, mask=mask, other=1)
    n2 = tl.load(w + 8, mask=mask, other=1)
    c0, s0 = bin_coordinate(f0, tl.load(w + 6, mask=mask, other=1), tl.load(w + 0, mask=mask, other=0) == 1, rc, mask)
    c1, s1 = bin_coordinate(f1, n1, tl.load(w + 1, mask=mask, other=0) == 1, rc, mask)
    c2, s2 = bin_coordinate(f2, n2, tl.load(w + 2, mask=mask, other=0) == 1, rc, mask)
    known = mask & usable & (tl.load(w + 9, mask=mask, other=0) > 0)
    first_bin = tl.load(ptr + system, mask=mask, other=0) + (_FREE_BINS + 1) * system
    target = first_bin + (c0 * n1 + c1) * n2 + c2
    slot = tl.atomic_add(bin_count + target, tl.full([BLOCK], 1, tl.int32), mask=known)
    tl.store(bins + atoms, tl.where(known, target, -1), mask=mask)
    tl.store(slots + atoms, slot, mask=mask)

    h = reals + system * _REALS
    for k in tl.static_range(3):
        x = tl.load(pos + atoms * 3 + k, mask=mask, other=0.0).to(tl.float64)
        x -= s0 * tl.load(h + k, mask) + s1 * tl.load(h + 3 + k, mask) + s2 * tl.load(h + 6 + k, mask)
        tl.store(wrapped + atoms * 4 + k, x, mask=mask)
    tl.store(wraps + atoms * 4 + 0, s0.to(tl.int32), mask=known)
    tl.store(wraps + atoms * 4 + 1, s1.to(tl.int32), mask=known)
    tl.store(wraps + atoms * 4 + 2, s2.to(tl.int32), mask=known)


@triton.jit
def bin_starts(bin_count, bin_start, ptr, whole, BLOCK: tl.constexpr):
    """Where each bin's atoms begin in the sorted order; bin_start has one entry more than there are bins."""
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
def place_atoms(bins, slots, bin_start, wrapped, order, placed, ptr, N, B, BLOCK: tl.constexpr):
    """The sorted order and the wrapped positions in it, placed [3, N] float64."""
    atoms = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atoms < tl.load(ptr + B)
    bin_of = tl.load(bins + atoms, mask=mask, other=-1)
    mask &= bin_of >= 0
    to = tl.load(bin_start + bin_of, mask=mask, other=0) + tl.load(slots + atoms, mask=mask, other=0)
    tl.store(order + to, atoms, mask=mask)
    for k in tl.static_range(3):
        tl.store(placed + k * N + to, tl.load(wrapped + atoms * 4 + k, mask=mask, other=0.0), mask=mask)
