"""Relax a molecule and run Langevin dynamics with ASE.

python examples/ase_md.py model.tmn molecule.xyz --steps 1000
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import units
from ase.io import read
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.optimize import LBFGS

from torchmdnet2.adapters.ase import TorchMDNet2Calculator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("structure")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--temperature", type=float, default=300.0, help="K")
parser.add_argument("--trajectory", default="ase_md.traj")
options = parser.parse_args()

atoms = read(options.structure)
atoms.calc = TorchMDNet2Calculator(options.model)
LBFGS(atoms, logfile=None).run(fmax=0.05, steps=200)
print(f"relaxed: {atoms.get_potential_energy():.4f} eV, largest force {np.abs(atoms.get_forces()).max():.4f} eV/Å")

rng = np.random.default_rng(0)
MaxwellBoltzmannDistribution(atoms, temperature_K=options.temperature, rng=rng)
dynamics = Langevin(
    atoms,
    timestep=0.5 * units.fs,
    temperature_K=options.temperature,
    friction=0.01 / units.fs,
    fixcm=False,
    rng=rng,
    trajectory=options.trajectory,
    loginterval=10,
)
dynamics.attach(
    lambda: print(f"{dynamics.get_time() / units.fs:8.1f} fs {atoms.get_temperature():6.0f} K"),
    interval=max(1, options.steps // 10),
)
dynamics.run(options.steps)
print(f"wrote {options.trajectory}")
