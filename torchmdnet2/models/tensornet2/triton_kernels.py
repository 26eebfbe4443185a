"""Filters of TensorNet2 on the edges: an MLP of the distance and the charges of both atoms. Triton kernels.

g = C(d) · silu(W₃ silu(W₂ silu(h) + b₂) + b₃),  h = T(d) + A_receiver + B_sender, T being a table, A and B linear in
the charges. The filters are computed for a chunk of slots at a time; only a single chunk is kept. A slot is an atom
(its message to itself, at distance 0) or an edge: slots 0 … N − 1 are the atoms, slot N + e is edge e.

The slot of an edge in the row of atom i from j is filled for the message j → i; REVERSED for i → j, which the gradients
of Y_i need where filters are computed again.

A number of a product is the sum of two float16 numbers, and the product of two low parts is left out, as in
tensornet/triton_products.py. Here numbers are split where they are written. The low part has no factor: large numbers
take its place. Activations and gradients are multiplied by 16, so that those above 0.016 have 22 bits and others an
absolute error of 2⁻²⁹; they must be below 4,094. Weights have a factor of their matrix (weights.py). So all three
products are added to one sum, whose registers bound how many blocks a multiprocessor takes.

Shapes: N atoms, E edges (capacity), F channels, C charge channels, S slots of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous, before_next
from ..tensornet.triton_algebra import load9, product, squared_norm, store9
from ..tensornet.triton_edges import reverse_of, store_sums, sum_lanes, unpack_segment
from ..tensornet.triton_products import settle, silu, silu_and_slope, silu_slope

__all__ = [
    "edge_kernel", "first_gradient_kernel", "first_layer_kernel", "layer_kernel", "message_backward_kernel",
    "message_kernel", "product_kernel",
]  # fmt: skip


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
def atoms_of_slots(slot, alive, num_atoms, sender, receiver, segment, REVERSED: tl.constexpr):
    """Receiver, sender, knot and distance from it of slots."""
    own = slot < num_atoms
    e = slot - num_atoms
    listed = alive & (own == 0)
    i = tl.where(own, slot, tl.load(receiver + e, listed, other=0))
    j = tl.where(own, slot, tl.load(sender + e, listed, other=0))
    k, t = unpack_segment(tl.load(segment + e, listed, other=0))
    if REVERSED:
        i, j = j, i
    return i, j, k, t


_SCALE = tl.constexpr(16.0)


@triton.jit
def parts_of(x):
    """x as the sum of two float16 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def store_split(out, at, x, mask, plane):
    """x, which has its factor of 16 already, as two float16 numbers, plane apart."""
    high, low = parts_of(x)
    tl.store(out + at, high, mask)
    tl.store(out + plane + at, low, mask)


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def first_layer_kernel(
    row_ptr, receiver, sender, segment, table, by_charge, out, num_atoms, first_slot, num_slots,
    F: tl.constexpr, REVERSED: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(h) of the slots, split: [2, S, F]. by_charge [N, 2F] is A beside B."""
    after_previous(PDL)
    here = tl.program_id(0) * BM + tl.arange(0, BM)
    slot = first_slot + here
    alive = slot < num_atoms + tl.load(row_ptr + num_atoms)
    i, j, k, t = atoms_of_slots(slot, alive, num_atoms, sender, receiver, segment, REVERSED)
    c, m = tl.arange(0, F)[None, :], alive[:, None]
    h = radial_half(table + k[:, None] * (4 * F) + c, t[:, None], m, F)
    h += tl.load(by_charge + i[:, None].to(tl.int64) * (2 * F) + c, m, other=0.0)
    h += tl.load(by_charge + j[:, None].to(tl.int64) * (2 * F) + F + c, m, other=0.0)
    store_split(out, here[:, None] * F + c, silu(h) * _SCALE, m, num_slots * F)


@triton.jit
def radial_half(p, t, mask, F: tl.constexpr):
    """Value of the cubic at p = table + knot·4F + channel; 0 where masked."""
    c0, c1 = tl.load(p, mask, other=0.0), tl.load(p + F, mask, other=0.0)
    c2, c3 = tl.load(p + 2 * F, mask, other=0.0), tl.load(p + 3 * F, mask, other=0.0)
    return c0 + t * (c1 + t * (c2 + t * c3))


@triton.jit
def split_product(
    a, w, unit, rows, cols, m, plane,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """16 A W [BM, BN] of split A [2, S, K], plane apart, and W [2, K, N], split in this unit."""
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        at = a + rows[:, None] * K + k[None, :]
        high, low = tl.load(at, m, other=0.0), tl.load(at + plane, m, other=0.0)
        of = w + k[:, None] * N + cols[None, :]
        w_high, w_low = tl.load(of), tl.load(of + K * N)
        y = tl.dot(low, w_high, y)
        y = tl.dot(high, w_low, y)
        y = tl.dot(high, w_high, y)
    return y * unit


@triton.jit
def quarters(y):
    """y by quarters of its columns, from left to right.

    What follows a product takes two to three times as many registers as the sum itself. A part of the columns at a time
    leaves room for another block on the multiprocessor.
    """
    left, right = column_halves(y)
    y0, y1 = column_halves(left)
    y2, y3 = column_halves(right)
    return y0, y1, y2, y3


@triton.jit
def column_halves(y):
    return tl.split(tl.permute(tl.reshape(y, (y.shape[0], 2, y.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def finish(y, start, first, given, MODE: tl.constexpr, WITH_SLOPE: tl.constexpr):
    """Write what `layer_kernel` gives, for columns of 16 Y from the first one on."""
    bias, factor, out, slope_out, m, plane = given
    col = first + tl.arange(0, y.shape[1])[None, :]
    at = start + col
    if MODE == "hidden":
        y = y * (1.0 / _SCALE) + tl.load(bias + col)
        activity, slope = silu_and_slope(y)
        store_split(out, at, activity * _SCALE, m, plane)
        if WITH_SLOPE:
            tl.store(slope_out + at, slope, m)
    elif MODE == "last":
        tl.store(out + at, y * (1.0 / _SCALE) + tl.load(bias + col), m)
    else:
        store_split(out, at, y * tl.load(factor + at, m, other=0.0), m, plane)


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def layer_kernel(
    a, w, unit, bias, factor, out, slope_out, row_ptr, num_atoms, first_slot, num_slots,
    K: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, WITH_SLOPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y = A W for the slots of a chunk; A [2, S, K] and W [2, K, N] are split.

    MODE "hidden": out [2, S, N] = silu(Y + bias), split; WITH_SLOPE: slope_out [S, N] = silu'(Y + bias).
    MODE "last": out [S, N] = Y + bias. MODE "gradient": out [2, S, N] = Y · factor [S, N], split.
    """
    after_previous(PDL)
    alive = tl.minimum(num_atoms + tl.load(row_ptr + num_atoms) - first_slot, num_slots)
    # blocks of the same rows run at the same time, so that the rows are read from memory once
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    if tl.program_id(1) * BM < alive:
        m = (rows < alive)[:, None]
        y = split_product(a, w, unit, rows, cols, m, num_slots * K, K, N, BM, BN, BK)
        start, col = rows[:, None] * N, tl.program_id(0) * BN
        given = bias, factor, out, slope_out, m, num_slots * N
        if BN <= 64:
            finish(y, start, col, given, MODE, WITH_SLOPE)
        else:
            y0, y1, y2, y3 = quarters(y)
            finish(y0, start, col, given, MODE, WITH_SLOPE)
            finish(y1, start, col + BN // 4, given, MODE, WITH_SLOPE)
            finish(y2, start, col + BN // 2, given, MODE, WITH_SLOPE)
            finish(y3, start, col + 3 * BN // 4, given, MODE, WITH_SLOPE)
    before_next(PDL)


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


@triton.jit
def add_channels(y, along, g, first, read, F: tl.constexpr, C: tl.constexpr):
    """From the gradient g of silu(h), for channels from the first one on: add dE/d(charges) to y and dE/dd to along;
    all three times 16."""
    table, t, of_receiver, of_sender, m, charges_t = read
    g = settle(g, g.shape[0], g.shape[1])
    c = first + tl.arange(0, g.shape[1])
    h, slope = radial_half_and_slope(table + c[None, :], t, m, F)
    h += tl.load(of_receiver + c[None, :], m, other=0.0)
    h += tl.load(of_sender + c[None, :], m, other=0.0)
    g *= silu_slope(h)
    along += tl.sum(g * slope, 1)
    high, low = parts_of(g)
    of = charges_t + c[:, None] * (2 * C) + tl.arange(0, 2 * C)[None, :]
    w_high, w_low = tl.load(of), tl.load(of + F * 2 * C)
    return tl.dot(high, w_high, tl.dot(high, w_low, tl.dot(low, w_high, y))), along


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def first_gradient_kernel(
    a, w, unit, row_ptr, receiver, sender, segment, table, by_charge, charges_t, charge_unit, slope, pair_slope,
    num_atoms, first_slot, num_slots,
    F: tl.constexpr, C: tl.constexpr, REVERSED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From the gradient [2, S, 2F] of what the second activation acts on, split: dE/dd through T into slope [E], and
    that of the charges of receiver (first C) and sender into pair_slope [N + E, 2C]. REVERSED: of reversed slots.

    w [2, 2F, F] and charges_t [2, F, 2C] are split.
    """
    after_previous(PDL)
    here = tl.program_id(0) * BM + tl.arange(0, BM)
    slot = first_slot + here
    end = num_atoms + tl.load(row_ptr + num_atoms)
    if first_slot + tl.program_id(0) * BM < end:
        alive = (slot < end) & (here < num_slots)
        m = alive[:, None]
        g = split_product(a, w, unit, here, tl.arange(0, F), m, num_slots * 2 * F, 2 * F, F, BM, F, BK)
        i, j, k, t = atoms_of_slots(slot, alive, num_atoms, sender, receiver, segment, REVERSED)
        read = (
            table + k[:, None] * (4 * F), t[:, None], by_charge + i[:, None].to(tl.int64) * (2 * F),
            by_charge + j[:, None].to(tl.int64) * (2 * F) + F, m, charges_t,
        )  # fmt: skip
        y = tl.zeros([BM, 2 * C], tl.float32)
        along = tl.zeros([BM], tl.float32)
        if F <= 64:
            y, along = add_channels(y, along, g, 0, read, F, C)
        else:
            g0, g1, g2, g3 = quarters(g)
            y, along = add_channels(y, along, g0, 0, read, F, C)
            y, along = add_channels(y, along, g1, F // 4, read, F, C)
            y, along = add_channels(y, along, g2, F // 2, read, F, C)
            y, along = add_channels(y, along, g3, 3 * F // 4, read, F, C)
        tl.store(slope + slot - num_atoms, along * (1.0 / _SCALE), alive & (slot >= num_atoms))
        q = tl.arange(0, 2 * C)[None, :]
        tl.store(pair_slope + slot[:, None].to(tl.int64) * (2 * C) + q, y * (charge_unit / _SCALE), m)
    before_next(PDL)


# --- Messages of TensorNet2 and their gradients, from filters of a chunk of slots (above). Triton kernels ---
#
# A program walks rows of atoms that have slots in the chunk, and adds to the sums of earlier chunks. Each row has one
# program and each sum a fixed order, so that no atomics are needed. The first chunk of a row has the slot of the atom
# itself.


@triton.jit
def rows_of_chunk(row_ptr, receiver, num_atoms, first_slot, num_slots):
    """First and last edge of a chunk, first and last row that it has slots of (each last one exclusive)."""
    first_edge = tl.maximum(first_slot - num_atoms, 0)
    last_edge = tl.minimum(first_slot + num_slots - num_atoms, tl.load(row_ptr + num_atoms))
    some = last_edge > first_edge
    low = tl.load(receiver + first_edge, some, other=num_atoms)
    high = tl.load(receiver + last_edge - 1, some, other=-1) + 1
    low = tl.minimum(low, first_slot)
    own_end = tl.minimum(first_slot + num_slots, num_atoms)
    return first_edge, last_edge, low, tl.where(first_slot < num_atoms, tl.maximum(high, own_end), high)


@triton.jit
def edges_of_rows(row_ptr, first_row, last_row, first_edge, last_edge, BR: tl.constexpr, BE: tl.constexpr):
    """Lanes of a program: BR rows × BE edges at a time. Gives per lane [BR·BE, 1]: row, first edge, end of the row in
    the chunk; and how many times the longest row makes the program step."""
    lane = tl.arange(0, BR * BE)
    row = first_row + lane // BE
    ok = row < last_row
    start = tl.maximum(tl.load(row_ptr + row, ok, other=0), first_edge)
    end = tl.minimum(tl.load(row_ptr + row + 1, ok, other=0), last_edge)
    steps = (tl.max(end - start, 0) + (BE - 1)) // BE
    return row[:, None], (start + lane % BE)[:, None], end[:, None], steps


@triton.jit(do_not_specialize=["num_atoms", "first_slot"])
def message_kernel(
    row_ptr, receiver, sender, envelope, h3, y, m_out, p_out, num_atoms, first_slot, num_slots,
    F: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, O3: tl.constexpr, ALONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """M_i += g_ii Y_i + Σ_j g_ij Y_j over the slots of a chunk; ALONE, there is no other: also `product_kernel`."""
    after_previous(PDL)
    first_edge, last_edge, low, high = rows_of_chunk(row_ptr, receiver, num_atoms, first_slot, num_slots)
    c = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    for first_row in range(low + tl.program_id(0) * BR, high, tl.num_programs(0) * BR):
        row, e, end, steps = edges_of_rows(row_ptr, first_row, high, first_edge, last_edge, BR, BE)
        m0 = tl.zeros([BR * BE, BF], tl.float32)
        m1, m2, m3, m4, m5, m6, m7, m8 = m0, m0, m0, m0, m0, m0, m0, m0
        # atom and cutoff function of an edge are read one turn ahead: what it reads next depends on them
        next_j, next_cut = tl.load(sender + e, e < end, other=0), tl.load(envelope + e, e < end, other=0.0)
        for _ in range(0, steps):
            mask = e < end
            j, cut = next_j, next_cut
            ahead = e + BE < end
            next_j = tl.load(sender + e + BE, ahead, other=0)
            next_cut = tl.load(envelope + e + BE, ahead, other=0.0)
            h = h3 + (num_atoms + e - first_slot) * (3 * F) + c
            s = y + j.to(tl.int64) * (9 * F) + c
            g = silu(tl.load(h, mask, other=0.0)) * cut
            m0 += g * tl.load(s, mask, other=0.0)
            g = silu(tl.load(h + F, mask, other=0.0)) * cut
            m1 += g * tl.load(s + F, mask, other=0.0)
            m2 += g * tl.load(s + 2 * F, mask, other=0.0)
            m3 += g * tl.load(s + 3 * F, mask, other=0.0)
            g = silu(tl.load(h + 2 * F, mask, other=0.0)) * cut
            m4 += g * tl.load(s + 4 * F, mask, other=0.0)
            m5 += g * tl.load(s + 5 * F, mask, other=0.0)
            m6 += g * tl.load(s + 6 * F, mask, other=0.0)
            m7 += g * tl.load(s + 7 * F, mask, other=0.0)
            m8 += g * tl.load(s + 8 * F, mask, other=0.0)
            e += BE
        m0, m1, m2, m3, m4, m5, m6, m7, m8 = sum_lanes(m0, m1, m2, m3, m4, m5, m6, m7, m8, BR, BE, BF)
        row = (first_row + tl.arange(0, BR))[:, None]
        ok = row < high
        own = ok & (row >= first_slot) & (row < first_slot + num_slots)
        at = row.to(tl.int64) * (9 * F) + c
        h = h3 + (row - first_slot) * (3 * F) + c
        gi, ga = silu(tl.load(h, own, other=0.0)), silu(tl.load(h + F, own, other=0.0))
        gs = silu(tl.load(h + 2 * F, own, other=0.0))
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + at, ok, F)
        m0, m1, m2, m3, m4 = m0 + gi * y0, m1 + ga * y1, m2 + ga * y2, m3 + ga * y3, m4 + gs * y4
        m5, m6, m7, m8 = m5 + gs * y5, m6 + gs * y6, m7 + gs * y7, m8 + gs * y8
        if not ALONE:
            b0, b1, b2, b3, b4, b5, b6, b7, b8 = load9(m_out + at, ok & (own == 0), F)
            m0, m1, m2, m3, m4 = m0 + b0, m1 + b1, m2 + b2, m3 + b3, m4 + b4
            m5, m6, m7, m8 = m5 + b5, m6 + b6, m7 + b7, m8 + b8
        store9(m_out + at, ok, F, m0, m1, m2, m3, m4, m5, m6, m7, m8)
        if ALONE:
            store_product(p_out + at, ok, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, F, O3)
    before_next(PDL)


@triton.jit
def store_product(
    out, mask, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, F: tl.constexpr,
    O3: tl.constexpr,
):  # fmt: skip
    """P/(‖P‖²+1), P = Y M + M Y or 2 Y M."""
    p0, p1, p2, p3, p4, p5, p6, p7, p8 = product(
        1.0, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, O3
    )
    f = 1.0 / (squared_norm(p0, p1, p2, p3, p4, p5, p6, p7, p8) + 1.0)
    store9(out, mask, F, f * p0, f * p1, f * p2, f * p3, f * p4, f * p5, f * p6, f * p7, f * p8)


@triton.jit(do_not_specialize=["num_atoms"])
def product_kernel(
    y, m, p_out, num_atoms, F: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, O3: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """P/(‖P‖²+1), P = Y M + M Y or 2 Y M."""
    after_previous(PDL)
    row = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    ok = row < num_atoms
    at = row.to(tl.int64) * (9 * F) + (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + at, ok, F)
    m0, m1, m2, m3, m4, m5, m6, m7, m8 = load9(m + at, ok, F)
    store_product(p_out + at, ok, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, F, O3)
    before_next(PDL)


@triton.jit
def filter_gradient(h, cut, scaled_cut, dot, out, at, mask, plane):
    """From ⟨dM, Y⟩ of a part: the filter; writes the gradient of h3, split; and silu(h3) ⟨dM, Y⟩, that of C(d).
    scaled_cut is 16 C(d)."""
    a, slope = silu_and_slope(tl.load(h, mask, other=0.0))
    store_split(out, at, dot * (slope * scaled_cut), mask, plane)
    return a * cut, a * dot


@triton.jit(do_not_specialize=["num_atoms", "first_slot", "capacity"])
def message_backward_kernel(
    row_ptr, receiver, sender, reverse, envelope, envelope_slope, h3, y, dm, dy, dh3, slope, capacity, num_atoms,
    first_slot, num_slots,
    F: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, LANES: tl.constexpr,
    KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dY_i += g_ii dM_i + Σ_j g_ji dM_j over the slots of a chunk; the gradients dh3 [2, S, 3F] of h3, split; and
    through C(d) into slope [slices, E]. h3 and dh3 are those of reversed slots; KEPT: of all slots, and those of the
    reverse edge are read and written."""
    after_previous(PDL)
    first_edge, last_edge, low, high = rows_of_chunk(row_ptr, receiver, num_atoms, first_slot, num_slots)
    c = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    slope_out = slope + tl.program_id(1).to(tl.int64) * capacity
    plane = num_slots * 3 * F
    for first_row in range(low + tl.program_id(0) * BR, high, tl.num_programs(0) * BR):
        row, e, end, steps = edges_of_rows(row_ptr, first_row, high, first_edge, last_edge, BR, BE)
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + row.to(tl.int64) * (9 * F) + c, row < high, F)
        a0 = tl.zeros([BR * BE, BF], tl.float32)
        a1, a2, a3, a4, a5, a6, a7, a8 = a0, a0, a0, a0, a0, a0, a0, a0
        next_j, next_cut = tl.load(sender + e, e < end, other=0), tl.load(envelope + e, e < end, other=0.0)
        next_back = tl.load(reverse + e, e < end, other=0) if KEPT else e
        for _ in range(0, steps):
            mask = e < end
            m = mask & (c >= 0)
            j, back, cut, scaled = next_j, next_back, next_cut, next_cut * _SCALE
            ahead = e + BE < end
            next_j = tl.load(sender + e + BE, ahead, other=0)
            next_back = tl.load(reverse + e + BE, ahead, other=0) if KEPT else e + BE
            next_cut = tl.load(envelope + e + BE, ahead, other=0.0)
            place = (num_atoms + (back if KEPT else e - first_slot)) * (3 * F) + c
            h = h3 + place
            s = dm + j.to(tl.int64) * (9 * F) + c
            x0 = tl.load(s, mask, other=0.0)
            g, through_cut = filter_gradient(h, cut, scaled, x0 * y0, dh3, place, m, plane)
            a0 += g * x0
            x0 = tl.load(s + F, mask, other=0.0)
            x1, x2 = tl.load(s + 2 * F, mask, other=0.0), tl.load(s + 3 * F, mask, other=0.0)
            place += F
            g, more = filter_gradient(h + F, cut, scaled, x0 * y1 + x1 * y2 + x2 * y3, dh3, place, m, plane)
            through_cut += more
            a1, a2, a3 = a1 + g * x0, a2 + g * x1, a3 + g * x2
            x0, x1 = tl.load(s + 4 * F, mask, other=0.0), tl.load(s + 5 * F, mask, other=0.0)
            x2, x3 = tl.load(s + 6 * F, mask, other=0.0), tl.load(s + 7 * F, mask, other=0.0)
            x4 = tl.load(s + 8 * F, mask, other=0.0)
            place += F
            dot = x0 * y4 + x1 * y5 + x2 * y6 + x3 * y7 + x4 * y8
            g, more = filter_gradient(h + 2 * F, cut, scaled, dot, dh3, place, m, plane)
            through_cut += more
            a4, a5, a6, a7, a8 = a4 + g * x0, a5 + g * x1, a6 + g * x2, a7 + g * x3, a8 + g * x4
            through_cut *= tl.load(envelope_slope + e, mask, other=0.0)
            store_sums(slope_out + e, through_cut, mask, BR, LANES)
            e += BE
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = sum_lanes(a0, a1, a2, a3, a4, a5, a6, a7, a8, BR, BE, BF)
        row = (first_row + tl.arange(0, BR))[:, None]
        ok = row < high
        own = ok & (row >= first_slot) & (row < first_slot + num_slots)
        at = row.to(tl.int64) * (9 * F) + c
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + at, own, F)
        place = (row - first_slot) * (3 * F) + c
        h = h3 + place
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(dm + at, own, F)
        gi, _t = filter_gradient(h, 1.0, _SCALE, x0 * y0, dh3, place, own, plane)
        place += F
        ga, _t = filter_gradient(h + F, 1.0, _SCALE, x1 * y1 + x2 * y2 + x3 * y3, dh3, place, own, plane)
        place += F
        dot = x4 * y4 + x5 * y5 + x6 * y6 + x7 * y7 + x8 * y8
        gs, _t = filter_gradient(h + 2 * F, 1.0, _SCALE, dot, dh3, place, own, plane)
        a0, a1, a2, a3, a4 = a0 + gi * x0, a1 + ga * x1, a2 + ga * x2, a3 + ga * x3, a4 + gs * x4
        a5, a6, a7, a8 = a5 + gs * x5, a6 + gs * x6, a7 + gs * x7, a8 + gs * x8
        b0, b1, b2, b3, b4, b5, b6, b7, b8 = load9(dy + at, ok, F)
        store9(dy + at, ok, F, a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8)
    before_next(PDL)
