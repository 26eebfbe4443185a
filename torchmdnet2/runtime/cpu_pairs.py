"""Edges of small structures without cell, from all pairs of atoms, compiled by numba.

Shapes: B structures of n atoms each, N = B·n atoms, E edges.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["all_pairs"]


@njit(cache=True, error_model="numpy")  # no fastmath: it would not see what is not a number
def all_pairs(pos, cutoff, row_ptr, sender, vec, nearest=0.0):
    """CSR rows of the pairs closer than the cutoff, in the order of the neighbor list.

    Args:
        pos: [B, n, 3] Å.
        cutoff: Å.
        row_ptr: [N + 1] int64, sender: [E] int64, vec: [E, 3] float32: filled as far as there is room.
        nearest: Å; closer atoms are at the same place.

    Returns:
        E; −1 when a position is not finite, or two atoms are at the same place.
    """
    for b in range(pos.shape[0]):
        for i in range(pos.shape[1]):
            for a in range(3):
                if not np.isfinite(pos[b, i, a]):
                    return -1
    n, found, least, limit = pos.shape[1], 0, nearest * nearest, cutoff * cutoff
    row_ptr[0] = 0
    for b in range(pos.shape[0]):
        for i in range(n):
            px, py, pz = pos[b, i, 0], pos[b, i, 1], pos[b, i, 2]
            for j in range(n):
                x, y, z = pos[b, j, 0] - px, pos[b, j, 1] - py, pos[b, j, 2] - pz
                square = x * x + y * y + z * z
                if square < limit and i != j:
                    if square < least:
                        return -1
                    if found < len(sender):
                        sender[found] = b * n + j
                        vec[found, 0], vec[found, 1], vec[found, 2] = x, y, z
                    found += 1
            row_ptr[b * n + i + 1] = found
    return found
