"""Stretched bonds of every type: a model that has not seen one stretched may have no wall there.

`geometries.py` makes them from the conformers of each shard. Its `strained` geometries have bonds chosen at random, of
which most are C–H and C–C; here rare types, such as N–N or S–C, come nearly as often as these.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from shards import Geometry, bonded

STRETCH = 1.1, 2.1  # times the length of the bond
THERMAL = 0.04  # Å, of all atoms
CLASH = 0.6  # Å, shortest distance
Bond = tuple[int, int, int]
"""Index of the conformer, and of the two atoms of a bond in it."""


def side(bonds: np.ndarray, a: int, b: int) -> list[int]:
    """The atoms beyond the bond a–b, with b; in a ring, b and the atoms that are bonded to b only."""
    found, left = {b}, [b]
    while left:
        at = left.pop()
        for k in map(int, np.flatnonzero(bonds[at])):
            if k not in found and (at, k) != (b, a):
                found.add(k)
                left.append(k)
    return [b, *np.flatnonzero(bonds[b] & (bonds.sum(0) == 1)).tolist()] if a in found else sorted(found)


def stretched(geometry: Geometry, a: int, b: int, rng: np.random.Generator) -> Geometry | None:
    """Stretch one bond, moving the atoms beyond it, and displace all atoms a little; None if atoms would clash."""
    positions = geometry.positions + rng.normal(0, THERMAL, geometry.positions.shape)
    along = geometry.positions[b] - geometry.positions[a]
    positions[side(bonded(geometry), a, b)] += (rng.uniform(*STRETCH) - 1) * along
    apart = np.linalg.norm(positions[:, None] - positions[None], axis=2)
    return geometry._replace(positions=positions) if apart[np.triu_indices(len(apart), 1)].min() > CLASH else None


def stretched_bonds(conformers: list[Geometry], count: int, rng: np.random.Generator) -> list[Geometry]:
    """About `count` structures; the chance of a bond falls with the square root of the number of its type.

    The type is the two elements, each with its number of neighbours.
    """
    found: dict[Bond, tuple] = {}
    for k, geometry in enumerate(conformers):
        bonds = bonded(geometry)
        kind = list(zip(geometry.numbers.tolist(), bonds.sum(0).tolist(), strict=True))
        for a, b in np.argwhere(np.triu(bonds)).tolist():
            found[k, a, b] = tuple(sorted((kind[a], kind[b])))
    if not found:
        return []
    number, every = Counter(found.values()), list(found)
    weight = np.array([number[found[bond]] ** -0.5 for bond in every])
    picked = rng.choice(len(every), count, p=weight / weight.sum())
    made = [stretched(conformers[k], *rng.permuted([a, b]), rng) for k, a, b in (every[p] for p in picked)]
    return [geometry for geometry in made if geometry is not None]
