"""Interfaces between the engine and the kernels of models and priors, on CPUs and GPUs.

Shapes: N atoms in B structures, E directed edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.exchange import Exchange
from ..system import System

if TYPE_CHECKING:
    from ..potential.graph import Features
    from .pair_ops import MultilinearOp, Pairs


__all__ = [
    "FIXED_POINT", "Array", "Atoms", "Buffers", "ChargeNetwork", "CpuBuffers", "CpuNetwork", "Edges", "FastPath",
    "FeatureNetwork", "MemberPath", "Network", "PairBatch", "PairNetwork", "PathWithHeads", "PriorPath", "Term",
    "TermLaunch", "TermSums", "TermWithRoom", "amount_of_work",
]  # fmt: skip


Array = NDArray[Any]

FIXED_POINT = 2.0**32
"""What the forces of a domain are multiplied by on a GPU, to be summed as integers: such sums do not depend on the
order."""


def amount_of_work(atoms: int, edges: int, channels: int, layers: int) -> int:
    """Return the work of one step, in units of about 3 ns of one thread: matrices act on atoms, filters on edges."""
    return channels * layers * (channels * atoms + 2 * edges)


# --- The interfaces that the engine calls, and that each model and prior with kernels implements ---
#
# A step searches neighbors, runs a network and adds terms, on any device and in a domain of a parallel run alike. The
# arrays are tensors on a GPU and NumPy arrays on a CPU, where integers have 64 bits and sums of terms are float64.


class Atoms(NamedTuple):
    """Atoms in the order of the rows, which may be a spatial order on a GPU.

    Attributes:
        z: [N] int32 (CPU: int64) atomic numbers; of a domain, with those of the ghosts after them.
        charge_input: [N] float32, `Network.charge_input` of the total charge of each atom's structure.
        batch: [N] int32 (CPU: int64) structure of each atom, on a GPU ascending.
        ptr: [B + 1] int32 the first row of each structure; None on a CPU.
        pos: [N, 3] Å, float32 or float64.
        order: [N] int64 the atom of each row; None where row i is atom i.
        charges: [N] float32 (CPU: float64) e, predicted by the network; None where it predicts none.
        cell: [B, 3, 3] Å.
        total_charge: [B] float64 e.
        exchange: of a domain, whose ghosts have no rows and no other entry here; None: there are no ghosts.
        shells: of a block of a structure: the numbers of rows within 0, 1, … cutoffs of the atoms whose energies are
            computed, as many as layers, the last one N. Rows are in this order; atoms further away have only z, and
            forces. None: the energies of all rows are computed.
    """

    z: Any
    charge_input: Any
    batch: Any
    ptr: Any
    pos: Any
    order: Any = None
    charges: Any = None
    cell: Any = None
    total_charge: Any = None
    exchange: Exchange | None = None
    shells: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.charge_input)

    def within(self, cutoffs: int) -> int:
        """Return the number of rows within so many cutoffs of the atoms whose energies are computed."""
        return self.num_rows if self.shells is None else self.shells[cutoffs]

    def send(self, field: Any, first: int | None = None) -> None:
        """Fill the rows of the ghosts from `first` on, by default those after the local atoms; more may follow."""
        if self.exchange is not None:
            n, ghosts = self.num_rows, self.exchange.num_ghosts
            rows = field if isinstance(field, Tensor) else torch.from_numpy(field)
            first = n if first is None else first
            rows[first : first + ghosts].copy_(self.exchange.forward(rows[:n]))


class Edges(NamedTuple):
    """Neighbor list as CSR rows; both directions of every pair are listed.

    Rows are sorted by sender and shift in the list of the network and in those for terms by autograd.

    Attributes:
        row_ptr: [N + 1]; sender: [C], entries beyond row_ptr[N] have any value. int32 (CPU: int64).
        vectors: [C, 3] float32, Å from the atom of the row to the sender.
        cutoff: Å, of the list.
        receiver [C], shift [C, 3] int32: for terms by autograd on a GPU.
    """

    row_ptr: Any
    sender: Any
    vectors: Any
    cutoff: float
    receiver: Any = None
    shift: Any = None


class TermSums(NamedTuple):
    """The sums of the terms. The row of an atom is written by one program, so that sums are reproducible.

    Attributes:
        energy: [N] float64 eV.
        forces: [N, 3] eV/Å, virial: [N, 9] eV, Σ vec ⊗ dE/dvec over the edges of the row, not used where no stress is
            computed; charge_slope: [N] eV/e, dE/dq of predicted charges, None without. float32 (CPU: float64).
    """

    energy: Any
    forces: Any
    virial: Any
    charge_slope: Any = None

    @classmethod
    def zeros(cls, num_atoms: int) -> TermSums:
        """Return sums on a CPU."""
        n = num_atoms
        return cls(np.zeros(n), np.zeros((n, 3)), np.zeros((n, 9)), np.zeros(n))


class TermLaunch(NamedTuple):
    """How a term is launched.

    Attributes:
        first: nothing is in the sums yet: write them. Otherwise add to them. (On a CPU: always add, to zeros.)
        first_slope: the same for `charge_slope`.
        with_virial: the virial is wanted.
        shapes: of `Term.launch_shapes`.
        options: of each launch of a kernel, PDL among them (triton_launch.py).
        begun: what `Term.begin` has returned for these atoms; None where it was not called.
    """

    first: bool = False
    first_slope: bool = False
    with_virial: bool = True
    shapes: Any = None
    options: Mapping[str, Any] = MappingProxyType({})
    begun: Any = None


class Buffers(Protocol):
    """Buffers of a network, static ones on a GPU. The results are in `Network.unit`; forces and virials on a CPU may be
    float64."""

    energy: Any  # [N] float32
    forces: Any  # [N, 3] float32; of a domain [N + ghosts, 3], on a GPU and of a block int64, times FIXED_POINT
    virial: Any  # [N, 9] float32

    @property
    def nbytes(self) -> int: ...


class CpuBuffers:
    """Results of a network on a CPU, in new memory for each run.

    Attributes:
        charges: [N] float64 e; None where none are predicted.
        features: [N, F] that heads read; None unless the network is to keep them.
        with_forces: whether `differentiate` follows `predict`.
        state: what it needs of `predict`.
    """

    energy: Array
    forces: Array
    virial: Array
    charges: Array | None = None
    features: Array | None = None
    with_forces: bool = True
    state: Any = None
    nbytes = 0


class Network(ABC):
    """A network with its head over CSR rows. On a GPU, `run` only launches kernels: a CUDA graph can hold it.

    Attributes:
        device: of the weights.
        unit: eV, the unit of energies and their gradients in the buffers.
        allocates: `run` takes memory besides the buffers, by PyTorch, which a graph then holds.
    """

    device: torch.device = torch.device("cpu")
    unit: float = 1.0
    allocates: bool = False

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return what the network reads of the total charges, elementwise (float64)."""
        return charge

    def launch_shapes(self, num_atoms: int) -> Any:
        """Return block shapes for N atoms, a hashable value: each one is checked against the Potential on its first
        use."""
        return None

    def shapes_for(self, num_atoms: int, z: Tensor) -> Any:
        """Return block shapes for structures of these atomic numbers [N], which may wait for the device."""
        return self.launch_shapes(num_atoms)

    def launch_options(self, shapes: Any) -> dict[str, Any]:
        """Return how launches overlap the kernel before (triton_launch.py), also those of the step around the
        network."""
        return {"PDL": 0}

    def work(self, atoms: Atoms, edges: Edges) -> tuple[int, int]:
        """Return the work of a step on a CPU (`amount_of_work`), and how many threads can share it."""
        return 0, 1

    @abstractmethod
    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> Buffers:
        """Return buffers for N atoms and C edges."""

    @abstractmethod
    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        """Fill `energy`, `forces` and, when asked, `virial` of the buffers."""


class ChargeNetwork(Network):
    """A network that predicts charges, which terms read; its gradient starts from their dE/dq too.

    Attributes:
        members: M networks that are evaluated together. Buffers, charges and charge slopes then have M·N rows: the N
            atoms for the first member, for the second, and so on.
        charges_read: terms read the charges. If none does, the charges may be as late as the end of `differentiate`.
    """

    members: int = 1
    charges_read: bool = True

    @abstractmethod
    def predict(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        """Fill `energy` of the buffers, and the charges."""

    @abstractmethod
    def charges(self, buffers: Any) -> tuple[Any, Any]:
        """Return where `predict` writes the charges of the atoms, [N] e: for terms, in float32 on a GPU; and for
        results, in float64."""

    @abstractmethod
    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Any
    ) -> None:  # fmt: skip
        """Fill `forces` and, if requested, `virial`, after `predict`.

        Args:
            charge_slope: [N] eV/e, dE/dq of other terms; None where they read no charges.
        """

    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        self.predict(buffers, shapes, atoms, edges)
        self.differentiate(buffers, shapes, atoms, edges, with_virial, None)


class CpuNetwork(ChargeNetwork):
    """A network on a CPU, which may predict no charges (None). Its virial is always computed.

    Attributes:
        keeps_features: give the features too, where heads of other properties read them.
    """

    keeps_features: bool = False

    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> CpuBuffers:
        return CpuBuffers()

    def charges(self, buffers: CpuBuffers) -> tuple[Array | None, Array | None]:
        return buffers.charges, buffers.charges


class Term(ABC):
    """A prior that has kernels. On a GPU, `run` only launches.

    Attributes:
        cutoff: Å of the list that it needs. The list that it is given may reach further: mask edges by the distance.
            Infinity: it takes all pairs of a structure itself, and gets no list.
        uses_charges: it needs the charges that the network predicts.
        by_autograd: PyTorch launches what it needs, on a GPU on a list that ends at its cutoff (0: none) and has
            shifts, on a CPU on one that it searches.
        allocates: PyTorch launches a part of it, and takes memory besides the buffers, which a graph then holds.
        rehearses: that part may run while kernels are only compiled and not launched: it neither waits for the device
            nor uses what kernels write as indices. If not, its kernels are compiled one by one, when first launched.
        of_edges: energy and force of an atom depend on its edges and the elements alone.
        cost: of an edge on a CPU, in the units of `amount_of_work`.
        name: in reports.
    """

    name: str = "prior"
    cutoff: float
    uses_charges: bool = False
    by_autograd: bool = False
    allocates: bool = False
    rehearses: bool = False
    of_edges: bool = False
    cost: int = 10

    def launch_shapes(self, num_atoms: int) -> Any:
        """Return launch shapes, as `Network.launch_shapes`."""
        return None

    def allocate(self, num_atoms: int) -> Any:
        """Allocate its buffers for N atoms."""
        return None

    def set_composition(self, buffers: Any, system: System) -> None:  # noqa: B027
        """Take over all but positions and cell. Raises ValueError for what the prior cannot do."""

    def begin(self, buffers: Any, atoms: Atoms, with_virial: bool) -> Any:
        """Launch on another stream what needs no neighbors; `run` gets what is returned, and waits for it."""
        return None

    @abstractmethod
    def run(self, buffers: Any, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        """Write or add energies, forces and, when asked, virial rows to the sums."""


# --- Training on pairs ---


class PairBatch(NamedTuple):
    """A training batch as pairs of atoms; the last K atoms stand alone, one of each element.

    Attributes:
        pairs: P unordered pairs, and the rows of their edges.
        z: [M] atomic numbers, element: [M] their places in the list of K elements.
        charge: [M] total charge of each atom's structure in e.
        num_elements: K.
        structure: [M] structure of each atom, ascending; ptr: [S + 1] the first atom of each.
    """

    pairs: Pairs
    z: Tensor
    element: Tensor
    charge: Tensor
    num_elements: int
    structure: Tensor
    ptr: Tensor


class PairNetwork(ABC):
    """Features of the atoms as a function of pair vectors, twice differentiable.

    Attributes:
        with_weights: operations that take weights, and in which slots: forces need no derivative there.
    """

    with_weights: Mapping[MultilinearOp, frozenset[int]]

    @abstractmethod
    def __call__(self, r: Tensor) -> Features:
        """Return features of M atoms from vectors [P, 3] in Å."""


class FastPath(ABC):
    """The fast path of one class of representations.

    Attributes:
        on_cpu: there is `cpu`; takes_ghosts: networks run `Atoms` with an exchange, and `allocate` of what `gpu` gives
            takes a number of ghosts; takes_shells: the latter also runs `Atoms` with shells.
        predicts_charges: `gpu` is a `ChargeNetwork`.
        trains_on_cpu: training on packed frames is faster than on batches on a CPU too, where numba is installed.
        arithmetic: of the kernels on a GPU by precision, in words; a precision that is absent is not supported.
    """

    on_cpu: bool = True
    takes_ghosts: bool = False
    takes_shells: bool = False
    predicts_charges: bool = False
    trains_on_cpu: bool = False
    arithmetic: Mapping[str, str] = {
        "native": "float32, matrix products as sums of three in lower precision",
        "tf32": "float32, matrix products in TF32",
    }

    @abstractmethod
    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        """Return "" if `gpu` (on a CUDA device) or `cpu` can evaluate them, else the reason in words."""

    @abstractmethod
    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> Network:
        """Return the network with its present weights.

        Args:
            representation, head: such that `unsupported_reason` is "".
            energy_scale: eV per unit of the head.
            device: CUDA, or the CPU under Triton's interpreter.
            precision: of matrix products, "native" (float32-accurate) or "tf32"; or "mixed".
        """

    @abstractmethod
    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> Network:
        """Return the network on the CPU, as `gpu`."""

    def training(self, representation: nn.Module, batch: PairBatch, use_kernels: bool) -> PairNetwork | None:
        """Return the representation on pairs, for packed training; None: it is called unchanged, on directed edges."""
        return None


class MemberPath(FastPath):
    """The fast path of representations of which several can be evaluated together."""

    @abstractmethod
    def gpu_members(
        self, networks: Sequence[tuple[nn.Module, nn.Module]], energy_scale: float, device: torch.device, precision: str
    ) -> ChargeNetwork:
        """Return networks as `gpu`, for several representations of one form with their heads."""


class PriorPath(ABC):
    """The fast path of one class of priors."""

    @abstractmethod
    def unsupported_reason(self, prior: nn.Module, device: torch.device) -> str:
        """Return "" if `gpu` (on a CUDA device) or `cpu` can evaluate it, else the reason in words."""

    @abstractmethod
    def gpu(self, prior: nn.Module, device: torch.device, elements: Sequence[int]) -> Term:
        """Return the prior with its present parameters, for these atomic numbers."""

    @abstractmethod
    def cpu(self, prior: nn.Module, elements: Sequence[int]) -> Term:
        """Return the prior on the CPU, as `gpu`."""


# --- Heads of other properties beside a network on kernels: what a fast path offers for them ---
#
# Such heads read the scalar features of the atoms. That of the charges joins the step, because terms read its charges
# and the gradient of the network starts from their dE/dq too; the others are evaluated on the features when results are
# requested (engine/bound.py).


class FeatureNetwork(Network):
    """A network that keeps the features which its head has read."""

    @abstractmethod
    def features(self, buffers: object) -> Tensor:
        """Return `Features.x` of the rows, [N or more, F] float32, after `run`."""


class PathWithHeads(FastPath):
    """The fast path of representations that other heads than that of the energy can read."""

    @abstractmethod
    def unsupported_property(self, head: nn.Module) -> str:
        """Return "" if the network can be evaluated with this head of another property, else the reason in words."""

    @abstractmethod
    def with_charges(self, network: Network, head: nn.Module) -> ChargeNetwork:
        """Return the network of `gpu` with the charges of a head, such that `unsupported_property` is ""."""

    @abstractmethod
    def cpu_with_charges(self, network: Network, head: nn.Module) -> CpuNetwork:
        """Return the network of `cpu`, as `with_charges`."""


# --- A term whose sizes depend on cells, which are known on the device only ---


class TermWithRoom(Term):
    """A term that sizes its buffers for a cell, with a reserve, and flags cells that need larger ones."""

    @abstractmethod
    def make_room(self, buffers: Any, system: System) -> bool:
        """Choose sizes for a composition and its cells [B, 3, 3]. Returns whether `run` now launches other kernels."""

    @abstractmethod
    def lacking(self, buffers: Any) -> Tensor | None:
        """[1] bool: a cell needed more since `clear`, and results must not be used. None: no cell ever needs more."""

    @abstractmethod
    def grow(self, buffers: Any) -> bool:
        """Choose sizes for the first cells that needed more. Returns whether `run` now launches other kernels."""

    @abstractmethod
    def clear(self, buffers: Any) -> None:
        """Forget which cells needed more."""
