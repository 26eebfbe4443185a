"""D3(BJ) on the CPU in three passes over the edges, as ../triton/d3.py, in float64.

The edges of atom i are first[i] … last[i] − 1, with vectors vec [E, 3]; where pairs are not listed, all atoms of its
structure are in `sender`, and their positions pos [N, 3] count.

Shapes: N atoms, E edges, T elements, 8 reference systems of an element (the last one unused).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from ...numba_options import OPTIONS, PARALLEL
from .frame import NOTHING, add_edge, add_row, length
from .radial import inline, taper

__all__ = ["coordination", "coordination_forces", "dispersion"]


@inline
def _count(d, bond, start, inverse):
    """How much a neighbor at d adds to the coordination number, and the slope; `bond` the sum of the radii."""
    falling = math.exp(-16 * (bond / d - 1))
    counted = 1 / (1 + falling)
    end, end_slope = taper(d, start, inverse)
    return counted * end, counted * (end_slope - counted * falling * (16 * bond / (d * d)) * end)


@inline
def _pair(listed, vec, pos, e, i, j):
    """The vector of an edge of atom i, and its squared length; of all pairs, an atom is no neighbor of its own."""
    if listed:
        x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
    else:
        x, y, z = pos[j, 0] - pos[i, 0], pos[j, 1] - pos[i, 1], pos[j, 2] - pos[i, 2]
    return x, y, z, (x * x + y * y + z * z if listed or i != j else np.inf)


@njit(**PARALLEL, **OPTIONS)
def coordination(
    first, last, sender, vec, pos, listed, z, elements, reference, c6, cutoff, start, inverse, weights, mixed
):
    """Weights [N, 8] of the references and mixed [N, T, 2, 8]: C6 with each element's references, and its slope."""
    for i in prange(len(first)):
        radius, kind, count = elements[z[i], 0], int(elements[z[i], 2]), 0.0
        for e in range(first[i], last[i]):
            _x, _y, _z, square = _pair(listed, vec, pos, e, i, sender[e])
            if square < cutoff * cutoff:
                count += _count(length(square)[0], radius + elements[z[sender[e]], 0], start, inverse)[0]
        known, w, dw = reference[kind], weights[i], np.zeros(8)
        steepness = -8.0 if count < elements[z[i], 3] else 0.0
        count = min(count, elements[z[i], 3])
        nearest = 1e30
        for a in range(8):
            nearest = min(nearest, (count - known[a]) ** 2)
        total, turn = 0.0, 0.0
        for a in range(8):
            w[a] = math.exp(-4 * ((count - known[a]) ** 2 - nearest))
            total += w[a]
        for a in range(8):
            w[a] /= total
            turn += w[a] * steepness * (count - known[a])
        for a in range(8):
            dw[a] = w[a] * (steepness * (count - known[a]) - turn)
        for t in range(len(reference)):
            row = mixed[i, t]
            row[:] = 0
            for a in range(8):
                for b in range(8):
                    row[0, b] += w[a] * c6[kind, t, a, b]
                    row[1, b] += dw[a] * c6[kind, t, a, b]


@njit(**PARALLEL, **OPTIONS)
def dispersion(
    first, last, sender, vec, pos, listed, z, elements, weights, mixed, cutoff, start, inverse, s6, s8, a1, a2, energy,
    forces, virial, by_coordination,
):  # fmt: skip
    """Energies, forces at fixed coordination numbers, and by_coordination [N] = dE/dCN."""
    for i in prange(len(first)):
        own, s, turn = elements[z[i], 1], NOTHING, 0.0
        for e in range(first[i], last[i]):
            x, y, z_vec, square = _pair(listed, vec, pos, e, i, sender[e])
            if square < cutoff * cutoff:
                d, inverse_d = length(square)
                j = sender[e]
                w, row = weights[j], mixed[i, int(elements[z[j], 2])]
                c6, c6_turn = 0.0, 0.0
                for b in range(8):
                    c6 += row[0, b] * w[b]
                    c6_turn += row[1, b] * w[b]
                moments = own * elements[z[j], 1]
                f = a1 * moments + a2
                f2, d2 = f * f, d * d
                f6, d6 = f2 * f2 * f2, d2 * d2 * d2
                sixth, eighth = 1 / (d6 + f6), 1 / (d6 * d2 + f6 * f2)
                part6, part8 = s6 * sixth, s8 * moments * moments * eighth
                g = part6 + part8
                g_slope = -d6 / d * (6 * part6 * sixth + 8 * part8 * eighth * d2)
                end, end_slope = taper(d, start, inverse)
                turn -= c6_turn * g * end
                along = -c6 * (g_slope * end + g * end_slope) * inverse_d
                s = add_edge(s, -c6 * g * end, along, x, y, z_vec)
        by_coordination[i] = turn
        add_row(s, 1.0, i, energy, forces, virial)


@njit(**PARALLEL, **OPTIONS)
def coordination_forces(
    first, last, sender, vec, pos, listed, z, elements, by_coordination, cutoff, start, inverse, energy, forces, virial
):
    """Add the forces through the coordination numbers."""
    for i in prange(len(first)):
        radius, s = elements[z[i], 0], NOTHING
        for e in range(first[i], last[i]):
            x, y, z_vec, square = _pair(listed, vec, pos, e, i, sender[e])
            if square < cutoff * cutoff:
                d, inverse_d = length(square)
                j = sender[e]
                slope = _count(d, radius + elements[z[j], 0], start, inverse)[1]
                along = (by_coordination[i] + by_coordination[j]) * slope * inverse_d
                s = add_edge(s, 0.0, along, x, y, z_vec)
        add_row(s, 1.0, i, energy, forces, virial)
