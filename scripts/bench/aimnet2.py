"""Times of energies and forces: the potential `aimnet2` beside one member of the authors' TorchScript file.

    python -m scripts.bench aimnet2 aimnet2_wb97m-d3_ens.jpt --device cuda

The file is a program, which is run: use one that you trust (docs/models.md says where it comes from). Structures are
droplets of water. A bound step, the Evaluator's call and the file take turns; the medians are printed, and the largest
difference of forces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from ase.build import molecule

from torchmdnet2 import Evaluator, System, load

DENSITY = 0.0334  # molecules of water per Å³


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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="aimnet2_wb97m-d3_ens.jpt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--molecules", type=int, nargs="+", default=[8, 56, 343], help="of water, in each droplet")
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="as --atoms, without the file")
    parser.add_argument("--repeat", type=int, default=20)


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
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
