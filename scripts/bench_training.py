"""Time a training step (forces, second derivatives, update) of TensorNet on one GPU, and check the losses.

    python scripts/bench_training.py acac.xyz 3bpa.xyz [--batches 8,64,512] [--output FILE]

Each file holds labelled frames (extxyz, keys energy and forces). "replay" is a step from packed frames in one CUDA
graph, "tf32" the same with matrix products in TF32, "eager" the plain loop, "torchmd-net" its eager step with the
same weights where it is installed. Losses of 100 steps, replayed and eager, are compared at the end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchmdnet2.training.config import parse_config
from torchmdnet2.training.run import make_setup, make_trainer, own_torch_state
from torchmdnet2.training.trainer import Trainer

MODEL = {"name": "tensornet", "hidden_channels": 128, "num_layers": 2, "num_rbf": 32, "cutoff": 5.0}


def trainer_for(path: str, batch: int, precision: str = "float32") -> Trainer:
    config = parse_config(
        {
            "data": {"train": path, "split": {"validation": 50, "test": 0, "seed": 1}},
            "model": MODEL,
            "training": {
                "seed": 1, "batch_size": batch, "max_epochs": 1000, "precision": precision, "device": "cuda",
                "loss": {"energy": 20, "forces": 1},
            },
        }
    )  # fmt: skip
    with own_torch_state(config):
        return make_trainer(make_setup(config), None)


def milliseconds(step: Callable[[], Any], repeats: int) -> float:
    """Median over single steps, each timed by events."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measured(make: Callable[[], Callable[[], Any]], repeats: int) -> dict[str, float]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    return {"ms": milliseconds(step, repeats), "peak_GB": torch.cuda.max_memory_allocated() / 1e9}


def replayed(path: str, batch: int, precision: str) -> Callable[[], Any]:
    trainer = trainer_for(path, batch, precision)
    reason = trainer.pack()
    if reason is not None or trainer.packed is None:
        raise RuntimeError(f"cannot be packed: {reason}")
    packed, chosen = trainer.packed, [k % len(trainer.train) for k in range(batch)]
    packed.training.set_rates([1e-4] * len(trainer.optimizer.param_groups), 0.01)
    return lambda: packed.step(chosen)


def plain(path: str, batch: int) -> Callable[[], Any]:
    trainer = trainer_for(path, batch)
    frames = next(iter(trainer.train_loader([[k % len(trainer.train) for k in range(batch)]]))).to(trainer.device)
    return lambda: trainer.step(frames)


def peer(path: str, batch: int) -> Callable[[], Any]:
    from bench_peer import peer_model

    trainer = trainer_for(path, batch)
    frames = next(iter(trainer.train_loader([[k % len(trainer.train) for k in range(batch)]]))).to(trainer.device)
    system, labels = frames.sample.system, frames.sample.labels
    neighbors = int(torch.diff(frames.neighbors.row_ptr).max()) + 2
    model = peer_model(trainer.potential, neighbors, derivative=True, static=False).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    energy, forces = labels["energy"].float()[:, None], labels["forces"].float()
    energy = energy - energy.mean()

    def step() -> None:
        optimizer.zero_grad()
        found, pull = model(system.z, system.pos.float(), system.batch)
        loss = torch.nn.functional.mse_loss(found, energy) + torch.nn.functional.mse_loss(pull, forces)
        loss.backward()
        optimizer.step()

    return step


def losses(path: str, replay: bool) -> list[float]:
    """Of 100 steps with 8 frames each."""
    trainer = trainer_for(path, 8)
    if replay:
        trainer.pack()
    order = torch.randperm(len(trainer.train), generator=torch.Generator().manual_seed(0)).repeat(3)[:800]
    found = []
    for chosen in order.view(100, 8).tolist():
        (loss,) = trainer.steps([chosen])
        found.append(float(trainer.packed.training.status[0]) if trainer.packed else loss)
        trainer.step_count += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--batches", default="8,64,512")
    parser.add_argument("--output", type=Path, default=Path("training.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    rows: list[dict[str, Any]] = []
    for path in arguments.files:
        for batch in map(int, arguments.batches.split(",")):
            modes = {
                "replay": (lambda: replayed(path, batch, "float32"), 40),  # noqa: B023
                "tf32": (lambda: replayed(path, batch, "tf32"), 40),  # noqa: B023
                "eager": (lambda: plain(path, batch), 10),  # noqa: B023
                "torchmd-net": (lambda: peer(path, batch), 10),  # noqa: B023
            }
            for mode, (make, repeats) in modes.items():
                row: dict[str, Any] = {"file": Path(path).stem, "batch": batch, "mode": mode}
                try:
                    row |= measured(make, repeats)
                    print(f"{row['file']:>20} {batch:4d} {mode:>12} {row['ms']:8.2f} ms {row['peak_GB']:6.2f} GB")
                except (ImportError, RuntimeError) as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                    print(f"{row['file']:>20} {batch:4d} {mode:>12} {row['error']}")
                rows.append(row)
                arguments.output.write_text(json.dumps({"model": MODEL, "rows": rows}, indent=1))
    eager, replay = (losses(arguments.files[0], mode) for mode in (False, True))
    worst = [max(abs(a - b) / abs(a) for a, b in zip(eager[:n], replay[:n], strict=True)) for n in (1, 10, 100)]
    print(f"losses, replayed against eager, largest relative difference in 1, 10, 100 steps: {worst}")
    text = json.dumps({"model": MODEL, "rows": rows, "losses": {"eager": eager, "replay": replay}}, indent=1)
    arguments.output.write_text(text)


if __name__ == "__main__":
    main()
