"""Pair lists and sums over pairs, shared by the priors.

Shapes: N atoms, E directed edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..system import System
from . import NeighborList, neighbor_list

__all__ = ["PairLists", "all_pairs", "pair_list", "require_molecules", "sum_pairs", "taper"]


MIN_DISTANCE = 1e-3
"""Å. Closer pairs count as this far apart, so that atoms on top of each other have finite energies."""


def pair_list(system: System, cutoff: float) -> NeighborList:
    """Return the directed pairs within a cutoff in Å; infinity means all pairs of each structure.

    Raises:
        ValueError: the cutoff is infinite and a structure is periodic.
    """
    return all_pairs(system) if math.isinf(cutoff) else neighbor_list(system, cutoff)


class PairLists:
    """The pair lists of one structure by cutoff in Å, each searched when it is first requested.

    Args:
        system: N atoms.
        known: lists that are there already.
    """

    def __init__(self, system: System, known: Mapping[float, NeighborList] | None = None):
        self.system, self.known = system, dict(known or {})

    def __call__(self, cutoff: float) -> NeighborList:
        """Return the directed pairs within a cutoff, as `pair_list`."""
        if cutoff not in self.known:
            self.known[cutoff] = pair_list(self.system, cutoff)
        return self.known[cutoff]


def require_molecules(system: System) -> None:
    """Raise ValueError for a periodic structure, which has infinitely many pairs."""
    periodic = system.pbc.any(1)
    if bool(periodic.any()):
        raise ValueError(
            f"structure {int(periodic.nonzero()[0, 0])} is periodic, and a sum over all pairs, as in this model's "
            "Coulomb energy, has infinitely many terms; for a molecule alone in a box give isolated=True (in ASE, "
            "OpenMM, openmm-ml and torch-sim; --isolated to md) or remove the cell (pbc=False); to train on liquids or "
            "crystals give the prior or head another method (pme, ewald, dsf, reaction_field), and dispersion a cutoff"
        )


def all_pairs(system: System) -> NeighborList:
    """Return all directed pairs of atoms of the same structure, Σ_b n_b (n_b − 1) of them.

    Raises:
        ValueError: a structure is periodic.
    """
    require_molecules(system)
    num = system.num_atoms
    device = system.device
    order = torch.argsort(system.batch, stable=True)
    size = system.atom_counts
    first = torch.cumsum(size, 0) - size
    count = size[system.batch]  # pairs of each receiver, itself included
    receiver = torch.repeat_interleave(torch.arange(num, device=device), count)
    rank = torch.arange(receiver.shape[0], device=device) - (torch.cumsum(count, 0) - count)[receiver]
    sender = order[first[system.batch][receiver] + rank]
    other = receiver != sender
    receiver, sender = receiver[other], sender[other]
    row_ptr = torch.zeros(num + 1, dtype=torch.long, device=device)
    row_ptr[1:] = (count - 1).cumsum(0)
    shift = torch.zeros(receiver.shape[0], 3, dtype=torch.long, device=device)
    return NeighborList(torch.stack([receiver, sender]), shift, row_ptr, math.inf)


def pair_distances(system: System, neighbors: NeighborList) -> Tensor:
    """Return edge lengths in Å, [E] float64, differentiable, not below MIN_DISTANCE."""
    return neighbors.distances(system).double().clamp(min=MIN_DISTANCE)


def sum_pairs(energies: Tensor, neighbors: NeighborList, num_atoms: int) -> Tensor:
    """Return the sums of half of the energy [E] of each directed pair over the pairs of a receiver, [N]."""
    zeros = torch.zeros(num_atoms, dtype=energies.dtype, device=energies.device)
    return zeros.index_add(0, neighbors.edge_index[0], energies / 2)


def taper(distances: Tensor, start: float, stop: float) -> Tensor:
    """Return 1 below `start`, 0 beyond `stop` (Å), 1 − 10t³ + 15t⁴ − 6t⁵ between: two continuous derivatives."""
    if stop <= start:
        return (distances < stop).to(distances.dtype)
    t = ((distances - start) / (stop - start)).clamp(0, 1)
    return 1 - t**3 * (10 - 15 * t + 6 * t * t)
