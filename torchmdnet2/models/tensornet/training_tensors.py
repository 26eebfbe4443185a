"""Functions of tensors that are not multilinear, with first and second derivative: one kernel for each order.

Shapes: M atoms, F features; fields of tensors are nine components [9, M, F], see training_atoms.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.triton_launch import FUSED_ARITHMETIC, tl, triton
from .training_atoms import BLOCK, load9, places, store9
from .triton_algebra import (
    anticommutator,
    anticommutator_adjoint,
    compose,
    compose_adjoint,
    decompose,
    decompose_adjoint,
    norm_gradient,
    squared_norm,
)

__all__ = ["add_square", "normalise"]


def normalise(x: Tensor) -> Tensor:
    """X/(‖X‖² + 1) of [9, M, F], twice differentiable."""
    return _Normalise.apply(x.contiguous())


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        num = x[0].numel()
        _normalise[(triton.cdiv(num, BLOCK),)](out, x, num, BLOCK=BLOCK, **FUSED_ARITHMETIC)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _NormaliseGradient.apply(ctx.saved_tensors[0], gradients[0].contiguous())


class _NormaliseGradient(torch.autograd.Function):
    """s g − 2 s² ⟨x, g⟩ W x with s = 1/(‖x‖² + 1), ‖x‖² = xᵀ W x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(x, g)
        out = torch.empty_like(x)
        num = x[0].numel()
        _normalise_gradient[(triton.cdiv(num, BLOCK),)](out, x, g, num, BLOCK=BLOCK, **FUSED_ARITHMETIC)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        x, g = ctx.saved_tensors
        dx, dg = torch.empty_like(x), torch.empty_like(x)
        num = x[0].numel()
        _normalise_second[(triton.cdiv(num, BLOCK),)](
            dx, dg, x, g, u.contiguous(), num, BLOCK=BLOCK, **FUSED_ARITHMETIC
        )
        return dx, dg


def add_square(x: Tensor, d: Tensor, q: Tensor) -> Tensor:
    """X + D + q D² of [9, M, F] with q [M], twice differentiable in x and d."""
    return _AddSquare.apply(x.contiguous(), d.contiguous(), q.contiguous())


class _AddSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, d: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(d, q)
        out = torch.empty_like(d)
        num = d[0].numel()
        _add_square[(triton.cdiv(num, BLOCK),)](out, x, d, q, num, F=d.shape[2], BLOCK=BLOCK, **FUSED_ARITHMETIC)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (g,) = gradients
        return g, _AddSquareGradient.apply(*ctx.saved_tensors, g.contiguous()), None


class _AddSquareGradient(torch.autograd.Function):
    """G + q (Dᵀ G + G Dᵀ) in components: the gradient of D from that of X + D + q D²."""

    @staticmethod
    def forward(ctx: Any, d: Tensor, q: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(d, q, g)
        out = torch.empty_like(d)
        num = d[0].numel()
        _add_square_gradient[(triton.cdiv(num, BLOCK),)](
            out, d, q, g, num, F=d.shape[2], BLOCK=BLOCK, **FUSED_ARITHMETIC
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, Tensor]:
        d, q, g = ctx.saved_tensors
        dd, dg = torch.empty_like(d), torch.empty_like(d)
        num = d[0].numel()
        _add_square_second[(triton.cdiv(num, BLOCK),)](
            dd, dg, d, q, g, u.contiguous(), num, F=d.shape[2], BLOCK=BLOCK, **FUSED_ARITHMETIC
        )
        return dd, None, dg


@triton.jit
def _normalise(out, x, num, BLOCK: tl.constexpr):
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    s = 1 / (squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8) + 1)
    store9(out, at, num, mask, s * x0, s * x1, s * x2, s * x3, s * x4, s * x5, s * x6, s * x7, s * x8)


@triton.jit
def _dot(x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8):
    return x0 * g0 + x1 * g1 + x2 * g2 + x3 * g3 + x4 * g4 + x5 * g5 + x6 * g6 + x7 * g7 + x8 * g8


@triton.jit
def _normalise_gradient(out, x, g, num, BLOCK: tl.constexpr):
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(g, at, num, mask)
    s = 1 / (squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8) + 1)
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = norm_gradient(x0, x1, x2, x3, x4, x5, x6, x7, x8)  # 2 W x
    b = s * s * _dot(x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    store9(
        out, at, num, mask, s * g0 - b * w0, s * g1 - b * w1, s * g2 - b * w2, s * g3 - b * w3, s * g4 - b * w4,
        s * g5 - b * w5, s * g6 - b * w6, s * g7 - b * w7, s * g8 - b * w8,
    )  # fmt: skip


@triton.jit
def _normalise_second(dx, dg, x, g, u, num, BLOCK: tl.constexpr):
    """Gradients of ⟨u, s g − s² ⟨x, g⟩ w⟩ with w = 2 W x:

    of g: s u − s² ⟨u, w⟩ x;
    of x: −s² ⟨u, g⟩ w + 2 s³ ⟨x, g⟩ ⟨u, w⟩ w − s² (⟨u, w⟩ g + ⟨x, g⟩ 2 W u).
    """
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(g, at, num, mask)
    u0, u1, u2, u3, u4, u5, u6, u7, u8 = load9(u, at, num, mask)
    s = 1 / (squared_norm(x0, x1, x2, x3, x4, x5, x6, x7, x8) + 1)
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = norm_gradient(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    uw = _dot(u0, u1, u2, u3, u4, u5, u6, u7, u8, w0, w1, w2, w3, w4, w5, w6, w7, w8)
    b = s * s * uw
    store9(
        dg, at, num, mask, s * u0 - b * x0, s * u1 - b * x1, s * u2 - b * x2, s * u3 - b * x3, s * u4 - b * x4,
        s * u5 - b * x5, s * u6 - b * x6, s * u7 - b * x7, s * u8 - b * x8,
    )  # fmt: skip
    xg = _dot(x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    ug = _dot(u0, u1, u2, u3, u4, u5, u6, u7, u8, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    a = s * s * (2 * s * xg * uw - ug)
    c = -s * s * xg
    v0, v1, v2, v3, v4, v5, v6, v7, v8 = norm_gradient(u0, u1, u2, u3, u4, u5, u6, u7, u8)
    store9(
        dx, at, num, mask, a * w0 - b * g0 + c * v0, a * w1 - b * g1 + c * v1, a * w2 - b * g2 + c * v2,
        a * w3 - b * g3 + c * v3, a * w4 - b * g4 + c * v4, a * w5 - b * g5 + c * v5, a * w6 - b * g6 + c * v6,
        a * w7 - b * g7 + c * v7, a * w8 - b * g8 + c * v8,
    )  # fmt: skip


@triton.jit
def _symmetric(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    """Components of A B + B A from those of A and B."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose(a0, a1, a2, a3, a4, a5, a6, a7, a8)
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = compose(b0, b1, b2, b3, b4, b5, b6, b7, b8)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = anticommutator(
        a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
    )
    return decompose(r0, r1, r2, r3, r4, r5, r6, r7, r8)


@triton.jit
def _symmetric_adjoint(a0, a1, a2, a3, a4, a5, a6, a7, a8, g0, g1, g2, g3, g4, g5, g6, g7, g8):
    """Gradient of the components of B from the gradient g of those of A B + B A."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose(a0, a1, a2, a3, a4, a5, a6, a7, a8)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = decompose_adjoint(g0, g1, g2, g3, g4, g5, g6, g7, g8)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = anticommutator_adjoint(
        g0, g1, g2, g3, g4, g5, g6, g7, g8, a0, a1, a2, a3, a4, a5, a6, a7, a8
    )
    return compose_adjoint(r0, r1, r2, r3, r4, r5, r6, r7, r8)


@triton.jit
def _add9(out, at, num, mask, q, b0, b1, b2, b3, b4, b5, b6, b7, b8, r0, r1, r2, r3, r4, r5, r6, r7, r8):
    store9(
        out, at, num, mask, b0 + q * r0, b1 + q * r1, b2 + q * r2, b3 + q * r3, b4 + q * r4, b5 + q * r5, b6 + q * r6,
        b7 + q * r7, b8 + q * r8,
    )  # fmt: skip


@triton.jit
def _add_square(out, x, d, q, num, F: tl.constexpr, BLOCK: tl.constexpr):
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9(d, at, num, mask)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = _symmetric(
        d0, d1, d2, d3, d4, d5, d6, d7, d8, d0, d1, d2, d3, d4, d5, d6, d7, d8
    )
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    half = 0.5 * tl.load(q + at // F, mask=mask)
    _add9(
        out, at, num, mask, half, x0 + d0, x1 + d1, x2 + d2, x3 + d3, x4 + d4, x5 + d5, x6 + d6, x7 + d7, x8 + d8,
        r0, r1, r2, r3, r4, r5, r6, r7, r8,
    )  # fmt: skip


@triton.jit
def _add_square_gradient(out, d, q, g, num, F: tl.constexpr, BLOCK: tl.constexpr):
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9(d, at, num, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(g, at, num, mask)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = _symmetric_adjoint(
        d0, d1, d2, d3, d4, d5, d6, d7, d8, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    factor = tl.load(q + at // F, mask=mask)
    _add9(
        out, at, num, mask, factor, g0, g1, g2, g3, g4, g5, g6, g7, g8, r0, r1, r2, r3, r4, r5, r6, r7, r8
    )  # fmt: skip


@triton.jit
def _add_square_second(dd, dg, d, q, g, u, num, F: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of ⟨u, g + q (Dᵀ G + G Dᵀ)⟩: of g, u + q (D U + U D); of d, q (Uᵀ G + G Uᵀ)."""
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = load9(d, at, num, mask)
    u0, u1, u2, u3, u4, u5, u6, u7, u8 = load9(u, at, num, mask)
    factor = tl.load(q + at // F, mask=mask)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = _symmetric(
        d0, d1, d2, d3, d4, d5, d6, d7, d8, u0, u1, u2, u3, u4, u5, u6, u7, u8
    )
    _add9(
        dg, at, num, mask, factor, u0, u1, u2, u3, u4, u5, u6, u7, u8, r0, r1, r2, r3, r4, r5, r6, r7, r8
    )  # fmt: skip
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(g, at, num, mask)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = _symmetric_adjoint(
        u0, u1, u2, u3, u4, u5, u6, u7, u8, g0, g1, g2, g3, g4, g5, g6, g7, g8
    )
    store9(
        dd, at, num, mask, factor * r0, factor * r1, factor * r2, factor * r3, factor * r4, factor * r5, factor * r6,
        factor * r7, factor * r8,
    )  # fmt: skip
