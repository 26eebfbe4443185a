"""A potential on edges that a host program brings: domains with ghost atoms, as LAMMPS has them.

A host divides a periodic structure into domains. Each process has its local atoms and, as ghosts, copies of atoms of
other domains and of periodic images. The energy of the local atoms depends on edges as far as the model's receptive
field reaches: num_layers message layers and the embedding, so that ghosts within (num_layers + 1) cutoffs of the local
atoms, with all of the edges among them, are enough. Energies of local atoms sum up to the energy of the structure;
forces on ghosts belong to the atoms that they are copies of.

Shapes: N atoms, ghosts included, n of them local, E directed edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .derivatives import gradients_of
from .neighbors import NeighborList
from .neighbors.result import safe_norm, sort_edges
from .potential import Potential
from .priors.pairs import PairLists
from .refusals import SAME_PLACE
from .system import System

__all__ = ["EdgeResult", "evaluate_edges"]


@dataclass(eq=False)
class EdgeResult:
    """What the local atoms give.

    Attributes:
        energy: [] eV float64, of the local atoms; the potential's `energy_shift`, which belongs to the structure, is
            not in it.
        atom_energies: [n] eV float64.
        edge_gradients: [E, 3] eV/Å, derivative of `energy` with respect to each edge vector.
        forces: [N, 3] eV/Å, on local atoms and ghosts; to be summed over the copies of an atom.
        virial: [3, 3] eV, Σ vector ⊗ gradient over the edges. The stress is the sum over all domains / volume.
    """

    energy: Tensor
    atom_energies: Tensor
    edge_gradients: Tensor
    forces: Tensor
    virial: Tensor


def evaluate_edges(
    potential: Potential,
    z: Tensor,
    edge_index: Tensor,
    vectors: Tensor,
    num_local: int,
    charge: float = 0.0,
    cutoff: float | None = None,
) -> EdgeResult:
    """Energies of the local atoms, and their derivative with respect to each edge vector, by autograd.

    Args:
        potential: whose priors, if any, are sums over pairs.
        z: [N] atomic numbers, the local atoms first.
        edge_index: [2, E] integers (receiver, sender), both directions of each pair, in any order.
        vectors: [E, 3] Å from the receiver to the sender; edges beyond the cutoff may be listed.
        num_local: n.
        charge: total charge in e of the whole structure.
        cutoff: Å, up to which all edges are listed; None: the potential's own cutoff.

    Raises:
        ValueError: shapes do not fit, a vector is not finite, or a part of the potential needs the whole structure:
            charges that the network shares out, sums over all pairs, Ewald and particle-mesh sums, means over atoms.
        UnknownElement, UntrainedCharge: the model was not trained on an atom's element or on this charge.
    """
    reach = potential.cutoff if cutoff is None else float(cutoff)
    _check(potential, z, edge_index, vectors, num_local, reach)
    system = _system(z, vectors, charge)
    potential.check_charge_and_spin(system)
    with torch.inference_mode(False), torch.enable_grad():
        given = vectors.detach().clone().requires_grad_()
        lists = _EdgeLists(system, edge_index, given, reach)
        energies, _ = potential.atom_energies(lists.system, lists)
        local = energies[:num_local]
        gradient = gradients_of(local, {"vectors": given}, False)["vectors"]
    receiver, sender = edge_index
    forces = torch.zeros(z.shape[0], 3, dtype=gradient.dtype, device=gradient.device)
    forces = forces.index_add(0, receiver, gradient).index_add(0, sender, -gradient)
    local = local.detach()
    if not bool(local.isfinite().all()):
        raise ValueError(
            "a prior reads positions, which a host's edges do not have: use priors that are sums over pairs"
        )
    return EdgeResult(local.sum(), local, gradient, forces, vectors.T @ gradient)


def _check(potential: Potential, z: Tensor, edge_index: Tensor, vectors: Tensor, num_local: int, reach: float) -> None:
    num = z.shape[0]
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or vectors.shape != (edge_index.shape[1], 3):
        raise ValueError(
            f"edge_index must be [2, E] and vectors [E, 3], got {list(edge_index.shape)} and {list(vectors.shape)}"
        )
    if not 0 <= num_local <= num:
        raise ValueError(f"num_local is {num_local}, and there are {num} atoms")
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num:
        raise ValueError(f"edge_index names an atom that is not one of the {num}")
    broken = ~vectors.isfinite().all(1)
    if bool(broken.any()):
        raise ValueError(f"edge {int(broken.nonzero()[0, 0])}: its vector is not finite")
    short = vectors.square().sum(1) < SAME_PLACE**2
    if bool(short.any()):
        edge = int(short.nonzero()[0, 0])
        raise ValueError(f"edge {edge}: its atoms {edge_index[:, edge].tolist()} are at the same place")
    potential.check_elements(z)
    if not potential.representation.local:
        name = type(potential.representation).__name__
        raise ValueError(f"{name} shares out the charge of the whole structure, which domains do not know")
    if getattr(potential.head, "reduce", "sum") != "sum":
        raise ValueError("the head takes a mean over the structure, which domains do not know")
    if potential.properties:
        raise ValueError("properties are those of whole structures: leave them out of a model for domains")
    longest = max([potential.cutoff, *(p.cutoff for p in potential.priors if p.cutoff is not None)])
    if math.isinf(longest):
        raise ValueError("a prior sums over all pairs of the structure, which domains do not know")
    if longest > reach:
        raise ValueError(
            f"the edges are listed up to {reach} Å, and the potential needs them up to {longest} Å: give cutoff"
        )
    if any(prior.uses_charges for prior in potential.priors):
        raise ValueError("a prior uses charges that the network predicts for the whole structure")


def _system(z: Tensor, vectors: Tensor, charge: float) -> System:
    """Atoms whose positions are not known."""
    pos = torch.full((z.shape[0], 3), torch.nan, dtype=vectors.dtype, device=vectors.device)
    return System(z=z, pos=pos, charge=torch.full((1,), charge, dtype=vectors.dtype, device=vectors.device))


class _EdgeList(NeighborList):
    """Edges with vectors that are given."""

    given: Tensor

    def vectors(self, system: System) -> Tensor:
        return self.given


class _EdgeLists(PairLists):
    """Lists cut out of the edges that are given.

    Args:
        system: the atoms.
        edge_index, vectors: [2, E] and [E, 3] as given.
        reach: Å.
    """

    def __init__(self, system: System, edge_index: Tensor, vectors: Tensor, reach: float):
        super().__init__(system)
        self._edges, self._vectors, self._reach = edge_index.long(), vectors, reach

    def __call__(self, cutoff: float) -> NeighborList:
        if cutoff not in self.known:
            if cutoff > self._reach:
                raise ValueError(
                    f"a list up to {cutoff} Å is needed, and the edges end at {self._reach} Å: give cutoff"
                )
            self.known[cutoff] = self._list(cutoff)
        return self.known[cutoff]

    def _list(self, cutoff: float) -> _EdgeList:
        within = (safe_norm(self._vectors.detach()) < cutoff).nonzero()[:, 0]
        order = within[torch.argsort(self._edges[0, within], stable=True)]
        receiver, sender = self._edges[:, order]
        none = torch.zeros(order.shape[0], 3, dtype=torch.long, device=order.device)
        rows = sort_edges(receiver, receiver, none, self.system.num_atoms, cutoff).row_ptr
        found = _EdgeList(torch.stack([receiver, sender]), none, rows, cutoff)
        found.given = self._vectors[order]
        return found
