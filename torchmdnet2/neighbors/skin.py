"""Verlet skin: a wider list that is searched anew only after atoms moved, and cut to the cutoff at every call.

What is done is decided on the device: while no atom has moved farther than half of the skin since the last search and
the cells are the same, the kernels of the search return at once. So a call can be captured in a CUDA graph, as a call
of TritonNeighborSearch. Whether it pays is measured in docs/neighbors.md; nothing uses it unless asked to.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import after_previous
from .triton_search import TritonNeighborSearch, overlap_launches
from .triton_setup import _OVERFLOW, ROW_BLOCK, row_pointers, row_sums

__all__ = ["SkinNeighborSearch"]

_BLOCK = 256
_ROW_TILE = 64
_ROOM = 1.1  # of the wide list, above what a homogeneous density needs


@triton.jit(do_not_specialize=["N", "B"])
def find_moved(
    pos, last_pos, cell, last_cell, pbc, last_pbc, half_skin, stale, N, B, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """stale = 1 if an atom moved farther than half of the skin, or a cell or its periodicity is another."""
    after_previous(PDL)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    square = tl.zeros([BLOCK], tl.float64)
    for c in tl.static_range(3):
        x = tl.load(pos + k * 3 + c, mask=k < N, other=0.0).to(tl.float64)
        x -= tl.load(last_pos + k * 3 + c, mask=k < N, other=0.0).to(tl.float64)
        square += x * x
    limit = tl.load(half_skin)
    same = square <= limit * limit  # not so for NaN
    for at in range(tl.program_id(0) * BLOCK, B * 9, tl.num_programs(0) * BLOCK):
        q = at + tl.arange(0, BLOCK)
        same &= tl.load(cell + q, mask=q < B * 9, other=0.0) == tl.load(last_cell + q, mask=q < B * 9, other=0.0)
        same &= tl.load(pbc + q, mask=q < B * 3, other=0) == tl.load(last_pbc + q, mask=q < B * 3, other=0)
    if tl.min(same.to(tl.int32), axis=0) == 0:
        tl.atomic_or(stale, 1)


@triton.jit(do_not_specialize=["N", "B"])
def narrow_rows(
    pos, last_pos, cell, last_cell, pbc, last_pbc, batch, wide_ptr, wide_sender, wide_shift, cutoff, stale, counts,
    row_ptr, sender, receiver, shift, vectors, distances, N, B,
    RECEIVER: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr, DISTANCES: tl.constexpr, FILL: tl.constexpr,
    K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count or list the edges of the wide list within the cutoff, row program_id(0), in float64.

    Counting also keeps the positions and cells of a new wide list.
    """
    after_previous(PDL)
    i = tl.program_id(0)
    first = tl.load(wide_ptr + i)
    last = tl.load(wide_ptr + i + 1)
    rc = tl.load(cutoff)
    to = 0
    if FILL:
        to = tl.load(row_ptr + i)
        if tl.load(row_ptr + i + 1) == to:
            last = first  # also after an overflow: every row is empty, and nothing may be written
    h = cell + tl.load(batch + i) * 9
    xi = tl.load(pos + i * 3).to(tl.float64)
    yi = tl.load(pos + i * 3 + 1).to(tl.float64)
    zi = tl.load(pos + i * 3 + 2).to(tl.float64)
    count = 0
    for at in range(first, last, K):
        e = at + tl.arange(0, K)
        mask = e < last
        j = tl.load(wide_sender + e, mask=mask, other=0)
        of = wide_shift + e.to(tl.int64) * 3  # may pass 2^31
        s0 = tl.load(of, mask=mask, other=0)
        s1 = tl.load(of + 1, mask=mask, other=0)
        s2 = tl.load(of + 2, mask=mask, other=0)
        x = tl.load(pos + j * 3, mask=mask, other=0.0).to(tl.float64) - xi
        y = tl.load(pos + j * 3 + 1, mask=mask, other=0.0).to(tl.float64) - yi
        z = tl.load(pos + j * 3 + 2, mask=mask, other=0.0).to(tl.float64) - zi
        if tl.max(tl.abs(s0) + tl.abs(s1) + tl.abs(s2), axis=0) > 0:
            x += (
                s0 * tl.load(h).to(tl.float64) + s1 * tl.load(h + 3).to(tl.float64) + s2 * tl.load(h + 6).to(tl.float64)
            )
            y += (
                s0 * tl.load(h + 1).to(tl.float64)
                + s1 * tl.load(h + 4).to(tl.float64)
                + s2 * tl.load(h + 7).to(tl.float64)
            )
            z += (
                s0 * tl.load(h + 2).to(tl.float64)
                + s1 * tl.load(h + 5).to(tl.float64)
                + s2 * tl.load(h + 8).to(tl.float64)
            )
        square = x * x + y * y + z * z
        near = mask & (square < rc * rc)
        hit = near.to(tl.int32)
        if FILL:
            edge = to + count + tl.cumsum(hit, axis=0) - 1
            edge3 = edge.to(tl.int64) * 3
            tl.store(sender + edge, j, mask=near)
            if RECEIVER:
                tl.store(receiver + edge, tl.zeros([K], tl.int32) + i, mask=near)
            if SHIFT:
                tl.store(shift + edge3, s0, mask=near)
                tl.store(shift + edge3 + 1, s1, mask=near)
                tl.store(shift + edge3 + 2, s2, mask=near)
            if VECTORS:
                tl.store(vectors + edge3, x, mask=near)
                tl.store(vectors + edge3 + 1, y, mask=near)
                tl.store(vectors + edge3 + 2, z, mask=near)
            if DISTANCES:
                tl.store(distances + edge, tl.sqrt(square), mask=near)
        count += tl.sum(hit, axis=0)
    if not FILL:
        tl.store(counts + i, count)
        if tl.load(stale) != 0:
            c = tl.arange(0, 4)
            tl.store(last_pos + i * 3 + c, tl.load(pos + i * 3 + c, mask=c < 3, other=0.0), mask=c < 3)
            for at in range(i * K, B * 9, tl.num_programs(0) * K):
                q = at + tl.arange(0, K)
                tl.store(last_cell + q, tl.load(cell + q, mask=q < B * 9, other=0.0), mask=q < B * 9)
                tl.store(last_pbc + q, tl.load(pbc + q, mask=q < B * 3, other=0), mask=q < B * 3)


@triton.jit(do_not_specialize=["wide_capacity"])
def settle(stale, wide_needed, needed, flag, wide_capacity, PDL: tl.constexpr):
    """The wide list is fresh now, unless it had no room: then what it needed is what is needed."""
    after_previous(PDL)
    wanted = tl.load(wide_needed)
    if wanted > wide_capacity:
        tl.store(needed, wanted)
        tl.atomic_or(flag, _OVERFLOW)
    else:
        tl.store(stale, 0)


class SkinNeighborSearch:
    """As TritonNeighborSearch, with a list that is kept until atoms have moved.

    The list is that of TritonNeighborSearch for the same positions, in the same order. After an overflow of the wide
    list `needed` is what that needed, which is enough for both.

    Args:
        num_atoms, num_systems, cutoff, capacity, device: as for TritonNeighborSearch.
        skin: Å, positive: the wide list reaches to cutoff + skin.
        pos_dtype, cell_dtype: of the positions and cells that will be searched.
        options: more of TritonNeighborSearch's.

    Raises:
        ValueError: the skin is not a positive number, or as TritonNeighborSearch.
    """

    def __init__(
        self,
        num_atoms: int,
        num_systems: int,
        cutoff: float,
        capacity: int,
        device: torch.device | str = "cuda",
        *,
        skin: float,
        pos_dtype: torch.dtype = torch.float32,
        cell_dtype: torch.dtype | None = None,
        batch: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        method: str = "auto",
        thin: bool = False,
        receiver: bool = False,
        shift: bool = False,
        vectors: bool = True,
        distances: bool = False,
    ):
        if not (math.isfinite(skin) and skin > 0):
            raise ValueError(f"the skin must be a positive number of Å, got {skin!r}")
        N, B = num_atoms, num_systems
        self.skin, self.cutoff, self.dtype = float(skin), float(cutoff), dtype
        self._stale = torch.ones(1, dtype=torch.int32, device=device)
        self._widening = _ROOM * ((cutoff + skin) / cutoff) ** 3
        self.wide = TritonNeighborSearch(
            N, B, cutoff + skin, self._wide(capacity), device, batch=batch, method=method, thin=thin, shift=True,
            vectors=False, stale=self._stale,
        )  # fmt: skip
        self.device, self.num_atoms, self.num_systems = self.wide.device, N, B
        self.method, self.flag = self.wide.method, self.wide.flag
        self._wanted = {"RECEIVER": receiver, "SHIFT": shift, "VECTORS": vectors, "DISTANCES": distances}
        self._overlap = overlap_launches(self.device)

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.row_ptr, self.needed = new(N + 1), new(1, dtype=torch.int64)
        self._counts, self._block_sums = new(N), new(triton.cdiv(N, ROW_BLOCK), dtype=torch.int64)
        self._last_pos = new(N, 3, dtype=pos_dtype)
        self._last_cell = new(B, 3, 3, dtype=cell_dtype or pos_dtype)
        self._last_pbc = new(B, 3, dtype=torch.uint8)
        self._cutoff = new(1, dtype=torch.float64).fill_(self.cutoff)
        self._half_skin = new(1, dtype=torch.float64).fill_(0.5 * self.skin * (1 - 1e-6))
        self.set_capacity(capacity)

    def _wide(self, capacity: int) -> int:
        return min(math.ceil(capacity * self._widening) + 64, 2**31 - 1)

    @property
    def batch(self) -> Tensor:
        return self.wide.batch

    @property
    def ptr(self) -> Tensor:
        return self.wide.ptr

    def set_capacity(self, capacity: int) -> None:
        """As TritonNeighborSearch.set_capacity."""
        self.capacity = capacity
        if self.wide.capacity != self._wide(capacity):
            self.wide.set_capacity(self._wide(capacity))

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor | None:
            return torch.zeros(shape, dtype=dtype, device=self.device) if self._wanted[name] else None

        self.sender = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        self.receiver = buffer("RECEIVER", capacity)
        self.shift = buffer("SHIFT", capacity, 3)
        self.vectors = buffer("VECTORS", capacity, 3, dtype=self.dtype)
        self.distances = buffer("DISTANCES", capacity, dtype=self.dtype)
        self.refresh()

    def set_batch(self, batch: Tensor | None) -> None:
        """As TritonNeighborSearch.set_batch."""
        self.wide.set_batch(batch)
        self.refresh()

    def refresh(self) -> None:
        """Search anew at the next call."""
        self._stale.fill_(1)

    def __call__(self, pos: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """Search; the results are in the buffers. See TritonNeighborSearch.

        Raises:
            ValueError: the shapes are wrong, or the types are not those that were announced.
        """
        if pos.dtype != self._last_pos.dtype or cell.dtype != self._last_cell.dtype:
            raise ValueError(
                f"this search is for positions in {self._last_pos.dtype} and cells in {self._last_cell.dtype}, "
                f"got {pos.dtype} and {cell.dtype}"
            )
        self.wide.check(pos, cell, pbc)
        N, B, wide = self.num_atoms, self.num_systems, self.wide
        pos, cell, periodic = pos.detach(), cell.detach(), pbc.view(torch.uint8)
        overlap = {"PDL": True, "launch_pdl": True} if self._overlap else {"PDL": False}
        after: dict[str, Any] = {"enable_fp_fusion": False, **overlap}
        remembered = pos, self._last_pos, cell, self._last_cell, periodic, self._last_pbc
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            find_moved[(triton.cdiv(N, _BLOCK),)](
                *remembered, self._half_skin, self._stale, N, B, BLOCK=_BLOCK, PDL=False, enable_fp_fusion=False
            )
            wide(pos, cell, pbc)
            self._narrow(remembered, False, after)
            blocks = triton.cdiv(N, ROW_BLOCK)
            row_sums[(blocks,)](self._stale, self._counts, self._block_sums, N, BLOCK=ROW_BLOCK, GUARD=False, **after)
            row_pointers[(blocks,)](
                self._stale, self._counts, self._block_sums, self.row_ptr, self.needed, self.flag, N, self.capacity,
                SUMMED=True, BLOCK=ROW_BLOCK, SUMS=256, GUARD=False, **after,
            )  # fmt: skip
            self._narrow(remembered, True, after)
            settle[(1,)](self._stale, wide.needed, self.needed, self.flag, wide.capacity, num_warps=1, **after)

    def _narrow(self, remembered: tuple[Tensor, ...], fill: bool, after: dict[str, Any]) -> None:
        wide = self.wide
        narrow_rows[(self.num_atoms,)](
            *remembered, wide.batch, wide.row_ptr, wide.sender, wide.shift, self._cutoff, self._stale, self._counts,
            self.row_ptr, self.sender, self.receiver, self.shift, self.vectors, self.distances, self.num_atoms,
            self.num_systems, FILL=fill, **self._wanted, K=_ROW_TILE, num_warps=1, **after,
        )  # fmt: skip
