"""The start of a simulation: the structure is checked, relaxed and turned into tensors; the engine is chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..core.stated import cell_of, charge_and_spin
from ..errors import BadData
from ..evaluator import Evaluator
from ..potential.potential import Potential
from ..system import System
from .engine import Engine, HostEngine
from .integrators import AtomConstants, VelocityVerlet, maxwell_boltzmann, remove_momentum
from .options import MDOptions
from .trajectory import VELOCITY

__all__ = [
    "atom_constants", "check_start", "fingerprint", "make_engine", "minimize", "noise_seeds", "plain_copy",
    "velocities",
]  # fmt: skip


if TYPE_CHECKING:
    from ase import Atoms


def plain_copy(atoms: Atoms, charge: int | None, spin: int | None) -> Atoms:
    """A copy with charge and spin in its info and without labels, which would be wrong in every later frame.

    Args:
        atoms: what it states of charge and spin is used.
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
        BadData: no atoms, or a constraint that is not known here.
        UnknownElement, UntrainedCharge: the model does not know an atom's element, or the total charge.
        ValueError: not valid otherwise (Potential.check).
    """
    from ase.constraints import FixAtoms

    if not len(start):
        raise BadData("the start structure has no atoms")
    for constraint in start.constraints:
        if not isinstance(constraint, FixAtoms):
            raise BadData(f"the start structure has a {type(constraint).__name__}; only FixAtoms is supported here")
    potential.check(System.from_ase(start, device=potential.device))


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
    """Masses and fixed atoms of all replicas, on the CPU.

    Raises:
        BadData: all atoms are fixed, or one has no mass.
    """
    mobile = torch.ones(len(start), 1, dtype=torch.float64)
    for constraint in start.constraints:
        mobile[torch.as_tensor(constraint.index)] = 0
    count = int(mobile.sum())
    if not count:
        raise BadData("every atom of the start structure is fixed")
    free = options.ensemble == "nvt" or count < len(start) or count == 1
    masses = torch.as_tensor(start.get_masses(), dtype=torch.float64)[:, None]
    if not bool((masses > 0).all()):
        bad = int((~(masses > 0)).nonzero()[0, 0])
        raise BadData(f"atom {bad} has a mass of {float(masses[bad]):g}; give it a positive one")
    B = options.replicas
    return AtomConstants(masses.repeat(B, 1), mobile.repeat(B, 1), 3 * count - (0 if free else 3), B)


def velocities(start: Atoms, atoms: AtomConstants, options: MDOptions) -> Tensor:
    """[N, 3] Å/fs: those of the structure if no temperature is given, else drawn for the temperature."""
    given = torch.as_tensor(start.get_velocities() / VELOCITY, dtype=torch.float64)
    if options.temperature is None and options.replicas == 1 and bool(given.any()):
        return remove_momentum(atoms, given * atoms.mobile)
    return maxwell_boltzmann(atoms, options.target_temperature, options.seeds)


def noise_seeds(seeds: Sequence[int]) -> list[int]:
    """Seeds for the noise, independent of the velocities, which are drawn from the same seeds."""
    return [int.from_bytes(hashlib.sha256(f"noise {seed}".encode()).digest()[:7], "little") for seed in seeds]


def fingerprint(potential: Potential) -> str:
    """Checksum of the weights; restart files identify a model in memory by it."""
    digest = hashlib.sha256()
    for name, value in sorted(potential.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- Choice of the engine that runs a simulation ---


def make_engine(potential: Potential, system: System, dynamics: VelocityVerlet, interval: int) -> Engine:
    """The fastest engine for a potential and a device.

    On the CPU: with a compiled integrator where the potential runs on compiled kernels. On a GPU: several steps in one
    CUDA graph where the potential runs on fused kernels; a graph of the potential's own between launches of the
    integrator where it has another (models evaluated by autograd).

    Args:
        potential: on the system's device.
        system: N atoms in B structures, float64; where the simulation begins.
        dynamics: the integrator.
        interval: steps between checks by the host.
    """
    if bool(system.pbc.any()):
        potential = potential.in_cells()
    # a graph cannot be captured within another
    evaluator = Evaluator(potential, graphs=False)
    if system.device.type != "cuda":
        step = evaluator.bind(system, stress=False)
        if not step.compiled:  # the integrator takes a negligible part of the time
            return HostEngine(step, dynamics)
        from .compiled import CompiledEngine

        return CompiledEngine(step, dynamics)
    if not evaluator.fused:
        evaluator = Evaluator(potential)
    step = evaluator.bind(system, stress=False)
    try:
        from ..engine.step import FusedBoundStep
        from .kernels_gpu import GraphEngine
    except ImportError:  # no Triton
        return HostEngine(step, dynamics)
    if not isinstance(step, FusedBoundStep):
        return HostEngine(step, dynamics)
    return GraphEngine(step, dynamics, interval, capture=evaluator.fused)
