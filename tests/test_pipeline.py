"""Blocks that processes and clusters compute: order, and the words of errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ase.build import molecule
from warm import warm_python

import torchmdnet2
from torchmdnet2.core import pipeline
from torchmdnet2.core.pipeline import Pool, devices_pool, in_order
from torchmdnet2.errors import BadConfig


@pytest.mark.slow
def test_faults_of_a_cluster_are_named():
    distributed = pytest.importorskip("distributed", reason="dask's distributed is not installed")
    with pytest.raises(BadConfig, match="dask: there is no scheduler at 'nothing://here'"):
        torchmdnet2.relax("organic-small", [molecule("H2O")], dask="nothing://here")
    client = SimpleNamespace(wait_for_workers=lambda count: None, run=lambda *_: None)
    with (
        pytest.raises(RuntimeError, match="several workers of the cluster were ended from outside by the same block"),
        pipeline._cluster(None, "cpu", client),
    ):
        raise distributed.KilledWorker("block 7", SimpleNamespace(address="tcp://host:1"), 3)


def test_a_result_does_not_wait_for_later_blocks():
    """So that a block is written once it is computed, and not lost with the process; even if there are many workers."""
    read = []

    def submit(block):
        future = Future()
        if block != 2:
            future.set_result(block)
        late.append(future)
        return future

    late = []
    found = in_order((read.append(k) or k for k in range(9)), Pool(submit, lambda: 4))
    assert next(found) == 0 and next(found) == 1 and read == [0, 1]
    threading.Timer(0.2, lambda: late[2].set_result(2)).start()
    assert list(found) == list(range(2, 9)) and len(read) == 9


def test_what_sets_up_a_device_says_why_it_fails():
    def fails(device):
        raise BadConfig(f"{device} is taken")

    with pytest.raises(BadConfig, match="cpu is taken"), devices_pool(fails, ["cpu"]) as pool:
        pool.submit(1).result()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are copies on Linux only")
def test_the_modules_of_the_host_program_for_its_own_processes_stay():
    code = (
        "import multiprocessing\nfrom multiprocessing import forkserver\n"
        "from torchmdnet2.core.pipeline import _context\n"
        "multiprocessing.set_forkserver_preload(['json'])\n_context('torchmdnet2.streams.run')\n"
        "print(forkserver._forkserver._preload_modules)"
    )
    assert (
        subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, check=True).stdout == "['json']\n"
    )
