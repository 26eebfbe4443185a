"""The start of a simulation: the structure is checked, relaxed and turned into tensors; the engine is chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from ase.data import covalent_radii
from torch import Tensor

from ..core.stated import cell_of, charge_and_spin
from ..engine.bound import BoundStep
from ..errors import BadData
from ..evaluator import Evaluator, Precision
from ..neighbors import neighbor_list
from ..potential.potential import Potential
from ..system import System
from .guard import BONDED
from .integrators import (
    AtomConstants,
    Engine,
    HostEngine,
    MultipleTimeSteps,
    VelocityVerlet,
    maxwell_boltzmann,
    remove_momentum,
)
from .options import MDOptions
from .springs import Springs, SpringStep
from .trajectory import VELOCITY

__all__ = [
    "atom_constants", "check_start", "fingerprint", "make_engine", "minimize", "noise_seeds", "plain_copy",
    "refuse_start", "repartition", "velocities",
]  # fmt: skip


if TYPE_CHECKING:
    from ase import Atoms

_LARGER = 1.05
"""Lattice vectors up to which meshes stay, in those at the start."""


def plain_copy(atoms: Atoms, charge: int | None, spin: int | None) -> Atoms:
    """Return a copy with charge and spin in its info, and without labels, which would be wrong in later frames.

    Args:
        atoms: the structure; charge and spin that it states are used.
        charge, spin: what a user gives; other values than those that the structure states are an error.

    Raises:
        BadData: two statements differ, or one is not a whole number.
    """
    from ase import Atoms

    cell, pbc = cell_of(atoms)
    start = Atoms(atoms.numbers, atoms.positions, cell=cell, pbc=pbc, constraint=atoms.constraints)
    for name in ("masses", "momenta"):
        if atoms.has(name):
            start.set_array(name, atoms.get_array(name))
    for key, value in zip(("charge", "spin"), charge_and_spin(atoms, charge, spin), strict=True):
        if value is not None:
            start.info[key] = value
    return start


def check_start(start: Atoms, potential: Potential) -> None:
    """Refuse a structure that cannot be simulated.

    Raises:
        BadData: a constraint other than FixAtoms.
        UnknownElement, UntrainedCharge: the model does not know an atom's element, or the total charge.
        ValueError: not valid otherwise (Potential.check).
    """
    refuse_start(start)
    potential.check(System.from_ase(start, device=potential.device))


def refuse_start(start: Atoms) -> None:
    """Refuse a structure with a constraint other than FixAtoms, by BadData."""
    from ase.constraints import FixAtoms

    for constraint in start.constraints:
        if not isinstance(constraint, FixAtoms):
            raise BadData(f"the start structure has a {type(constraint).__name__}; only FixAtoms is supported here")


def minimize(start: Atoms, potential: Potential) -> str:
    """Relax a structure in place, until all forces are below 0.05 eV/Å; returns the result in words."""
    from ase.optimize import FIRE

    from ..adapters.ase import TorchMDNet2Calculator

    start.calc = TorchMDNet2Calculator(potential, device=potential.device)
    optimizer = FIRE(start, logfile=None)
    done = optimizer.run(fmax=0.05, steps=1000)
    largest = np.linalg.norm(start.get_forces(), axis=1).max()
    words = (
        f"minimised in {optimizer.nsteps} steps: energy {start.get_potential_energy():.4f} eV, "
        f"largest force {largest:.3f} eV/Å" + ("" if done else " (not converged)")
    )
    start.calc = None
    return words


def atom_constants(start: Atoms, options: MDOptions) -> AtomConstants:
    """Return masses and fixed atoms of all replicas, on the CPU.

    Raises:
        BadData: all atoms are fixed, or one has no mass; constant pressure without a cell or with fixed atoms.
    """
    mobile = torch.ones(len(start), 1, dtype=torch.float64)
    for constraint in start.constraints:
        mobile[torch.as_tensor(constraint.index)] = 0
    count = int(mobile.sum())
    if not count:
        raise BadData("every atom of the start structure is fixed")
    if options.ensemble == "npt":
        _require_cell(start)
    if options.remove_drift is not None and count < len(start):
        raise BadData("remove_drift: some atoms are fixed, which holds the others in place; leave it out")
    bath = options.ensemble != "nve" and options.remove_drift is None
    free = bath or count < len(start) or count == 1
    masses = torch.as_tensor(start.get_masses(), dtype=torch.float64)[:, None]
    if not bool((masses > 0).all()):
        bad = int((~(masses > 0)).nonzero()[0, 0])
        raise BadData(f"atom {bad} has a mass of {float(masses[bad]):g}; give it a positive one")
    B = options.replicas
    return AtomConstants(masses.repeat(B, 1), mobile.repeat(B, 1), 3 * count - (0 if free else 3), B)


def _require_cell(start: Atoms) -> None:
    """Refuse a structure that cannot be simulated at constant pressure.

    Raises:
        BadData: the structure is not periodic in all directions, or has fixed atoms.
    """
    if not start.pbc.all():
        along = [axis for axis, periodic in zip("abc", start.pbc, strict=True) if periodic]
        has = f"is periodic along {' and '.join(along)} only" if along else "has no periodic cell"
        raise BadData(
            f"ensemble npt: the start structure {has}; constant pressure needs one that is periodic in all three "
            "directions. Give the ensemble nvt, or a structure in a cell"
        )
    if start.constraints:
        raise BadData("ensemble npt: the start structure has fixed atoms, which hold its cell; give the ensemble nvt")


def repartition(start: Atoms, mass: float) -> None:
    """Make hydrogens heavier, and the atoms that they are bonded to lighter, in place; velocities stay.

    Args:
        start: all masses are ASE's or those of its array.
        mass: amu, of every hydrogen.

    Raises:
        BadData: a hydrogen is bonded to no heavier atom, or an atom would become lighter than its hydrogens.
    """
    masses, vel, z = start.get_masses(), start.get_velocities(), start.numbers
    before, system = masses.copy(), System.from_ase(start)
    radii = covalent_radii[z]
    found = neighbor_list(system, BONDED * float(radii.max() + covalent_radii[1]))
    i, j = found.edge_index.numpy()
    ratio = found.distances(system).numpy() / (radii[i] + radii[j])
    bonded = (z[i] == 1) & (z[j] != 1) & (ratio < BONDED)
    nearest = np.lexsort((ratio[bonded], i[bonded]))
    hydrogens, first = np.unique(i[bonded][nearest], return_index=True)
    if len(alone := np.setdiff1d(np.flatnonzero(z == 1), hydrogens)):
        raise BadData(f"hydrogen_mass: atom {alone[0]} (H) is bonded to no heavier atom that could give it mass")
    np.subtract.at(masses, j[bonded][nearest][first], mass - masses[hydrogens])
    masses[hydrogens] = mass
    for atom in np.flatnonzero((masses < mass) & (masses < before)):
        raise BadData(
            f"hydrogen_mass: {mass:g} amu would leave atom {atom} ({start.symbols[atom]}) with {masses[atom]:.2f} amu, "
            "less than its hydrogens; give a smaller mass"
        )
    start.set_masses(masses)
    start.set_velocities(vel)


def velocities(start: Atoms, atoms: AtomConstants, options: MDOptions) -> Tensor:
    """Return velocities [N, 3] in Å/fs: those of the structure if no temperature is given, else drawn for it."""
    given = torch.as_tensor(start.get_velocities() / VELOCITY, dtype=torch.float64)
    if options.temperature is None and options.replicas == 1 and bool(given.any()):
        return remove_momentum(atoms, given * atoms.mobile)
    return maxwell_boltzmann(atoms, options.target_temperature, options.seeds)


def noise_seeds(seeds: Sequence[int]) -> list[int]:
    """Return seeds of the noise, so that it is independent of the velocities, which are drawn from the given seeds."""
    return [int.from_bytes(hashlib.sha256(f"noise {seed}".encode()).digest()[:7], "little") for seed in seeds]


def fingerprint(potential: Potential) -> str:
    """Return the checksum of the weights; restart files identify a model in memory by it."""
    digest = hashlib.sha256()
    for name, value in sorted(potential.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- Choice of the engine that runs a simulation ---


def make_engine(
    potential: Potential, system: System, dynamics: VelocityVerlet, interval: int,
    inner: Potential | Springs | None = None, count: int = 1, precision: Precision = "native",
) -> Engine:  # fmt: skip
    """Return the fastest engine for a potential and a device.

    On the CPU: with a compiled integrator where the potential runs on compiled kernels, at constant volume and with one
    time step. On a GPU: several steps in one CUDA graph where the potential runs on fused kernels; where autograd
    evaluates it, the potential's graph between launches of the integrator.

    Args:
        potential: on the system's device.
        system: N atoms in B structures, float64; where the simulation begins.
        dynamics: the integrator, or that of the inner steps where there are any.
        interval: steps between checks by the host.
        inner: its forces move the atoms in `count` inner steps of each step; None: one time step.
        precision: of the potential's Evaluator.

    Raises:
        ValueError: the potential or the device has no kernels of this precision.
    """
    on_gpu = system.device.type == "cuda"
    step, fused = _bind(potential, system, dynamics.barostat is not None, on_gpu, precision)
    launch = None
    try:
        if on_gpu:
            from ..engine.step import FusedBoundStep
            from .kernels_gpu import GraphEngine, launch_springs

            launch = launch_springs
    except ImportError:  # no Triton
        on_gpu = False
    fast: BoundStep | None = None
    if isinstance(inner, Springs):
        fast = SpringStep(inner, system, launch)
    elif inner is not None:
        fast, also_fused = _bind(inner, system, False, on_gpu)
        fused = fused and also_fused
    if fast is not None:
        dynamics = MultipleTimeSteps(dynamics, count, fast)
    if on_gpu and all(isinstance(held, FusedBoundStep | SpringStep) for held in (step, fast or step)):
        return GraphEngine(step, dynamics, interval, capture=fused)
    # elsewhere the integrator takes a negligible part of the time
    if not step.compiled or dynamics.barostat is not None or fast is not None:
        return HostEngine(step, dynamics)
    from .compiled import CompiledEngine

    return CompiledEngine(step, dynamics)


def _bind(
    potential: Potential, system: System, changes: bool, on_gpu: bool, precision: Precision = "native"
) -> tuple[BoundStep, bool]:
    """Return the bound step of the structure, with stress if its cell changes, and whether it runs on fused kernels
    without a graph."""
    if bool(system.pbc.any()):
        potential = potential.in_cells()
    # a graph cannot be captured within another
    evaluator = Evaluator(potential, precision, graphs=False)
    fused = evaluator.fused
    if on_gpu and not fused:
        evaluator = Evaluator(potential)
    if not (changes and on_gpu):
        step = evaluator.bind(system, stress=changes)
        return step, fused and not step.waits
    # meshes are made for a larger cell, so that they stay, and with them the bits, until the cell is as large
    step = evaluator.bind(system.replace(pos=system.pos * _LARGER, cell=system.cell * _LARGER), stress=True)
    step.pos.copy_(system.pos)
    step.cell.copy_(system.cell)
    step.replay()
    while not step.check():
        step.replay()
    return step, fused and not step.waits
