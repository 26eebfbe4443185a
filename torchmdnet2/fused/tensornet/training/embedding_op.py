"""The embedding of TensorNet as a multilinear operation: tensors from the geometry of the pairs of atoms.

Shapes as in pair_ops.py.
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
from .pair_ops import edges_of_row, pair_atoms, row_tile

__all__ = ["Embedding"]


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
    """Gradients of a and b of an atom: from its own row, and from its neighbors' rows."""
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
    """Gradient of the filters of pairs."""
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
    """Gradient of the geometry of pairs."""
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
