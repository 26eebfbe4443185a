"""Substitutions at carbon (SN2): a lone pair comes from behind and replaces the leaving group.

`geometries.py` makes them from the conformers of each shard. Dynamics does not visit these places, and a model that has
not seen them gives barriers that are too high by 40 kcal/mol and more. The orders of the two bonds, n of the new one
and 1 − n of the old one, give the progress of a structure; the three other groups turn over like an umbrella.
"""

from __future__ import annotations

import numpy as np
from ase.data import covalent_radii
from protons import THERMAL, oriented, sites
from shards import Geometry, bonded
from stretched import side

LEAVING = 7, 8, 9, 16, 17, 35, 53
LONGER = 0.6  # Å: a bond of order n is longer by −0.6 ln n
ORDERS = 0.03, 0.97  # of the new bond
TOGETHER = 0.7, 1.1  # sum of both orders
TILT = 1 / 3  # cosine of the angle of the other groups with the bond, before and after
HEAVY = 2  # most of the other three groups that are not hydrogen
CLOSEST = 0.6  # distance of two atoms relative to the sum of their covalent radii; the teacher is wrong below
IONS = 0.5  # share of ions of one or two atoms among what comes
Centre = tuple[int, int, int]
"""Index of the conformer, its carbon, the atom that leaves."""


def hangs(bonds: np.ndarray, a: int, b: int) -> bool:
    """Whether the bond a–b is in no ring."""
    beyond = side(bonds, a, b)
    reached = bonds[beyond].any(0)
    reached[[*beyond, a]] = False
    return not reached.any()


def centres(geometry: Geometry) -> list[tuple[int, int]]:
    """(carbon, leaving atom) of carbons with four groups, none of them in a ring with it and few of them large."""
    z, bonds, found = geometry.numbers, bonded(geometry), []
    for c in np.flatnonzero((z == 6) & (bonds.sum(0) == 4)).tolist():
        groups = np.flatnonzero(bonds[c]).tolist()
        if not all(hangs(bonds, c, g) for g in groups):
            continue
        for y in groups:
            heavy = sum(z[g] != 1 for g in groups if g != y)
            if z[y] in LEAVING and heavy <= HEAVY:
                found.append((c, y))
    return found


def turned(geometry: Geometry, c: int, y: int, order: float, length: float) -> np.ndarray:
    """Positions with the leaving group `length` away, and the other three turned over according to the order."""
    positions, bonds = geometry.positions.copy(), bonded(geometry)
    centre = geometry.positions[c]
    along = geometry.positions[y] - centre
    apart = float(np.linalg.norm(along))
    along = along / apart
    for group in np.flatnonzero(bonds[c]).tolist():
        atoms = side(bonds, c, group)
        if group == y:
            positions[atoms] += (length - apart) * along
            continue
        arm = geometry.positions[group] - centre
        cosine = float(arm @ along / np.linalg.norm(arm))
        axis = np.cross(along, arm)
        axis /= np.linalg.norm(axis)
        angle = np.arccos(TILT * (2 * order - 1)) - np.arccos(cosine)  # from the direction of what leaves
        moved = positions[atoms] - centre
        positions[atoms] = centre + (
            np.cos(angle) * moved
            + np.sin(angle) * np.cross(axis, moved)
            + (1 - np.cos(angle)) * (moved @ axis)[:, None] * axis
        )
    return positions


def substituted(
    one: Geometry, c: int, y: int, other: Geometry, x: int, radii: dict[int, float], rng: np.random.Generator
) -> Geometry | None:
    """A structure between educts and products; None if the molecules do not fit.

    Args:
        one: has the carbon c and the leaving atom y.
        other: comes with its atom x.
        radii: of van der Waals in Å, by atomic number.
        rng: decides on the orders, the orientation and thermal displacements.
    """
    order, together = rng.uniform(*ORDERS), rng.uniform(*TOGETHER)
    radius = covalent_radii[6]
    new = radius + covalent_radii[other.numbers[x]] - LONGER * min(0.0, float(np.log(together * order)))
    old = radius + covalent_radii[one.numbers[y]] - LONGER * min(0.0, float(np.log(together * (1 - order))))
    first = turned(one, c, y, order, old)
    along = (first[y] - first[c]) / np.linalg.norm(first[y] - first[c])
    touching = np.array([[radii[int(p)] + radii[int(q)] for q in other.numbers] for p in one.numbers])
    touching[c, x] = 1e-3
    place = first[c] - new * along
    best = oriented(first, other.positions - other.positions[x] + place, place, touching, rng)
    if best is None:
        return None
    numbers, positions = np.concatenate([one.numbers, other.numbers]), np.concatenate([first, best])
    positions += rng.normal(0, THERMAL, positions.shape)
    if _closest(numbers, positions) < CLOSEST:  # a group was turned into another one
        return None
    return Geometry(f"{one.name}.{other.name}", numbers, positions, one.charge + other.charge)


def _closest(numbers: np.ndarray, positions: np.ndarray) -> float:
    radii = covalent_radii[numbers]
    apart = np.linalg.norm(positions[:, None] - positions[None], axis=2) / (radii[:, None] + radii[None])
    return float((apart + 9 * np.eye(len(radii))).min())


def substitutions(
    conformers: list[Geometry],
    ions: list[Geometry],
    radii: dict[int, float],
    count: int,
    largest: int,
    rng: np.random.Generator,
) -> list[Geometry]:
    """About `count` structures. CH3F and CH3Cl with F−, Cl− and OH− are left out: they are in benchmarks.

    Args:
        conformers: of one subset; they have the carbons, and some of them the lone pairs.
        ions: further molecules with lone pairs; cations are ignored.
        radii: of van der Waals in Å, by atomic number.
        count: of the structures.
        largest: most atoms of a structure.
        rng: of all choices.
    """
    places: list[Centre] = [(k, c, y) for k, g in enumerate(conformers) for c, y in centres(g)]
    small = [(g, sites(g).acceptors) for g in ions if g.charge <= 0]
    large = [(g, at) for g, at in ((g, sites(g).acceptors) for g in conformers if g.charge <= 0) if at]
    often = np.array([5.0 if g.charge < 0 else 1.0 for g, _ in large])  # anions react
    made = []
    for p in rng.integers(len(places), size=count) if places else ():
        k, c, y = places[p]
        if large and rng.random() > IONS:
            other, acceptors = large[rng.choice(len(large), p=often / often.sum())]
        else:
            other, acceptors = small[rng.integers(len(small))]
        one = conformers[k]
        fits = len(one.numbers) + len(other.numbers) <= largest and abs(one.charge + other.charge) <= 2
        if fits and not _benchmark(one, other):
            x = acceptors[rng.integers(len(acceptors))]
            made.append(substituted(one, c, y, other, x, radii, rng))
    return [geometry for geometry in made if geometry is not None]


def _benchmark(one: Geometry, other: Geometry) -> bool:
    methyl = sorted(one.numbers.tolist()) in ([1, 1, 1, 6, 9], [1, 1, 1, 6, 17])
    return methyl and sorted(other.numbers.tolist()) in ([9], [17], [1, 8])
