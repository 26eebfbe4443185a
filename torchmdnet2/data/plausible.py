"""What labels look like by themselves: exact zeros, lost digits, stresses and lengths of an impossible size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from ase.data import covalent_radii

from ..neighbors import neighbor_list
from .dataset import Sample
from .statistics import Statistics

__all__ = ["Zeros", "bond_scale", "resolution", "stress_size", "zeros"]

_FRAMES, _ATOMS = 1000, 30_000  # looked at, at most
_CUTOFF = 4.0  # Å
_UNEVEN = 1e-3  # of a sum of vectors to neighbors: the surroundings are not symmetric
_LEAST, _REPEATED = 8, 3  # structures, and structures of one energy where there are fewer than 8 energies
_SHEAR = (1, 2, 5)  # of nine numbers, off the diagonal
_NOBLE = (2, 10, 18, 36, 54, 86)


class Zeros(NamedTuple):
    """Labels of exactly zero that cannot be right.

    Args:
        looked: frames that were looked at.
        atoms: whose three force components are zero though their surroundings are not symmetric.
        frames: positions of frames in which these are all atoms.
        energies: positions of frames of several atoms with the energy zero, where others have another one.
        stresses: positions of frames with nine zeros for a stress.
        shears: positions of those with three zeros off the diagonal alone though the structure is not symmetric.
        same: positions of different structures that have one stress, which is not zero.
    """

    looked: int
    atoms: int
    frames: np.ndarray
    energies: np.ndarray
    stresses: np.ndarray
    shears: np.ndarray
    same: np.ndarray


def spread_out(found: Statistics) -> np.ndarray:
    """Positions of up to 1,000 frames, evenly spread, of 30,000 atoms together."""
    most = int(max(1, min(_FRAMES, _ATOMS / found.sizes.mean())))
    return np.unique(np.linspace(0, found.num_frames - 1, min(most, found.num_frames)).astype(int))


def zeros(batch: Sample, found: Statistics, chosen: np.ndarray) -> Zeros:
    """Labels of exactly zero.

    Args:
        batch: frames `chosen`.
        found: statistics of all frames.
        chosen: [B] positions in them.
    """
    system, none = batch.system, np.zeros(0, dtype=np.int64)
    sizes = system.atom_counts.numpy()
    atoms, frames, stresses, shears, same = 0, none, none, none, none
    neighbors = neighbor_list(system, _CUTOFF)
    vectors = neighbors.vectors(system).detach().double()
    distance = vectors.norm(dim=1, keepdim=True)
    if "forces" in batch.labels:
        pull = torch.cat([vectors * torch.exp(-distance), vectors * torch.exp(-2 * distance)], 1)
        uneven = pull.new_zeros(system.num_atoms, 6).index_add_(0, neighbors.edge_index[0], pull).abs().amax(1)
        idle = ((batch.labels["forces"] == 0).all(1) & (uneven > _UNEVEN)).numpy()
        owner = system.batch.numpy()
        atoms = int(idle.sum())
        some = np.bincount(owner[idle], minlength=len(sizes))
        moved = np.bincount(owner[(batch.labels["forces"] != 0).any(1).numpy()], minlength=len(sizes))
        frames = chosen[(some > 0) & (moved == 0)]
    if "stress" in batch.labels:
        stress, periodic = batch.labels["stress"].flatten(1).numpy(), system.volume.numpy() > 0
        idle = (stress[:, _SHEAR] == 0).all(1) & periodic
        empty = (stress == 0).all(1) & periodic
        tensor = (vectors[:, :, None] * vectors[:, None] * torch.exp(-distance)[:, :, None]).flatten(1)
        owner_of = system.batch[neighbors.edge_index[0]]
        sheared = tensor.new_zeros(len(sizes), 9).index_add_(0, owner_of, tensor)[:, _SHEAR].abs().amax(1).numpy()
        stresses, shears = chosen[empty], chosen[idle & ~empty & (sheared > _UNEVEN)]
        _, kind, often = np.unique(stress[~empty], axis=0, return_inverse=True, return_counts=True)
        if len(often):
            group = chosen[~empty][kind.reshape(-1) == often.argmax()]
            same = np.sort(group[np.unique(found.keys[group], return_index=True)[1]])
    energies = np.flatnonzero((found.energies == 0) & (found.sizes > 1))
    if not np.nan_to_num(found.energies).any():
        energies = none
    return Zeros(len(chosen), atoms, frames, energies, stresses, shears, same)


def resolution(found: Statistics) -> float | None:
    """The step that energies are multiples of, eV, where they have lost their digits; None where they have not.

    Lost: the step is above 0.5 meV, and above a fiftieth of what energies of one composition differ by, or above
    0.3 meV per atom. Infinite where all energies are the same.
    """
    known = ~np.isnan(found.energies) & (found.sizes > 1)
    energies = found.energies[known]
    values, structures = np.unique(energies), len(np.unique(found.keys[known]))
    if structures < _LEAST or (len(values) < _LEAST and structures < _REPEATED * len(values)):
        return None
    if len(values) == 1:
        return float("inf")
    above = values - values[0]
    step = float(np.diff(values).min())
    multiples = above / step
    error = np.abs(multiples - np.rint(multiples))
    if step < 5e-4 or multiples[-1] > 1e12 or error.max() > 0.01 + 4 * np.spacing(np.abs(values).max()) / step:
        return None
    references = found.atomref
    left = energies - (found.counts @ np.array([references.get(z, 0.0) for z in found.elements]))[known]
    usual = 1.4826 * float(np.median(np.abs(left - np.median(left))))
    return step if step > min(0.02 * usual, 3e-4 * float(found.sizes.mean())) else None


def stress_size(batch: Sample) -> float | None:
    """Median over the frames of the largest stress component, eV/Å³; None without stresses."""
    if "stress" not in batch.labels:
        return None
    largest = batch.labels["stress"].abs().flatten(1).amax(1).numpy()
    largest = largest[np.isfinite(largest) & (largest > 0)]
    return float(np.median(largest)) if len(largest) else None


def bond_scale(batch: Sample) -> float | None:
    """Median over the atoms of the distance to the nearest one over the sum of the covalent radii; None without.

    It is 0.9 to 1.2 in molecules, crystals and metals. Noble gases, and frames of single atoms, are left out.
    """
    system = batch.system
    nearest = neighbor_list(system, 8.0)
    receiver, sender = nearest.edge_index
    bound = ~(torch.isin(system.z[receiver], torch.tensor(_NOBLE)) | torch.isin(system.z[sender], torch.tensor(_NOBLE)))
    receiver, sender = receiver[bound], sender[bound]
    if not len(receiver):
        return None
    radii = torch.from_numpy(covalent_radii)
    ratio = nearest.distances(system).detach().double()[bound] / (radii[system.z[receiver]] + radii[system.z[sender]])
    least = torch.full((system.num_atoms,), torch.inf, dtype=torch.float64)
    least = least.scatter_reduce(0, receiver, ratio, "amin")
    return float(least[torch.isfinite(least)].median())
