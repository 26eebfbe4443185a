"""Close contacts: two copies of a molecule approach each other with atoms of two given elements in front.

Closed-shell molecules repel each other at short distance whatever their elements, and in dynamics it is they who meet.
Two bare atoms, the other common choice, are radicals that no training data of molecules hold: not finding their bond
is no fault of a model.

Shapes: N atoms of the molecule, 2N of both copies.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray

from ..potential import SYMBOLS
from ..system import System
from .paths import Array, Line, ScanPath

__all__ = ["contact_paths"]

_CLOSEST = 0.6  # of the sum of covalent radii
_STEP = 0.02  # Å
_BEYOND = 1.0  # Å after the cutoff, so that what happens there is seen
_DIRECTIONS = 200
_TURNS = 12
_CANDIDATES = 3  # atoms of an element, the most exposed ones


def contact_paths(system: System, cutoff: float) -> tuple[list[ScanPath], list[str]]:
    """One path for each pair of elements, from 0.6 times the sum of their covalent radii to 1 Å beyond the cutoff.

    Each atom approaches along the direction in which the rest of its molecule is farthest. Of the most exposed atoms
    of both elements, and of twelve turns about the axis, those are taken that keep all other atoms farthest apart.

    Args:
        system: one molecule, float64 on the CPU.
        cutoff: the largest of the model, Å.

    Returns:
        The paths, and pairs of elements for which other atoms are nearer than the two in front: these are left out.
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
    """The atoms of an element with the most room, most of it first, and the directions in which it is."""
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
    """A copy at this distance of the atoms in front: how near other atoms come, in sums of covalent radii; the atoms;
    the direction from the first to the second; the copy's positions [N, 3]."""
    (a, direction), (b, front) = one, two
    rotation = _rotation(-direction, 2 * np.pi * turn / _TURNS) @ _onto(front, -direction)
    copy = (pos - pos[b]) @ rotation.T + pos[a] + distance * direction
    ratio = np.linalg.norm(pos[:, None] - copy, axis=2) / np.add.outer(covalent_radii[z], covalent_radii[z])
    ratio[a, b] = np.inf
    return float(ratio.min()), a, b, direction, copy


def _sphere() -> Array:
    """[n, 3] unit vectors, evenly spread: a Fibonacci lattice."""
    k = np.arange(_DIRECTIONS) + 0.5
    z, angle = 1 - 2 * k / _DIRECTIONS, np.pi * (1 + 5**0.5) * k
    return np.stack([np.sqrt(1 - z * z) * np.cos(angle), np.sqrt(1 - z * z) * np.sin(angle), z], 1)


def _rotation(axis: Array, angle: float) -> Array:
    """[3, 3] by Rodrigues' formula."""
    x, y, z = axis
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def _onto(one: Array, two: Array) -> Array:
    """[3, 3] rotation that takes a unit vector to another."""
    axis = np.cross(one, two)
    sine, cosine = float(np.linalg.norm(axis)), float(one @ two)
    if sine < 1e-9:
        if cosine > 0:
            return np.eye(3)
        axis = np.cross(one, np.eye(3)[int(np.argmin(np.abs(one)))])
        sine = float(np.linalg.norm(axis))
    return _rotation(axis / np.linalg.norm(axis), float(np.arctan2(sine if cosine > -1 + 1e-12 else 0.0, cosine)))
