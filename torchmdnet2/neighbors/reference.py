"""Reference neighbor search: all periodic images, O(N²), plain PyTorch. The judge of every other backend."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ..system import System
from .result import NeighborList, sort_edges

__all__ = ["complete_cell", "neighbor_list_reference"]


def complete_cell(cell: Tensor, pbc: Tensor) -> Tensor:
    """Replace the non-periodic lattice vectors by unit vectors orthogonal to the periodic ones.

    The result spans space whatever stands in the non-periodic rows (zeros, a dummy cell), and its inverse gives the
    fractional coordinates and the true heights along the periodic directions.

    Args:
        cell: [3, 3], rows are lattice vectors in Å.
        pbc: [3] booleans.

    Returns:
        [3, 3] matrix whose periodic rows are those of `cell`.
    """
    full = torch.zeros_like(cell)
    basis: list[Tensor] = []
    for k in range(3):
        if pbc[k]:
            full[k] = cell[k]
            v = cell[k]
            for b in basis:
                v = v - (v @ b) * b
            basis.append(v / v.norm())
    for k in range(3):
        if not pbc[k]:
            # the Cartesian axis that is farthest from the span of what is there already
            rest = torch.eye(3, dtype=cell.dtype, device=cell.device)
            for b in basis:
                rest = rest - (rest @ b)[:, None] * b
            v = rest[rest.norm(dim=1).argmax()]
            full[k] = v / v.norm()
            basis.append(full[k])
    return full


def neighbor_list_reference(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """All pairs of all images closer than the cutoff, for any cell, any pbc, atoms anywhere.

    Args:
        system: a batch of structures.
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.

    Returns:
        NeighborList with int64 indices on the system's device.
    """
    found = []
    with torch.no_grad():
        for b in range(system.num_systems):
            index = (system.batch == b).nonzero().squeeze(1)
            if index.numel():
                i, j, s = _search(system.pos[index].double(), system.cell[b].double(), system.pbc[b], float(cutoff))
                found.append((index[i], index[j], s))
    if not found:
        empty = torch.zeros(0, dtype=torch.long, device=system.device)
        found = [(empty, empty, empty.reshape(0, 3))]
    receiver, sender, shift = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sort_edges(receiver, sender, shift, system.num_atoms, cutoff, half)


def _search(pos: Tensor, cell: Tensor, pbc: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    full = complete_cell(cell, pbc)
    inverse = torch.linalg.inv(full)
    # wrap along the periodic directions; the wrap enters the shifts so that they refer to the given positions
    wrap = torch.floor(pos @ inverse) * pbc
    wrapped = pos - wrap @ full
    # |fractional difference| < 1 after wrapping, so an image s can be in range only if |s| < cutoff/height + 1
    heights = 1 / inverse.norm(dim=0)
    reach = [math.floor(cutoff / float(h)) + 1 if p else 0 for h, p in zip(heights, pbc, strict=True)]
    delta = wrapped[None, :] - wrapped[:, None]  # [N, N, 3], j − i
    wrap_int = wrap.round().long()
    rows, cols, shifts = [], [], []
    for image in itertools.product(*(range(-n, n + 1) for n in reach)):
        s = torch.tensor(image, dtype=torch.long, device=pos.device)
        near = (delta + s.to(pos.dtype) @ full).norm(dim=-1) < cutoff
        if image == (0, 0, 0):
            near.fill_diagonal_(False)
        i, j = near.nonzero(as_tuple=True)
        rows.append(i)
        cols.append(j)
        shifts.append(s + wrap_int[i] - wrap_int[j])
    return torch.cat(rows), torch.cat(cols), torch.cat(shifts)
