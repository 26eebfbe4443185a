"""Kernels for the priors that are sums over pairs, on the CPU: as ../triton/frame.py, in float64.

Threads share out the atoms; every atom adds to its own row, so that results do not depend on the number of threads.

Shapes: N atoms, B structures, E edges, K rows of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numba import njit, prange

from ...numba_options import OPTIONS, PARALLEL
from .radial import all_pairs, d2, inline, pair_potential, reaction_field, zbl

__all__ = ["KERNELS", "MIN_DISTANCE", "NOTHING", "add_edge", "add_row", "length"]

MIN_DISTANCE = 1e-3  # Å, as priors/pairs.py
NOTHING = (0.0,) * 10


@inline
def length(square):
    """d ≥ MIN_DISTANCE from d², and 1/d, 0 where the clamp takes the slope away."""
    if square < MIN_DISTANCE * MIN_DISTANCE:
        return MIN_DISTANCE, 0.0
    d = math.sqrt(square)
    return d, 1 / d


@inline
def add_edge(s, energy, along, x, y, z):
    """The ten sums of a row (energy, force, xx, yy, zz, yz, xz, xy of the virial) with a pair: along = u'(d)/d."""
    gx, gy, gz = along * x, along * y, along * z
    return (
        s[0] + energy, s[1] + gx, s[2] + gy, s[3] + gz, s[4] + gx * x, s[5] + gy * y, s[6] + gz * z, s[7] + gy * z,
        s[8] + gx * z, s[9] + gx * y,
    )  # fmt: skip


@inline
def add_row(s, factor, i, energy, forces, virial):
    """Add the sums of a row, times a factor, to energy [N], forces [N, 3] and virial [N, 9]."""
    half = 0.5 * factor
    energy[i] += half * s[0]
    forces[i, 0] += factor * s[1]
    forces[i, 1] += factor * s[2]
    forces[i, 2] += factor * s[3]
    row = virial[i]
    row[0] += half * s[4]
    row[4] += half * s[5]
    row[8] += half * s[6]
    row[5] += half * s[7]
    row[7] += half * s[7]
    row[2] += half * s[8]
    row[6] += half * s[8]
    row[1] += half * s[9]
    row[3] += half * s[9]


@inline
def _listed(g_of, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces, virial):
    """Add the edges of atom i; returns dE/dA."""
    own, s, limit = table[key[i]], NOTHING, cutoff * cutoff
    for e in range(row_ptr[i], row_ptr[i + 1]):
        x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
        square = x * x + y * y + z * z
        if square < limit:
            d, inverse = length(square)
            other = table[key[sender[e]]]
            g, slope = g_of(d, own[1] + other[1], own[2] + other[2], constants, mode)
            s = add_edge(s, other[0] * g, other[0] * slope * inverse, x, y, z)
    add_row(s, strength * own[0], i, energy, forces, virial)
    return strength * s[0]


@njit(**PARALLEL, **OPTIONS)
def _zbl(row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope):
    for i in prange(len(row_ptr) - 1):
        slope[i] += _listed(
            zbl, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces, virial
        )


@njit(**PARALLEL, **OPTIONS)
def _d2(row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope):
    for i in prange(len(row_ptr) - 1):
        slope[i] += _listed(
            d2, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces, virial
        )


@njit(**PARALLEL, **OPTIONS)
def _reaction_field(
    row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope
):  # fmt: skip
    for i in prange(len(row_ptr) - 1):
        slope[i] += _listed(
            reaction_field, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces,
            virial,
        )  # fmt: skip


@njit(**PARALLEL, **OPTIONS)
def _all_pairs(first, last, members, pos, key, table, strength, constants, mode, energy, forces, virial, slope):
    """Atom i with members[first[i] … last[i] − 1], the atoms of its structure."""
    for i in prange(len(pos)):
        own, s = table[key[i]], NOTHING
        for k in range(first[i], last[i]):
            j = members[k]
            if j != i:
                x, y, z = pos[j, 0] - pos[i, 0], pos[j, 1] - pos[i, 1], pos[j, 2] - pos[i, 2]
                d, inverse = length(x * x + y * y + z * z)
                other = table[key[j]]
                g, g_slope = all_pairs(d, own[1] + other[1], own[2] + other[2], constants, mode)
                s = add_edge(s, other[0] * g, other[0] * g_slope * inverse, x, y, z)
        add_row(s, strength * own[0], i, energy, forces, virial)
        slope[i] += strength * s[0]


@njit(**PARALLEL, **OPTIONS)
def _pair_potential(row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope):
    for i in prange(len(row_ptr) - 1):
        slope[i] += _listed(
            pair_potential, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces,
            virial,
        )  # fmt: skip


KERNELS: dict[str, Callable] = {
    "zbl": _zbl,
    "pair_potential": _pair_potential,
    "d2": _d2,
    "reaction_field": _reaction_field,
    "all_pairs": _all_pairs,
}
"""By the name of the function of the distance. They add to energy [N], forces [N, 3], virial [N, 9], slope [N] (dE/dA).

Arguments: rows of edges (row_ptr [N + 1], sender and vec [E, 3] float32) or of structures; key [N], the row of the
table [K, 3] (A, b, c) of each atom; strength, cutoff (Å, finite), constants and mode as in ../parameters.py.
"""
