"""Energies of many structures at once, in batches: faster than one by one through a calculator.

python examples/batch_evaluation.py model.tmn structures.xyz --output energies.csv
"""

from __future__ import annotations

import argparse
import csv

import torch
from ase.io import iread

from torchmdnet2 import Evaluator, System, load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("structures", help="any format of ASE with several frames")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--output", default="energies.csv")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
evaluator = Evaluator(load(options.model, device=device))
frames = list(iread(options.structures, ":"))

with open(options.output, "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["frame", "formula", "energy_eV", "largest_force_eV_per_A"])
    for first in range(0, len(frames), options.batch_size):
        batch = frames[first : first + options.batch_size]
        system = System.from_ase(batch, device=device)
        result = evaluator(system)
        norms = result.forces.norm(dim=1)
        largest = norms.new_zeros(len(batch)).scatter_reduce(0, system.batch, norms, "amax")
        rows = zip(batch, result.energy.tolist(), largest.tolist(), strict=True)
        for k, (atoms, energy, force) in enumerate(rows):
            table.writerow([first + k, atoms.get_chemical_formula(), energy, force])
print(f"{len(frames)} structures, wrote {options.output}")
