"""Charges of a head on the features, and their gradient. Triton kernels.

q = c + (Q − Σc)/n, c being what the head's network gives and the sum over the n atoms of a structure; backwards
dE/dc = s − (Σs)/n with s = dE/dq. Sums are float64, of parts of PART atoms, always in the same order: those of a part
stand in the row of its first atom.

Shapes: N atoms, B structures, F channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous, before_next

__all__ = ["add_gradient_kernel", "equilibrate_kernel", "part_sums_kernel"]


@triton.jit
def part_sums_kernel(ptr, values, sums, PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):
    """sums [N] float64: that of the values [N] over part p of structure b."""
    after_previous(PDL)
    start = tl.load(ptr + tl.program_id(0)) + tl.program_id(1) * PART
    end = tl.minimum(start + PART, tl.load(ptr + tl.program_id(0) + 1))
    total = tl.zeros([BM], tl.float64)
    for first in range(start, end, BM):
        rows = first + tl.arange(0, BM)
        total += tl.load(values + rows, rows < end, other=0.0).to(tl.float64)
    tl.store(sums + start, tl.sum(total, 0), start < end)
    before_next(PDL)


@triton.jit
def mean_of_structure(sums, ptr, b, ok, PART: tl.constexpr):
    """Σ/n of structures b [BM], from the sums of their parts, and n: float64."""
    first, end = tl.load(ptr + b), tl.load(ptr + b + 1)
    total = tl.load(sums + first, ok, other=0.0)
    for p in range(PART, tl.max(tl.where(ok, end - first, 0), 0), PART):
        total += tl.load(sums + first + p, ok & (first + p < end), other=0.0)
    size = tl.where(ok, end - first, 1).to(tl.float64)
    return total / size, size


@triton.jit(do_not_specialize=["num_atoms"])
def equilibrate_kernel(
    batch, ptr, total_charge, raw, sums, charges, charges64, num_atoms,
    PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Charges [N] of raw ones c [N]; total_charge [B] float64."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    b = tl.load(batch + rows, ok, other=0)
    mean, size = mean_of_structure(sums, ptr, b, ok, PART)
    missing = tl.load(total_charge + b) / size - mean
    q = tl.load(raw + rows, ok, other=0.0).to(tl.float64) + missing
    tl.store(charges64 + rows, q, ok)
    tl.store(charges + rows, q.to(tl.float32), ok)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def add_gradient_kernel(
    batch, ptr, slope, sums, draw, scale, dhidden, num_atoms,
    F: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dhidden [N, F] += scale dE/dc · dc/dhidden [N, F] (draw), for the slopes s [N] and the sums of their parts."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    b = tl.load(batch + rows, ok, other=0)
    mean, _size = mean_of_structure(sums, ptr, b, ok, PART)
    s = ((tl.load(slope + rows, ok, other=0.0).to(tl.float64) - mean) * scale).to(tl.float32)
    at = rows[:, None].to(tl.int64) * F + tl.arange(0, F)[None, :]
    before = tl.load(dhidden + at, ok[:, None], other=0.0)
    tl.store(dhidden + at, before + s[:, None] * tl.load(draw + at, ok[:, None], other=0.0), ok[:, None])
    before_next(PDL)
