"""Operations of single atoms for training, channel by channel: inner products, scaling and products of tensors, which
are multilinear, and their normalisation and squares, which are not.

Training on forces, which are gradients, needs second derivatives and no third: gradients of what is not multilinear are
`once_differentiable`. A lane of the kernels has one feature of one atom, all nine components of it, and nothing is
summed between lanes but in `_enveloped_gradient` and its derivative.

Shapes: M atoms, F features. A field of 3×3 tensors is its nine components (model.py), here the slowest
axis: [9, M, F]; quantities of the three parts I, A, S are [3, M, F].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.triton_launch import FUSED_ARITHMETIC, tl, triton
from ...kernels.pair_ops import MultilinearOp, UnaryOp
from .model import compose, decompose, matmul, part_inner, part_norms
from .triton_algebra import (
    anticommutator,
    anticommutator_adjoint,
    compose_adjoint,
    decompose_adjoint,
    norm_gradient,
    squared_norm,
)
from .triton_algebra import compose as compose9
from .triton_algebra import decompose as decompose9
from .triton_algebra import matmul as matmul9

__all__ = ["Inner", "Mix", "Product", "Scale", "add_square", "enveloped", "normalise", "silu", "times_parts"]


BLOCK = 256
PARTS = (1, 3, 5)
"""Components of I, A, S."""


def times_parts(x: Tensor, s: Tensor) -> Tensor:
    """Return the parts I, A, S of x [9, …] multiplied by s [3, …]."""
    # split, whose gradient is one copy; that of slices would fill whole tensors with zeros
    return torch.cat([part * factor for part, factor in zip(x.split(PARTS), s.split(1), strict=True)])


def _launch(kernel, out: Tensor, num: int, *tensors: Tensor, **constants) -> Tensor:  # type: ignore[no-untyped-def]
    kernel[(triton.cdiv(num, BLOCK),)](out, *tensors, num, BLOCK=BLOCK, **FUSED_ARITHMETIC, **constants)
    return out


class Inner(MultilinearOp):
    """T(x, y, s) = Σ s ⟨x, y⟩ of each part, so that s ↦ ‖I‖², ‖A‖², ‖S‖² when x = y.

    Slots: x, y [9, M, F]; result and s [3, M, F].
    """

    def __init__(self, use_kernels: bool):
        self.use_kernels = use_kernels

    def norms(self, x: Tensor) -> Tensor:
        """‖I‖², ‖A‖², ‖S‖² of x [9, M, F]: [3, M, F]."""
        return _Norms.apply(self, x.contiguous()) if self.use_kernels else torch.stack(part_norms(x.transpose(0, 1)))

    def reference(self, *slots: Tensor) -> Tensor:
        x, y = slots
        return torch.stack(part_inner(x.transpose(0, 1), y.transpose(0, 1)))

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        x, y, s = slots
        if slot == 2:
            assert x is not None and y is not None
            num = x[0].numel()
            return _launch(_inner, torch.empty_like(x[:3]), num, x, y)
        other = y if slot == 0 else x
        assert other is not None and s is not None
        return _launch(_metric, torch.empty_like(other), other[0].numel(), other, s)


class _Norms(torch.autograd.Function):
    """Inner with both arguments equal, whose gradient is one kernel instead of two and a sum."""

    @staticmethod
    def forward(ctx: Any, form: Inner, x: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x)
        return form.partial(2, (x, x, None))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        # ∂/∂x of Σ s ⟨x, x⟩ is twice the derivative by one slot
        return None, ctx.form.derivative(0, None, *ctx.saved_tensors, 2 * gradients[0])


class Mix(MultilinearOp):
    """T(x, w, g) = Σ ⟨x Wᵀ, g⟩: the channels of the three parts mixed by three matrices.

    Slots: x [9, M, F], w [3, F, F]; result and g [9, M, F].
    """

    def __init__(self, use_kernels: bool):
        self.use_kernels = use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        x, w = slots
        parts = zip(x.split(PARTS), w.unbind(), strict=True)
        return torch.cat([(part.flatten(0, 1) @ matrix.T).view_as(part) for part, matrix in parts])

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        x, w, g = slots
        some = x if x is not None else g
        assert some is not None
        rows, features = some.shape[1], some.shape[2]
        out = some.new_empty(3, features, features) if slot == 1 else torch.empty_like(some)
        # whole matrix products, for which the library splits long sums; a batched one would not
        for part, (start, stop) in enumerate(((0, 1), (1, 4), (4, 9))):
            size = (stop - start) * rows
            a = None if x is None else x[start:stop].view(size, features)
            b = None if g is None else g[start:stop].view(size, features)
            if slot == 1:
                assert a is not None and b is not None
                torch.mm(b.T, a, out=out[part])
            elif slot == 2:
                assert a is not None and w is not None
                torch.mm(a, w[part].T, out=out[start:stop].view(size, features))
            else:
                assert b is not None and w is not None
                torch.mm(b, w[part], out=out[start:stop].view(size, features))
        return out


class Scale(MultilinearOp):
    """T(x, s, g) = Σ s ⟨x, g⟩ with the plain scalar product of components: the parts of x multiplied by s.

    Slots: x [9, M, F], s [3, M, F]; result and g [9, M, F].
    """

    def __init__(self, use_kernels: bool):
        self.use_kernels = use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        x, s = slots
        return times_parts(x, s)

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        x, s, g = slots
        if slot == 1:
            assert x is not None and g is not None
            return _launch(_dot_parts, torch.empty_like(x[:3]), x[0].numel(), x, g)
        other = x if slot == 2 else g
        assert other is not None and s is not None
        return _launch(_scale, torch.empty_like(other), other[0].numel(), other, s)


class Product(MultilinearOp):
    """T(y, m, g) = Σ q ⟨Y M + M Y, g⟩, or 2 ⟨Y M, g⟩ for SO(3): components of the matrix products.

    Args:
        q: [M] factor of each atom, 1 + 0.1 × total charge; not used for SO(3).
        group: "O(3)" or "SO(3)".

    Slots: y, m [9, M, F]; result and g [9, M, F].
    """

    def __init__(self, q: Tensor, group: str, use_kernels: bool):
        self.q, self.group, self.use_kernels = q.contiguous(), group, use_kernels

    def reference(self, *slots: Tensor) -> Tensor:
        y, m = (compose(x.transpose(0, 1)) for x in slots)
        if self.group == "O(3)":
            p = self.q[:, None, None, None] * (matmul(y, m) + matmul(m, y))
        else:
            p = 2 * matmul(y, m)
        return decompose(p).transpose(0, 1)

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        a, b = (s for k, s in enumerate(slots) if k != slot)
        assert a is not None and b is not None
        # slots left: result from (y, m); ∂/∂y from (m, g); ∂/∂m from (y, g)
        constants = {"SLOT": slot, "O3": self.group == "O(3)", "F": a.shape[2]}
        return _launch(_product, torch.empty_like(a), a[0].numel(), a, b, self.q, **constants)


@triton.jit
def load9(x, at, num, mask):
    return (
        tl.load(x + at, mask=mask),
        tl.load(x + num + at, mask=mask),
        tl.load(x + 2 * num + at, mask=mask),
        tl.load(x + 3 * num + at, mask=mask),
        tl.load(x + 4 * num + at, mask=mask),
        tl.load(x + 5 * num + at, mask=mask),
        tl.load(x + 6 * num + at, mask=mask),
        tl.load(x + 7 * num + at, mask=mask),
        tl.load(x + 8 * num + at, mask=mask),
    )


@triton.jit
def store9(out, at, num, mask, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    tl.store(out + at, x0, mask=mask)
    tl.store(out + num + at, x1, mask=mask)
    tl.store(out + 2 * num + at, x2, mask=mask)
    tl.store(out + 3 * num + at, x3, mask=mask)
    tl.store(out + 4 * num + at, x4, mask=mask)
    tl.store(out + 5 * num + at, x5, mask=mask)
    tl.store(out + 6 * num + at, x6, mask=mask)
    tl.store(out + 7 * num + at, x7, mask=mask)
    tl.store(out + 8 * num + at, x8, mask=mask)


@triton.jit
def places(num, BLOCK: tl.constexpr):
    # 64 bits: 9 M F numbers can be more than 2³¹
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < num


@triton.jit
def _inner(out, x, y, num, BLOCK: tl.constexpr):
    """⟨x, y⟩ of the three parts."""
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y, at, num, mask)
    tl.store(out + at, 3 * x0 * y0, mask=mask)
    tl.store(out + num + at, 2 * (x1 * y1 + x2 * y2 + x3 * y3), mask=mask)
    diagonal = 2 * (x4 * y4 + x7 * y7) + x4 * y7 + x7 * y4
    tl.store(out + 2 * num + at, diagonal + 2 * (x5 * y5 + x6 * y6 + x8 * y8), mask=mask)


@triton.jit
def _metric(out, y, s, num, BLOCK: tl.constexpr):
    """∂/∂x of Σ s ⟨x, y⟩."""
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(y, at, num, mask)
    i = 3 * tl.load(s + at, mask=mask)
    a = 2 * tl.load(s + num + at, mask=mask)
    t = tl.load(s + 2 * num + at, mask=mask)
    b = 2 * t
    # s22 = −s00 − s11 couples the two components on the diagonal: 2 y4 + y7 and 2 y7 + y4
    store9(out, at, num, mask, i * y0, a * y1, a * y2, a * y3, b * y4 + t * y7, b * y5, b * y6, b * y7 + t * y4, b * y8)


@triton.jit
def _scale(out, x, s, num, BLOCK: tl.constexpr):
    """The parts of x multiplied by s."""
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    i = tl.load(s + at, mask=mask)
    a = tl.load(s + num + at, mask=mask)
    t = tl.load(s + 2 * num + at, mask=mask)
    store9(out, at, num, mask, i * x0, a * x1, a * x2, a * x3, t * x4, t * x5, t * x6, t * x7, t * x8)


@triton.jit
def _dot_parts(out, x, g, num, BLOCK: tl.constexpr):
    """Plain scalar product of the components of each part."""
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x, at, num, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load9(g, at, num, mask)
    tl.store(out + at, x0 * g0, mask=mask)
    tl.store(out + num + at, x1 * g1 + x2 * g2 + x3 * g3, mask=mask)
    tl.store(out + 2 * num + at, x4 * g4 + x5 * g5 + x6 * g6 + x7 * g7 + x8 * g8, mask=mask)


@triton.jit
def _product(out, a, b, q, num, SLOT: tl.constexpr, O3: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Partial derivatives of Σ q ⟨Y M + M Y, g⟩ (O3) or Σ 2 ⟨Y M, g⟩ from the two other slots.

    The slots are components. Factors become full tensors by `compose`, the cotangent by the adjoint of `decompose`. A
    result becomes components by `decompose`, a gradient by the adjoint of `compose`.
    """
    num = num.to(tl.int64)
    at, mask = places(num, BLOCK)
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = load9(a, at, num, mask)
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = load9(b, at, num, mask)
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose9(a0, a1, a2, a3, a4, a5, a6, a7, a8)
    if O3:
        factor = tl.load(q + at // F, mask=mask)
    else:
        factor = 2.0
    if SLOT == 2:  # a = y, b = m
        b0, b1, b2, b3, b4, b5, b6, b7, b8 = compose9(b0, b1, b2, b3, b4, b5, b6, b7, b8)
        if O3:
            r0, r1, r2, r3, r4, r5, r6, r7, r8 = anticommutator(
                a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
            )
        else:
            r0, r1, r2, r3, r4, r5, r6, r7, r8 = matmul9(
                a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
            )
        r0, r1, r2, r3, r4, r5, r6, r7, r8 = decompose9(r0, r1, r2, r3, r4, r5, r6, r7, r8)
    else:  # a = the other factor, b = the cotangent
        b0, b1, b2, b3, b4, b5, b6, b7, b8 = decompose_adjoint(b0, b1, b2, b3, b4, b5, b6, b7, b8)
        if O3:  # G Aᵀ + Aᵀ G
            r0, r1, r2, r3, r4, r5, r6, r7, r8 = anticommutator(
                b0, b1, b2, b3, b4, b5, b6, b7, b8, a0, a3, a6, a1, a4, a7, a2, a5, a8
            )
        else:
            if SLOT == 0:  # ∂⟨Y M, G⟩/∂Y = G Mᵀ
                r0, r1, r2, r3, r4, r5, r6, r7, r8 = matmul9(
                    b0, b1, b2, b3, b4, b5, b6, b7, b8, a0, a3, a6, a1, a4, a7, a2, a5, a8
                )
            else:  # ∂⟨Y M, G⟩/∂M = Yᵀ G
                r0, r1, r2, r3, r4, r5, r6, r7, r8 = matmul9(
                    a0, a3, a6, a1, a4, a7, a2, a5, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
                )
        r0, r1, r2, r3, r4, r5, r6, r7, r8 = compose_adjoint(r0, r1, r2, r3, r4, r5, r6, r7, r8)
    store9(
        out, at, num, mask, factor * r0, factor * r1, factor * r2, factor * r3, factor * r4, factor * r5, factor * r6,
        factor * r7, factor * r8,
    )  # fmt: skip


# --- SiLU and filters with first and second derivative ---

_BLOCK = 1024


def silu(x: Tensor) -> Tensor:
    """x σ(x) for tensors of any shape, differentiable twice; one kernel for each derivative."""
    return _Silu()(x)


class _Silu(UnaryOp):
    def value(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _silu_gradient[(triton.cdiv(x.numel(), _BLOCK),)](out, x, g, x.numel(), BLOCK=_BLOCK, **FUSED_ARITHMETIC)
        return out

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
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
        # u and v are the cotangents of dx and de
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
    # f'' with s' = s (1 − s)
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
    """dx = g e f'(x), de = Σ g f(x): a program has all columns of a row, so that the sum needs no atomics."""
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
    """Gradients of Σ u g e f'(x) + w Σ g f(x): dx = g (u e f'' + w f'), de = Σ u g f', dg = u e f' + w f."""
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


# --- Functions of tensors that are not multilinear, with first and second derivative: one kernel for each order ---


def normalise(x: Tensor) -> Tensor:
    """X/(‖X‖² + 1) of [9, M, F], twice differentiable."""
    return _Normalise()(x)


class _Normalise(UnaryOp):
    def value(self, x: Tensor) -> Tensor:
        return _launch(_normalise, torch.empty_like(x), x[0].numel(), x)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """s g − 2 s² ⟨x, g⟩ W x with s = 1/(‖x‖² + 1), ‖x‖² = xᵀ W x."""
        return _launch(_normalise_gradient, torch.empty_like(x), x[0].numel(), x, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        dx, dg = torch.empty_like(x), torch.empty_like(x)
        _launch(_normalise_second, dx, x[0].numel(), dg, x, g, u)
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
        # x is added: its gradient is g itself
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
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose9(a0, a1, a2, a3, a4, a5, a6, a7, a8)
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = compose9(b0, b1, b2, b3, b4, b5, b6, b7, b8)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = anticommutator(
        a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
    )
    return decompose9(r0, r1, r2, r3, r4, r5, r6, r7, r8)


@triton.jit
def _symmetric_adjoint(a0, a1, a2, a3, a4, a5, a6, a7, a8, g0, g1, g2, g3, g4, g5, g6, g7, g8):
    """Gradient of the components of B from the gradient g of those of A B + B A."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose9(a0, a1, a2, a3, a4, a5, a6, a7, a8)
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
    # q D² = q/2 (D D + D D)
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
    # D² is half of D D + D D, and both factors vary: the adjoint by one of them, without the half
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
    # ⟨u, Dᵀ G + G Dᵀ⟩ = ⟨D U + U D, g⟩, which is linear in D, in U and in g
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
