"""Filters of TensorNet2 on the edges: an MLP of the distance and the charges of both atoms. Triton kernels.

g = C(d) · silu(W₃ silu(W₂ silu(h) + b₂) + b₃),  h = T(d) + A_receiver + B_sender, T being a table, A and B linear in
the charges. The filters are computed for a chunk of slots at a time and are never kept for all edges. A slot is an atom
(its message to itself, at distance 0) or an edge: slots 0 … N − 1 are the atoms, slot N + e is edge e.

The slot of an edge in the row of atom i from j is filled for the message j → i; REVERSED for i → j, which the gradients
of Y_i need.

Products as in split_fp16_products.py: a number is two float16 numbers, high + low/2048, and the product of two low
parts is left out. Here they are split where they are written.

Shapes: N atoms, E edges (capacity), F channels, C charge channels, S slots of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous, before_next
from ...tensornet.triton.dense import settle, silu, silu_slope
from ...tensornet.triton.force import reverse_of

__all__ = ["edge_kernel", "first_gradient_kernel", "first_layer_kernel", "layer_kernel"]


@triton.jit
def edge_kernel(
    row_ptr, sender, vec, receiver, reverse, envelope, envelope_slope, inverse_cutoff,
    BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each edge: the atom of its row, the edge that runs the other way, C(d) and C'(d) [E]."""
    PI: tl.constexpr = 3.141592653589793
    after_previous(PDL)
    i = tl.program_id(0)
    start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
    for first in range(start, end, BE):
        e = first + tl.arange(0, BE)
        mask = e < end
        tl.store(receiver + e, tl.zeros_like(e) + i, mask)
        tl.store(reverse + e, reverse_of(row_ptr, sender, e, mask, i, start, end), mask)
        x = tl.load(vec + e * 3, mask, other=1.0)
        y = tl.load(vec + e * 3 + 1, mask, other=0.0)
        z = tl.load(vec + e * 3 + 2, mask, other=0.0)
        phase = tl.sqrt(x * x + y * y + z * z) * inverse_cutoff
        inside = phase < 1.0
        tl.store(envelope + e, tl.where(inside, 0.5 * (tl.cos(PI * phase) + 1.0), 0.0), mask)
        slope = -0.5 * PI * inverse_cutoff * tl.sin(PI * phase)
        tl.store(envelope_slope + e, tl.where(inside, slope, 0.0), mask)


@triton.jit
def atoms_of_slots(slot, alive, num_atoms, sender, receiver, knot, offset, REVERSED: tl.constexpr):
    """Receiver, sender, knot and distance from it of slots."""
    own = slot < num_atoms
    e = slot - num_atoms
    listed = alive & (own == 0)
    i = tl.where(own, slot, tl.load(receiver + e, listed, other=0))
    j = tl.where(own, slot, tl.load(sender + e, listed, other=0))
    k = tl.load(knot + e, listed, other=0)
    t = tl.load(offset + e, listed, other=0.0)
    if REVERSED:
        i, j = j, i
    return i, j, k, t


@triton.jit
def store_split(out, at, x, mask, plane):
    """x as two float16 numbers, plane apart."""
    high = x.to(tl.float16)
    tl.store(out + at, high, mask)
    tl.store(out + plane + at, ((x - high.to(tl.float32)) * 2048.0).to(tl.float16), mask)


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def first_layer_kernel(
    row_ptr, receiver, sender, knot, offset, table, by_charge, out, num_atoms, first_slot, num_slots,
    F: tl.constexpr, REVERSED: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(h) of the slots, split: [2, S, F]. by_charge [N, 2F] is A beside B."""
    after_previous(PDL)
    here = tl.program_id(0) * BM + tl.arange(0, BM)
    slot = first_slot + here
    alive = slot < num_atoms + tl.load(row_ptr + num_atoms)
    i, j, k, t = atoms_of_slots(slot, alive, num_atoms, sender, receiver, knot, offset, REVERSED)
    c = tl.arange(0, F)[None, :]
    m = alive[:, None]
    h = radial_half(table + k[:, None] * (4 * F) + c, t[:, None], m, F)
    h += tl.load(by_charge + i[:, None].to(tl.int64) * (2 * F) + c, m, other=0.0)
    h += tl.load(by_charge + j[:, None].to(tl.int64) * (2 * F) + F + c, m, other=0.0)
    store_split(out, here[:, None] * F + c, silu(h), m, num_slots * F)


@triton.jit
def radial_half(p, t, mask, F: tl.constexpr):
    """Value of the cubic at p = table + knot·4F + channel; 0 where masked."""
    c0, c1 = tl.load(p, mask, other=0.0), tl.load(p + F, mask, other=0.0)
    c2, c3 = tl.load(p + 2 * F, mask, other=0.0), tl.load(p + 3 * F, mask, other=0.0)
    return c0 + t * (c1 + t * (c2 + t * c3))


@triton.jit
def split_product(
    a, w, rows, cols, m, plane, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A W [BM, BN] of split A [2, S, K], plane apart, and W [2, K, N]."""
    y = tl.zeros([BM, BN], tl.float32)
    small = y
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        at = a + rows[:, None] * K + k[None, :]
        high, low = tl.load(at, m, other=0.0), tl.load(at + plane, m, other=0.0)
        of = w + k[:, None] * N + cols[None, :]
        w_high, w_low = tl.load(of), tl.load(of + K * N)
        small = tl.dot(low, w_high, small)
        small = tl.dot(high, w_low, small)
        y += tl.dot(high, w_high)
    return y + small * (1.0 / 2048.0)


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def layer_kernel(
    a, w, bias, factor, out, slope_out, row_ptr, reverse, num_atoms, first_slot, num_slots,
    K: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, WITH_SLOPE: tl.constexpr, REVERSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y = A W for the slots of a chunk; A [2, S, K] and W [2, K, N] are split.

    MODE "hidden": out [2, S, N] = silu(Y + bias), split; WITH_SLOPE: slope_out [S, N] = silu'(Y + bias).
    MODE "last": out [S, N] = Y + bias. MODE "gradient": out [2, S, N] = Y · factor [S, N], split; REVERSED: factor is
    of all slots, and that of the message that runs the other way is read.
    """
    after_previous(PDL)
    alive = tl.minimum(num_atoms + tl.load(row_ptr + num_atoms) - first_slot, num_slots)
    # blocks of the same rows run at the same time, so that the rows are read from memory once
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    if tl.program_id(1) * BM < alive:
        m = (rows < alive)[:, None]
        y = split_product(a, w, rows, cols, m, num_slots * K, K, N, BM, BN, BK)
        at = rows[:, None] * N + cols[None, :]
        if MODE == "hidden":
            y += tl.load(bias + cols)[None, :]
            store_split(out, at, silu(y), m, num_slots * N)
            if WITH_SLOPE:
                tl.store(slope_out + at, silu_slope(y), m)
        elif MODE == "last":
            tl.store(out + at, y + tl.load(bias + cols)[None, :], m)
        else:
            place = at
            if REVERSED:
                there = reversed_slot(reverse, first_slot + rows, rows < alive, num_atoms)
                place = there[:, None].to(tl.int64) * N + cols[None, :]
            store_split(out, at, y * tl.load(factor + place, m, other=0.0), m, num_slots * N)
    before_next(PDL)


@triton.jit
def reversed_slot(reverse, slot, alive, num_atoms):
    """The slot of the message that runs the other way."""
    edge = alive & (slot >= num_atoms)
    return tl.where(edge, num_atoms + tl.load(reverse + slot - num_atoms, edge, other=0), slot)


@triton.jit
def radial_half_and_slope(p, t, mask, F: tl.constexpr):
    """`radial_half` and its derivative by the distance."""
    value = tl.load(p + 3 * F, mask, other=0.0)
    slope = value
    value = value * t + tl.load(p + 2 * F, mask, other=0.0)
    slope = slope * t + value
    value = value * t + tl.load(p + F, mask, other=0.0)
    slope = slope * t + value
    return value * t + tl.load(p, mask, other=0.0), slope


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def first_gradient_kernel(
    a, w, row_ptr, receiver, sender, knot, offset, table, by_charge, charges_t, slope, pair_slope, num_atoms,
    first_slot, num_slots,
    F: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From the gradient [2, S, 2F] of what the second activation acts on, split, of reversed slots: dE/dd through T
    into slope [E], and that of the charges of receiver (first C) and sender into pair_slope [N + E, 2C].

    w [2, 2F, F] and charges_t [2, F, 2C] are split.
    """
    after_previous(PDL)
    here = tl.program_id(0) * BM + tl.arange(0, BM)
    slot = first_slot + here
    end = num_atoms + tl.load(row_ptr + num_atoms)
    if first_slot + tl.program_id(0) * BM < end:
        alive = (slot < end) & (here < num_slots)
        m = alive[:, None]
        c = tl.arange(0, F)
        g = settle(split_product(a, w, here, c, m, num_slots * 2 * F, 2 * F, F, BM, F, BK), BM, F)
        i, j, k, t = atoms_of_slots(slot, alive, num_atoms, sender, receiver, knot, offset, True)
        h, along = radial_half_and_slope(table + k[:, None] * (4 * F) + c[None, :], t[:, None], m, F)
        h += tl.load(by_charge + i[:, None].to(tl.int64) * (2 * F) + c[None, :], m, other=0.0)
        h += tl.load(by_charge + j[:, None].to(tl.int64) * (2 * F) + F + c[None, :], m, other=0.0)
        g *= silu_slope(h)
        tl.store(slope + slot - num_atoms, tl.sum(g * along, 1), alive & (slot >= num_atoms))
        high = g.to(tl.float16)
        low = ((g - high.to(tl.float32)) * 2048.0).to(tl.float16)
        q = tl.arange(0, 2 * C)[None, :]
        of = charges_t + c[:, None] * (2 * C) + q
        w_high, w_low = tl.load(of), tl.load(of + F * 2 * C)
        small = tl.dot(high, w_low, tl.dot(low, w_high))
        y = tl.dot(high, w_high) + small * (1.0 / 2048.0)
        tl.store(pair_slope + slot[:, None].to(tl.int64) * (2 * C) + q, y, m)
    before_next(PDL)
