"""Structures as OpenMM systems, which the tests of the OpenMM adapters share."""

from __future__ import annotations

import openmm
from ase import Atoms
from ase.build import molecule
from openmm import app, unit

from torchmdnet2.adapters.openmm import create_force

KJ_MOL = 1.602176634e-19 * 6.02214076e23 / 1000  # kJ/mol per eV: the SI's own numbers


def topology_of(atoms: Atoms) -> app.Topology:
    topology = app.Topology()
    residue = topology.addResidue("MOL", topology.addChain())
    for k, number in enumerate(atoms.numbers):
        topology.addAtom(f"A{k}", app.Element.getByAtomicNumber(int(number)), residue)
    if atoms.pbc.any():
        topology.setPeriodicBoxVectors(atoms.cell.array * unit.angstrom)
    return topology


def system_of(atoms: Atoms) -> openmm.System:
    system = openmm.System()
    for mass in atoms.get_masses():
        system.addParticle(mass)
    if atoms.pbc.any():
        system.setDefaultPeriodicBoxVectors(*(atoms.cell.array / 10))
    return system


def context_of(system, atoms: Atoms, platform="Reference", timestep=0.0005):
    integrator = openmm.VerletIntegrator(timestep)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName(platform))
    context.setPositions(atoms.positions / 10)
    return context


def evaluate(context):
    """Energy in kJ/mol, forces in kJ/mol/nm."""
    state = context.getState(getEnergy=True, getForces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    return energy, state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)


def ml_system(model, atoms: Atoms, subset=None, **options):
    system = system_of(atoms)
    system.addForce(create_force(model, topology_of(atoms), subset, **options))
    return system


def ethanol() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def boxed(kind: str) -> Atoms:
    """Ethanol so near its periodic images that they act on it."""
    atoms = ethanol()
    atoms.set_cell({"orthorhombic": [5.0, 5.5, 6.0], "triclinic": [[6, 0, 0], [1.5, 5.5, 0], [-1.0, 2.0, 5.0]]}[kind])
    atoms.pbc = True
    return atoms
