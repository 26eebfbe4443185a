"""Compute GFN2-xTB labels for pre-training: run dynamics from given structures and keep a frame every few steps.

    python examples/label_with_xtb.py train.xyz cheap.xyz --frames 20000 --temperatures 300,600,900 --processes 4

Train on cheap.xyz, then fine-tune (`init: {file: …}`) on the expensive labels of train.xyz. See docs/training.md,
"Pre-training". Needs tblite (pip install tblite). A molecule of 15 atoms takes 60 ms per frame on one core.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

RUN, EVERY = 50, 8  # frames of a trajectory, steps between them
TIMESTEP, FRICTION = 1.0 * units.fs, 0.02 / units.fs
LARGEST = 30.0  # eV/Å; frames with larger forces are left out


def trajectory(start: Atoms, temperature: float, seed: int) -> list[Atoms]:
    """Frames of a short run at this temperature, K, with their labels."""
    from tblite.ase import TBLite  # reads OMP_NUM_THREADS

    rng, frames = np.random.default_rng(seed), []
    atoms = start.copy()
    atoms.info = {"charge": start.info.get("charge", 0)}
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0, charge=atoms.info["charge"])
    MaxwellBoltzmannDistribution(atoms, temperature_K=temperature, rng=rng)
    dynamics = Langevin(atoms, TIMESTEP, temperature_K=temperature, friction=FRICTION, rng=rng, fixcm=False)
    while len(frames) < RUN and np.abs(atoms.get_forces()).max() < LARGEST:
        dynamics.run(EVERY)
        frame = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=atoms.pbc, info=atoms.info)
        frame.calc = SinglePointCalculator(frame, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
        frames.append(frame)
    return frames


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", help="structures to start from, any format of ASE")
    parser.add_argument("output", help="extxyz file to write")
    parser.add_argument("--frames", type=int, default=5000)
    parser.add_argument("--temperatures", default="300,600", help="K")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before tblite is loaded
    given, temperatures = read(options.given, ":"), [float(t) for t in options.temperatures.split(",")]
    runs = [(given[k % len(given)], temperatures[k % len(temperatures)], k) for k in range(-(-options.frames // RUN))]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:  # OpenMP does not survive a fork
        found = [frame for frames in pool.map(trajectory, *zip(*runs, strict=True)) for frame in frames]
    write(options.output, found[: options.frames], format="extxyz")
    print(f"{options.output}: {len(found[: options.frames])} frames, GFN2-xTB")
