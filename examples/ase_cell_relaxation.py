"""Relax the atoms and the cell of a crystal with ASE, and fit its equation of state.

python examples/ase_cell_relaxation.py model.tmn crystal.cif
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import units
from ase.eos import EquationOfState
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.optimize import LBFGS

from torchmdnet2.adapters.ase import TorchMDNet2Calculator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("structure")
parser.add_argument("--pressure", type=float, default=0.0, help="GPa")
parser.add_argument("--fmax", type=float, default=0.01, help="eV/Å")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--output", default="relaxed.xyz")
options = parser.parse_args()

atoms = read(options.structure)
atoms.calc = TorchMDNet2Calculator(options.model)
# forces and stress of a structure come from one evaluation
cell = FrechetCellFilter(atoms, scalar_pressure=options.pressure * units.GPa)
converged = LBFGS(cell, logfile=None).run(fmax=options.fmax, steps=options.steps)
print(f"{'converged' if converged else 'NOT converged'}: {atoms.get_potential_energy():.4f} eV")
print("cell", np.round(atoms.cell.cellpar(), 3), f"pressure {-atoms.get_stress()[:3].mean() / units.GPa:.3f} GPa")
write(options.output, atoms)

volumes, energies = [], []
for scale in np.linspace(0.98, 1.02, 7):
    strained = atoms.copy()
    strained.calc = atoms.calc
    strained.set_cell(atoms.cell * scale, scale_atoms=True)
    volumes.append(strained.get_volume())
    energies.append(strained.get_potential_energy())
try:
    volume, _, modulus = EquationOfState(volumes, energies).fit()
    print(f"equation of state: {volume:.3f} Å³, bulk modulus {modulus / units.GPa:.1f} GPa")
except ValueError as error:
    print(f"equation of state: no minimum in this range ({error})")
