"""The check of a fused path on its first use: absolute energies and forces against the potential in float64.

Shapes: N atoms.
"""

from __future__ import annotations

import copy
import math
import operator

import torch
from torch import Tensor, nn

from ..neighbors import NeighborList, neighbor_list
from ..neighbors.pairs import PairLists
from ..neighbors.reference import number_of_images
from ..potential.output import SPREADS
from ..potential.potential import Potential, Result
from ..system import System

__all__ = [
    "BOUNDS", "extract_checked", "extract_cluster", "for_any_composition", "reference", "require_close",
    "require_properties", "require_result", "virial_terms",
]  # fmt: skip


BOUNDS = {"native": (2e-5, 1e-4), "tf32": (1e-2, 2e-2), "mixed": (5e-4, 4e-3)}
"""Allowed differences of an atom's energy (eV) and of a force or the virial (eV/Å, eV) by precision, each relative to
the largest value of its kind if that is above 1."""

CHECKED_ATOMS = 512
"""Number of atoms up to which the structure itself is checked; of larger ones, a compact cluster of half as many."""


def extract_checked(potential: Potential, system: System, stress: bool) -> tuple[Potential, System]:
    """Return the structure to check and its potential: a small structure itself, or a cluster from a large one."""
    if system.num_atoms <= CHECKED_ATOMS:
        return potential, system
    system, places = extract_cluster(system, CHECKED_ATOMS // 2, stress)
    part = for_any_composition(potential)
    priors = [prior.for_atoms(places) for prior in potential.priors]
    if not all(map(operator.is_, priors, potential.priors)):
        part._modules = {**potential._modules, "priors": nn.ModuleList(priors)}
    return part, system


def for_any_composition(potential: Potential) -> Potential:
    """Return the potential without checks of the composition, for atoms that are not a structure of the user.

    A cluster may cut molecules, so that it has any number of electrons, and its total energy is not returned.
    """
    part = copy.copy(potential)
    part.closed_shell, part.determined = False, None
    return part


def reference(potential: Potential, system: System, stress: bool) -> Result:
    """Return results of the potential in float64, with the reference neighbor list.

    Raises:
        ValueError: `Potential.forward` refuses the structure.
    """
    exact, system = _in_float64(potential, system)
    exact.check(system)  # before it is searched
    with torch.enable_grad():
        known = {potential.cutoff: neighbor_list(system, potential.cutoff, backend="reference")}
        return exact.reference(system, stress=stress, neighbors=_ReferenceLists(system, known), create_graph=False)


_MOST_IMAGES = {"cuda": 3000, "cpu": 1}
"""Largest number of periodic images for which the reference lists the pairs of priors. On a GPU an image takes 0.1 ms,
and to compile another search seconds."""


class _ReferenceLists(PairLists):
    """Lists of the reference search where they have few images."""

    def __call__(self, cutoff: float) -> NeighborList:
        if cutoff not in self.known and cutoff < math.inf:
            per_structure = number_of_images(self.system, cutoff) / max(1, self.system.num_systems)
            if per_structure <= _MOST_IMAGES[self.system.device.type]:
                self.known[cutoff] = neighbor_list(self.system, cutoff, backend="reference")
        return super().__call__(cutoff)


def _in_float64(potential: Potential, system: System) -> tuple[Potential, System]:
    return copy.deepcopy(potential).double().eval(), system.detach().to(dtype=torch.float64)


class _NotingList(NeighborList):
    """A list whose vectors are leaves of autograd, so that the virial can be computed from their gradients."""

    leaves: list[Tensor]

    def vectors(self, system: System) -> Tensor:
        leaf = super().vectors(system).detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf


class _NotingLists(PairLists):
    """Lists of this kind by cutoff."""

    def __init__(self, system: System):
        super().__init__(system)
        self.leaves: list[Tensor] = []

    def __call__(self, cutoff: float) -> NeighborList:
        if cutoff not in self.known:
            found = _NotingList(**vars(super().__call__(cutoff)))
            found.leaves = self.leaves
            self.known[cutoff] = found
        return self.known[cutoff]


def virial_terms(potential: Potential, system: System) -> float:
    """Return the sum of |d| |∂E/∂d| over the edges, eV: terms of the virial, which may cancel, as for a cell of one
    atom."""
    exact, system = _in_float64(potential, system)
    lists = _NotingLists(system)
    with torch.enable_grad():
        energies, _ = exact.atom_energies(system, lists)
        gradients = torch.autograd.grad(energies.sum(), lists.leaves, allow_unused=True)
    pairs = zip([leaf.detach() for leaf in lists.leaves], gradients, strict=True)
    return sum(float((d.norm(dim=1) * g.norm(dim=1)).sum()) for d, g in pairs if g is not None)


def require_result(
    found: Result,
    virial: Tensor | None,
    expected: Result,
    potential: Potential,
    system: System,
    precision: str,
    scale: float,
) -> None:
    """Compare a path with the potential.

    Args:
        found: of the path.
        virial: [B, 3, 3] eV of the path, float64; None if it was not computed.
        expected: `reference` of the same system.
        potential, system: of `expected`; to find the rounding error of PyTorch, which is large where features nearly
            cancel, as in a crystal of high symmetry.
        precision: which of `BOUNDS`.
        scale: eV, the largest energy of an atom before isolated atoms are subtracted.

    Raises:
        ValueError: energies or forces of the potential itself are not finite; names the atom.
        RuntimeError: energies or forces differ by more than `BOUNDS` and by more than four times PyTorch's error, or
            virials by more than `BOUNDS`.
    """
    assert found.atom_energies is not None and expected.atom_energies is not None
    assert found.forces is not None and expected.forces is not None
    finite = expected.atom_energies.isfinite() & expected.forces.isfinite().all(1)
    if not bool(finite.all()):
        raise ValueError(
            f"the model's energy or force is not finite at atom {int(finite.long().argmin())}: the structure is "
            "unphysical (atoms too close or too far apart?), or the model has weights that are not finite"
        )
    eager: Result | None = None

    def require(name: str, of: str, bound: float) -> None:
        nonlocal eager
        ours, theirs = getattr(found, of).double(), getattr(expected, of)
        if not float((ours - theirs).abs().max()) <= bound:
            eager = eager or potential.reference(system, create_graph=False)
            bound = max(bound, 4 * float((getattr(eager, of).double() - theirs).abs().max()))
        require_close(name, ours, theirs, bound)

    energy_bound, force_bound = BOUNDS[precision]
    scale = max(1.0, scale)
    require("energy of an atom, eV", "atom_energies", energy_bound * scale)
    require("energy of a structure, eV", "energy", energy_bound * scale * system.num_atoms)
    scale = max(1.0, float(expected.forces.abs().max()))
    require("force, eV/Å", "forces", force_bound * scale)
    if virial is not None and expected.stress is not None:
        theirs = expected.stress * system.volume.double()[:, None, None]
        # a virial is a sum over the atoms of forces times distances of a few Å
        bound = force_bound * max(scale * system.num_atoms, float(theirs.abs().max()))
        if not float((virial - theirs).abs().max()) <= bound:
            bound = max(bound, force_bound * virial_terms(potential, system))
        require_close("virial, eV", virial, theirs, bound)


def require_properties(
    found: dict[str, Tensor], expected: Result, potential: Potential, system: System, precision: str
) -> None:
    """Compare properties of a path with those of the potential.

    Args:
        found: of the path, by name.
        expected: `reference` of the same system.
        potential, system: to find the rounding error of PyTorch, which is large for sums that nearly cancel.
        precision: which of `BOUNDS`.

    Raises:
        RuntimeError: one differs by more than the bound of energies, and by more than four times PyTorch's error.
    """
    eager: Result | None = None
    for name in [*potential.properties, *(SPREADS if potential.others else ())]:
        theirs = expected.properties[name]
        atoms = 1 if potential.outputs[name].per_atom else system.num_atoms
        bound = BOUNDS[precision][name == "forces_std"] * max(1.0, float(theirs.abs().max())) * atoms
        if not float((found[name] - theirs).abs().max()) <= bound:
            eager = eager or potential.reference(system, forces=name == "forces_std", create_graph=False)
            bound = max(bound, 4 * float((eager.properties[name] - theirs).abs().max()))
        require_close(f"property '{name}'", found[name], theirs, bound)


def require_close(name: str, ours: Tensor, reference: Tensor, bound: float) -> None:
    """Raise RuntimeError when two results differ by more than a bound."""
    difference = float((ours - reference).abs().max()) if ours.numel() else 0.0
    if not difference <= bound:
        raise RuntimeError(
            f"the fused path does not agree with the reference in float64: {name}, differs by {difference:.3g} "
            f"(allowed {bound:.3g}). No result is returned; please report this if the structure makes sense, and call "
            "potential.reference(system) meanwhile"
        )


def extract_cluster(system: System, num_atoms: int, stress: bool) -> tuple[System, Tensor]:
    """Return the atoms nearest to the first one, as a molecule in vacuum (in a large box where the stress is checked).

    Also returns their indices in the structure, which ascend.
    """
    same = (system.batch == system.batch[0]).nonzero()[:, 0]
    distance = (system.pos[same] - system.pos[0]).norm(dim=1)
    places = torch.argsort(distance)[:num_atoms].sort().values
    chosen = same[places]
    pos = system.pos[chosen]
    box = (1000 if stress else 0) * torch.eye(3, dtype=pos.dtype, device=pos.device)
    cluster = System(
        z=system.z[chosen], pos=pos, cell=box, pbc=torch.zeros(3, dtype=torch.bool, device=pos.device),
        charge=system.charge[system.batch[:1]],
    )  # fmt: skip
    return cluster, places
