"""SiLU with first and second derivative, and sums over the atoms or pairs of each structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .forms import Form

__all__ = ["SegmentSum", "silu"]

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
        _silu_gradient[(triton.cdiv(x.numel(), _BLOCK),)](out, x, g, x.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        x, g = ctx.saved_tensors
        u = u.contiguous()
        dx, dg = torch.empty_like(x), torch.empty_like(x)
        _silu_second[(triton.cdiv(x.numel(), _BLOCK),)](dx, dg, x, g, u, x.numel(), BLOCK=_BLOCK)
        return dx, dg


class SegmentSum(Form):
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
        _segment_sum[(num,)](out, v, self.ptr, D=v.shape[1], BD=triton.next_power_of_2(v.shape[1]), BLOCK=128)
        return out


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
