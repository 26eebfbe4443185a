"""Two processes on the CPU train as one does."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import yaml

from torchmdnet2 import load
from torchmdnet2.training.config import parse_config
from torchmdnet2.training.distributed import Devices
from torchmdnet2.training.run import make_setup, make_trainer, run_training


def start(arguments, rank, size, port):
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(arguments, size):
    """Output of each of the processes of a Python command."""
    port = free_port()
    processes = [start(arguments, rank, size, port) for rank in range(size)]
    outputs = [p.communicate(timeout=200)[0] for p in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def run_on(raw, tmp_path, size):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return run_all(["-m", "torchmdnet2", "train", str(path), "--resume", "auto"], size)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_give_the_weights_of_one(raw_config, tmp_path):
    raw_config["training"].update(device="cpu", precision="float64", max_epochs=2)
    folders = [tmp_path / "one", tmp_path / "two"]
    one = copy.deepcopy(raw_config)
    one["output"]["folder"] = str(folders[0])
    run_training(parse_config(one))
    two = copy.deepcopy(raw_config)
    two["output"]["folder"] = str(folders[1])
    outputs = run_on(two, tmp_path, 2)
    assert "2 processes" in outputs[0]
    assert outputs[1] == ""  # one of them speaks
    for a, b in zip(rows(folders[0]), rows(folders[1]), strict=True):
        for key in set(a) - {"seconds", "best"}:
            assert b[key] == pytest.approx(a[key], rel=1e-6), key
    models = [load(folder / "best.tmn") for folder in folders]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6


def test_one_process_takes_up_where_two_stopped(raw_config, tmp_path):
    raw_config["training"].update(device="cpu", precision="float64", max_epochs=3, lr_schedule="constant")
    folders = [tmp_path / "whole", tmp_path / "parts"]
    raw_config["output"]["folder"] = str(folders[0])
    run_training(parse_config(raw_config))
    raw_config["output"]["folder"] = str(folders[1])
    raw_config["training"]["max_epochs"] = 2
    run_on(raw_config, tmp_path, 2)
    raw_config["training"]["max_epochs"] = 3
    run_training(parse_config(raw_config), resume="auto")
    for a, b in zip(rows(folders[0]), rows(folders[1]), strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-6)


_JOIN_AND_PART = """
import pathlib, sys, torch
from torchmdnet2.training.distributed import Devices
sys.setswitchinterval(1000)  # a thread that needs the interpreter gets it when the process ends
with Devices.joined(torch.device("cpu")) as devices:
    import torch.distributed.nn.functional
    assert devices.sum(torch.ones(1000))[0] == 2
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print([name for name in names if "gloo" in name])
"""


_RELEASE = """
import torch
import torch.distributed as dist
from torchmdnet2.training.distributed import Devices
with Devices.joined(torch.device("cpu")) as devices:
    devices.at_end(lambda: print("released in the group:", dist.is_initialized()))
print("group:", dist.is_initialized())
"""


def test_what_holds_sums_is_released_before_the_processes_part():
    """NCCL would wait for ever for captured sums."""
    assert run_all(["-c", _RELEASE], 2) == ["released in the group: True\ngroup: False\n"] * 2


def test_a_packed_loop_releases_its_graphs_at_the_end(raw_config):
    class Graph:
        def reset(self):
            gone.append(self)

    gone: list[Graph] = []
    devices = Devices()
    trainer = make_trainer(make_setup(parse_config(raw_config)), None)
    assert trainer.pack(devices) is None
    graphs = [Graph(), Graph()]
    for replayed, graph in zip((trainer.packed.step, trainer.packed.measure), graphs, strict=True):
        replayed._graphs["some size"] = graph
    devices.release()
    assert gone == graphs
    assert not trainer.packed.step._graphs and not trainer.packed.measure._graphs


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_thread_of_the_group_outlives_it():
    assert run_all(["-c", _JOIN_AND_PART], 2) == ["[]\n", "[]\n"]


def test_shares_are_a_partition_and_even():
    work = np.random.default_rng(0).integers(1, 100, 64)
    chosen = list(range(0, 64, 2))
    parts = [Devices(rank, 4).share(chosen, work) for rank in range(4)]
    assert sorted(k for part in parts for k in part) == chosen
    sizes = [work[part].sum() for part in parts]
    assert max(sizes) < 1.15 * min(sizes)
    assert Devices().share(chosen, work) == chosen
