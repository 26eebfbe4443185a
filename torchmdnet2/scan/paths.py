"""Lines through configuration space along which a potential is scanned: bonds and torsions.

Shapes: N atoms, n points of a path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..potential import SYMBOLS
from ..system import System
from .bond_graph import BondGraph

__all__ = ["CLOSEST", "FARTHEST", "Line", "ScanPath", "Turn", "bond_paths", "torsion_paths"]

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
        name: for people, as "C0–C1".
        atoms: which ones the coordinate is of.
        system: one structure, float64 on the CPU; its positions are those at `start`.
        start: the coordinate there, Å or rad.
        usual: what the coordinate is divided by where it is shown: the bond's length, or the sum of the covalent radii
            of a contact, Å; of a torsion 1.
        values: [n] the points that are scanned, ascending, Å or rad.
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
        """[n, N, 3] Å."""

    @abstractmethod
    def tangents(self, values: Array) -> Array:
        """[n, N, 3] derivative of the positions with respect to the coordinate."""

    @property
    def origin(self) -> Array:
        """[N, 3] Å, the positions at `start`."""
        return self.system.pos.numpy()

    def shown(self, value: float) -> str:
        """A value of the coordinate for people."""
        if self.kind == "torsion":
            return f"{np.degrees(value):.0f}°"
        return f"{value / self.usual:.2f}× ({value:.2f} Å)"

    def systems(self, values: Array) -> list[System]:
        """The structures, float64 on the CPU."""
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
        moving: [N] whether an atom turns.
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
    """Every bond from 0.6 to 2 times its length.

    Both ends move by half of the change along the bond, each with all atoms that hang on it alone (`BondGraph.side`).
    All other bonds keep their lengths, but for those of a ring that the bond is in.
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
    """A full turn about every bond that has a torsion; the smaller side turns, bond lengths and angles stay."""
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
    """Of four atoms, rad; positive turns of the far end about the bond, seen along it, make it larger."""
    a, b, c = pos[1] - pos[0], pos[2] - pos[1], pos[3] - pos[2]
    one, two = np.cross(a, b), np.cross(b, c)
    return float(np.arctan2(np.linalg.norm(b) * (a @ two), one @ two))


def _atom(system: System, k: int) -> str:
    return f"{SYMBOLS[int(system.z[k])]}{k}"
