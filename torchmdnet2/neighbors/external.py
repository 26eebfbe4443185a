"""Neighbor search by optional packages: torch-cluster (molecules) and nvalchemi-toolkit-ops (NVIDIA's Warp kernels).

They are kept for comparison and for users who have them anyway; neither is needed. Nothing is imported before its use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MissingBackend
from ..system import System
from .reference import complete_cell
from .result import NeighborList, sort_edges

__all__ = ["neighbor_list_nvalchemi", "neighbor_list_torch_cluster"]


def neighbor_list_torch_cluster(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs of molecules by torch_cluster.radius_graph.

    radius_graph keeps 32 neighbors unless told otherwise and drops the rest without a word; it is always told that
    every atom may have all others as neighbors.

    Args:
        system: a batch of structures without periodicity.
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.

    Raises:
        MissingBackend: torch-cluster is not installed.
        ValueError: a structure is periodic.
    """
    try:
        from torch_cluster import radius_graph
    except ImportError as error:
        raise MissingBackend(
            "the neighbor backend 'torch_cluster' needs the package torch-cluster: pip install torch-cluster"
        ) from error
    if bool(system.pbc.any()):
        raise ValueError("the neighbor backend 'torch_cluster' knows no periodicity; take backend='auto'")
    order = torch.argsort(system.batch, stable=True)  # radius_graph wants the batch in ascending order
    pos = system.pos.detach()[order].double()
    # a little too wide, then cut: whether radius_graph lists pairs at exactly the cutoff is its own affair
    edges = radius_graph(
        pos, cutoff * (1 + 1e-6), batch=system.batch[order], loop=False, max_num_neighbors=max(system.num_atoms, 1)
    )
    sender, receiver = edges
    near = (pos[sender] - pos[receiver]).norm(dim=1) < cutoff
    sender, receiver = order[sender[near]], order[receiver[near]]
    shift = torch.zeros(len(sender), 3, dtype=torch.long, device=system.device)
    return sort_edges(receiver, sender, shift, system.num_atoms, cutoff, half)


def neighbor_list_nvalchemi(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs by nvalchemi-toolkit-ops, one structure after the other.

    Args:
        system: a batch of structures, on a CUDA device or the CPU.
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.

    Raises:
        MissingBackend: nvalchemi-toolkit-ops is not installed.
    """
    try:
        from nvalchemiops.torch.neighbors import neighbor_list
    except ImportError as error:
        raise MissingBackend(
            "the neighbor backend 'nvalchemi' needs the package nvalchemi-toolkit-ops: "
            "pip install nvalchemi-toolkit-ops"
        ) from error
    receivers, senders, shifts = [], [], []
    for b in range(system.num_systems):
        index = (system.batch == b).nonzero().squeeze(1)
        if index.numel():
            cell = complete_cell(system.cell[b].double(), system.pbc[b])
            i, j, s = _nvalchemi_one(neighbor_list, system.pos.detach()[index].double(), cell, system.pbc[b], cutoff)
            receivers.append(index[i])
            senders.append(index[j])
            shifts.append(s)
    none = torch.zeros(0, dtype=torch.long, device=system.device)
    receiver, sender = torch.cat([none, *receivers]), torch.cat([none, *senders])
    return sort_edges(receiver, sender, torch.cat([none.reshape(0, 3), *shifts]), system.num_atoms, cutoff, half)


def _nvalchemi_one(search, pos: Tensor, cell: Tensor, pbc: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers [E], senders [E] and shifts [E, 3] of one structure; room per atom is doubled until all fit."""
    room = 64
    while True:
        try:
            matrix, count, shift = search(
                pos, cutoff, cell=cell[None], pbc=pbc[None], method="cell_list", max_neighbors=room
            )
        except Exception as error:
            if type(error).__name__ != "NeighborOverflowError":
                raise
        else:
            if int(count.max()) <= room:
                break
        room *= 2
    listed = torch.arange(matrix.shape[1], device=pos.device) < count[:, None]
    receiver = listed.nonzero()[:, 0]
    return receiver, matrix[listed].long(), shift[listed].long()
