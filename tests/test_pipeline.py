"""Blocks that processes and clusters compute: order, and the words of errors."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from ase.build import molecule
from warm import warm_python

import torchmdnet2
from torchmdnet2.core import pipeline
from torchmdnet2.core.pipeline import Pool, Stages, devices_pool, in_order, through
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


def _double(block):
    return {"numbers": 2 * block["numbers"], "text": block["text"]}


def _adding(device):
    return partial(_add, int(device))


def _add(number, block):
    return {"numbers": block["numbers"] + number, "text": block["text"], "process": os.getpid()}


def _wider(block):
    """More than fits, of some blocks only."""
    return {**block, "text": block["text"] * (9 if block["numbers"][0] % 4 else 1)}


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memory without a name")
@pytest.mark.parametrize(
    ("slots", "size", "devices", "large"),
    [(6, 2**20, ["7", "7"], False), (6, 3000, ["7"], False), (1, 3000, ["7"], True), (0, 0, ["7"], True)],
)
def test_blocks_go_through_shared_memory(monkeypatch, slots, size, devices, large):
    """All of them, also those larger than a slot and those for which none is free; the order is kept."""
    of, shared = pipeline._SharedMemory.of, []
    monkeypatch.setattr(pipeline, "_SLOT", size)

    def memory(_):
        shared.append(of(slots))
        return shared[0]

    monkeypatch.setattr(pipeline._SharedMemory, "of", memory)
    stages = Stages(_double, _adding, _wider)
    blocks = ({"numbers": np.arange(k, k + 50, dtype=np.int64), "text": b"x" * 2000} for k in range(40))
    taken, pack = [], pipeline._SharedMemory.pack

    def packed(self, block):
        found = pack(self, block)
        taken.append(isinstance(found, pipeline._Parcel) and not found.content)
        return found

    monkeypatch.setattr(pipeline._SharedMemory, "pack", packed)
    found = list(through(blocks, stages, devices, __name__, 2, not large, size=large * 2**30))
    for k, block in enumerate(found):
        expected = _wider(_add(7, _double({"numbers": np.arange(k, k + 50), "text": b"x" * 2000})))
        assert np.array_equal(block["numbers"], expected["numbers"]) and block["text"] == expected["text"]
        block["numbers"] += 1  # nobody else's
    assert len(found) == 40 and (os.getpid() in {block["process"] for block in found}) == (
        devices == ["7"] and not large
    )
    assert any(taken) == (slots > 0 and size > 2000)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memory without a name")
def test_a_block_and_its_place(monkeypatch):
    shared = pipeline._SharedMemory(2, 1000)
    one, two, three = (shared.pack({"numbers": np.full(100, k)}) for k in (1, 2, 3))
    assert {one.slot, two.slot} == {0, 1} and isinstance(three, dict)  # none is left
    assert shared.unpack(one)["numbers"].tolist() == [1] * 100
    large = shared.pack(b"x" * 2000)
    assert large.slot == one.slot and shared.unpack(large) == b"x" * 2000  # it is not in the slot
    again = shared.put(b"y" * 900, two.slot)  # the result takes the place of the block
    assert shared.unpack(again) == b"y" * 900 and sorted(shared._free) == [0, 1]
    gc.collect()  # also what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    with pipeline._SharedMemory.of(4) as held:
        assert len(held._free) == 4
    monkeypatch.setattr(pipeline, "_SLOT", 2**62)  # more than there is
    with pipeline._SharedMemory.of(1) as held:
        assert held.pack("a") == "a"
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
