"""Time a training step (forces, second derivatives, update), and check the losses.

    python -m scripts.bench training acac.xyz 3bpa.xyz [--batches 8,64,512] [--minutes 5] [--output FILE]

Each file holds labelled frames (extxyz, keys energy and forces). "replay" is a step from packed frames in one CUDA
graph, "tf32" the same with matrix products in TF32, "eager" the plain loop, "torchmd-net" its eager step with the
same weights where it is installed: energies, forces, their loss, second derivatives, AdamW. Memory is the most that was
allocated. "losses" compares 100 steps, replayed and eager, and two eager runs, which differ where sums are
atomic. Each mode runs in a separate process.

The model is TensorNet. A mode of another model is a part named like "replay@tensornet2":

    python -m scripts.bench training acac.xyz --parts replay@tensornet2,torchmd-net@tensornet2,losses@tensornet2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.trainer import Trainer

from .harness import Row, attempt, over, run_parts, shared

_TWO_LAYERS = {"num_layers": 2, "num_rbf": 32, "cutoff": 5.0}
_SIX_LAYERS = {"num_layers": 6, "num_rbf": 64, "cutoff": 5.0}
# in the form that TorchMD-Net has too: for the same weights
MODELS: dict[str, dict[str, Any]] = {
    "tensornet": _TWO_LAYERS,
    "tensornet2": {**_TWO_LAYERS, "q_dim": 16, "exact_charge": False},
    "equivariant_transformer": _SIX_LAYERS,
    "transformer": _SIX_LAYERS,
    "graph_network": _SIX_LAYERS,
}
HEADS = {"equivariant_transformer": {"name": "equivariant_scalar"}}
PARTS = ("replay", "torchmd-net", "losses", "tf32", "eager")
REPEATS = {"replay": 40, "tf32": 40}
# times faster than the peer's eager step on one NVIDIA H200, by batch
GOALS = {"tensornet": {8: 8.0, 64: 5.0, 512: 3.0}, "tensornet2": {8: 8.0, 64: 5.0, 512: 2.5}}


def mode_and_model(part: str) -> tuple[str, str]:
    """ "replay@tensornet2" is ("replay", "tensornet2")."""
    mode, _, model = part.partition("@")
    return mode, model or "tensornet"


def trainer_for(path: str, batch: int, precision: str, options: argparse.Namespace) -> Trainer:
    model = mode_and_model(options.part)[1]
    config = parse_config(
        {
            "data": {"train": path, "split": {"validation": 50, "test": 0, "seed": 1}},
            "model": {**MODELS[model], "name": model, "hidden_channels": options.channels},
            "head": HEADS.get(model, {"name": "scalar"}),
            "training": {
                "seed": 1, "batch_size": batch, "max_epochs": 1000, "precision": precision, "device": options.device,
                "lr": options.lr, "optimizer": {"name": options.optimizer}, "loss": {"energy": 20, "forces": 1},
            },
        }
    )  # fmt: skip
    with own_torch_state(config):
        return make_trainer(make_setup(config), None)


def milliseconds(step: Callable[[], Any], repeats: int, cuda: bool) -> dict[str, float]:
    """Median and extremes over single steps, each waited for, after five that are not counted."""
    times = []
    for k in range(5 + repeats):
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        if k >= 5:
            times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times), "low": min(times), "high": max(times)}


def measured(make: Callable[[], Callable[[], Any]], repeats: int, cuda: bool) -> Row:
    if not cuda:
        return milliseconds(make(), repeats, cuda)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    return {**milliseconds(step, repeats, cuda), "peak_GB": torch.cuda.max_memory_allocated() / 1e9}


def first_batch(trainer: Trainer, batch: int) -> list[int]:
    """Frame numbers of a batch; some are repeated if there are too few frames."""
    return [k % len(trainer.train) for k in range(batch)]


def replayed(trainer: Trainer, batch: int) -> Callable[[], Any]:
    reason = pack_trainer(trainer)
    if reason is not None or trainer.packed is None:
        raise RuntimeError(f"cannot be packed: {reason}")
    packed, chosen = trainer.packed, first_batch(trainer, batch)
    packed.training.set_rates([1e-4] * len(trainer.optimizer.param_groups), 0.01)
    return lambda: packed.step(chosen)


def plain(trainer: Trainer, batch: int) -> Callable[[], Any]:
    frames = next(iter(trainer.train_loader([first_batch(trainer, batch)]))).to(trainer.device)
    return lambda: trainer.step(frames)


def peer(trainer: Trainer, batch: int) -> Callable[[], Any]:
    from .peer import peer_model

    frames = next(iter(trainer.train_loader([first_batch(trainer, batch)]))).to(trainer.device)
    system, labels = frames.sample.system, frames.sample.labels
    neighbors = int(torch.diff(frames.neighbors.row_ptr).max()) + 2
    model = peer_model(trainer.potential, neighbors, derivative=True, static=False).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    energy, forces = labels["energy"].float()[:, None], labels["forces"].float()
    energy = energy - energy.mean()
    z, pos, of = system.z, system.pos.float(), system.batch
    del trainer.potential, trainer.average, trainer.optimizer, trainer.parameters

    def step() -> None:
        optimizer.zero_grad()
        found, pull = model(z, pos, of)
        loss = torch.nn.functional.mse_loss(found, energy) + 10 * torch.nn.functional.mse_loss(pull, forces)
        loss.backward()
        optimizer.step()

    return step


def losses(path: str, replay: bool, options: argparse.Namespace) -> list[float]:
    """Compare the losses of 100 or other steps with 8 frames each."""
    trainer = trainer_for(path, 8, "float32", options)
    if replay and (reason := pack_trainer(trainer)):
        raise RuntimeError(f"cannot be packed: {reason}")
    epochs = -(-8 * options.steps // len(trainer.train))
    order = torch.randperm(len(trainer.train), generator=torch.Generator().manual_seed(0)).repeat(epochs)
    found = []
    for chosen in order[: 8 * options.steps].view(-1, 8).tolist():
        (loss,) = trainer.steps([chosen])
        found.append(float(trainer.packed.training.status[0]) if trainer.packed else loss)
        trainer.step_count += 1
    return found


def compared(path: str, options: argparse.Namespace) -> Row:
    """Largest relative difference of the losses within 1, 10 and all steps."""
    eager, replay, again = (losses(path, mode, options) for mode in (False, True, False))

    def worst(other: list[float]) -> list[float]:
        far = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(eager, other, strict=True)]
        return [max(far[:n]) for n in (1, 10, len(far))]

    return {"replayed": worst(replay), "eager again": worst(again), "losses": {"eager": eager, "replayed": replay}}


def run_part(options: argparse.Namespace) -> None:
    """Rows of one mode, over files and batches."""
    cuda = options.device.startswith("cuda")
    mode, model = mode_and_model(options.part)
    if mode == "losses":
        known = {"file": Path(options.files[0]).stem, "model": model, "mode": mode}
        attempt(known, lambda: compared(options.files[0], options))
        return
    make = {"eager": plain, "torchmd-net": peer}.get(mode, replayed)
    precision = "tf32" if mode == "tf32" else "float32"
    repeats = options.repeats or REPEATS.get(mode, 12)
    for path in options.files:
        for batch in map(int, options.batches.split(",")):
            if not over(options):

                def step(path: str = path, batch: int = batch) -> Callable[[], Any]:
                    return make(trainer_for(path, batch, precision, options), batch)

                known = {"file": Path(path).stem, "model": model, "batch": batch, "mode": mode}
                attempt(known, lambda step=step: measured(step, repeats, cuda))


def line(row: Row) -> str:
    """A row as readable text."""
    where = f"{row.get('file', ''):>20} {row.get('model', ''):>23}"
    start = f"{where} {row.get('batch', ''):>4} {row.get('mode', row['part']):>12}"
    if "ms" in row:
        memory = f" {row['peak_GB']:6.2f} GB" if "peak_GB" in row else ""
        return f"{start} {row['ms']:9.3f} ms ({row['low']:.3f} to {row['high']:.3f}){memory}"
    if "replayed" in row:
        far = ", ".join(f"{mode} " + " ".join(f"{x:.1e}" for x in row[mode]) for mode in ("replayed", "eager again"))
        return f"{start} largest relative difference from eager in 1, 10, all steps: {far}"
    return f"{start} {row.get('error', '')}"


def summary(rows: list[Row]) -> str:
    """Time and memory of our step and that of TorchMD-Net."""
    cells = {(r["file"], r["model"], r["batch"], r["mode"]): r for r in rows if "ms" in r}
    head = "| frames | model | batch | float32 | TF32 | plain loop | TorchMD-Net | ratio | goal | memory |"
    lines = [head, "|---" * 10 + "|"]
    for file, model, batch in dict.fromkeys(key[:3] for key in cells):
        of = {mode: cells.get((file, model, batch, mode)) for mode in ("replay", "tf32", "eager", "torchmd-net")}
        times = [f"{row['ms']:.2f}" if row else "" for row in of.values()]
        ours, theirs = of["replay"], of["torchmd-net"]
        ratio = f"{theirs['ms'] / ours['ms']:.1f}" if ours and theirs else ""
        memory = f"{ours['peak_GB']:.1f} of {theirs['peak_GB']:.1f} GB" if ratio and "peak_GB" in ours else ""  # type: ignore[index, operator]
        goal = GOALS.get(model, {64: 2.0}).get(batch, "")
        lines.append(f"| {file} | {model} | {batch} | {' | '.join(times)} | {ratio} | {goal} | {memory} |")
    return "\n".join([*lines, *(line(r) for r in rows if "replayed" in r)])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+")
    parser.add_argument("--batches", default="8,64,512")
    parser.add_argument("--repeats", type=int, default=0, help="timed steps (default: 40 replayed, 12 others)")
    parser.add_argument("--steps", type=int, default=100, help="number of steps whose losses are compared")
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="learning rate of these steps; rounding grows faster with a higher one"
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw or muon, of our steps")
    shared(parser, device="cuda", channels=128, minutes=5.0, output=None, parts=PARTS)


def main(options: argparse.Namespace) -> None:
    if options.part:
        run_part(options)
        return
    print(summary(run_parts(options, {"models": MODELS}, line)))
