"""Isolated molecules, which are made whole if a host program wraps their atoms into a periodic box.

A molecule is made whole by the image of each atom that is nearest to the first atom. This is correct if all distances
in the molecule are below half of the shortest width of the box, since no pair has another image at such a distance.
Otherwise the result may be ambiguous, and an error says so.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from ..errors import BadData
from ..system import System

__all__ = ["isolate", "made_whole"]

_CHUNK = 1024  # number of atoms whose distances to all others are in memory at once


def made_whole(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Return the positions of a molecule made whole across the box; the first atom does not move.

    Args:
        positions: [N, 3] Å, each atom in any periodic image.
        cell: [3, 3] Å, lattice vectors as rows.
        pbc: [3] booleans.

    Returns:
        [N, 3] Å, a new array.

    Raises:
        BadData: the distance of two atoms is not below half of the shortest width of the cell.
    """
    lattice, inverse, half = _lattice(cell.tobytes(), pbc.tobytes())
    whole = positions - ((positions - positions[:1]) @ inverse).round() @ lattice
    around = whole - whole.mean(0)
    if 2 * np.sqrt((around * around).sum(1).max(initial=0.0)) >= half:
        _refuse_long(torch.from_numpy(whole), half, "")
    return whole


def isolate(system: System) -> System:
    """Return each structure of a batch as a molecule in vacuum, made whole, on the device of the batch.

    Args:
        system: N atoms in B structures; not changed.

    Raises:
        BadData: as `made_whole`; the message names the structure.
    """
    lattice = torch.where(system.pbc[:, :, None], system.cell, 0.0).double()
    inverse = torch.linalg.pinv(lattice.cpu()).to(lattice)  # faster on the CPU than on a GPU
    half = 0.5 / inverse.norm(dim=1).amax(1)
    batch, num = system.batch, system.num_systems
    places = torch.arange(system.num_atoms, device=system.device)
    first = torch.zeros(num, dtype=torch.long, device=system.device)
    first = first.scatter_reduce(0, batch, places, "amin", include_self=False)
    pos = system.pos.double()
    images = ((pos - pos[first[batch]])[:, None] @ inverse[batch]).round()
    whole = pos - (images @ lattice[batch])[:, 0]
    sums = torch.zeros(num, 3, dtype=whole.dtype, device=whole.device).index_add(0, batch, whole)
    radius = (whole - (sums / system.atom_counts.clamp(min=1)[:, None])[batch]).norm(dim=1)
    radii = torch.zeros_like(half).scatter_reduce(0, batch, radius, "amax")
    for b in (2 * radii >= half).nonzero()[:, 0].tolist():
        _refuse_long(whole[batch == b], float(half[b]), f"structure {b}: ")
    return system.replace(
        pos=whole.to(system.pos.dtype), cell=torch.zeros_like(system.cell), pbc=torch.zeros_like(system.pbc)
    )


@lru_cache(maxsize=16)
def _lattice(cell: bytes, pbc: bytes) -> tuple[np.ndarray, np.ndarray, float]:
    """Return lattice vectors [3, 3], zero in other directions; the matrix that gives fractional coordinates along
    them; and half of the shortest width."""
    lattice = np.frombuffer(cell).reshape(3, 3) * np.frombuffer(pbc, dtype=bool)[:, None]
    inverse = np.linalg.pinv(lattice)
    most = float(np.linalg.norm(inverse, axis=0).max())
    return lattice, inverse, 0.5 / most if most else np.inf


def _refuse_long(whole: torch.Tensor, half: float, name: str) -> None:
    for part in whole.split(_CHUNK):
        if bool((torch.cdist(part, whole, compute_mode="donot_use_mm_for_euclid_dist") >= half).any()):
            raise BadData(
                f"{name}the isolated molecule is longer than half of the shortest width of the periodic box, "
                f"{half:.2f} Å, so that nearest images are ambiguous: take a larger box (if these are "
                "several molecules that have moved apart, make each a separate part)"
            )
