"""The GPU neighbor search: static buffers, kernel launches, and the eager call on top of them.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import contextlib
import os

import torch
from torch import Tensor

from ..errors import MissingBackend, NeighborOverflow
from ..system import System
from .result import NeighborList

try:
    import triton
except ModuleNotFoundError as error:
    raise MissingBackend("the neighbor backend 'triton' needs the package triton: pip install triton") from error

from .triton_bins import bin_starts, place_atoms, wrap_atoms
from .triton_cells import search_cells
from .triton_pairs import search_pairs
from .triton_rows import finish_rows
from .triton_setup import (
    FREE_BINS,
    NOT_FINITE,
    OVERFLOW,
    REALS,
    ROW_BLOCK,
    TOO_THIN,
    WHOLE,
    cell_geometry,
    row_pointers,
    row_sums,
)

__all__ = ["NOT_FINITE", "OVERFLOW", "TOO_THIN", "TritonNeighborSearch", "neighbor_list_triton"]

CELLS_FROM = 2000
"""Atoms per structure from which cell lists are faster than testing all pairs, on one NVIDIA H200."""

_ATOM_BLOCK = 128
_ZERO_BLOCK = 1024
_BIN_BLOCK = 4096
_SUMS = 256
_BLOCKS_IN_ONE = 4  # up to so many blocks of rows, summing all rows again is faster than another kernel
# tiles of receivers × candidates, and warps; the best of those tried on one NVIDIA H200
_PAIR_TILE = (1, 512, 4)
_CELL_TILE = (8, 32, 1)
_CELL_SPLIT = 2
# the float64 branches, rarely taken, would claim registers that the others need to run side by side
_PAIR_REGISTERS = 128
_CELL_REGISTERS = 128
_CELL_PROGRAMS = 132 * 64
_ROW_TILE = 64


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonNeighborSearch:
    """Neighbor search into static buffers on the GPU, for callers that capture it in a CUDA graph.

    A call only launches kernels on the current stream: it allocates nothing and never waits for the device, so
    torch.cuda.graph captures it. Same input, same output, bit for bit. After each call, still on the device:

        row_ptr [N + 1] int32: the edges of receiver i are row_ptr[i] … row_ptr[i+1] − 1; all zero after an overflow.
            What lies past row_ptr[N] in the other buffers is left over and must not be read.
        sender [C] int32: ascending within a row; several images of one sender in order of their shifts.
        receiver [C] int32, shift [C, 3] int32 (r = pos[sender] + shift·cell − pos[receiver]),
        vectors [C, 3] and distances [C] in Å and in `dtype`: those that were asked for, else None.
        needed [1] int64: directed edges found. More than the capacity means that the list is not usable.
        flag [1] int32: sticky, cleared only by the caller (`flag.zero_()`). OVERFLOW (1): more edges than the capacity.
            NOT_FINITE (2): a position or cell is not finite, beyond 2^30 Å or cells, or a periodic cell is flat.
            TOO_THIN (8): method "cells" met a periodic cell thinner than the cutoff, or "pairs" one that needs more
            than 30 images to a side. With any bit set the list must not be used.

    Args:
        num_atoms: N, padding included.
        num_systems: B.
        cutoff: Å; pairs at d < cutoff are listed. The decision is that of float64 for float32 positions too.
        capacity: C, room for directed edges.
        device: a CUDA device (the CPU under TRITON_INTERPRET=1).
        batch: [N] integers, ascending: the structure of each atom (default: one structure). See `set_batch`.
        dtype: of vectors and distances.
        method: "pairs" tests all pairs of a structure, "cells" uses cell lists, "auto" chooses by size; for "auto",
            `thin=True` says that some periodic cell may be thinner than the cutoff, which only "pairs" can search.
        receiver, shift, vectors, distances: which of the optional buffers to fill.

    Raises:
        ValueError: a size is not positive, the method is unknown, or the device has no Triton.
    """

    def __init__(
        self,
        num_atoms: int,
        num_systems: int,
        cutoff: float,
        capacity: int,
        device: torch.device | str = "cuda",
        *,
        batch: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        method: str = "auto",
        thin: bool = False,
        receiver: bool = False,
        shift: bool = False,
        vectors: bool = True,
        distances: bool = False,
    ):
        device = torch.device(device)
        if device.type != "cuda" and not interpreted():
            raise ValueError(f"the neighbor backend 'triton' needs a CUDA device, got tensors on '{device}'")
        if num_atoms < 1 or num_systems < 1 or capacity < 1 or not cutoff > 0:
            raise ValueError("num_atoms, num_systems, capacity and cutoff must be positive")
        if num_atoms >= 2**26 or capacity >= 2**31:
            raise ValueError("at most 2^26 atoms and 2^31 − 1 edges fit into one search")
        if method not in ("auto", "pairs", "cells"):
            raise ValueError(f"unknown method '{method}', known: auto, pairs, cells")
        if method == "auto":
            method = "cells" if num_atoms >= CELLS_FROM * num_systems and not thin else "pairs"
        self.num_atoms, self.num_systems = num_atoms, num_systems
        self.cutoff, self.method, self.device, self.dtype = float(cutoff), method, device, dtype

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.row_ptr, self.flag = ints(num_atoms + 1), ints(1)
        self.needed = torch.zeros(1, dtype=torch.int64, device=device)
        self.batch, self.ptr = ints(num_atoms), ints(num_systems + 1)
        self._counts = ints(num_atoms)
        self._cutoff = torch.full((1,), self.cutoff, dtype=torch.float64, device=device)
        self._reals = torch.zeros(num_systems, REALS, dtype=torch.float64, device=device)
        self._whole = ints(num_systems, WHOLE)
        self._block_sums = torch.zeros(triton.cdiv(num_atoms, ROW_BLOCK), dtype=torch.int64, device=device)
        num_bins = num_atoms + (FREE_BINS + 1) * num_systems if method == "cells" else 0
        self._placed = torch.zeros(3, num_atoms, dtype=torch.float32, device=device)
        self._wrapped = torch.zeros(num_atoms, 4, dtype=torch.float64, device=device)
        self._wraps = ints(num_atoms, 4)
        self._bin_count, self._bin_start = ints(num_bins), ints(num_bins)
        per_atom = num_atoms if method == "cells" else 0
        self._bins, self._slots, self._order = (ints(per_atom) for _ in range(3))
        self._parts = ints(per_atom, _CELL_TILE[1])
        self._doubts = ints(num_atoms)
        self._wanted = {"RECEIVER": receiver, "SHIFT": shift, "VECTORS": vectors, "DISTANCES": distances}
        self.set_capacity(capacity)
        self.set_batch(batch)

    def set_capacity(self, capacity: int) -> None:
        """New edge buffers with room for `capacity` edges; a graph captured before still writes to the old ones."""
        self.capacity = capacity

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor | None:
            return torch.zeros(shape, dtype=dtype, device=self.device) if self._wanted[name] else None

        self.sender = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        self.receiver = buffer("RECEIVER", capacity)
        self.shift = buffer("SHIFT", capacity, 3)
        self.vectors = buffer("VECTORS", capacity, 3, dtype=self.dtype)
        self.distances = buffer("DISTANCES", capacity, dtype=self.dtype)
        self._keys = torch.zeros(capacity, dtype=torch.int32, device=self.device)

    def set_batch(self, batch: Tensor | None) -> None:
        """Which structure each atom belongs to: [N] integers, ascending; those ≥ B at the end are padding.

        Copies into the static buffers, so graphs captured before see it; call it outside of a capture.
        """
        if batch is None:
            self.batch.zero_()
            self.ptr.fill_(self.num_atoms)
            self.ptr[0] = 0
        else:
            self.batch.copy_(batch)
            systems = torch.arange(self.num_systems + 1, dtype=torch.int32, device=self.device)
            self.ptr.copy_(torch.searchsorted(self.batch, systems))

    def __call__(self, pos: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """Search; the results are in the buffers.

        Args:
            pos: Å, [N, 3], float32 or float64, contiguous.
            cell: Å, [B, 3, 3], float32 or float64, contiguous.
            pbc: [B, 3] booleans, contiguous.
        """
        self.count(pos, cell, pbc)
        self.fill()

    def count(self, pos: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """First half of a search: row_ptr, needed and flag."""
        N, B = self.num_atoms, self.num_systems
        if pos.shape != (N, 3) or cell.shape != (B, 3, 3) or pbc.shape != (B, 3):
            raise ValueError(f"pos, cell and pbc must be [{N}, 3], [{B}, 3, 3] and [{B}, 3]")
        if not (pos.is_contiguous() and cell.is_contiguous() and pbc.is_contiguous()):
            raise ValueError("pos, cell and pbc must be contiguous")
        pos, cell, pbc = pos.detach(), cell.detach(), pbc.view(torch.uint8)
        cells = self.method == "cells"
        num_bins = self._bin_count.numel()
        with self._on_device():
            cell_geometry[(max(B, triton.cdiv(num_bins, _ZERO_BLOCK)),)](
                pos, cell, pbc, self._cutoff, self.ptr, self._reals, self._whole, self.flag, self._bin_count, num_bins,
                B, CELLS=cells, ZERO_BLOCK=_ZERO_BLOCK, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
            atom_grid = (triton.cdiv(N, _ATOM_BLOCK),)
            wrap_atoms[atom_grid](
                pos, self.batch, self.ptr, self._reals, self._whole, self._cutoff, self._wrapped, self._wraps,
                self.flag, self._placed, self._bins, self._slots, self._bin_count, self._counts, N, B,
                CELLS=cells, BLOCK=_ATOM_BLOCK, enable_fp_fusion=False,
            )  # fmt: skip
            if cells:
                bin_starts[(triton.cdiv(N + FREE_BINS + 1, _BIN_BLOCK), B)](
                    self._bin_count, self._bin_start, self.ptr, self._whole, BLOCK=_BIN_BLOCK, num_warps=8
                )
                place_atoms[atom_grid](
                    self._bins, self._slots, self._bin_start, self._wrapped, self._order, self._placed, self.ptr, N, B,
                    BLOCK=_ATOM_BLOCK,
                )  # fmt: skip
            self._search(fill=False)
            blocks = triton.cdiv(N, ROW_BLOCK)
            summed = blocks > _BLOCKS_IN_ONE
            if summed:
                row_sums[(blocks,)](self._counts, self._block_sums, N, BLOCK=ROW_BLOCK)
            row_pointers[(blocks,)](
                self._counts, self._block_sums, self.row_ptr, self.needed, self.flag, N, self.capacity,
                SUMMED=summed, BLOCK=ROW_BLOCK, SUMS=_SUMS if summed else ROW_BLOCK,
            )  # fmt: skip

    def fill(self) -> None:
        """Second half of a search: the edges."""
        ordered = self.method == "pairs"
        with self._on_device():
            self._search(fill=True)
            if not ordered or any(self._wanted.values()):
                finish_rows[(self.num_atoms,)](
                    self._keys, self.row_ptr, self.batch, self._wrapped, self._wraps, self._reals,
                    self.sender, self.receiver, self.shift, self.vectors, self.distances,
                    ORDER=not ordered, **self._wanted, K=_ROW_TILE, num_warps=1, enable_fp_fusion=False,
                )  # fmt: skip

    def _search(self, fill: bool) -> None:
        N, B = self.num_atoms, self.num_systems
        # the interpreter pays per operation, not per number
        if self.method == "pairs":
            rows, candidates, warps = (16, 4096, 1) if interpreted() else _PAIR_TILE
            search_pairs[(triton.cdiv(N, rows),)](
                self._placed, self._wrapped, self.batch, self.ptr, self._reals, self._whole, self._cutoff,
                self._counts, self._doubts, self.row_ptr, self.needed, self.sender, self._keys,
                N, B, self.capacity, FILL=fill, BATCHED=B > 1, BI=rows, BJ=candidates,
                num_warps=warps, maxnreg=_PAIR_REGISTERS, enable_fp_fusion=False,
            )  # fmt: skip
        else:
            rows, candidates, warps = _CELL_TILE
            split = 1 if interpreted() else _CELL_SPLIT
            programs = 1 if interpreted() else min(N, triton.cdiv(_CELL_PROGRAMS, B))
            search_cells[(programs * split, B)](
                self._placed, self._wrapped, self._order, self._bin_start, self.ptr, self._reals, self._whole,
                self._cutoff, self._counts, self._parts, self._doubts, self.row_ptr, self.needed,
                self._keys, N, self.capacity, FILL=fill, BI=rows, BJ=candidates, SPLIT=split,
                num_warps=warps, maxnreg=_CELL_REGISTERS, enable_fp_fusion=False,
            )  # fmt: skip

    def _on_device(self) -> contextlib.AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


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
        search.count(*given)
        search.fill()
    assert search.receiver is not None and search.shift is not None
    edges = torch.stack([search.receiver, search.sender])[:, :needed]
    shift, row_ptr = search.shift[:needed], search.row_ptr
    if order is not None:
        edges, shift, row_ptr = _unsort(edges, shift, order, N)
    if half:
        edges, shift, row_ptr = _keep_half(edges, shift, N)
    return NeighborList(edges, shift, row_ptr, float(cutoff), half)


def _row_pointers(receiver: Tensor, num_atoms: int) -> Tensor:
    row_ptr = torch.zeros(num_atoms + 1, dtype=torch.int32, device=receiver.device)
    row_ptr[1:] = torch.bincount(receiver, minlength=num_atoms).cumsum(0)
    return row_ptr


def _unsort(edges: Tensor, shift: Tensor, order: Tensor, num_atoms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges in the numbering before the atoms were sorted; a stable sort keeps the order of the shifts."""
    receiver, sender = order[edges.long()]
    by_pair = torch.argsort(receiver * num_atoms + sender, stable=True)
    edges = torch.stack([receiver, sender])[:, by_pair].int()
    return edges, shift[by_pair], _row_pointers(edges[0], num_atoms)


def _keep_half(edges: Tensor, shift: Tensor, num_atoms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each unordered pair once: receiver < sender, or the same atom and a first non-zero shift that is positive."""
    s0, s1, s2 = shift.unbind(1)
    upper = (s0 > 0) | ((s0 == 0) & ((s1 > 0) | ((s1 == 0) & (s2 > 0))))
    keep = (edges[0] < edges[1]) | ((edges[0] == edges[1]) & upper)
    edges = edges[:, keep]
    return edges, shift[keep], _row_pointers(edges[0], num_atoms)
