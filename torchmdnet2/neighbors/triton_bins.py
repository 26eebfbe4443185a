"""GPU kernels that wrap atoms and sort them into bins: count, prefix sum, place, order.

Bins are no narrower than the cutoff along the first two lattice vectors and a quarter of that along the third: columns
of thin bins. Those of structure b lie at ptr[b] + (FREE_BINS + 1)·b … in `bin_count` and `bin_start`, in C order of
their three coordinates, so that a piece of a column is one run of atoms. Along periodic vectors the bins tile the cell;
along free directions they are folded with a period of at least three cutoffs (across columns): no bounding box is
needed, and atoms that share a bin without being near are told apart by their distance.

Atoms enter their bin in any order (atomics), then each bin is put in order of the atoms' numbers: the sorted order is a
function of the positions alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import after_previous
from .triton_setup import _FREE_BINS, _NOT_FINITE, _REALS, _THIN_BINS, _WHOLE


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
