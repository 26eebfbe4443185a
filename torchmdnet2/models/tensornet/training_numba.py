"""The training operations of TensorNet on the CPU, for O(3): those of training_atoms.py and training_pairs.py on
kernels compiled by numba, in float32 and float64.

Each kernel reads its fields once and stores no intermediate results. Sums run row by row, on one thread, always in the
same order. Kernels over pairs process real pairs only; rows of unused pairs and of an atom with itself are left
unchanged.

Importing it needs numba. Shapes: M atoms, P pairs, F features. Fields of tensors are [9, M, F], filters [P + 1, 3, F],
geometry [P + 1, 9].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.compiling_cpu import OPTIONS, compiled
from ...kernels.numba_products import inline
from ...kernels.pair_ops import UnaryOp
from . import training_atoms, training_pairs
from .numba_kernels import (
    HALF,
    ONE,
    TWO,
    add,
    anticommutator,
    compose,
    compose_adjoint,
    decompose_adjoint,
    dot,
    norm_gradient,
    scale,
    scale_parts,
    square,
    squared_norm,
    transpose,
)
from .numba_kernels import product as product9

__all__ = ["Embedding", "Inner", "Message", "Product", "Scale", "add_square", "normalise", "silu"]

ZERO = np.float32(0)


kernel = compiled(nogil=True, **OPTIONS)


@inline
def get(x, i, c):
    """The nine components of channel c of row i."""
    return x[0, i, c], x[1, i, c], x[2, i, c], x[3, i, c], x[4, i, c], x[5, i, c], x[6, i, c], x[7, i, c], x[8, i, c]


@inline
def put(x, i, c, v):
    x[0, i, c], x[1, i, c], x[2, i, c], x[3, i, c], x[4, i, c] = v[0], v[1], v[2], v[3], v[4]
    x[5, i, c], x[6, i, c], x[7, i, c], x[8, i, c] = v[5], v[6], v[7], v[8]


@inline
def product_gradient(q, a, g):
    """Gradient of Y (or M) from the gradient g of q (Y M + M Y) and the other factor a: q (G Aᵀ + Aᵀ G)."""
    return scale(q, compose_adjoint(anticommutator(decompose_adjoint(g), transpose(compose(a)))))


# --- atoms -----------------------------------------------------------------------------------------------------------


@kernel
def product(out, a, b, q):
    """Components of q (A B + B A)."""
    for i in range(a.shape[1]):
        for c in range(a.shape[2]):
            put(out, i, c, product9(q[i], get(a, i, c), get(b, i, c), True))


@kernel
def product_adjoint(out, a, g, q):
    """`product_gradient` of all atoms."""
    for i in range(a.shape[1]):
        for c in range(a.shape[2]):
            put(out, i, c, product_gradient(q[i], get(a, i, c), get(g, i, c)))


@kernel
def inner(out, x, y):
    """⟨x, y⟩ of the three parts, [3, M, F]: half the gradient of the norm of x, times y."""
    for i in range(x.shape[1]):
        for c in range(x.shape[2]):
            w, v = norm_gradient(get(x, i, c), HALF, HALF, HALF), get(y, i, c)
            out[0, i, c] = w[0] * v[0]
            out[1, i, c] = w[1] * v[1] + w[2] * v[2] + w[3] * v[3]
            out[2, i, c] = w[4] * v[4] + w[5] * v[5] + w[6] * v[6] + w[7] * v[7] + w[8] * v[8]


@kernel
def inner_adjoint(out, y, s):
    """∂/∂x of Σ s ⟨x, y⟩."""
    for i in range(y.shape[1]):
        for c in range(y.shape[2]):
            put(out, i, c, norm_gradient(get(y, i, c), HALF * s[0, i, c], HALF * s[1, i, c], HALF * s[2, i, c]))


@kernel
def scaled(out, x, s):
    """The parts of x multiplied by s [3, M, F]."""
    for i in range(x.shape[1]):
        for c in range(x.shape[2]):
            put(out, i, c, scale_parts(s[0, i, c], s[1, i, c], s[2, i, c], get(x, i, c)))


@kernel
def part_dots(out, x, g):
    """Plain scalar product of the components of each part."""
    for i in range(x.shape[1]):
        for c in range(x.shape[2]):
            a, b = get(x, i, c), get(g, i, c)
            out[0, i, c] = a[0] * b[0]
            out[1, i, c] = a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
            out[2, i, c] = a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7] + a[8] * b[8]


@kernel
def normalised(out, x):
    """X/(‖X‖² + 1)."""
    for i in range(x.shape[1]):
        for c in range(x.shape[2]):
            x9 = get(x, i, c)
            put(out, i, c, scale(ONE / (squared_norm(x9) + ONE), x9))


@kernel
def normalise_gradient(out, x, g):
    """s g − s² ⟨x, g⟩ w with s = 1/(‖x‖² + 1), w = ∂‖x‖²/∂x."""
    for i in range(x.shape[1]):
        for c in range(x.shape[2]):
            x9, g9 = get(x, i, c), get(g, i, c)
            s = ONE / (squared_norm(x9) + ONE)
            b = -s * s * dot(x9, g9)
            put(out, i, c, add(scale(s, g9), norm_gradient(x9, b, b, b)))


@kernel
def normalise_second(dx, dg, x, g, u):
    """Gradients of ⟨u, s g − s² ⟨x, g⟩ w⟩; the formulas are in training_atoms.py."""
    for i in range(x.shape[1]):
        for c in range(x.shape[2]):
            x9, g9, u9 = get(x, i, c), get(g, i, c), get(u, i, c)
            s = ONE / (squared_norm(x9) + ONE)
            xg, ug = dot(x9, g9), dot(u9, g9)
            uw = dot(u9, norm_gradient(x9, ONE, ONE, ONE))
            b = s * s * uw
            put(dg, i, c, add(scale(s, u9), scale(-b, x9)))
            a, e = s * s * (TWO * s * xg * uw - ug), -s * s * xg
            put(dx, i, c, add(add(norm_gradient(x9, a, a, a), scale(-b, g9)), norm_gradient(u9, e, e, e)))


@kernel
def with_square(out, d, q):
    """D + q D²."""
    for i in range(d.shape[1]):
        for c in range(d.shape[2]):
            d9 = get(d, i, c)
            put(out, i, c, add(d9, square(q[i], d9)))


@kernel
def add_square_gradient(out, d, q, g):
    """Gradient of D from the gradient g of `add_square`."""
    for i in range(d.shape[1]):
        for c in range(d.shape[2]):
            g9 = get(g, i, c)
            put(out, i, c, add(g9, product_gradient(q[i], get(d, i, c), g9)))


@kernel
def add_square_second(dd, dg, d, q, g, u):
    """Gradients of ⟨u, g + q (Dᵀ G + G Dᵀ)⟩: of g, u + q (D U + U D); of d, q (Uᵀ G + G Uᵀ)."""
    for i in range(d.shape[1]):
        for c in range(d.shape[2]):
            u9 = get(u, i, c)
            put(dg, i, c, add(u9, product9(q[i], get(d, i, c), u9, True)))
            put(dd, i, c, product_gradient(q[i], u9, get(g, i, c)))


# --- pairs -----------------------------------------------------------------------------------------------------------


@kernel
def message(out, f, y, row_ptr, sender, pair):
    """Σ over the edges of an atom of f y of the sender, and f_self y of the atom itself."""
    own = f[f.shape[0] - 1]
    for i in range(y.shape[1]):
        for c in range(y.shape[2]):
            put(out, i, c, scale_parts(own[0, c], own[1, c], own[2, c], get(y, i, c)))
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j, p = sender[e], pair[e]
            g = f[p if p >= 0 else -p - 1]
            for c in range(y.shape[2]):
                put(out, i, c, add(get(out, i, c), scale_parts(g[0, c], g[1, c], g[2, c], get(y, j, c))))


@kernel
def pair_dot(out, y, g, first, second, count):
    """Gradient of the filters of pairs: ⟨y_j, g_i⟩ + ⟨y_i, g_j⟩ of each part."""
    # rows of padding stay as the caller has made them: 0
    for p in range(count[0]):
        i, j = first[p], second[p]
        for c in range(y.shape[2]):
            u, v = get(y, i, c), get(y, j, c)
            k, m = get(g, i, c), get(g, j, c)
            out[p, 0, c] = v[0] * k[0] + u[0] * m[0]
            out[p, 1, c] = v[1] * k[1] + v[2] * k[2] + v[3] * k[3] + u[1] * m[1] + u[2] * m[2] + u[3] * m[3]
            out[p, 2, c] = (
                v[4] * k[4] + v[5] * k[5] + v[6] * k[6] + v[7] * k[7] + v[8] * k[8]
                + u[4] * m[4] + u[5] * m[5] + u[6] * m[6] + u[7] * m[7] + u[8] * m[8]
            )  # fmt: skip


@inline
def geometry_of(c, p, turned):
    """The geometry of a pair as its first atom sees it, or, turned, as its second does."""
    s = -ONE if turned else ONE
    return (
        c[p, 0], s * c[p, 1], s * c[p, 2], s * c[p, 3], c[p, 4], c[p, 5], c[p, 6], c[p, 7], c[p, 8]
    )  # fmt: skip


@kernel
def embed(out, f, c, z, row_ptr, sender, pair):
    """Σ over the edges of an atom of f c (a_i + b_j), and f_self c_self (a_i + b_i) in the isotropic component."""
    features, last = f.shape[2], f.shape[0] - 1
    for i in range(out.shape[1]):
        out[:, i] = 0
        for k in range(features):
            out[0, i, k] = f[last, 0, k] * c[last, 0] * (z[i, k] + z[i, features + k])
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j, p = sender[e], pair[e]
            n = p if p >= 0 else -p - 1
            shape = geometry_of(c, n, p < 0)
            for k in range(features):
                w = z[i, k] + z[j, features + k]
                x9 = scale_parts(w * f[n, 0, k], w * f[n, 1, k], w * f[n, 2, k], shape)
                put(out, i, k, add(get(out, i, k), x9))


@inline
def filtered(f, n, k, shape, g):
    """⟨f c, g⟩ of one channel."""
    a = shape[1] * g[1] + shape[2] * g[2] + shape[3] * g[3]
    s = shape[4] * g[4] + shape[5] * g[5] + shape[6] * g[6] + shape[7] * g[7] + shape[8] * g[8]
    return f[n, 0, k] * shape[0] * g[0] + f[n, 1, k] * a + f[n, 2, k] * s


@kernel
def embed_atoms(out, f, c, g, row_ptr, sender, pair):
    """Gradient of z = (a, b): a_i from g of the atom, b_i from g of its neighbors, as these see the pairs."""
    features, last = f.shape[2], f.shape[0] - 1
    for i in range(g.shape[1]):
        for k in range(features):
            own = f[last, 0, k] * c[last, 0] * g[0, i, k]
            out[i, k], out[i, features + k] = own, own
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j, p = sender[e], pair[e]
            n = p if p >= 0 else -p - 1
            here, there = geometry_of(c, n, p < 0), geometry_of(c, n, p >= 0)
            for k in range(features):
                out[i, k] += filtered(f, n, k, here, get(g, i, k))
                out[i, features + k] += filtered(f, n, k, there, get(g, j, k))


@kernel
def embed_filters(out, c, z, g, first, second, count):
    """Gradient of the filters of pairs."""
    features = g.shape[2]
    for p in range(count[0]):
        i, j = first[p], second[p]
        here, there = geometry_of(c, p, False), geometry_of(c, p, True)
        for k in range(features):
            a, b = z[i, k] + z[j, features + k], z[j, k] + z[i, features + k]
            u, v = get(g, i, k), get(g, j, k)
            out[p, 0, k] = here[0] * (a * u[0] + b * v[0])
            out[p, 1, k] = (
                here[1] * a * u[1] + here[2] * a * u[2] + here[3] * a * u[3]
                + there[1] * b * v[1] + there[2] * b * v[2] + there[3] * b * v[3]
            )  # fmt: skip
            out[p, 2, k] = (
                here[4] * (a * u[4] + b * v[4]) + here[5] * (a * u[5] + b * v[5]) + here[6] * (a * u[6] + b * v[6])
                + here[7] * (a * u[7] + b * v[7]) + here[8] * (a * u[8] + b * v[8])
            )  # fmt: skip


@kernel
def embed_geometry(out, f, z, g, first, second, count):
    """Gradient of the geometry of pairs."""
    features = g.shape[2]
    for p in range(count[0]):
        i, j = first[p], second[p]
        # of the type of the fields, float32 or float64
        zero = ZERO * f[p, 0, 0]
        total = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
        for k in range(features):
            a, b = z[i, k] + z[j, features + k], z[j, k] + z[i, features + k]
            f1, f2, f3 = f[p, 0, k], f[p, 1, k], f[p, 2, k]
            total = add(total, scale_parts(a * f1, a * f2, a * f3, get(g, i, k)))
            # the second atom sees the part A turned
            total = add(total, scale_parts(b * f1, -b * f2, b * f3, get(g, j, k)))
        for m in range(9):
            out[p, m] = total[m]


# --- filters ---------------------------------------------------------------------------------------------------------


@kernel
def silu_gradient(out, x, s, g):
    """g f'(x) for f(x) = x s(x), s the logistic function; rows [P, C]."""
    for p in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[p, k] = g[p, k] * s[p, k] * (ONE + x[p, k] * (ONE - s[p, k]))


@kernel
def silu_second(dx, dg, x, s, g, u):
    """From the cotangent u of g f'(x): u g f''(x) and u f'(x)."""
    for p in range(x.shape[0]):
        for k in range(x.shape[1]):
            v, t = x[p, k], s[p, k]
            dg[p, k] = u[p, k] * t * (ONE + v * (ONE - t))
            # f'' with s' = s (1 − s)
            dx[p, k] = u[p, k] * g[p, k] * t * (ONE - t) * (TWO + v * (ONE - TWO * t))


# --- the operations ---


def _run(kernel: Any, *tensors: Tensor) -> None:
    kernel(*(t.numpy() for t in tensors))


def _filled(kernel: Any, x: Tensor, *others: Tensor) -> Tensor:
    """Return what a kernel writes, shaped as x."""
    out = torch.empty_like(x)
    _run(kernel, out, x, *others)
    return out


def _both(kernel: Any, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two results of a kernel, shaped as x."""
    one, other = torch.empty_like(x), torch.empty_like(x)
    _run(kernel, one, other, x, *others)
    return one, other


class Inner(training_atoms.Inner):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        a, b = (s for k, s in enumerate(slots) if k != slot)
        assert a is not None and b is not None
        out = torch.empty_like(a[:3] if slot == 2 else a)
        _run(inner if slot == 2 else inner_adjoint, out, a, b)
        return out


class Scale(training_atoms.Scale):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        x, s, g = slots
        if slot == 1:
            assert x is not None and g is not None
            out = torch.empty_like(x[:3])
            _run(part_dots, out, x, g)
            return out
        other = x if slot == 2 else g
        assert other is not None and s is not None
        return _filled(scaled, other, s)


class Product(training_atoms.Product):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        a, b = (s for k, s in enumerate(slots) if k != slot)
        assert a is not None and b is not None
        return _filled(product if slot == 2 else product_adjoint, a, b, self.q)


class Message(training_pairs.Message):
    def filter_gradient(self, y: Tensor, g: Tensor) -> Tensor:
        pairs = self.pairs
        out = y.new_zeros(pairs.num_pairs + 1, 3, y.shape[2])
        _run(pair_dot, out, y, g, pairs.first, pairs.second, pairs.count)
        own = torch.linalg.vecdot(y, g, dim=1)
        out[-1] = torch.stack([own[0], own[1:4].sum(0), own[4:].sum(0)])
        return out

    def gather(self, f: Tensor, other: Tensor, turned: bool) -> Tensor:
        pairs = self.pairs
        out = torch.empty_like(other)
        _run(message, out, f, other, pairs.row_ptr, pairs.sender, pairs.pair)
        return out


class Embedding(training_pairs.Embedding):
    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        f, c, z, g = (torch.empty(0) if s is None else s for s in slots)
        pairs = self.pairs
        rows = pairs.row_ptr, pairs.sender, pairs.pair
        ends = pairs.first, pairs.second, pairs.count
        if slot == 3:
            out = f.new_empty(9, pairs.num_atoms, f.shape[2])
            _run(embed, out, f, c, z, *rows)
        elif slot == 2:
            out = f.new_empty(pairs.num_atoms, 2 * f.shape[2])
            _run(embed_atoms, out, f, c, g, *rows)
        else:
            out = g.new_zeros(pairs.num_pairs + 1, *((9,) if slot == 1 else (3, g.shape[2])))
            if slot == 1:
                _run(embed_geometry, out, f, z, g, *ends)
            else:
                _run(embed_filters, out, c, z, g, *ends)
            own = training_pairs.own_embedding(z, g)
            out[-1, 0] = torch.dot(f[-1, 0], own) if slot == 1 else c[-1, 0] * own
        return out


class _Normalise(UnaryOp):
    def value(self, x: Tensor) -> Tensor:
        return _filled(normalised, x)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return _filled(normalise_gradient, x, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return _both(normalise_second, x, g, u)


class _Square(UnaryOp):
    """D + q D²."""

    def __init__(self, q: Tensor):
        self.q = q.contiguous()

    def value(self, x: Tensor) -> Tensor:
        return _filled(with_square, x, self.q)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return _filled(add_square_gradient, x, self.q, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return _both(add_square_second, x, self.q, g, u)


class _Silu(UnaryOp):
    def value(self, x: Tensor) -> Tensor:
        # kept for both derivatives, which then need no exponential; an object has one call
        self.logistic = torch.sigmoid(x)
        return x * self.logistic

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return _filled(silu_gradient, x, self.logistic, g)

    def second(self, x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return _both(silu_second, x, self.logistic, g, u)


def normalise(x: Tensor) -> Tensor:
    """X/(‖X‖² + 1) of [9, M, F], twice differentiable."""
    return _Normalise()(x)


def add_square(x: Tensor, d: Tensor, q: Tensor) -> Tensor:
    """X + D + q D² of [9, M, F] with q [M], twice differentiable in x and d."""
    return x + _Square(q)(d)


def silu(x: Tensor) -> Tensor:
    """x σ(x) for rows [P, C], twice differentiable."""
    return _Silu()(x)
