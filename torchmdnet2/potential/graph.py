"""Base classes of models: a representation turns a structure into features of atoms, a head reads the features.

Shapes: N atoms, E directed edges, B structures, F features.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..core.exchange import Exchange, with_ghosts
from ..neighbors import NeighborList
from ..neighbors.neighbor_list import safe_norm
from ..neighbors.pairs import PairLists
from ..system import System, outside_transforms
from .cells import CoulombInCells
from .output import Output

__all__ = [
    "Features", "Graph", "Head", "PropertyHead", "Representation", "atom_counts", "centered_positions", "charge_dipole",
    "molecule_dipole", "pool", "sum_over_systems",
]  # fmt: skip


@dataclass(eq=False)
class Graph:
    """A structure with its edges, as a representation sees it.

    Edge vectors are computed in the precision of the positions and then rounded to the model's.

    Attributes:
        z: [N] atomic numbers of the receivers.
        batch: [N] structure of each atom.
        num_systems: B.
        charge: [B] total charges in e.
        receiver, sender: [E].
        vectors: [E, 3] pos[sender] + shift·cell − pos[receiver] in Å.
        distances: [E] in Å.
        system: the structure, for heads that read positions or pairs beyond the cutoff; None for isolated atoms.
        pairs: pair lists by cutoff, for such heads; None for isolated atoms.
        readout: [N] True for atoms that heads count; None means all.
        exchange: in a domain of a larger structure, the source of rows of ghost atoms, which are senders besides the N
            atoms; None without ghosts.
        ghost_z: atomic numbers of the ghosts; None without ghosts.
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
        """Build the graph of a system in the model's floating-point type."""
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
        """Build a graph in which each atom is a neutral structure without edges."""
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
        """Return rows of all senders from rows of the atoms [N, …]; rows of ghosts are exchanged."""
        return with_ghosts(rows, self.exchange)

    def element_rows(self, rows: Tensor, of_elements: Callable[[Tensor], Tensor]) -> Tensor:
        """Return rows as `senders`, of a function of the atomic numbers, which needs no exchange."""
        return rows if self.ghost_z is None else torch.cat([rows, of_elements(self.ghost_z)])


@dataclass(eq=False)
class Features:
    """The features of atoms that a representation returns.

    Attributes:
        x: [N, F] scalar features.
        v: [N, 3, F] vector features; None if the model has none.
        charges: [N, stages, channels] latent charges in e, float64; None if the model has none. Over each structure,
            every channel of every stage sums to the total charge.
        energies: [N] energies of the atoms in the head's unit, to which a scalar head adds its energies; None: none.
    """

    x: Tensor
    v: Tensor | None = None
    charges: Tensor | None = None
    energies: Tensor | None = None

    @property
    def partial_charges(self) -> Tensor | None:
        """Mean over the channels of the last stage, [N] e; like each channel, it sums to the total charge."""
        return None if self.charges is None else self.charges[:, -1].mean(-1)


class Representation(nn.Module, ABC):
    """Base class of networks that turn a structure into features of its atoms.

    Registered in `torchmdnet2.registry.REPRESENTATIONS`.

    Attributes:
        cutoff: cutoff of the neighbor list in Å.
        hidden_channels: number of features F.
        max_z: atomic numbers 0 … max_z − 1 can be represented.
        local: True if an atom without neighbors does not depend on the other atoms of its structure.
        reads_charge: True if the scalar features depend on the total charge.
        reads_spin: True if the features depend on the multiplicity.
        takes_ghosts: True if it reads rows of other atoms through `Graph.senders`, so that it works in domains.
        outputs: outputs of the representation: `output.CHARGES` if its features have latent charges.
        gives_vectors: True if its features have vectors; None if not declared, so that heads find out at evaluation.
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
        """Return features of the atoms, which must not depend on the order of edges.

        Args:
            graph: N atoms and their E edges; see `Graph`.
        """


class _Readout(nn.Module, ABC):
    reads_charge: bool = False
    """True if the output depends on the total charge at equal features."""
    reads_vectors: bool = False
    """True if it needs features with vectors."""

    def check(self, system: System) -> None:
        """Raise ValueError for a structure that cannot be evaluated.

        `forward` need not check, since a check waits for the GPU.
        """


class Head(_Readout):
    """Base class of heads that turn features into energies of atoms. Registered in `torchmdnet2.registry.HEADS`.

    Attributes:
        pair_cutoff: cutoff in Å of the list that it requests from `Graph.pairs`, infinity for all pairs; None if it
            reads no pairs.
    """

    pair_cutoff: float | None = None

    def in_cells(self, coulomb: CoulombInCells) -> Head:
        """Return the head for periodic cells, as `Prior.in_cells` does; by default this one.

        Args:
            coulomb: method for Coulomb sums.
        """
        return self

    @abstractmethod
    def forward(self, features: Features, graph: Graph) -> Tensor:
        """Return energies of atoms in the model's unit, [N]; the Potential scales them to eV.

        Args:
            features: features of N atoms from the representation.
            graph: graph of the features.
        """


class PropertyHead(_Readout):
    """Base class of heads that predict a property other than the energy. Registered in `torchmdnet2.registry.HEADS`.

    Attributes:
        property: name of the property, the key in `Result.properties`.
        per: "system" or "atom", which has one value.
        shape: shape of a value: () for a number, (3,) for a vector.
        unit: unit of its numbers; "" for plain numbers, or if the labels determine the unit.
        reads_edges: True if it reads edges, pair lists or latent charges besides features, elements and positions. If
            the network runs on kernels, the edges are searched again for such a head.
    """

    property: str
    per: Literal["system", "atom"] = "system"
    shape: tuple[int, ...] = ()
    unit: str = ""
    reads_edges: bool = True

    @builtins.property  # its name means something else here
    def output(self) -> Output:
        """Return the declaration of the property. The Potential refuses values of another shape."""
        return Output(self.property, self.per, self.shape, self.unit)

    @abstractmethod
    def forward(self, features: Features, graph: Graph) -> Tensor:
        """Return the property of each structure, [B, …] float64, or of each atom, [N, …].

        Args:
            features: features of N atoms from the representation.
            graph: graph of the features.
        """


def pool(values: Tensor, graph: Graph, reduce: str = "sum") -> Tensor:
    """Return the sum or mean of values [N, …] over the atoms of each structure that heads count, [B, …] float64.

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
    """Return the number of atoms of each structure that heads count, [B] float64."""
    ones = torch.ones_like(graph.z, dtype=torch.float64) if graph.readout is None else graph.readout.double()
    return sum_over_systems(ones, graph.batch, graph.num_systems)


def sum_over_systems(values: Tensor, batch: Tensor, num_systems: int) -> Tensor:
    """Sum values of atoms [N, …] in float64 over each structure, [B, …]."""
    values = values.double()
    total = torch.zeros(num_systems, *values.shape[1:], dtype=torch.float64, device=values.device)
    return total.index_add(0, batch, values)


# --- Dipole moments of partial charges, about the centre of mass ---


def charge_dipole(charges: Tensor, system: System) -> Tensor:
    """Return the dipole moments of partial charges, Σ_i q_i (r_i − r_com), [B, 3] e·Å, float64, differentiable.

    The dipole of an ion depends on the origin, which is the centre of mass. It is NaN for periodic structures, whose
    dipole is not defined.

    Args:
        charges: [N] e.
        system: N atoms in B structures.
    """
    dipoles = charges.double()[:, None] * centered_positions(system)
    total = sum_over_systems(dipoles, system.batch, system.num_systems)
    return torch.where(system.pbc.any(1)[:, None], torch.nan, total)


def molecule_dipole(charges: np.ndarray, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the dipole moment of one molecule in NumPy, [3] e·Å, without the cost of a `System` in every step.

    Args:
        charges: [N] e.
        numbers: [N] atomic numbers.
        positions: [N, 3] Å.
    """
    return np.asarray(charges @ (positions - _mass_shares(numbers.tobytes(), numbers.dtype.str) @ positions))


@lru_cache(maxsize=16)
def _mass_shares(numbers: bytes, dtype: str) -> np.ndarray:
    masses = _atomic_masses(torch.device("cpu")).numpy()[np.frombuffer(numbers, dtype)]
    return masses / masses.sum()


def centered_positions(system: System, share: Tensor | None = None) -> Tensor:
    """Return positions relative to the centre of mass, to which atoms contribute a share [N]; None: 1."""
    masses = _atomic_masses(system.device)[system.z]
    if share is not None:
        masses = masses * share
    pos = system.pos.double()
    mass = sum_over_systems(masses, system.batch, system.num_systems).clamp(min=1e-300)
    centre = sum_over_systems(masses[:, None] * pos, system.batch, system.num_systems) / mass[:, None]
    return pos - centre.index_select(0, system.batch)


@lru_cache
def _atomic_masses(device: torch.device) -> Tensor:
    """Return masses by atomic number in amu, made once for each device."""
    from ase.data import atomic_masses

    with torch.inference_mode(False), outside_transforms():
        return torch.as_tensor(atomic_masses, dtype=torch.float64, device=device)
