"""Multilinear operations over pairs of atoms: messages.

Shapes: M atoms, P pairs (each unordered pair once), E directed edges, F features. Fields of 3×3 tensors are
[9, M, F], see node_ops.py. Filters are [P + 1, 3, F]: one row for each pair, the last one for an atom and itself.
There are no atomics: rows of edges are summed atom by atom, so that results are reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....triton_launch import FUSED_ARITHMETIC
from ....triton_or_none import tl, triton
from ...differentiable_ops import MultilinearOp
from ...pair_sums import Pairs
from .node_ops import times_parts

__all__ = ["Message", "edges_of_row", "gather_messages", "pair_atoms", "row_tile", "store_part_dots"]


class Message(MultilinearOp):
    """T(f, y, g) = Σ_i ⟨g_i, Σ_j f_ij y_j + f_self y_i⟩: each atom gathers the filtered tensors of its neighbors.

    Slots: f [P + 1, 3, F]; y, result and g [9, M, F].
    """

    directed = False  # whether each direction of a pair has a filter of its own

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
    """Grid and tile of a kernel that sums the edges of each atom."""
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
    """Σ over the edges of an atom of f y of the sender, and f_self y of its own.

    DIRECTED: each direction of a pair, and each atom with itself, has a filter of its own, in the order of edge_ops.py
    of TensorNet2; TURNED takes the filter of the other direction.
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
    mask = there[:, None] & inside
    tl.store(to, part_i, mask=mask)
    tl.store(to + F, part_a, mask=mask)
    tl.store(to + 2 * F, part_s, mask=mask)


@triton.jit
def _pair_dot(out, y, g, first, second, count, num, num_pairs, F: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr):
    """Gradient of the filters of pairs."""
    p, i, j, real = pair_atoms(first, second, count, num_pairs, BP)
    store_part_dots(out, y, g, p, j, i, num, real, p < num_pairs, True, F, BF)
