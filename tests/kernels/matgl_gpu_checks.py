"""Run by test_matgl_gpu.py in a process of its own, in Triton's interpreter: prints JSON, a line a case."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from ase.io import read
from tensornet_gpu_checks import BOX, CUTOFF, TINY, Tiles, compare, system

from torchmdnet2 import Potential, System
from torchmdnet2.importers import import_matgl
from torchmdnet2.models.matgl_tensornet.gpu import FrozenMatgl, FusedMatgl


def potential(group: str) -> Potential:
    torch.manual_seed(3)
    model = {"name": "matgl_tensornet", "hidden_channels": 32, "num_layers": 2, "cutoff": CUTOFF, "max_z": 10}
    head = {"name": "gated_scalar"}
    result = Potential.from_config({"model": {**model, "group": group}, "head": head}).eval()
    with torch.no_grad():
        for p in result.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return result


def fused(model: Potential, scale: float) -> FusedMatgl:
    return FusedMatgl(FrozenMatgl(model.representation, model.head, scale, "cpu"))


if __name__ == "__main__":
    tens, hundreds = Tiles.for_atoms(9, 32), Tiles.for_atoms(200, 32)
    for name, group, atoms, tiles, scale in (
        ("molecule", "O(3)", system(3, None, 0.0), tens, 1.0),
        ("triclinic cell, SO(3)", "SO(3)", system(5, BOX, 0.0), hundreds, 1.0),
        ("images of itself", "O(3)", system(2, TINY, 0.0), hundreds, 3.1),
        ("one atom", "O(3)", system(1, None, 0.0), tens, 1.0),
    ):
        model = potential(group)
        compare(name, model, fused(model, scale), atoms, tiles, scale)
    folder = os.environ.get("TORCHMDNET2_MATGL")  # matgl's own weights: a molecule of water
    for path in sorted(Path(folder).glob("*MatPES*")) if folder else ():
        model = import_matgl(path)
        structure = System.from_ase([read(path / "golden.xyz", 6)])
        bare = Potential.from_config({**model.config, "priors": [], "energy_scale": 1.0}).eval()
        bare.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("priors.")})
        compare(path.name, bare, fused(bare, 1.0), structure, Tiles.for_atoms(9, 128), 1.0)
