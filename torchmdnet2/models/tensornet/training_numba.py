"""The training operations of TensorNet on the CPU, for O(3): those of node_ops.py, tensor_ops.py, pair_ops.py and
embedding_op.py with the kernels of numba_kernels.py.

Importing it needs numba. Shapes: M atoms, P pairs, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.pair_ops import UnaryOp
from . import training_atoms as node_ops
from . import training_numba_kernels as numba_kernels
from . import training_pairs as embedding_op
from . import training_pairs as pair_ops

__all__ = ["Embedding", "Inner", "Message", "Product", "Scale", "add_square", "normalise", "silu"]


def _run(kernel: Any, *tensors: Tensor) -> None:
    kernel(*(t.numpy() for t in tensors))


def _filled(kernel: Any, x: Tensor, *others: Tensor) -> Tensor:
    """What a kernel writes, shaped as x."""
    out = torch.empty_like(x)
    _run(kernel, out, x, *others)
    return out


def _both(kernel: Any, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """The two results of a kernel, shaped as x."""
    one, other = torch.empty_like(x), torch.empty_like(x)
    _run(kernel, one, other, x, *others)
    return one, other


class Inner(node_ops.Inner):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        a, b = (s for k, s in enumerate(slots) if k != slot)
        assert a is not None and b is not None
        out = torch.empty_like(a[:3] if slot == 2 else a)
        _run(numba_kernels.inner if slot == 2 else numba_kernels.inner_adjoint, out, a, b)
        return out


class Scale(node_ops.Scale):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        x, s, g = slots
        if slot == 1:
            assert x is not None and g is not None
            out = torch.empty_like(x[:3])
            _run(numba_kernels.part_dots, out, x, g)
            return out
        other = x if slot == 2 else g
        assert other is not None and s is not None
        return _filled(numba_kernels.scaled, other, s)


class Product(node_ops.Product):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        a, b = (s for k, s in enumerate(slots) if k != slot)
        assert a is not None and b is not None
        return _filled(numba_kernels.product if slot == 2 else numba_kernels.product_adjoint, a, b, self.q)


class Message(pair_ops.Message):
    def filter_gradient(self, y: Tensor, g: Tensor) -> Tensor:
        pairs = self.pairs
        out = y.new_zeros(pairs.num_pairs + 1, 3, y.shape[2])
        _run(numba_kernels.pair_dot, out, y, g, pairs.first, pairs.second, pairs.count)
        own = torch.linalg.vecdot(y, g, dim=1)
        out[-1] = torch.stack([own[0], own[1:4].sum(0), own[4:].sum(0)])
        return out

    def gather(self, f: Tensor, other: Tensor, turned: bool) -> Tensor:
        pairs = self.pairs
        out = torch.empty_like(other)
        _run(numba_kernels.message, out, f, other, pairs.row_ptr, pairs.sender, pairs.pair)
        return out


class Embedding(embedding_op.Embedding):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        f, c, z, g = (torch.empty(0) if s is None else s for s in slots)
        pairs = self.pairs
        rows = pairs.row_ptr, pairs.sender, pairs.pair
        ends = pairs.first, pairs.second, pairs.count
        if slot == 3:
            out = f.new_empty(9, pairs.num_atoms, f.shape[2])
            _run(numba_kernels.embed, out, f, c, z, *rows)
        elif slot == 2:
            out = f.new_empty(pairs.num_atoms, 2 * f.shape[2])
            _run(numba_kernels.embed_atoms, out, f, c, g, *rows)
        else:
            out = g.new_zeros(pairs.num_pairs + 1, *((9,) if slot == 1 else (3, g.shape[2])))
            if slot == 1:
                _run(numba_kernels.embed_geometry, out, f, z, g, *ends)
            else:
                _run(numba_kernels.embed_filters, out, c, z, g, *ends)
            own = embedding_op.own_embedding(z, g)
            out[-1, 0] = torch.dot(f[-1, 0], own) if slot == 1 else c[-1, 0] * own
        return out


class _Normalise(UnaryOp):
    def value(self, x: Tensor) -> Tensor:
        return _filled(numba_kernels.normalise, x)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return _filled(numba_kernels.normalise_gradient, x, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return _both(numba_kernels.normalise_second, x, g, u)


class _Square(UnaryOp):
    """D + q D²."""

    def __init__(self, q: Tensor):
        self.q = q.contiguous()

    def value(self, x: Tensor) -> Tensor:
        return _filled(numba_kernels.add_square, x, self.q)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return _filled(numba_kernels.add_square_gradient, x, self.q, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return _both(numba_kernels.add_square_second, x, self.q, g, u)


class _Silu(UnaryOp):
    def value(self, x: Tensor) -> Tensor:
        self.logistic = torch.sigmoid(x)
        return x * self.logistic

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return _filled(numba_kernels.silu_gradient, x, self.logistic, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return _both(numba_kernels.silu_second, x, self.logistic, g, u)


def normalise(x: Tensor) -> Tensor:
    """X/(‖X‖² + 1) of [9, M, F], twice differentiable."""
    return _Normalise()(x)


def add_square(x: Tensor, d: Tensor, q: Tensor) -> Tensor:
    """X + D + q D² of [9, M, F] with q [M], twice differentiable in x and d."""
    return x + _Square(q)(d)


def silu(x: Tensor) -> Tensor:
    """x σ(x) for rows [P, C], twice differentiable."""
    return _Silu()(x)
