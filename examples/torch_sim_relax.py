"""Relax all structures of a file in one batch with torch-sim (Python 3.12 or later).

python examples/torch_sim_relax.py model.tmn structures.xyz --device cuda
"""

from __future__ import annotations

import argparse

import torch
import torch_sim as ts
from ase.io import read, write

from torchmdnet2.adapters.torch_sim import TorchMDNet2Model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("structures")
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--output", default="relaxed.xyz")
options = parser.parse_args()

model = TorchMDNet2Model(options.model, device=options.device, dtype=torch.float64)
frames = read(options.structures, ":")
for atoms in frames:
    atoms.info.setdefault("charge", 0)  # each structure must have the entry, or none is read
state = ts.io.atoms_to_state(
    frames, torch.device(options.device), torch.float64, system_extras_map={"charge": "charge"}
)
before = model(state)["energy"]
relaxed = ts.optimize(system=state, model=model, optimizer=ts.Optimizer.fire, max_steps=options.steps)
after = model(relaxed)["energy"]
for k, atoms in enumerate(frames):
    print(f"frame {k}, {atoms.get_chemical_formula()}: {before[k]:.4f} -> {after[k]:.4f} eV")
write(options.output, relaxed.to_atoms())
