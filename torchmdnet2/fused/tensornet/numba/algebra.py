"""Tensor algebra of TensorNet on nine components for the CPU: numba functions, inlined into the kernels.

They are the functions of triton/algebra.py on scalars. A 3×3 tensor is passed as a tuple of its nine components
(models/tensor_algebra.py); the compiler keeps them in registers and processes several channels at once. Constants are
float32, since numba would compute in float64 otherwise.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ...numba_options import OPTIONS

__all__ = [
    "add",
    "add_square_adjoint",
    "call",
    "inline",
    "load9",
    "norm_gradient",
    "normalise_adjoint",
    "part_norms",
    "product",
    "product_adjoint",
    "scale",
    "scale_parts",
    "square",
    "squared_norm",
    "store9",
    "store9_scaled",
]

inline = njit(forceinline=True, **OPTIONS)
call = njit(**OPTIONS)

HALF, ONE, TWO, THREE = np.float32(0.5), np.float32(1), np.float32(2), np.float32(3)
THIRD, FOUR, SIX = np.float32(1 / 3), np.float32(4), np.float32(6)


@inline
def load9(x, c, F):
    """The nine components of channel c in a row x [9F]."""
    return (
        x[c], x[c + F], x[c + 2 * F], x[c + 3 * F], x[c + 4 * F], x[c + 5 * F], x[c + 6 * F], x[c + 7 * F], x[c + 8 * F]
    )  # fmt: skip


@inline
def store9(x, c, F, v):
    """Write the nine components of channel c."""
    x[c], x[c + F], x[c + 2 * F] = v[0], v[1], v[2]
    x[c + 3 * F], x[c + 4 * F], x[c + 5 * F] = v[3], v[4], v[5]
    x[c + 6 * F], x[c + 7 * F], x[c + 8 * F] = v[6], v[7], v[8]


@inline
def store9_scaled(x, c, F, v, f):
    """Write f times the nine components of channel c."""
    x[c], x[c + F], x[c + 2 * F] = f * v[0], f * v[1], f * v[2]
    x[c + 3 * F], x[c + 4 * F], x[c + 5 * F] = f * v[3], f * v[4], f * v[5]
    x[c + 6 * F], x[c + 7 * F], x[c + 8 * F] = f * v[6], f * v[7], f * v[8]


@inline
def compose(x):
    """Components → the nine entries of the full tensor, row by row."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    return i + s00, s01 + a01, s02 + a02, s01 - a01, i + s11, s12 + a12, s02 - a02, s12 - a12, i - s00 - s11


@inline
def compose_adjoint(t):
    """Gradient of the full tensor → gradient of its components."""
    t00, t01, t02, t10, t11, t12, t20, t21, t22 = t
    return t00 + t11 + t22, t01 - t10, t02 - t20, t12 - t21, t00 - t22, t01 + t10, t02 + t20, t11 - t22, t12 + t21


@inline
def decompose(t):
    """Full tensor → components."""
    t00, t01, t02, t10, t11, t12, t20, t21, t22 = t
    i = (t00 + t11 + t22) / THREE
    return (
        i, HALF * (t01 - t10), HALF * (t02 - t20), HALF * (t12 - t21),
        t00 - i, HALF * (t01 + t10), HALF * (t02 + t20), t11 - i, HALF * (t12 + t21),
    )  # fmt: skip


@inline
def decompose_adjoint(x):
    """Gradient of the components → gradient of the full tensor."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    third = (i - s00 - s11) / THREE
    return (
        third + s00, HALF * (s01 + a01), HALF * (s02 + a02), HALF * (s01 - a01), third + s11,
        HALF * (s12 + a12), HALF * (s02 - a02), HALF * (s12 - a12), third,
    )  # fmt: skip


@inline
def transpose(a):
    return a[0], a[3], a[6], a[1], a[4], a[7], a[2], a[5], a[8]


@inline
def matmul(a, b):
    """A B of full tensors."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = a
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = b
    return (
        a0 * b0 + a1 * b3 + a2 * b6, a0 * b1 + a1 * b4 + a2 * b7, a0 * b2 + a1 * b5 + a2 * b8,
        a3 * b0 + a4 * b3 + a5 * b6, a3 * b1 + a4 * b4 + a5 * b7, a3 * b2 + a4 * b5 + a5 * b8,
        a6 * b0 + a7 * b3 + a8 * b6, a6 * b1 + a7 * b4 + a8 * b7, a6 * b2 + a7 * b5 + a8 * b8,
    )  # fmt: skip


@inline
def add(a, b):
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7],
        a[8] + b[8],
    )  # fmt: skip


@inline
def scale(f, a):
    return f * a[0], f * a[1], f * a[2], f * a[3], f * a[4], f * a[5], f * a[6], f * a[7], f * a[8]


@inline
def scale_parts(i, a, s, x):
    """The parts I, A, S times a factor each."""
    return i * x[0], a * x[1], a * x[2], a * x[3], s * x[4], s * x[5], s * x[6], s * x[7], s * x[8]


@inline
def anticommutator(a, b):
    """A B + B A of full tensors."""
    return add(matmul(a, b), matmul(b, a))


@inline
def part_norms(x):
    """‖I‖², ‖A‖², ‖S‖² from components."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    norm_a = a01 * a01 + a02 * a02 + a12 * a12
    norm_s = s00 * s00 + s11 * s11 + s00 * s11 + s01 * s01 + s02 * s02 + s12 * s12
    return THREE * i * i, TWO * norm_a, TWO * norm_s


@inline
def squared_norm(x):
    """‖X‖² from components."""
    i, a, s = part_norms(x)
    return i + a + s


@inline
def norm_gradient(x, fi, fa, fs):
    """∂(fi ‖I‖² + fa ‖A‖² + fs ‖S‖²)/∂X by components."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x
    fi, fa, fs = SIX * fi, FOUR * fa, TWO * fs
    return (
        fi * i, fa * a01, fa * a02, fa * a12,
        fs * (TWO * s00 + s11), fs * TWO * s01, fs * TWO * s02, fs * (TWO * s11 + s00), fs * TWO * s12,
    )  # fmt: skip


@inline
def dot(x, y):
    return (
        x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3] + x[4] * y[4] + x[5] * y[5] + x[6] * y[6] + x[7] * y[7]
        + x[8] * y[8]
    )  # fmt: skip


@inline
def normalise_adjoint(inverse, x, g):
    """Gradient of X from the gradient g of x = X/(‖X‖²+1), given x and inverse = 1/(‖X‖²+1).

    X̄ = inverse·g − ⟨x, g⟩ ∂‖x‖²/∂x.
    """
    f = -dot(x, g)
    return add(scale(inverse, g), norm_gradient(x, f, f, f))


@inline
def product(q, y, m, o3):
    """Components of q (Y M + M Y) for O(3), of 2 Y M for SO(3)."""
    a, b = compose(y), compose(m)
    if o3:
        return decompose(scale(q, anticommutator(a, b)))
    return decompose(scale(TWO, matmul(a, b)))


@inline
def product_adjoint(q, y, m, g, o3):
    """Gradients of Y and of M from the gradient g of `product`."""
    a, b, h = compose(y), compose(m), decompose_adjoint(g)
    if o3:
        u, v, f = anticommutator(h, transpose(b)), anticommutator(h, transpose(a)), q
    else:  # P = 2 A B: Ā = 2 G Bᵀ, B̄ = 2 Aᵀ G
        u, v, f = matmul(h, transpose(b)), matmul(transpose(a), h), TWO
    return scale(f, compose_adjoint(u)), scale(f, compose_adjoint(v))


@inline
def square(q, d):
    """Components of q D D."""
    a = compose(d)
    return decompose(scale(q, matmul(a, a)))


@inline
def add_square_adjoint(q, d, g):
    """Gradient of D from the gradient g of D + q D D."""
    u = anticommutator(decompose_adjoint(g), transpose(compose(d)))
    return add(g, scale(q, compose_adjoint(u)))
