"""Times of energies and forces: the potential `aimnet2` beside one member of the authors' TorchScript file.

    python -m scripts.bench aimnet2 aimnet2_wb97m-d3_ens.jpt --device cuda
    python -m scripts.bench aimnet2 --shapes --device cuda --molecules 8 56 343 3375

The file is a program, which is run: use one that you trust (docs/models.md says where it comes from). Structures are
droplets of water. A bound step, the Evaluator's call and the file take turns; the medians are printed, and the largest
difference of forces. With --shapes no file is needed: bound steps with the launch shapes that are used and with others
take turns; medians, errors of forces against float64 (up to 1,100 atoms) and, with --kernels, the times of the kernels
are printed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ase.build import molecule

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.engine.fused_step import FusedModel

from .tensornet2 import by_kernel, held

DENSITY = 0.0334  # molecules of water per Å³
FEW: dict[str, dict[str, Any]] = {
    "next kernel later": {"overlap": 1}, "charges by a kernel between": {"joined": False}, "depth 32": {"depth": 32},
}  # fmt: skip
MANY: dict[str, dict[str, Any]] = {
    "next kernel early": {"overlap": 2}, "8 features": {"features": 8},
    "32 × 32, 2 warps": {"rows": 32, "cols": 32, "depth": 32, "layer_warps": 2, "stages": 3},
    "32 × 64, 2 warps": {"rows": 32, "cols": 64, "depth": 32, "layer_warps": 2, "stages": 3},
    "64 × 64, 4 warps": {"rows": 64, "cols": 64, "depth": 32, "layer_warps": 4, "stages": 3},
    "TF32": {"halves": False, "rows": 32, "cols": 64, "depth": 32, "layer_warps": 2, "stages": 3},
    "64 × 64, depth 64": {"rows": 64, "cols": 64, "depth": 64, "layer_warps": 4, "stages": 3},
}  # fmt: skip
"""Other launch shapes, of up to 64 atoms and of more, by what differs from those that are used."""


def droplet(molecules: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Atomic numbers and positions of water molecules on a lattice, turned at random, the nearest to the centre."""
    random, water = np.random.default_rng(0), molecule("H2O")
    side = round((2 * molecules) ** (1 / 3)) + 2
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3) - (side - 1) / 2
    centres = grid[np.argsort((grid**2).sum(1), kind="stable")[:molecules]] * DENSITY ** (-1 / 3)
    positions = []
    for centre in centres:
        turned = water.copy()
        turned.rotate(random.uniform(0, 360), random.normal(size=3), center="COM")
        positions.append(turned.positions + centre)
    numbers = torch.as_tensor(np.tile(water.numbers, molecules))
    return numbers, torch.as_tensor(np.concatenate(positions))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def other_shapes(system: System, repeat: int, kernels: bool) -> None:
    """Print a line for each precision and launch shape; steps take turns."""
    potential, atoms = load("aimnet2", system.device), system.num_atoms
    exact = None
    if atoms <= 1100:
        exact = copy.deepcopy(potential).double().reference(system.to(dtype=torch.float64)).forces
    steps: dict[str, Any] = {}
    model = FusedModel(potential, "native")
    chosen = model.net.launch_shapes(atoms)
    for name, changed in {"as used": {}, **(FEW if atoms <= 64 else MANY)}.items():
        shapes = chosen._replace(**changed)
        if steps and shapes == chosen:
            continue
        try:
            steps[name] = held(model, system, shapes)
        except Exception as error:  # the others are timed
            print(f"{atoms:6} atoms: {name}: {type(error).__name__}: {str(error)[:200]}")
    if kernels:
        for kernel, ms in by_kernel(model, system).items():
            print(f"{atoms:6} atoms: {1e3 * ms:8.1f} µs {kernel}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            times[name].append(seconds(lambda step=step: [step.run() for _ in range(10)], system.device) / 10)
    for name, step in steps.items():
        error = "" if exact is None else f"{float((step.results().forces - exact).abs().max()):9.1e} eV/Å"
        print(f"{atoms:6} atoms: {1e3 * statistics.median(times[name]):8.4f} ms {error} {name}", flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="aimnet2_wb97m-d3_ens.jpt")
    parser.add_argument("--shapes", action="store_true", help="time launch shapes, without the file")
    parser.add_argument("--kernels", action="store_true", help="with --shapes: print the times of the kernels, too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--molecules", type=int, nargs="+", default=[8, 56, 343], help="of water, in each droplet")
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="as --atoms, without the file")
    parser.add_argument("--repeat", type=int, default=20)


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    if options.shapes:
        for count in options.molecules:
            numbers, positions = droplet(count)
            other_shapes(System(z=numbers, pos=positions).to(device=device), options.repeat, options.kernels)
        return
    if options.file is None:
        raise SystemExit("give the authors' file, or --shapes")
    torch._C._jit_set_profiling_executor(False)  # new shapes would compile anew
    theirs = torch.jit.load(options.file, map_location=device)
    if hasattr(theirs, "models"):  # a file of four members
        theirs = getattr(theirs.models, "0")
    evaluator = Evaluator(load("aimnet2", device))
    print(evaluator.report())
    for count in [*options.molecules, *options.alone]:
        numbers, positions = droplet(count)
        system = System(z=numbers, pos=positions).to(device=device)
        given = {"coord": positions.float()[None].to(device), "numbers": numbers[None].to(device)}
        given["charge"] = torch.zeros(1, device=device)
        calls: dict[str, Callable[[], object]] = {
            "bound step": evaluator.bind(system).replay,
            "aimnet2": lambda system=system: evaluator(system),
        }
        if count not in options.alone:
            calls["file"] = lambda given=given: theirs(dict(given))
        for call in calls.values():
            for _ in range(5):
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.repeat):
            for name, call in calls.items():
                times[name].append(seconds(call, device))
        medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        line = f"{len(numbers):6} atoms: " + ", ".join(f"{name} {value:.3f} ms" for name, value in medians.items())
        if "file" in medians:
            difference = (evaluator(system).forces - theirs(dict(given))["forces"][0].detach()).abs().max()
            line += f", {medians['file'] / medians['bound step']:.1f} times the bound step"
            line += f"; forces differ by {float(difference):.1e} eV/Å"
        print(line, flush=True)
