"""Labels by several models of one data set, to distil them into one: dynamics with their mean, a frame every few steps.

    torchmdnet2 train train.yaml --members 4
    python examples/label_with_ensemble.py train.xyz labels.xyz runs/train/ensemble.json --frames 20000
    torchmdnet2 train student.yaml                       # on labels.xyz, then fine-tune it on train.xyz

The mean of models that differ in their random weights alone is better than each of them, and a student that learns it
from many frames is nearly as good, at the cost of one (Hinton et al., arXiv:1503.02531). No other labels are needed.
Trajectories end where the models disagree.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

from torchmdnet2.adapters.committee import CommitteeCalculator

RUN, EVERY, TIMESTEP, FRICTION = 50, 8, 1.0, 0.02  # frames of a trajectory, steps between them, fs, 1/fs

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", help="structures to start from, any format of ASE")
    parser.add_argument("output", help="extxyz file to write")
    parser.add_argument("models", nargs="+", help="ensemble.json, or two models or more")
    parser.add_argument("--frames", type=int, default=5000)
    parser.add_argument("--temperatures", default="300,450", help="K")
    parser.add_argument("--largest-spread", type=float, default=0.2, help="eV/Å, of any component (%(default)s)")
    options = parser.parse_args()
    given, temperatures = read(options.given, ":"), [float(t) for t in options.temperatures.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    committee = CommitteeCalculator(options.models if options.models[1:] else options.models[0], device)
    rng, found, run = np.random.default_rng(0), [], 0
    while len(found) < options.frames:
        atoms, temperature = given[rng.integers(len(given))].copy(), temperatures[run % len(temperatures)]
        atoms.info = {key: value for key, value in atoms.info.items() if key in ("charge", "spin")}
        atoms.calc, run = committee, run + 1
        MaxwellBoltzmannDistribution(atoms, temperature_K=temperature, rng=rng)
        thermostat = {"temperature_K": temperature, "friction": FRICTION / units.fs, "rng": rng, "fixcm": False}
        dynamics = Langevin(atoms, TIMESTEP * units.fs, **thermostat)
        for _ in range(RUN):
            dynamics.run(EVERY)
            spread = np.abs(committee.get_property("forces_std", atoms)).max()
            if spread > options.largest_spread:
                break
            frame = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc, info=atoms.info)
            frame.calc = SinglePointCalculator(frame, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
            found.append((frame, spread))
        if run > 100 and len(found) < run:
            raise SystemExit(f"the models disagree from the start: {len(found)} frames of {run} runs")
    write(options.output, [frame for frame, _ in found[: options.frames]], format="extxyz")
    spread = np.median([spread for _, spread in found])
    print(f"{options.output}: {options.frames} frames, largest spread {spread:.3f} eV/Å (median)")
