"""Operations with derivatives of every order: multilinear ones, and functions of one tensor.

Training on forces differentiates the network twice. The operations of TensorNet between its matrix products are
multilinear: with a cotangent g of the result, T(a, b, …, g) is linear in each argument, and the result is ∂T/∂g.
The gradient of ∂T/∂(slot k) with cotangent u is ∂T/∂(slot l) with u in slot k. Only the partial derivatives of T are
therefore needed: first, second and higher derivatives run on the same kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.triton_launch import FUSED_ARITHMETIC, tl, triton

__all__ = ["MultilinearOp", "PairSum", "Pairs", "SegmentSum", "UnaryOp", "one_hot"]


class MultilinearOp(ABC):
    """T(slot 0, slot 1, …), linear in each slot; the last slot stands for the cotangent of the result.

    Index tensors and other constants are attributes. On a CUDA device the partial derivatives run as kernels, on
    others as the plain expression `reference`, which is the specification.

    Attributes:
        fixed: slots whose derivatives are not needed now. Autograd does not say so to a Python function, which would
            compute ∂T/∂(weights) for forces too.
    """

    use_kernels: bool
    fixed: frozenset[int] = frozenset()

    def __call__(self, *slots: Tensor) -> Tensor:
        """∂T/∂(last slot) at the other slots, differentiable any number of times."""
        if not self.use_kernels:
            return self.reference(*slots)
        return self.derivative(len(slots), *slots, None)

    def derivative(self, slot: int, *slots: Tensor | None) -> Tensor:
        """∂T/∂(slot) by a kernel, differentiable; the entry of `slots` at `slot` is None."""
        return _Partial.apply(self, slot, *(s if s is None else s.contiguous() for s in slots))

    @abstractmethod
    def reference(self, *slots: Tensor) -> Tensor:
        """∂T/∂(last slot) in plain PyTorch."""

    @abstractmethod
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        """∂T/∂(slot) by a kernel; the entry of `slots` at `slot` is None, the others are contiguous."""


class _Partial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: MultilinearOp, slot: int, *slots: Tensor | None) -> Tensor:
        ctx.op, ctx.slot = op, slot
        ctx.save_for_backward(*(s for k, s in enumerate(slots) if k != slot))
        return op.partial(slot, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slots = list(ctx.saved_tensors)
        slots.insert(ctx.slot, gradients[0])
        return (
            None,
            None,
            *(
                ctx.op.derivative(k, *slots[:k], None, *slots[k + 1 :])
                if k != ctx.slot and k not in ctx.op.fixed and ctx.needs_input_grad[k + 2]
                else None
                for k in range(len(slots))
            ),
        )


class UnaryOp(ABC):
    """A function of one tensor that is not multilinear, given with its first and second derivative."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return its value, twice differentiable."""
        return _Value.apply(self, x.contiguous())

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """f(x)."""

    @abstractmethod
    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """∂⟨g, f(x)⟩/∂x."""

    @abstractmethod
    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """∂⟨u, gradient(x, g)⟩/∂x and ∂/∂g."""


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: UnaryOp, x: Tensor) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(x)
        return op.value(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _Gradient.apply(ctx.op, ctx.saved_tensors[0], gradients[0].contiguous())


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: UnaryOp, x: Tensor, g: Tensor) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(x, g)
        return op.gradient(x, g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, *ctx.op.second(*ctx.saved_tensors, u.contiguous())


# --- Pairs of atoms in a training batch, and sums over the pairs of an atom or the rows of a structure ---


@dataclass(eq=False)
class Pairs:
    """Which atoms are paired, both as pairs and as rows of directed edges.

    Attributes:
        first, second: [P] atoms of each pair; its vector points from the first to the second.
        count: [1] number of pairs; further entries are padding, and are in no row.
        row_ptr: [M + 1]; the edges of atom i are row_ptr[i] … row_ptr[i+1] − 1.
        sender: [≥ E] the other atom of each edge.
        pair: [≥ E] its pair p where the edge's receiver is the first atom, −p − 1 where it is the second.
    """

    first: Tensor
    second: Tensor
    count: Tensor
    row_ptr: Tensor
    sender: Tensor
    pair: Tensor

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.first.shape[0]

    @property
    def num_atoms(self) -> int:
        """M."""
        return self.row_ptr.shape[0] - 1

    def real(self) -> Tensor:
        """[P] 1.0 for pairs, 0.0 for padding."""
        return (torch.arange(self.num_pairs, device=self.first.device) < self.count).double()


class PairSum(MultilinearOp):
    """T(v, h) = Σ_p v_p · (h_first − h_second): each atom gets the pairs it is first in, minus those it is second in.

    Slots: v [P, D]; result and h [M, D].
    """

    def __init__(self, pairs: Pairs, use_kernels: bool):
        self.pairs, self.use_kernels = pairs, use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        (v,) = slots
        pairs = self.pairs
        v = v * pairs.real().to(v.dtype)[:, None]
        zeros = v.new_zeros(pairs.num_atoms, v.shape[1])
        return zeros.index_add(0, pairs.first.long(), v).index_add(0, pairs.second.long(), -v)

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        v, h = slots
        pairs = self.pairs
        if slot == 0:
            assert h is not None
            return h.index_select(0, pairs.first) - h.index_select(0, pairs.second)
        assert v is not None
        out = v.new_empty(pairs.num_atoms, v.shape[1])
        grid = (triton.cdiv(pairs.num_atoms, 16),)
        _pair_sum[grid](
            out, v, pairs.row_ptr, pairs.pair, pairs.num_atoms, D=v.shape[1], BM=16, BD=4, **FUSED_ARITHMETIC
        )
        return out


class SegmentSum(MultilinearOp):
    """T(v, h) = Σ_s h_s · Σ_{k in segment s} v_k: sums of rows of consecutive atoms or pairs.

    Args:
        ptr: [S + 1]; segment s is rows ptr[s] … ptr[s+1] − 1.
        segment: [K] the segment of each row; S or more for rows in none.

    Slots: v [K, D]; result and h [S, D].
    """

    def __init__(self, ptr: Tensor, segment: Tensor, use_kernels: bool):
        self.ptr, self.segment, self.use_kernels = ptr, segment, use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        (v,) = slots
        num = self.ptr.shape[0] - 1
        total = v.new_zeros(num + 1, v.shape[1]).index_add(0, self.segment.long().clamp(max=num), v)
        return total[:num]

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        v, h = slots
        num = self.ptr.shape[0] - 1
        if slot == 0:
            assert h is not None
            padded = torch.cat([h, h.new_zeros(1, h.shape[1])])
            return padded.index_select(0, self.segment.clamp(max=num))
        assert v is not None
        out = v.new_empty(num, v.shape[1])
        width = triton.next_power_of_2(v.shape[1])
        _segment_sum[(num,)](out, v, self.ptr, D=v.shape[1], BD=width, BLOCK=128, **FUSED_ARITHMETIC)
        return out


def one_hot(element: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """[M, K]; a matrix product with it, unlike a gather, has a gradient without atomics."""
    return (element[:, None] == torch.arange(num, device=element.device)).to(dtype)


@triton.jit
def _pair_sum(out, v, row_ptr, pair, num, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Σ over the edges of an atom of ± v of the pair: + where the atom is the first."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    start = tl.load(row_ptr + i, mask=i < num, other=0)
    stop = tl.load(row_ptr + i + 1, mask=i < num, other=0)
    total = tl.zeros((BM, BD), v.dtype.element_ty)
    for k in range(0, tl.max(stop - start)):
        here = start + k < stop
        p = tl.load(pair + start + k, mask=here, other=0)
        turned = p < 0
        p = tl.where(turned, -p - 1, p).to(tl.int64)
        x = tl.load(v + p[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        total += tl.where(turned[:, None], -x, x)
    at = i.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + at, total, mask=(i < num)[:, None] & (d < D)[None, :])


@triton.jit
def _segment_sum(out, v, ptr, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.program_id(0)
    d = tl.arange(0, BD)
    stop = tl.load(ptr + s + 1)
    total = tl.zeros((BD,), v.dtype.element_ty)
    for start in range(tl.load(ptr + s), stop, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (k < stop)[:, None] & (d < D)[None, :]
        total += tl.sum(tl.load(v + k.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0), 0)
    tl.store(out + s * D + d, total, mask=d < D)
