"""A working directory with a model and data, and commands run in it."""

from __future__ import annotations

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.importers.torchmd_net import export_checkpoint

MODEL = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0}


def tiny() -> Potential:
    """Knows water."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Potential.from_config({"model": MODEL, "elements": [1, 8], "energy_scale": 0.2}).eval()


def fill(folder) -> None:
    """m.tmn, l.ckpt, and data.xyz of 6 frames whose energies are 0, 1, … eV."""
    save(tiny(), folder / "m.tmn")
    export_checkpoint(tiny(), folder / "l.ckpt")
    write(folder / "data.xyz", [labelled(k) for k in range(6)])


def labelled(k: int) -> Atoms:
    atoms = molecule("H2O")
    atoms.rattle(0.03, seed=k)
    atoms.calc = SinglePointCalculator(atoms, energy=float(k), forces=np.zeros((3, 3)))
    return atoms


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output, messages."""
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
