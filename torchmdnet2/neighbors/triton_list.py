"""The eager neighbor search on the GPU: a list with as much room as it needs.

Shapes: N atoms, B structures, E directed edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import NeighborOverflow
from ..system import System
from .result import NeighborList, row_pointers, upper_half
from .triton_search import NOT_FINITE, TOO_THIN, TritonNeighborSearch

__all__ = ["neighbor_list_triton"]


def neighbor_list_triton(system: System, cutoff: float, half: bool = False, method: str = "auto") -> NeighborList:
    """Pairs closer than the cutoff, searched on the GPU; counts first, so that the list always has room.

    Args:
        system: a batch of structures on a CUDA device (or on the CPU under TRITON_INTERPRET=1).
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.
        method: "pairs", "cells" or "auto".

    Returns:
        NeighborList with int32 indices on the system's device.

    Raises:
        ValueError: a position or cell is not finite, or a cell is too thin for the method.
        NeighborOverflow: more than 2^31 − 1 edges.
    """
    N, B = system.num_atoms, max(system.num_systems, 1)
    device = system.device
    if N == 0:
        none = torch.zeros(0, dtype=torch.int32, device=device)
        return NeighborList(none.expand(2, 0), none.reshape(0, 3), none.new_zeros(1), float(cutoff), half)
    # rows must come structure by structure; atoms of an unsorted batch go there and back
    unsorted = B > 1 and not bool((system.batch[1:] >= system.batch[:-1]).all())
    order = torch.argsort(system.batch, stable=True) if unsorted else None
    pos, batch = (system.pos, system.batch) if order is None else (system.pos[order], system.batch[order])
    search = TritonNeighborSearch(
        N, B, cutoff, 1, device, batch=batch, method=method, receiver=True, shift=True, vectors=False
    )
    given = pos.contiguous(), system.cell.contiguous(), system.pbc.contiguous()
    search.count(*given)
    flag = int(search.flag)
    if flag & TOO_THIN and method == "auto" and search.method == "cells":
        search = TritonNeighborSearch(
            N, B, cutoff, 1, device, batch=batch, method="pairs", receiver=True, shift=True, vectors=False
        )
        search.count(*given)
        flag = int(search.flag)
    if flag & NOT_FINITE:
        raise ValueError("a position or a cell is not finite, or a periodic cell has no volume")
    if flag & TOO_THIN:
        raise ValueError(f"a periodic cell is too thin for method '{search.method}' at cutoff {cutoff} Å")
    needed = int(search.needed)
    if needed >= 2**31:
        raise NeighborOverflow(needed, 2**31 - 1)
    if needed:
        search.set_capacity(needed)
        search(*given)
    assert search.receiver is not None and search.shift is not None
    edges = torch.stack([search.receiver, search.sender])[:, :needed]
    shift, row_ptr = search.shift[:needed], search.row_ptr
    if order is not None:
        edges, shift, row_ptr = _unsort(edges, shift, order, N)
    if half:
        keep = upper_half(edges[0], edges[1], shift)
        edges, shift = edges[:, keep], shift[keep]
        row_ptr = row_pointers(edges[0], N)
    return NeighborList(edges, shift, row_ptr, float(cutoff), half)


def _unsort(edges: Tensor, shift: Tensor, order: Tensor, num_atoms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges in the numbering before the atoms were sorted; a stable sort keeps the order of the shifts."""
    receiver, sender = order[edges.long()]
    by_pair = torch.argsort(receiver * num_atoms + sender, stable=True)
    edges = torch.stack([receiver, sender])[:, by_pair].int()
    return edges, shift[by_pair], row_pointers(edges[0], num_atoms)
