"""Run under mpiexec by test_exchange_group.py: rows carried by a group of torch.distributed as by MPI."""

from __future__ import annotations

import datetime

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from torchmdnet2.adapters.mpi_exchange import MpiExchange, _store, gpu_group

comm = MPI.COMM_WORLD
assert gpu_group(comm, torch.device("cpu")) is None
minute = datetime.timedelta(minutes=1)
dist.init_process_group(
    "gloo", store=_store(comm, ["here"] * comm.size), rank=comm.rank, world_size=comm.size, timeout=minute
)
# 8 atoms; process 1 has most of them, and the last process none; everybody has copies, one twice, and of its own atoms
ids = {0: [5, 2], 1: [7, 1, 3, 8, 4, 6]}.get(comm.rank, [])
copies = np.array([8, 2, 5, 8, 1, 7] if comm.rank < 2 else [3, 3])
by_mpi = MpiExchange(comm, np.array(ids, dtype=np.int64), copies)
by_group = MpiExchange(comm, np.array(ids, dtype=np.int64), copies, dist.group.WORLD)
n, ghosts = len(ids), by_mpi.num_ghosts
rows = torch.tensor(ids, dtype=torch.float64).reshape(n, 1, 1) * torch.ones(1, 2, 3)
back = torch.arange(ghosts * 2.0).reshape(ghosts, 2) + comm.rank
assert torch.equal(by_group.forward(rows), by_mpi.forward(rows))
assert torch.equal(by_group.reverse(back), by_mpi.reverse(back))
seen = torch.cat([rows, by_group.forward(rows)])[torch.from_numpy(by_group.row_of[n:])]
assert torch.equal(seen[:, 0, 0], torch.from_numpy(copies).double())
place = torch.arange(n).flip(0)
for exchange in (by_mpi, by_group):
    sorted_one = exchange.reordered(place)
    assert torch.equal(sorted_one.forward(rows.flip(0)), exchange.forward(rows))
    assert torch.equal(sorted_one.reverse(back).flip(0), exchange.reverse(back))
del by_group, exchange, sorted_one  # they hold the group
comm.Barrier()
dist.destroy_process_group()
comm.Barrier()  # the first process serves the store: it must not end while others leave the group
if comm.rank == 0:
    print("all the same")
