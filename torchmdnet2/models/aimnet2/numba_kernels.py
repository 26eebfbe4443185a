"""Kernels of AIMNet2 on the CPU: radial functions, sums over neighbors and their gradients, as triton_kernels.py.

Threads share out the atoms; every atom writes to its own row, so that results do not depend on the number of threads.
Charges take part as values of one feature, the same for all radial functions.

Shapes: N atoms, E directed edges, A features, R radial functions, H combinations, F = A·R.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ...kernels.compiling_cpu import INNER, kernel
from ..tensornet.numba_kernels import exp

__all__ = ["convolve", "convolve_gradient", "find_edges", "gelu", "spread_gradient"]

ZERO, ONE, TWO, HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)


@kernel
def find_edges(begin, stop, row_ptr, vec, shifts, eta, cutoff, radial, slope, direction):
    """Of each edge: radial functions and their slopes [E, R], and direction with 1/d [E, 4]."""
    for i in range(begin, stop):
        for e in range(row_ptr[i], row_ptr[i + 1]):
            x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
            d = math.sqrt(x * x + y * y + z * z)
            inverse = 1 / d if d > 0 else 0.0
            half = 0.5 * math.pi * max(1 - d / cutoff, 0.0)
            envelope = math.sin(half) ** 2
            envelope_slope = -math.pi / cutoff * math.sin(half) * math.cos(half)
            for r in range(len(shifts)):
                away = d - shifts[r]
                bell = math.exp(-eta * away * away)
                radial[e, r] = bell * envelope
                slope[e, r] = bell * (envelope_slope - 2 * eta * away * envelope)
            direction[e, 0], direction[e, 1], direction[e, 2] = x * inverse, y * inverse, z * inverse
            direction[e, 3] = inverse


@njit(inline="always", **INNER)
def normal_below(x):
    """Φ(x), the normal distribution, and its density φ(x), in float32, so that it is vectorised.

    ½ + x·P(x²) up to 1.5; beyond that Φ(−|x|) = exp(−x²/2)·t·P(t) with t = 1 / (1 + 0.3 |x|). Each P is fitted.
    """
    square = x * x
    bell = exp(-HALF * square)
    t = ONE / (ONE + np.float32(0.3) * abs(x))
    far = np.float32(0.0209515925)
    far = np.float32(0.14260369) + t * (np.float32(-0.109697146) + t * far)
    far = np.float32(0.109354521) + t * (np.float32(-0.00769644954) + t * far)
    far = np.float32(0.120156871) + t * (np.float32(0.104547545) + t * far)
    far = np.float32(0.119660975) + t * far
    near = np.float32(3.8504793e-07)
    near = np.float32(0.000113909924) + square * (np.float32(-8.54034052e-06) + square * near)
    near = np.float32(0.00997297488) + square * (np.float32(-0.00118597433) + square * near)
    near = np.float32(0.398942278) + square * (np.float32(-0.0664902848) + square * near)
    tail = bell * t * far
    beyond = ONE - tail if x > ZERO else tail
    return (HALF + x * near if square < np.float32(2.25) else beyond), np.float32(0.3989422804014327) * bell


@kernel
def gelu(begin, stop, h, slope):
    """GELU, x Φ(x), of [N, W] in place, and its slope."""
    for i in range(begin, stop):
        x, out = h[i], slope[i]
        for c in range(len(x)):
            value = x[c]
            below, density = normal_below(value)
            out[c] = below + value * density
            x[c] = value * below


@kernel
def convolve(begin, stop, row_ptr, sender, radial, direction, values, combine, sums, squares, vectors):
    """Sums [N, F] of values [N, F] times radial functions, and |V|², [N, A·H], of V [N, 3, A·H]; see model.py."""
    channels, num_rbf, num_vectors = combine.shape
    size = channels * num_rbf
    for i in range(begin, stop):
        m, g = np.zeros((4, size), np.float32), np.empty(size, np.float32)
        m0, mx, my, mz = m[0], m[1], m[2], m[3]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            ux, uy, uz = direction[e, 0], direction[e, 1], direction[e, 2]
            for a in range(channels):
                for r in range(num_rbf):
                    g[a * num_rbf + r] = radial[e, r]
            row = values[sender[e]]
            for c in range(size):
                t = row[c] * g[c]
                m0[c] += t
                mx[c] += t * ux
                my[c] += t * uy
                mz[c] += t * uz
        v = vectors[i]
        for c in range(size):
            sums[i, c] = m0[c]
        for d in range(3):
            for a in range(channels):
                for h in range(num_vectors):
                    v[d, a * num_vectors + h] = ZERO
                for r in range(num_rbf):
                    number = m[d + 1, a * num_rbf + r]
                    for h in range(num_vectors):
                        v[d, a * num_vectors + h] += number * combine[a, r, h]
        for c in range(channels * num_vectors):
            squares[i, c] = v[0, c] * v[0, c] + v[1, c] * v[1, c] + v[2, c] * v[2, c]


@kernel
def spread_gradient(begin, stop, by_sums, by_squares, vectors, combine, gradient):
    """The gradient [N, 4, F] in the sums with radial functions, and with these and the three directions."""
    channels, num_rbf, num_vectors = combine.shape
    for i in range(begin, stop):
        dm = gradient[i]
        for c in range(channels * num_rbf):
            dm[0, c] = by_sums[i, c]
        for d in range(3):
            for a in range(channels):
                for r in range(num_rbf):
                    total = ZERO
                    for h in range(num_vectors):
                        c = a * num_vectors + h
                        total += combine[a, r, h] * by_squares[i, c] * vectors[i, d, c]
                    dm[d + 1, a * num_rbf + r] = TWO * total


@kernel
def convolve_gradient(
    begin, stop, row_ptr, sender, radial, slope, direction, values, gradient, by_values, forces, virial
):
    """Add to the gradient in the values, by_values [N, F], and to forces [N, 3] and virials [N, 9], float64."""
    size, num_rbf = values.shape[1], radial.shape[1]
    for i in range(begin, stop):
        both, own = np.empty((2, size), np.float32), values[i]
        g, s = both[0], both[1]
        m0, mx, my, mz = gradient[i, 0], gradient[i, 1], gradient[i, 2], gradient[i, 3]
        total, f, v = by_values[i], forces[i], virial[i]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            ux, uy, uz, inverse = direction[e, 0], direction[e, 1], direction[e, 2], direction[e, 3]
            for a in range(size // num_rbf):
                for r in range(num_rbf):
                    g[a * num_rbf + r] = radial[e, r]
                    s[a * num_rbf + r] = slope[e, r]
            j = sender[e]
            other, n = values[j], gradient[j]
            n0, nx, ny, nz = n[0], n[1], n[2], n[3]
            # Atom j adds g·v_j to the sums of i and g·v_j·u to its vectors; i adds g·v_i and −g·v_i·u to those of j.
            # Each row takes the gradient of both, so that it writes its own forces only: the edge of row j that is
            # the reverse has the same pair with the other sign.
            along, px, py, pz = ZERO, ZERO, ZERO, ZERO  # dE/dd at fixed u, dE/du
            for c in range(size):
                from_other = n0[c] - (ux * nx[c] + uy * ny[c] + uz * nz[c])
                from_own = m0[c] + ux * mx[c] + uy * my[c] + uz * mz[c]
                total[c] += g[c] * from_other
                along += s[c] * (other[c] * from_own + own[c] * from_other)
                px += g[c] * (other[c] * mx[c] - own[c] * nx[c])
                py += g[c] * (other[c] * my[c] - own[c] * ny[c])
                pz += g[c] * (other[c] * mz[c] - own[c] * nz[c])
            # du/dvec = (1 − u uᵀ)/d; vec points from i to j, so that dE/dvec is the force on i
            px, py, pz = px * inverse, py * inverse, pz * inverse
            along -= ux * px + uy * py + uz * pz
            gx, gy, gz = along * ux + px, along * uy + py, along * uz + pz
            f[0] += gx
            f[1] += gy
            f[2] += gz
            if inverse > ZERO:
                half = HALF / inverse  # of the virial, of which row j adds as much
                x, y, z = ux * half, uy * half, uz * half
                v[0] += gx * x
                v[1] += gx * y
                v[2] += gx * z
                v[3] += gy * x
                v[4] += gy * y
                v[5] += gy * z
                v[6] += gz * x
                v[7] += gz * y
                v[8] += gz * z
