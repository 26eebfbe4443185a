"""Tensor algebra of TensorNet on nine components, channel by channel, for Triton kernels.

A field of 3×3 tensors is nine components (model.py): i, a01, a02, a12, s00, s01, s02, s11, s12. Each
function takes and returns them as separate values, so that they stay in registers. The plain-PyTorch versions in
model.py are the specification; `adjoint` functions are the transposes of the linear maps there.

A gradient of a field is by its nine components, not by the entries of the full tensor. s22 = −s00 − s11 is not among
them: what would go to s22 goes to s00 and s11 with the other sign. ⟨x, g⟩ of a field and such a gradient is the plain
sum of products.
"""

from __future__ import annotations

from ...core.triton_launch import tl, triton

__all__ = [
    "add_square_adjoint", "anticommutator_adjoint", "halves", "halves_of_words", "load9", "load9_early",
    "norm_gradient", "normalise_adjoint", "product", "product_adjoint", "square", "squared_norm", "store9",
    "store9_words",
]  # fmt: skip


@triton.jit
def compose(i, a01, a02, a12, s00, s01, s02, s11, s12):
    """Components → the nine entries of the full tensor, row by row."""
    return i + s00, s01 + a01, s02 + a02, s01 - a01, i + s11, s12 + a12, s02 - a02, s12 - a12, i - s00 - s11


@triton.jit
def compose_adjoint(t00, t01, t02, t10, t11, t12, t20, t21, t22):
    """Gradient of the full tensor → gradient of its components."""
    return t00 + t11 + t22, t01 - t10, t02 - t20, t12 - t21, t00 - t22, t01 + t10, t02 + t20, t11 - t22, t12 + t21


@triton.jit
def decompose(t00, t01, t02, t10, t11, t12, t20, t21, t22):
    """Full tensor → components."""
    i = (t00 + t11 + t22) * (1.0 / 3.0)
    return (
        i,
        0.5 * (t01 - t10),
        0.5 * (t02 - t20),
        0.5 * (t12 - t21),
        t00 - i,
        0.5 * (t01 + t10),
        0.5 * (t02 + t20),
        t11 - i,
        0.5 * (t12 + t21),
    )


@triton.jit
def decompose_adjoint(i, a01, a02, a12, s00, s01, s02, s11, s12):
    """Gradient of the components → gradient of the full tensor."""
    # i, s00 and s11 all contain the trace: each diagonal entry gets a third of what reaches it
    third = (i - s00 - s11) * (1.0 / 3.0)
    return (
        third + s00,
        0.5 * (s01 + a01),
        0.5 * (s02 + a02),
        0.5 * (s01 - a01),
        third + s11,
        0.5 * (s12 + a12),
        0.5 * (s02 - a02),
        0.5 * (s12 - a12),
        third,
    )


@triton.jit
def matmul(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    """A B of full tensors."""
    return (
        a0 * b0 + a1 * b3 + a2 * b6,
        a0 * b1 + a1 * b4 + a2 * b7,
        a0 * b2 + a1 * b5 + a2 * b8,
        a3 * b0 + a4 * b3 + a5 * b6,
        a3 * b1 + a4 * b4 + a5 * b7,
        a3 * b2 + a4 * b5 + a5 * b8,
        a6 * b0 + a7 * b3 + a8 * b6,
        a6 * b1 + a7 * b4 + a8 * b7,
        a6 * b2 + a7 * b5 + a8 * b8,
    )


@triton.jit
def anticommutator(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    """A B + B A of full tensors."""
    l0, l1, l2, l3, l4, l5, l6, l7, l8 = matmul(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = matmul(b0, b1, b2, b3, b4, b5, b6, b7, b8, a0, a1, a2, a3, a4, a5, a6, a7, a8)
    return l0 + r0, l1 + r1, l2 + r2, l3 + r3, l4 + r4, l5 + r5, l6 + r6, l7 + r7, l8 + r8


@triton.jit
def anticommutator_adjoint(g0, g1, g2, g3, g4, g5, g6, g7, g8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    """Gradient of A from the gradient G of A B + B A: G Bᵀ + Bᵀ G."""
    return anticommutator(g0, g1, g2, g3, g4, g5, g6, g7, g8, b0, b3, b6, b1, b4, b7, b2, b5, b8)


@triton.jit
def squared_norm(i, a01, a02, a12, s00, s01, s02, s11, s12):
    """‖X‖² from components."""
    norm_a = a01 * a01 + a02 * a02 + a12 * a12
    # s00² + s11² + s00 s11 = (s00² + s11² + s22²)/2
    norm_s = s00 * s00 + s11 * s11 + s00 * s11 + s01 * s01 + s02 * s02 + s12 * s12
    return 3.0 * i * i + 2.0 * (norm_a + norm_s)


@triton.jit
def norm_gradient(i, a01, a02, a12, s00, s01, s02, s11, s12):
    """∂‖X‖²/∂X by components."""
    return (
        6.0 * i,
        4.0 * a01,
        4.0 * a02,
        4.0 * a12,
        4.0 * s00 + 2.0 * s11,
        4.0 * s01,
        4.0 * s02,
        4.0 * s11 + 2.0 * s00,
        4.0 * s12,
    )


@triton.jit
def normalise_adjoint(inverse, x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8):
    """Gradient of X from the gradient g of x = X/(‖X‖²+1), given x and inverse = 1/(‖X‖²+1).

    X̄ = inverse·g − ⟨x, g⟩ ∂‖x‖²/∂x: with s = inverse, ∂s/∂X = −s² ∂‖X‖²/∂X, and ∂‖X‖²/∂X is linear, so that both
    factors s go into x, and X itself need not be kept.
    """
    dot = x0 * g0 + x1 * g1 + x2 * g2 + x3 * g3 + x4 * g4 + x5 * g5 + x6 * g6 + x7 * g7 + x8 * g8
    n0, n1, n2, n3, n4, n5, n6, n7, n8 = norm_gradient(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    return (
        inverse * g0 - dot * n0,
        inverse * g1 - dot * n1,
        inverse * g2 - dot * n2,
        inverse * g3 - dot * n3,
        inverse * g4 - dot * n4,
        inverse * g5 - dot * n5,
        inverse * g6 - dot * n6,
        inverse * g7 - dot * n7,
        inverse * g8 - dot * n8,
    )


@triton.jit
def product(
    q, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8, O3: tl.constexpr
):  # fmt: skip
    """Components of q (Y M + M Y) for O(3), of 2 Y M for SO(3)."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose(y0, y1, y2, y3, y4, y5, y6, y7, y8)
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = compose(m0, m1, m2, m3, m4, m5, m6, m7, m8)
    if O3:
        p0, p1, p2, p3, p4, p5, p6, p7, p8 = anticommutator(
            a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
        )
        f = q
    else:
        p0, p1, p2, p3, p4, p5, p6, p7, p8 = matmul(
            a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8
        )
        f = q * 0.0 + 2.0
    return decompose(f * p0, f * p1, f * p2, f * p3, f * p4, f * p5, f * p6, f * p7, f * p8)


@triton.jit
def product_adjoint(
    q, y0, y1, y2, y3, y4, y5, y6, y7, y8, m0, m1, m2, m3, m4, m5, m6, m7, m8,
    g0, g1, g2, g3, g4, g5, g6, g7, g8, O3: tl.constexpr,
):  # fmt: skip
    """Gradients of Y and of M (18 values) from the gradient g of `product`.

    For full tensors, O(3): Ȳ = q (G Mᵀ + Mᵀ G), M̄ = q (G Yᵀ + Yᵀ G); SO(3): Ȳ = 2 G Mᵀ, M̄ = 2 Yᵀ G.
    """
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose(y0, y1, y2, y3, y4, y5, y6, y7, y8)
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = compose(m0, m1, m2, m3, m4, m5, m6, m7, m8)
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = decompose_adjoint(g0, g1, g2, g3, g4, g5, g6, g7, g8)
    if O3:
        u0, u1, u2, u3, u4, u5, u6, u7, u8 = anticommutator_adjoint(
            h0, h1, h2, h3, h4, h5, h6, h7, h8, b0, b1, b2, b3, b4, b5, b6, b7, b8
        )
        v0, v1, v2, v3, v4, v5, v6, v7, v8 = anticommutator_adjoint(
            h0, h1, h2, h3, h4, h5, h6, h7, h8, a0, a1, a2, a3, a4, a5, a6, a7, a8
        )
        f = q
    else:  # P = 2 A B: Ā = 2 G Bᵀ, B̄ = 2 Aᵀ G
        u0, u1, u2, u3, u4, u5, u6, u7, u8 = matmul(
            h0, h1, h2, h3, h4, h5, h6, h7, h8, b0, b3, b6, b1, b4, b7, b2, b5, b8
        )
        v0, v1, v2, v3, v4, v5, v6, v7, v8 = matmul(
            a0, a3, a6, a1, a4, a7, a2, a5, a8, h0, h1, h2, h3, h4, h5, h6, h7, h8
        )
        f = q * 0.0 + 2.0
    dy0, dy1, dy2, dy3, dy4, dy5, dy6, dy7, dy8 = compose_adjoint(u0, u1, u2, u3, u4, u5, u6, u7, u8)
    dm0, dm1, dm2, dm3, dm4, dm5, dm6, dm7, dm8 = compose_adjoint(v0, v1, v2, v3, v4, v5, v6, v7, v8)
    return (
        f * dy0, f * dy1, f * dy2, f * dy3, f * dy4, f * dy5, f * dy6, f * dy7, f * dy8,
        f * dm0, f * dm1, f * dm2, f * dm3, f * dm4, f * dm5, f * dm6, f * dm7, f * dm8,
    )  # fmt: skip


@triton.jit
def square(q, d0, d1, d2, d3, d4, d5, d6, d7, d8):
    """Components of q D D."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose(d0, d1, d2, d3, d4, d5, d6, d7, d8)
    p0, p1, p2, p3, p4, p5, p6, p7, p8 = matmul(a0, a1, a2, a3, a4, a5, a6, a7, a8, a0, a1, a2, a3, a4, a5, a6, a7, a8)
    return decompose(q * p0, q * p1, q * p2, q * p3, q * p4, q * p5, q * p6, q * p7, q * p8)


@triton.jit
def add_square_adjoint(q, d0, d1, d2, d3, d4, d5, d6, d7, d8, g0, g1, g2, g3, g4, g5, g6, g7, g8):
    """Gradient of D from the gradient g of D + q D D: for full tensors, G + q (G Dᵀ + Dᵀ G)."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = compose(d0, d1, d2, d3, d4, d5, d6, d7, d8)
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = decompose_adjoint(g0, g1, g2, g3, g4, g5, g6, g7, g8)
    u0, u1, u2, u3, u4, u5, u6, u7, u8 = anticommutator_adjoint(
        h0, h1, h2, h3, h4, h5, h6, h7, h8, a0, a1, a2, a3, a4, a5, a6, a7, a8
    )
    e0, e1, e2, e3, e4, e5, e6, e7, e8 = compose_adjoint(u0, u1, u2, u3, u4, u5, u6, u7, u8)
    return (
        g0 + q * e0,
        g1 + q * e1,
        g2 + q * e2,
        g3 + q * e3,
        g4 + q * e4,
        g5 + q * e5,
        g6 + q * e6,
        g7 + q * e7,
        g8 + q * e8,
    )


@triton.jit
def load9(base, mask, F: tl.constexpr):
    """The nine components at base, F apart, in float32; 0 where masked."""
    return (
        tl.load(base, mask, other=0.0).to(tl.float32),
        tl.load(base + F, mask, other=0.0).to(tl.float32),
        tl.load(base + 2 * F, mask, other=0.0).to(tl.float32),
        tl.load(base + 3 * F, mask, other=0.0).to(tl.float32),
        tl.load(base + 4 * F, mask, other=0.0).to(tl.float32),
        tl.load(base + 5 * F, mask, other=0.0).to(tl.float32),
        tl.load(base + 6 * F, mask, other=0.0).to(tl.float32),
        tl.load(base + 7 * F, mask, other=0.0).to(tl.float32),
        tl.load(base + 8 * F, mask, other=0.0).to(tl.float32),
    )


@triton.jit
def load9_early(base, mask, F: tl.constexpr):
    """`load9` past the L1 cache, for what is read before `after_previous` (triton_launch.py)."""
    return (
        tl.load(base, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 2 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 3 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 4 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 5 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 6 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 7 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
        tl.load(base + 8 * F, mask, other=0.0, cache_modifier=".cg").to(tl.float32),
    )


@triton.jit
def store9(base, mask, F: tl.constexpr, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    """Write the nine components at base, F apart, rounded to the type of the field."""
    tl.store(base, x0, mask)
    tl.store(base + F, x1, mask)
    tl.store(base + 2 * F, x2, mask)
    tl.store(base + 3 * F, x3, mask)
    tl.store(base + 4 * F, x4, mask)
    tl.store(base + 5 * F, x5, mask)
    tl.store(base + 6 * F, x6, mask)
    tl.store(base + 7 * F, x7, mask)
    tl.store(base + 8 * F, x8, mask)


@triton.jit
def halves(x):
    """x as two numbers of half precision, high + rest/2048."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def in_words(x):
    """`halves` of x in the 32 bits of one number.

    What only products read is written so: it is split once, not by each program that reads it.
    """
    high, rest = halves(x)
    upper = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (upper | (rest.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def halves_of_words(x):
    """The `halves` that `in_words` wrote."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True), bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def store9_words(base, mask, F: tl.constexpr, x0, x1, x2, x3, x4, x5, x6, x7, x8, WORDS: tl.constexpr):
    """`store9`; where WORDS, each number in words for products (`in_words`)."""
    if WORDS:
        x0, x1, x2, x3, x4 = in_words(x0), in_words(x1), in_words(x2), in_words(x3), in_words(x4)
        x5, x6, x7, x8 = in_words(x5), in_words(x6), in_words(x7), in_words(x8)
    store9(base, mask, F, x0, x1, x2, x3, x4, x5, x6, x7, x8)
