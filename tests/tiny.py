"""Tiny potentials with random weights in which every term shows."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from ase.build import bulk, molecule

from torchmdnet2 import Potential

ELEMENTS = [1, 6, 8, 14]
REFERENCES = {1: -13.6, 6: -1029.3, 8: -2041.8, 14: -7869.2}
MODELS: dict[str, dict[str, Any]] = {
    "o3": {"group": "O(3)"},
    "so3": {"group": "SO(3)"},
    "log": {"norm": "log"},
    "linear": {"tensor_norm": "root", "linear_readout": True},
    "gauss": {"group": "O(3)", "rbf_type": "gauss", "num_layers": 1, "activation": "tanh"},
}


def tiny_potential(
    kind: str = "o3", dtype: torch.dtype = torch.float64, seed: int = 0, noise: float = 0.2, **config: Any
) -> Potential:
    """A small TensorNet whose parameters, biases and normalisations included, are all random."""
    model = {"name": "tensornet", "hidden_channels": 16, "num_layers": 2, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
    config = {
        "model": {**model, **MODELS[kind]},
        "priors": [{"name": "atomref", "energies": REFERENCES, "max_z": 20}],
        "elements": ELEMENTS,
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        potential = Potential.from_config(config).double()
        with torch.no_grad():
            for parameter in potential.parameters():
                parameter += noise * torch.randn_like(parameter)
    return potential.to(dtype).eval()


def ethanol() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def silicon() -> Atoms:
    """The primitive cell of diamond silicon, two atoms, widths below the cutoff; displaced so that forces act."""
    atoms = bulk("Si", a=5.0)
    atoms.positions[1] += [0.11, -0.07, 0.05]
    return atoms


def chiral() -> Atoms:
    """Five different atoms around silicon: not its own mirror image."""
    return Atoms(
        "SiHCOSi",
        positions=[[0, 0, 0], [0.9, 0.9, 0.8], [-1.1, -1.0, 1.1], [-1.0, 1.0, -0.9], [1.4, -1.2, -1.3]],
    )
