"""Hydrogen on its way between two atoms of a molecule, one of them carbon.

`geometries.py` makes them from the conformers of each shard. `protons` has hydrogen between N, O and S only. Without
these structures the energies of such places err by 5 kcal/mol relative to conformers, with them by 2 to 3.
"""

from __future__ import annotations

import numpy as np
from protons import THERMAL, across, moved, with_room
from shards import Geometry, bonded

MOST = {6: 3, 7: 2, 8: 1, 16: 1}
"""Most neighbours of the atom that takes the hydrogen."""
APART = 2.1, 3.2  # Å, between two atoms without a bond
ABOVE = 0.9, 1.3  # Å, from the line of a bond to hydrogen that moves along it
CLEAR = 1.2  # Å, from there to other atoms
TESTED = {(1, 6, 7), (1,) * 8 + (6,) * 5}
"""Atomic numbers of the molecules of BH76 whose hydrogen shifts: a test, so they are left out."""
Shift = tuple[int, int, int]
"""Indices of the hydrogen, of the atom that it leaves, and of the one that it comes to."""


def shifts(geometry: Geometry) -> list[Shift]:
    """Shifts to a neighbour or a near atom that can hold one more hydrogen; one of the two atoms is carbon."""
    z, bonds = geometry.numbers, bonded(geometry)
    places = np.linalg.norm(geometry.positions[:, None] - geometry.positions[None], axis=2)
    near = bonds | ((places >= APART[0]) & (places <= APART[1]))
    takers = [k for k in range(len(z)) if bonds[k].sum() <= MOST.get(int(z[k]), -1)]
    return [
        (int(h), int(d), a)
        for h in np.flatnonzero((z == 1) & (bonds.sum(0) == 1))
        for d in np.flatnonzero(bonds[h] & np.isin(z, list(MOST)))
        for a in takers
        if a != d and near[d, a] and 6 in (z[d], z[a])
    ]


def along_a_bond(geometry: Geometry, h: int, d: int, a: int, rng: np.random.Generator) -> Geometry | None:
    """Hydrogen somewhere beside the bond of two atoms, all atoms displaced a little; None if there is no room."""
    positions = geometry.positions + rng.normal(0, THERMAL, geometry.positions.shape)
    along = positions[a] - positions[d]
    sideways = across(along / np.linalg.norm(along), rng)
    places = positions[d] + rng.uniform(-0.1, 1.1) * along + rng.uniform(*ABOVE) * sideways
    place = with_room(places, np.delete(positions, [h, d, a], axis=0), CLEAR)
    if place is None:
        return None
    positions[h] = place
    return geometry._replace(positions=positions)


def hydrogen_shifts(conformers: list[Geometry], count: int, rng: np.random.Generator) -> list[Geometry]:
    """About `count` structures, a third of them with hydrogen beside a bond, or fewer if there are not enough."""
    found: dict[bool, list[tuple[Geometry, Shift]]] = {True: [], False: []}
    for geometry in conformers:
        if tuple(sorted(geometry.numbers.tolist())) in TESTED:
            continue
        bonds = bonded(geometry)
        for shift in shifts(geometry):
            found[bool(bonds[shift[1], shift[2]])].append((geometry, shift))
    made = []
    for to_neighbour, number in ((True, count // 3), (False, count - count // 3)):
        choices = found[to_neighbour]
        for k in rng.permutation(len(choices))[:number].tolist():
            geometry, shift = choices[k]
            move = along_a_bond if to_neighbour else moved
            made.append(move(geometry, *shift, rng))
    return [geometry for geometry in made if geometry is not None]
