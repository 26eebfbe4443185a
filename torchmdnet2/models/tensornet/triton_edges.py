"""Message passing over CSR rows with tabulated radial filters (Triton kernels).

There is one program per receiver and slice of channels. It reads the edges of its row a few at a time, sums in
registers and writes once. There are no atomics and no tensors of the size edges × channels, and results are
reproducible.

The radial filters are functions of the distance alone. They are read from a table [knots, 4, 3, F] of cubic polynomials
between knots, which are dense where the filters vary, or from one of quadratic polynomials in half as many bytes,
[knots, 2, 3, F] int32. The embedding writes, for each edge, the knot below its length, the distance from it and the
sender's element (`write_segments`). The table holds coefficients instead of values at the knots: the slope is then free
of cancellation, and forces are as accurate as energies. Rows are not padded; the work is proportional to the number of
edges.

Shapes: N atoms, E edges (capacity), F channels. Tensor fields are [N, 9, F] (model.py), in float32 or float16; sums are
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous, before_next
from ...kernels.interfaces import FIXED_POINT
from .triton_algebra import load9, load9_early, product, squared_norm, store9, store9_words
from .triton_products import add9, dot_halves, log1p, settle

__all__ = [
    "domain_force_kernel", "element_edges_kernel", "element_gradient_kernel", "element_product_kernel",
    "element_sums_kernel", "embedding_backward_kernel", "embedding_kernel", "force_kernel", "interaction_kernel",
    "message_backward_kernel",
]  # fmt: skip


@triton.jit
def segments(table, k, c, F: tl.constexpr, P: tl.constexpr = 3):
    """Where the filters of channels c at knots k stand, P for each."""
    if table.dtype.element_ty == tl.int32:
        return table + k * (2 * P * F) + c
    else:
        return table + k * (4 * P * F) + c


@triton.jit
def coefficients(p, part: tl.constexpr, mask, F: tl.constexpr, P: tl.constexpr):
    """Of the polynomial of one radial filter at p = `segments`; 0 where masked.

    A table of integers holds quadratics: two words of 32 bits, whose upper 24 are c0 and c1; the last 8 of both are the
    upper half of c2. They are left in c0 and c1, whose rounding allows for them (`pack_quadratics`).
    """
    if p.dtype.element_ty == tl.int32:
        w0 = tl.load(p + part * F, mask, other=0)
        w1 = tl.load(p + (P + part) * F, mask, other=0)
        c2 = ((w0 << 24) | ((w1 & 0xFF) << 16)).to(tl.float32, bitcast=True)
        return w0.to(tl.float32, bitcast=True), w1.to(tl.float32, bitcast=True), c2, 0.0
    else:
        c0 = tl.load(p + part * F, mask, other=0.0)
        c1 = tl.load(p + (P + part) * F, mask, other=0.0)
        c2 = tl.load(p + (2 * P + part) * F, mask, other=0.0)
        c3 = tl.load(p + (3 * P + part) * F, mask, other=0.0)
        return c0, c1, c2, c3


@triton.jit
def value_at(p, part: tl.constexpr, t, mask, F: tl.constexpr, P: tl.constexpr = 3):
    """Value of one radial filter at the distance t from its knot; 0 where masked."""
    c0, c1, c2, c3 = coefficients(p, part, mask, F, P)
    if p.dtype.element_ty == tl.int32:
        return c0 + t * (c1 + t * c2)
    else:
        return c0 + t * (c1 + t * (c2 + t * c3))


@triton.jit
def value_and_slope(p, part: tl.constexpr, t, mask, F: tl.constexpr, P: tl.constexpr = 3):
    """Value and derivative by the distance of one radial filter; 0 where masked."""
    c0, c1, c2, c3 = coefficients(p, part, mask, F, P)
    if p.dtype.element_ty == tl.int32:
        return c0 + t * (c1 + t * c2), c1 + t * (2.0 * c2)
    else:
        return c0 + t * (c1 + t * (c2 + t * c3)), c1 + t * (2.0 * c2 + 3.0 * t * c3)


@triton.jit
def first_edge(row_ptr, num_atoms, BR: tl.constexpr, BE: tl.constexpr):
    """Lanes of a program: BR rows × BE edges at a time. Gives per lane [BR·BE, 1]: row, first edge, end of the row;
    and how many times the longest row makes the program step.

    Lanes beyond the last row repeat it: what they write to its edges is the same, and their sums are not stored.
    """
    lane = tl.arange(0, BR * BE)
    row = tl.minimum(tl.program_id(0) * BR + lane // BE, num_atoms - 1)
    start = tl.load(row_ptr + row, cache_modifier=".cg")
    end = tl.load(row_ptr + row + 1, cache_modifier=".cg")
    steps = (tl.max(end - start, 0) + (BE - 1)) // BE
    return row[:, None], (start + lane % BE)[:, None], end[:, None], steps


@triton.jit
def pack_segment(kind, k, t):
    """Kind of the sender, knot, and distance from the knot in 64 bits, which are read at once: 16, 16, 32.

    The kind is the atomic number, or the element's place in the embedding by elements. Both are below 32,768: all
    three are read as numbers with a sign.
    """
    return (((kind << 16) | k).to(tl.int64) << 32) | (t.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpack_segment(s):
    """Knot and distance from it."""
    # as a number with a sign: masked instead, ptxas gives `message_backward_kernel` 72 instead of 96 registers, too few
    # for the reads of an edge to overlap
    return (s >> 32).to(tl.int16).to(tl.int32), s.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def kind_of(s):
    """Kind of the sender."""
    return (s >> 48).to(tl.int32)


@triton.jit
def edge(sender, segment, e, mask):
    """Sender, knot and distance from it of edges e."""
    j = tl.load(sender + e, mask, other=0)
    k, t = unpack_segment(tl.load(segment + e, mask, other=0))
    return j, k, t


@triton.jit
def edge_early(sender, segment, e, mask):
    """`edge` past the L1 cache, for what is read before `after_previous` (triton_launch.py)."""
    j = tl.load(sender + e, mask, other=0, cache_modifier=".cg")
    k, t = unpack_segment(tl.load(segment + e, mask, other=0, cache_modifier=".cg"))
    return j, k, t


@triton.jit
def sum_lanes(
    x0, x1, x2, x3, x4, x5, x6, x7, x8, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """Sums over the edges of a row: nine [BR·BE, BF] → [BR, BF]."""
    if BR == 1:
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = tl.reduce((x0, x1, x2, x3, x4, x5, x6, x7, x8), 0, add9)
        x0, x1, x2, x3, x4 = x0[None, :], x1[None, :], x2[None, :], x3[None, :], x4[None, :]
        x5, x6, x7, x8 = x5[None, :], x6[None, :], x7[None, :], x8[None, :]
    elif BE > 1:
        x0, x1, x2 = sum_edges(x0, BR, BE, BF), sum_edges(x1, BR, BE, BF), sum_edges(x2, BR, BE, BF)
        x3, x4, x5 = sum_edges(x3, BR, BE, BF), sum_edges(x4, BR, BE, BF), sum_edges(x5, BR, BE, BF)
        x6, x7, x8 = sum_edges(x6, BR, BE, BF), sum_edges(x7, BR, BE, BF), sum_edges(x8, BR, BE, BF)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8


@triton.jit
def sum_edges(x, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    return tl.sum(tl.reshape(x, (BR, BE, BF)), 1)


@triton.jit
def store_sums(out, x, mask, BR: tl.constexpr, LANES: tl.constexpr):
    """Sums of x [BR·BE, BF] over channels to out [BR·BE, 1]. LANES: threads of a row."""
    total = tl.sum(x, 1)[:, None]
    if BR == 1:
        tl.store(out, total, mask)
    else:
        # a thread that has the sum stores it; otherwise sums pass through shared memory, and all warps wait
        lane = tl.arange(0, LANES)[None, :]
        tl.store(out + lane, tl.broadcast_to(total, (x.shape[0], LANES)), mask & (lane == 0))


@triton.jit
def vector(vec, e, mask):
    """Components of edges e, Å."""
    x = tl.load(vec + e * 3, mask, other=1.0)
    y = tl.load(vec + e * 3 + 1, mask, other=0.0)
    z = tl.load(vec + e * 3 + 2, mask, other=0.0)
    return x, y, z


@triton.jit
def vector_early(vec, e, mask):
    """`vector` past the L1 cache, for what is read before `after_previous` (triton_launch.py)."""
    x = tl.load(vec + e * 3, mask, other=1.0, cache_modifier=".cg")
    y = tl.load(vec + e * 3 + 1, mask, other=0.0, cache_modifier=".cg")
    z = tl.load(vec + e * 3 + 2, mask, other=0.0, cache_modifier=".cg")
    return x, y, z


@triton.jit
def direction(x, y, z):
    """Components of a vector over its length, 0 where that is 0."""
    square = x * x + y * y + z * z
    inverse = tl.where(square > 0.0, 1.0 / tl.sqrt(tl.where(square > 0.0, square, 1.0)), 0.0)
    return x * inverse, y * inverse, z * inverse


@triton.jit
def segment_of(d, knots, decay, scale, KNOTS: tl.constexpr):
    """The knot below distances d, at scale (1 − exp(−decay d)) rounded down, and the distance from it in Å.

    That difference is exact in float32, so that the tables cost no accuracy.
    """
    k = (scale * (1.0 - tl.exp(-decay * d))).to(tl.int32)
    k = tl.minimum(tl.maximum(k, 0), KNOTS - 2)
    return k, d - tl.load(knots + k)


@triton.jit
def write_segments(
    row_ptr, sender, vec, knots, segment, z, place, num_atoms, decay, scale, KNOTS: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Write `pack_segment` of the edges of this program's rows, a thread for each edge; kinds are z, or place of z.

    Other programs of these rows, for other channels, write the same, so that none waits for another.
    """
    _row, e, end, steps = first_edge(row_ptr, num_atoms, BR, 32)
    for _ in range(0, steps):
        mask = e < end
        kind = tl.load(z + tl.load(sender + e, mask, other=0), mask, other=0)
        if place is not None:
            kind = tl.load(place + kind)
        x, y, w = vector(vec, e, mask)
        k, t = segment_of(tl.sqrt(x * x + y * y + w * w), knots, decay, scale, KNOTS)
        tl.store(segment + e, pack_segment(kind, k, t), mask)
        e += 32
    tl.debug_barrier()  # threads read what others wrote


@triton.jit(do_not_specialize=["num_atoms"])
def embedding_kernel(
    row_ptr, sender, vec, knots, segment_out, z, table, z_receiver, z_sender, self_filter, x_out, norm_out,
    num_atoms, decay, scale,
    F: tl.constexpr, KNOTS: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, LOG: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """X_i = Σ_j z_ij [f1, f2 skew(u), f3 (uuᵀ − 1/3)] + f1(0) z_ii, and ‖X‖² or log(1 + ‖X‖²) (LOG).

    The sign of skew is in the table.

    Writes the segments of its edges too (`write_segments`).
    """
    after_previous(PDL)
    row, e, end, steps = first_edge(row_ptr, num_atoms, BR, BE)
    c = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    z_here = tl.load(z_receiver + tl.load(z + row) * F + c)
    x0 = tl.zeros([BR * BE, BF], tl.float32)
    x1, x2, x3, x4, x5, x6, x7, x8 = x0, x0, x0, x0, x0, x0, x0, x0
    write_segments(row_ptr, sender, vec, knots, segment_out, z, None, num_atoms, decay, scale, KNOTS, BR)
    # the next edges are read while these are worked on
    s = tl.load(segment_out + e, e < end, other=0)
    vx, vy, vz = vector(vec, e, e < end)
    for _ in range(0, steps):
        mask = e < end
        k, t = unpack_segment(s)
        p = segments(table, k, c, F)
        zz = z_here + tl.load(z_sender + kind_of(s) * F + c)
        ux, uy, uz = direction(vx, vy, vz)
        s = tl.load(segment_out + e + BE, e + BE < end, other=0)
        vx, vy, vz = vector(vec, e + BE, e + BE < end)
        third = (ux * ux + uy * uy + uz * uz) * (1.0 / 3.0)
        f1, f2, f3 = zz * value_at(p, 0, t, mask, F), zz * value_at(p, 1, t, mask, F), zz * value_at(p, 2, t, mask, F)
        x0 += f1
        x1 += uz * f2
        x2 -= uy * f2
        x3 += ux * f2
        x4 += (ux * ux - third) * f3
        x5 += ux * uy * f3
        x6 += ux * uz * f3
        x7 += (uy * uy - third) * f3
        x8 += uy * uz * f3
        e += BE
    before_next(PDL)
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    ok = row < num_atoms
    zi = tl.load(z + row, ok, other=0)
    own = tl.load(self_filter + c) * (tl.load(z_receiver + zi * F + c) + tl.load(z_sender + zi * F + c))
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = sum_lanes(x0, x1, x2, x3, x4, x5, x6, x7, x8, BR, BE, BF)
    x0 += own
    store9(x_out + row.to(tl.int64) * (9 * F) + c, ok, F, x0, x1, x2, x3, x4, x5, x6, x7, x8)
    norm = squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    if LOG:
        norm = log1p(norm)
    tl.store(norm_out + row.to(tl.int64) * F + c, norm, ok)


@triton.jit(do_not_specialize=["num_atoms"])
def interaction_kernel(
    row_ptr, sender, segment, table, self_filter, y, charge_factor, m_out, p_out, num_atoms,
    F: tl.constexpr, KNOTS: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, O3: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M_i = g(0) Y_i + Σ_j g(d_ij) Y_j and P/(‖P‖²+1), P = q (YM + MY) or 2 YM; that in words where WORDS."""
    row, e, end, steps = first_edge(row_ptr, num_atoms, BR, BE)
    c = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    m0 = tl.zeros([BR * BE, BF], tl.float32)
    m1, m2, m3, m4, m5, m6, m7, m8 = m0, m0, m0, m0, m0, m0, m0, m0
    # the next edges are read while these are worked on
    j, k, t = edge_early(sender, segment, e, e < end)
    after_previous(PDL)
    for _ in range(0, steps):
        mask = e < end
        p = segments(table, k, c, F)
        s = y + j.to(tl.int64) * (9 * F) + c
        j, k, t_next = edge(sender, segment, e + BE, e + BE < end)
        g = value_at(p, 0, t, mask, F)
        m0 += g * tl.load(s, mask, other=0.0)
        g = value_at(p, 1, t, mask, F)
        m1 += g * tl.load(s + F, mask, other=0.0)
        m2 += g * tl.load(s + 2 * F, mask, other=0.0)
        m3 += g * tl.load(s + 3 * F, mask, other=0.0)
        g = value_at(p, 2, t, mask, F)
        m4 += g * tl.load(s + 4 * F, mask, other=0.0)
        m5 += g * tl.load(s + 5 * F, mask, other=0.0)
        m6 += g * tl.load(s + 6 * F, mask, other=0.0)
        m7 += g * tl.load(s + 7 * F, mask, other=0.0)
        m8 += g * tl.load(s + 8 * F, mask, other=0.0)
        e += BE
        t = t_next
    before_next(PDL)
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    ok = row < num_atoms
    at = row.to(tl.int64) * (9 * F) + c
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y + at, ok, F)
    gi, ga, gs = tl.load(self_filter + c), tl.load(self_filter + F + c), tl.load(self_filter + 2 * F + c)
    m0, m1, m2, m3, m4, m5, m6, m7, m8 = sum_lanes(m0, m1, m2, m3, m4, m5, m6, m7, m8, BR, BE, BF)
    m0, m1, m2, m3, m4 = m0 + gi * y0, m1 + ga * y1, m2 + ga * y2, m3 + ga * y3, m4 + gs * y4
    m5, m6, m7, m8 = m5 + gs * y5, m6 + gs * y6, m7 + gs * y7, m8 + gs * y8
    store9(m_out + at, ok, F, m0, m1, m2, m3, m4, m5, m6, m7, m8)
    q = tl.load(charge_factor + row, ok, other=1.0)
    p0, p1, p2, p3, p4, p5, p6, p7, p8 = product(
        q, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, O3
    )
    f = 1.0 / (squared_norm(p0, p1, p2, p3, p4, p5, p6, p7, p8) + 1.0)
    p0, p1, p2, p3, p4, p5, p6, p7, p8 = f * p0, f * p1, f * p2, f * p3, f * p4, f * p5, f * p6, f * p7, f * p8
    store9_words(p_out + at, ok, F, p0, p1, p2, p3, p4, p5, p6, p7, p8, WORDS)


@triton.jit(do_not_specialize=["num_atoms", "capacity"])
def message_backward_kernel(
    row_ptr, sender, segment, table, self_filter, y, dm, dy, slope, capacity, num_atoms,
    F: tl.constexpr, KNOTS: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dY_i += g(0) dM_i + Σ_j g(d_ij) dM_j, and for each edge Σ_c g'(d_ij) ⟨dM_j, Y_i⟩ into slope [slices, E].

    The list has both directions of each pair, so that the gather over senders is also the transposed scatter. The slope
    written at an edge belongs to its reverse; the force kernel pairs both. So only dM_j is read for an edge, never Y_j,
    which halves the gathered bytes. A slice of channels, of one layer, has a row of `slope` to itself: nothing is added
    up between programs, and `edge_gradient` sums the rows in order.
    """
    row, e, end, steps = first_edge(row_ptr, num_atoms, BR, BE)
    c = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    own = y + row.to(tl.int64) * (9 * F) + c
    # Y is of the forward pass; dM is written by the kernel before, and read after the wait
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9_early(own, row < num_atoms, F)
    a0 = tl.zeros([BR * BE, BF], tl.float32)
    a1, a2, a3, a4, a5, a6, a7, a8 = a0, a0, a0, a0, a0, a0, a0, a0
    slope_out = slope + tl.program_id(1).to(tl.int64) * capacity
    # the next edges are read while these are worked on
    j, k, t = edge_early(sender, segment, e, e < end)
    after_previous(PDL)
    for _ in range(0, steps):
        mask = e < end
        p = segments(table, k, c, F)
        s = dm + j.to(tl.int64) * (9 * F) + c
        j, k, t_next = edge(sender, segment, e + BE, e + BE < end)
        g, slope_g = value_and_slope(p, 0, t, mask, F)
        x = tl.load(s, mask, other=0.0).to(tl.float32)
        a0 += g * x
        total = slope_g * (x * y0)
        g, slope_g = value_and_slope(p, 1, t, mask, F)
        x = tl.load(s + F, mask, other=0.0).to(tl.float32)
        a1 += g * x
        dot = x * y1
        x = tl.load(s + 2 * F, mask, other=0.0).to(tl.float32)
        a2 += g * x
        dot += x * y2
        x = tl.load(s + 3 * F, mask, other=0.0).to(tl.float32)
        a3 += g * x
        dot += x * y3
        total += slope_g * dot
        g, slope_g = value_and_slope(p, 2, t, mask, F)
        x = tl.load(s + 4 * F, mask, other=0.0).to(tl.float32)
        a4 += g * x
        dot = x * y4
        x = tl.load(s + 5 * F, mask, other=0.0).to(tl.float32)
        a5 += g * x
        dot += x * y5
        x = tl.load(s + 6 * F, mask, other=0.0).to(tl.float32)
        a6 += g * x
        dot += x * y6
        x = tl.load(s + 7 * F, mask, other=0.0).to(tl.float32)
        a7 += g * x
        dot += x * y7
        x = tl.load(s + 8 * F, mask, other=0.0).to(tl.float32)
        a8 += g * x
        dot += x * y8
        total += slope_g * dot
        store_sums(slope_out + e, total, mask, BR, LANES)
        e += BE
        t = t_next
    before_next(PDL)
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    ok = row < num_atoms
    at = row.to(tl.int64) * (9 * F) + c
    gi, ga, gs = tl.load(self_filter + c), tl.load(self_filter + F + c), tl.load(self_filter + 2 * F + c)
    # the message of the atom to itself
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(dm + at, ok, F)
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = sum_lanes(a0, a1, a2, a3, a4, a5, a6, a7, a8, BR, BE, BF)
    a0, a1, a2, a3, a4 = a0 + gi * y0, a1 + ga * y1, a2 + ga * y2, a3 + ga * y3, a4 + gs * y4
    a5, a6, a7, a8 = a5 + gs * y5, a6 + gs * y6, a7 + gs * y7, a8 + gs * y8
    # dY holds the part through the product (`gradient_product_kernel`); this tile is this program's alone
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(dy + at, ok, F)
    store9(dy + at, ok, F, a0 + y0, a1 + y1, a2 + y2, a3 + y3, a4 + y4, a5 + y5, a6 + y6, a7 + y7, a8 + y8)


@triton.jit(do_not_specialize=["num_atoms", "capacity"])
def embedding_backward_kernel(
    row_ptr, vec, segment, z, table, z_receiver, z_sender, dx, edge_slope, edge_turn, capacity, num_atoms,
    F: tl.constexpr, KNOTS: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write, for each edge, dE/d|vec| [slices, E] and dE/du [slices, E, 3] from dX_i.

    With the parts g_I, g_A, g_S of dX_i, and V = uuᵀ − |u|²/3:
    dE/d|vec| = Σ_c z_ij (f1' g_I + f2' ⟨skew(u), g_A⟩ + f3' ⟨V, g_S⟩),
    dE/du = Σ_c z_ij (f2 ∂⟨skew(u), g_A⟩/∂u + f3 ∂⟨V, g_S⟩/∂u). Slices of channels have rows as in
    `message_backward_kernel`. An edge gets its own part alone: X_j depends on the reverse edge.
    """
    row, e, end, steps = first_edge(row_ptr, num_atoms, BR, BE)
    c = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    z_here = tl.load(z_receiver + tl.load(z + row) * F + c)
    own = dx + row.to(tl.int64) * (9 * F) + c
    # the next edges are read while these are worked on
    s = tl.load(segment + e, e < end, other=0, cache_modifier=".cg")
    vx, vy, vz = vector_early(vec, e, e < end)
    after_previous(PDL)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(own, row < num_atoms, F)
    slope_out = edge_slope + tl.program_id(1).to(tl.int64) * capacity
    turn_out = edge_turn + tl.program_id(1).to(tl.int64) * capacity * 3
    for _ in range(0, steps):
        mask = e < end
        k, t = unpack_segment(s)
        p = segments(table, k, c, F)
        zz = z_here + tl.load(z_sender + kind_of(s) * F + c)
        ux, uy, uz = direction(vx, vy, vz)
        s = tl.load(segment + e + BE, e + BE < end, other=0)
        vx, vy, vz = vector(vec, e + BE, e + BE < end)
        _f1, slope_g = value_and_slope(p, 0, t, mask, F)
        radial = slope_g * g0
        f2, slope_g = value_and_slope(p, 1, t, mask, F)
        radial += slope_g * (uz * g1 - uy * g2 + ux * g3)
        f2 = zz * f2
        f3, slope_g = value_and_slope(p, 2, t, mask, F)
        # W u for the matrix W of g_S, whose entry 22 is none of the components: 0
        wx = ux * g4 + uy * g5 + uz * g6
        wy = ux * g5 + uy * g7 + uz * g8
        wz = ux * g6 + uy * g8
        third = (ux * ux + uy * uy + uz * uz) * (1.0 / 3.0)
        radial += slope_g * (
            ux * ux * g4 + ux * uy * g5 + ux * uz * g6 + uy * uy * g7 + uy * uz * g8 - third * (g4 + g7)
        )
        f3 = zz * f3
        # d/du of f3·(uuᵀ − |u|²/3): the part along u is projected out by the force kernel
        turn_x = f2 * g3 + f3 * (wx + ux * g4)
        turn_y = f3 * (wy + uy * g7) - f2 * g2
        turn_z = f2 * g1 + f3 * wz
        store_sums(slope_out + e, radial * zz, mask, BR, LANES)
        store_sums(turn_out + e * 3, turn_x, mask, BR, LANES)
        store_sums(turn_out + e * 3 + 1, turn_y, mask, BR, LANES)
        store_sums(turn_out + e * 3 + 2, turn_z, mask, BR, LANES)
        e += BE
    before_next(PDL)


# --- The embedding by elements: for many atoms of few elements ---
#
# The 3F filters of the embedding are nearly linear combinations f_p = Σ_r V_p[r] φ_r of R = 32 radial functions
# (`reduce_filters`), and its pair weights depend on two elements only. The sum over neighbors is therefore, with a
# product for each element b that is present,
#
#     X_i,m = Σ_b z_ib ⊙ (S_ib,m V_p(m)),    S_ib,m = Σ_j∈b φ(d_ij) u_m,    u = [1, skew(u), uuᵀ − 1/3],
#
# p(m) being the part that component m belongs to. Edges need R numbers instead of 3F, and a table of R functions.
# Backwards in the same two steps: first, for each atom, the gradient of S, G_ib,m = V_p(m) (z_ib ⊙ dX_i,m); then, for
# each edge to an atom of element b, Σ_m ⟨φ' u_m, G_ib,m⟩ and Σ_m ⟨φ ∂u_m/∂u, G_ib,m⟩.
#
# For B elements G is [N, B, 9, R], and S is [N, 9, B, R]. place [max_z] is the place of an element among them; maps V
# [3, R, F].


@triton.jit
def sort_edges(
    row_ptr, sender, vec, knots, segment, order, z, place, decay, scale, row, KNOTS: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Write the segments of the edges of a row as `write_segments`, and its edges by the element of the sender to
    `order`.

    Returns:
        [P] how many edges there are of each element, and where they end in `order`.
    """
    start, end = tl.load(row_ptr + row), tl.load(row_ptr + row + 1)
    lane, elements = tl.arange(0, 32), tl.arange(0, P)[None, :]
    count = tl.zeros([P], tl.int32)
    for first in range(start, end, 32):
        e = first + lane
        mask = e < end
        element = tl.load(place + tl.load(z + tl.load(sender + e, mask, other=0), mask, other=0))
        x, y, w = vector(vec, e, mask)
        k, t = segment_of(tl.sqrt(x * x + y * y + w * w), knots, decay, scale, KNOTS)
        tl.store(segment + e, pack_segment(element, k, t), mask)
        count += tl.sum((mask[:, None] & (element[:, None] == elements)).to(tl.int32), 0)
    tl.debug_barrier()  # threads read what others wrote
    ends = start + tl.cumsum(count, 0)
    at = ends - count
    for first in range(start, end, 32):
        e = first + lane
        mask = e < end
        element = kind_of(tl.load(segment + e, mask, other=0))
        here = (mask[:, None] & (element[:, None] == elements)).to(tl.int32)
        tl.store(order + tl.sum(here * (at[None, :] + tl.cumsum(here, 0) - 1), 1), e, mask)
        at += tl.sum(here, 0)
    tl.debug_barrier()
    return count, ends


@triton.jit
def element_sums_kernel(
    row_ptr, sender, vec, knots, segment_out, order, z, place, table, sums, present, decay, scale,
    R: tl.constexpr, B: tl.constexpr, P: tl.constexpr, KNOTS: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """S_ib = Σ_j∈b φ(d_ij) u, BE edges of an element at a time; and the segments of the edges.

    Args:
        order: [E] int32, used for the edges of each row by element.
        present: [N] int32, written: bit b says that the row has edges to atoms of element b.
        P: a power of two, not less than B.
    """
    after_previous(PDL)
    row = tl.program_id(0)
    count, ends = sort_edges(
        row_ptr, sender, vec, knots, segment_out, order, z, place, decay, scale, row, KNOTS, P
    )  # fmt: skip
    tl.store(present + row, tl.sum(tl.where(count > 0, 1 << tl.arange(0, P), 0), 0))
    c = tl.arange(0, R)[None, :]
    out = sums + row.to(tl.int64) * (9 * B * R) + c
    for b in tl.range(0, B, num_stages=1):
        here = tl.arange(0, P) == b
        end = tl.sum(tl.where(here, ends, 0), 0)
        begin = end - tl.sum(tl.where(here, count, 0), 0)
        x0 = tl.zeros([BE, R], tl.float32)
        x1, x2, x3, x4, x5, x6, x7, x8 = x0, x0, x0, x0, x0, x0, x0, x0
        # as in `embedding_kernel`, the next edges are read while these are worked on
        at = begin + tl.arange(0, BE)[:, None]
        e = tl.load(order + at, at < end, other=0)
        s = tl.load(segment_out + e, at < end, other=0)
        vx, vy, vz = vector(vec, e, at < end)
        for _ in range(begin, end, BE):
            mask = at < end
            k, t = unpack_segment(s)
            ux, uy, uz = direction(vx, vy, vz)
            at += BE
            e = tl.load(order + at, at < end, other=0)
            s = tl.load(segment_out + e, at < end, other=0)
            vx, vy, vz = vector(vec, e, at < end)
            third = (ux * ux + uy * uy + uz * uz) * (1.0 / 3.0)
            f = value_at(segments(table, k, c, R, 1), 0, t, mask, R, 1)
            x0 += f
            x1 += uz * f
            x2 -= uy * f
            x3 += ux * f
            x4 += (ux * ux - third) * f
            x5 += ux * uy * f
            x6 += ux * uz * f
            x7 += (uy * uy - third) * f
            x8 += uy * uz * f
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = sum_lanes(x0, x1, x2, x3, x4, x5, x6, x7, x8, 1, BE, R)
        store9(out + b * R, c >= 0, B * R, x0, x1, x2, x3, x4, x5, x6, x7, x8)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def element_product_kernel(
    sums, present, maps, z, elements, z_receiver, z_sender, self_filter, x_out, norm_out, num_atoms,
    F: tl.constexpr, R: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOG: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """X_i = Σ_b z_ib ⊙ (S_ib V) + f1(0) z_ii, and ‖X‖² or log(1 + ‖X‖²) (LOG), as `embedding_kernel`."""
    after_previous(PDL)
    W: tl.constexpr = B * R
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    m = (rows < num_atoms)[:, None]
    r = tl.arange(0, R)
    w = maps + r[:, None] * F + cols[None, :]
    wi, wa, ws = tl.load(w), tl.load(w + R * F), tl.load(w + 2 * R * F)
    vi, va, vs = wi, wa, ws
    if PREC == "fp16x3":
        w += 3 * R * F
        vi, va, vs = tl.load(w), tl.load(w + R * F), tl.load(w + 2 * R * F)
    zi = tl.load(z + rows, rows < num_atoms, other=0)[:, None] * F + cols[None, :]
    here = tl.load(z_receiver + zi)
    zero = tl.zeros([BM, BN], tl.float32)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    found = tl.load(present + rows, rows < num_atoms, other=0)
    for b in tl.range(0, B, num_stages=1):
        if tl.max((found >> b) & 1, 0) > 0:  # few atoms are near one of a rare element
            zz = here + tl.load(z_sender + tl.load(elements + b) * F + cols)[None, :]
            s = sums + rows[:, None].to(tl.int64) * (9 * W) + (b * R + r)[None, :]
            y0 += zz * dot_halves(tl.load(s, m, other=0.0), wi, vi, zero, PREC)
            y1 += zz * dot_halves(tl.load(s + W, m, other=0.0), wa, va, zero, PREC)
            y2 += zz * dot_halves(tl.load(s + 2 * W, m, other=0.0), wa, va, zero, PREC)
            y3 += zz * dot_halves(tl.load(s + 3 * W, m, other=0.0), wa, va, zero, PREC)
            y4 += zz * dot_halves(tl.load(s + 4 * W, m, other=0.0), ws, vs, zero, PREC)
            y5 += zz * dot_halves(tl.load(s + 5 * W, m, other=0.0), ws, vs, zero, PREC)
            y6 += zz * dot_halves(tl.load(s + 6 * W, m, other=0.0), ws, vs, zero, PREC)
            y7 += zz * dot_halves(tl.load(s + 7 * W, m, other=0.0), ws, vs, zero, PREC)
            y8 += zz * dot_halves(tl.load(s + 8 * W, m, other=0.0), ws, vs, zero, PREC)
    before_next(PDL)
    y0 += tl.load(self_filter + cols)[None, :] * (here + tl.load(z_sender + zi))
    y0, y1, y2 = settle(y0, BM, BN), settle(y1, BM, BN), settle(y2, BM, BN)
    y3, y4, y5 = settle(y3, BM, BN), settle(y4, BM, BN), settle(y5, BM, BN)
    y6, y7, y8 = settle(y6, BM, BN), settle(y7, BM, BN), settle(y8, BM, BN)
    out = x_out + rows[:, None].to(tl.int64) * (9 * F) + cols[None, :]
    store9(out, m, F, y0, y1, y2, y3, y4, y5, y6, y7, y8)
    norm = squared_norm(y0, y1, y2, y3, y4, y5, y6, y7, y8)
    if LOG:
        norm = log1p(norm)
    tl.store(norm_out + rows[:, None].to(tl.int64) * F + cols[None, :], norm, m)


@triton.jit(do_not_specialize=["num_atoms"])
def element_gradient_kernel(
    dx, present, maps_t, z, elements, z_receiver, z_sender, gradient, num_atoms,
    F: tl.constexpr, R: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """G_ib = V (z_ib ⊙ dX_i). maps_t: Vᵀ [3, F, R]. The programs of all elements of an atom run together, which read
    the same dX. Where no row of a program has edges to element b, nothing is written."""
    after_previous(PDL)
    b = tl.program_id(0) % B
    rows = tl.program_id(0) // B * BM + tl.arange(0, BM)
    if tl.max((tl.load(present + rows, rows < num_atoms, other=0) >> b) & 1, 0) == 0:
        return
    m = (rows < num_atoms)[:, None]
    r = tl.arange(0, R)
    zi = tl.load(z + rows, rows < num_atoms, other=0)[:, None] * F
    there = z_sender + tl.load(elements + b) * F
    g0 = tl.zeros([BM, R], tl.float32)
    g1, g2, g3, g4, g5, g6, g7, g8 = g0, g0, g0, g0, g0, g0, g0, g0
    for k0 in range(0, F, BK):
        k = k0 + tl.arange(0, BK)
        zz = tl.load(z_receiver + zi + k[None, :]) + tl.load(there + k)[None, :]
        x = dx + rows[:, None].to(tl.int64) * (9 * F) + k[None, :]
        w = maps_t + k[:, None] * R + r[None, :]
        wi, wa, ws = tl.load(w), tl.load(w + F * R), tl.load(w + 2 * F * R)
        vi, va, vs = wi, wa, ws
        if PREC == "fp16x3":
            w += 3 * F * R
            vi, va, vs = tl.load(w), tl.load(w + F * R), tl.load(w + 2 * F * R)
        g0 = dot_halves(zz * tl.load(x, m, other=0.0), wi, vi, g0, PREC)
        g1 = dot_halves(zz * tl.load(x + F, m, other=0.0), wa, va, g1, PREC)
        g2 = dot_halves(zz * tl.load(x + 2 * F, m, other=0.0), wa, va, g2, PREC)
        g3 = dot_halves(zz * tl.load(x + 3 * F, m, other=0.0), wa, va, g3, PREC)
        g4 = dot_halves(zz * tl.load(x + 4 * F, m, other=0.0), ws, vs, g4, PREC)
        g5 = dot_halves(zz * tl.load(x + 5 * F, m, other=0.0), ws, vs, g5, PREC)
        g6 = dot_halves(zz * tl.load(x + 6 * F, m, other=0.0), ws, vs, g6, PREC)
        g7 = dot_halves(zz * tl.load(x + 7 * F, m, other=0.0), ws, vs, g7, PREC)
        g8 = dot_halves(zz * tl.load(x + 8 * F, m, other=0.0), ws, vs, g8, PREC)
    before_next(PDL)
    out = gradient + (rows.to(tl.int64) * B + b)[:, None] * (9 * R) + r[None, :]
    store9(out, m, R, g0, g1, g2, g3, g4, g5, g6, g7, g8)


@triton.jit(do_not_specialize=["num_atoms"])
def element_edges_kernel(
    row_ptr, vec, segment, table, gradient, edge_slope, edge_turn, num_atoms,
    R: tl.constexpr, B: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write, for each edge, dE/d|vec| [E] and dE/du [E, 3] from G."""
    row, e, end, steps = first_edge(row_ptr, num_atoms, BR, BE)
    c = tl.arange(0, R)[None, :]
    s = tl.load(segment + e, e < end, other=0, cache_modifier=".cg")
    vx, vy, vz = vector_early(vec, e, e < end)
    after_previous(PDL)
    for _ in range(0, steps):
        mask = e < end
        # of this row, the block of the sender's element: the only one that the edge was summed into
        own = gradient + (row.to(tl.int64) * B + kind_of(s)) * (9 * R) + c
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(own, mask, R)
        ux, uy, uz = direction(vx, vy, vz)
        k, t = unpack_segment(s)
        f, slope_f = value_and_slope(segments(table, k, c, R, 1), 0, t, mask, R, 1)
        s = tl.load(segment + e + BE, e + BE < end, other=0)
        vx, vy, vz = vector(vec, e + BE, e + BE < end)
        wx = ux * g4 + uy * g5 + uz * g6
        wy = ux * g5 + uy * g7 + uz * g8
        wz = ux * g6 + uy * g8
        third = (ux * ux + uy * uy + uz * uz) * (1.0 / 3.0)
        # ⟨uuᵀ − |u|²/3, g⟩ and d/du of it: the part along u is projected out by the force kernel
        along = g0 + uz * g1 - uy * g2 + ux * g3 + ux * wx + uy * (uy * g7 + uz * g8) - third * (g4 + g7)
        store_sums(edge_slope + e, slope_f * along, mask, BR, LANES)
        store_sums(edge_turn + e * 3, f * (g3 + wx + ux * g4), mask, BR, LANES)
        store_sums(edge_turn + e * 3 + 1, f * (wy + uy * g7 - g2), mask, BR, LANES)
        store_sums(edge_turn + e * 3 + 2, f * (g1 + wz), mask, BR, LANES)
        e += BE
    before_next(PDL)


# --- Forces and virial from the gradients of the edges: Triton kernels, without atomics or with those of ---
# integers: the same input gives the same bits

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
    """dE/dvec of directed edges e (a vector of indices): the embedding's part and the messages'.

    s u + (t − (t·u) u)/d with u = vec/d, s the sum of all slopes and t that of dE/du: du/dvec = (1 − uuᵀ)/d. The rows
    of slices and layers are added in a fixed order.
    """
    x, y, z = vector(vec, e, mask)
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
        # no lane has more left than this, so that all of them are done
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
    """F_i = Σ_e (G_e − G_reverse(e)), G = dE/dvec; virial of the row Σ_e vec ⊗ G (nine numbers).

    vec = r_j − r_i, so that −dE/dr_i is the sum of G over the row minus that over the edges which i sends. A message's
    slope stands at the reverse of its edge. That changes neither the difference, since the reverse has the opposite u,
    nor the virial of the structure: vec ⊗ u is the same for both.
    """
    i = tl.program_id(0)
    start = tl.load(row_ptr + i)
    end = tl.load(row_ptr + i + 1)
    fx = tl.zeros([BE], tl.float32)
    fy, fz = fx, fx
    v0, v1, v2, v3, v4, v5, v6, v7, v8 = fx, fx, fx, fx, fx, fx, fx, fx, fx
    for first in range(start, end, BE):
        e = first + tl.arange(0, BE)
        mask = e < end
        # the search reads the list alone, and can run while the kernel before writes its gradients
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
    before_next(PDL)
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

    A ghost has no edges, so that there is no reverse edge to read. The slope at an edge from a ghost is that of the
    message to the ghost (0 in a block, where its dM is 0); the message from it has its slope in the process where the
    ghost is a local atom. forces: [rows of local atoms and ghosts, 3] int64,
    in units of 1/FIXED_POINT, whose sums do not depend on the order; virial [N, 9] of the rows, as for `force_kernel`.
    A gradient that is not finite, or too large for such integers, is left out, and the virial of its row is NaN.
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
    # other rows subtract from this atom at the same time
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
