"""Time whole steps of the fused TensorNet2 on one GPU, and find the fastest launch shapes.

    python -m scripts.bench tensornet2 [--systems FOLDER] [--output FILE] [--minutes 3] [--scan]
    python -m scripts.bench tensornet2 --parts variants,kernels [--systems FOLDER] [--output FILE] [--minutes 6]

Each row is a step by replay of one CUDA graph in float32: L = 1 and 2, F = 128, q_dim 16, and L = 1 with the priors
"zbl" (covalent) and "coulomb" (predicted charges, reaction field). "peak_GB" is the memory of the step. Errors are the
largest against the Potential in float64, up to 2,000 atoms. With --scan, further rows take one other launch shape each
(models/tensornet2/gpu.py), and "kernels" are milliseconds by kernel of the shapes that are chosen.

With --parts, the model of one layer without priors is timed: "variants" are launch shapes that may replace others (FEW,
MANY), in a table of milliseconds a step, with errors of the forces; "kernels" are milliseconds by kernel of some.
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

from .harness import save_rows, shared, table
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
        Block(64, 128, 32, 4, 3), Block(64, 128, 32, 4, 2), Block(64, 128, 64, 4, 2), Block(64, 64, 64, 4, 3),
        Block(64, 64, 32, 4, 4), Block(128, 128, 32, 8, 3), Block(128, 128, 32, 4, 3),
    ],
    "filter_message": [MessageTile(16, 1, 32, 16), MessageTile(16, 1, 32, 8), MessageTile(8, 2, 32, 8),
                       MessageTile(8, 1, 64, 8), MessageTile(1, 4, 32, 1), MessageTile(1, 8, 32, 2)],
    "filter_gradient": [MessageTile(16, 1, 32, 16), MessageTile(16, 1, 32, 8), MessageTile(8, 2, 32, 8),
                        MessageTile(8, 1, 64, 8), MessageTile(1, 4, 32, 1), MessageTile(1, 8, 32, 2)],
    "first_gradient": [
        Block(32, 128, 64, 8, 3), Block(64, 128, 16, 4, 4), Block(64, 128, 32, 4, 3), Block(64, 128, 64, 4, 2),
    ],
    "kept": [0],
    "first": [(8, 4), (32, 4), (32, 8)],
    "predict": [Block(16, 128, 32, 4), Block(16, 128, 16, 8), Block(16, 128, 32, 8, 2), Block(32, 128, 32, 8)],
    "overlap": [0, 1, 2],
}  # fmt: skip
_TENSOR_CORES = {
    "charge_layer": Block(16, 32, 64, 4), "predict": Block(16, 128, 128, 8),
    "predict_gradient": Block(16, 32, 32, 4),
}  # fmt: skip
_CUDA_CORES = {
    "charge_layer": Block(1, 16, 128, 4), "predict": Block(1, 128, 128, 8),
    "predict_gradient": Block(1, 16, 128, 4),
}  # fmt: skip
FEW: dict[str, dict[str, Any]] = {
    "as chosen": {},
    "charges on Tensor Cores": _TENSOR_CORES,
    "charges on CUDA cores": _CUDA_CORES,
    "charges on CUDA cores, 32 channels": {
        **_CUDA_CORES, "charge_layer": Block(1, 32, 128, 4),
        "predict_gradient": Block(1, 32, 128, 4),
    },
    "charges on CUDA cores, 2 warps": {
        **_CUDA_CORES, "charge_layer": Block(1, 16, 128, 2),
        "predict_gradient": Block(1, 16, 128, 2),
    },
    "charges on CUDA cores, gradient with 4 warps": {**_CUDA_CORES, "predict": Block(1, 128, 128, 4)},
    "layer 64 x 64": {"layer": Block(64, 64, 64, 4, 3)},
    "layer 16 x 64": {"layer": Block(16, 64, 64, 4, 3)},
    "first gradient with 8 warps": {"first_gradient": Block(16, 128, 64, 8, 3)},
    "gradients of messages 1 x 8 x 32, 8": {"filter_gradient": MessageTile(1, 8, 32, 8)},
}  # fmt: skip
MANY: dict[str, dict[str, Any]] = {
    "as chosen": {},
    "filters computed again": {"kept": 0, "chunk": 32768},
    "layer 64 x 128 x 32, 3 stages": {"layer": Block(64, 128, 32, 4, 3)},
    "layer 64 x 128 x 32, 2 stages": {"layer": Block(64, 128, 32, 4, 2)},
    "layer 128 x 128 x 32, 4 warps": {"layer": Block(128, 128, 32, 4, 3)},
    "layer 128 x 128 x 64, 2 stages": {"layer": Block(128, 128, 64, 8, 2)},
    "first gradient 32 x 64, 8 warps": {"first_gradient": Block(32, 128, 64, 8, 3)},
    "first gradient 32 x 32": {"first_gradient": Block(32, 128, 32, 4, 3)},
    "first gradient 64 x 64": {"first_gradient": Block(64, 128, 64, 4, 2)},
    "gradients of messages 1 x 4 x 32, 1": {"filter_gradient": MessageTile(1, 4, 32, 1)},
    "gradients of messages 1 x 1 x 128, 1": {"filter_gradient": MessageTile(1, 1, 128, 1)},
    "gradients of messages 1 x 1 x 64, 1": {"filter_gradient": MessageTile(1, 1, 64, 1)},
    "gradients of messages 4 x 1 x 128, 4": {"filter_gradient": MessageTile(4, 1, 128, 4)},
    "messages 1 x 1 x 128, 1": {"filter_message": MessageTile(1, 1, 128, 1)},
    "messages 8 x 1 x 128, 8": {"filter_message": MessageTile(8, 1, 128, 8)},
    "charges 16 x 64 x 64, 8 warps": {"charge_layer": Block(16, 64, 64, 8)},
    "charges, 3 stages": {
        "charge_layer": Block(16, 64, 32, 4, 3), "predict": Block(16, 128, 32, 8, 3),
        "predict_gradient": Block(16, 32, 32, 4, 3),
    },
    "gradients of charges, all of the sum": {
        "predict": Block(16, 128, 128, 8), "predict_gradient": Block(16, 32, 64, 4),
    },
}  # fmt: skip
"""Launch shapes that replace those chosen for L = 1, up to 512 atoms and of more."""
BY_KERNEL = (
    "as chosen", "charges on Tensor Cores", "charges on CUDA cores", "layer 64 x 128 x 32, 3 stages",
)  # fmt: skip
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
    for name in MODELS:
        potential = _potential(name)
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


def _potential(name: str) -> Potential:
    torch.manual_seed(1)
    return Potential.from_config(MODELS[name]).eval().requires_grad_(False).to("cuda")


def variant_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the parts "variants" and "kernels", for 22, 166, 1,029 and 10,125 atoms."""
    end, parts = time.time() + 60 * options.minutes, options.parts.split(",")
    potential = _potential("L=1")
    model, exactly = FusedModel(potential, "native"), copy.deepcopy(potential).double()
    for system in (s.to("cuda") for s in _variant_systems(options.systems)):
        try:
            exact = exactly(system.to(dtype=torch.float64))
        except torch.cuda.OutOfMemoryError:
            exact = None
        chosen: Any = model.net.shapes_for(system.num_atoms, system.z)
        known = {"atoms": system.num_atoms}
        for name, changed in (FEW if system.num_atoms <= 512 else MANY).items():
            row: Row = {"error": "the time was over"}
            shapes = replace(chosen, **changed)
            if time.time() < end and "variants" in parts:
                row = attempt(lambda: measure(model, system, exact, shapes))  # noqa: B023
            if "variants" in parts:
                yield known | {"variant": name} | row
            if "kernels" in parts and name in BY_KERNEL and time.time() < end:
                row = attempt(lambda: {"kernels": by_kernel(model, system, shapes)})  # noqa: B023
                yield known | {"variant": name} | row


def _variant_systems(folder: Path | None) -> Iterator[System]:
    for name, side in (("", 7), ("", 15), ("alanine_dipeptide", 2), ("chignolin", 4)):
        path = (folder or Path()) / f"{name}.pdb"
        yield read_pdb(path) if path.exists() else water_box(side)


def variant_table(found: list[Row]) -> str:
    """Milliseconds of the variants by number of atoms; in brackets, error of the forces in 1e-6 eV/Å."""
    sizes = sorted({row["atoms"] for row in found})
    cells: dict[str, dict[int, str]] = {}
    for row in found:
        if "kernels" not in row:
            error = f" ({1e6 * row['force_error']:.2f})" if "force_error" in row else ""
            text = f"{row['ms']:.4f}{error}" if "ms" in row else row["error"][:40]
            cells.setdefault(row["variant"], {})[row["atoms"]] = text
    lines = ([name, *(of.get(n, "") for n in sizes)] for name, of in cells.items())
    return table(["variant", *map(str, sizes)], lines)


def attempt(measured: Any) -> Row:
    try:
        return measured()
    except Exception as error:  # the others are timed too
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, systems=None, water="7,15,32", minutes=3.0, output=None)
    parser.add_argument("--scan", action="store_true", help="time other launch shapes, up to 20,000 atoms")
    parser.add_argument("--parts", default="", help="variants, kernels: see above")


def main(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    found = []
    for row in variant_rows(options) if options.parts else rows(options):
        found.append(row)
        print(row, flush=True)
        save_rows(options.output, found, {"models": MODELS})
    if options.parts:
        print(variant_table(found))
