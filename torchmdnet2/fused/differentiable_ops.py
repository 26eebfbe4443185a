"""Operations with derivatives of every order: multilinear ones, and functions of one tensor.

Training on forces differentiates the network twice. The operations of TensorNet between its matrix products are
multilinear: with a cotangent g of the result, T(a, b, …, g) is linear in each argument, and the result is ∂T/∂g.
The gradient of ∂T/∂(slot k) with cotangent u is ∂T/∂(slot l) with u in slot k. Only the partial derivatives of T are
therefore needed: first, second and higher derivatives run on the same kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["MultilinearOp", "UnaryOp"]


class MultilinearOp(ABC):
    """T(slot 0, slot 1, …), linear in each slot; the last slot stands for the cotangent of the result.

    Index tensors and other constants are attributes. On a CUDA device the partial derivatives run as kernels, on
    others as the plain expression `reference`, which is the specification.

    Attributes:
        fixed: slots of which nobody wants a derivative now. Autograd does not tell a Python function what a gradient is
            asked for, and ∂T/∂(weights) would be computed for forces too.
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
        """Its value, twice differentiable."""
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
