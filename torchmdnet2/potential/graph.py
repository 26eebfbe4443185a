"""Parts of a model: a representation turns a structure into per-atom features, a head reads them.

Shapes: N atoms, E directed edges, B structures, F features.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.exchange import Exchange, with_ghosts
from ..neighbors import NeighborList
from ..neighbors.neighbor_list import safe_norm
from ..neighbors.pairs import PairLists
from ..system import System
from .cells import CoulombInCells
from .output import Output

__all__ = ["Features", "Graph", "Head", "PropertyHead", "Representation", "atom_counts", "pool", "sum_over_systems"]


@dataclass(eq=False)
class Graph:
    """A structure with its edges, as a representation sees it.

    Edge vectors are formed in the precision of the positions and then rounded to the model's.

    Attributes:
        z: [N] atomic numbers of the receivers.
        batch: [N] structure of each atom.
        num_systems: B.
        charge: [B] total charges in e.
        receiver, sender: [E].
        vectors: [E, 3] pos[sender] + shift·cell − pos[receiver] in Å.
        distances: [E] in Å.
        system: the structure itself, for heads that read positions or pairs beyond the cutoff; None for atoms alone.
        pairs: its pair lists by cutoff, for such heads; None for atoms alone.
        readout: [N] the atoms that heads count; None means all.
        exchange: in a domain of a larger structure, where rows of its ghost atoms come from, which are senders beside
            the N atoms; None: there are none.
        ghost_z: their atomic numbers; None: there are none.
    """

    z: Tensor
    batch: Tensor
    num_systems: int
    charge: Tensor
    receiver: Tensor
    sender: Tensor
    vectors: Tensor
    distances: Tensor
    system: System | None = None
    pairs: PairLists | None = None
    readout: Tensor | None = None
    exchange: Exchange | None = None
    ghost_z: Tensor | None = None

    @classmethod
    def build(
        cls, system: System, neighbors: NeighborList, dtype: torch.dtype, pairs: PairLists | None = None
    ) -> Graph:
        """The graph of a system in the model's floating-point type."""
        vectors = neighbors.vectors(system).to(dtype)
        receiver, sender = neighbors.edge_index
        exchange = neighbors.exchange
        n = system.num_atoms if exchange is None else exchange.num_local
        return cls(
            z=system.z[:n],
            batch=system.batch[:n],
            num_systems=system.num_systems,
            charge=system.charge.to(dtype),
            receiver=receiver,
            sender=sender,
            vectors=vectors,
            distances=safe_norm(vectors),
            system=system,
            pairs=pairs or PairLists(system),
            exchange=exchange,
            ghost_z=None if exchange is None else system.z[n:],
        )

    @classmethod
    def isolated(cls, z: Tensor, dtype: torch.dtype) -> Graph:
        """One neutral structure per atom, without edges."""
        num = z.shape[0]
        none = torch.zeros(0, dtype=torch.long, device=z.device)
        return cls(
            z=z,
            batch=torch.arange(num, device=z.device),
            num_systems=num,
            charge=torch.zeros(num, dtype=dtype, device=z.device),
            receiver=none,
            sender=none,
            vectors=torch.zeros(0, 3, dtype=dtype, device=z.device),
            distances=torch.zeros(0, dtype=dtype, device=z.device),
        )

    @property
    def num_atoms(self) -> int:
        return self.z.shape[0]

    def senders(self, rows: Tensor) -> Tensor:
        """Rows of the atoms [N, …] → those that `sender` counts: ghosts too, where there are any."""
        return with_ghosts(rows, self.exchange)

    def element_rows(self, rows: Tensor, of_elements: Callable[[Tensor], Tensor]) -> Tensor:
        """As `senders`, of rows that are a function of the atomic numbers: nothing is exchanged."""
        return rows if self.ghost_z is None else torch.cat([rows, of_elements(self.ghost_z)])


@dataclass(eq=False)
class Features:
    """What a representation returns.

    Attributes:
        x: [N, F] scalar features.
        v: [N, 3, F] vector features, None where the model has none.
        charges: [N, stages, channels] latent charges in e, float64; None where the model has none. Over each structure,
            every channel of every stage sums to the total charge.
        energies: [N] energies of the atoms in the head's unit, which a scalar head adds to its own; None: none.
    """

    x: Tensor
    v: Tensor | None = None
    charges: Tensor | None = None
    energies: Tensor | None = None

    @property
    def partial_charges(self) -> Tensor | None:
        """[N] the mean over the channels of the last stage, which sums to the total charge as each of them does."""
        return None if self.charges is None else self.charges[:, -1].mean(-1)


class Representation(nn.Module, ABC):
    """Structure → per-atom features. Registered in `torchmdnet2.registry.REPRESENTATIONS`.

    Attributes:
        cutoff: Å; the neighbor list is made with it.
        hidden_channels: F.
        max_z: atomic numbers 0 … max_z − 1 can be represented.
        local: an atom without neighbors does not feel the other atoms of its structure.
        reads_charge: the total charge changes the scalar features.
        reads_spin: the spin multiplicity changes the features.
        takes_ghosts: reads what atoms send through `Graph.senders`, so that it can be evaluated in domains.
        outputs: what it predicts itself: `output.CHARGES` where its features have latent charges.
        gives_vectors: its features have vectors; None: not declared, so that heads find out when they are evaluated.
    """

    cutoff: float
    hidden_channels: int
    max_z: int
    outputs: tuple[Output, ...] = ()
    gives_vectors: bool | None = None
    local: bool = True
    reads_charge: bool = False
    reads_spin: bool = False
    takes_ghosts: bool = False

    @abstractmethod
    def forward(self, graph: Graph) -> Features:
        """Per-atom features; must not depend on the order of edges.

        Args:
            graph: N atoms and their E edges; see `Graph`.
        """


class _Readout(nn.Module, ABC):
    reads_charge: bool = False
    """The total charge changes what this gives, with the same features."""
    reads_vectors: bool = False
    """It needs features with vectors."""

    def check(self, system: System) -> None:
        """Raise ValueError for a structure that this cannot do. `forward` need not look: looking waits for a GPU."""


class Head(_Readout):
    """Per-atom features → per-atom energies. Registered in `torchmdnet2.registry.HEADS`.

    Attributes:
        pair_cutoff: Å of the list that it asks `Graph.pairs` for, infinity for all pairs; None: it reads no pairs.
    """

    pair_cutoff: float | None = None

    def in_cells(self, coulomb: CoulombInCells) -> Head:
        """What takes the place of this in periodic cells, as of `Prior.in_cells`: itself.

        Args:
            coulomb: how Coulomb energies are summed.
        """
        return self

    @abstractmethod
    def forward(self, features: Features, graph: Graph) -> Tensor:
        """[N] atomic energies in the model's unit (scaled to eV by the Potential).

        Args:
            features: of the representation, for N atoms.
            graph: the graph that they were computed from.
        """


class PropertyHead(_Readout):
    """Per-atom features → a property that is not the energy. Registered in `torchmdnet2.registry.HEADS`.

    Attributes:
        property: its name, the key of `Result.properties`.
        per: "system" or "atom", what there is one value of.
        shape: of a value: () a number, (3,) a vector.
        unit: of its numbers; "" for plain numbers, or where the unit is that of the labels.
        reads_edges: it reads edges, pair lists or latent charges, not only scalar and vector features, elements and
            positions. Beside a network on kernels, the edges are searched once more for such a head.
    """

    property: str
    per: Literal["system", "atom"] = "system"
    shape: tuple[int, ...] = ()
    unit: str = ""
    reads_edges: bool = True

    @builtins.property  # its name means something else here
    def output(self) -> Output:
        """What it declares to predict. The Potential refuses values of another shape."""
        return Output(self.property, self.per, self.shape, self.unit)

    @abstractmethod
    def forward(self, features: Features, graph: Graph) -> Tensor:
        """The property of each structure, [B, …] float64, or of each atom, [N, …].

        Args:
            features: of the representation, for N atoms.
            graph: the graph that they were computed from.
        """


def pool(values: Tensor, graph: Graph, reduce: str = "sum") -> Tensor:
    """Sum or mean of per-atom values [N, …] over the atoms that are read out of each structure: [B, …] float64.

    Raises:
        ValueError: `reduce` is neither "sum" nor "mean".
    """
    if graph.readout is not None:
        values = values * graph.readout.reshape(-1, *[1] * (values.ndim - 1))
    total = sum_over_systems(values, graph.batch, graph.num_systems)
    if reduce == "sum":
        return total
    if reduce != "mean":
        raise ValueError(f"reduce must be 'sum' or 'mean', got '{reduce}'")
    return total / atom_counts(graph).clamp(min=1).reshape(-1, *[1] * (values.ndim - 1))


def atom_counts(graph: Graph) -> Tensor:
    """Number of atoms of each structure that are read out, [B] float64."""
    ones = torch.ones_like(graph.z, dtype=torch.float64) if graph.readout is None else graph.readout.double()
    return sum_over_systems(ones, graph.batch, graph.num_systems)


def sum_over_systems(values: Tensor, batch: Tensor, num_systems: int) -> Tensor:
    """Sum per-atom values [N, …] in float64 over each structure: [B, …]."""
    values = values.double()
    total = torch.zeros(num_systems, *values.shape[1:], dtype=torch.float64, device=values.device)
    return total.index_add(0, batch, values)
