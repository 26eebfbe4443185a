"""Generated cells: every shape that a neighbor search must get right."""

from __future__ import annotations

import functools

import numpy as np
import scipy.linalg
from ase import Atoms
from ase.geometry import cellpar_to_cell
from ase.neighborlist import primitive_neighbor_list

PBC = [(bool(k & 1), bool(k & 2), bool(k & 4)) for k in range(8)]


def generated_atoms(seed: int, cutoff: float) -> Atoms:
    """One random structure: widths 0.3–4 cutoffs, angles 15–165°, both hands, any pbc, atoms ±10 cells outside."""
    rng = np.random.default_rng(seed)
    pbc = PBC[seed % 8]
    while True:
        angles = rng.uniform(15, 165, 3)
        lengths = np.exp(rng.uniform(np.log(0.4), np.log(5.0), 3)) * cutoff
        try:
            cell = cellpar_to_cell([*lengths, *angles])
        except (AssertionError, ValueError):
            continue
        if not np.isfinite(cell).all() or abs(np.linalg.det(cell)) < 1e-3 * np.prod(lengths):
            continue
        heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)
        if np.all(heights > 0.3 * cutoff) and np.all(heights < 4 * cutoff):
            break
    volume = abs(np.linalg.det(cell))
    n = int(rng.integers(1, max(2, min(40, int(volume * 0.08) + 2))))
    scaled = rng.uniform(0, 1, (n, 3))
    if rng.random() < 0.5:
        scaled = scaled + rng.integers(-10, 11, (n, 3)) * np.array(pbc)
    pos = scaled @ cell
    if rng.random() < 0.5:  # rotate, so that no row of the cell lies along an axis
        q, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        cell, pos = cell @ q, pos @ q  # q may be a reflection: left-handed cells
    if rng.random() < 0.3:
        cell = cell[[1, 0, 2]]
        pbc = (pbc[1], pbc[0], pbc[2])
    for k in range(3):
        if not pbc[k]:
            kind = rng.random()
            if kind < 0.3:
                cell[k] = 0.0  # zero vector
            elif kind < 0.5:
                cell[k] *= 1.0 / np.linalg.norm(cell[k])  # dummy 1 Å vector
    return Atoms(numbers=rng.integers(1, 10, n), positions=pos, cell=cell, pbc=pbc)


@functools.cache
def generated_pairs(seed: int, cutoff: float) -> tuple[Atoms, set, set]:
    """generated_atoms with coordinates that float32 holds exactly, and ASE's pairs for them (once: ASE is slow)."""
    atoms = generated_atoms(seed, cutoff)
    atoms.positions, atoms.cell = np.float32(atoms.positions), np.float32(atoms.cell.array)
    return atoms, *ase_pairs(atoms, cutoff)


def ase_pairs(atoms: Atoms, cutoff: float) -> tuple[set, set]:
    """(all pairs of ASE at the cutoff, those that lie within 1e-6 Å of it) as sets of (i, j, S0, S1, S2).

    ASE 3.29 misses pairs when a non-periodic row of the cell is zero or a dummy, so it is given the same structure
    with orthogonal vectors in the non-periodic rows.
    """
    cell = atoms.cell.array.copy()
    free = [k for k in range(3) if not atoms.pbc[k]]
    if free:
        cell[free] = (
            scipy.linalg.null_space(cell[[k for k in range(3) if atoms.pbc[k]]]).T if len(free) < 3 else np.eye(3)
        )
        cell[free] *= 5.0  # a short vector makes ASE allocate many bins
    i, j, s, d = primitive_neighbor_list("ijSd", atoms.pbc, cell, atoms.positions, cutoff + 1e-6)
    pairs = {(int(a), int(b), *map(int, c)) for a, b, c in zip(i, j, s, strict=True)}
    border = {(int(a), int(b), *map(int, c)) for a, b, c, r in zip(i, j, s, d, strict=True) if abs(r - cutoff) <= 1e-6}
    return pairs, border
