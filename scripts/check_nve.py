"""Energy drift of one model in every program: ASE, OpenMM and `torchmdnet2 md`, from the same start.

    python scripts/check_nve.py runs/quickstart/best.tmn examples/data/ethanol_gfn2.xyz --time 10

The drift is the slope of the total energy by a linear fit, per atom; it should be below 1e-5 eV/atom/ps in float32,
and with --precision mixed.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
from ase import Atoms, units
from ase.io import read
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
from ase.md.verlet import VelocityVerlet
from ase.optimize import LBFGS

from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.md import MDOptions, run_md

BAR = 1e-5  # eV/atom/ps
EVERY = 10  # steps between energies


def with_ase(options: argparse.Namespace, start: Atoms) -> np.ndarray:
    """Total energies in eV by ASE's velocity Verlet."""
    atoms = start.copy()
    atoms.calc = TorchMDNet2Calculator(
        options.model, device=options.device, dtype=options.dtype, precision=options.precision
    )
    dynamics = VelocityVerlet(atoms, timestep=options.timestep * units.fs)
    energies = []
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()), interval=EVERY)
    dynamics.run(options.steps)
    return np.array(energies)


def with_openmm(options: argparse.Namespace, start: Atoms, platform: str) -> np.ndarray:
    """Total energies in eV by OpenMM's Verlet integrator."""
    import openmm
    from openmm import app, unit

    from torchmdnet2.adapters.openmm import create_force
    from torchmdnet2.units import KJ_MOL

    topology, system = app.Topology(), openmm.System()
    residue = topology.addResidue("MOL", topology.addChain())
    for number, mass in zip(start.numbers, start.get_masses(), strict=True):
        topology.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
        system.addParticle(mass)
    if start.pbc.all():
        topology.setPeriodicBoxVectors(start.cell.array * unit.angstrom)
        system.setDefaultPeriodicBoxVectors(*(start.cell.array / 10))
    how = {"device": options.device, "dtype": options.dtype, "precision": options.precision}
    system.addForce(create_force(options.model, topology, **how))
    integrator = openmm.VerletIntegrator(options.timestep * unit.femtosecond)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName(platform))
    context.setPositions(start.positions / 10)
    context.setVelocities(start.get_velocities() * 100 * units.fs)  # Å/(ASE's time) → nm/ps
    energies = []
    for _ in range(options.steps // EVERY + 1):
        state = context.getState(getEnergy=True)
        total = state.getPotentialEnergy() + state.getKineticEnergy()
        energies.append(total.value_in_unit(unit.kilojoule_per_mole) * KJ_MOL)
        integrator.step(EVERY)
    return np.array(energies)


def with_md(options: argparse.Namespace, start: Atoms) -> np.ndarray:
    """Total energies in eV by `torchmdnet2 md`."""
    with tempfile.TemporaryDirectory() as folder:
        output, precision = f"{folder}/nve", options.precision
        setup = MDOptions(options.steps, options.timestep, every=EVERY, output=output, precision=precision)
        result = run_md(options.model, start, setup, device=options.device, dtype=options.dtype)
    return np.array([row.conserved_eV for row in result.rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("structure")
    parser.add_argument("--time", type=float, default=10.0, help="ps")
    parser.add_argument("--timestep", type=float, default=0.5, help="fs")
    parser.add_argument("--temperature", type=float, default=300.0, help="K, of the first velocities")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--precision", default="native", choices=("native", "mixed"), help="mixed: on a GPU")
    parser.add_argument("--hosts", default="ase,md,openmm Reference,openmm CPU")
    options = parser.parse_args()
    options.steps = round(options.time * 1000 / options.timestep)

    start = read(options.structure)
    start.calc = TorchMDNet2Calculator(options.model, device=options.device, dtype=options.dtype)
    LBFGS(start, logfile=None).run(fmax=0.05, steps=200)
    # twice the temperature: half of it goes into potential energy
    MaxwellBoltzmannDistribution(start, temperature_K=2 * options.temperature, rng=np.random.default_rng(0))
    Stationary(start)
    if not start.pbc.any():
        ZeroRotation(start)
    start.calc = None
    print(f"{len(start)} atoms, {options.steps} steps of {options.timestep} fs, {options.dtype} on {options.device}")
    print(f"precision of the kernels: {options.precision}")
    for host in options.hosts.split(","):
        began = time.perf_counter()
        name, _, platform = host.partition(" ")
        if name == "openmm":
            energies = with_openmm(options, start, platform)
        else:
            energies = {"ase": with_ase, "md": with_md}[name](options, start)
        seconds = time.perf_counter() - began
        per_atom = energies / len(start)
        times = np.arange(len(energies)) * EVERY * options.timestep / 1000
        slope = np.polyfit(times, per_atom, 1)[0]
        print(
            f"{host:<18} drift {slope:+.1e} eV/atom/ps ({'within' if abs(slope) <= BAR else 'ABOVE'} {BAR:.0e}), "
            f"scatter {per_atom.std():.1e} eV/atom, {options.time * 86.4 / seconds:.2f} ns/day",
            flush=True,
        )


if __name__ == "__main__":
    main()
