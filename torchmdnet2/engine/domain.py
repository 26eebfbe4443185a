"""Domains: a potential on the atoms of one process and copies of others, whose positions a host program moves.

A host such as LAMMPS divides a periodic structure into domains. Each process has its local atoms and, as ghosts, copies
of atoms of other domains and of periodic images. `evaluate_edges` takes the edges that a host brings. The energy of the
local atoms depends on edges as far as the model's receptive field reaches: num_layers message layers and the embedding,
so that ghosts within (num_layers + 1) cutoffs of the local atoms, with all of the edges among them, are enough. With an
exchange (exchange.py), edges to the local atoms, and ghosts within one cutoff, are. Energies of local atoms sum up to
the energy of the structure; forces on ghosts belong to the atoms that they are copies of.

Shapes: n local atoms, N with the copies after them, M rows of local atoms and ghosts, E directed edges.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.exchange import CopyExchange, DomainExchange, Exchange
from ..neighbors import NeighborList, neighbor_list
from ..neighbors.neighbor_list import SAME_PLACE, row_pointers, safe_norm
from ..neighbors.pairs import PairLists
from ..potential.derivatives import gradients_of
from ..potential.potential import Potential, Result
from ..system import System
from .check import extract_cluster, for_any_composition, reference, require_result
from .select import constant_energies

__all__ = [
    "Domain",
    "DomainValues",
    "EdgeResult",
    "ReferenceDomain",
    "check_on_cluster",
    "evaluate_edges",
    "list_cutoff",
    "refuse_global",
]


Array = NDArray[np.floating]

SKIN = 1.0
"""Å by which listed edges may be longer than the cutoff: a new list is made when an atom has moved half as far."""


class DomainValues(NamedTuple):
    """Results of one evaluation, float64.

    Attributes:
        energies: [n] eV.
        forces: [n, 3] eV/Å, with the forces on copies of the atoms in other domains.
        virial: [n, 6] eV, Σ vector ⊗ dE/dvector over the edges of each local atom, made symmetric: xx, yy, zz, xy, xz,
            yz.
    """

    energies: Array
    forces: Array
    virial: Array


class Domain(ABC):
    """Evaluates the local atoms of one process, for parallel programs.

    All processes call the same methods in the same order.

    Args:
        potential: with parts that are local (`refuse_global`).
        charge: total charge in e of the whole structure.

    Attributes:
        num_local: n.
        ids: [N] numbers of the atoms in messages.
        numbers: [M] atomic numbers of the rows.
        num_edges: E of the last evaluation.

    Raises:
        ValueError: a part of the potential needs the whole structure.
        UntrainedCharge: the model does not know the charge.
    """

    def __init__(self, potential: Potential, charge: float):
        refuse_global(potential)
        nobody = torch.zeros(0, dtype=torch.long, device=potential.device)
        neutral = torch.full((1,), charge, dtype=torch.float64, device=potential.device)
        potential.check_charge_and_spin(
            System(z=nobody, pos=torch.zeros(0, 3, device=potential.device), charge=neutral)
        )
        self.potential, self.charge, self.cutoff = potential, charge, list_cutoff(potential)
        self.num_local, self.num_edges = 0, 0
        self._listed_at: NDArray[np.float64] | None = None

    def set_atoms(
        self,
        z: NDArray[np.integer],
        ids: NDArray[np.integer],
        num_local: int,
        exchange: DomainExchange,
        row_of: NDArray[np.integer] | None = None,
    ) -> None:
        """Replace the atoms.

        Args:
            z: [N] atomic numbers, the local atoms first.
            ids: [N] numbers of the atoms in messages.
            num_local: n.
            exchange: of the ghosts.
            row_of: [N] row of each atom among those of local atoms and ghosts, as for `MpiExchange`; None: each copy is
                a separate ghost.

        Raises:
            ValueError, UnknownElement: the potential does not know an element.
        """
        self.ids, self.num_local, self._exchange = ids, num_local, exchange
        self._row_of = np.arange(len(z)) if row_of is None else np.asarray(row_of, dtype=np.int64)
        self.numbers = np.zeros(num_local + exchange.num_ghosts, np.int64)
        self.numbers[self._row_of] = z
        self._listed_at = None
        self._prepare()

    def __call__(self, pos: NDArray[np.float64]) -> DomainValues:
        """Evaluate positions [N, 3] in Å.

        Raises:
            ValueError: two atoms are at the same place, or results are not finite; names the atoms.
        """
        if self._must_list(pos):
            self._list(pos)
        values = self._evaluate(pos)
        if not self._is_finite(values):
            wrong = ~np.logical_and.reduce([np.isfinite(field.reshape(self.num_local, -1)).all(1) for field in values])
            atom = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"energy or force of atom {self.ids[atom]} is not finite: the simulation has blown up")
        return values

    def _is_finite(self, values: DomainValues) -> bool:
        return all(np.isfinite(field.sum()) for field in values)

    def _must_list(self, pos: NDArray[np.float64]) -> bool:
        """Return whether a new list is needed at these positions."""
        if self._listed_at is not None and _moved(pos, self._listed_at, self.num_local) <= SKIN:
            return False
        self._listed_at = pos.copy()
        return True

    def atoms_that_fit(self) -> int | None:
        """Return the approximate number of local atoms that fit into memory; None if it is not known."""
        return None

    def _add_ghost_forces(self, forces: Tensor) -> Array:
        """Add forces on ghosts to those on their atoms: [M, 3] → [n, 3] float64."""
        n = self.num_local
        return (forces[:n].double() + self._exchange.reverse(forces[n:].double().contiguous())).cpu().numpy()

    def _coincident(self, receiver: int, sender: int) -> ValueError:
        names = self.ids[receiver], self.ids[sender]
        other = "its own periodic image" if names[0] == names[1] else f"atom {names[1]}"
        return ValueError(f"atom {names[0]} and {other} are at the same place, where energy and forces mean nothing")

    def _prepare(self) -> None:  # noqa: B027
        """Compute what depends on the elements only."""

    @abstractmethod
    def _list(self, pos: NDArray[np.float64]) -> None:
        """List edges up to cutoff + SKIN."""

    @abstractmethod
    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        """Evaluate the edges that are within the cutoff."""

    @abstractmethod
    def describe(self) -> str:
        """Return the path that evaluates the domain, in words."""


class ReferenceDomain(Domain):
    """Evaluates a domain by `evaluate_edges`: any model, float64 or float32, CPU or GPU."""

    def __init__(self, potential: Potential, charge: float):
        super().__init__(potential, charge)
        self._isolated = potential.subtracted_energies()

    def _list(self, pos: NDArray[np.float64]) -> None:
        device = self.potential.device
        edges = list_edges(pos, self.num_local, self.cutoff + SKIN)
        self._edges, self._numbers = edges.to(device), torch.from_numpy(self.numbers).to(device)
        self._rows = torch.stack([edges[0], torch.from_numpy(self._row_of)[edges[1]]]).to(device)

    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        where = torch.from_numpy(pos).to(self.potential.device)
        receiver, sender = self._edges
        vectors = where.index_select(0, sender) - where.index_select(0, receiver)
        square = vectors.square().sum(1)
        if bool((square < SAME_PLACE**2).any()):
            raise self._coincident(*self._edges[:, int(square.argmin())].tolist())
        within = square < self.cutoff**2
        edges, vectors = self._rows[:, within], vectors[within]
        self.num_edges = vectors.shape[0]
        found = evaluate_edges(
            self.potential, self._numbers, edges, vectors, self.num_local, self.charge, self.cutoff, self._exchange,
            self._isolated,
        )  # fmt: skip
        products = (vectors[:, :, None] * found.edge_gradients[:, None]).flatten(1)
        virial = products.new_zeros(self.num_local, 9).index_add(0, edges[0], products)
        return DomainValues(
            found.atom_energies.cpu().numpy(), self._add_ghost_forces(found.forces), voigt(virial).cpu().numpy()
        )

    def describe(self) -> str:
        kind, dtype = type(self.potential.representation).__name__, str(self.potential.dtype).removeprefix("torch.")
        return f"{kind} by autograd, {dtype}, on {self.potential.device}"


def voigt(virial: Tensor) -> Tensor:
    """Return virials [n, 9] as [n, 6], see `DomainValues`; float64."""
    rows = virial.double()
    return (rows[:, [0, 4, 8, 1, 2, 5]] + rows[:, [0, 4, 8, 3, 6, 7]]) / 2


def list_edges(pos: NDArray[np.float64], num_local: int, cutoff: float) -> Tensor:
    """Return edges [2, E] from local atoms to all atoms [N, 3] in Å within a cutoff, sorted by receiver, then
    sender."""
    everything = System(z=torch.ones(len(pos), dtype=torch.long), pos=torch.from_numpy(np.ascontiguousarray(pos)))
    found = neighbor_list(everything, cutoff)
    return found.edge_index[:, : int(found.row_ptr[num_local])].clone()


def _moved(pos: NDArray[np.float64], before: NDArray[np.float64], num_local: int) -> float:
    """Return the largest possible change of the distance between an atom and a neighbor, Å."""
    if not num_local:
        return 0.0
    moved = np.sqrt(np.square(pos - before).sum(1))
    return float(moved[:num_local].max() + moved.max())


# --- The check of a domain's kernels on their first use: against the potential in float64 ---

_CHECKED = 200
"""Atoms of the cluster."""


def check_on_cluster(
    other: Domain, z: NDArray[np.integer], pos: NDArray[np.float64], isolated: Tensor, precision: str = "native"
) -> None:
    """Compare a domain with the potential on a cluster of local atoms, without other processes.

    Args:
        other: a domain with the kernels in question, whose atoms this function sets.
        z: [n] atomic numbers of the local atoms.
        pos: [≥ n, 3] Å, those of the local atoms first.
        isolated: [max_z] eV float64, energies of isolated atoms by the network.
        precision: of the kernels, "native" or "mixed".

    Raises:
        RuntimeError: energies or forces differ.
    """
    n, potential = len(z), for_any_composition(other.potential)
    alone = System(
        z=torch.from_numpy(np.asarray(z, dtype=np.int64)), pos=torch.from_numpy(pos[:n].copy()),
        charge=torch.full((1,), other.charge, dtype=torch.float64),
    )  # fmt: skip
    cluster, _ = extract_cluster(alone, _CHECKED, False)
    m = cluster.num_atoms
    other.set_atoms(cluster.z.numpy(), np.arange(m), m, CopyExchange(m, torch.zeros(0, dtype=torch.long)))
    values = other(cluster.pos.numpy())
    placed = cluster.to(potential.device)
    expected = reference(potential, placed, False)
    assert expected.atom_energies is not None
    energies = torch.from_numpy(values.energies).to(potential.device)
    found = Result(
        energies.sum()[None] + potential.energy_shift, torch.from_numpy(values.forces).to(potential.device), None,
        energies,
    )  # fmt: skip
    network = expected.atom_energies - constant_energies(potential, placed)
    scale = float((network.abs() + isolated[cluster.z].to(network.device).abs()).max())
    require_result(found, None, expected, potential, placed, precision, scale)


@dataclass(eq=False)
class EdgeResult:
    """Energies of the local atoms, and their derivatives.

    Attributes:
        energy: [] eV float64, of the local atoms; without the potential's `energy_shift`, which
            belongs to the structure.
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
    """Return energies of the local atoms, and their derivative with respect to each edge vector, by autograd.

    Args:
        potential: its priors must be sums over pairs.
        z: [N] atomic numbers, the local atoms first.
        edge_index: [2, E] integers (receiver, sender), both directions of each pair, in any order; with an exchange,
            all edges whose receiver is local, and no others.
        vectors: [E, 3] Å from the receiver to the sender; edges beyond the cutoff may be listed.
        num_local: n.
        charge: total charge in e of the whole structure.
        cutoff: Å, up to which all edges are listed; None: the potential's own cutoff.
        exchange: takes what the layers of the model read of ghosts from their owners; all domains call this function,
            also those without atoms. None: ghosts are evaluated here, and need edges too.
        isolated: `potential.subtracted_energies()`, if known.

    Raises:
        ValueError: shapes do not fit, a vector is not finite, or a part of the potential needs the whole structure:
            charges that the network distributes, sums over all pairs, Ewald and particle-mesh sums, means over atoms.
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
    """Return the distance in Å up to which a potential needs edges; infinity for a sum over all pairs."""
    return max([potential.cutoff, *(p.cutoff for p in potential.priors if p.cutoff is not None)])


def refuse_global(potential: Potential) -> None:
    """Raise ValueError for a potential with parts that need the whole structure, which no process of LAMMPS has."""
    if not potential.representation.local:
        name = type(potential.representation).__name__
        raise ValueError(f"{name} distributes the charge of the whole structure, of which each process has a part")
    if getattr(potential.head, "reduce", "sum") != "sum":
        raise ValueError("the head takes a mean over the structure, of which each process has a part")
    if potential.properties:
        raise ValueError(
            f"this model predicts {', '.join(potential.properties)} from the whole structure, of which each process "
            "has a part: LAMMPS needs a model trained without; md, ASE and OpenMM run this one"
        )
    if math.isinf(list_cutoff(potential)):
        raise ValueError("a prior sums over all pairs of the structure, of which each process has a part")
    for prior in potential.priors:
        if prior.uses_charges:
            raise ValueError("a prior uses charges that the network predicts for the whole structure")
        if prior.needs_whole:
            raise ValueError(prior.needs_whole)
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
    """Return a system of atoms whose positions are not known."""
    pos = torch.full((z.shape[0], 3), torch.nan, dtype=vectors.dtype, device=vectors.device)
    return System(z=z, pos=pos, charge=torch.full((1,), charge, dtype=vectors.dtype, device=vectors.device))


class _EdgeList(NeighborList):
    """Edges with given vectors."""

    given: Tensor

    def vectors(self, system: System) -> Tensor:
        return self.given


class _EdgeLists(PairLists):
    """Lists of shorter cutoffs, cut out of the given edges.

    Args:
        system: the atoms.
        edge_index, vectors: [2, E] and [E, 3] as given.
        reach: Å.
        exchange: that of the ghosts.
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
