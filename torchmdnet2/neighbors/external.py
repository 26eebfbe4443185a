"""Neighbor searches by other packages, for comparison and for users who have them: torch-cluster (structures without
periodicity) and nvalchemi-toolkit-ops (NVIDIA's Warp kernels). Each package is imported when its search is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..system import System
from . import BACKENDS
from .neighbor_list import NeighborList, sort_edges
from .reference import complete_cell

__all__ = ["neighbor_list_nvalchemi", "neighbor_list_torch_cluster"]


@BACKENDS.register("torch_cluster")
def neighbor_list_torch_cluster(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs by torch_cluster.radius_graph; arguments as for `neighbor_list`.

    By default radius_graph keeps at most 32 neighbors of an atom without a warning; here it may keep all.

    Raises:
        ModuleNotFoundError: torch-cluster is not installed.
        ValueError: a structure is periodic.
    """
    from torch_cluster import radius_graph

    if bool(system.pbc.any()):
        raise ValueError("the neighbor backend 'torch_cluster' knows no periodicity; take backend='auto'")
    order = torch.argsort(system.batch, stable=True)  # radius_graph needs an ascending batch
    pos, batch = system.pos.detach()[order].double(), system.batch[order]
    # searched a little too wide, because radius_graph does not define whether d = cutoff is listed
    wide = cutoff * (1 + 1e-6)
    sender, receiver = radius_graph(pos, wide, batch, loop=False, max_num_neighbors=max(system.num_atoms, 1))
    near = (pos[sender] - pos[receiver]).norm(dim=1) < cutoff
    sender, receiver = order[sender[near]], order[receiver[near]]
    return sort_edges(receiver, sender, receiver.new_zeros(len(receiver), 3), system.num_atoms, cutoff, half)


@BACKENDS.register("nvalchemi")
def neighbor_list_nvalchemi(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs by nvalchemi-toolkit-ops, structure by structure; arguments as for `neighbor_list`.

    Raises:
        ModuleNotFoundError: nvalchemi-toolkit-ops is not installed.
    """
    from nvalchemiops.torch.neighbors import neighbor_list

    none = torch.zeros(0, dtype=torch.long, device=system.device)
    found = [(none, none, none.reshape(0, 3))]
    for b in range(system.num_systems):
        index = (system.batch == b).nonzero().squeeze(1)
        if index.numel():
            cell = complete_cell(system.cell[b].double(), system.pbc[b])
            i, j, shift = _nvalchemi(neighbor_list, system.pos.detach()[index].double(), cell, system.pbc[b], cutoff)
            found.append((index[i], index[j], shift))
    receiver, sender, shift = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sort_edges(receiver, sender, shift, system.num_atoms, cutoff, half)


def _nvalchemi(search, pos: Tensor, cell: Tensor, pbc: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers [E], senders [E] and shifts [E, 3] of one structure; the room per atom is doubled until all fit."""
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
    return listed.nonzero()[:, 0], matrix[listed].long(), shift[listed].long()
