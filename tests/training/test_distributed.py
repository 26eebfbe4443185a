"""Two processes on the CPU train as one does, also on two hosts; what happens to one of them all know."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import yaml
from warm import warm_python

from torchmdnet2 import load
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer
from torchmdnet2.training.steps.distributed import Devices
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.trainer import load_state


def start(arguments, size, folders=None):
    """The processes of a Python command, each in its folder."""
    port, processes = free_port(), []
    for rank in range(size):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        folder = folders[rank] if folders else None
        command = [sys.executable if _JOIN_AND_PART in arguments else warm_python(), *arguments]
        processes.append(
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return processes


def finish(processes):
    """Their outputs and exit codes."""
    return [p.communicate(timeout=200)[0] for p in processes], [p.returncode for p in processes]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(arguments, size, folders=None):
    """Output of each of the processes of a Python command."""
    outputs, codes = finish(start(arguments, size, folders))
    assert not any(codes), outputs
    return outputs


def run_on(raw, tmp_path, size):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return run_all(["-m", "torchmdnet2", "train", str(path), "--resume", "auto"], size)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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


def on_hosts(folders, arguments):
    """Output, errors and exit code of two torchrun agents with a process each, as on hosts that share no folder."""
    for _ in range(3):  # another program may take the port before they do
        port = free_port()
        agent = [warm_python(), "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        agent += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        processes = [
            subprocess.Popen(
                [*agent, "--node-rank", str(rank), "--no-python", warm_python().with_name("torchmdnet2"), *arguments],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, folder in enumerate(folders)
        ]
        first = processes[0].communicate(timeout=200)
        if "EADDRINUSE" in first[1]:
            processes[1].kill()
            processes[1].communicate()
            continue
        texts = [first, processes[1].communicate(timeout=200)]
        return [(*text, process.returncode) for text, process in zip(texts, processes, strict=True)]
    raise AssertionError("no free port")


@pytest.fixture
def hosts(raw_config, data_file, tmp_path):
    """Two folders, each with data and a configuration in it."""
    raw_config["training"].update(precision="float64", max_epochs=2, lr_schedule="constant")
    raw_config["data"]["train"], raw_config["output"]["folder"] = "data.xyz", "run"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "data.xyz").write_bytes(data_file.read_bytes())
        (folder / "config.yaml").write_text(yaml.safe_dump(raw_config))
    return folders


def require_run_of_one_process(hosts, raw_config, monkeypatch):
    """The same metrics and weights up to rounding."""
    monkeypatch.chdir(hosts[1])
    run_training(parse_config(raw_config))
    folders = [host / "run" for host in hosts]
    for a, b in zip(*map(rows, folders), strict=True):
        for key in set(a) - {"seconds", "best"}:
            assert b[key] == pytest.approx(a[key], rel=1e-6), key
    models = [load(folder / "best.tmn") for folder in folders]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6


def test_two_hosts_without_a_common_folder(hosts, raw_config, monkeypatch):
    """Only the first one writes; the weights are those of one process."""
    (said, error, code), (other, _, _) = on_hosts(hosts, ["train", "config.yaml"])
    assert code == 0, error
    assert "2 processes" in said and other == ""
    assert sorted(path.name for path in hosts[1].iterdir()) == ["config.yaml", "data.xyz"]
    require_run_of_one_process(hosts, raw_config, monkeypatch)


@pytest.mark.long
def test_hosts_resume_what_only_one_of_them_has(hosts, raw_config, monkeypatch):
    for epochs in (1, 2):
        setting = ["--set", f"training.max_epochs={epochs}"]
        said, _ = run_all(["-m", "torchmdnet2", "train", "config.yaml", "--resume", "auto", *setting], 2, hosts)
    assert "resumed at epoch 2" in said
    require_run_of_one_process(hosts, raw_config, monkeypatch)


@pytest.mark.slow
def test_a_host_with_other_data_is_refused(hosts):
    path = hosts[1] / "data.xyz"
    path.write_bytes(path.read_bytes().replace(b"energy=-", b"energy=-1", 1))
    (first, second), codes = finish(start(["-m", "torchmdnet2", "train", "config.yaml"], 2, hosts))
    assert all(codes)
    assert "here, data.xyz was changed" in second
    assert re.search(r"process 1 on \S+: .*data.xyz was changed", first)


@pytest.mark.slow
def test_members_of_two_processes(raw_config, tmp_path):
    raw_config["training"].update(device="cpu", max_epochs=1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_config))
    outputs = run_all(["-m", "torchmdnet2", "train", str(tmp_path / "config.yaml"), "--members", "2"], 2)
    assert "mean of 2 members" in outputs[0] and outputs[1] == ""
    assert len(json.loads((tmp_path / "run" / "ensemble_metrics.json").read_text())["members"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_a_signal_to_one_process_stops_all(raw_config, tmp_path):
    raw_config["training"].update(device="cpu", max_epochs=100_000)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_config))
    processes = start(["-m", "torchmdnet2", "train", str(tmp_path / "config.yaml")], 2)
    for line in processes[0].stdout:
        if line.startswith("epoch"):
            break
    processes[1].send_signal(signal.SIGTERM)
    outputs, codes = finish(processes)
    assert codes == [143, 143], outputs
    assert "stopped by SIGTERM" in outputs[0] and "its state is saved" in outputs[0]
    state = load_state(tmp_path / "run" / "state.safetensors")[1]
    assert f"after step {state['step']}" in outputs[0] and f"after step {state['step']}" in outputs[1]


_TOGETHER = """
import os, pathlib, signal, tempfile, torch
from torchmdnet2.training.steps.distributed import Devices, ProcessFailed
from torchmdnet2.training.run.folder import require_alike

def tell(work):
    try:
        work()
    except Exception as error:
        print(type(error).__name__, error, flush=True)

def fail_in_one():
    with devices.together():
        if devices.rank == 1:
            raise OSError("no such file")

cpu = torch.device("cpu")
with Devices.joined(cpu) as devices, Devices.joined(cpu), tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "state"
    if devices.main:
        path.write_text("of the first")
    with devices.copy_of(path) as copy:
        print(copy.read_text())
    asked = devices.any(lambda: 15 if devices.rank == 1 else None, every=2)
    print(asked(), asked(), devices.agree(devices.main))
    tell(fail_in_one)
    config = {"training": {"lr": devices.rank}, "output": {"folder": folder}}
    tell(lambda: require_alike(devices, {"config": config, "data": {"a.xyz": "1"}}))
    if devices.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(lambda: devices.sum(torch.ones(3)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_what_happens_to_one_process_all_know():
    (first, second), codes = finish(start(["-c", _TOGETHER], 2))
    first, second = first.splitlines(), second.splitlines()
    assert first[:2] == second[:2] == ["of the first", "None 15 True"]
    assert second[2] == "OSError no such file"
    assert re.fullmatch(r"ProcessFailed process 1 on \S+: no such file", first[2])
    assert second[3] == (
        "BadConfig all processes need the same configuration, data and versions; here, training.lr is 1, not 0"
    )
    assert first[3].startswith("ProcessFailed process 1 on ") and first[3].endswith("training.lr is 1, not 0")
    assert first[4].startswith("ProcessFailed another process has stopped")
    assert codes == [0, -signal.SIGKILL] and len(second) == 4


_JOIN_AND_PART = """
import pathlib, sys, torch
from torchmdnet2.training.steps.distributed import Devices
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
from torchmdnet2.training.steps.distributed import Devices
with Devices.joined(torch.device("cpu")) as devices:
    devices.at_end(lambda: print("released in the group:", dist.is_initialized()))
print("group:", dist.is_initialized())
"""


_LATE = """
import os, time, torch
import torch.distributed as dist
from torchmdnet2.training.steps.distributed import Devices

class Late(dist.Store):  # a process that is late to learn where the others are
    def __init__(self, store):
        super().__init__()
        self.store = store

    def get(self, key):
        time.sleep(0.3)
        return self.store.get(key)

    def set(self, key, value):
        return self.store.set(key, value)

    def add(self, key, value):
        return self.store.add(key, value)

    def wait(self, *args):
        return self.store.wait(*args)

    def check(self, keys):
        return self.store.check(keys)

    def set_timeout(self, timeout):
        pass

def start(backend):
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    begin(backend, store=Late(store) if rank else store, rank=rank, world_size=2)

begin, dist.init_process_group = dist.init_process_group, start
with Devices.joined(torch.device("cpu")):
    pass
"""


def test_no_process_leaves_before_all_have_found_each_other():
    """The one with the list of addresses did, on a busy machine: "Gloo connectFullMesh failed"."""
    assert run_all(["-c", _LATE], 2) == ["", ""]


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
    assert pack_trainer(trainer, devices) is None
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
    groups = np.arange(64) // 8  # four chosen frames each
    parts = [Devices(rank, 4).share(chosen, work, groups) for rank in range(4)]
    assert sorted(k for part in parts for k in part) == chosen
    assert all(len(part) == 8 and len(set(groups[part])) == 2 for part in parts)
