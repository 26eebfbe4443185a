"""A molecule by the model in water by a force field, with openmm-ml: mechanical embedding.

Any PDB file whose waters are named HOH will do; the residue that the model describes is chosen by its name. Here the
model describes one of the waters, so that the example needs no ligand parameters.

    python examples/openmm_mixed.py model.tmn --steps 100
"""

from __future__ import annotations

import argparse

import numpy as np
import openmm
from openmm import app, unit
from openmmml import MLPotential

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--box", type=float, default=1.9, help="nm")
options = parser.parse_args()

force_field = app.ForceField("tip3p.xml")
modeller = app.Modeller(app.Topology(), [] * unit.nanometer)
modeller.addSolvent(force_field, boxSize=openmm.Vec3(1, 1, 1) * options.box * unit.nanometer)
mm_system = force_field.createSystem(
    modeller.topology, nonbondedMethod=app.PME, nonbondedCutoff=0.9 * unit.nanometer, rigidWater=False
)

ligand = [atom.index for atom in next(modeller.topology.residues()).atoms()]
system = MLPotential("torchmdnet2", modelPath=options.model).createMixedSystem(modeller.topology, mm_system, ligand)

integrator = openmm.LangevinMiddleIntegrator(300 * unit.kelvin, 1 / unit.picosecond, 0.5 * unit.femtosecond)
simulation = app.Simulation(modeller.topology, system, integrator, openmm.Platform.getPlatformByName("CPU"))
simulation.context.setPositions(modeller.positions)
simulation.minimizeEnergy(maxIterations=20)
simulation.context.setVelocitiesToTemperature(300 * unit.kelvin, 1)
simulation.step(options.steps)
state = simulation.context.getState(getEnergy=True, getPositions=True)
print(f"{modeller.topology.getNumAtoms()} atoms, {len(ligand)} of them by the model: {state.getPotentialEnergy()}")
bond = np.diff(state.getPositions(asNumpy=True).value_in_unit(unit.angstrom)[ligand[:2]], axis=0)
print(f"first O-H distance {np.linalg.norm(bond):.3f} Å")
