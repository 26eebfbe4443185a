"""Neighbor searches on the CPU: the reference, and those of other packages, each imported when its search is used.

The reference looks at all periodic images, O(N²), in plain PyTorch. It is the specification of the others. vesin
(https://github.com/Luthaf/vesin) has cell lists: any cell, partial periodicity. torch-cluster knows structures without
periodicity only.
"""

from __future__ import annotations

import itertools
import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..system import System
from .neighbor_list import NeighborList, sort_edges

__all__ = [
    "SimpleStructure",
    "complete_cell",
    "neighbor_list_brute_force",
    "neighbor_list_reference",
    "neighbor_list_torch_cluster",
    "neighbor_list_vesin",
    "number_of_images",
    "simple_structure",
]


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
    """Return all pairs of all images closer than the cutoff, for any cell, any pbc, atoms anywhere.

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
    reach = _reach(inverse, pbc, cutoff)
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


def _reach(inverse: Tensor, pbc: Tensor, cutoff: float) -> list[int]:
    """How many images to visit to each side along the lattice vectors; inverse: of the complete cell."""
    # |fractional difference| < 1 after wrapping, so an image s can be in range only if |s| < cutoff/height + 1
    heights = 1 / inverse.norm(dim=0)
    return [math.floor(cutoff / float(h)) + 1 if p else 0 for h, p in zip(heights, pbc, strict=True)]


def number_of_images(system: System, cutoff: float) -> int:
    """Return the number of images that `neighbor_list_reference` visits, of all structures together."""
    total = 0
    for cell, pbc in zip(system.cell.double().cpu(), system.pbc.cpu(), strict=True):
        reach = _reach(torch.linalg.inv(complete_cell(cell, pbc)), pbc, cutoff)
        total += math.prod(2 * n + 1 for n in reach)
    return total


# --- Small structures on the CPU: the distances of all pairs of all images, in NumPy ---
#
# For a small molecule or cell this is faster than a search by cells: what surrounds such a search (checks, calls, the
# sorting of its pairs) takes longer than to compute all distances, which are in the order of the rows already. The
# arithmetic is that of reference.py, in as few calls as possible: each costs as much as a thousand distances.

MAX_DISTANCES = 200_000
"""Largest number of distances, N²·S, that is searched in this way."""

_HOME = np.zeros((1, 3), np.int64)
Vector = tuple[float, float, float]


class SimpleStructure(NamedTuple):
    """A structure that is periodic everywhere or nowhere, in NumPy, for the fast search of small structures.

    Attributes:
        pos: [N, 3] Å, float64.
        cell: rows in Å.
        volume: Å³, with its sign; 0 where not periodic.
    """

    pos: np.ndarray
    cell: list[Vector]
    volume: float


def simple_structure(system: System) -> SimpleStructure | None:
    """Return the structure, if a quick check shows that it is valid; None means that `System.validate` has to decide.

    validate() takes 0.3 ms, several times as long as the search of a small molecule.
    """
    if system.num_systems != 1 or system.device.type != "cpu" or system.num_atoms == 0:
        return None
    pos = system.pos.detach().double().numpy()
    cell, periodic = system.cell.tolist()[0], system.pbc.tolist()[0]
    numbers = float(pos.sum()) + sum(map(sum, cell)) + system.charge.tolist()[0]
    if not math.isfinite(numbers) or system.batch.numpy().any():
        return None
    if not any(periodic):
        return SimpleStructure(pos, cell, 0.0)
    volume = _dot(cell[0], _cross(cell[1], cell[2]))
    if not all(periodic) or not abs(volume) > 1e-3 * math.prod(math.hypot(*row) for row in cell):
        return None
    return SimpleStructure(pos, cell, volume)


def neighbor_list_brute_force(structure: SimpleStructure, cutoff: float, half: bool = False) -> NeighborList | None:
    """Return all pairs closer than the cutoff, from all images.

    Args:
        structure: N atoms.
        cutoff: Å; pairs at d < cutoff are listed.
        half: list each unordered pair once.

    Returns:
        NeighborList with int64 indices; None where there are more than MAX_DISTANCES distances.
    """
    pos, cell, volume = structure
    n, images, shifts = len(pos), 1, _HOME
    if n * n > MAX_DISTANCES:
        return None
    x = pos.T.copy()  # [3, N]; a view would hand down the order of its memory
    if volume:
        across = [_cross(cell[k - 2], cell[k - 1]) for k in range(3)]
        # |fractional difference| < 1 inside the cell: an image s can be in range only if |s| < cutoff / height + 1
        reach = [int(cutoff * math.hypot(*v) / abs(volume)) + 1 for v in across]
        images = math.prod(2 * r + 1 for r in reach)
        if n * n * images > MAX_DISTANCES:
            return None
        shifts, upper = _shifts(*reach)
        columns = np.array(cell).T
        whole = np.floor(np.array(across) @ x / volume)
        x -= columns @ whole
    delta = (x[:, None] - x[:, :, None]).reshape(3, 1, n * n)  # from row to column
    home = images // 2
    if volume:  # images from the cell itself on; the others are their opposites
        delta = delta + (columns @ upper)[:, :, None]
    delta *= delta
    square = delta[0] + delta[1]
    square += delta[2]
    close = (square < cutoff * cutoff).reshape(-1)
    close[: n * n : n + 1] = False  # an atom is not its own neighbor

    found = close.nonzero()[0]
    if volume:  # in the order of receiver, sender, image; of the cell itself both directions are there
        ends, forth, back = _places(n, images)
        again = back.take(found[found.searchsorted(n * n) :])
        found = np.concatenate([forth.take(found), again])
        found.sort()
        pair = found // images
        edges = ends.take(pair, axis=1)
    else:  # sets of molecules have many sizes: no tables
        pair = found
        edges = np.array(np.divmod(pair, n))
    receiver, sender = edges
    image = found - pair * images
    shift = shifts.take(image, axis=0)
    if volume and whole.any():
        rows = whole.T.astype(np.int64, order="C")
        shift += (rows[:, None] - rows).reshape(-1, 3).take(pair, axis=0)
    if half:
        keep = (receiver < sender) | ((receiver == sender) & (image > home))
        edges, shift = edges[:, keep], shift[keep]
    row_ptr = edges[0].searchsorted(np.arange(n + 1))
    return NeighborList(torch.from_numpy(edges), torch.from_numpy(shift), torch.from_numpy(row_ptr), cutoff, half)


@lru_cache(maxsize=32)
def _shifts(*reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all shifts within a reach, in order, [S, 3] int64; those from zero on, [3, S/2 + 1/2] float64."""
    shifts = np.array(list(itertools.product(*(range(-r, r + 1) for r in reach))))
    return shifts, shifts[len(shifts) // 2 :].T.astype(np.float64, order="C")


@lru_cache(maxsize=8)
def _places(n: int, images: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions of edges in a list sorted by receiver, sender, image.

    Returns:
        ends: [2, N²] receiver and sender of each pair; forth, back: [(S/2 + 1/2) N²], by image (from the cell itself
        on), receiver and sender: the position of this edge, and that of the opposite edge.
    """
    ends = np.indices((n, n)).reshape(2, n * n)
    pairs, h = np.arange(n * n).reshape(n, n), np.arange(images // 2 + 1)[:, None, None]
    forth, back = pairs * images + images // 2 + h, pairs.T * images + images // 2 - h
    return ends, forth.reshape(-1), back.reshape(-1)


def _cross(a: Vector, b: Vector) -> Vector:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _dot(a: Vector, b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


_KEPT_PAIRS = 4_000_000  # up to so many, vesin's memory (28 bytes a pair) stays for the next search
_kept = threading.local()
_WIDE = 20  # cutoffs; wider structures, unless periodic everywhere, get their empty space taken out
_WIDEST = 10_000  # cutoffs; wider periodic cells are left to the reference
_SHIFT_BITS = 5  # of each number of a shift, up to which a table of all shifts is small


def neighbor_list_vesin(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Return pairs closer than the cutoff by cell lists, O(N), one structure after the other.

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
    search = _vesin(float(cutoff))

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


def _vesin(cutoff: float) -> Any:
    """Return vesin's search of this thread, which keeps its memory from call to call."""
    import vesin

    search = getattr(_kept, "search", None)
    if search is None or search.cutoff != cutoff:
        search = _kept.search = vesin.NeighborList(cutoff=cutoff, full_list=False)
    return search


def _spanning_cell(cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Return rows that span space: vesin reads the non-periodic rows too."""
    if pbc.all():
        return cell
    return complete_cell(torch.from_numpy(cell), torch.from_numpy(pbc)).numpy() if pbc.any() else np.eye(3)


def _too_wide(cells: np.ndarray, pbcs: np.ndarray, cutoff: float) -> bool:
    """Return whether a periodic cell is larger than vesin can divide, which then ends the process."""
    widest = _WIDEST * cutoff
    if 2 * np.abs(cells).max() < widest:  # a vector is shorter than twice its largest number
        return False
    return bool(((np.square(cells).sum(2) > widest**2) & pbcs).any())


def _extent_above(points: np.ndarray, limit: float) -> bool:
    """Return whether points lie further apart than a limit along x, y or z."""
    if points.max() - points.min() <= limit:  # of all numbers: much faster than axis by axis
        return False
    return float(np.ptp(points, axis=0).max()) > limit


def _narrowed(points: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Return points with the same pairs, within the cell and with less empty space between them along open directions.

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
    """Return both directions of each pair (one, if `half`) as sorted rows.

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
    """Return the shift that each number of 3 × `bits` bits stands for, [8^bits, 3] int64."""
    numbers = np.arange(1 << (3 * bits))[:, None]
    return (numbers >> np.array([2 * bits, bits, 0]) & ((1 << bits) - 1)) - widest


def neighbor_list_torch_cluster(system: System, cutoff: float, half: bool = False) -> NeighborList:
    """Return pairs by torch_cluster.radius_graph; arguments as for `neighbor_list`.

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
