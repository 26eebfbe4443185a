"""Convert a TorchMD-Net checkpoint: import it, print what was decided, compare float32 with float64.

    python examples/from_torchmd_net.py their.ckpt molecule.xyz --output model.tmn

The same from the command line: torchmdnet2 import their.ckpt model.tmn
"""

from __future__ import annotations

import argparse

import torch
from ase.io import read

from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.importers.torchmd_net import import_checkpoint

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", help="Lightning checkpoint of TorchMD-Net 2.x or 3.x")
parser.add_argument("structure")
parser.add_argument("--energy-unit", default="eV", help="that the model was trained in")
parser.add_argument("--output", default="model.tmn")
options = parser.parse_args()

# no code in the checkpoint runs; the import refuses what it cannot convert exactly
potential = import_checkpoint(options.checkpoint, energy_unit=options.energy_unit)
save(potential, options.output)
number = sum(p.numel() for p in potential.parameters())
print(f"{options.output}: {potential.config['model']['name']}, {number} parameters, cutoff {potential.cutoff} Å")
for decision in potential.metadata["import"]["decisions"]:
    print("-", decision)

atoms = read(options.structure)
forces = {}
for dtype in (torch.float64, torch.float32):
    atoms.calc = TorchMDNet2Calculator(options.output, dtype=dtype)
    forces[dtype] = atoms.get_forces()
    print(f"{dtype!s:>14}: {atoms.get_potential_energy():.6f} eV, largest force {abs(forces[dtype]).max():.5f} eV/Å")
difference = abs(forces[torch.float64] - forces[torch.float32]).max()
print(f"float32 differs from float64 by at most {difference:.1e} eV/Å")
