"""Time the ways in which users call a shipped potential: `load(...)(system)`, Evaluator, bound step, ASE, OpenMM.

    python -m scripts.bench front [--device cpu] [--model organic] [--output FILE]

Each row is one structure in vacuum: aldehydes of 22 and 166 atoms, and droplets of water of 1,029 and 10,125 atoms.
Positions change from step to step, and each time includes the wait for the results: "bound" writes positions and
fetches all results to the host; "ase" is get_forces of the calculator at new positions; "openmm" is a step of its
integrator with the model as PythonForce. `load(...)` should take at most 1.2 times the Evaluator's time, ASE at most
0.1 ms more than the bound step at 22 atoms on a GPU. Times are medians of rounds in which the ways of calling take
turns, since other work on the machine comes and goes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ase import Atoms

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.adapters.ase import TorchMDNet2Calculator

from .harness import Row, machine, save_rows, shared, table
from .systems import forget, once, synchronize, water_box

SIZES = (22, 166, 1029, 10125)
WATER = {1029: 7, 10125: 15}
SECONDS = 1.5  # for each structure and way of calling


def aldehyde(carbons: int) -> Atoms:
    """A straight chain CₙH₂ₙO, 3n + 1 atoms, with the lengths and angles of a hydrocarbon."""
    angle, length, hydrogen = np.radians(112.0), 1.53, 1.09
    step = length * np.array([np.sin(angle / 2), np.cos(angle / 2)])
    chain = np.array([[k * step[0], (k % 2) * step[1], 0.0] for k in range(carbons)])
    symbols, places = ["C"] * carbons, list(chain)
    across, outward = hydrogen * np.sin(np.radians(54.0)), hydrogen * np.cos(np.radians(54.0))
    for k, place in enumerate(chain[:-1]):
        places += [place + np.array([0, outward * (1 if k % 2 else -1), side * across]) for side in (1, -1)]
        symbols += ["H", "H"]
    # a third hydrogen at the beginning; H and O in the plane of the last carbon
    places.append(chain[0] + hydrogen * np.array([-np.sin(angle / 2), np.cos(angle / 2), 0]))
    side = -1.0 if (carbons - 1) % 2 == 0 else 1.0
    places.append(chain[-1] + hydrogen * np.array([0.1, side, 0.0]))
    places.append(chain[-1] + 1.21 * np.array([0.86, -0.5 * side, 0.0]))
    return Atoms([*symbols, "H", "H", "O"], places)


def structure(size: int) -> Atoms:
    """The structure of a size, one of SIZES."""
    if size not in WATER:
        return aldehyde((size - 1) // 3)
    (atoms,) = water_box(WATER[size]).to_ase()
    atoms.pbc, atoms.cell = False, np.zeros((3, 3))
    return atoms


def ways(model: str, device: str, atoms: Atoms) -> dict[str, Callable[[], Any]]:
    """Functions that evaluate the structure at its next positions, by name."""
    rng, count = np.random.default_rng(0), [0]
    places = [atoms.positions + 1e-3 * rng.normal(size=(len(atoms), 3)) for _ in range(8)]
    first = System.from_ase(atoms).to(device)
    systems = [first.replace(pos=torch.from_numpy(place).to(device)) for place in places]
    potential, evaluator = load(model, device), Evaluator(load(model, device))
    bound = Evaluator(load(model, device)).bind(first)
    calculated = atoms.copy()
    calculated.calc = TorchMDNet2Calculator(model, device)

    def turn() -> int:
        count[0] += 1
        return count[0] % len(places)

    def call(evaluate: Callable[[System], Any]) -> Callable[[], Any]:
        def run() -> None:
            evaluate(systems[turn()])
            synchronize()

        return run

    def step() -> None:
        bound.pos.copy_(systems[turn()].pos)
        bound.replay()
        if bound.fetch() is None:
            raise RuntimeError("the edges did not fit, although bind chooses the capacity")

    def ase() -> None:
        calculated.positions[:] = places[turn()]
        calculated.get_forces()

    return {"bound": step, "evaluator": call(evaluator), "load": call(potential), "ase": ase}


def openmm_step(model: str, device: str, atoms: Atoms) -> Callable[[], Any]:
    """A step of OpenMM's integrator, in which atoms hardly move."""
    import openmm
    from openmm import app, unit

    from torchmdnet2.adapters.openmm import create_force

    topology = app.Topology()
    residue = topology.addResidue("ALL", topology.addChain())
    system = openmm.System()
    for number, mass in zip(atoms.numbers, atoms.get_masses(), strict=True):
        topology.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
        system.addParticle(float(mass))
    system.addForce(create_force(model, topology, device=device))
    integrator = openmm.VerletIntegrator(1e-4 * unit.femtosecond)
    there = [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())]
    platform = "CUDA" if device != "cpu" and "CUDA" in there else "CPU"
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName(platform))
    context.setPositions(atoms.positions * unit.angstrom)
    return lambda: (integrator.step(1), context)[0]


def measure(steps: dict[str, Callable[[], Any]]) -> Row:
    """Milliseconds by name, measured in turns; seconds of the first calls."""
    row: Row = {"first_s": {}}
    for name, step in steps.items():
        _, row["first_s"][name] = once(step)
        for _ in range(3):  # the second captures a graph or binds
            step()
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    lengths = {name: max(1, min(200, int(0.05 / max(once(step)[1], 1e-6)))) for name, step in steps.items()}
    end = time.perf_counter() + SECONDS * len(steps)
    while time.perf_counter() < end or len(rounds["load"]) < 5:
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(lengths[name]):
                step()
            rounds[name].append((time.perf_counter() - began) / lengths[name] * 1e3)
    return {**row, **{name: statistics.median(values) for name, values in rounds.items()}}


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, device="cuda", output=None)
    parser.add_argument("--model", default="organic", help="name or file (default: %(default)s)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="of these (default: %(default)s)")
    parser.add_argument("--openmm", action="store_true", help="time OpenMM too")


def main(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    for size in map(int, options.sizes.split(",")):
        atoms = structure(size)
        steps = ways(options.model, options.device, atoms)
        if options.openmm:
            steps["openmm"] = openmm_step(options.model, options.device, atoms)
        row: Row = {"atoms": len(atoms), **measure(steps)}
        row |= {"load over evaluator": row["load"] / row["evaluator"], "ase - bound": row["ase"] - row["bound"]}
        rows.append(row)
        save_rows(options.output, rows, {"model": options.model, "threads": torch.get_num_threads()})
        print(f"# {len(atoms)} atoms: first calls, s: " + ", ".join(f"{k} {v:.2f}" for k, v in row["first_s"].items()))
        del steps
        forget()
    names = [name for name in rows[0] if name not in ("atoms", "first_s")]
    print(f"\n{machine()['device']}, {options.model}, ms:\n")
    print(table(["atoms", *names], [[row["atoms"], *(f"{row[name]:.3f}" for name in names)] for row in rows]))
