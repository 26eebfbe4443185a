"""The GPU neighbor search: static buffers and kernel launches.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import MissingBackend, NeighborOverflow
from ..system import System
from .neighbor_list import NeighborList, row_pointers, upper_half, with_room
from .triton_cells import (
    LANES,
    bin_starts,
    count_cells,
    finish_cells,
    finish_pairs,
    order_atoms,
    place_atoms,
    wrap_atoms,
)
from .triton_pairs import search_pairs, search_single
from .triton_setup import (
    COINCIDENT,
    FREE_BINS,
    NOT_FINITE,
    OVERFLOW,
    REALS,
    ROW_BLOCK,
    TOO_THIN,
    WHOLE,
    cell_geometry,
    row_pointer_kernel,
    row_sums,
)

__all__ = [
    "COINCIDENT", "NOT_FINITE", "OVERFLOW", "TOO_THIN", "SkinList", "TritonNeighborSearch", "neighbor_list_triton",
]  # fmt: skip


try:
    import triton
except ModuleNotFoundError as error:
    words = "the neighbor backend 'triton' needs the package triton: pip install 'torchmdnet2[gpu]'"
    raise MissingBackend(words) from error


CELLS_FROM = 2000
"""Atoms per structure from which cell lists are faster than testing all pairs, on one NVIDIA H200."""

_ATOM_BLOCK = 128
_ZERO_BLOCK = 1024
_BIN_BLOCK = 4096
_SUMS = 256
_BLOCKS_IN_ONE = 4  # up to so many blocks of rows, summing all rows again is faster than another kernel
# tiles of receivers × candidates, and warps; the best of those tried on one NVIDIA H200
_PAIR_TILE = (1, 512, 4)
_CELL_TILES = ((8000, 2), (50_000, 4), (2**31, 8))  # receivers of a program, up to so many atoms
# the float64 branches, rarely taken, would claim registers that the others need to run side by side
_PAIR_REGISTERS = 128
_CELL_REGISTERS = 128
_SINGLE_REGISTERS = 128
_REGISTERS = 65536  # of a multiprocessor, from compute capability 7.0 on
_ROW_REGISTERS = 64
_ROW_TILE = 64
# of search_single: receivers of a program, lanes; of few edges, and of many; one program of few atoms without images
_SINGLE_TILES = ((1, 256), (2, 128), (4, 128)), ((1, 256), (2, 256), (4, 256), (8, 256))
_MANY_EDGES = 200  # of an atom
_SINGLE_PROGRAMS = 1, 64, 256, 1024, 4096  # it is compiled for each of these largest numbers
_ALONE = 32
_EDGES_PER_WORD = 100  # of an atom on average: so many are found in half of the turns that a word has bits for


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def overlap_launches(device: torch.device) -> bool:
    """Return whether a kernel may be placed while the one before ends (see triton_launch.py)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True)
class _SingleTile:
    """How `search_single` divides a structure: receivers per program, lanes, programs, warps, launch options."""

    rows: int
    lanes: int
    programs: int
    warps: int
    launch: dict[str, bool]


def _single_tile(num_atoms: int, capacity: int, device: torch.device, periodic: bool) -> _SingleTile | None:
    """Return the division for this device; None for too many atoms."""
    if device.type != "cuda":  # the interpreter runs one program after the other: only one can wait for all
        return _SingleTile(triton.next_power_of_2(num_atoms), 256, 1, 8, {})
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return division(num_atoms, capacity, processors, periodic)


def division(num_atoms: int, capacity: int, processors: int, periodic: bool = True) -> _SingleTile | None:
    """Return the first division of `_SINGLE_TILES` whose programs all run at the same time; one program of few atoms
    without images, which waits for no other."""
    if num_atoms <= _ALONE and not periodic:
        return _SingleTile(_ALONE, _ALONE, 1, 8, {})
    for rows, lanes in _SINGLE_TILES[capacity > _MANY_EDGES * num_atoms]:
        programs = triton.cdiv(num_atoms, rows)
        if programs * lanes * _SINGLE_REGISTERS <= processors * _REGISTERS:
            return _SingleTile(rows, lanes, programs, lanes // 32, {"launch_cooperative_grid": True})
    return None


class TritonNeighborSearch:
    """Neighbor search into static buffers on the GPU, for callers that capture it in a CUDA graph.

    A call only launches kernels on the current stream: it allocates nothing and never waits for the device, so
    torch.cuda.graph captures it. Same input, same output, bit for bit. After each call, still on the device:

        row_ptr [N + 1] int32: the edges of receiver i are row_ptr[i] … row_ptr[i+1] − 1; all zero after an overflow.
            What lies past row_ptr[N] in the other buffers is left over and must not be read.
        sender [C] int32: ascending within a row; several images of one sender in order of their shifts. Without
            `ordered`, in an order that depends on positions and capacity alone.
        receiver [C] int32, shift [C, 3] int32 (r = pos[sender] + shift·cell − pos[receiver]),
        vectors [C, 3] and distances [C] in Å and in `dtype`: those that were requested, else None.
        needed [1] int64: directed edges found. More than the capacity means that the list is not usable.
        flag [1] int32: sticky, cleared only by the caller (`flag.zero_()`). OVERFLOW (1): more edges than the capacity.
            NOT_FINITE (2): a position or cell is not finite, beyond 2^30 Å or cells, or a periodic cell is flat.
            COINCIDENT (4): two atoms are closer than SAME_PLACE; seen if vectors or distances are requested.
            TOO_THIN (8): method "cells" met a periodic cell thinner than the cutoff, or "pairs" one that needs more
            than 61 images along a lattice vector. With any bit set the list must not be used.

    Args:
        num_atoms: N, padding included.
        num_systems: B.
        cutoff: Å; pairs at d < cutoff are listed. The decision is that of float64 for float32 positions too.
        capacity: C, number of directed edges that fit.
        device: a CUDA device (the CPU under TRITON_INTERPRET=1).
        batch: [N] integers, ascending: the structure of each atom (default: one structure). See `set_batch`.
        dtype: of vectors and distances.
        method: "pairs" tests all pairs of a structure, "cells" uses cell lists, "auto" chooses by size; for "auto",
            `thin=True` says that some periodic cell may be thinner than the cutoff, which only "pairs" can search.
        periodic: False if no structure has periodic directions, which "pairs" searches faster; a structure with such is
            TOO_THIN then.
        receiver, shift, vectors, distances: which of the optional buffers to fill.
        ordered: sort the rows, which takes most of the time of "cells" where rows have hundreds of edges.

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
        periodic: bool = True,
        receiver: bool = False,
        shift: bool = False,
        vectors: bool = True,
        distances: bool = False,
        ordered: bool = True,
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
        self.periodic, self._ordered = periodic, ordered
        self._overlap = overlap_launches(device)
        single = method == "pairs" and num_systems == 1
        self._single = _single_tile(num_atoms, capacity, device, periodic) if single else None

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.row_ptr, self.flag = ints(num_atoms + 1), ints(1)
        self.needed = torch.zeros(1, dtype=torch.int64, device=device)
        self.batch, self.ptr = ints(num_atoms), ints(num_systems + 1)
        self._cutoff = torch.full((1,), self.cutoff, dtype=torch.float64, device=device)
        self._wanted = {"RECEIVER": receiver, "SHIFT": shift, "VECTORS": vectors, "DISTANCES": distances}
        if self._single is not None:
            self._status = torch.zeros(num_atoms, dtype=torch.int64, device=device)
            self._epoch = ints(1)
        else:
            self._counts = ints(num_atoms)
            self._reals = torch.zeros(num_systems, REALS, dtype=torch.float64, device=device)
            self._whole = ints(num_systems, WHOLE)
            self._block_sums = torch.zeros(triton.cdiv(num_atoms, ROW_BLOCK), dtype=torch.int64, device=device)
            self._placed = torch.zeros(3, num_atoms, dtype=torch.float32, device=device)
            self._wrapped = torch.zeros(num_atoms, 4, dtype=torch.float64, device=device)
            self._wraps = ints(num_atoms, 4)
            cells = method == "cells"
            per_atom, num_bins = (num_atoms, num_atoms + (FREE_BINS + 1) * num_systems) if cells else (0, 0)
            self._bin_count, self._bin_start = ints(num_bins), ints(num_bins)
            self._bins, self._slots, self._members, self._order, self._row_bin = (ints(per_atom) for _ in range(5))
            self._lane_start = ints(per_atom, LANES)
            self._cell_tile = next(tile for most, tile in _CELL_TILES if num_atoms <= most)
            self._tiles = ints(triton.cdiv(per_atom, self._cell_tile))
            self._doubts = ints(0 if cells else num_atoms)
        self.set_capacity(capacity)
        self.set_batch(batch)

    def set_capacity(self, capacity: int) -> None:
        """Allocate edge buffers for `capacity` edges; a graph captured before must not be replayed."""
        self.capacity = capacity

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor | None:
            return torch.zeros(shape, dtype=dtype, device=self.device) if self._wanted[name] else None

        self.sender = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        self.receiver = buffer("RECEIVER", capacity)
        self.shift = buffer("SHIFT", capacity, 3)
        self.vectors = buffer("VECTORS", capacity, 3, dtype=self.dtype)
        self.distances = buffer("DISTANCES", capacity, dtype=self.dtype)
        self._keys = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        if self._single is not None:
            self._single = _single_tile(self.num_atoms, capacity, self.device, self.periodic)
        if self.method == "cells":
            # beyond so many turns a tile is counted and listed in float64, which is slower
            words = 1 + capacity // (_EDGES_PER_WORD * self.num_atoms)
            self._turns = 32 * words
            self._bits = torch.zeros(self.num_atoms, words, LANES, dtype=torch.int32, device=self.device)
            shape = self._tiles.numel(), self._turns, LANES
            self._candidates = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def set_batch(self, batch: Tensor | None) -> None:
        """Set the structure of each atom: [N] integers, ascending; those ≥ B at the end are padding.

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
        self._search(pos, cell, pbc, fill=True)

    def count(self, pos: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """Compute how many edges are needed, and the flag, whose bit OVERFLOW means nothing then. Rows and edges must
        not be read after it."""
        self._search(pos, cell, pbc, fill=False)

    def _search(self, pos: Tensor, cell: Tensor, pbc: Tensor, fill: bool) -> None:
        self.check(pos, cell, pbc)
        with self._on_device():
            if self._single is not None:
                self._search_single(pos, cell, pbc, self.capacity if fill else -1)
                return
            self._count(pos, cell, pbc)
            if fill:
                self._fill()

    def check(self, pos: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """Raise ValueError unless the tensors have the shapes of this search and are contiguous."""
        N, B = self.num_atoms, self.num_systems
        if pos.shape != (N, 3) or cell.shape != (B, 3, 3) or pbc.shape != (B, 3):
            raise ValueError(f"pos, cell and pbc must be [{N}, 3], [{B}, 3, 3] and [{B}, 3]")
        if not (pos.is_contiguous() and cell.is_contiguous() and pbc.is_contiguous()):
            raise ValueError("pos, cell and pbc must be contiguous")

    @property
    def division(self) -> _SingleTile | None:
        """How `search_single` divides the structure, which depends on the capacity; None: other kernels search it."""
        return self._single

    @property
    def _after(self) -> dict[str, bool]:
        """Launch options of every kernel but the first: it may be placed while the one before ends."""
        overlap = {"PDL": True, "launch_pdl": True} if self._overlap else {"PDL": False}
        return {"enable_fp_fusion": False, **overlap}

    def _search_single(self, pos: Tensor, cell: Tensor, pbc: Tensor, capacity: int) -> None:
        tile = self._single
        assert tile is not None
        search_single[(tile.programs,)](
            pos.detach(), cell.detach(), pbc.view(torch.uint8), self._cutoff, self.ptr, self.row_ptr,
            self.needed, self.flag, self.sender, self._keys, self.receiver, self.shift, self.vectors, self.distances,
            self._status, self._epoch, self.num_atoms, capacity, **self._wanted,
            PERIODIC=self.periodic, BI=tile.rows, BJ=tile.lanes, BE=max(tile.lanes, 32 * tile.warps),
            PROGRAMS=next(most for most in _SINGLE_PROGRAMS if tile.programs <= most),
            PDL=2 * (self._overlap and tile.programs == 1), num_warps=tile.warps, maxnreg=_SINGLE_REGISTERS,
            enable_fp_fusion=False, **tile.launch,
        )  # fmt: skip

    def _count(self, pos: Tensor, cell: Tensor, pbc: Tensor) -> None:
        N, B = self.num_atoms, self.num_systems
        pos, cell, pbc = pos.detach(), cell.detach(), pbc.view(torch.uint8)
        cells = self.method == "cells"
        num_bins = self._bin_count.numel()
        cell_geometry[(max(B, triton.cdiv(num_bins, _ZERO_BLOCK)),)](
            pos, cell, pbc, self._cutoff, self.ptr, self._reals, self._whole, self.flag, self._bin_count,
            num_bins, B, CELLS=cells, ZERO_BLOCK=_ZERO_BLOCK, PDL=False, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
        atom_grid = (triton.cdiv(N, _ATOM_BLOCK),)
        wrap_atoms[atom_grid](
            pos, self.batch, self.ptr, self._reals, self._whole, self._cutoff, self._wrapped, self._wraps,
            self.flag, self._placed, self._bins, self._slots, self._bin_count, self._counts, N, B,
            CELLS=cells, BLOCK=_ATOM_BLOCK, **self._after,
        )  # fmt: skip
        if cells:
            bin_starts[(triton.cdiv(N + FREE_BINS + 1, _BIN_BLOCK), B)](
                self._bin_count,
                self._bin_start,
                self.ptr,
                self._whole,
                BLOCK=_BIN_BLOCK,
                num_warps=8,
                **self._after,
            )
            place_atoms[atom_grid](
                self._bins, self._slots, self._bin_start, self._members, self.ptr, N, B, BLOCK=_ATOM_BLOCK,
                **self._after,
            )  # fmt: skip
            order_atoms[atom_grid](
                self._bins, self._members, self._bin_start, self.batch, self._whole, self._wrapped,
                self._order, self._row_bin, self._placed, self.ptr, N, B, BLOCK=_ATOM_BLOCK, **self._after,
            )  # fmt: skip
            count_cells[(self._tiles.numel(),)](
                self._placed, self._wrapped, self._order, self._row_bin, self._bin_start, self.batch,
                self.ptr, self._reals, self._whole, self._cutoff, self._counts, self._bits, self._lane_start,
                self._candidates, self._tiles, self._keys, N, B, self._turns, BI=self._cell_tile, num_warps=1,
                maxnreg=_CELL_REGISTERS, **self._after,
            )  # fmt: skip
        else:
            self._search_pairs(fill=False)
        blocks = triton.cdiv(N, ROW_BLOCK)
        summed = blocks > _BLOCKS_IN_ONE
        if summed:
            row_sums[(blocks,)](self._counts, self._block_sums, N, BLOCK=ROW_BLOCK, **self._after)
        row_pointer_kernel[(blocks,)](
            self._counts, self._block_sums, self.row_ptr, self.needed, self.flag, N, self.capacity,
            SUMMED=summed, BLOCK=ROW_BLOCK, SUMS=_SUMS if summed else ROW_BLOCK, **self._after,
        )  # fmt: skip

    def _fill(self) -> None:
        N, B = self.num_atoms, self.num_systems
        outputs = self.sender, self.receiver, self.shift, self.vectors, self.distances, self.flag
        if self.method == "cells":
            finish_cells[(N,)](
                self._placed, self._wrapped, self._wraps, self._order, self._row_bin, self._bin_start,
                self.batch, self.ptr, self._reals, self._whole, self._cutoff, self.row_ptr, self._bits,
                self._lane_start, self._candidates, self._tiles, self._keys, *outputs, N, B, self._turns,
                **self._wanted, ORDERED=self._ordered, BI=self._cell_tile, K=_ROW_TILE, num_warps=1,
                maxnreg=_ROW_REGISTERS, **self._after,
            )  # fmt: skip
            return
        self._search_pairs(fill=True)
        if any(self._wanted.values()):
            finish_pairs[(N,)](
                self._keys, self.row_ptr, self.batch, self._wrapped, self._wraps, self._reals, *outputs,
                **self._wanted, K=_ROW_TILE, num_warps=1, **self._after,
            )  # fmt: skip

    def _search_pairs(self, fill: bool) -> None:
        N, B = self.num_atoms, self.num_systems
        # the interpreter pays per operation, not per number
        rows, candidates, warps = (16, 4096, 1) if interpreted() else _PAIR_TILE
        search_pairs[(triton.cdiv(N, rows),)](
            self._placed, self._wrapped, self.batch, self.ptr, self._reals, self._whole, self._cutoff,
            self._counts, self._doubts, self.row_ptr, self.needed, self.sender, self._keys,
            N, B, self.capacity, FILL=fill, BATCHED=B > 1, BI=rows, BJ=candidates,
            num_warps=warps, maxnreg=_PAIR_REGISTERS, **self._after,
        )  # fmt: skip

    def _on_device(self) -> contextlib.AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


# --- The eager neighbor search on the GPU: a list with as much room as it needs ---


def neighbor_list_triton(system: System, cutoff: float, half: bool = False, method: str = "auto") -> NeighborList:
    """Return pairs closer than the cutoff, searched on the GPU. Edges are counted first, so that the list always fits.

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
    search.periodic = bool(system.pbc.any())
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
    """Return edges in the numbering before the atoms were sorted; a stable sort keeps the order of the shifts."""
    receiver, sender = order[edges.long()]
    by_pair = torch.argsort(receiver * num_atoms + sender, stable=True)
    edges = torch.stack([receiver, sender])[:, by_pair].int()
    return edges, shift[by_pair], row_pointers(edges[0], num_atoms)


# --- Edges within a cutoff from a list that reaches further: searched once, then selected while atoms move ---

_BLOCK = 64  # edges of a row at once
_LISTED_PER_ATOM = 100  # a guess, of the first search


class SkinList:
    """Neighbor list with a skin, which a simulation reuses for many steps: edges from n atoms to N, without
    periodicity.

    `select` allocates nothing that stays, and never waits.

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
        """Return a search for as many atoms or more, the last ones being padding, with its results."""
        size, search = len(pos), self._search
        if search is None or not size <= search.num_atoms <= 2 * size + 64:
            self._search = None  # the old one is freed before the new one is made
            room = with_room(size)
            search = self._search = TritonNeighborSearch(
                room, 1, self.cutoff + self._skin, _LISTED_PER_ATOM * room, self._device, periodic=False, vectors=False
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
        """Return the atoms of `wrong`; waits for the device."""
        edge = int(self.wrong) - 1
        if edge < 0:
            return None
        ends = self._listed_ptr[1 : self._num_rows + 1].long()
        receiver = torch.searchsorted(ends, torch.tensor(edge, device=self._device), right=True)
        return int(receiver), int(self._listed[edge])


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
