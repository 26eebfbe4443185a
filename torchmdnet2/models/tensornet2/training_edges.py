"""Operations over edges whose filters depend on the charges of both atoms, so that the two directions of a pair differ.

Shapes: M atoms, P pairs, F features. There is a row for each direction of each pair and for each atom with itself,
D = 2 P + M in all: in rows 0 … P − 1 the first atom of a pair receives, in P … 2 P − 1 the second; then the atoms. Rows
of padding pairs receive nothing. As in TensorNet's training_pairs.py there are no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.triton_launch import FUSED_ARITHMETIC, tl, triton
from ...kernels.pair_ops import Pairs
from ..tensornet import training_pairs as pair_ops
from ..tensornet.training_atoms import times_parts
from ..tensornet.training_pairs import edges_of_row, row_tile, store_part_dots

__all__ = ["EdgeSum", "Message", "per_edge"]


def per_edge(x: Tensor, pairs: Pairs) -> Tensor:
    """Return values of pairs, and of an atom with itself, on all rows: [P + 1, …] to [D, …]."""
    of_pairs, own = x.split((pairs.num_pairs, 1))
    return torch.cat([of_pairs, of_pairs, own.expand(pairs.num_atoms, *own.shape[1:])])


def _per_pair(x: Tensor, pairs: Pairs) -> Tensor:
    """Return the transpose of `per_edge`."""
    one, other, own = x.split((pairs.num_pairs, pairs.num_pairs, pairs.num_atoms))
    return torch.cat([one + other, own.sum(0, keepdim=True)])


class EdgeSum:
    """t, a, b ↦ t_p + a_i + b_j on each row, i being the receiver and j the sender; linear, any derivative.

    Rows of padding pairs have t only.
    """

    def __init__(self, pairs: Pairs, use_kernels: bool):
        self.pairs, self.use_kernels = pairs, use_kernels

    def __call__(self, t: Tensor, ab: Tensor) -> Tensor:
        """[P + 1, F] of the pairs, (a, b) [M, 2 F] of the atoms → [D, F]."""
        return _Spread.apply(self, t, ab) if self.use_kernels else self.reference(t, ab)

    def reference(self, t: Tensor, ab: Tensor) -> Tensor:
        """Return the sum in plain PyTorch."""
        pairs = self.pairs
        a, b = ab.chunk(2, 1)
        first, second, real = pairs.first.long(), pairs.second.long(), pairs.real().to(t.dtype)[:, None]
        one = (a.index_select(0, first) + b.index_select(0, second)) * real
        other = (a.index_select(0, second) + b.index_select(0, first)) * real
        return per_edge(t, pairs) + torch.cat([one, other, a + b])

    def spread(self, t: Tensor, ab: Tensor) -> Tensor:
        """Return the sum by a kernel."""
        pairs, features = self.pairs, t.shape[1]
        out = t.new_empty(2 * pairs.num_pairs + pairs.num_atoms, features)
        _spread[(triton.cdiv(out.shape[0], 4),)](
            out, t, ab, pairs.first, pairs.second, pairs.count, pairs.num_atoms, pairs.num_pairs, F=features, BE=4,
            BF=triton.next_power_of_2(features), **FUSED_ARITHMETIC,
        )  # fmt: skip
        return out

    def collect(self, h: Tensor) -> Tensor:
        """Return sums of rows [D, F] over what an atom receives and what it sends, by a kernel: [M, 2 F]."""
        pairs = self.pairs
        out = h.new_empty(pairs.num_atoms, 2 * h.shape[1])
        grid, tile = row_tile(pairs.num_atoms, h.shape[1])
        _collect[grid](out, h, pairs.row_ptr, pairs.sender, pairs.pair, pairs.num_pairs, **tile)
        return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: EdgeSum, t: Tensor, ab: Tensor) -> Tensor:
        ctx.op = op
        return op.spread(t.contiguous(), ab.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, *_Collect.apply(ctx.op, gradients[0])


class _Collect(torch.autograd.Function):
    """The transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, op: EdgeSum, h: Tensor) -> tuple[Tensor, Tensor]:
        ctx.op = op
        h = h.contiguous()
        return _per_pair(h, op.pairs), op.collect(h)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _Spread.apply(ctx.op, *gradients)


class Message(pair_ops.Message):
    """T(f, y, g) = Σ_i ⟨g_i, Σ_j f_ij y_j + f_ii y_i⟩ with filters of edges.

    Slots: f [D, 3, F]; y, result and g [9, M, F].
    """

    directed = True  # what a sender gets back comes through the filters of the other direction

    def reference(self, *slots: Tensor) -> Tensor:
        f, y = slots
        pairs = self.pairs
        sizes = (pairs.num_pairs, pairs.num_pairs, pairs.num_atoms)
        to_first, to_second, own = f.transpose(0, 1).split(sizes, 1)
        real = pairs.real().to(f.dtype)[:, None]
        first, second = pairs.first.long(), pairs.second.long()
        m = times_parts(y, own)
        m = m.index_add(1, first, times_parts(y.index_select(1, second), to_first * real))
        return m.index_add(1, second, times_parts(y.index_select(1, first), to_second * real))

    def filter_gradient(self, y: Tensor, g: Tensor) -> Tensor:
        pairs = self.pairs
        num, features = y.shape[1:]
        out = y.new_empty(2 * pairs.num_pairs + num, 3, features)
        _edge_dot[(triton.cdiv(out.shape[0], 4),)](
            out, y, g, pairs.first, pairs.second, pairs.count, num, pairs.num_pairs, F=features, BE=4,
            BF=triton.next_power_of_2(features), **FUSED_ARITHMETIC,
        )  # fmt: skip
        return out


@triton.jit
def _ends(first, second, count, num, num_pairs, BE: tl.constexpr):
    """Rows, receivers and senders, pairs (P: an atom with itself), which are real, and which there are."""
    pairs = num_pairs.to(tl.int64)
    e = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    there = e < 2 * pairs + num
    own = e >= 2 * pairs
    back = (e >= pairs) & (e < 2 * pairs)
    p = tl.where(back, e - pairs, tl.where(own, pairs, e))
    a = tl.load(first + p, mask=there & (p < pairs), other=0).to(tl.int64)
    b = tl.load(second + p, mask=there & (p < pairs), other=0).to(tl.int64)
    atom = tl.where(own & there, e - 2 * pairs, 0)
    i = tl.where(own, atom, tl.where(back, b, a))
    j = tl.where(own, atom, tl.where(back, a, b))
    return e, i, j, p, there & (own | (p < tl.load(count))), there


@triton.jit
def _spread(
    out, t, ab, first, second, count, num, num_pairs, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    e, i, j, p, real, there = _ends(first, second, count, num, num_pairs, BE)
    k = tl.arange(0, BF)
    inside = (k < F)[None, :]
    mask = there[:, None] & inside
    x = tl.load(t + p[:, None] * F + k[None, :], mask=mask, other=0.0)
    x += tl.load(ab + (i * (2 * F))[:, None] + k[None, :], mask=real[:, None] & inside, other=0.0)
    x += tl.load(ab + (j * (2 * F) + F)[:, None] + k[None, :], mask=real[:, None] & inside, other=0.0)
    tl.store(out + e[:, None] * F + k[None, :], x, mask=mask)


@triton.jit
def _collect(out, h, row_ptr, sender, pair, num_pairs, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = k < F
    pairs = num_pairs.to(tl.int64)
    received = tl.load(h + (2 * pairs + i) * F + k, mask=inside, other=0.0)
    sent = received
    stop = tl.load(row_ptr + i + 1)
    for start in range(tl.load(row_ptr + i), stop, BE):
        here, _, p, sign = edges_of_row(sender, pair, start + tl.arange(0, BE), stop)
        mask = here[:, None] & inside[None, :]
        mine, theirs = tl.where(sign < 0, p + pairs, p), tl.where(sign < 0, p, p + pairs)
        received += tl.sum(tl.load(h + mine[:, None] * F + k[None, :], mask=mask, other=0.0), 0)
        sent += tl.sum(tl.load(h + theirs[:, None] * F + k[None, :], mask=mask, other=0.0), 0)
    tl.store(out + i * (2 * F) + k, received, mask=inside)
    tl.store(out + i * (2 * F) + F + k, sent, mask=inside)


@triton.jit
def _edge_dot(
    out, y, g, first, second, count, num, num_pairs, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """Gradient of the filters of edges: y of the sender times g of the receiver."""
    e, i, j, _, real, there = _ends(first, second, count, num, num_pairs, BE)
    store_part_dots(out, y, g, e, j, i, num, real, there, False, F, BF)
