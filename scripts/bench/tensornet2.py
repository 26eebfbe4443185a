"""Time whole steps of the fused TensorNet2 on one GPU, and find the fastest launch shapes.

    python -m scripts.bench tensornet2 [--systems FOLDER] [--output FILE] [--minutes 3] [--scan]

Each row is a step by replay of one CUDA graph in float32: L = 1 and 2, F = 128, q_dim 16, and L = 1 with the priors
"zbl" (covalent) and "coulomb" (predicted charges, reaction field). "peak_GB" is the memory of the step. Errors are the
largest against the Potential in float64, up to 2,000 atoms. With --scan, further rows take one other launch shape each
(models/tensornet2/gpu.py), and "kernels" are milliseconds by kernel of the shapes that are chosen.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchmdnet2 import Potential, System
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.engine.step import GraphedStep
from torchmdnet2.models.tensornet.gpu import Block, MessageTile
from torchmdnet2.models.tensornet2.gpu import FilterTiles

from .harness import save_rows, shared
from .systems import read_pdb, timed, water_box

SIZE = {"name": "tensornet2", "hidden_channels": 128, "num_rbf": 32, "cutoff": 5.0, "q_dim": 16}
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 9.0, "damping": "exp"}
MODELS: dict[str, dict[str, Any]] = {
    "L=1": {"model": {**SIZE, "num_layers": 1}},
    "L=1, zbl, coulomb": {
        "model": {**SIZE, "num_layers": 1}, "priors": [{"name": "zbl", "envelope": "covalent"}, FIELD],
    },
    "L=2": {"model": {**SIZE, "num_layers": 2}},
}  # fmt: skip
SCAN: dict[str, list[Any]] = {
    "layer": [
        Block(128, 64, 32, 8, 3), Block(64, 128, 32, 4, 3), Block(64, 128, 32, 4, 4), Block(64, 64, 64, 4, 3),
        Block(128, 64, 64, 8, 2), Block(128, 128, 64, 8, 3),
    ],
    "filter_message": [MessageTile(16, 1, 32, 16), MessageTile(16, 1, 32, 8), MessageTile(8, 2, 32, 8),
                       MessageTile(8, 1, 64, 8), MessageTile(1, 4, 32, 1), MessageTile(1, 8, 32, 2)],
    "filter_gradient": [MessageTile(16, 1, 32, 16), MessageTile(16, 1, 32, 8), MessageTile(8, 2, 32, 8),
                        MessageTile(8, 1, 64, 8), MessageTile(1, 4, 32, 1), MessageTile(1, 8, 32, 2)],
    "first_gradient": [(16, 64, 4), (32, 64, 4), (32, 32, 8), (64, 64, 8)],
    "kept": [0, 1 << 20],
    "chunk": [16384, 32768, 65536, 262144],
    "first": [(8, 4), (32, 4), (32, 8)],
    "predict": [Block(16, 128, 32, 4), Block(16, 128, 16, 8), Block(16, 128, 32, 8, 2), Block(32, 128, 32, 8)],
    "overlap": [0, 1, 2],
}  # fmt: skip
EXACT_UP_TO = 2000
Row = dict[str, Any]


def held(model: FusedModel, system: System, shapes: Any) -> GraphedStep:
    """A replayed step with these launch shapes."""
    options = {} if shapes is None else {"shapes": shapes}
    step = model.step(system.num_atoms, system.num_systems, system.dtype, False, **options)
    graphed, _inputs = model._loaded(step, system)  # compiles kernels side by side
    graphed.capture()
    graphed.run()
    if graphed.status()[0]:
        raise RuntimeError("the edges did not fit")
    return graphed


def measure(model: FusedModel, system: System, exact: Any, shapes: FilterTiles | None = None) -> Row:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graphed = held(model, system, shapes)
    row: Row = {**timed(graphed.run, seconds=0.2), "peak_GB": (torch.cuda.max_memory_allocated() - before) / 1e9}
    if exact is not None:
        found = graphed.results()
        row["force_error"] = float((found.forces.double() - exact.forces).abs().max())
        row["largest_force"] = float(exact.forces.abs().max())
        row["energy_error"] = float(((found.energy - exact.energy) / exact.energy).abs().max())
        row["charge_error"] = float((found.charges - exact.charges).abs().max())
    return row


def by_kernel(model: FusedModel, system: System, shapes: Any = None) -> dict[str, float]:
    """Milliseconds of each kernel of a step, the longest first."""
    graphed = held(model, system, shapes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graphed.step.launch()
        torch.cuda.synchronize()
    times = {event.key[:60]: event.device_time_total / 3000 for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:25])


def rows(options: argparse.Namespace) -> Iterator[Row]:
    end = time.time() + 60 * options.minutes
    systems = [water_box(side) for side in map(int, options.water.split(","))]
    path = Path(options.systems or ".") / "alanine_dipeptide.pdb"
    systems = [read_pdb(path), *systems] if path.exists() else [water_box(2), *systems]
    loaded: dict[str, tuple[Potential, FusedModel]] = {}
    for name, config in MODELS.items():
        torch.manual_seed(1)
        potential = Potential.from_config(config).eval().requires_grad_(False).to("cuda")
        loaded[name] = potential, FusedModel(potential, "native")
    for system in (s.to("cuda") for s in systems):
        for name, (potential, model) in loaded.items():
            known = {"model": name, "atoms": system.num_atoms}
            exact = None
            if system.num_atoms <= EXACT_UP_TO:
                exact = copy.deepcopy(potential).double()(system.to(dtype=torch.float64))
            yield known | attempt(lambda: measure(model, system, exact))  # noqa: B023
            if not options.scan or name != "L=2" or system.num_atoms > 20_000:
                continue
            yield known | {"kernels": by_kernel(model, system)}
            chosen = model.net.launch_shapes(system.num_atoms)
            for field, shapes in SCAN.items():
                for shape in shapes:
                    if time.time() < end and shape != getattr(chosen, field):
                        one = replace(chosen, **{field: shape})
                        row = attempt(lambda: measure(model, system, exact, one))  # noqa: B023
                        yield known | {field: str(shape)} | row


def attempt(measured: Any) -> Row:
    try:
        return measured()
    except Exception as error:  # the others are timed too
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, systems=None, water="7,15,32", minutes=3.0, output=None)
    parser.add_argument("--scan", action="store_true", help="time other launch shapes, up to 20,000 atoms")


def main(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    found = []
    for row in rows(options):
        found.append(row)
        print(row, flush=True)
        save_rows(options.output, found, {"models": MODELS})
