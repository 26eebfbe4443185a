"""Compute frequencies with ASE: vibrations and thermochemistry of a molecule, or phonons of a crystal.

python examples/ase_vibrations.py model.tmn molecule.xyz
python examples/ase_vibrations.py model.tmn crystal.cif --supercell 3
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import units
from ase.io import read
from ase.optimize import LBFGS
from ase.phonons import Phonons
from ase.thermochemistry import HarmonicThermo
from ase.vibrations import Vibrations

from torchmdnet2.adapters.ase import TorchMDNet2Calculator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("structure")
parser.add_argument("--supercell", type=int, default=3, help="repetitions of a crystal's cell")
parser.add_argument("--fmax", type=float, default=0.005, help="eV/Å, limit of the forces in the relaxation")
options = parser.parse_args()

atoms = read(options.structure)
# finite differences of forces need float64
atoms.calc = TorchMDNet2Calculator(options.model, dtype="float64")
LBFGS(atoms, logfile=None).run(fmax=options.fmax, steps=500)
print(f"{atoms.get_chemical_formula()}: {atoms.get_potential_energy():.4f} eV")

if atoms.pbc.any():
    phonons = Phonons(atoms, atoms.calc, supercell=[options.supercell if p else 1 for p in atoms.pbc], delta=0.01)
    phonons.run()
    phonons.read(acoustic=True)
    path = atoms.cell.bandpath(npoints=20, pbc=atoms.pbc)
    energies = phonons.get_band_structure(path).energies[0]  # [points, 3 N] eV
    for point, row in zip(path.kpts, energies, strict=True):
        print(np.round(point, 3), " ".join(f"{value / units.invcm:8.1f}" for value in row), "cm⁻¹")
    phonons.clean()
else:
    vibrations = Vibrations(atoms)
    vibrations.run()
    energies = vibrations.get_energies()  # imaginary where the structure is no minimum
    for k, value in enumerate(energies):
        print(f"mode {k:3d} {value.real / units.invcm:8.1f} {value.imag / units.invcm:+8.1f}i cm⁻¹")
    vibrations.clean()
    real = energies[energies.real > 10 * units.invcm].real
    free = HarmonicThermo(real).get_helmholtz_energy(300, verbose=False) if len(real) else 0.0
    print(f"zero-point energy {real.sum() / 2:.4f} eV, vibrational free energy at 300 K {free:.4f} eV")
