"""Makes format_1.tmn and format_1.json: a tiny model in format version 1, with its energies and forces.

Kept for the record: a new format gets a new script and a new pair of files, and these stay as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from torchmdnet2 import System
from torchmdnet2.checkpoint import save

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))


def main() -> None:
    from tiny import ethanol, silicon, tiny_potential

    model = {"name": "tensornet", "hidden_channels": 4, "num_layers": 1, "num_rbf": 4, "cutoff": 4.5, "max_z": 15}
    priors = [{"name": "atomref", "energies": {"1": -13.6, "6": -1029.3, "8": -2041.8, "14": -7869.2}, "max_z": 15}]
    potential = tiny_potential(dtype=torch.float32, noise=0.5, model=model, priors=priors)
    potential.metadata = {"about": "random weights, for tests"}
    save(potential, FOLDER / "format_1.tmn")
    expected = {}
    for name, atoms in (("ethanol", ethanol()), ("silicon", silicon())):
        result = potential.double()(System.from_ase(atoms))
        expected[name] = {
            "z": atoms.numbers.tolist(),
            "pos": atoms.positions.tolist(),
            "cell": atoms.cell.array.tolist(),
            "pbc": atoms.pbc.tolist(),
            "energy": float(result.energy),
            "forces": result.forces.tolist(),
        }
    (FOLDER / "format_1.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
