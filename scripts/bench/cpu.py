"""Time energy and forces of TensorNet on the CPU: the Evaluator, the Potential and, when it is installed, TorchMD-Net.

    python -m scripts.bench cpu [--systems FOLDER] [--threads 2] [--repeats 7] [--no-potential] [--priors]
                                [--tensornet2 LAYERS] [--only NAME]

FOLDER holds alanine_dipeptide.pdb and chignolin.pdb; the water box of 1,029 atoms is made here. Each step is whole:
neighbor search, energy, forces. The programs take turns, so that other work on the machine slows all of them.
All have the same weights. Errors are the largest of any force component against the Potential in float64.

--priors times the Evaluator with priors beside the network instead (COMPOSED of systems.py), in processor time.

--tensornet2 takes TensorNet2 with 16 charge channels and so many layers; one layer is the shape of AceFF-2. Its priors
are ZBL with covalent radii and the Coulomb energy of its charges. Processor times are beside those of the clock.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchmdnet2 import Evaluator, Potential, System

from .harness import shared
from .peer import peer_step
from .systems import COMPOSED, MODEL, make_potential, read_pdb, sides, water_box


def peer(potential: Potential, atoms: System) -> Callable[[], Any] | None:
    """An eager step of TorchMD-Net with these weights; None if it is not installed."""
    try:
        return peer_step(potential, atoms, "eager")
    except ImportError as error:
        print(f"TorchMD-Net is left out: {error}")
        return None


COVALENT = {"name": "zbl", "envelope": "covalent"}
PREDICTED = {"name": "coulomb", "charges": "predicted", "damping": "exp"}
FIELD = {**PREDICTED, "method": "reaction_field", "cutoff": 9.0}
COMPOSED2: dict[str, list[dict[str, Any]]] = {
    "plain": [], "zbl": [COVALENT], "reaction_field": [FIELD], "zbl+reaction_field": [COVALENT, FIELD],
}  # fmt: skip
"""Priors added to TensorNet2, by name."""


def make(layers: int, composed: str = "plain") -> Potential:
    """TensorNet, or TensorNet2 with this number of layers, with random weights that are always the same."""
    if not layers:
        return make_potential(composed)
    torch.manual_seed(1)
    # charges as TorchMD-Net conserves them
    model = {**MODEL, "name": "tensornet2", "num_layers": layers, "q_dim": 16, "exact_charge": False}
    potential = Potential.from_config({"model": model, "priors": COMPOSED2[composed]})
    return potential.eval().requires_grad_(False)


def milliseconds(step: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of the clock, and of the processor."""
    start = time.perf_counter(), time.process_time()
    step()
    return 1e3 * (time.perf_counter() - start[0]), 1e3 * (time.process_time() - start[1])


def compare_priors(systems: dict[str, System], repeats: int, layers: int) -> None:
    """Print the time that priors add to a step. They take turns; the ratio is the median over the turns."""
    named = COMPOSED2 if layers else COMPOSED
    evaluators = {composed: Evaluator(make(layers, composed)) for composed in named}
    print("system, atoms: priors, median ms, minimum ms of processor time; median ratio to plain")
    for name, atoms in systems.items():
        times: dict[str, list[float]] = {composed: [] for composed in evaluators}
        for turn in range(repeats + 1):
            for composed, evaluator in evaluators.items():
                evaluator(atoms)
                taken = milliseconds(lambda evaluator=evaluator, atoms=atoms: evaluator(atoms))[1]  # type: ignore[misc]
                if turn:  # the first compiles
                    times[composed].append(taken)
        for composed, values in times.items():
            ratio = statistics.median(mine / plain for mine, plain in zip(values, times["plain"], strict=True))
            row = f"{statistics.median(values):.1f}, {min(values):.1f}; {ratio:.3f}"
            print(f"{name}, {atoms.num_atoms}: {composed}, {row}", flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, systems=Path("systems"), water="7", threads=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-potential", action="store_true", help="leave out the Potential, which is slow")
    parser.add_argument("--priors", action="store_true", help="priors beside the network, in processor time")
    parser.add_argument("--tensornet2", type=int, default=0, metavar="LAYERS", help="TensorNet2 with so many layers")
    parser.add_argument("--only", help="one of the systems")


def main(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    files = [options.systems / f"{name}.pdb" for name in ("alanine_dipeptide", "chignolin")]
    systems = {file.stem: read_pdb(file) for file in files if file.exists()}
    systems |= {f"water {3 * side**3}": water_box(side) for side in sides(options.water)}
    systems = {name: atoms for name, atoms in systems.items() if options.only in (None, name)}
    if options.priors:
        compare_priors(systems, options.repeats, options.tensornet2)
        return
    potential = make(options.tensornet2)
    evaluator = Evaluator(potential)

    print("system, atoms: program, first call s, median ms, minimum ms, median and minimum ms of processor time")
    for name, atoms in systems.items():
        steps: dict[str, Callable[[], Any] | None] = {"Evaluator": lambda atoms=atoms: evaluator(atoms)}  # type: ignore[misc]
        if not options.no_potential:
            steps["Potential"] = lambda atoms=atoms: potential(atoms)  # type: ignore[misc]
        steps["TorchMD-Net"] = peer(potential, atoms)
        known = {program: step for program, step in steps.items() if step is not None}
        first = {program: milliseconds(step)[0] / 1e3 for program, step in known.items()}
        times: dict[str, list[tuple[float, float]]] = {program: [] for program in known}
        for _ in range(options.repeats):
            for program, step in known.items():
                step()  # with its own data in the cache
                times[program].append(milliseconds(step))
        clock, processor = ({p: [v[k] for v in values] for p, values in times.items()} for k in (0, 1))
        for program in known:
            columns = [f(kind[program]) for kind in (clock, processor) for f in (statistics.median, min)]
            row = ", ".join(f"{value:.1f}" for value in (first[program], *columns))
            print(f"{name}, {atoms.num_atoms}: {program}, {row}", flush=True)
        if "TorchMD-Net" in times:
            for what, kind in (("clock", clock), ("processor", processor)):
                median, least = (f(kind["TorchMD-Net"]) / f(kind["Evaluator"]) for f in (statistics.median, min))
                print(f"  TorchMD-Net / Evaluator, {what}: {median:.1f} by medians, {least:.1f} by minima")
        exact = copy.deepcopy(potential).double()(atoms.to(dtype=torch.float64))
        for program, model in (("Evaluator", evaluator), ("Potential", potential)):
            result = model(atoms)
            force = float((result.forces.double() - exact.forces).abs().max())
            energy = float((result.energy - exact.energy).abs() / exact.energy.abs())
            size = float(exact.forces.abs().max())
            print(f"  {program}: force error {force:.1e} of {size:.2g} eV/Å, energy {energy:.1e}")
        if "TorchMD-Net" in known:
            force = float((known["TorchMD-Net"]().double() - exact.forces).abs().max())
            print(f"  TorchMD-Net: force error {force:.1e} eV/Å")
    print(evaluator.report())
