"""Shared protons: a proton on its way from O, N or S to another O, N, S or a halide ion.

`geometries.py` makes them from the conformers of each shard. Dynamics at 1000 K rarely visits these places, and a
model that has not seen them may have a false minimum there. Charge and number of electrons do not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from shards import Geometry, bonded, rotation

HEAVY = {6: 1.09, 7: 1.02, 8: 0.97, 16: 1.35, 9: 0.93, 17: 1.29, 35: 1.43, 53: 1.62}
"""Length in Å of the bond of hydrogen to atoms that may hold the proton. Carbon is for shifts.py."""
APART = 2.3, 3.2  # Å, between the heavy atoms
GEMINAL = 2.1  # Å, for two on one atom, as the oxygens of a carboxyl group
THERMAL = 0.03  # Å, of all atoms
CLEAR = 1.35  # Å, from the proton to other atoms
FRACTIONS = -0.15, 1.05  # of the way; below 0: too near the atom that it comes from
PLACES, STEP, SIDEWAYS = 3, 0.03, 0.12  # of a way: pairs of places, Å between those of a pair, Å beside the line
CLASH = 0.62  # least distance of two molecules, relative to the sums of van der Waals radii
ORIENTATIONS = 24  # tried for each dimer


class Sites(NamedTuple):
    """donors: pairs (hydrogen, its heavy atom), weights: of each; acceptors: indices."""

    donors: list[tuple[int, int]]
    weights: list[float]
    acceptors: list[int]


def sites(geometry: Geometry) -> Sites:
    """Donors and acceptors of a proton. Acids of P and S and anions weigh most, amines and amides least."""
    often = 3.0 if geometry.charge < 0 else 1.0
    z, bonds = geometry.numbers, bonded(geometry)
    donors, weights = [], []
    for h in np.flatnonzero((z == 1) & (bonds.sum(0) == 1)):
        d = int(np.flatnonzero(bonds[h])[0])
        if z[d] in (7, 8, 16) and bonds[d].sum() > 1:  # not hydroxide
            acid = z[d] == 8 and bool(np.isin(z[bonds[d]], (15, 16)).any())
            donors.append((int(h), d))
            weights.append(often * (8.0 if acid else 1.0 if z[d] != 7 or bonds[d].sum() == 4 else 0.2))
    most = {7: 3, 8: 2, 16: 2, 9: 0, 17: 0, 35: 0, 53: 0}  # neighbours of an acceptor
    acceptors = [k for k, number in enumerate(z) if bonds[k].sum() <= most.get(int(number), -1)]
    return Sites(donors, weights, acceptors)


def within(geometry: Geometry, found: Sites) -> list[tuple[int, int, int]]:
    """Triples (hydrogen, donor, acceptor) of one structure that are near enough."""
    bonds, pairs = bonded(geometry), []
    for h, d in found.donors:
        for a in found.acceptors:
            apart = np.linalg.norm(geometry.positions[a] - geometry.positions[d])
            least = GEMINAL if (bonds[a] & bonds[d]).any() else APART[0]
            if a != d and not bonds[a, d] and least <= apart <= APART[1]:
                pairs.append((h, d, a))
    return pairs


def moved(geometry: Geometry, h: int, d: int, a: int, rng: np.random.Generator) -> Geometry | None:
    """The proton somewhere on the line from donor to acceptor, all atoms displaced a little.

    Where another atom is nearer than `CLEAR`, the proton goes around it; None if it cannot.
    """
    positions = geometry.positions + rng.normal(0, THERMAL, geometry.positions.shape)
    centre, line = on_the_line(geometry.numbers, positions, d, a, rng)
    others = np.delete(positions, [h, d, a], axis=0)
    sideways = across(line, rng)
    for offset in (0.0, 0.25, 0.5, 0.75, 1.0):
        place = with_room(centre + offset * sideways, others, CLEAR)
        if place is not None:
            positions[h] = place
            return geometry._replace(positions=positions)
    return None


def on_the_line(
    numbers: np.ndarray, positions: np.ndarray, d: int, a: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random place [3] of a proton on the line from donor to acceptor, and the direction [3] of the line."""
    line = positions[a] - positions[d]
    apart = float(np.linalg.norm(line))
    line = line / apart
    begin, end = HEAVY[int(numbers[d])], apart - HEAVY[int(numbers[a])]
    return positions[d] + line * (begin + rng.uniform(*FRACTIONS) * (end - begin)), line


def ways(geometry: Geometry, rng: np.random.Generator) -> list[Geometry]:
    """The molecule with one of its protons near the line to an acceptor, at up to PLACES pairs of places.

    The two places of a pair are STEP apart along the line, and no other atom moves. [] if no acceptor is near.

    A network can have peaks of the force that are narrower than the distances between random structures. The energies
    of a pair differ by the force between its places.
    """
    triples, found = within(geometry, sites(geometry)), []
    if not triples:
        return []
    h, d, a = triples[rng.integers(len(triples))]
    others = np.delete(geometry.positions, [h, d, a], axis=0)
    for _ in range(PLACES):
        centre, line = on_the_line(geometry.numbers, geometry.positions, d, a, rng)
        centre = centre + SIDEWAYS * rng.normal() * across(line, rng)[0]
        if with_room(centre[None], others, CLEAR) is not None:
            for step in (-STEP / 2, STEP / 2):
                positions = geometry.positions.copy()
                positions[h] = centre + step * line
                found.append(geometry._replace(positions=positions))
    return found


def across(line: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Twelve random directions at right angles to a direction [3] of length 1, [12, 3]."""
    sideways = rng.normal(size=(12, 3))
    sideways -= (sideways @ line)[:, None] * line
    return sideways / np.linalg.norm(sideways, axis=1, keepdims=True)


def with_room(places: np.ndarray, others: np.ndarray, clear: float) -> np.ndarray | None:
    """The place [3] that is farthest from all other atoms [n, 3]; None if it is nearer than `clear`."""
    room = np.linalg.norm(places[:, None] - others[None], axis=2).min(1, initial=np.inf)
    return places[room.argmax()] if room.max() >= clear else None


def oriented(
    first: np.ndarray, second: np.ndarray, centre: np.ndarray, touching: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    """The second molecule, rotated about a point away from the first as far as possible; None if they do not fit.

    Args:
        first, second: positions [n, 3] and [m, 3] in Å.
        centre: [3], Å.
        touching: [n, m] Å, sums of van der Waals radii.
        rng: decides on the orientations that are tried.
    """
    best, widest = None, CLASH
    for _ in range(ORIENTATIONS):
        placed = (second - centre) @ rotation(rng) + centre
        between = np.linalg.norm(first[:, None] - placed[None], axis=2) / touching
        if between.min() > widest:
            best, widest = placed, float(between.min())
    return best


def paired(
    one: Geometry, h: int, d: int, other: Geometry, a: int, radii: dict[int, float], rng: np.random.Generator
) -> Geometry | None:
    """Two molecules with the acceptor near the line of the donor's bond; None if they do not fit."""
    direction = one.positions[h] - one.positions[d]
    direction = direction / np.linalg.norm(direction) + rng.normal(0, 0.2, 3)
    target = one.positions[d] + rng.uniform(*APART) * direction / np.linalg.norm(direction)
    touching = np.array([[radii[int(p)] + radii[int(q)] for q in other.numbers] for p in one.numbers])
    touching[h, :] = touching[d, a] = 1e-3  # the proton is moved afterwards
    best = oriented(one.positions, other.positions - other.positions[a] + target, target, touching, rng)
    if best is None:
        return None
    return Geometry(f"{one.name}.{other.name}", np.concatenate([one.numbers, other.numbers]),
                    np.concatenate([one.positions, best]), one.charge + other.charge)  # fmt: skip


def shared_protons(
    conformers: list[Geometry],
    partners: list[Geometry],
    radii: dict[int, float],
    count: int,
    largest: int,
    rng: np.random.Generator,
) -> list[Geometry]:
    """About `count` structures, half of them within a molecule and half of them dimers, or fewer if there are not
    enough.

    Args:
        conformers: of one subset.
        partners: small ones of the same subset, water and ions, for the dimers.
        radii: of van der Waals in Å, by atomic number.
        count: of the structures.
        largest: most atoms of a dimer.
        rng: of all choices.
    """
    known = [sites(g) for g in conformers]
    inside = [(k, *pair) for k, g in enumerate(conformers) for pair in within(g, known[k])]
    between = [(k, *pair) for k, _ in enumerate(conformers) for pair in known[k].donors]
    weight = [dict(zip(s.donors, s.weights, strict=True)) for s in known]
    made = []
    for k, h, d, a in _chosen(inside, [weight[p[0]][p[1], p[2]] for p in inside], count // 2, rng):
        made.append(moved(conformers[k], h, d, a, rng))
    takers = [(p, s.acceptors) for p, s in ((p, sites(p)) for p in partners) if s.acceptors]
    for k, h, d in _chosen(between, [weight[p[0]][p[1], p[2]] for p in between], count - count // 2, rng):
        one = conformers[k]
        fits = [(p, at) for p, at in takers
                if len(one.numbers) + len(p.numbers) <= largest and abs(one.charge + p.charge) <= 2]  # fmt: skip
        if fits:
            other, acceptors = fits[rng.integers(len(fits))]
            a = acceptors[rng.integers(len(acceptors))]
            pair = paired(one, h, d, other, a, radii, rng)
            made.append(pair and moved(pair, h, d, len(one.numbers) + a, rng))
    return [g for g in made if g is not None]


def _chosen(places: list, weights: list[float], count: int, rng: np.random.Generator) -> list:
    """`count` choices at random by weight; each at most six times."""
    if not places:
        return []
    chance = np.array(weights) / sum(weights)
    often = rng.multinomial(count, chance).clip(max=6)
    return [place for place, times in zip(places, often, strict=True) for _ in range(times)]
