"""The operations of training_edges.py on the CPU, compiled by numba.

Importing it needs numba. Shapes as in training_edges.py. Rows of padding pairs are left unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensornet.training_numba import add, get, kernel, put, scale_parts
from . import training_edges as edge_ops

__all__ = ["EdgeSum", "Message"]


@kernel
def _messages(out, f, y, row_ptr, sender, pair, num_pairs, turned):
    """Σ over the edges of an atom of f y of the sender; turned: with the filters of the other direction."""
    for i in range(y.shape[1]):
        own = f[2 * num_pairs + i]
        for c in range(y.shape[2]):
            put(out, i, c, scale_parts(own[0, c], own[1, c], own[2, c], get(y, i, c)))
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j, p = sender[e], pair[e]
            back = (p < 0) != turned
            p = p if p >= 0 else -p - 1
            g = f[num_pairs + p if back else p]
            for c in range(y.shape[2]):
                put(out, i, c, add(get(out, i, c), scale_parts(g[0, c], g[1, c], g[2, c], get(y, j, c))))


@kernel
def _dot(out, y, g, first, second, count, num_pairs):
    """Gradient of the filters: y of the sender times g of the receiver, by parts."""
    num = y.shape[1]
    for k in range(2 * count[0] + num):
        if k < count[0]:
            e, i, j = k, first[k], second[k]
        elif k < 2 * count[0]:
            p = k - count[0]
            e, i, j = num_pairs + p, second[p], first[p]
        else:
            i = k - 2 * count[0]
            e, j = 2 * num_pairs + i, i
        for c in range(y.shape[2]):
            u, v = get(y, j, c), get(g, i, c)
            out[e, 0, c] = u[0] * v[0]
            out[e, 1, c] = u[1] * v[1] + u[2] * v[2] + u[3] * v[3]
            out[e, 2, c] = u[4] * v[4] + u[5] * v[5] + u[6] * v[6] + u[7] * v[7] + u[8] * v[8]


@kernel
def _spread(out, ab, first, second, count, num_pairs):
    """Add a of the receiver and b of the sender to the rows."""
    features = out.shape[1]
    for p in range(count[0]):
        i, j = first[p], second[p]
        for k in range(features):
            out[p, k] += ab[i, k] + ab[j, features + k]
            out[num_pairs + p, k] += ab[j, k] + ab[i, features + k]
    for i in range(ab.shape[0]):
        for k in range(features):
            out[2 * num_pairs + i, k] += ab[i, k] + ab[i, features + k]


@kernel
def _collect(out, h, row_ptr, pair, num_pairs):
    features = h.shape[1]
    for i in range(out.shape[0]):
        for k in range(features):
            out[i, k] = out[i, features + k] = h[2 * num_pairs + i, k]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            p = pair[e]
            mine, theirs = (p, num_pairs + p) if p >= 0 else (num_pairs - p - 1, -p - 1)
            for k in range(features):
                out[i, k] += h[mine, k]
                out[i, features + k] += h[theirs, k]


class EdgeSum(edge_ops.EdgeSum):
    def spread(self, t: Tensor, ab: Tensor) -> Tensor:
        pairs = self.pairs
        out = edge_ops.per_edge(t, pairs)
        ends = (x.numpy() for x in (ab, pairs.first, pairs.second, pairs.count))
        _spread(out.numpy(), *ends, pairs.num_pairs)
        return out

    def collect(self, h: Tensor) -> Tensor:
        pairs = self.pairs
        out = h.new_empty(pairs.num_atoms, 2 * h.shape[1])
        _collect(out.numpy(), h.numpy(), pairs.row_ptr.numpy(), pairs.pair.numpy(), pairs.num_pairs)
        return out


class Message(edge_ops.Message):
    def filter_gradient(self, y: Tensor, g: Tensor) -> Tensor:
        pairs = self.pairs
        out = y.new_zeros(2 * pairs.num_pairs + pairs.num_atoms, 3, y.shape[2])
        ends = (x.numpy() for x in (out, y, g, pairs.first, pairs.second, pairs.count))
        _dot(*ends, pairs.num_pairs)
        return out

    def gather(self, f: Tensor, other: Tensor, turned: bool) -> Tensor:
        pairs = self.pairs
        out = torch.empty_like(other)
        rows = (x.numpy() for x in (out, f, other, pairs.row_ptr, pairs.sender, pairs.pair))
        _messages(*rows, pairs.num_pairs, turned)
        return out
