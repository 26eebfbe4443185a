"""A potential on edges that a host program brings: domains with ghost atoms, as LAMMPS has them.

A host divides a periodic structure into domains. Each process has its local atoms and, as ghosts, copies of atoms of
other domains and of periodic images. The energy of the local atoms depends on edges as far as the model's receptive
field reaches: num_layers message layers and the embedding, so that ghosts within (num_layers + 1) cutoffs of the local
atoms, with all of the edges among them, are enough. With an exchange (exchange.py), edges to the local atoms, and
ghosts within one cutoff, are. Energies of local atoms sum up to the energy of the structure; forces on ghosts belong to
the atoms that they are copies of.

Shapes: N atoms, ghosts included, n of them local, E directed edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.exchange import Exchange
from ..neighbors import NeighborList
from ..neighbors.neighbor_list import row_pointers, safe_norm
from ..neighbors.pairs import PairLists
from ..potential.derivatives import gradients_of
from ..potential.potential import Potential
from ..potential.refusals import SAME_PLACE
from ..priors import Coulomb
from ..system import System

__all__ = ["EdgeResult", "evaluate_edges", "list_cutoff", "refuse_global"]


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
    exchange: Exchange | None = None,
    isolated: Tensor | None = None,
) -> EdgeResult:
    """Energies of the local atoms, and their derivative with respect to each edge vector, by autograd.

    Args:
        potential: whose priors, if any, are sums over pairs.
        z: [N] atomic numbers, the local atoms first.
        edge_index: [2, E] integers (receiver, sender), both directions of each pair, in any order; with an exchange,
            all edges whose receiver is local, and no others.
        vectors: [E, 3] Å from the receiver to the sender; edges beyond the cutoff may be listed.
        num_local: n.
        charge: total charge in e of the whole structure.
        cutoff: Å, up to which all edges are listed; None: the potential's own cutoff.
        exchange: takes what the layers of the model read of ghosts from their owners; all domains call this function,
            also those without atoms. None: ghosts are evaluated here, and need edges too.
        isolated: `potential.isolated_energies()`, where they are known.

    Raises:
        ValueError: shapes do not fit, a vector is not finite, or a part of the potential needs the whole structure:
            charges that the network shares out, sums over all pairs, Ewald and particle-mesh sums, means over atoms.
        UnknownElement, UntrainedCharge: the model was not trained on an atom's element or on this charge.
    """
    reach = potential.cutoff if cutoff is None else float(cutoff)
    refuse_global(potential)
    _check(potential, z, edge_index, vectors, num_local, reach, exchange)
    system = _system(z, vectors, charge)
    potential.check_charge_and_spin(system)
    anywhere = system.replace(pos=torch.zeros_like(system.pos))  # of interest are elements and charges
    for prior in potential.priors:
        prior.check(anywhere)
    with torch.inference_mode(False), torch.enable_grad():
        given = vectors.detach().clone().requires_grad_()
        lists = _EdgeLists(system, edge_index, given, reach, exchange)
        energies, _ = potential.atom_energies(lists.system, lists, isolated)
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


def list_cutoff(potential: Potential) -> float:
    """Å up to which a potential needs edges; infinity for a sum over all pairs."""
    return max([potential.cutoff, *(p.cutoff for p in potential.priors if p.cutoff is not None)])


def refuse_global(potential: Potential) -> None:
    """Raise ValueError for a potential with parts that need the whole structure, which domains do not know."""
    if not potential.representation.local:
        name = type(potential.representation).__name__
        raise ValueError(f"{name} shares out the charge of the whole structure, which domains do not know")
    if getattr(potential.head, "reduce", "sum") != "sum":
        raise ValueError("the head takes a mean over the structure, which domains do not know")
    if potential.properties:
        raise ValueError(
            f"this model predicts {', '.join(potential.properties)}, properties of whole structures, which domains do "
            "not know: LAMMPS needs a model trained without; md, ASE and OpenMM run this one"
        )
    if math.isinf(list_cutoff(potential)):
        raise ValueError("a prior sums over all pairs of the structure, which domains do not know")
    for prior in potential.priors:
        if prior.uses_charges:
            raise ValueError("a prior uses charges that the network predicts for the whole structure")
        if isinstance(prior, Coulomb) and prior.energy.method in ("ewald", "pme"):
            raise ValueError(
                f"the prior 'coulomb' with method '{prior.energy.method}' sums over the whole structure, which domains "
                "do not know: method 'reaction_field' is a sum over near pairs"
            )
        if isinstance(prior, Coulomb) and prior.source == "atom":
            raise ValueError("the prior 'coulomb' has charges by atom, whose order domains do not keep")
        inner = getattr(prior, "potential", None)
        if isinstance(inner, Potential):
            refuse_global(inner)
            if inner.energy_shift:
                raise ValueError("a prior is a potential with an energy_shift of the whole structure")


def _check(
    potential: Potential, z: Tensor, edge_index: Tensor, vectors: Tensor, num_local: int, reach: float,
    exchange: Exchange | None,
) -> None:  # fmt: skip
    num = z.shape[0]
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or vectors.shape != (edge_index.shape[1], 3):
        raise ValueError(
            f"edge_index must be [2, E] and vectors [E, 3], got {list(edge_index.shape)} and {list(vectors.shape)}"
        )
    if not 0 <= num_local <= num:
        raise ValueError(f"num_local is {num_local}, and there are {num} atoms")
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num:
        raise ValueError(f"edge_index names an atom that is not one of the {num}")
    if exchange is not None:
        if (exchange.num_local, exchange.num_local + exchange.num_ghosts) != (num_local, num):
            raise ValueError(
                f"the exchange is one of {exchange.num_local} local atoms and {exchange.num_ghosts} ghosts, not of "
                f"{num_local} and {num - num_local}"
            )
        if edge_index.numel() and int(edge_index[0].max()) >= num_local:
            raise ValueError("with an exchange, the receivers of edges are local atoms, and one is a ghost")
        if not potential.representation.takes_ghosts:
            name = type(potential.representation).__name__
            raise ValueError(f"{name} reads no rows of ghosts (Graph.senders): give ghosts edges, and no exchange")
    broken = ~vectors.isfinite().all(1)
    if bool(broken.any()):
        raise ValueError(f"edge {int(broken.nonzero()[0, 0])}: its vector is not finite")
    short = vectors.square().sum(1) < SAME_PLACE**2
    if bool(short.any()):
        edge = int(short.nonzero()[0, 0])
        raise ValueError(f"edge {edge}: its atoms {edge_index[:, edge].tolist()} are at the same place")
    potential.check_elements(z)
    longest = list_cutoff(potential)
    if longest > reach:
        raise ValueError(
            f"the edges are listed up to {reach} Å, and the potential needs them up to {longest} Å: give cutoff"
        )


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
        exchange: of ghosts.
    """

    def __init__(
        self, system: System, edge_index: Tensor, vectors: Tensor, reach: float, exchange: Exchange | None
    ):  # fmt: skip
        super().__init__(system)
        self._exchange = exchange
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
        rows = row_pointers(receiver, self.system.num_atoms)
        found = _EdgeList(torch.stack([receiver, sender]), none, rows, cutoff, exchange=self._exchange)
        found.given = self._vectors[order]
        return found
