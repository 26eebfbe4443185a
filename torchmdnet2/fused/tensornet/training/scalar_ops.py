"""SiLU and filters with first and second derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....triton_launch import FUSED_ARITHMETIC
from ....triton_or_none import tl, triton

__all__ = ["enveloped", "silu"]

_BLOCK = 1024


def silu(x: Tensor) -> Tensor:
    """x σ(x) for tensors of any shape, differentiable twice; one kernel for each derivative."""
    return _Silu.apply(x.contiguous())


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SiluGradient.apply(ctx.saved_tensors[0], gradients[0].contiguous())


class _SiluGradient(torch.autograd.Function):
    """g f'(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(x, g)
        out = torch.empty_like(x)
        _silu_gradient[(triton.cdiv(x.numel(), _BLOCK),)](out, x, g, x.numel(), BLOCK=_BLOCK, **FUSED_ARITHMETIC)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        x, g = ctx.saved_tensors
        u = u.contiguous()
        dx, dg = torch.empty_like(x), torch.empty_like(x)
        _silu_second[(triton.cdiv(x.numel(), _BLOCK),)](dx, dg, x, g, u, x.numel(), BLOCK=_BLOCK, **FUSED_ARITHMETIC)
        return dx, dg


def enveloped(x: Tensor, envelope: Tensor, activate: bool) -> Tensor:
    """SiLU(x) or x, times a factor of each row: [P, C] and [P] to [P, C], twice differentiable."""
    return _Enveloped.apply(x.contiguous(), envelope.contiguous(), activate)


def _rows(kernel: Any, x: Tensor, activate: bool, *tensors: Tensor) -> None:
    columns = x.shape[1]
    width = triton.next_power_of_2(columns)
    kernel[(x.shape[0],)](*tensors, C=columns, BC=width, ACTIVATE=activate, num_warps=2, **FUSED_ARITHMETIC)


class _Enveloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, e: Tensor, activate: bool) -> Tensor:
        ctx.save_for_backward(x, e)
        ctx.activate = activate
        out = torch.empty_like(x)
        _rows(_enveloped, x, activate, out, x, e)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_EnvelopedGradient.apply(*ctx.saved_tensors, gradients[0].contiguous(), ctx.activate), None


class _EnvelopedGradient(torch.autograd.Function):
    """g e f'(x) and Σ g f(x) over the columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, e: Tensor, g: Tensor, activate: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, e, g)
        ctx.activate = activate
        dx, de = torch.empty_like(x), torch.empty_like(e)
        _rows(_enveloped_gradient, x, activate, dx, de, x, e, g)
        return dx, de

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, e, g = ctx.saved_tensors
        dx, de, dg = torch.empty_like(x), torch.empty_like(e), torch.empty_like(x)
        _rows(_enveloped_second, x, ctx.activate, dx, de, dg, x, e, g, u.contiguous(), v.contiguous())
        return dx, de, dg, None


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu_gradient(out, x, g, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    v = tl.load(x + at, mask=mask)
    s = _sigmoid(v)
    tl.store(out + at, tl.load(g + at, mask=mask) * s * (1 + v * (1 - s)), mask=mask)


@triton.jit
def _silu_second(dx, dg, x, g, u, num, BLOCK: tl.constexpr):
    """From the cotangent u of g f'(x): u g f''(x) and u f'(x)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    v = tl.load(x + at, mask=mask)
    cotangent = tl.load(u + at, mask=mask)
    s = _sigmoid(v)
    tl.store(dg + at, cotangent * s * (1 + v * (1 - s)), mask=mask)
    second = s * (1 - s) * (2 + v * (1 - 2 * s))
    tl.store(dx + at, cotangent * tl.load(g + at, mask=mask) * second, mask=mask)


@triton.jit
def _row(C: tl.constexpr, BC: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    return p, p * C + c, c < C


@triton.jit
def _enveloped(out, x, e, C: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr):
    p, at, mask = _row(C, BC)
    f = tl.load(x + at, mask=mask, other=0.0)
    if ACTIVATE:
        f *= _sigmoid(f)
    tl.store(out + at, f * tl.load(e + p), mask=mask)


@triton.jit
def _enveloped_gradient(dx, de, x, e, g, C: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr):
    p, at, mask = _row(C, BC)
    v = tl.load(x + at, mask=mask, other=0.0)
    cotangent = tl.load(g + at, mask=mask, other=0.0)
    d = cotangent * tl.load(e + p)
    if ACTIVATE:
        s = _sigmoid(v)
        d *= s * (1 + v * (1 - s))
        v *= s
    tl.store(dx + at, d, mask=mask)
    tl.store(de + p, tl.sum(cotangent * v))


@triton.jit
def _enveloped_second(dx, de, dg, x, e, g, u, w, C: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr):
    """Gradients of Σ u g e f'(x) + w Σ g f(x)."""
    p, at, mask = _row(C, BC)
    v = tl.load(x + at, mask=mask, other=0.0)
    factor, weight = tl.load(e + p), tl.load(w + p)
    cotangent, by = tl.load(g + at, mask=mask, other=0.0), tl.load(u + at, mask=mask, other=0.0)
    if ACTIVATE:
        s = _sigmoid(v)
        first = s * (1 + v * (1 - s))
        second = s * (1 - s) * (2 + v * (1 - 2 * s))
        tl.store(dg + at, by * factor * first + weight * v * s, mask=mask)
        tl.store(dx + at, cotangent * (by * factor * second + weight * first), mask=mask)
        tl.store(de + p, tl.sum(by * cotangent * first))
    else:
        tl.store(dg + at, by * factor + weight * v, mask=mask)
        tl.store(dx + at, cotangent * weight, mask=mask)
        tl.store(de + p, tl.sum(by * cotangent))
