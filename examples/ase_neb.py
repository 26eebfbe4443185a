"""Compute a reaction barrier with ASE's nudged elastic band; all images share one calculator.

python examples/ase_neb.py model.tmn reactant.xyz product.xyz --images 9
"""

from __future__ import annotations

import argparse

import numpy as np
from ase.io import read, write
from ase.mep import NEB
from ase.optimize import FIRE, LBFGS

from torchmdnet2.adapters.ase import TorchMDNet2Calculator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("reactant")
parser.add_argument("product", help="with the atoms in the same order")
parser.add_argument("--images", type=int, default=9, help="both ends included")
parser.add_argument("--fmax", type=float, default=0.05, help="eV/Å")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--output", default="neb.xyz")
options = parser.parse_args()

calc = TorchMDNet2Calculator(options.model)
ends = [read(options.reactant), read(options.product)]
for atoms in ends:
    atoms.calc = calc
    LBFGS(atoms, logfile=None).run(fmax=options.fmax, steps=options.steps)
images = [ends[0].copy() for _ in range(options.images - 1)] + [ends[1].copy()]
for atoms in images:
    atoms.calc = calc

band = NEB(images, climb=True, method="improvedtangent", allow_shared_calculator=True)
band.interpolate("idpp")
converged = FIRE(band, logfile=None).run(fmax=options.fmax, steps=options.steps)

# energies of all images in one batch
energies = np.array([found["energy"] for found in calc.evaluate(images)])
for k, energy in enumerate(energies - energies[0]):
    print(f"image {k:2d} {energy:8.4f} eV {'#' * int(40 * max(energy, 0) / max(np.ptp(energies), 1e-9))}")
top = int(energies.argmax())
print(f"{'converged' if converged else 'NOT converged'}: barrier {energies[top] - energies[0]:.4f} eV at image {top}, "
      f"reaction energy {energies[-1] - energies[0]:+.4f} eV")  # fmt: skip
write(options.output, images)
