"""Edges within a cutoff, out of a list that reaches further: searched once, then selected while atoms move. Triton.

Shapes: n atoms with rows, N with the copies after them, C room for edges.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_search import NOT_FINITE, TritonNeighborSearch

__all__ = ["SkinList"]

_BLOCK = 64  # edges of a row at once
_LISTED_PER_ATOM = 100  # a guess, of the first search


class SkinList:
    """Edges from n atoms to N atoms without periodicity. `select` allocates nothing that stays, and never waits.

    Args:
        cutoff: Å; skin: Å by which listed edges may be longer.
        least: Å, below which two atoms are at the same place.

    Attributes:
        row_ptr [n + 1] int32, sender [C] int32, vectors [C, 3] float32 Å: of the last `select`. What lies past
            row_ptr[n] must not be read.
        wrong: [1] int32, after `select`: 1 + the listed edge of two atoms at the same place, 0 without.
    """

    def __init__(self, cutoff: float, skin: float, least: float, device: torch.device):
        self.cutoff, self._skin, self._device = float(cutoff), skin, device
        self._limits = torch.tensor([cutoff**2, least**2], dtype=torch.float64, device=device)
        self.wrong = torch.zeros(1, dtype=torch.int32, device=device)
        self._search: TritonNeighborSearch | None = None
        self._num_rows, self.num_listed = 0, 0
        self._make_room(0)

    def _make_room(self, capacity: int) -> None:
        self.sender = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self.vectors = torch.zeros(capacity, 3, device=self._device)

    @property
    def capacity(self) -> int:
        """C."""
        return len(self.sender)

    def list_anew(self, pos: Tensor, num_rows: int, row: Tensor) -> None:
        """List edges up to cutoff + skin; waits for the device.

        Args:
            pos: [N, 3] Å float64.
            num_rows: n.
            row: [N] int32, what `sender` names each atom.

        Raises:
            ValueError: a position is not finite, or too large.
        """
        self._num_rows, self._row = num_rows, row
        self._counts = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        self.row_ptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device)
        if num_rows:
            search = self._searched(pos)
            self._listed_ptr, self._listed = search.row_ptr, search.sender
            self.num_listed = int(search.row_ptr[num_rows])
        else:
            self._listed_ptr, self._listed, self.num_listed = self.row_ptr, self.sender, 0
        if self.num_listed > self.capacity:
            self._make_room(with_room(self.num_listed))

    def _searched(self, pos: Tensor) -> TritonNeighborSearch:
        """A search for as many atoms or more, the last ones being padding, with its results."""
        size, search = len(pos), self._search
        if search is None or not size <= search.num_atoms <= 2 * size + 64:
            self._search = None  # the old one is freed before the new one is made
            room = with_room(size)
            search = self._search = TritonNeighborSearch(
                room, 1, self.cutoff + self._skin, _LISTED_PER_ATOM * room, self._device, vectors=False
            )
        padded = pos.new_zeros(search.num_atoms, 3)
        padded[:size] = pos
        search.set_batch((torch.arange(search.num_atoms, device=self._device) >= size).int())
        free = torch.zeros(1, 3, dtype=torch.bool, device=self._device)
        cell = torch.zeros(1, 3, 3, dtype=torch.float64, device=self._device)
        while True:
            search.flag.zero_()
            search(padded, cell, free)
            needed = int(search.needed)
            if int(search.flag) & NOT_FINITE:
                raise ValueError("a position is not finite or too large: the simulation has blown up")
            if needed <= search.capacity:
                return search
            search.set_capacity(with_room(needed))

    def select(self, pos: Tensor) -> None:
        """Take the listed edges that are within the cutoff at positions [N, 3] float64."""
        self.wrong.zero_()
        if not self._num_rows:
            return
        given = self._listed_ptr, self._listed, pos, self._limits
        count_kernel[(self._num_rows,)](*given, self._counts, BE=_BLOCK, num_warps=1, enable_fp_fusion=False)
        torch.cumsum(self._counts, 0, dtype=torch.int32, out=self.row_ptr[1:])
        fill_kernel[(self._num_rows,)](
            *given, self._row, self.row_ptr, self.sender, self.vectors, self.wrong, BE=_BLOCK, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip

    def wrong_pair(self) -> tuple[int, int] | None:
        """The atoms of `wrong`; waits for the device."""
        edge = int(self.wrong) - 1
        if edge < 0:
            return None
        ends = self._listed_ptr[1 : self._num_rows + 1].long()
        receiver = torch.searchsorted(ends, torch.tensor(edge, device=self._device), right=True)
        return int(receiver), int(self._listed[edge])


def with_room(size: int) -> int:
    """A size that may grow by a thirtieth; a multiple of 16: what Triton specialises on must not change with sizes."""
    return -(-(size + size // 32 + 1) // 16) * 16


@triton.jit
def distances(listed, pos, i, e, mask):
    """Sender, vector and its square, float64, of listed edges e of atom i."""
    j = tl.load(listed + e, mask, other=0).to(tl.int64)
    x = tl.load(pos + j * 3, mask, other=0.0) - tl.load(pos + i * 3)
    y = tl.load(pos + j * 3 + 1, mask, other=0.0) - tl.load(pos + i * 3 + 1)
    z = tl.load(pos + j * 3 + 2, mask, other=0.0) - tl.load(pos + i * 3 + 2)
    return j, x, y, z, x * x + y * y + z * z


@triton.jit
def count_kernel(listed_ptr, listed, pos, limits, counts, BE: tl.constexpr):
    """counts [n]: how many of the listed edges of atom i are within the cutoff, limits [0] its square."""
    i = tl.program_id(0)
    end = tl.load(listed_ptr + i + 1)
    limit = tl.load(limits)
    total = tl.zeros([BE], tl.int32)
    for first in range(tl.load(listed_ptr + i), end, BE):
        e = first + tl.arange(0, BE)
        _j, _x, _y, _z, square = distances(listed, pos, i.to(tl.int64), e, e < end)
        total += ((e < end) & (square < limit)).to(tl.int32)
    tl.store(counts + i, tl.sum(total, 0))


@triton.jit
def fill_kernel(listed_ptr, listed, pos, limits, row, row_ptr, sender, vectors, wrong, BE: tl.constexpr):
    """Write the edges that `count_kernel` counted, in the order of the list; see `SkinList`."""
    i = tl.program_id(0)
    end = tl.load(listed_ptr + i + 1)
    limit, least = tl.load(limits), tl.load(limits + 1)
    at = tl.load(row_ptr + i)
    for first in range(tl.load(listed_ptr + i), end, BE):
        e = first + tl.arange(0, BE)
        j, x, y, z, square = distances(listed, pos, i.to(tl.int64), e, e < end)
        use = (e < end) & (square < limit)
        to = (at + tl.cumsum(use.to(tl.int32), 0) - 1).to(tl.int64)
        tl.store(sender + to, tl.load(row + j, use, other=0), use)
        tl.store(vectors + to * 3, x.to(tl.float32), use)
        tl.store(vectors + to * 3 + 1, y.to(tl.float32), use)
        tl.store(vectors + to * 3 + 2, z.to(tl.float32), use)
        tl.atomic_max(wrong + tl.zeros_like(e), e + 1, use & (square < least), sem="relaxed")
        at += tl.sum(use.to(tl.int32), 0)
