"""Measure the data layer with very many frames on a CPU: making the cache, opening it, statistics, batches.

    python -m scripts.bench data FOLDER [--frames 1000000] [--xyz 100000]

Writes FOLDER/many.h5 (SPICE's layout: 50 conformations of each molecule of 10 to 20 atoms, charges of ions in the
SMILES) and FOLDER/many.xyz, with their caches beside them, and prints a table: step, time, processor time of a process
(not of its workers), memory, result. Every step runs in a separate process; memory is the largest amount beyond that
after the imports, without pages of files. Linux only. A million frames need 2 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import torch

from torchmdnet2.cli import main as command
from torchmdnet2.data import make_splits, open_dataset, splits_entry, statistics
from torchmdnet2.training.config.config import TrainingConfig
from torchmdnet2.training.steps.batches import Frames, Loader, training_batches

from .harness import again

CUTOFF, BATCH, CONFORMATIONS, XYZ_ATOMS = 5.0, 64, 50, 15
ELEMENTS, SYMBOLS = np.array([1, 6, 7, 8, 16]), np.array(["H", "C", "N", "O", "S"])
KEYS = {"energy": "energy", "forces": "forces"}  # as the training asks, so that it uses the same cache
UNITS = {"conformations": "bohr", "dft_total_energy": "hartree", "dft_total_gradient": "hartree/bohr"}
CONFIG = """
data: {{train: {folder}/many.h5, cache: {folder}/caches, split: {{validation: 0.01, test: 0.01}}}}
model: {{name: tensornet, hidden_channels: 8, num_layers: 1, num_rbf: 8, cutoff: {cutoff}}}
training: {{batch_size: {batch}, num_threads: 1}}
output: {{folder: {folder}/run}}
"""


def molecule(rng: np.random.Generator, frames: int, atoms: int) -> tuple[np.ndarray, np.ndarray]:
    """Random atoms on a distorted grid of 1.4 Å: atomic numbers [N] and positions [S, N, 3] in Å."""
    grid = np.stack(np.meshgrid(*3 * [np.arange(3.0)], indexing="ij"), -1).reshape(-1, 3)[:atoms]
    pos = 1.4 * grid + 0.1 * rng.normal(size=(frames, atoms, 3))
    return rng.choice(ELEMENTS, atoms, p=(0.5, 0.3, 0.09, 0.09, 0.02)), pos


def make_hdf5(path: Path, frames: int) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for k, first in enumerate(range(0, frames, CONFORMATIONS)):
            count, charge = min(CONFORMATIONS, frames - first), int(rng.integers(-1, 2))
            z, pos = molecule(rng, count, int(rng.integers(10, 21)))
            group = file.create_group(f"molecule-{k:06d}")
            group["atomic_numbers"] = z.astype(np.int16)
            group["smiles"] = ["C" + {-1: "[O-]", 0: "", 1: "[NH3+]"}[charge]]
            group["subset"] = ["synthetic"]
            group["conformations"] = (pos / 0.529177).astype(np.float32)
            group["dft_total_energy"] = -38.0 * len(z) + 0.01 * rng.normal(size=count)
            group["dft_total_gradient"] = (0.02 * rng.normal(size=pos.shape)).astype(np.float32)
            for name, unit in UNITS.items():
                group[name].attrs["units"] = unit


def make_xyz(path: Path, frames: int) -> None:
    rng = np.random.default_rng(1)
    with open(path, "w", encoding="ascii") as file:
        for _ in range(frames):
            z, pos = molecule(rng, 1, XYZ_ATOMS)
            symbols = SYMBOLS[np.searchsorted(ELEMENTS, z)]
            file.write(f"{len(z)}\nProperties=species:S:1:pos:R:3:forces:R:3 energy={-5e3 + rng.normal():.8f}\n")
            for symbol, row in zip(symbols, np.hstack([pos[0], rng.normal(size=pos[0].shape)]).tolist(), strict=True):
                file.write(symbol + "".join(f" {value:.8f}" for value in row) + "\n")


def measure(step: str, folder: Path) -> str:
    """Do one step; returns its result in words."""
    if step in ("make HDF5's cache", "make extxyz's cache", "open it"):
        file = folder / ("many.xyz" if "extxyz" in step else "many.h5")
        return f"{len(open_dataset(file, KEYS, {}, cache=folder / 'caches')):,} frames"
    if step == "train --check":
        (folder / "run.yaml").write_text(CONFIG.format(folder=folder, cutoff=CUTOFF, batch=BATCH))
        if command(["train", str(folder / "run.yaml"), "--check"]):
            raise SystemExit(1)
        return ""
    data = open_dataset(folder / "many.h5", KEYS, {}, cache=folder / "caches")
    everything = np.arange(len(data))
    if step == "neighbor lists":
        return f"{Frames(data, everything, CUTOFF).edges.sum() / data.sizes().sum():.1f} per atom"
    if "statistics" in step:
        return f"{len(statistics(data, cutoff=CUTOFF).elements)} elements"
    if step == "splits":
        splits = make_splits(len(data), None, 0.1, 0.1)
        return f"{len(splits_entry(data, splits['train'], [])['indices']):,} for training"
    order = training_batches(Frames(data, everything, CUTOFF), TrainingConfig(batch_size=BATCH), 0)
    if step == "order of an epoch":
        return f"{len(order):,} batches"
    loader = Loader(Frames(data, everything, CUTOFF), int(step.split()[-2]))
    chosen = order[:: max(1, len(order) // 2000)]
    start = time.perf_counter()
    frames = sum(batch.sample.system.num_systems for batch in loader(chosen))
    return f"{frames / (time.perf_counter() - start):,.0f} frames/s, {len(chosen)} batches of {BATCH}"


STEPS = ("make HDF5's cache", "make extxyz's cache", "open it", "neighbor lists", "statistics", "statistics again",
         "splits", "order of an epoch", "batches, 0 workers", "batches, 2 workers", "train --check")  # fmt: skip


def resident() -> float:
    """Memory of this process in MB, without pages of files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) / 1e3


def run_step(step: str, folder: Path) -> None:
    most, done = [resident()], threading.Event()
    before = most[0]

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], resident())

    torch.set_num_threads(1)
    threading.Thread(target=watch, daemon=True).start()
    start, cpu = time.perf_counter(), time.process_time()
    what = measure(step, folder)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    print(f"| {step} | {seconds:.1f} s | {cpu:.1f} s | {max(most[0], resident()) - before:.0f} MB | {what} |")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--xyz", type=int, default=100_000)
    parser.add_argument("--only", help="one step, in this process")


def main(args: argparse.Namespace) -> None:
    if args.only:
        return run_step(args.only, args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, make, frames in (("many.h5", make_hdf5, args.frames), ("many.xyz", make_xyz, args.xyz)):
        if not (args.folder / name).exists():
            make(args.folder / name, frames)
    for step in STEPS:
        subprocess.run(again("data", args.folder, "--only", step), check=True)
