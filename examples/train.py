"""Train a model on labelled structures from Python, and print its errors.

    python examples/train.py examples/data/ethanol_gfn2.xyz --epochs 24

The same from the command line: torchmdnet2 train configs/quickstart.yaml
"""

from __future__ import annotations

import argparse

import numpy as np
from ase.io import read

from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("frames", help="any format of ASE, with energies (eV) and forces (eV/Å)")
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--channels", type=int, default=32)
parser.add_argument("--validation", type=float, default=0.1, help="fraction of the frames, or their number")
parser.add_argument("--output", default="runs/example")
options = parser.parse_args()

held_out = int(options.validation) if options.validation >= 1 else options.validation
config = parse_config(
    {
        "data": {
            "train": options.frames,
            "keys": {"energy": "energy", "forces": "forces"},
            "units": {"energy": "eV", "length": "angstrom"},
            "split": {"validation": held_out, "test": held_out, "seed": 1},
        },
        "model": {"name": "tensornet", "hidden_channels": options.channels, "num_layers": 1, "num_rbf": 16},
        "training": {
            "max_epochs": options.epochs, "lr": 3e-3, "lr_schedule": "cosine", "warmup_steps": 100, "ema_decay": 0.99,
            "batch_size": 8, "loss": {"energy": 10, "forces": 1}, "num_threads": 1,
        },
        "output": {"folder": options.output},
    }
)  # fmt: skip
path = run_training(config)

# evaluate the model through ASE on a few frames
frames = read(options.frames, ":10")
results = TorchMDNet2Calculator(path).evaluate(frames)
errors = [found["forces"] - atoms.get_forces() for found, atoms in zip(results, frames, strict=True)]
print(f"{path}: mean force error on {len(frames)} frames {np.abs(np.concatenate(errors)).mean() * 1000:.1f} meV/Å")
