"""The bonds of a molecule as a graph: what moves when a bond is stretched or turned.

Shapes: N atoms.
"""

from __future__ import annotations

import numpy as np
from ase.data import covalent_radii
from numpy.typing import NDArray

from ..md.bonds import BONDED

__all__ = ["BondGraph"]

_LINEAR = 170.0
"""Degrees; a bond angle above has no torsion."""


class BondGraph:
    """Atoms nearer than 1.25 sums of their covalent radii are bonded.

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
        """What moves with atom i when it is pulled away from j: all atoms whose every way to j goes through i.

        For a bond that is not in a ring this is its half of the molecule; of a ring, i and the branches at it.
        """
        return self._reached(i) - self._reached(j, without=i)

    def is_rotatable(self, i: int, j: int) -> bool:
        """Whether there is a torsion about this bond: not in a ring, and at both ends another atom off the axis."""
        return j not in self._others(i, j) and bool(self.bent(i, j)) and bool(self.bent(j, i))

    def bent(self, i: int, j: int) -> list[int]:
        """The other neighbors of i that are not in line with the bond i–j."""
        return [k for k in self.neighbors[i] if k != j and self._angle(k, i, j) < _LINEAR]

    def _others(self, i: int, j: int) -> set[int]:
        """Atoms that i is connected with by other bonds than that with j."""
        found = set()
        for k in self.neighbors[i]:
            if k != j:
                found |= self._reached(k, without=i)
        return found

    def _reached(self, start: int, without: int = -1) -> set[int]:
        """Atoms that are connected with this one, also when another one is taken out."""
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
