"""Neighbor search on the CPU with vesin (https://github.com/Luthaf/vesin): cell lists, any cell, partial pbc."""

from __future__ import annotations

import numpy as np
import torch

from ..system import System
from .reference import complete_cell
from .result import NeighborList, sort_edges

__all__ = ["neighbor_list_vesin"]


def neighbor_list_vesin(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs closer than the cutoff by cell lists, O(N), one structure after the other.

    Args:
        system: a batch of structures; tensors on another device are searched on the CPU.
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.

    Returns:
        NeighborList with int64 indices on the system's device.
    """
    import vesin

    batch = system.batch.cpu().numpy()
    positions = system.pos.detach().cpu().double().numpy()
    cells, pbcs = system.cell.detach().cpu().double(), system.pbc.cpu()
    search = vesin.NeighborList(cutoff=float(cutoff), full_list=True)
    parts = []
    for b in range(system.num_systems):
        index = np.flatnonzero(batch == b)
        if index.size == 0:
            continue
        points = np.ascontiguousarray(positions[index])
        # vesin reads the non-periodic rows too; give it rows that always span space
        box = complete_cell(cells[b], pbcs[b]).numpy()
        i, j, s = search.compute(points=points, box=box, periodic=pbcs[b].numpy(), quantities="ijS")
        parts.append((index[i.astype(np.int64)], index[j.astype(np.int64)], s.astype(np.int64)))
    if parts:
        receiver, sender, shift = (torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True))
    else:
        receiver = sender = torch.zeros(0, dtype=torch.long)
        shift = torch.zeros(0, 3, dtype=torch.long)
    result = sort_edges(receiver, sender, shift, system.num_atoms, cutoff, half)
    if system.device.type != "cpu":
        device = system.device
        result = NeighborList(
            result.edge_index.to(device), result.shift.to(device), result.row_ptr.to(device), result.cutoff, half
        )
    return result
