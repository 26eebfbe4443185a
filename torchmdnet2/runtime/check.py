"""The check of a fused path on its first use: absolute energies and forces against the potential in float64.

Shapes: N atoms.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..neighbors import neighbor_list
from ..potential import Potential, Result
from ..system import System

if TYPE_CHECKING:
    from .model import FusedModel
    from .step import FusedStep

__all__ = ["BOUNDS", "CHECKED_ATOMS", "check_path", "cluster", "reference", "within"]

BOUNDS = {"float32": (2e-5, 1e-4), "tf32": (1e-2, 2e-2)}
"""Largest differences of an atom's energy (eV) and of a force or the virial (eV/Å, eV) by precision, each times the
largest value of its kind where that is above 1."""

CHECKED_ATOMS = 512
"""Up to so many atoms the structure itself is checked, else a compact cluster of half as many."""


def check_path(model: FusedModel, step: FusedStep, system: System) -> None:
    """Run the kernels that this step runs, on its own structure or on a cluster from it, and compare.

    Args:
        step: decides which kernels.
        system: N atoms, already checked.

    Raises:
        RuntimeError: energies, forces or stress differ from the reference by more than `BOUNDS`.
    """
    from .graphs import GraphedStep
    from .model import Source

    if system.num_atoms > CHECKED_ATOMS:
        system = cluster(system, CHECKED_ATOMS // 2, step.stress)
    # a step of its own: it may be one that other results are read from
    own = model.step(system.num_atoms, system.num_systems, step.dtype, step.stress, **step.path)
    runs = GraphedStep(own)
    Source(model, own).load(system)
    runs.make_room()
    own.launch()
    _compare(own, reference(model.potential, system, step.stress), model)


def reference(potential: Potential, system: System, stress: bool) -> Result:
    """What the potential gives in float64, with the reference neighbor list."""
    exact = copy.deepcopy(potential).double().eval()
    system = System(**{k: v.detach() for k, v in vars(system).items()}).to(dtype=torch.float64)
    with torch.enable_grad():
        neighbors = neighbor_list(system, potential.cutoff, backend="reference")
        return exact(system, stress=stress, neighbors=neighbors)


def _compare(step: FusedStep, reference: Result, model: FusedModel) -> None:
    energy_bound, force_bound = BOUNDS[model.precision]
    assert reference.atom_energies is not None and reference.forces is not None
    network = step.out.atom_energies - step.reference
    scale = max(1.0, float((network.abs() + step.isolated.abs()).max()))
    within("energy of an atom, eV", step.out.atom_energies, reference.atom_energies, energy_bound * scale)
    total = energy_bound * scale * step.num_atoms
    within("energy of a structure, eV", step.out.energy, reference.energy, total)
    scale = max(1.0, float(reference.forces.abs().max()))
    within("force, eV/Å", step.out.forces.double(), reference.forces, force_bound * scale)
    if step.out.stress is not None and reference.stress is not None:
        volume = torch.linalg.det(step.cell.double()).abs()[:, None, None]
        virial = reference.stress * volume
        # a virial is a sum over the atoms of forces times distances of a few Å
        bound = force_bound * max(scale * step.num_atoms, float(virial.abs().max()))
        within("virial, eV", step.out.stress * volume, virial, bound)


def within(name: str, ours: Tensor, reference: Tensor, bound: float) -> None:
    """Raise RuntimeError when two results differ by more than a bound."""
    difference = float((ours - reference).abs().max()) if ours.numel() else 0.0
    if not difference <= bound:
        raise RuntimeError(
            f"the fused path does not agree with the reference in float64: {name}, differs by {difference:.3g} "
            f"(allowed {bound:.3g}). No result is given; please report this, and use the Potential meanwhile"
        )


def cluster(system: System, num_atoms: int, stress: bool) -> System:
    """The atoms nearest to the first one, as a molecule in vacuum (in a large box where the stress is checked)."""
    same = (system.batch == system.batch[0]).nonzero()[:, 0]
    distance = (system.pos[same] - system.pos[0]).norm(dim=1)
    chosen = same[torch.argsort(distance)[:num_atoms]].sort().values
    pos = system.pos[chosen]
    box = (1000 if stress else 0) * torch.eye(3, dtype=pos.dtype, device=pos.device)
    return System(
        z=system.z[chosen], pos=pos, cell=box, pbc=torch.zeros(3, dtype=torch.bool, device=pos.device),
        charge=system.charge[system.batch[:1]],
    )  # fmt: skip
