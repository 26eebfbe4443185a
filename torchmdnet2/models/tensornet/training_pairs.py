"""Operations over pairs of atoms for training: messages, the embedding, and the geometry of pairs.

Shapes: M atoms, P pairs (each unordered pair once), E directed edges, F features. Fields of 3×3 tensors are
[9, M, F], see training_atoms.py. Filters are [P + 1, 3, F]: one row for each pair, the last one for an atom and itself.
There are no atomics: rows of edges are summed atom by atom, so that results are reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.triton_launch import FUSED_ARITHMETIC, tl, triton
from ...kernels.pair_ops import MultilinearOp, Pairs
from .training_atoms import times_parts
from .training_radial import POINTS, Stencil

__all__ = [
    "Basis", "Embedding", "Message", "PairGeometry", "edges_of_row", "gather_messages", "pair_atoms", "row_tile",
    "store_part_dots",
]  # fmt: skip


class Message(MultilinearOp):
    """T(f, y, g) = Σ_i ⟨g_i, Σ_j f_ij y_j + f_self y_i⟩: each atom gathers the filtered tensors of its neighbors.

    Slots: f [P + 1, 3, F]; y, result and g [9, M, F].
    """

    directed = False  # whether each direction of a pair has a separate filter

    def __init__(self, pairs: Pairs, use_kernels: bool):
        self.pairs, self.use_kernels = pairs, use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        f, y = slots
        pairs = self.pairs
        filters, own = f.transpose(0, 1).split((pairs.num_pairs, 1), 1)
        filters = filters * pairs.real().to(f.dtype)[:, None]
        first, second = pairs.first.long(), pairs.second.long()
        m = times_parts(y, own)
        m = m.index_add(1, first, times_parts(y.index_select(1, second), filters))
        return m.index_add(1, second, times_parts(y.index_select(1, first), filters))

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        f, y, g = slots
        if slot == 0:
            assert y is not None and g is not None
            return self.filter_gradient(y, g)
        other = y if slot == 2 else g
        assert f is not None and other is not None
        return self.gather(f, other, turned=slot == 1)

    def filter_gradient(self, y: Tensor, g: Tensor) -> Tensor:
        """∂T/∂f by a kernel."""
        pairs = self.pairs
        num, features = y.shape[1:]
        out = y.new_empty(pairs.num_pairs + 1, 3, features)
        _pair_dot[(triton.cdiv(pairs.num_pairs, 4),)](
            out, y, g, pairs.first, pairs.second, pairs.count, num, pairs.num_pairs, F=features, BP=4,
            BF=triton.next_power_of_2(features), **FUSED_ARITHMETIC,
        )  # fmt: skip
        # the last row is the filter of every atom with itself
        own = torch.linalg.vecdot(y, g, dim=1)  # [9, F]
        out[-1] = torch.stack([own[0], own[1:4].sum(0), own[4:].sum(0)])
        return out

    def gather(self, f: Tensor, other: Tensor, turned: bool) -> Tensor:
        """∂T/∂g of other = y by a kernel; turned: ∂T/∂y of other = g, the same sum where filters are of pairs."""
        pairs = self.pairs
        out = torch.empty_like(other)
        grid, tile = row_tile(pairs.num_atoms, other.shape[2])
        gather_messages[grid](
            out, f, other, pairs.row_ptr, pairs.sender, pairs.pair, pairs.num_atoms, pairs.num_pairs,
            DIRECTED=self.directed, TURNED=self.directed and turned, **tile,
        )  # fmt: skip
        return out


TILES: dict[str, tuple[int, int, int]] = {"few": (8, 64, 1), "many": (4, 64, 1)}
"""Edges and columns that a program holds at a time, and its warps, for few and for many atoms."""


def row_tile(num_atoms: int, features: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and tile of a kernel that sums the edges of each atom."""
    edges, columns, warps = TILES["few" if num_atoms < 2000 else "many"]
    columns = min(columns, triton.next_power_of_2(features))
    grid = (num_atoms, triton.cdiv(features, columns))
    return grid, {"F": features, "BE": edges, "BF": columns, "num_warps": warps, **FUSED_ARITHMETIC}


@triton.jit
def edges_of_row(sender, pair, at, stop):
    """Senders, pairs and signs (−1 where the receiver is the pair's second atom) of some edges of a row."""
    here = at < stop
    j = tl.load(sender + at, mask=here, other=0).to(tl.int64)
    p = tl.load(pair + at, mask=here, other=0)
    sign = tl.where(p < 0, -1.0, 1.0)
    return here, j, tl.where(p < 0, -p - 1, p).to(tl.int64), sign


@triton.jit
def _tile(x, row, c, mask, F: tl.constexpr):
    """x[row, c] of rows [n] and columns [BF]."""
    return tl.load(x + row[:, None] * F + c[None, :], mask=mask, other=0.0)


@triton.jit
def gather_messages(
    out, f, y, row_ptr, sender, pair, num, num_pairs, DIRECTED: tl.constexpr, TURNED: tl.constexpr, F: tl.constexpr,
    BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Σ over the edges of an atom of f y of the sender, and f_self y of the atom itself.

    DIRECTED: each direction of a pair, and each atom with itself, has a separate filter, in the order of
    tensornet2/training_edges.py of TensorNet2; TURNED takes the filter of the other direction.
    """
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = c < F
    plane = num.to(tl.int64) * F
    last = num_pairs.to(tl.int64)
    if DIRECTED:
        last = 2 * last + i
    own = f + last * (3 * F) + c
    f0 = tl.load(own, mask=inside, other=0.0)
    f1 = tl.load(own + F, mask=inside, other=0.0)
    f2 = tl.load(own + 2 * F, mask=inside, other=0.0)
    y += c
    mine = y + i * F
    m0 = f0 * tl.load(mine, mask=inside, other=0.0)
    m1 = f1 * tl.load(mine + plane, mask=inside, other=0.0)
    m2 = f1 * tl.load(mine + 2 * plane, mask=inside, other=0.0)
    m3 = f1 * tl.load(mine + 3 * plane, mask=inside, other=0.0)
    m4 = f2 * tl.load(mine + 4 * plane, mask=inside, other=0.0)
    m5 = f2 * tl.load(mine + 5 * plane, mask=inside, other=0.0)
    m6 = f2 * tl.load(mine + 6 * plane, mask=inside, other=0.0)
    m7 = f2 * tl.load(mine + 7 * plane, mask=inside, other=0.0)
    m8 = f2 * tl.load(mine + 8 * plane, mask=inside, other=0.0)
    stop = tl.load(row_ptr + i + 1)
    for start in range(tl.load(row_ptr + i), stop, BE):
        here, j, p, sign = edges_of_row(sender, pair, start + tl.arange(0, BE), stop)
        if DIRECTED:
            p = tl.where((sign > 0) if TURNED else (sign < 0), p + num_pairs, p)
        mask = here[:, None] & inside[None, :]
        at = (p * (3 * F))[:, None] + c[None, :]
        g0 = tl.load(f + at, mask=mask, other=0.0)
        g1 = tl.load(f + at + F, mask=mask, other=0.0)
        g2 = tl.load(f + at + 2 * F, mask=mask, other=0.0)
        at = (j * F)[:, None]
        m0 += tl.sum(g0 * tl.load(y[None, :] + at, mask=mask, other=0.0), 0)
        m1 += tl.sum(g1 * tl.load(y[None, :] + (at + plane), mask=mask, other=0.0), 0)
        m2 += tl.sum(g1 * tl.load(y[None, :] + (at + 2 * plane), mask=mask, other=0.0), 0)
        m3 += tl.sum(g1 * tl.load(y[None, :] + (at + 3 * plane), mask=mask, other=0.0), 0)
        m4 += tl.sum(g2 * tl.load(y[None, :] + (at + 4 * plane), mask=mask, other=0.0), 0)
        m5 += tl.sum(g2 * tl.load(y[None, :] + (at + 5 * plane), mask=mask, other=0.0), 0)
        m6 += tl.sum(g2 * tl.load(y[None, :] + (at + 6 * plane), mask=mask, other=0.0), 0)
        m7 += tl.sum(g2 * tl.load(y[None, :] + (at + 7 * plane), mask=mask, other=0.0), 0)
        m8 += tl.sum(g2 * tl.load(y[None, :] + (at + 8 * plane), mask=mask, other=0.0), 0)
    to = out + i * F + c
    tl.store(to, m0, mask=inside)
    tl.store(to + plane, m1, mask=inside)
    tl.store(to + 2 * plane, m2, mask=inside)
    tl.store(to + 3 * plane, m3, mask=inside)
    tl.store(to + 4 * plane, m4, mask=inside)
    tl.store(to + 5 * plane, m5, mask=inside)
    tl.store(to + 6 * plane, m6, mask=inside)
    tl.store(to + 7 * plane, m7, mask=inside)
    tl.store(to + 8 * plane, m8, mask=inside)


@triton.jit
def pair_atoms(first, second, count, num_pairs, BP: tl.constexpr):
    """Pair numbers, their atoms, and which of them are real."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    i = tl.load(first + p, mask=p < num_pairs, other=0).to(tl.int64)
    j = tl.load(second + p, mask=p < num_pairs, other=0).to(tl.int64)
    return p, i, j, p < tl.load(count)


@triton.jit
def _dot(y, g, at_y, at_g, mask, BOTH: tl.constexpr):
    """One component of y at one atom times that of g at another; BOTH: plus that with the atoms exchanged."""
    product = tl.load(y + at_y, mask=mask, other=0.0) * tl.load(g + at_g, mask=mask, other=0.0)
    if BOTH:
        product += tl.load(y + at_g, mask=mask, other=0.0) * tl.load(g + at_y, mask=mask, other=0.0)
    return product


@triton.jit
def store_part_dots(
    out, y, g, row, at_y, at_g, num, real, there, BOTH: tl.constexpr, F: tl.constexpr, BF: tl.constexpr
):
    """Gradient of the filters in rows [BE] of out: ⟨y, g⟩ by parts, of atoms at_y and at_g (BOTH: and exchanged)."""
    c = tl.arange(0, BF)
    inside = (c < F)[None, :]
    mask = real[:, None] & inside
    plane = num.to(tl.int64) * F
    a, b = (at_y * F)[:, None] + c[None, :], (at_g * F)[:, None] + c[None, :]
    part_i = _dot(y, g, a, b, mask, BOTH)
    part_a = _dot(y, g, a + plane, b + plane, mask, BOTH)
    part_a += _dot(y, g, a + 2 * plane, b + 2 * plane, mask, BOTH)
    part_a += _dot(y, g, a + 3 * plane, b + 3 * plane, mask, BOTH)
    part_s = _dot(y, g, a + 4 * plane, b + 4 * plane, mask, BOTH)
    part_s += _dot(y, g, a + 5 * plane, b + 5 * plane, mask, BOTH)
    part_s += _dot(y, g, a + 6 * plane, b + 6 * plane, mask, BOTH)
    part_s += _dot(y, g, a + 7 * plane, b + 7 * plane, mask, BOTH)
    part_s += _dot(y, g, a + 8 * plane, b + 8 * plane, mask, BOTH)
    to = out + (row * (3 * F))[:, None] + c[None, :]
    # rows of padding get 0: products with weights read them too
    mask = there[:, None] & inside
    tl.store(to, part_i, mask=mask)
    tl.store(to + F, part_a, mask=mask)
    tl.store(to + 2 * F, part_s, mask=mask)


@triton.jit
def _pair_dot(out, y, g, first, second, count, num, num_pairs, F: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr):
    """Gradient of the filters of pairs: ⟨g_i, y_j⟩ + ⟨g_j, y_i⟩ by parts. A program has whole rows of BP pairs."""
    p, i, j, real = pair_atoms(first, second, count, num_pairs, BP)
    store_part_dots(out, y, g, p, j, i, num, real, p < num_pairs, True, F, BF)


# --- The embedding of TensorNet as a multilinear operation: tensors from the geometry of the pairs of atoms ---
#
# Shapes as above.


def _parity(like: Tensor) -> Tensor:
    """[9, 1, 1] what each component of the geometry is multiplied by when the vector turns round."""
    sign = like.new_ones(9, 1, 1)
    sign[1:4].neg_()
    return sign


class Embedding(MultilinearOp):
    """T(f, c, z, g) = Σ_i ⟨g_i, Σ_j f_ij c_ij (a_i + b_j) + f_self c_self (a_i + b_i)⟩: tensors from the geometry.

    The parts I, A, S of a pair's geometry c are multiplied by the three filters; A turns its sign for the second atom.
    Of an atom's own geometry, the last row of c, the isotropic component alone is used.

    Slots: f [P + 1, 3, F]; c [P + 1, 9]; z = (a, b) [M, 2F]; result and g [9, M, F].
    """

    def __init__(self, pairs: Pairs, use_kernels: bool):
        self.pairs, self.use_kernels = pairs, use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        f, c, z = slots
        pairs = self.pairs
        a, b = z.chunk(2, 1)
        first, second = pairs.first.long(), pairs.second.long()
        filters, own_filter = f.transpose(0, 1).split((pairs.num_pairs, 1), 1)
        geometry, own_geometry = c.T[:, :, None].split((pairs.num_pairs, 1), 1)
        geometry = geometry * pairs.real().to(c.dtype)[:, None]
        x = torch.cat([own_filter[:1] * own_geometry[:1] * (a + b), f.new_zeros(8, *a.shape)])
        for here, there, shape in ((first, second, geometry), (second, first, _parity(c) * geometry)):
            weights = a.index_select(0, here) + b.index_select(0, there)
            x = x.index_add(1, here, times_parts(shape, filters * weights))
        return x

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        f, c, z, g = slots
        pairs = self.pairs
        some = next(s for s in slots if s is not None)
        features = (f if f is not None else g).shape[2]  # type: ignore[union-attr]
        num, total = pairs.num_atoms, pairs.num_pairs
        sizes = {"F": features, "BF": triton.next_power_of_2(features), **FUSED_ARITHMETIC}
        rows = (pairs.row_ptr, pairs.sender, pairs.pair, num, total)
        if slot == 3:
            out = some.new_empty(9, num, features)
            grid, tile = row_tile(num, features)
            _embed[grid](out, f, c, z, *rows, **tile)
        elif slot == 2:
            out = some.new_empty(num, 2 * features)
            grid, tile = row_tile(num, features)
            _embed_atoms[grid](out, f, c, g, *rows, **tile)
        elif slot == 1:
            out = some.new_empty(total + 1, 9)
            grid = (triton.cdiv(total, 4), 1)
            _embed_geometry[grid](out, f, z, g, pairs.first, pairs.second, pairs.count, num, total, BP=4, **sizes)
            assert f is not None and z is not None and g is not None
            out[-1].zero_()
            out[-1, 0] = torch.dot(f[-1, 0], own_embedding(z, g))
        else:
            out = some.new_empty(total + 1, 3, features)
            grid = (triton.cdiv(total, 4), 1)
            _embed_filters[grid](out, c, z, g, pairs.first, pairs.second, pairs.count, num, total, BP=4, **sizes)
            assert c is not None and z is not None and g is not None
            out[-1].zero_()
            out[-1, 0] = c[-1, 0] * own_embedding(z, g)
        return out


def own_embedding(z: Tensor, g: Tensor) -> Tensor:
    """Σ_i (a_i + b_i) g_i of the isotropic component: [F]."""
    a, b = z.chunk(2, 1)
    return torch.linalg.vecdot(a + b, g[0], dim=0)


@triton.jit
def _term(f, c, at, p, column, sign, here):
    """Filter × geometry of one component for some edges: [BE, BF]."""
    value = tl.load(c + p * 9 + column, mask=here, other=0.0) * sign
    return f * value[:, None]


@triton.jit
def _embed(out, f, c, z, row_ptr, sender, pair, num, num_pairs, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    """Σ over the edges of an atom of f c (a_i + b_j)."""
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = k < F
    plane = num.to(tl.int64) * F
    a = tl.load(z + i * (2 * F) + k, mask=inside, other=0.0)
    b = tl.load(z + i * (2 * F) + F + k, mask=inside, other=0.0)
    last = num_pairs.to(tl.int64)
    x0 = tl.load(f + last * (3 * F) + k, mask=inside, other=0.0) * tl.load(c + last * 9) * (a + b)
    zero = tl.zeros((BF,), x0.dtype)
    x1, x2, x3, x4, x5, x6, x7, x8 = zero, zero, zero, zero, zero, zero, zero, zero
    stop = tl.load(row_ptr + i + 1)
    for start in range(tl.load(row_ptr + i), stop, BE):
        here, j, p, sign = edges_of_row(sender, pair, start + tl.arange(0, BE), stop)
        mask = here[:, None] & inside[None, :]
        ab = a[None, :] + tl.load(z + (j * (2 * F) + F)[:, None] + k[None, :], mask=mask, other=0.0)
        at = (p * (3 * F))[:, None] + k[None, :]
        w0 = tl.load(f + at, mask=mask, other=0.0) * ab
        w1 = tl.load(f + at + F, mask=mask, other=0.0) * ab
        w2 = tl.load(f + at + 2 * F, mask=mask, other=0.0) * ab
        one = tl.full((BE,), 1.0, x0.dtype)
        sign = sign.to(x0.dtype)
        x0 += tl.sum(_term(w0, c, at, p, 0, one, here), 0)
        x1 += tl.sum(_term(w1, c, at, p, 1, sign, here), 0)
        x2 += tl.sum(_term(w1, c, at, p, 2, sign, here), 0)
        x3 += tl.sum(_term(w1, c, at, p, 3, sign, here), 0)
        x4 += tl.sum(_term(w2, c, at, p, 4, one, here), 0)
        x5 += tl.sum(_term(w2, c, at, p, 5, one, here), 0)
        x6 += tl.sum(_term(w2, c, at, p, 6, one, here), 0)
        x7 += tl.sum(_term(w2, c, at, p, 7, one, here), 0)
        x8 += tl.sum(_term(w2, c, at, p, 8, one, here), 0)
    to = out + i * F + k
    tl.store(to, x0, mask=inside)
    tl.store(to + plane, x1, mask=inside)
    tl.store(to + 2 * plane, x2, mask=inside)
    tl.store(to + 3 * plane, x3, mask=inside)
    tl.store(to + 4 * plane, x4, mask=inside)
    tl.store(to + 5 * plane, x5, mask=inside)
    tl.store(to + 6 * plane, x6, mask=inside)
    tl.store(to + 7 * plane, x7, mask=inside)
    tl.store(to + 8 * plane, x8, mask=inside)


@triton.jit
def _geometry_dot(g, at, c, p, plane, sign, here, mask):
    """Σ_c geometry × g of the three parts, for rows of g at `at`: three [n, BF]."""
    s = sign
    i = tl.load(g + at, mask=mask, other=0.0) * tl.load(c + p * 9, mask=here, other=0.0)[:, None]
    a = tl.load(g + at + plane, mask=mask, other=0.0) * (s * tl.load(c + p * 9 + 1, mask=here, other=0.0))[:, None]
    a += tl.load(g + at + 2 * plane, mask=mask, other=0.0) * (s * tl.load(c + p * 9 + 2, mask=here, other=0.0))[:, None]
    a += tl.load(g + at + 3 * plane, mask=mask, other=0.0) * (s * tl.load(c + p * 9 + 3, mask=here, other=0.0))[:, None]
    t = tl.load(g + at + 4 * plane, mask=mask, other=0.0) * tl.load(c + p * 9 + 4, mask=here, other=0.0)[:, None]
    t += tl.load(g + at + 5 * plane, mask=mask, other=0.0) * tl.load(c + p * 9 + 5, mask=here, other=0.0)[:, None]
    t += tl.load(g + at + 6 * plane, mask=mask, other=0.0) * tl.load(c + p * 9 + 6, mask=here, other=0.0)[:, None]
    t += tl.load(g + at + 7 * plane, mask=mask, other=0.0) * tl.load(c + p * 9 + 7, mask=here, other=0.0)[:, None]
    t += tl.load(g + at + 8 * plane, mask=mask, other=0.0) * tl.load(c + p * 9 + 8, mask=here, other=0.0)[:, None]
    return i, a, t


@triton.jit
def _embed_atoms(
    out, f, c, g, row_ptr, sender, pair, num, num_pairs, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr
):
    """Gradients of a and b of an atom: from its own row, and from its neighbors' rows.

    a_i = Σ_j f_ij ⟨c_ij, g_i⟩, b_i = Σ_j f_ij ⟨c_ji, g_j⟩, each by parts, and f_self c_self g_i (part I) for both. b is
    of senders: with both directions in the list, the neighbors of a row are also those that i sends to, and nothing is
    scattered.
    """
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = k < F
    plane = num.to(tl.int64) * F
    last = num_pairs.to(tl.int64)
    own = tl.load(f + last * (3 * F) + k, mask=inside, other=0.0) * tl.load(c + last * 9)
    a = own * tl.load(g + i * F + k, mask=inside, other=0.0)
    b = a
    stop = tl.load(row_ptr + i + 1)
    for start in range(tl.load(row_ptr + i), stop, BE):
        here, j, p, sign = edges_of_row(sender, pair, start + tl.arange(0, BE), stop)
        sign = sign.to(a.dtype)
        mask = here[:, None] & inside[None, :]
        at = (p * (3 * F))[:, None] + k[None, :]
        f0 = tl.load(f + at, mask=mask, other=0.0)
        f1 = tl.load(f + at + F, mask=mask, other=0.0)
        f2 = tl.load(f + at + 2 * F, mask=mask, other=0.0)
        mine = tl.zeros((BE, 1), tl.int64) + (i * F + k)[None, :]
        g0, g1, g2 = _geometry_dot(g, mine, c, p, plane, sign, here, mask)
        a += tl.sum(f0 * g0 + f1 * g1 + f2 * g2, 0)
        theirs = (j * F)[:, None] + k[None, :]
        # as the neighbor sees the pair
        g0, g1, g2 = _geometry_dot(g, theirs, c, p, plane, -sign, here, mask)
        b += tl.sum(f0 * g0 + f1 * g1 + f2 * g2, 0)
    tl.store(out + i * (2 * F) + k, a, mask=inside)
    tl.store(out + i * (2 * F) + F + k, b, mask=inside)


@triton.jit
def _weights(z, i, j, k, mask, F: tl.constexpr):
    """a_i + b_j, [BP, BF]."""
    a = tl.load(z + (i * (2 * F))[:, None] + k[None, :], mask=mask, other=0.0)
    return a + tl.load(z + (j * (2 * F) + F)[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _embed_filters(
    out, c, z, g, first, second, count, num, num_pairs, F: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr

):  # fmt: skip
    """Gradient of the filters of pairs: (a_i + b_j) ⟨c_ij, g_i⟩ + (a_j + b_i) ⟨c_ji, g_j⟩ by parts."""
    p, i, j, real = pair_atoms(first, second, count, num_pairs, BP)
    k = tl.arange(0, BF)
    mask = real[:, None] & (k < F)[None, :]
    plane = num.to(tl.int64) * F
    one = tl.full((BP,), 1.0, c.dtype.element_ty)
    ij, ji = _weights(z, i, j, k, mask, F), _weights(z, j, i, k, mask, F)
    g0, g1, g2 = _geometry_dot(g, (i * F)[:, None] + k[None, :], c, p, plane, one, real, mask)
    h0, h1, h2 = _geometry_dot(g, (j * F)[:, None] + k[None, :], c, p, plane, -one, real, mask)
    at = (p * (3 * F))[:, None] + k[None, :]
    mask = (p < num_pairs)[:, None] & (k < F)[None, :]
    tl.store(out + at, ij * g0 + ji * h0, mask=mask)
    tl.store(out + at + F, ij * g1 + ji * h1, mask=mask)
    tl.store(out + at + 2 * F, ij * g2 + ji * h2, mask=mask)


@triton.jit
def _geometry_term(g, at_i, at_j, w_i, w_j, mask):
    """Σ_F of w_i g_i + w_j g_j: [BP]."""
    return tl.sum(w_i * tl.load(g + at_i, mask=mask, other=0.0) + w_j * tl.load(g + at_j, mask=mask, other=0.0), 1)


@triton.jit
def _embed_geometry(
    out, f, z, g, first, second, count, num, num_pairs, F: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr

):  # fmt: skip
    """Gradient of the geometry of pairs: Σ_F f ((a_i + b_j) g_i ± (a_j + b_i) g_j), − for the part A.

    A program has all F columns of its pairs, so that the sums need no atomics.
    """
    p, i, j, real = pair_atoms(first, second, count, num_pairs, BP)
    k = tl.arange(0, BF)
    mask = real[:, None] & (k < F)[None, :]
    plane = num.to(tl.int64) * F
    ij, ji = _weights(z, i, j, k, mask, F), _weights(z, j, i, k, mask, F)
    at = (p * (3 * F))[:, None] + k[None, :]
    f0 = tl.load(f + at, mask=mask, other=0.0)
    f1 = tl.load(f + at + F, mask=mask, other=0.0)
    f2 = tl.load(f + at + 2 * F, mask=mask, other=0.0)
    a, b = (i * F)[:, None] + k[None, :], (j * F)[:, None] + k[None, :]
    to = out + p * 9
    keep = p < num_pairs
    tl.store(to, _geometry_term(g, a, b, f0 * ij, f0 * ji, mask), mask=keep)
    w, v = f1 * ij, -f1 * ji
    tl.store(to + 1, _geometry_term(g, a + plane, b + plane, w, v, mask), mask=keep)
    tl.store(to + 2, _geometry_term(g, a + 2 * plane, b + 2 * plane, w, v, mask), mask=keep)
    tl.store(to + 3, _geometry_term(g, a + 3 * plane, b + 3 * plane, w, v, mask), mask=keep)
    w, v = f2 * ij, f2 * ji
    tl.store(to + 4, _geometry_term(g, a + 4 * plane, b + 4 * plane, w, v, mask), mask=keep)
    tl.store(to + 5, _geometry_term(g, a + 5 * plane, b + 5 * plane, w, v, mask), mask=keep)
    tl.store(to + 6, _geometry_term(g, a + 6 * plane, b + 6 * plane, w, v, mask), mask=keep)
    tl.store(to + 7, _geometry_term(g, a + 7 * plane, b + 7 * plane, w, v, mask), mask=keep)
    tl.store(to + 8, _geometry_term(g, a + 8 * plane, b + 8 * plane, w, v, mask), mask=keep)


# --- Radial basis, cutoff function and geometry of pairs ---
#
# Positions are fixed in training, so radial values and slopes are precomputed. Only the linear maps between cotangents
# of the values and of the vectors r are differentiated.

_BLOCK = 32
_GAUSSIAN, _EXPNORM, _KNOTS = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Basis:
    """Radial functions φ_k(d) = C(d) exp(−w_k (x(d) − c_k)²), k = 1 … R.

    Attributes:
        centres, widths: [R] c and w.
        alpha, lower, upper: x = exp(α (lower − d)) and C the cosine cutoff at upper; α = 0: x = d and C = 1.
    """

    centres: Tensor
    widths: Tensor
    alpha: float = 0.0
    lower: float = 0.0
    upper: float = 1.0


class PairGeometry:
    """Values and derivatives for the vectors of a batch.

    Args:
        r: [P, 3] vectors in Å from the first atom of each pair to the second.
        basis: radial functions; or knots, whose weights times the cutoff function take their place, R = POINTS.
        start, stop: Å, where the cosine cutoff function begins (0: it is 1 at distance 0) and ends.
        skew_sign: of the antisymmetric part of the geometry, see model.py.

    Attributes:
        first: [P + 1] int32, the first knot of each row; empty without knots.
    """

    def __init__(self, r: Tensor, basis: Basis | Stencil, start: float, stop: float, skew_sign: int):
        self.r, self.skew_sign = r.detach().contiguous(), skew_sign
        rows, knots = r.shape[0] + 1, isinstance(basis, Stencil)
        num = POINTS if isinstance(basis, Stencil) else basis.centres.shape[0]
        self.sizes = {"R": num, "BR": triton.next_power_of_2(num), "BLOCK": _BLOCK}
        self.rbf, self.rbf_slope = r.new_empty(rows, num), r.new_empty(rows, num)
        self.envelope, self.envelope_slope = r.new_empty(rows), r.new_empty(rows)
        self.geometry = r.new_empty(rows, 9)
        self.first = torch.empty(rows if knots else 0, dtype=torch.int32, device=r.device)
        out = self.rbf, self.rbf_slope, self.envelope, self.envelope_slope, self.geometry
        shape = {"SKEW": skew_sign, "START": start, "STOP": stop, **FUSED_ARITHMETIC, **self.sizes}
        grid = (triton.cdiv(rows, _BLOCK),)
        if isinstance(basis, Stencil):
            _values[grid](
                *out, self.first, self.r, self.r, self.r, rows - 1, KIND=_KNOTS, ALPHA=0.0, LOWER=0.0, UPPER=0.0,
                SPACING=basis.spacing, LAST=basis.num_knots - POINTS, **shape,
            )  # fmt: skip
        else:
            centres, widths = (t.to(r.dtype).contiguous() for t in (basis.centres, basis.widths))
            _values[grid](
                *out, self.first, self.r, centres, widths, rows - 1, KIND=_EXPNORM if basis.alpha else _GAUSSIAN,
                ALPHA=basis.alpha, LOWER=basis.lower, UPPER=basis.upper, SPACING=1.0, LAST=0, **shape,
            )  # fmt: skip

    def __call__(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the radial basis [P + 1, R], cutoff function [P + 1] and geometry [P + 1, 9], differentiable in r."""
        return _Values.apply(self, r)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: PairGeometry, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.pairs = pairs
        # views: autograd writes its history to what is returned, and the batch keeps the tensors
        return (
            pairs.rbf.view_as(pairs.rbf),
            pairs.envelope.view_as(pairs.envelope),
            pairs.geometry.view_as(pairs.geometry),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _Pulled.apply(ctx.pairs, *(g.contiguous() for g in gradients))


class _Pulled(torch.autograd.Function):
    """Cotangents of the values → cotangent of r. Linear; r itself is fixed, and nothing flows to it."""

    @staticmethod
    def forward(ctx: Any, pairs: PairGeometry, rbf: Tensor, envelope: Tensor, geometry: Tensor) -> Tensor:
        ctx.pairs = pairs
        out = torch.empty_like(pairs.r)
        num = out.shape[0]
        _pull[(triton.cdiv(num, _BLOCK),)](
            out, rbf, envelope, geometry, pairs.r, pairs.rbf_slope, pairs.envelope_slope, num, SKEW=pairs.skew_sign,
            **FUSED_ARITHMETIC, **pairs.sizes,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        pairs = ctx.pairs
        rbf, envelope, geometry = (torch.empty_like(t) for t in (pairs.rbf, pairs.envelope, pairs.geometry))
        rows = rbf.shape[0]
        _push[(triton.cdiv(rows, _BLOCK),)](
            rbf, envelope, geometry, u.contiguous(), pairs.r, pairs.rbf_slope, pairs.envelope_slope, rows - 1,
            SKEW=pairs.skew_sign, **FUSED_ARITHMETIC, **pairs.sizes,
        )  # fmt: skip
        return None, rbf, envelope, geometry


@triton.jit
def _direction(r, p, num):
    """Distance and unit vector of pairs; 0 for the row after the last."""
    mask = p < num
    x = tl.load(r + p * 3, mask=mask, other=0.0)
    y = tl.load(r + p * 3 + 1, mask=mask, other=0.0)
    z = tl.load(r + p * 3 + 2, mask=mask, other=0.0)
    d = tl.sqrt(x * x + y * y + z * z)
    inverse = tl.where(d > 0, 1 / tl.where(d > 0, d, 1.0), 0.0)
    return d, inverse, x * inverse, y * inverse, z * inverse


@triton.jit
def _cosine(d, START: tl.constexpr, STOP: tl.constexpr):
    """Value and slope of the cosine cutoff between two distances (from 0 when START is 0)."""
    pi: tl.constexpr = 3.141592653589793
    if START > 0:
        scaled = 2 * (d - START) / (STOP - START) + 1
        inside = (d > START) & (d < STOP)
        rate: tl.constexpr = 2 * pi / (STOP - START)
        value = 0.5 * (tl.cos(pi * scaled) + 1)
        slope = -0.5 * rate * tl.sin(pi * scaled)
    else:
        inside = d < STOP
        turn: tl.constexpr = pi / STOP
        value = 0.5 * (tl.cos(d * turn) + 1)
        slope = -0.5 * turn * tl.sin(d * turn)
    return tl.where(inside, value, 0.0), tl.where(inside, slope, 0.0)


@triton.jit
def _values(
    rbf, rbf_slope, envelope, envelope_slope, geometry, first, r, centres, widths, num, SKEW: tl.constexpr,
    START: tl.constexpr, STOP: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, SPACING: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = p <= num
    d, _, ux, uy, uz = _direction(r, p, num)
    value, slope = _cosine(d, START, STOP)
    tl.store(envelope + p, value, mask=mask)
    tl.store(envelope_slope + p, slope, mask=mask)

    k = tl.arange(0, BR)
    both = mask[:, None] & (k < R)[None, :]
    to = p[:, None] * R + k[None, :]
    if KIND == 2:  # Lagrange's polynomials Π (s − b)/(k − b) and their slopes, times the cutoff function
        before = (d / SPACING).to(tl.int32) - (R // 2 - 1)
        before = tl.minimum(tl.maximum(before, 0), LAST)
        tl.store(first + p, before, mask=mask)
        s = d / SPACING - before.to(d.dtype)
        weight, steep = tl.full((BLOCK, BR), 1.0, d.dtype), tl.zeros((BLOCK, BR), d.dtype)
        for b in tl.static_range(R):
            own = k == b
            inverse = tl.where(own, 0.0, 1 / tl.where(own, 1, k - b).to(d.dtype))[None, :]
            # the polynomial k has no factor b = k: its slope gets nothing from there
            factor = tl.where(own[None, :], 1.0, (s[:, None] - b) * inverse)
            # product rule; `weight` must still be without this factor
            steep = steep * factor + weight * inverse
            weight = weight * factor
        tl.store(rbf + to, value[:, None] * weight, mask=both)
        tl.store(rbf_slope + to, slope[:, None] * weight + value[:, None] * steep / SPACING, mask=both)
    elif KIND == 1:
        centre, width = tl.load(centres + k, mask=k < R, other=0.0), tl.load(widths + k, mask=k < R, other=0.0)
        t = tl.exp(ALPHA * (LOWER - d))
        cut, cut_slope = _cosine(d, 0.0, UPPER)
        away = t[:, None] - centre[None, :]
        bell = tl.exp(-width[None, :] * away * away)
        # d exp(−β (t − μ)²)/dd with dt/dd = −α t
        steep = 2 * ALPHA * width[None, :] * away * t[:, None]
        tl.store(rbf + to, cut[:, None] * bell, mask=both)
        tl.store(rbf_slope + to, (cut_slope[:, None] + cut[:, None] * steep) * bell, mask=both)
    else:
        centre, width = tl.load(centres + k, mask=k < R, other=0.0), tl.load(widths + k, mask=k < R, other=0.0)
        away = d[:, None] - centre[None, :]
        bell = tl.exp(-width[None, :] * away * away)
        tl.store(rbf + to, bell, mask=both)
        tl.store(rbf_slope + to, -2 * width[None, :] * away * bell, mask=both)

    # the geometry is that of v = −u, which points from the second atom to the first
    vx, vy, vz = -ux, -uy, -uz
    third = (vx * vx + vy * vy + vz * vz) / 3
    to = geometry + p * 9
    tl.store(to, tl.full((BLOCK,), 1.0, vx.dtype), mask=mask)
    tl.store(to + 1, -SKEW * vz, mask=mask)
    tl.store(to + 2, SKEW * vy, mask=mask)
    tl.store(to + 3, -SKEW * vx, mask=mask)
    tl.store(to + 4, vx * vx - third, mask=mask)
    tl.store(to + 5, vx * vy, mask=mask)
    tl.store(to + 6, vx * vz, mask=mask)
    tl.store(to + 7, vy * vy - third, mask=mask)
    tl.store(to + 8, vy * vz, mask=mask)


@triton.jit
def _pull(
    out, rbf, envelope, geometry, r, rbf_slope, envelope_slope, num, SKEW: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [P, 3] = s u − (w − (w·v) v)/d with v = −u: dv/dr = −(1 − uuᵀ)/d.

    s is the sum of cotangents times slopes of the radial functions and the cutoff function, w = ∂⟨geometry,
    cotangent⟩/∂v without the trace, which changes along v alone. The row after the last pair depends on no r.
    """
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = p < num
    _, inverse, ux, uy, uz = _direction(r, p, num)
    k = tl.arange(0, BR)
    both = mask[:, None] & (k < R)[None, :]
    at = p[:, None] * R + k[None, :]
    along = tl.sum(tl.load(rbf + at, mask=both, other=0.0) * tl.load(rbf_slope + at, mask=both, other=0.0), 1)
    along += tl.load(envelope + p, mask=mask, other=0.0) * tl.load(envelope_slope + p, mask=mask, other=0.0)
    vx, vy, vz = -ux, -uy, -uz
    g = geometry + p * 9
    g1, g2 = tl.load(g + 1, mask=mask, other=0.0), tl.load(g + 2, mask=mask, other=0.0)
    g3, g4 = tl.load(g + 3, mask=mask, other=0.0), tl.load(g + 4, mask=mask, other=0.0)
    g5, g6 = tl.load(g + 5, mask=mask, other=0.0), tl.load(g + 6, mask=mask, other=0.0)
    g7, g8 = tl.load(g + 7, mask=mask, other=0.0), tl.load(g + 8, mask=mask, other=0.0)
    wx = -SKEW * g3 + 2 * vx * g4 + vy * g5 + vz * g6
    wy = SKEW * g2 + vx * g5 + 2 * vy * g7 + vz * g8
    wz = -SKEW * g1 + vx * g6 + vy * g8
    # v = −r/d: only changes across the vector turn it
    dot = vx * wx + vy * wy + vz * wz
    tl.store(out + p * 3, along * ux - (wx - dot * vx) * inverse, mask=mask)
    tl.store(out + p * 3 + 1, along * uy - (wy - dot * vy) * inverse, mask=mask)
    tl.store(out + p * 3 + 2, along * uz - (wz - dot * vz) * inverse, mask=mask)


@triton.jit
def _push(
    rbf, envelope, geometry, u, r, rbf_slope, envelope_slope, num, SKEW: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The transpose of `_pull`: changes of the values with a change u of r; 0 in the row after the last pair.

    Distances change by u along the pair, directions by u across it. The trace of vvᵀ, |v|², stays 1.
    """
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = p <= num
    real = p < num
    _, inverse, ux, uy, uz = _direction(r, p, num)
    x = tl.load(u + p * 3, mask=real, other=0.0)
    y = tl.load(u + p * 3 + 1, mask=real, other=0.0)
    z = tl.load(u + p * 3 + 2, mask=real, other=0.0)
    along = ux * x + uy * y + uz * z
    k = tl.arange(0, BR)
    both = mask[:, None] & (k < R)[None, :]
    at = p[:, None] * R + k[None, :]
    tl.store(rbf + at, along[:, None] * tl.load(rbf_slope + at, mask=both, other=0.0), mask=both)
    tl.store(envelope + p, along * tl.load(envelope_slope + p, mask=mask, other=0.0), mask=mask)
    vx, vy, vz = -ux, -uy, -uz
    dx, dy, dz = -(x - along * ux) * inverse, -(y - along * uy) * inverse, -(z - along * uz) * inverse
    to = geometry + p * 9
    tl.store(to, tl.zeros((BLOCK,), vx.dtype), mask=mask)
    tl.store(to + 1, -SKEW * dz, mask=mask)
    tl.store(to + 2, SKEW * dy, mask=mask)
    tl.store(to + 3, -SKEW * dx, mask=mask)
    tl.store(to + 4, 2 * vx * dx, mask=mask)
    tl.store(to + 5, vx * dy + vy * dx, mask=mask)
    tl.store(to + 6, vx * dz + vz * dx, mask=mask)
    tl.store(to + 7, 2 * vy * dy, mask=mask)
    tl.store(to + 8, vy * dz + vz * dy, mask=mask)
