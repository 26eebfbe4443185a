"""Labels that active learning needs until dynamics are stable, compared with random frames of the same dynamics.

    python -m scripts.bench learning OUTPUT --time 20 --seeds 0,1

Ethanol or another molecule of ASE's G2 set, GFN2-xTB, from frames at 300 K. Prints a table and writes
OUTPUT/result.json.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import numpy as np
from ase import units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.optimize import BFGS

from .harness import save_rows, shared, table

TRAINING = {
    "num_threads": 1, "batch_size": 4, "optimizer": {"name": "muon"}, "lr": 1e-2, "warmup_steps": 20,
}  # fmt: skip


def start_frames(start, count: int, seed: int) -> list:
    """Frames of Langevin dynamics at 300 K, 100 fs apart after 2 ps, with their labels."""
    from tblite.ase import TBLite

    rng, frames = np.random.default_rng(seed), []
    atoms = start.copy()
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    BFGS(atoms, logfile=None).run(fmax=0.05, steps=500)
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=rng)
    dynamics = Langevin(atoms, units.fs, temperature_K=300, friction=0.01 / units.fs, rng=rng)
    dynamics.run(2000)
    for _ in range(count):
        dynamics.run(100)
        frame = atoms.copy()
        frame.set_velocities(np.zeros((len(atoms), 3)))
        frame.calc = SinglePointCalculator(frame, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
        frames.append(frame)
    return frames


def configuration(options: argparse.Namespace, start: Path, selection: str, seed: int) -> dict:
    training = {**copy.deepcopy(TRAINING), "max_epochs": options.epochs, "device": options.device}
    model = {
        "name": "tensornet", "hidden_channels": options.channels, "num_layers": options.layers, "num_rbf": 16,
        "cutoff": 5.0,
    }  # fmt: skip
    return {
        "start": {"file": str(start), "level_of_theory": "GFN2-xTB"},
        "labels": {"budget": options.budget, "per_round": options.per_round, "processes": options.processes},
        "dynamics": {"temperatures": [options.temperature], "time": options.time, "replicas": options.replicas},
        "selection": {"name": selection},
        "stop": {"whole": 1.0, "rounds": options.rounds, "spread": options.spread},
        "members": options.members,
        "train": {"model": model, "training": training},
        "refine": {"max_epochs": options.refine, "lr": 5e-3},
        "seed": seed,
        "output": {"folder": str(Path(options.output) / f"{selection}_{seed}")},
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", help="folder")
    parser.add_argument("--molecule", default="CH3CH2OH", help="name in ASE's G2 set, or a file")
    parser.add_argument("--frames", type=int, default=20, help="labelled frames to begin with")
    parser.add_argument("--temperature", type=float, default=600.0, help="K")
    parser.add_argument("--time", type=float, default=20.0, help="ps")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--spread", type=float, help="eV/Å; also wait until 99 of 100 frames are below this")
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    shared(parser, channels=32, device="cpu")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--members", type=int, default=3, help="of the committee")
    parser.add_argument("--epochs", type=int, default=100, help="of the first training")
    parser.add_argument("--refine", type=int, default=40, help="epochs of later trainings")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", default="0", help="with commas")
    parser.add_argument("--selections", default="disagreement,random", help="with commas")


def main(options: argparse.Namespace) -> None:
    from torchmdnet2.learn import parse_learn_config, run_learning

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder, results = Path(options.output), []
    folder.mkdir(parents=True, exist_ok=True)
    given = Path(options.molecule)
    start = read(given) if given.is_file() else molecule(options.molecule)
    for seed in map(int, options.seeds.split(",")):
        path = folder / f"start_{seed}.xyz"
        if not path.is_file():
            write(path, start_frames(start, options.frames, seed), format="extxyz")
        for selection in options.selections.split(","):
            config = parse_learn_config(configuration(options, path, selection, seed))
            result = run_learning(config, "auto")
            for found in result.rounds:
                (state,) = found.temperatures
                row = {
                    "seed": seed, "selection": selection, "round": found.round, "labels": found.asked,
                    "whole": state.whole, "replicas": state.replicas, "median_break": state.median_break,
                    "spread_high": state.spread_high, "forces": found.validation_errors["forces"],
                    "stopped": result.reason,
                }  # fmt: skip
                results.append(row)
            save_rows(folder / "result.json", results, {"options": vars(options)})
    titles = ["seed", "selection", "round", "labels", "whole", "99 % spread, eV/Å"]
    known = ([row[name] for name in titles[:4]] for row in results)
    found = ([f"{row['whole']}/{row['replicas']}", f"{row['spread_high']:.3f}"] for row in results)
    print(table(titles, map(list.__add__, known, found)))
