"""Exchange of rows of atoms between processes that MPI started: by MPI, or by NCCL between GPUs. Needs mpi4py."""

from __future__ import annotations

import atexit
import copy
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MpiExchange", "gpu_group"]


_TIMEOUT = timedelta(minutes=5)


def gpu_group(comm: MPI.Comm, device: torch.device) -> dist.ProcessGroup | None:
    """Return the NCCL group of all processes of a communicator, set up by MPI. All processes call it.

    Args:
        comm: communicator of MPI.
        device: device of this process.

    Returns:
        The group; None if rows cannot go from GPU to GPU: there is a single process, a process has no GPU, two share
        one, this PyTorch has no NCCL, or the program has made other groups of torch.distributed.
    """
    if comm.size == 1:
        return None
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    answers = comm.allgather((gpu, socket.gethostname(), _can_join(comm)))
    gpus = {name for name, _host, _joins in answers}
    if "" in gpus or len(gpus) < comm.size or not all(joins for *_, joins in answers):
        return None
    torch.cuda.set_device(device)
    if dist.is_initialized():
        return dist.group.WORLD
    # rows are only sent and received, so that buffers for sums on switches would waste memory
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl", store=_store(comm, [host for _gpu, host, _joins in answers]), rank=comm.rank, world_size=comm.size,
        timeout=_TIMEOUT, device_id=device,
    )  # fmt: skip
    atexit.register(_leave, comm)
    return dist.group.WORLD


def _leave(comm: MPI.Comm) -> None:
    """Wait, before the interpreter ends, until no process exchanges data."""
    if dist.is_initialized():
        comm.Barrier()
        dist.destroy_process_group()


def _can_join(comm: MPI.Comm) -> bool:
    """Return True if a group of the same processes with NCCL exists or can be made."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return False
    if not dist.is_initialized():
        return True
    return (dist.get_backend(), dist.get_world_size(), dist.get_rank()) == ("nccl", comm.size, comm.rank)


def _store(comm: MPI.Comm, hosts: list[str]) -> dist.TCPStore:
    """Return the store of NCCL, served by the first process on a free port."""
    first = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    if comm.rank == 0:
        store = dist.TCPStore(first, 0, comm.size, True, _TIMEOUT, wait_for_workers=False)
        comm.bcast(store.port)
        return store
    return dist.TCPStore(first, comm.bcast(None), comm.size, False, _TIMEOUT, wait_for_workers=False)


# --- The exchange of rows between processes with a domain each ---

Array = NDArray[Any]


class MpiExchange:
    """Implements `core.exchange.Exchange`. Ghosts are atoms of other processes with copies on this one, each once.

    The owner of each atom is found in a directory that is distributed over all processes by identifier. So all
    processes must make an exchange at the same time.

    Args:
        comm: communicator of the processes; used for nothing else while rows are exchanged.
        group: group of torch.distributed with the same processes, which carries rows from GPU to GPU; with None rows
            go through host memory and MPI.
        local_ids: [n] identifiers of the local atoms, each unique among all processes.
        copy_ids: [copies] identifiers of the atoms with copies on this process, periodic images of local atoms
            included.

    Attributes:
        row_of: [n + copies] the row of each local atom, and then of each copy, among the rows of local atoms and
            ghosts. Copies of the same atom share a row; images of a local atom have the row of the atom.

    Raises:
        ValueError: no process owns the atom of a copy.
    """

    def __init__(
        self, comm: MPI.Comm, local_ids: Array, copy_ids: Array, group: dist.ProcessGroup | None = None
    ):  # fmt: skip
        self._comm, self._group = comm, group
        n = self.num_local = len(local_ids)
        place = _Places(local_ids).of(copy_ids)
        here = place >= 0
        wanted, copy = np.unique(copy_ids[~here], return_inverse=True)
        self.num_ghosts = len(wanted)
        rank, index = self._owners(np.asarray(local_ids), wanted)
        by_rank = np.argsort(rank, kind="stable")
        ghost = np.empty(len(wanted), np.int64)
        ghost[by_rank] = np.arange(len(wanted))
        self.row_of = np.arange(n + len(copy_ids))
        self.row_of[n:][here] = place[here]
        self.row_of[n:][~here] = n + ghost[copy]
        sizes = np.bincount(rank, minlength=comm.size)
        asked = _alltoall(comm, np.split(index[by_rank], np.cumsum(sizes)[:-1]))
        self._send = torch.from_numpy(np.concatenate(asked))
        self._sizes = [int(size) for size in sizes], [len(a) for a in asked]
        self._from, self._to = map(_parts, self._sizes)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.detach().reshape(self.num_local, rows.shape[1:].numel())
        given = flat.index_select(0, self._send_on(rows.device))
        return self._carry(given, False).reshape(self.num_ghosts, *rows.shape[1:])

    def reverse(self, rows: Tensor) -> Tensor:
        width = rows.shape[1:].numel()
        received = self._carry(rows.detach().reshape(self.num_ghosts, width), True)
        sums, place = received.new_zeros(self.num_local, width), self._send_on(rows.device)
        for _rank, first, end in self._to:  # a fixed order makes sums reproducible; each process requests an atom once
            sums.index_add_(0, place[first:end], received[first:end])
        return sums.reshape(self.num_local, *rows.shape[1:])

    def reordered(self, place: Tensor) -> MpiExchange:
        other = copy.copy(self)
        other._send = place[self._send.to(place.device)]
        return other

    def _send_on(self, device: torch.device) -> Tensor:
        """Return the local atoms whose rows are sent, on the device of the rows."""
        if self._send.device != device:
            self._send = self._send.to(device)
        return self._send

    def _carry(self, rows: Tensor, back: bool) -> Tensor:
        """Return the received rows for rows sent; `back`: from ghosts to the atoms that they copy."""
        sizes = self._sizes[1 - back], self._sizes[back]
        if self._group is not None:
            received = rows.new_empty(sum(sizes[1]), rows.shape[1])
            dist.all_to_all_single(received, rows.contiguous(), sizes[1], sizes[0], group=self._group)
            return received
        if self._comm.size == 1:
            return rows  # no rows to exchange
        parts = (self._from, self._to) if back else (self._to, self._from)
        return self._transfer(rows.cpu(), *parts, sum(sizes[1])).to(rows.device)

    def _transfer(self, rows: Tensor, to: _Parts, of: _Parts, count: int) -> Tensor:
        """Send rows to the processes `to` and receive rows from `of`; only neighbors exchange data."""
        received = rows.new_empty(count, rows.shape[1])
        # as bytes: MPI has no type for float16
        given, taken = (part.numpy().view(np.uint8) for part in (rows.contiguous(), received))
        waiting = [self._comm.Irecv(taken[first:end], source=rank) for rank, first, end in of]
        waiting += [self._comm.Isend(given[first:end], dest=rank) for rank, first, end in to]
        MPI.Request.Waitall(waiting)
        return received

    def _owners(self, local_ids: Array, wanted: Array) -> tuple[Array, Array]:
        """Return the process of each identifier, and its place among the local atoms there."""
        comm = self._comm
        if comm.size == 1:
            known, whom, places = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
            queries = [wanted.astype(np.int64)]
        else:
            home = local_ids % comm.size
            given = _alltoall(comm, [np.flatnonzero(home == r) for r in range(comm.size)])
            names = _alltoall(comm, [local_ids[home == r] for r in range(comm.size)])
            known, places = np.concatenate(names), np.concatenate(given)
            whom = np.repeat(np.arange(comm.size), [len(n) for n in names])
            queries = _alltoall(comm, [wanted[wanted % comm.size == r] for r in range(comm.size)])
        here = _Places(known)
        found = [here.of(q) for q in queries]
        lost = [q[place < 0] for q, place in zip(queries, found, strict=True)]
        if any(map(len, lost)):
            raise ValueError(f"the atom {np.concatenate(lost)[0]} has ghosts, but no process has the atom itself")
        ranks = _alltoall(comm, [whom[place] for place in found])
        indices = _alltoall(comm, [places[place] for place in found])
        rank, index = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
        for r in range(comm.size):
            asked = wanted % comm.size == r
            rank[asked], index[asked] = ranks[r], indices[r]
        return rank, index


_SPARSE = 64
"""Largest number of table entries per identifier."""

_Parts = list[tuple[int, int, int]]
"""For each process with rows: its rank, its first row, and its last row + 1."""


def _parts(sizes: Sequence[int] | Array) -> _Parts:
    ends = np.cumsum(sizes)
    return [(rank, int(end - size), int(end)) for rank, (size, end) in enumerate(zip(sizes, ends, strict=True)) if size]


def _alltoall(comm: MPI.Comm, given: Sequence[Array]) -> list[Array]:
    """Send integers to each process and return those received from each."""
    counts = np.array([len(part) for part in given], dtype=np.int64)
    other = np.empty_like(counts)
    comm.Alltoall(counts, other)
    sent = np.concatenate(given).astype(np.int64)
    received = np.empty(int(other.sum()), np.int64)
    comm.Alltoallv([sent, counts], [received, other])
    return np.split(received, np.cumsum(other)[:-1])


class _Places:
    """Finds identifiers in an array, by a table of all numbers between them unless it would be long."""

    def __init__(self, ids: Array):
        ids = np.asarray(ids, dtype=np.int64)
        self._first = int(ids.min(initial=0))
        span = int(ids.max(initial=0)) - self._first + 1
        self._table, self._order = None, None
        if span <= _SPARSE * (len(ids) + 16):
            self._table = np.full(span, -1, np.int64)
            self._table[ids - self._first] = np.arange(len(ids))
        else:
            self._order = np.argsort(ids, kind="stable")
            self._ascending = ids[self._order]

    def of(self, wanted: Array) -> Array:
        """Return the places of identifiers in the array; −1 for those that are missing."""
        wanted = np.asarray(wanted, dtype=np.int64)
        if self._table is not None:
            at = wanted - self._first
            inside = (at >= 0) & (at < len(self._table))
            return np.where(inside, self._table[np.where(inside, at, 0)], -1)
        assert self._order is not None
        found = np.searchsorted(self._ascending, wanted).clip(max=len(self._order) - 1)
        return np.where(self._ascending[found] == wanted, self._order[found], -1)
