"""Write labels of the teacher and results of the shipped models for the same frames to a small file for the tests.

    python scripts/organic/freeze.py work/frozen-labels tests/golden/organic/frozen.npz organic organic-small

The labels are made by label.py from geometries that no model was trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from torchmdnet2 import load
from torchmdnet2.data import open_dataset

KEYS = {"energy": "energy", "forces": "forces", "charges": "charges"}
FRAMES = 30  # evenly spread; evaluating them in float64 takes a test a second or two
AT_ONCE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="folder of label.py")
    parser.add_argument("target", type=Path)
    parser.add_argument("models", nargs="+", help="names of shipped potentials")
    options = parser.parse_args()
    data = open_dataset(sorted(options.labels.glob("*.h5")), keys=KEYS, cache="auto")
    chosen = sorted({round(k) for k in np.linspace(0, len(data) - 1, FRAMES)})
    sample = data.batch(chosen)
    system, labels = sample.system, sample.labels
    arrays = {
        "kind": np.array([data.name(k).split("'")[1] for k in chosen], dtype=np.bytes_),
        "atoms": system.atom_counts.numpy().astype(np.int16),
        "charge": system.charge.numpy().astype(np.int8),
        "numbers": system.z.numpy().astype(np.int8),
        "positions": system.pos.numpy().astype(np.float32),
        "energy": labels["energy"].numpy(),
        "forces": labels["forces"].numpy().astype(np.float32),
    }
    for name in options.models:
        potential, found = load(name, dtype=torch.float64), []
        for first in range(0, len(chosen), AT_ONCE):
            part = data.batch(chosen[first : first + AT_ONCE]).system
            found.append(potential(part.replace(pos=part.pos.float().double())))
        arrays[f"energy_{name}"] = torch.cat([f.energy.detach() for f in found]).numpy()
        arrays[f"forces_{name}"] = torch.cat([f.forces.detach() for f in found]).numpy().astype(np.float32)
    options.target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.target, **arrays)
    print(f"{options.target}: {len(chosen)} frames, {options.target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
