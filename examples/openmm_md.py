"""Molecular dynamics of a molecule in vacuum with OpenMM.

python examples/openmm_md.py model.tmn molecule.xyz --steps 1000
"""

from __future__ import annotations

import argparse
import sys

import openmm
from ase.io import read
from openmm import app, unit

from torchmdnet2.adapters.openmm import create_force

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("structure")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--temperature", type=float, default=300.0, help="K")
parser.add_argument("--platform", default="CPU", help="of OpenMM: Reference, CPU, CUDA")
parser.add_argument("--trajectory", default="openmm_md.dcd")
options = parser.parse_args()

atoms = read(options.structure)
topology = app.Topology()
residue = topology.addResidue("MOL", topology.addChain())
for number in atoms.numbers:
    element = app.Element.getByAtomicNumber(int(number))
    topology.addAtom(element.symbol, element, residue)

system = openmm.System()
for atom in topology.atoms():
    system.addParticle(atom.element.mass)
system.addForce(create_force(options.model, topology))

integrator = openmm.LangevinMiddleIntegrator(
    options.temperature * unit.kelvin, 1 / unit.picosecond, 0.5 * unit.femtosecond
)
integrator.setRandomNumberSeed(1)
platform = openmm.Platform.getPlatformByName(options.platform)
simulation = app.Simulation(topology, system, integrator, platform)
simulation.context.setPositions(atoms.positions * unit.angstrom)
simulation.minimizeEnergy(maxIterations=50)
simulation.context.setVelocitiesToTemperature(options.temperature * unit.kelvin, 1)

every = max(1, options.steps // 10)
simulation.reporters.append(app.DCDReporter(options.trajectory, every))
simulation.reporters.append(
    app.StateDataReporter(sys.stdout, every, step=True, potentialEnergy=True, temperature=True, speed=True)
)
simulation.step(options.steps)
print(f"wrote {options.trajectory}")
