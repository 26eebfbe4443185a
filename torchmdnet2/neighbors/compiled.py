"""Compiled neighbor searches on a CPU, for structures whose atoms do not change.

`AllPairs` tests all pairs of small molecules, `ListSearch` is the neighbor list, `CellSearch` has bins, `DomainSearch`
selects from a list with a skin.

Shapes: N atoms in B structures, E edges.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.compiling_cpu import ThreadChoice, compiled, kernel, run_on_threads
from ..system import System
from . import neighbor_list
from .neighbor_list import SAME_PLACE, NeighborList, coincident, refuse_coincident, with_room
from .reference import complete_cell

__all__ = ["AllPairs", "CellSearch", "CpuSearch", "DomainSearch", "ListSearch", "StructureSearch", "all_pairs"]

_SEARCH_COST = 8
"""Work of an edge, in the units of `kernels.interfaces.amount_of_work`."""


class CpuSearch:
    """Edges within a cutoff, in buffers that are used again. Not locked.

    Args:
        cutoff: Å.
        num_atoms: N.

    Attributes:
        cutoff: Å.
        row_ptr: [N + 1], sender: [≥ E] int64, vectors: [≥ E, 3] float32 Å. Of the last search.
    """

    def __init__(self, cutoff: float, num_atoms: int):
        self.cutoff = cutoff
        self.row_ptr = np.zeros(num_atoms + 1, np.int64)
        self.sender, self.vectors = np.empty(0, np.int64), np.empty((0, 3), np.float32)

    def _has_room(self, found: int) -> bool:
        """Return whether the edges fitted into the buffers; if not, they are replaced by larger ones."""
        if found <= len(self.sender):
            return True
        room = with_room(found)
        self.sender, self.vectors = np.empty(room, np.int64), np.empty((room, 3), np.float32)
        return False


class StructureSearch(CpuSearch, ABC):
    """Searches the edges of structures."""

    @abstractmethod
    def find(self, system: System) -> None:
        """Search the edges at new positions in a new cell of the same atoms."""

    def _take(self, found: NeighborList, system: System) -> None:
        """Take the edges of a neighbor list."""
        self.row_ptr, self.sender = found.row_ptr.numpy(), found.edge_index[1].numpy()
        self.vectors = found.vectors(system).detach().float().contiguous().numpy()


class ListSearch(StructureSearch):
    """Searches by the neighbor list, in any cell; rows are sorted, positions and cell are checked.

    `find` raises ValueError where a position or the cell is not usable, or two atoms are at the same place.
    """

    def find(self, system: System) -> None:
        found = neighbor_list(system, self.cutoff)
        refuse_coincident(found, system)
        self._take(found, system)


# --- All pairs of structures of n atoms each, N = B·n, without cell ---


class AllPairs(StructureSearch):
    """Tests all pairs in structures of equal size without cell; rows are sorted, positions are checked.

    `find` raises ValueError where a position or the cell is not finite, or two atoms are at the same place.
    """

    def find(self, system: System) -> None:
        pos = system.pos.detach().numpy().reshape(system.num_systems, -1, 3)
        if not np.isfinite(system.cell.detach().numpy()).all():
            system.validate()
        while True:
            found = all_pairs(pos, self.cutoff, self.row_ptr, self.sender, self.vectors, SAME_PLACE)
            if found < 0:
                system.validate()  # names the atom
                raise coincident(neighbor_list(system, self.cutoff), system)
            if self._has_room(found):
                return


@compiled(error_model="numpy")  # no fastmath: it would not see what is not a number
def all_pairs(pos, cutoff, row_ptr, sender, vec, nearest=0.0):
    """CSR rows of the pairs closer than the cutoff, in the order of the neighbor list.

    Args:
        pos: [B, n, 3] Å.
        cutoff: Å.
        row_ptr: [N + 1] int64, sender: [E] int64, vec: [E, 3] float32: filled up to their size.
        nearest: Å; closer atoms are at the same place.

    Returns:
        E; −1 when a position is not finite, or two atoms are at the same place.
    """
    for b in range(pos.shape[0]):
        for i in range(pos.shape[1]):
            for a in range(3):
                if not np.isfinite(pos[b, i, a]):
                    return -1
    n, found, least, limit = pos.shape[1], 0, nearest * nearest, cutoff * cutoff
    row_ptr[0] = 0
    for b in range(pos.shape[0]):
        for i in range(n):
            px, py, pz = pos[b, i, 0], pos[b, i, 1], pos[b, i, 2]
            for j in range(n):
                x, y, z = pos[b, j, 0] - px, pos[b, j, 1] - py, pos[b, j, 2] - pz
                square = x * x + y * y + z * z
                if square < limit and i != j:
                    if square < least:
                        return -1
                    if found < len(sender):
                        sender[found] = b * n + j
                        vec[found, 0], vec[found, 1], vec[found, 2] = x, y, z
                    found += 1
            row_ptr[b * n + i + 1] = found
    return found


# --- Rows of edges for terms whose cutoff is long, by a search in bins that numba compiled ---
#
# The neighbor list sorts its rows and keeps shifts, which costs more than the search itself. Terms on kernels need
# neither: here each atom looks at the bins around its own, image by image, and writes its row. The order of a row is
# that of the bins: it does not depend on the number of threads.

_FINE = 3.0  # bins in a cutoff
_ROOM = 1e-5  # of a bin, by which its width exceeds its part of the cutoff: more than the errors of rounding
_BINS = 4, 64  # at most so many in an atom, and in a structure besides
_FEW = 1000  # atoms of a structure that may share one bin
_REACH = 50  # bins; thinner cells are left to the neighbor list


class CellSearch(StructureSearch):
    """Searches in bins, of structures whose atoms and periodicity do not change. Positions and cell are not checked.

    Args:
        cutoff: Å.
        system: N atoms in B structures; positions and cell do not matter.
    """

    def __init__(self, cutoff: float, system: System):
        n = system.num_atoms
        super().__init__(cutoff, n)
        self._threads = ThreadChoice()
        self._batch, self._pbc = system.batch.numpy().copy(), system.pbc.numpy().copy()
        self._partly = np.flatnonzero(self._pbc.any(1) & ~self._pbc.all(1))
        self._bin_of, self._scaled, self._wrapped = np.empty((n, 3), np.int64), np.empty((n, 3)), np.empty((n, 3))
        self._order, self._sorted = np.empty(n, np.int64), np.empty((3, n))

    def find(self, system: System) -> None:
        work, n = _SEARCH_COST * int(self.row_ptr[-1]), len(system.pos)
        if not run_on_threads(lambda: self.find_in_bins(system), self._threads, work, n, True):
            self._take(neighbor_list(system, self.cutoff), system)

    def find_in_bins(self, system: System) -> bool:
        """Search the edges at new positions in a new cell, on as many threads as numba is set to.

        Args:
            system: with the same atoms; valid (`System.validate`).

        Returns:
            False if bins cannot be used: atoms are spread too unevenly, or a cell is too thin. Nothing is found then.
        """
        pos, cell = system.pos.detach().double().numpy(), system.cell.detach().double()
        box = np.where(self._pbc.any(1)[:, None, None], cell.numpy(), np.eye(3))
        for b in self._partly:
            box[b] = complete_cell(cell[b], torch.from_numpy(self._pbc[b])).numpy()
        grid = np.empty((len(box), 6), np.int64)
        count = _assign(
            pos, self._batch, box, np.linalg.inv(box), self._pbc, self.cutoff, grid, self._bin_of, self._scaled,
            self._wrapped,
        )  # fmt: skip
        if count < 0:
            return False
        first, start = np.zeros(len(box), np.int64), np.zeros(count + 1, np.int64)
        _sort(self._batch, grid, self._bin_of, self._wrapped, first, start, self._order, self._sorted)
        atoms = self._batch, box, self._pbc, grid, self._bin_of, self._wrapped
        bins = *atoms, first, start, self._order, self._sorted, self.cutoff * self.cutoff
        self.row_ptr[0] = 0
        _count(len(pos), *bins, self.row_ptr, self.sender, self.vectors)
        np.cumsum(self.row_ptr, out=self.row_ptr)
        self._has_room(int(self.row_ptr[-1]))
        _fill(len(pos), *bins, self.row_ptr, self.sender, self.vectors)
        return True


@compiled(error_model="numpy")
def _assign(pos, batch, box, inverse, pbc, cutoff, grid, bin_of, scaled, wrapped):
    """Bins along the three vectors of each structure's box, and the atoms' places in them.

    Args:
        pos: [N, 3] Å; batch: [N]; box, inverse: [B, 3, 3], the vectors along open directions at right angles to the
            others; pbc: [B, 3].
        grid: [B, 6]: number of bins, and number to search on each side; bin_of [N, 3]; scaled [N, 3], fractional
            coordinates; wrapped [N, 3] Å, positions in the cell: filled.

    Returns:
        K; −1 if bins cannot be used.
    """
    structures = len(box)
    low, high = np.full((structures, 3), np.inf), np.full((structures, 3), -np.inf)
    atoms = np.zeros(structures, np.int64)
    for i in range(len(pos)):
        b = batch[i]
        atoms[b] += 1
        for a in range(3):
            wrapped[i, a] = pos[i, a]
        for k in range(3):
            f = 0.0
            for a in range(3):
                f += pos[i, a] * inverse[b, a, k]
            if pbc[b, k]:
                whole = math.floor(f)
                f -= whole
                for a in range(3):
                    wrapped[i, a] -= whole * box[b, k, a]
            scaled[i, k] = f
            low[b, k], high[b, k] = min(low[b, k], f), max(high[b, k], f)
    total = 0
    for b in range(structures):
        for k in range(3):
            grid[b, k], grid[b, 3 + k] = 1, 0
        if atoms[b] > 0:
            extent = np.empty(3)
            for k in range(3):
                if pbc[b, k]:
                    low[b, k], high[b, k] = 0.0, 1.0
                height = 1 / math.sqrt(inverse[b, 0, k] ** 2 + inverse[b, 1, k] ** 2 + inverse[b, 2, k] ** 2)
                extent[k] = (high[b, k] - low[b, k]) * height
            width = cutoff * (1 + _ROOM) / _FINE
            while True:
                count = 1.0
                for k in range(3):
                    count *= max(1.0, math.floor(extent[k] / width))
                if count <= _BINS[0] * atoms[b] + _BINS[1]:
                    break
                width *= 1.25
            if width > 2 * cutoff and atoms[b] > _FEW:
                return -1
            for k in range(3):
                number = int(max(1.0, math.floor(extent[k] / width)))
                grid[b, k] = number
                if pbc[b, k] or number > 1:
                    reach = math.ceil(cutoff * (1 + _ROOM / 2) * number / extent[k])
                    if not reach <= _REACH:
                        return -1
                    grid[b, 3 + k] = int(reach)
        total += grid[b, 0] * grid[b, 1] * grid[b, 2]
    for i in range(len(pos)):
        b = batch[i]
        for k in range(3):
            span = high[b, k] - low[b, k]
            place = (scaled[i, k] - low[b, k]) / span * grid[b, k] if span > 0 else 0.0
            bin_of[i, k] = min(int(place), grid[b, k] - 1)
    return total


@compiled()
def _sort(batch, grid, bin_of, wrapped, first, start, order, ordered):
    """Atoms by bin: first [B], the first bin of each structure; start [K + 1], order [N], ordered [3, N] Å: filled."""
    for b in range(1, len(grid)):
        first[b] = first[b - 1] + grid[b - 1, 0] * grid[b - 1, 1] * grid[b - 1, 2]
    place = np.empty(len(batch), np.int64)
    for i in range(len(batch)):
        b = batch[i]
        place[i] = first[b] + (bin_of[i, 0] * grid[b, 1] + bin_of[i, 1]) * grid[b, 2] + bin_of[i, 2]
        start[place[i] + 1] += 1
    for k in range(1, len(start)):
        start[k] += start[k - 1]
    at = start.copy()
    for i in range(len(batch)):
        to = at[place[i]]
        at[place[i]] += 1
        order[to] = i
        for a in range(3):
            ordered[a, to] = wrapped[i, a]


@compiled()
def _row(i, batch, box, pbc, grid, bin_of, wrapped, first, start, order, ordered, limit, fill, at, sender, vectors):
    """The number of edges of atom i; `fill` writes them from `at` on. Vectors of the two directions are opposite."""
    b, found = batch[i], 0
    nx, ny, nz = grid[b, 0], grid[b, 1], grid[b, 2]
    rx, ry, rz = grid[b, 3], grid[b, 4], grid[b, 5]
    x, y, z = bin_of[i, 0], bin_of[i, 1], bin_of[i, 2]
    px, py, pz = wrapped[i, 0], wrapped[i, 1], wrapped[i, 2]
    for u in range(x - rx, x + rx + 1):
        su = u // nx  # of the image
        if su != 0 and not pbc[b, 0]:
            continue
        for v in range(y - ry, y + ry + 1):
            sv = v // ny
            if sv != 0 and not pbc[b, 1]:
                continue
            column = first[b] + ((u - su * nx) * ny + v - sv * ny) * nz
            for sw in range((z - rz) // nz, (z + rz) // nz + 1):
                if sw != 0 and not pbc[b, 2]:
                    continue
                begin = start[column + max(z - rz - sw * nz, 0)]
                end = start[column + min(z + rz - sw * nz, nz - 1) + 1]
                tx = su * box[b, 0, 0] + sv * box[b, 1, 0] + sw * box[b, 2, 0]
                ty = su * box[b, 0, 1] + sv * box[b, 1, 1] + sw * box[b, 2, 1]
                tz = su * box[b, 0, 2] + sv * box[b, 1, 2] + sw * box[b, 2, 2]
                own = su == 0 and sv == 0 and sw == 0
                for k in range(begin, end):
                    dx, dy, dz = ordered[0, k] - px + tx, ordered[1, k] - py + ty, ordered[2, k] - pz + tz
                    near = dx * dx + dy * dy + dz * dz < limit
                    if fill:
                        if near and not (own and order[k] == i):
                            e = at + found
                            sender[e] = order[k]
                            vectors[e, 0], vectors[e, 1], vectors[e, 2] = dx, dy, dz
                            found += 1
                    else:
                        found += near
    return found if fill else found - 1  # without the atom itself


@kernel
def _count(
    begin, stop, batch, box, pbc, grid, bin_of, wrapped, first, start, order, ordered, limit, row_ptr, sender, vectors
):
    """Write the number of edges of atom i to row_ptr[i + 1]."""
    for i in range(begin, stop):
        row_ptr[i + 1] = _row(
            i, batch, box, pbc, grid, bin_of, wrapped, first, start, order, ordered, limit, False, 0, sender, vectors
        )


@kernel
def _fill(
    begin, stop, batch, box, pbc, grid, bin_of, wrapped, first, start, order, ordered, limit, row_ptr, sender, vectors
):
    """Write the edges of atom i to the places row_ptr[i] … row_ptr[i + 1] − 1 of sender and vectors."""
    for i in range(begin, stop):
        _row(
            i, batch, box, pbc, grid, bin_of, wrapped, first, start, order, ordered, limit, True, row_ptr[i], sender,
            vectors,
        )  # fmt: skip


# --- Edges of a domain's local atoms, selected from a list with a skin ---


class DomainSearch(CpuSearch):
    """Selects the edges of local atoms that are within the cutoff among listed ones."""

    def take(self, listed: NDArray, num_local: int, row_of: NDArray) -> None:
        """Take over a list.

        Args:
            listed: [2, L] receivers and senders, by receiver.
            num_local: n.
            row_of: [N] the row of each atom, as for `Domain.set_atoms`.
        """
        receiver, self._sender = listed[0], listed[1].copy()
        self._row = row_of[self._sender]
        self._ptr = np.zeros(num_local + 1, np.int64)
        self._ptr[1:] = np.bincount(receiver, minlength=num_local).cumsum()
        self.row_ptr = np.zeros(num_local + 1, np.int64)
        self._has_room(len(self._sender))

    def select(self, pos: NDArray) -> tuple[int, int] | None:
        """Take the listed edges that are within the cutoff; return two atoms at the same place, if there are any."""
        nearest = select_edges(
            self._ptr, self._sender, self._row, pos, self.cutoff**2, self.row_ptr, self.sender, self.vectors,
            SAME_PLACE**2,
        )  # fmt: skip
        if nearest < 0:
            return None
        return int(np.searchsorted(self._ptr, nearest, side="right")) - 1, int(self._sender[nearest])


@compiled(error_model="numpy")
def select_edges(ptr, listed, row, pos, limit, row_ptr, sender, vectors, least):
    """Copy the edges shorter than √limit into compressed rows.

    Args:
        ptr: [n + 1], listed: [≥ E] int64: listed senders of each atom, and their rows [≥ E].
        pos: [N, 3] Å.
        limit, least: Å².
        row_ptr [n + 1], sender [≥ E] int64, vectors [≥ E, 3] float32: filled.

    Returns:
        A listed edge shorter than √least, −1 if there is none.
    """
    found, wrong = 0, -1
    for i in range(len(ptr) - 1):
        row_ptr[i] = found
        px, py, pz = pos[i, 0], pos[i, 1], pos[i, 2]
        for e in range(ptr[i], ptr[i + 1]):
            j = listed[e]
            x, y, z = pos[j, 0] - px, pos[j, 1] - py, pos[j, 2] - pz
            square = x * x + y * y + z * z
            if square < limit:
                if square < least:
                    wrong = e
                sender[found] = row[e]
                vectors[found, 0], vectors[found, 1], vectors[found, 2] = x, y, z
                found += 1
    row_ptr[len(ptr) - 1] = found
    return wrong
