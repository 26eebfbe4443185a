"""A group of torch.distributed for processes that MPI started, each with a GPU of its own: NCCL. Needs mpi4py."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

__all__ = ["gpu_group"]

_TIMEOUT = timedelta(minutes=5)


def gpu_group(comm: MPI.Comm, device: torch.device) -> dist.ProcessGroup | None:
    """The group of all processes of a communicator; all of them call this. MPI is used to set it up, and no more.

    Args:
        comm: MPI's.
        device: of this process.

    Returns:
        None where rows cannot go from GPU to GPU: there is one process, a process has no GPU, two share one, this
        PyTorch has no NCCL, or the program has made other groups of torch.distributed.
    """
    if comm.size == 1:
        return None
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    told = comm.allgather((gpu, socket.gethostname(), _can_join(comm)))
    gpus = {name for name, _host, _joins in told}
    if "" in gpus or len(gpus) < comm.size or not all(joins for *_, joins in told):
        return None
    torch.cuda.set_device(device)
    if dist.is_initialized():
        return dist.group.WORLD
    # rows are sent and received: buffers for sums on switches would be memory for nothing
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl", store=_store(comm, [host for _gpu, host, _joins in told]), rank=comm.rank, world_size=comm.size,
        timeout=_TIMEOUT, device_id=device,
    )  # fmt: skip
    atexit.register(_leave, comm)
    return dist.group.WORLD


def _leave(comm: MPI.Comm) -> None:
    """Before the interpreter ends: nobody goes while others still exchange."""
    if dist.is_initialized():
        comm.Barrier()
        dist.destroy_process_group()


def _can_join(comm: MPI.Comm) -> bool:
    """Whether there is a group of the same processes with NCCL, or one can be made."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return False
    if not dist.is_initialized():
        return True
    return (dist.get_backend(), dist.get_world_size(), dist.get_rank()) == ("nccl", comm.size, comm.rank)


def _store(comm: MPI.Comm, hosts: list[str]) -> dist.TCPStore:
    """Where NCCL finds the processes: served by the first one, on a port that is free there."""
    first = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    if comm.rank == 0:
        store = dist.TCPStore(first, 0, comm.size, True, _TIMEOUT, wait_for_workers=False)
        comm.bcast(store.port)
        return store
    return dist.TCPStore(first, comm.bcast(None), comm.size, False, _TIMEOUT, wait_for_workers=False)
