"""The check of a domain's kernels on their first use: against the potential in float64."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..exchange import CopyExchange
from ..potential import Result
from ..system import System
from .check import extract_cluster, for_clusters, reference, require_result
from .coverage import constant_energies
from .domain import Domain

__all__ = ["check_on_cluster"]

_CHECKED = 200
"""Atoms of the cluster."""


def check_on_cluster(other: Domain, z: NDArray[np.integer], pos: NDArray[np.float64], isolated: Tensor) -> None:
    """Evaluate a cluster of local atoms by itself, without other processes, and compare.

    Args:
        other: a domain with the kernels in question, whose atoms this function sets.
        z: [n] atomic numbers of the local atoms.
        pos: [≥ n, 3] Å, theirs first.
        isolated: [max_z] eV float64, the network's energies of atoms alone.

    Raises:
        RuntimeError: energies or forces differ.
    """
    n, potential = len(z), other.potential
    alone = System(
        z=torch.from_numpy(np.asarray(z, dtype=np.int64)), pos=torch.from_numpy(pos[:n].copy()),
        charge=torch.full((1,), other.charge, dtype=torch.float64),
    )  # fmt: skip
    cluster, _ = extract_cluster(alone, _CHECKED, False)
    m = cluster.num_atoms
    other.set_atoms(cluster.z.numpy(), np.arange(m), m, CopyExchange(m, torch.zeros(0, dtype=torch.long)))
    values = other(cluster.pos.numpy())
    placed = cluster.to(potential.device)
    expected = reference(for_clusters(potential), placed, False)
    assert expected.atom_energies is not None
    energies = torch.from_numpy(values.energies).to(potential.device)
    found = Result(
        energies.sum()[None] + potential.energy_shift, torch.from_numpy(values.forces).to(potential.device), None,
        energies,
    )  # fmt: skip
    network = expected.atom_energies - constant_energies(potential, placed)
    scale = float((network.abs() + isolated[cluster.z].to(network.device).abs()).max())
    require_result(found, None, expected, potential, placed, "native", scale)
