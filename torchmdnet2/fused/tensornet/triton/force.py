"""Forces and virial from the gradients of the edges: Triton kernels, without atomics or with those of integers: the
same input gives the same bits.

Shapes: N atoms, E edges (capacity).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous
from ...fast_path import FIXED_POINT

__all__ = ["domain_force_kernel", "force_kernel"]

_FIXED = tl.constexpr(FIXED_POINT)
_LARGEST = tl.constexpr(2.0**20)  # so that 2,047 of them fit into an integer


@triton.jit
def fixed(x):
    return (x.to(tl.float64) * _FIXED).to(tl.int64)


@triton.jit
def edge_gradient(
    e, mask, vec, slope, edge_slope, edge_turn, capacity,
    SLICES: tl.constexpr, MESSAGES: tl.constexpr,
):  # fmt: skip
    """dE/dvec of directed edges e (a vector of indices): the embedding's part and the messages'."""
    x = tl.load(vec + e * 3, mask, other=1.0)
    y = tl.load(vec + e * 3 + 1, mask, other=0.0)
    z = tl.load(vec + e * 3 + 2, mask, other=0.0)
    square = x * x + y * y + z * z
    inverse = tl.where(square > 0.0, 1.0 / tl.sqrt(tl.where(square > 0.0, square, 1.0)), 0.0)
    ux, uy, uz = x * inverse, y * inverse, z * inverse
    along = tl.zeros_like(x)
    tx = tl.zeros_like(x)
    ty = tl.zeros_like(x)
    tz = tl.zeros_like(x)
    for k in tl.static_range(SLICES):
        at = e + k * capacity
        along += tl.load(edge_slope + at, mask, other=0.0)
        tx += tl.load(edge_turn + at * 3, mask, other=0.0)
        ty += tl.load(edge_turn + at * 3 + 1, mask, other=0.0)
        tz += tl.load(edge_turn + at * 3 + 2, mask, other=0.0)
    for k in tl.static_range(MESSAGES):
        along += tl.load(slope + e + k * capacity, mask, other=0.0)
    dot = tx * ux + ty * uy + tz * uz
    gx = along * ux + (tx - dot * ux) * inverse
    gy = along * uy + (ty - dot * uy) * inverse
    gz = along * uz + (tz - dot * uz) * inverse
    return gx, gy, gz, x, y, z


@triton.jit
def lower_bound(sender, low, high, value):
    """First index in [low, high) of the sorted senders that is ≥ value (vectors of rows)."""
    longest = tl.max(high - low, 0)
    while longest > 0:
        middle = (low + high) // 2
        go = low < high
        right = go & (tl.load(sender + middle, go, other=0) < value)
        low = tl.where(right, middle + 1, low)
        high = tl.where(go & (right == 0), middle, high)
        longest = longest // 2
    return low


@triton.jit
def reverse_of(row_ptr, sender, e, mask, i, start, end):
    """The edge that runs the other way, for edges e of row i.

    Rows are sorted by sender and shift. The edges between i and j are listed in row i by rising shift, in row j by
    the same shifts negated: the reverse of the r-th of m is the (m − 1 − r)-th.
    """
    j = tl.load(sender + e, mask, other=-1)
    row_start = tl.load(row_ptr + j, mask, other=0)
    row_end = tl.load(row_ptr + j + 1, mask, other=0)
    there = lower_bound(sender, row_start, row_end, tl.zeros_like(j) + i)
    before = tl.load(sender + e - 1, mask & (e > start), other=-2)
    after = tl.load(sender + e + 1, mask & (e + 1 < end), other=-2)
    last = there
    if tl.max(((before == j) | (after == j)).to(tl.int32), 0) > 0:  # several images of one atom
        beyond = lower_bound(sender, tl.where(mask, start, 0), tl.where(mask, end, 0), j + 1)
        last = there + tl.where(mask, beyond - 1 - e, 0)
    return last


@triton.jit(do_not_specialize=["capacity"])
def force_kernel(
    row_ptr, sender, vec, slope, edge_slope, edge_turn, capacity, forces, virial,
    SLICES: tl.constexpr, MESSAGES: tl.constexpr, BE: tl.constexpr, VIRIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """F_i = Σ_e (G_e − G_reverse(e)), G = dE/dvec; virial of the row Σ_e vec ⊗ G (nine numbers)."""
    i = tl.program_id(0)
    start = tl.load(row_ptr + i)
    end = tl.load(row_ptr + i + 1)
    fx = tl.zeros([BE], tl.float32)
    fy, fz = fx, fx
    v0, v1, v2, v3, v4, v5, v6, v7, v8 = fx, fx, fx, fx, fx, fx, fx, fx, fx
    for first in range(start, end, BE):
        e = first + tl.arange(0, BE)
        mask = e < end
        reverse = reverse_of(row_ptr, sender, e, mask, i, start, end)
        after_previous(PDL)
        gx, gy, gz, x, y, z = edge_gradient(e, mask, vec, slope, edge_slope, edge_turn, capacity, SLICES, MESSAGES)
        rx, ry, rz, _x, _y, _z = edge_gradient(
            reverse, mask, vec, slope, edge_slope, edge_turn, capacity, SLICES, MESSAGES
        )
        fx += tl.where(mask, gx - rx, 0.0)
        fy += tl.where(mask, gy - ry, 0.0)
        fz += tl.where(mask, gz - rz, 0.0)
        if VIRIAL:
            gx, gy, gz = tl.where(mask, gx, 0.0), tl.where(mask, gy, 0.0), tl.where(mask, gz, 0.0)
            v0 += x * gx
            v1 += x * gy
            v2 += x * gz
            v3 += y * gx
            v4 += y * gy
            v5 += y * gz
            v6 += z * gx
            v7 += z * gy
            v8 += z * gz
    after_previous(PDL)  # also where there are no edges
    tl.store(forces + i * 3, tl.sum(fx, 0))
    tl.store(forces + i * 3 + 1, tl.sum(fy, 0))
    tl.store(forces + i * 3 + 2, tl.sum(fz, 0))
    if VIRIAL:
        tl.store(virial + i * 9, tl.sum(v0, 0))
        tl.store(virial + i * 9 + 1, tl.sum(v1, 0))
        tl.store(virial + i * 9 + 2, tl.sum(v2, 0))
        tl.store(virial + i * 9 + 3, tl.sum(v3, 0))
        tl.store(virial + i * 9 + 4, tl.sum(v4, 0))
        tl.store(virial + i * 9 + 5, tl.sum(v5, 0))
        tl.store(virial + i * 9 + 6, tl.sum(v6, 0))
        tl.store(virial + i * 9 + 7, tl.sum(v7, 0))
        tl.store(virial + i * 9 + 8, tl.sum(v8, 0))


@triton.jit(do_not_specialize=["capacity"])
def domain_force_kernel(
    row_ptr, sender, vec, slope, edge_slope, edge_turn, capacity, forces, virial,
    SLICES: tl.constexpr, MESSAGES: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds G = dE/dvec of each edge to the force of its receiver, and subtracts it from that of its sender.

    A ghost has no edges of its own, so that there is no reverse edge to be read. forces: [rows of local atoms and
    ghosts, 3] int64, in units of 1/FIXED_POINT; virial [N, 9] of the rows, as of `force_kernel`. A gradient that is not
    finite, or has no place in such integers, is left out, and its row's virial is NaN.
    """
    i = tl.program_id(0)
    start = tl.load(row_ptr + i)
    end = tl.load(row_ptr + i + 1)
    fx = tl.zeros([BE], tl.float32)
    fy, fz = fx, fx
    v0, v1, v2, v3, v4, v5, v6, v7, v8 = fx, fx, fx, fx, fx, fx, fx, fx, fx
    after_previous(PDL)
    for first in range(start, end, BE):
        e = first + tl.arange(0, BE)
        mask = e < end
        j = tl.load(sender + e, mask, other=0).to(tl.int64)
        gx, gy, gz, x, y, z = edge_gradient(e, mask, vec, slope, edge_slope, edge_turn, capacity, SLICES, MESSAGES)
        fits = (tl.abs(gx) < _LARGEST) & (tl.abs(gy) < _LARGEST) & (tl.abs(gz) < _LARGEST)  # not NaN either
        v0 += tl.where(mask & (fits == 0), float("nan"), 0.0)
        use = mask & fits
        gx, gy, gz = tl.where(use, gx, 0.0), tl.where(use, gy, 0.0), tl.where(use, gz, 0.0)
        tl.atomic_add(forces + j * 3, -fixed(gx), use, sem="relaxed")
        tl.atomic_add(forces + j * 3 + 1, -fixed(gy), use, sem="relaxed")
        tl.atomic_add(forces + j * 3 + 2, -fixed(gz), use, sem="relaxed")
        fx += gx
        fy += gy
        fz += gz
        v0 += x * gx
        v1 += x * gy
        v2 += x * gz
        v3 += y * gx
        v4 += y * gy
        v5 += y * gz
        v6 += z * gx
        v7 += z * gy
        v8 += z * gz
    tl.atomic_add(forces + i * 3, fixed(tl.sum(fx, 0)), sem="relaxed")
    tl.atomic_add(forces + i * 3 + 1, fixed(tl.sum(fy, 0)), sem="relaxed")
    tl.atomic_add(forces + i * 3 + 2, fixed(tl.sum(fz, 0)), sem="relaxed")
    tl.store(virial + i * 9, tl.sum(v0, 0))
    tl.store(virial + i * 9 + 1, tl.sum(v1, 0))
    tl.store(virial + i * 9 + 2, tl.sum(v2, 0))
    tl.store(virial + i * 9 + 3, tl.sum(v3, 0))
    tl.store(virial + i * 9 + 4, tl.sum(v4, 0))
    tl.store(virial + i * 9 + 5, tl.sum(v5, 0))
    tl.store(virial + i * 9 + 6, tl.sum(v6, 0))
    tl.store(virial + i * 9 + 7, tl.sum(v7, 0))
    tl.store(virial + i * 9 + 8, tl.sum(v8, 0))
