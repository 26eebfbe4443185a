"""Simulate a ligand (model) in water (force field) with openmm-ml, by mechanical embedding.

    python examples/openmm_mixed.py model.tmn --steps 1000

The ligand is ethanol. The model gives its internal energy. Its interaction with water needs charges and Lennard-Jones
parameters (OPLS-AA), which are set up here. For other ligands get them from openmmforcefields.
"""

from __future__ import annotations

import argparse
import io

import openmm
from ase.build import molecule
from openmm import app, unit
from openmmml import MLPotential

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--box", type=float, default=2.2, help="nm")
parser.add_argument("--platform", default="CPU", help="of OpenMM: Reference, CPU, CUDA")
options = parser.parse_args()
NAMES = "C1 C2 O HO H21 H22 H11 H12 H13".split()  # in the order of the structure
BONDS = [(0, 1), (1, 2), (2, 3), (1, 4), (1, 5), (0, 6), (0, 7), (0, 8)]
CHARGES = [-0.18, 0.145, -0.683, 0.418, 0.06, 0.06, 0.06, 0.06, 0.06]  # e
LENNARD_JONES = {"C": (0.35, 0.276144), "O": (0.312, 0.71128), "HO": (1.0, 0.0), "H": (0.25, 0.12552)}  # nm, kJ/mol

ethanol = molecule("CH3CH2OH")
topology = app.Topology()
residue = topology.addResidue("LIG", topology.addChain())
atoms = [topology.addAtom(n, app.Element.getBySymbol(s), residue) for n, s in zip(NAMES, ethanol.symbols, strict=True)]
types, members, terms = "", "", ""
for atom, charge in zip(atoms, CHARGES, strict=True):
    sigma, epsilon = LENNARD_JONES.get(atom.name, LENNARD_JONES[atom.element.symbol])
    element = f'element="{atom.element.symbol}" mass="{atom.element.mass._value}"'
    types += f'<Type name="{atom.name}" class="{atom.name}" {element}/>'
    members += f'<Atom name="{atom.name}" type="{atom.name}" charge="{charge}"/>'
    terms += f'<Atom type="{atom.name}" sigma="{sigma}" epsilon="{epsilon}"/>'
for i, j in BONDS:
    topology.addBond(atoms[i], atoms[j])
    members += f'<Bond atomName1="{NAMES[i]}" atomName2="{NAMES[j]}"/>'
xml = f"""<ForceField><AtomTypes>{types}</AtomTypes><Residues><Residue name="LIG">{members}</Residue></Residues>
<NonbondedForce coulomb14scale="0.833333" lj14scale="0.5"><UseAttributeFromResidue name="charge"/>{terms}
</NonbondedForce></ForceField>"""
force_field = app.ForceField("tip3p.xml", io.StringIO(xml))
modeller = app.Modeller(topology, (ethanol.positions - ethanol.positions.mean(0) + 5 * options.box) * unit.angstrom)
modeller.addSolvent(force_field, boxSize=openmm.Vec3(1, 1, 1) * options.box * unit.nanometer)
mm_system = force_field.createSystem(modeller.topology, app.PME, 0.9 * unit.nanometer, constraints=app.HBonds)
potential = MLPotential("torchmdnet2", modelPath=options.model)
system = potential.createMixedSystem(modeller.topology, mm_system, range(len(atoms)))
integrator = openmm.LangevinMiddleIntegrator(300 * unit.kelvin, 1 / unit.picosecond, 0.5 * unit.femtosecond)
simulation = app.Simulation(modeller.topology, system, integrator, openmm.Platform.getPlatformByName(options.platform))
simulation.context.setPositions(modeller.positions)
simulation.minimizeEnergy(maxIterations=20)
simulation.context.setVelocitiesToTemperature(300 * unit.kelvin, 1)
simulation.step(options.steps)
energy = simulation.context.getState(getEnergy=True).getPotentialEnergy()
print(f"{system.getNumParticles()} atoms, {len(atoms)} of them by the model: {energy} after {options.steps} steps")
