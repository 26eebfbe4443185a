"""Screen many structures in batches: write energies and largest forces, print the lowest energy of each composition.

    python examples/batch_screening.py model.tmn structures.xyz --output energies.csv
    python examples/batch_screening.py seed0.tmn,seed1.tmn,seed2.tmn structures.xyz      with an uncertainty

Several models form a committee. A large spread means that a result is unreliable.
"""

from __future__ import annotations

import argparse
import csv

import numpy as np
import torch
from ase.io import iread

from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("models", help="one file, or several with commas between")
parser.add_argument("structures", help="any format of ASE with several frames")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--output", default="energies.csv")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
models = options.models.split(",")
calc = TorchMDNet2Calculator(models[0], device) if len(models) == 1 else CommitteeCalculator(models, device)
frames = list(iread(options.structures, ":"))
lowest: dict[str, tuple[float, int]] = {}

with open(options.output, "w", newline="") as file:
    table = csv.writer(file)
    columns = ["frame", "formula", "energy_eV", "largest_force_eV_per_A"]
    table.writerow(columns + ["energy_std_eV"] * (len(models) > 1))
    for k, found in enumerate(calc.evaluate(frames, batch_size=options.batch_size)):
        formula, energy = frames[k].get_chemical_formula(), found["energy"]
        spread = [found["energy_std"]] if "energy_std" in found else []
        table.writerow([k, formula, energy, np.linalg.norm(found["forces"], axis=1).max(), *spread])
        lowest[formula] = min(lowest.get(formula, (np.inf, -1)), (energy, k))
for formula, (energy, k) in sorted(lowest.items()):
    print(f"{formula:>12}: lowest is frame {k} at {energy:.4f} eV")
print(f"{len(frames)} structures, wrote {options.output}")
