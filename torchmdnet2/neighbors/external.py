"""Neighbor searches by other packages, each imported when its search is used.

vesin (https://github.com/Luthaf/vesin) searches on the CPU with cell lists: any cell, partial periodicity.
torch-cluster knows structures without periodicity only.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..system import System
from .neighbor_list import NeighborList, sort_edges
from .reference import complete_cell, neighbor_list_reference

__all__ = ["neighbor_list_torch_cluster", "neighbor_list_vesin"]

_KEPT_PAIRS = 4_000_000  # up to so many, vesin's memory (28 bytes a pair) stays for the next search
_kept = threading.local()
_WIDE = 20  # cutoffs; wider structures, unless periodic everywhere, get their empty space taken out
_WIDEST = 10_000  # cutoffs; wider periodic cells are left to the reference
_SHIFT_BITS = 5  # of each number of a shift, up to which a table of all shifts is small


def neighbor_list_vesin(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs closer than the cutoff by cell lists, O(N), one structure after the other.

    vesin lists each pair once, which is half of the work; sorting numbers that hold a pair and its shift, in both
    directions, makes the rows.

    Args:
        system: a batch of structures; tensors on another device are searched on the CPU.
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.

    Returns:
        NeighborList with int64 indices on the system's device.
    """
    positions = system.pos.detach().cpu().double().numpy()
    cells, pbcs = system.cell.detach().cpu().double().numpy(), system.pbc.cpu().numpy()
    if system.num_atoms == 0 or _too_wide(cells, pbcs, cutoff):
        return neighbor_list_reference(system, cutoff, half=half)
    search = _search(float(cutoff))

    def search_one(points: np.ndarray, b: int, copy: bool) -> tuple[np.ndarray, np.ndarray]:
        pbc = pbcs[b]
        box = _spanning_cell(cells[b], pbc)
        wide = _extent_above(points, (_WIDEST if pbc.all() else _WIDE) * cutoff)
        if wide:
            points, cells_away = _narrowed(points, box, pbc, cutoff)
        pairs, shifts = search.compute(points, box, pbc, quantities="PS", copy=copy)
        pairs = pairs.view(np.int64)
        if wide:
            shifts = shifts + cells_away[pairs[:, 0]] - cells_away[pairs[:, 1]]
        return pairs, shifts

    if system.num_systems == 1:
        pairs, shifts = search_one(positions, 0, copy=False)
    else:
        batch = system.batch.cpu().numpy()
        parts = [(np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int32))]
        for b in range(system.num_systems):
            index = np.flatnonzero(batch == b)
            if index.size:
                pairs, shifts = search_one(positions[index], b, copy=True)
                parts.append((index[pairs], shifts))
        pairs, shifts = (np.concatenate(p) for p in zip(*parts, strict=True))
    result = _rows(pairs, shifts, system.num_atoms, cutoff, half)
    if len(pairs) > _KEPT_PAIRS:
        _kept.search = None
    return result if system.device.type == "cpu" else result.to(system.device)


def _search(cutoff: float) -> Any:
    """vesin's search of this thread: it keeps its memory from call to call."""
    import vesin

    search = getattr(_kept, "search", None)
    if search is None or search.cutoff != cutoff:
        search = _kept.search = vesin.NeighborList(cutoff=cutoff, full_list=False)
    return search


def _spanning_cell(cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """vesin reads the non-periodic rows too; give it rows that always span space."""
    if pbc.all():
        return cell
    return complete_cell(torch.from_numpy(cell), torch.from_numpy(pbc)).numpy() if pbc.any() else np.eye(3)


def _too_wide(cells: np.ndarray, pbcs: np.ndarray, cutoff: float) -> bool:
    """Whether a periodic cell is larger than vesin can divide, which then ends the process."""
    widest = _WIDEST * cutoff
    if 2 * np.abs(cells).max() < widest:  # a vector is shorter than twice its largest number
        return False
    return bool(((np.square(cells).sum(2) > widest**2) & pbcs).any())


def _extent_above(points: np.ndarray, limit: float) -> bool:
    """Whether points lie further apart than a limit along x, y or z."""
    if points.max() - points.min() <= limit:  # of all numbers: much faster than axis by axis
        return False
    return float(np.ptp(points, axis=0).max()) > limit


def _narrowed(points: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Points with the same pairs, but within the cell, and with less empty space between them along open directions.

    vesin divides all of space into cells: that takes minutes for a slab and an atom 1,000 Å above it, and beyond 1e6 Å
    it ends the process. What lies on the two sides of a gap of a cutoff makes no pairs, and may as well be two cutoffs
    apart.

    Args:
        points: [N, 3] Å, box: [3, 3], pbc: [3].

    Returns:
        Points [N, 3]; how many cells each was moved by along the lattice vectors, [N, 3] int64.
    """
    fractional = points @ np.linalg.inv(box)
    whole = np.where(pbc, np.floor(fractional), 0)
    fractional -= whole
    for k in np.flatnonzero(~pbc):
        along = fractional[:, k]  # in Å: the box has unit vectors here, at right angles to the rest
        order = along.argsort()
        gaps = np.diff(along[order], prepend=along[order[0]])
        along[order] = np.cumsum(np.minimum(gaps, 2 * cutoff))
    return fractional @ box, whole.astype(np.int64)


def _rows(pairs: np.ndarray, shifts: np.ndarray, num_atoms: int, cutoff: float, half: bool) -> NeighborList:
    """Both directions of each pair (one, if `half`) as sorted rows.

    Args:
        pairs: [P, 2] int64, in any order and direction.
        shifts: [P, 3] int32 or int64.
    """
    widest = max(int(shifts.max(initial=0)), -int(shifts.min(initial=0)))
    # bits: receiver, sender, shift + widest (three)
    atom_bits, s_bits = max(num_atoms - 1, 1).bit_length(), (2 * widest).bit_length()
    all_bits = 3 * s_bits
    if 2 * atom_bits + all_bits > 63 or s_bits > _SHIFT_BITS:  # a stray atom
        receiver, sender, s = (torch.from_numpy(a.astype(np.int64)) for a in (pairs[:, 0], pairs[:, 1], shifts))
        both = torch.cat([receiver, sender]), torch.cat([sender, receiver]), torch.cat([s, -s])
        return sort_edges(*both, num_atoms, cutoff, half)
    packed = np.empty((2, len(pairs)), np.int64)
    forth, back = packed
    i, j = pairs[:, 0], pairs[:, 1]
    np.left_shift(i, atom_bits, out=forth)
    np.left_shift(j, atom_bits, out=back)
    forth |= j
    back |= i
    if all_bits:
        packed <<= all_bits
        # the number of the shift zero; −shift is as far from it on the other side
        packed += widest * ((1 << (2 * s_bits)) + (1 << s_bits) + 1)
        number = (shifts[:, 0] << (2 * s_bits)) + (shifts[:, 1] << s_bits) + shifts[:, 2]
        forth += number
        back -= number
    if half:  # the smaller of the two; between images of one atom the larger: its first non-zero shift is positive
        packed = np.where(i == j, np.maximum(forth, back), np.minimum(forth, back))[None]
    keys = packed.reshape(-1)
    keys.sort()
    edges = np.empty((2, len(keys)), np.int64)
    np.right_shift(keys, all_bits + atom_bits, out=edges[0])
    np.right_shift(keys, all_bits, out=edges[1])
    edges[1] &= (1 << atom_bits) - 1
    if all_bits:
        keys &= (1 << all_bits) - 1
        shift = _shift_table(widest, s_bits).take(keys, axis=0)
    else:
        shift = np.zeros((len(keys), 3), np.int64)
    row_ptr = edges[0].searchsorted(np.arange(num_atoms + 1))
    return NeighborList(
        torch.from_numpy(edges), torch.from_numpy(shift), torch.from_numpy(row_ptr), float(cutoff), half
    )


@lru_cache(maxsize=8)
def _shift_table(widest: int, bits: int) -> np.ndarray:
    """The shift that each number of 3 × `bits` bits stands for, [8^bits, 3] int64."""
    numbers = np.arange(1 << (3 * bits))[:, None]
    return (numbers >> np.array([2 * bits, bits, 0]) & ((1 << bits) - 1)) - widest


def neighbor_list_torch_cluster(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Pairs by torch_cluster.radius_graph; arguments as for `neighbor_list`.

    By default radius_graph keeps at most 32 neighbors of an atom without a warning; here it may keep all.

    Raises:
        ModuleNotFoundError: torch-cluster is not installed.
        ValueError: a structure is periodic.
    """
    from torch_cluster import radius_graph

    if bool(system.pbc.any()):
        raise ValueError("the neighbor backend 'torch_cluster' supports no periodic structures: use backend='auto'")
    order = torch.argsort(system.batch, stable=True)  # radius_graph needs an ascending batch
    pos, batch = system.pos.detach()[order].double(), system.batch[order]
    # searched a little too wide, because radius_graph does not define whether d = cutoff is listed
    wide = cutoff * (1 + 1e-6)
    sender, receiver = radius_graph(pos, wide, batch, loop=False, max_num_neighbors=max(system.num_atoms, 1))
    near = (pos[sender] - pos[receiver]).norm(dim=1) < cutoff
    sender, receiver = order[sender[near]], order[receiver[near]]
    return sort_edges(receiver, sender, receiver.new_zeros(len(receiver), 3), system.num_atoms, cutoff, half)
