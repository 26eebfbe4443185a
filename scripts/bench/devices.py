"""Throughput of training on several GPUs of one host, at a fixed number of frames per GPU.

    python -m scripts.bench devices FILE [--devices 1,2,4] [--batch 64,512] [--minutes 5] [--output FILE]

FILE holds labelled frames (extxyz, keys energy and forces). For each number of GPUs torchrun starts as many processes,
which do whole training steps of TensorNet (forces, second derivatives, sums over the GPUs, update) on random batches of
BATCH frames per GPU: the median of five groups of steps, after one that is not counted. The goal is 3.4 times the
frames per second of one GPU on four.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import device_of, make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state
from torchmdnet2.training.steps.distributed import Devices
from torchmdnet2.training.steps.loop import pack_trainer

from .harness import Row, again, save_rows, shared, table

GROUPS = 5
GOAL = 0.85  # of perfect: 3.4 times on four GPUs


def measure(options: argparse.Namespace) -> None:
    """One process of torchrun; the first prints a row."""
    with Devices.joined(device_of(options.device)) as devices:
        config = parse_config(
            {
                "data": {"train": str(options.file), "split": {"validation": 10, "test": 0, "seed": 1}},
                "model": {
                    "name": "tensornet", "hidden_channels": options.channels, "num_layers": 2, "num_rbf": 32,
                    "cutoff": 5.0,
                },
                "training": {
                    "seed": 1, "batch_size": options.each * devices.size, "max_epochs": 1000, "device": options.device,
                    "loss": {"energy": 20, "forces": 1},
                },
            }
        )  # fmt: skip
        with own_torch_state(config):
            trainer = make_trainer(make_setup(config), None)
        if reason := pack_trainer(trainer, devices):
            raise RuntimeError(f"cannot be packed: {reason}")
        packed = trainer.packed
        assert packed is not None
        random = torch.Generator().manual_seed(0)
        frames = options.each * devices.size

        def steps() -> float:
            """Seconds per step of a group; all processes draw the same batches."""
            order = torch.randint(len(trainer.train), (options.steps, frames), generator=random).tolist()
            packed.check()
            began = time.perf_counter()
            for _ in packed.steps(order):
                trainer.step_count += 1
            packed.check()  # waits for the device
            return (time.perf_counter() - began) / options.steps

        steps()  # captures
        times = sorted(steps() for _ in range(GROUPS))
        cuda = trainer.device.type == "cuda"
        row = {
            "devices": devices.size, "batch": options.each, "ms": 1e3 * statistics.median(times), "low": 1e3 * times[0],
            "high": 1e3 * times[-1], "frames_per_s": frames / statistics.median(times),
            "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        }  # fmt: skip
        if devices.main:
            options.worker.write_text(json.dumps(row))


def run(devices: int, batch: int, seconds: float, options: argparse.Namespace) -> Row:
    """Measure with one number of GPUs; returns a row."""
    found = Path(f"{options.output or 'bench_devices'}.row")
    found.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), "--module"),
        *again("devices", options.file)[2:],
        *("--worker", str(found), "--each", str(batch), "--steps", str(options.steps)),
        *("--device", options.device, "--channels", str(options.channels)),
    ]
    known = {"devices": devices, "batch": batch}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        process.wait()
        return {**known, "error": "stopped: it took too long"}
    if code or not found.exists():
        return {**known, "error": f"ended with exit code {code}"}
    row = json.loads(found.read_text())
    found.unlink()
    return row


def throughput(rows: list[Row]) -> str:
    """Print the throughput by number of GPUs."""
    one = {row["batch"]: row["frames_per_s"] for row in rows if row["devices"] == 1 and "ms" in row}
    lines = []
    for row in rows:
        start = [row["batch"], row["devices"]]
        if "ms" not in row:
            lines.append([*start, row["error"]])
            continue
        ratio = f"{row['frames_per_s'] / one[row['batch']]:.2f}" if row["batch"] in one else ""
        times = f"{row['ms']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        goal = f"{GOAL * row['devices']:.2f}" if row["devices"] > 1 else ""
        lines.append([*start, times, f"{row['frames_per_s']:,.0f}", ratio, goal, f"{row['peak_GB']:.1f}"])
    return table(["frames per GPU", "GPUs", "ms per step", "frames/s", "of one GPU", "goal", "GB"], lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("--devices", default="1,2,4", help="numbers of GPUs")
    parser.add_argument("--batch", default="512,64", help="frames per GPU")
    parser.add_argument("--steps", type=int, default=40, help="of a group")
    shared(parser, device="cuda", channels=128, minutes=5.0, output=None)
    parser.add_argument("--each", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    if options.worker:
        measure(options)
        return
    end, rows = time.time() + 60 * options.minutes, []
    there = torch.cuda.device_count() if options.device == "cuda" else 64
    for batch in map(int, options.batch.split(",")):
        for devices in (n for n in map(int, options.devices.split(",")) if n <= there):
            rows.append(run(devices, batch, end - time.time(), options))
            print(rows[-1], flush=True)
            save_rows(options.output, rows)
    print(throughput(rows))
