"""The functions of the distance that pair priors are made of, with their slopes, for numba kernels.

The same functions as ../triton/radial.py, of one pair and in float64: g(d, b, c, constants, mode) → g, dg/dd.
"""

from __future__ import annotations

import math

from numba import njit

from ...numba_options import OPTIONS

__all__ = ["all_pairs", "d2", "inline", "pair_potential", "reaction_field", "taper", "zbl"]

inline = njit(forceinline=True, **OPTIONS)


@inline
def taper(d, start, inverse):
    """`priors.pairs.taper`, and its slope; `inverse` of the switch's width, 1/Å."""
    if d <= start:
        return 1.0, 0.0
    t = min((d - start) * inverse, 1.0)
    square = (1 - t) * (1 - t)
    return square * (1 - t) * (1 + t * (3 + 6 * t)), -30 * t * t * square * inverse


@inline
def zbl(d, power, radii, constants, covalent):
    """φ(d/a)/d · end; power = 1/a in 1/Å."""
    if covalent:
        if d >= radii:
            return 0.0, 0.0
        t = d / radii
        square = (1 - t) * (1 - t)
        end = square * (1 - t) * (1 + t * (3 + t * (6 + t * (10 + t * (15 + t * 21)))))
        end_slope = -168 * t**5 * square / radii
    else:
        cutoff = constants[0]
        half = math.pi / 2 * ((cutoff - d) / cutoff)
        sin = math.sin(half)
        end, end_slope = sin * sin, -math.pi / cutoff * sin * math.cos(half)
    x = d * power
    e0, e1 = 0.1818 * math.exp(-3.2 * x), 0.5099 * math.exp(-0.9423 * x)
    e2, e3 = 0.2802 * math.exp(-0.4029 * x), 0.02817 * math.exp(-0.2016 * x)
    g = (e0 + e1 + e2 + e3) / d
    slope = -(3.2 * e0 + 0.9423 * e1 + 0.4029 * e2 + 0.2016 * e3) * power / d - g / d
    return g * end, slope * end + g * end_slope


@inline
def pair_potential(d, place, _sum, constants, _mode):
    """(Σ_k A_k exp(−a_k (d − 1)) − Σ_k B_k exp(−b_k (d − 1))) (1 − d²/cutoff²)³; A, B in row `place` of the table."""
    table, cutoff = constants[0], constants[1]
    if d >= cutoff:
        return 0.0, 0.0
    row, x = int(place), d - 1.0
    r0, r1 = table[row, 0] * math.exp(-3.2 * x), table[row, 1] * math.exp(-4.0 * x)
    r2, r3 = table[row, 2] * math.exp(-5.0 * x), table[row, 3] * math.exp(-6.5 * x)
    q0, q1 = table[row, 4] * math.exp(-x), table[row, 5] * math.exp(-1.5 * x)
    q2, q3 = table[row, 6] * math.exp(-2.0 * x), table[row, 7] * math.exp(-2.6 * x)
    g = (r0 + r1 + r2 + r3) - (q0 + q1 + q2 + q3)
    slope = (q0 + 1.5 * q1 + 2.0 * q2 + 2.6 * q3) - (3.2 * r0 + 4.0 * r1 + 5.0 * r2 + 6.5 * r3)
    rest = (cutoff - d) * (cutoff + d) / (cutoff * cutoff)
    end, end_slope = rest * rest * rest, -6.0 * d / (cutoff * cutoff) * rest * rest
    return g * end, slope * end + g * end_slope


@inline
def d2(d, radii, _sum, constants, _mode):
    """1/d⁶ · 1/(1 + exp(−20 (d/radii − 1))) · taper."""
    r = 1 / d
    r3 = r * r * r
    exponent = -20 * (d / radii - 1)
    damping, damping_slope = 1.0, 0.0
    if exponent > -40:  # 1 in float64 beyond
        falling = math.exp(exponent)
        damping = 1 / (1 + falling)
        damping_slope = damping * damping * falling * (20 / radii)
    end, end_slope = taper(d, constants[0], constants[1])
    return r3 * r3 * damping * end, r3 * r3 * ((damping_slope - 6 * r * damping) * end + damping * end_slope)


@inline
def _short_range(d, lower, inverse, damping):
    """`Electrostatics.factor` and its slope; damping: 0 none, 1 "exp", 2 "cosine"."""
    if damping == 0:
        return 1.0, 0.0
    if damping == 1:
        t = min(d * inverse, 1 - 1e-6)
        rest = (1 - t) * (1 + t)
        x = t * t / rest
        return -math.expm1(-x), math.exp(-x) * 2 * t * inverse / (rest * rest)
    phase = min(max((d - lower) * inverse, 0.0), 1.0) * (math.pi / 2)
    sin = math.sin(phase)
    return sin * sin, math.pi * inverse * sin * math.cos(phase)


@inline
def all_pairs(d, _b, _c, constants, damping):
    """f(d)/d."""
    f, f_slope = _short_range(d, constants[0], constants[1], damping)
    r = 1 / d
    return f * r, (f_slope - f * r) * r


@inline
def reaction_field(d, _b, _c, constants, damping):
    """f(d) (1/d + reaction d² − shift) · taper."""
    lower, inverse, start, taper_inverse, reaction, shift = constants
    f, f_slope = _short_range(d, lower, inverse, damping)
    end, end_slope = taper(d, start, taper_inverse)
    r = 1 / d
    field = r + reaction * d * d - shift
    return f * field * end, f_slope * field * end + f * ((2 * reaction * d - r * r) * end + field * end_slope)
