"""The functions of the distance that pair priors are made of, with their slopes, for Triton kernels.

The energy of a pair is strength · A_i A_j · g(d, b_i + b_j, c_i + c_j), with numbers A, b, c of each atom. A radial
function takes the distance d in Å, the two sums, six constants (numbers, or pointers to tables) and a mode, and returns
g and dg/dd. What a prior's `forward` (torchmdnet2/priors) writes as differences that cancel is written here as
products, which float32 can bear.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["all_pairs", "d2", "ewald", "pair_potential", "reaction_field", "taper", "zbl"]

_PI = tl.constexpr(3.141592653589793)


@triton.jit
def taper(d, start, inverse):
    """`priors.pairs.taper` = (1 − t)³ (1 + 3t + 6t²), and its slope; `inverse` of the switch's width, 1/Å."""
    t = tl.minimum(tl.maximum((d - start) * inverse, 0.0), 1.0)
    rest = 1.0 - t
    square = rest * rest
    return square * rest * (1.0 + t * (3.0 + 6.0 * t)), -30.0 * t * t * square * inverse


@triton.jit
def zbl(d, power, radii, cutoff, _c1, _c2, _c3, _c4, _c5, COVALENT: tl.constexpr):
    """φ(d/a)/d · end; power = 1/a in 1/Å.

    The end is sin²(π/2 (1 − d/cutoff)), or 1 − 28t⁶ + 48t⁷ − 21t⁸ = (1 − t)³ (1 + 3t + … + 21t⁵) with t = d/radii.
    """
    x = d * power
    e0, e1 = 0.1818 * tl.exp(-3.2 * x), 0.5099 * tl.exp(-0.9423 * x)
    e2, e3 = 0.2802 * tl.exp(-0.4029 * x), 0.02817 * tl.exp(-0.2016 * x)
    g = (e0 + e1 + e2 + e3) / d
    slope = -(3.2 * e0 + 0.9423 * e1 + 0.4029 * e2 + 0.2016 * e3) * power / d - g / d
    if COVALENT:
        t = tl.minimum(d / radii, 1.0)
        rest = tl.maximum((radii - d) / radii, 0.0)
        square = rest * rest
        end = square * rest * (1.0 + t * (3.0 + t * (6.0 + t * (10.0 + t * (15.0 + t * 21.0)))))
        end_slope = -168.0 * t * t * t * t * t * square / radii
    else:
        half = _PI / 2 * ((cutoff - d) / cutoff)
        sin = tl.sin(half)
        end = sin * sin
        end_slope = -_PI / cutoff * sin * tl.cos(half)
    return g * end, slope * end + g * end_slope


@triton.jit
def pair_potential(d, place, _sum, table, cutoff, _c2, _c3, _c4, _c5, _MODE: tl.constexpr):
    """(Σ_k A_k exp(−a_k (d − 1)) − Σ_k B_k exp(−b_k (d − 1))) (1 − d²/cutoff²)³; A, B in row `place` of the table."""
    row = table + 8 * place.to(tl.int32)
    x = d - 1.0
    r0, r1 = tl.load(row) * tl.exp(-3.2 * x), tl.load(row + 1) * tl.exp(-4.0 * x)
    r2, r3 = tl.load(row + 2) * tl.exp(-5.0 * x), tl.load(row + 3) * tl.exp(-6.5 * x)
    q0, q1 = tl.load(row + 4) * tl.exp(-x), tl.load(row + 5) * tl.exp(-1.5 * x)
    q2, q3 = tl.load(row + 6) * tl.exp(-2.0 * x), tl.load(row + 7) * tl.exp(-2.6 * x)
    g = (r0 + r1 + r2 + r3) - (q0 + q1 + q2 + q3)
    slope = (q0 + 1.5 * q1 + 2.0 * q2 + 2.6 * q3) - (3.2 * r0 + 4.0 * r1 + 5.0 * r2 + 6.5 * r3)
    rest = tl.maximum((cutoff - d) * (cutoff + d) / (cutoff * cutoff), 0.0)
    end, end_slope = rest * rest * rest, -6.0 * d / (cutoff * cutoff) * rest * rest
    return g * end, slope * end + g * end_slope


@triton.jit
def d2(d, radii, _sum, start, inverse, _c2, _c3, _c4, _c5, _MODE: tl.constexpr):
    """1/d⁶ · 1/(1 + exp(−20 (d/radii − 1))) · taper."""
    r = 1.0 / d
    r3 = r * r * r
    r6 = r3 * r3
    y = d / radii
    near = y < 0.5  # exp(20 − 20 y) in two factors there: 20 − 20 y would round off most of y
    falling = tl.exp(20.0 * (tl.where(near, 0.0, 1.0) - y)) * tl.where(near, 485165195.4097903, 1.0)
    damping = 1.0 / (1.0 + falling)
    damping_slope = damping * damping * falling * (20.0 / radii)
    end, end_slope = taper(d, start, inverse)
    return r6 * damping * end, r6 * ((damping_slope - 6.0 * r * damping) * end + damping * end_slope)


@triton.jit
def _short_range(d, lower, inverse, DAMPING: tl.constexpr):
    """`Electrostatics.factor` and its slope.

    DAMPING: 0 none; 1 "exp", with inverse = 1/upper; 2 "cosine", with inverse = 1/(upper − lower).
    """
    if DAMPING == 0:
        f = tl.full(d.shape, 1.0, tl.float32)
        slope = tl.zeros_like(d)
    elif DAMPING == 1:
        t = tl.minimum(d * inverse, 1.0 - 1e-6)
        rest = (1.0 - t) * (1.0 + t)
        x = t * t / rest  # f = 1 − exp(−x)
        higher = 1.0 - x * (1.0 / 5 - x * (1.0 / 30 - x * (1.0 / 210 - x / 1680)))
        series = x * (1.0 - x / 2 * (1.0 - x / 3 * (1.0 - x / 4 * higher)))
        falling = tl.exp(-x)
        f = tl.where(x < 0.3, series, 1.0 - falling)
        slope = falling * 2.0 * t * inverse / (rest * rest)
    else:
        phase = tl.minimum(tl.maximum((d - lower) * inverse, 0.0), 1.0) * (_PI / 2)
        sin = tl.sin(phase)
        f = sin * sin
        slope = _PI * inverse * sin * tl.cos(phase)
    return f, slope


@triton.jit
def all_pairs(d, _b, _c, lower, inverse, _c2, _c3, _c4, _c5, DAMPING: tl.constexpr):
    """f(d)/d."""
    f = tl.full(d.shape, 1.0, tl.float32)
    f_slope = tl.zeros_like(d)
    if DAMPING > 0:
        # 1 from `upper` on, where nearly all pairs of a large structure are
        if (tl.min(d, 0) - lower) * inverse < 1.0:
            f, f_slope = _short_range(d, lower, inverse, DAMPING)
    r = 1.0 / d
    return f * r, (f_slope - f * r) * r


@triton.jit
def reaction_field(d, _b, _c, lower, inverse, start, taper_inverse, reaction, shift, DAMPING: tl.constexpr):
    """f(d) (1/d + reaction d² − shift) · taper."""
    f, f_slope = _short_range(d, lower, inverse, DAMPING)
    end, end_slope = taper(d, start, taper_inverse)
    r = 1.0 / d
    field = r + reaction * d * d - shift
    slope = 2.0 * reaction * d - r * r
    return f * field * end, f_slope * field * end + f * (slope * end + field * end_slope)


@triton.jit
def ewald(d, _b, _c, lower, inverse, alpha, _c3, _c4, _c5, DAMPING: tl.constexpr):
    """(erfc(αd) − 1 + f(d))/d, the short-range part of an Ewald sum.

    erfc(x) = exp(−x²) Σ_n c_n tⁿ with t = 1/(1 + x/2): coefficients fitted on 0 … 6.5, right to 3e-8 of erfc, so that
    its far end is not lost to rounding. Where f is not 1, f − erf.
    """
    r = 1.0 / d
    x = alpha * d
    falling = tl.exp(-x * x)
    t = 1.0 / (1.0 + 0.5 * x)
    high = 0.2309258494 + t * (-0.447302452 + t * (0.2658298796 - t * 0.05531684188))
    middle = 0.2470879183 + t * (0.1877523133 + t * (0.007109868328 + t * high))
    erfc = falling * t * (0.2821224217 + t * (0.2817910121 + t * middle))
    slope = -1.1283791670955126 * alpha * falling
    if DAMPING == 0:
        value = erfc
    else:
        f, f_slope = _short_range(d, lower, inverse, DAMPING)
        value = tl.where(f == 1.0, erfc, f - tl.erf(x))
        slope += f_slope
    return value * r, (slope - value * r) * r
