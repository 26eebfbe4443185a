"""A potential on the domain of one process: local atoms and copies of others, whose positions a host program moves.

Shapes: n local atoms, N with the copies after them, M rows of local atoms and ghosts, E directed edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.exchange import CopyExchange, DomainExchange
from ..neighbors import neighbor_list
from ..potential.potential import Potential, Result
from ..potential.refusals import SAME_PLACE
from ..system import System
from .check import extract_cluster, for_clusters, reference, require_result
from .edges import evaluate_edges, list_cutoff, refuse_global
from .select import constant_energies

__all__ = ["Domain", "DomainValues", "ReferenceDomain", "check_on_cluster"]


Array = NDArray[np.floating]

SKIN = 1.0
"""Å by which listed edges may be longer than the cutoff: they are listed anew when an atom has moved half as far."""


class DomainValues(NamedTuple):
    """Of one evaluation, float64.

    Attributes:
        energies: [n] eV.
        forces: [n, 3] eV/Å, those on the copies of the atoms in other domains included.
        virial: [n, 6] eV, Σ vector ⊗ dE/dvector over the edges of each local atom, made symmetric: xx, yy, zz, xy, xz,
            yz.
    """

    energies: Array
    forces: Array
    virial: Array


class Domain(ABC):
    """The local atoms of one process. All processes call the same methods in the same order.

    Args:
        potential: with parts that are local (`edges.refuse_global`).
        charge: total charge in e of the whole structure.

    Attributes:
        num_local: n.
        ids: [N] by which messages name the atoms.
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
        """Take other atoms.

        Args:
            z: [N] atomic numbers, the local atoms first.
            ids: [N] by which messages name them.
            num_local: n.
            exchange: of the ghosts.
            row_of: [N] row of each atom among those of local atoms and ghosts, as of `MpiExchange`; None: each copy is
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
        """Whether edges are to be listed, at these positions."""
        if self._listed_at is not None and _moved(pos, self._listed_at, self.num_local) <= SKIN:
            return False
        self._listed_at = pos.copy()
        return True

    def atoms_that_fit(self) -> int | None:
        """About how many local atoms there is memory for; None: not known."""
        return None

    def _add_ghost_forces(self, forces: Tensor) -> Array:
        """[M, 3] → [n, 3] float64."""
        n = self.num_local
        return (forces[:n].double() + self._exchange.reverse(forces[n:].double().contiguous())).cpu().numpy()

    def _coincident(self, receiver: int, sender: int) -> ValueError:
        names = self.ids[receiver], self.ids[sender]
        other = "its own periodic image" if names[0] == names[1] else f"atom {names[1]}"
        return ValueError(f"atom {names[0]} and {other} are at the same place, where energy and forces mean nothing")

    def _prepare(self) -> None:  # noqa: B027
        """Take what depends on the elements of the atoms alone."""

    @abstractmethod
    def _list(self, pos: NDArray[np.float64]) -> None:
        """List edges up to cutoff + SKIN."""

    @abstractmethod
    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        """Evaluate the edges that are within the cutoff."""

    @abstractmethod
    def describe(self) -> str:
        """What evaluates, in words."""


class ReferenceDomain(Domain):
    """By `edges.evaluate_edges`: any model, float64 or float32, CPU or GPU."""

    def __init__(self, potential: Potential, charge: float):
        super().__init__(potential, charge)
        self._isolated = None
        if potential.head is not None and potential.subtract_isolated:
            self._isolated = potential.isolated_energies().detach()

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
    """[n, 9] → [n, 6], see `DomainValues`; float64."""
    rows = virial.double()
    return (rows[:, [0, 4, 8, 1, 2, 5]] + rows[:, [0, 4, 8, 3, 6, 7]]) / 2


def list_edges(pos: NDArray[np.float64], num_local: int, cutoff: float) -> Tensor:
    """Edges [2, E] from local atoms to all atoms [N, 3] in Å within a cutoff, sorted by receiver, then sender."""
    everything = System(z=torch.ones(len(pos), dtype=torch.long), pos=torch.from_numpy(np.ascontiguousarray(pos)))
    found = neighbor_list(everything, cutoff)
    return found.edge_index[:, : int(found.row_ptr[num_local])].clone()


def _moved(pos: NDArray[np.float64], before: NDArray[np.float64], num_local: int) -> float:
    """Å by which the distance of an atom and a neighbor may have changed at most."""
    if not num_local:
        return 0.0
    moved = np.sqrt(np.square(pos - before).sum(1))
    return float(moved[:num_local].max() + moved.max())


# --- The check of a domain's kernels on their first use: against the potential in float64 ---

_CHECKED = 200
"""Atoms of the cluster."""


def check_on_cluster(other: Domain, z: NDArray[np.integer], pos: NDArray[np.float64], isolated: Tensor) -> None:
    """Evaluate a cluster of local atoms by itself, without other processes, and compare.

    Args:
        other: a domain with the kernels in question, whose atoms this function sets.
        z: [n] atomic numbers of the local atoms.
        pos: [≥ n, 3] Å, theirs first.
        isolated: [max_z] eV float64, the network's energies of atoms alone.

    Raises:
        RuntimeError: energies or forces differ.
    """
    n, potential = len(z), other.potential
    alone = System(
        z=torch.from_numpy(np.asarray(z, dtype=np.int64)), pos=torch.from_numpy(pos[:n].copy()),
        charge=torch.full((1,), other.charge, dtype=torch.float64),
    )  # fmt: skip
    cluster, _ = extract_cluster(alone, _CHECKED, False)
    m = cluster.num_atoms
    other.set_atoms(cluster.z.numpy(), np.arange(m), m, CopyExchange(m, torch.zeros(0, dtype=torch.long)))
    values = other(cluster.pos.numpy())
    placed = cluster.to(potential.device)
    expected = reference(for_clusters(potential), placed, False)
    assert expected.atom_energies is not None
    energies = torch.from_numpy(values.energies).to(potential.device)
    found = Result(
        energies.sum()[None] + potential.energy_shift, torch.from_numpy(values.forces).to(potential.device), None,
        energies,
    )  # fmt: skip
    network = expected.atom_energies - constant_energies(potential, placed)
    scale = float((network.abs() + isolated[cluster.z].to(network.device).abs()).max())
    require_result(found, None, expected, potential, placed, "native", scale)
