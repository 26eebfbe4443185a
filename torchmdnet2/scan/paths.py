"""Paths of a scan: bonds, torsions and close contacts, with the graph of the bonds that says which atoms move.

Shapes: N atoms.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray

from ..md.guard import BONDED
from ..potential.potential import SYMBOLS
from ..system import System

__all__ = [
    "CLOSEST", "FARTHEST", "BondGraph", "Line", "ScanPath", "Turn", "bond_paths", "contact_paths", "torsion_paths",
]  # fmt: skip


_LINEAR = 170.0
"""Degrees; larger bond angles define no torsion."""


class BondGraph:
    """The bonds of a molecule: atoms at distances below 1.25 sums of their covalent radii are bonded.

    Args:
        numbers: [N] atomic numbers.
        positions: [N, 3] Å, of a molecule that is not periodic.

    Attributes:
        bonds: (i, j) with i < j, in order.
    """

    def __init__(self, numbers: NDArray[np.int64], positions: NDArray[np.float64]):
        self.positions = positions
        radii = covalent_radii[numbers]
        distances = np.linalg.norm(positions[:, None] - positions, axis=2)
        near = np.triu(distances < BONDED * np.add.outer(radii, radii), 1)
        self.bonds: list[tuple[int, int]] = [(int(i), int(j)) for i, j in np.argwhere(near)]
        self.neighbors: list[list[int]] = [[] for _ in numbers]
        for i, j in self.bonds:
            self.neighbors[i].append(j)
            self.neighbors[j].append(i)

    def side(self, i: int, j: int) -> set[int]:
        """Return the atoms that move with i when it is pulled away from j: those connected with j only through i.

        For a bond outside rings this is one side of the molecule; in a ring, it is i and the branches at i.
        """
        return self._reached(i) - self._reached(j, without=i)

    def is_rotatable(self, i: int, j: int) -> bool:
        """Return whether the bond has a torsion: it is not in a ring, and both ends have an atom off the axis."""
        return j not in self._others(i, j) and bool(self.bent(i, j)) and bool(self.bent(j, i))

    def bent(self, i: int, j: int) -> list[int]:
        """Return the other neighbors of i that are not in line with the bond i–j."""
        return [k for k in self.neighbors[i] if k != j and self._angle(k, i, j) < _LINEAR]

    def _others(self, i: int, j: int) -> set[int]:
        """Return the atoms that are connected with i without the bond i–j."""
        found = set()
        for k in self.neighbors[i]:
            if k != j:
                found |= self._reached(k, without=i)
        return found

    def _reached(self, start: int, without: int = -1) -> set[int]:
        """Return the atoms that are connected with `start` if the atom `without` is removed."""
        found, new = {start}, [start]
        while new:
            new = [n for k in new for n in self.neighbors[k] if n != without]
            new = [n for n in dict.fromkeys(new) if n not in found]
            found.update(new)
        return found

    def _angle(self, k: int, i: int, j: int) -> float:
        a, b = (self.positions[n] - self.positions[i] for n in (k, j))
        cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


# --- Bonds and torsions ---

Array = NDArray[np.float64]

CLOSEST, FARTHEST = 0.6, 2.0
"""Bonds are scanned between these multiples of their length."""

_BOND_POINTS = 141  # steps of a hundredth of the length
_TORSION_POINTS = 121  # steps of 3°


@dataclass(eq=False)
class ScanPath(ABC):
    """Structures as a function of one coordinate.

    Attributes:
        kind: "bond", "torsion" or "contact".
        name: name for reports, such as "C0–C1".
        atoms: the atoms that define the coordinate.
        system: one structure, float64 on the CPU, with the positions at `start`.
        start: value of the coordinate for these positions, Å or rad.
        usual: unit of the coordinate in reports: length of a bond, or sum of the covalent radii of a contact, in
            Å; 1 for a torsion.
        values: [n] the points of the scan, ascending, Å or rad.
    """

    kind: str
    name: str
    atoms: tuple[int, ...]
    system: System
    start: float
    usual: float
    values: Array

    @abstractmethod
    def positions(self, values: Array) -> Array:
        """Return the positions at values of the coordinate, [n, N, 3] Å."""

    @abstractmethod
    def tangents(self, values: Array) -> Array:
        """Return the derivative of the positions with respect to the coordinate, [n, N, 3]."""

    @property
    def origin(self) -> Array:
        """Positions at `start`, [N, 3] Å."""
        return self.system.pos.numpy()

    def shown(self, value: float) -> str:
        """Return a value of the coordinate as text for reports."""
        if self.kind == "torsion":
            return f"{np.degrees(value):.0f}°"
        return f"{value / self.usual:.2f}× ({value:.2f} Å)"

    def systems(self, values: Array) -> list[System]:
        """Return the structures, float64 on the CPU."""
        return [self.system.replace(pos=torch.from_numpy(pos.copy())) for pos in self.positions(values)]


@dataclass(eq=False)
class Line(ScanPath):
    """Groups of atoms move on straight lines.

    Attributes:
        velocity: [N, 3] change of the positions with the coordinate.
    """

    velocity: Array

    def positions(self, values: Array) -> Array:
        return self.origin + (values - self.start)[:, None, None] * self.velocity

    def tangents(self, values: Array) -> Array:
        return np.broadcast_to(self.velocity, (len(values), *self.velocity.shape))


@dataclass(eq=False)
class Turn(ScanPath):
    """A group of atoms turns about an axis.

    Attributes:
        moving: [N] True for atoms that turn.
        pivot: [3] Å, a point on the axis.
        axis: [3] unit vector.
    """

    moving: NDArray[np.bool_]
    pivot: Array
    axis: Array

    def positions(self, values: Array) -> Array:
        arms = np.where(self.moving[:, None], self.origin - self.pivot, 0.0)
        along = (arms @ self.axis)[:, None] * self.axis
        across = arms - along
        angle = (values - self.start)[:, None, None]
        turned = along + np.cos(angle) * across + np.sin(angle) * np.cross(self.axis, across)
        return np.where(self.moving[:, None], self.pivot + turned, self.origin)

    def tangents(self, values: Array) -> Array:
        return np.where(self.moving[:, None], np.cross(self.axis, self.positions(values) - self.pivot), 0.0)


def bond_paths(system: System, graph: BondGraph) -> list[ScanPath]:
    """Return a path for every bond, from 0.6 to 2 times its length.

    Both ends move by half of the change along the bond, each with all atoms on its side (`BondGraph.side`). All other
    bonds keep their lengths, except those in the same ring.
    """
    pos, found = system.pos.numpy(), []
    for i, j in graph.bonds:
        length = float(np.linalg.norm(pos[j] - pos[i]))
        direction = (pos[j] - pos[i]) / length
        velocity = np.zeros_like(pos)
        velocity[list(graph.side(j, i))] = direction / 2
        velocity[list(graph.side(i, j))] = -direction / 2
        values = length * np.linspace(CLOSEST, FARTHEST, _BOND_POINTS)
        name = "–".join(_atom(system, k) for k in (i, j))
        found.append(Line("bond", name, (i, j), system, length, length, values, velocity))
    return list(found)


def torsion_paths(system: System, graph: BondGraph) -> list[ScanPath]:
    """Return a full turn about every bond that has a torsion. The smaller side turns; bond lengths and angles stay."""
    pos, found = system.pos.numpy(), []
    for i, j in graph.bonds:
        if not graph.is_rotatable(i, j):
            continue
        ends = [min(graph.bent(*bond), key=lambda k: (int(system.z[k]) == 1, k)) for bond in ((i, j), (j, i))]
        small, other = sorted(((i, j), (j, i)), key=lambda bond: len(graph.side(*bond)))[0]
        moving = np.zeros(len(pos), dtype=bool)
        moving[list(graph.side(small, other))] = True
        axis = pos[small] - pos[other]
        axis /= np.linalg.norm(axis)
        angle = _dihedral(pos[[ends[0], i, j, ends[1]]])
        values = angle + np.linspace(0, 2 * np.pi, _TORSION_POINTS)
        atoms = (ends[0], i, j, ends[1])
        name = "–".join(_atom(system, k) for k in atoms)
        found.append(Turn("torsion", name, atoms, system, angle, 1.0, values, moving, pos[other], axis))
    return list(found)


def _dihedral(pos: Array) -> float:
    """Return the dihedral angle of four atoms, rad; it grows with positive turns of the far end about the bond."""
    a, b, c = pos[1] - pos[0], pos[2] - pos[1], pos[3] - pos[2]
    one, two = np.cross(a, b), np.cross(b, c)
    return float(np.arctan2(np.linalg.norm(b) * (a @ two), one @ two))


def _atom(system: System, k: int) -> str:
    return f"{SYMBOLS[int(system.z[k])]}{k}"


# --- Close contacts: two copies of a molecule approach each other with atoms of two given elements in front ---
#
# Closed-shell molecules of all elements repel each other at short distance, and they are what meets in dynamics. Two
# bare atoms, the other common choice, are radicals that molecular training data do not contain, so that a missing bond
# would not be a fault of the model.

_CLOSEST = 0.6  # multiple of the sum of covalent radii
_STEP = 0.02  # Å
_BEYOND = 1.0  # Å after the cutoff, so that the scan shows faults at the cutoff
_DIRECTIONS = 200
_TURNS = 12
_CANDIDATES = 3  # number of atoms of an element that are tried, the most exposed ones


def contact_paths(system: System, cutoff: float) -> tuple[list[ScanPath], list[str]]:
    """Return a path for each pair of elements, from 0.6 times the sum of their covalent radii to 1 Å beyond the cutoff.

    Each atom approaches along the direction in which the rest of its molecule is farthest. The most exposed atoms of
    both elements and twelve turns about the axis are tried; the choice that keeps all other atoms farthest apart wins.

    Args:
        system: one molecule, float64 on the CPU.
        cutoff: largest cutoff of the model, Å.

    Returns:
        The paths, and the pairs of elements that are left out because other atoms would be closer than the two in
        front.
    """
    z, pos = system.z.numpy(), system.pos.numpy()
    exposed = {int(e): _exposed(z, pos, int(e)) for e in np.unique(z)}
    paths: list[ScanPath] = []
    hidden = []
    for one, two in itertools.combinations_with_replacement(sorted(exposed), 2):
        total = float(covalent_radii[one] + covalent_radii[two])
        best = max(
            (_placed(z, pos, a, b, turn, total) for a in exposed[one] for b in exposed[two] for turn in range(_TURNS)),
            key=lambda found: found[0],
        )
        room, a, b, direction, copy = best
        pair = f"{SYMBOLS[one]}…{SYMBOLS[two]}"
        if room < 1:
            hidden.append(pair)
            continue
        velocity = np.concatenate([np.zeros_like(pos), np.broadcast_to(direction, pos.shape)])
        both = system.replace(pos=torch.from_numpy(np.concatenate([pos, copy])), z=system.z.repeat(2),
                              batch=system.batch.repeat(2), charge=2 * system.charge, spin=0)  # fmt: skip
        end = max(cutoff + _BEYOND, 2 * total)
        values = np.linspace(_CLOSEST * total, end, 1 + round((end - _CLOSEST * total) / _STEP))
        paths.append(Line("contact", pair, (a, b + len(z)), both, total, total, values, velocity))
    return paths, hidden


def _exposed(z: NDArray[np.int64], pos: Array, element: int) -> list[tuple[int, Array]]:
    """Return the most exposed atoms of an element, the most exposed first, and their free directions."""
    directions = _sphere()
    found = []
    for a in np.flatnonzero(z == element).tolist():
        others = np.delete(np.arange(len(z)), a)
        radii = covalent_radii[z[a]] + covalent_radii[z[others]]
        probe = pos[a] + 2 * covalent_radii[z[a]] * directions
        room = (np.linalg.norm(probe[:, None] - pos[others], axis=2) / radii).min(1, initial=np.inf)
        best = int(np.argmax(room.round(6)))
        found.append((float(room[best]), a, directions[best]))
    found.sort(key=lambda entry: (-round(entry[0], 6), entry[1]))
    return [(a, direction) for _, a, direction in found[:_CANDIDATES]]


def _placed(
    z: NDArray[np.int64], pos: Array, one: tuple[int, Array], two: tuple[int, Array], turn: int, distance: float
) -> tuple[float, int, int, Array, Array]:
    """Place a copy with the atoms in front at a distance.

    Return the smallest distance of other atoms, in sums of covalent radii; the atoms; the direction from the first to
    the second; the positions of the copy [N, 3].
    """
    (a, direction), (b, front) = one, two
    rotation = _rotation(-direction, 2 * np.pi * turn / _TURNS) @ _onto(front, -direction)
    copy = (pos - pos[b]) @ rotation.T + pos[a] + distance * direction
    ratio = np.linalg.norm(pos[:, None] - copy, axis=2) / np.add.outer(covalent_radii[z], covalent_radii[z])
    ratio[a, b] = np.inf
    return float(ratio.min()), a, b, direction, copy


def _sphere() -> Array:
    """Return evenly spread unit vectors, [n, 3]: a Fibonacci lattice."""
    k = np.arange(_DIRECTIONS) + 0.5
    z, angle = 1 - 2 * k / _DIRECTIONS, np.pi * (1 + 5**0.5) * k
    return np.stack([np.sqrt(1 - z * z) * np.cos(angle), np.sqrt(1 - z * z) * np.sin(angle), z], 1)


def _rotation(axis: Array, angle: float) -> Array:
    """Return a rotation [3, 3] by Rodrigues' formula."""
    x, y, z = axis
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def _onto(one: Array, two: Array) -> Array:
    """Return the rotation [3, 3] that takes a unit vector to another."""
    axis = np.cross(one, two)
    sine, cosine = float(np.linalg.norm(axis)), float(one @ two)
    if sine < 1e-9:
        if cosine > 0:
            return np.eye(3)
        axis = np.cross(one, np.eye(3)[int(np.argmin(np.abs(one)))])
        sine = float(np.linalg.norm(axis))
    return _rotation(axis / np.linalg.norm(axis), float(np.arctan2(sine if cosine > -1 + 1e-12 else 0.0, cosine)))
