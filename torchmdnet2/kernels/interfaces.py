"""Interfaces between the engine and the kernels of models and priors, on CPUs and GPUs.

Shapes: N atoms in B structures, E directed edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.exchange import Exchange
from ..system import System

if TYPE_CHECKING:
    from ..potential.graph import Features
    from ..system import System
    from .pair_ops import MultilinearOp, Pairs


__all__ = [
    "FIXED_POINT", "Array", "Atoms", "ChargeNetwork", "CpuAtoms", "CpuChargeNetwork", "CpuNetwork", "CpuOutputs",
    "CpuRows", "CpuSums", "CpuTerm", "CpuTermOf", "Edges", "FastPath", "FeatureNetwork", "GpuBuffers", "GpuNetwork",
    "GpuTerm", "MemberPath", "PairBatch", "PairNetwork", "PathWithHeads", "PriorPath", "ReadCharges", "TermLaunch",
    "TermSums", "TermWithRoom",
]  # fmt: skip


Array = NDArray[Any]


class CpuAtoms(NamedTuple):
    """Atoms on a CPU, in any order.

    Attributes:
        z: [N] integers.
        charge_input: [N] float32, `CpuNetwork.charge_input` of the total charge of each atom's structure.
        batch: [N] int64 structure of each atom.
        total_charge: [B] float64 e.
    """

    z: Array
    charge_input: Array
    batch: Array
    total_charge: Array


class CpuRows(NamedTuple):
    """Neighbor list as CSR rows, as `Edges`: row_ptr [N + 1], sender [≥ E] int64, vectors [≥ E, 3] float32 Å; cutoff in
    Å."""

    row_ptr: Array
    sender: Array
    vectors: Array
    cutoff: float


class CpuOutputs(NamedTuple):
    """Results of a network on a CPU; forces and virial are None if they were not requested.

    Attributes:
        energy: [N] eV, those of isolated atoms not yet subtracted.
        forces: [N, 3] eV/Å.
        virial: [N, 9] eV, Σ vec ⊗ dE/dvec over the edges of each row.
        charges: [N] float64 e; None where none are predicted.
        features: [N, F] that heads read; None unless the network is to keep them.
    """

    energy: Array
    forces: Array | None
    virial: Array | None
    charges: Array | None = None
    features: Array | None = None


class CpuNetwork(ABC):
    """A network with its head over CSR rows of NumPy arrays.

    Attributes:
        keeps_features: give the features too, where heads of other properties read them.
    """

    keeps_features: bool = False

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return what the network reads of the total charges, elementwise (float64)."""
        return charge

    @abstractmethod
    def run(self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool = True) -> CpuOutputs:
        """Compute energies, and forces with row virials if requested."""

    def run_domain(
        self, z: Array, row_ptr: Array, sender: Array, vectors: Array, charge_input: Array, exchange: Any
    ) -> tuple[Array, Array]:
        """Return energies [n] eV and dE/dvector [≥ E, 3] eV/Å of the atoms with rows; further ones of z [N] are
        ghosts."""
        raise NotImplementedError


ReadCharges = Callable[[Array], "Array | None"]
"""Terms that read the predicted charges [N] e: their dE/dq [N] eV/e, float64; None where there are none."""


class CpuChargeNetwork(CpuNetwork):
    """A network that predicts charges, which terms read; its gradient starts from their dE/dq too."""

    @abstractmethod
    def run(
        self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool = True, read: ReadCharges | None = None
    ) -> CpuOutputs:  # fmt: skip
        """Compute as `CpuNetwork.run`; `read` is called once, with the charges, before the gradient."""


class CpuSums(NamedTuple):
    """Sums to which terms add, float64.

    Attributes:
        energy [N] eV, forces [N, 3] eV/Å, virial [N, 9] eV: as `TermSums`.
        charge_slope: [N] eV/e, dE/dq of predicted charges.
    """

    energy: Array
    forces: Array
    virial: Array
    charge_slope: Array


class CpuTermOf(ABC):
    """A prior that is prepared for structures of which only positions and cell change."""

    @abstractmethod
    def add(self, pos: Array, rows: CpuRows | None, sums: CpuSums, charges: Array | None = None) -> None:
        """Add to the sums.

        Args:
            pos: [N, 3] Å.
            rows: within the cutoff or further (atoms without are ghosts); None where the cutoff is infinite.
            charges: [N] e, predicted by the network.
            cell: [B, 3, 3] Å, by name, if `CpuTerm.uses_cell`.
        """


class CpuTerm(ABC):
    """A prior that has kernels on a CPU.

    Attributes:
        cutoff, uses_charges: as for `GpuTerm`; uses_cell, exchanges: `CpuTermOf.add` takes `cell`, `exchange`.
        cost: of an edge, in the units of `thread_tuner.amount_of_work`.
        name: in reports.
    """

    name: str = "prior"
    cutoff: float
    uses_charges: bool = False
    uses_cell: bool = False
    exchanges: bool = False
    cost: int = 10

    @abstractmethod
    def prepare(self, system: System) -> CpuTermOf:
        """Compute what depends on elements and structures. Raises ValueError for what the prior cannot do."""


# --- The interfaces that the engine and training call, and that each fused model implements ---
#
# A network is evaluated on a GPU (`GpuNetwork`), on a CPU (`CpuNetwork`) and differentiated in training
# (`PairNetwork`); a prior adds its energies and forces to those of the network (`GpuTerm`, `CpuTerm`).

FIXED_POINT = 2.0**32
"""What the forces of a domain are multiplied by, to be summed as integers: such sums do not depend on the order."""


class Atoms(NamedTuple):
    """Atoms in the order of the rows, which may be a spatial order.

    Attributes:
        z: [N] int32 atomic numbers.
        charge_input: [N] float32, `GpuNetwork.charge_input` of the total charge of each atom's structure.
        batch: [N] int32 structure of each atom, ascending; ptr: [B + 1] int32 the first row of each structure.
        pos: [N, 3] Å, float32 or float64.
        order: [N] int64 the atom of each row; None where row i is atom i.
        charges: [N] float32 e, predicted by the network; None where it predicts none.
        cell: [B, 3, 3] Å.
        total_charge: [B] float64 e.
        exchange: of a domain, whose ghosts have z after the local atoms, no rows and no other entry here; None: there
            are no ghosts.
    """

    z: Tensor
    charge_input: Tensor
    batch: Tensor
    ptr: Tensor
    pos: Tensor
    order: Tensor | None = None
    charges: Tensor | None = None
    cell: Tensor | None = None
    total_charge: Tensor | None = None
    exchange: Exchange | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.charge_input)

    def send(self, field: Tensor) -> None:
        """Fill the rows of the ghosts, which come after those of the local atoms; more may follow."""
        if self.exchange is not None:
            n, ghosts = self.num_rows, self.exchange.num_ghosts
            field[n : n + ghosts].copy_(self.exchange.forward(field[:n]))


class Edges(NamedTuple):
    """Neighbor list as CSR rows; both directions of every pair are listed.

    Rows are sorted by sender and shift in the list of the network and in those for terms by autograd.

    Attributes:
        row_ptr: [N + 1] int32; sender: [C] int32, entries beyond row_ptr[N] have any value.
        vectors: [C, 3] float32, Å from the atom of the row to the sender.
        cutoff: Å, of the list.
        receiver [C], shift [C, 3] int32: for terms by autograd.
    """

    row_ptr: Tensor
    sender: Tensor
    vectors: Tensor
    cutoff: float
    receiver: Tensor | None = None
    shift: Tensor | None = None


class TermSums(NamedTuple):
    """The sums of the terms. The row of an atom is written by one program, so that sums are reproducible.

    Attributes:
        energy: [N] float64 eV.
        forces: [N, 3] float32 eV/Å.
        virial: [N, 9] float32 eV, Σ vec ⊗ dE/dvec over the edges of the row; not used where no stress is computed.
        charge_slope: [N] float32 eV/e, dE/dq of predicted charges; None without.
    """

    energy: Tensor
    forces: Tensor
    virial: Tensor
    charge_slope: Tensor | None = None


class TermLaunch(NamedTuple):
    """How a term is launched.

    Attributes:
        first: nothing is in the sums yet: write them. Otherwise add to them.
        first_slope: the same for `charge_slope`.
        with_virial: the virial is wanted.
        shapes: of `GpuTerm.launch_shapes`.
        options: of each launch of a kernel, PDL among them (triton_launch.py).
        begun: what `GpuTerm.begin` has returned for these atoms; None where it was not called.
    """

    first: bool
    first_slope: bool
    with_virial: bool
    shapes: Any
    options: dict[str, Any]
    begun: Any = None


class GpuBuffers(Protocol):
    """Static buffers of a network. The results are in `GpuNetwork.unit`."""

    energy: Tensor  # [N] float32
    forces: Tensor  # [N, 3] float32; of a domain [N + ghosts, 3] int64, times FIXED_POINT
    virial: Tensor  # [N, 9] float32

    @property
    def nbytes(self) -> int: ...


class GpuNetwork(ABC):
    """A network with its head over CSR rows. `run` only launches kernels: a CUDA graph can hold it.

    Attributes:
        device: of the weights.
        unit: eV, the unit of energies and their gradients in the buffers.
        allocates: `run` takes memory besides the buffers, by PyTorch, which a graph then holds.
    """

    device: torch.device
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

    @abstractmethod
    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> GpuBuffers:
        """Return buffers for N atoms and C edges."""

    @abstractmethod
    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        """Fill `energy`, `forces` and, when asked, `virial` of the buffers."""


class ChargeNetwork(GpuNetwork):
    """A network that predicts charges, which terms read; its gradient starts from their dE/dq too.

    Attributes:
        members: M networks that are evaluated together. Buffers, charges and charge slopes then have M·N rows: the N
            atoms for the first member, for the second, and so on.
    """

    members: int = 1

    @abstractmethod
    def predict(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        """Fill `energy` of the buffers, and the charges."""

    @abstractmethod
    def charges(self, buffers: Any) -> tuple[Tensor, Tensor]:
        """Return where `predict` writes the charges of the atoms, [N] e: in float32, and in float64 for results."""

    @abstractmethod
    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        """Fill `forces` and, if requested, `virial`, after `predict`.

        Args:
            charge_slope: [N] eV/e, dE/dq of other terms; None where they read no charges.
        """

    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        self.predict(buffers, shapes, atoms, edges)
        self.differentiate(buffers, shapes, atoms, edges, with_virial, None)


class GpuTerm(ABC):
    """A prior that has kernels. `run` only launches.

    Attributes:
        cutoff: Å of the list that it needs. The list that it is given may reach further: mask edges by the distance.
            Infinity: it takes all pairs of a structure itself, and gets no list.
        uses_charges: it needs the charges that the network predicts.
        by_autograd: PyTorch launches what it needs, on a list that ends at its cutoff (0: none) and has shifts.
        allocates: PyTorch launches a part of it, and takes memory besides the buffers, which a graph then holds.
        name: in reports.
    """

    name: str = "prior"
    cutoff: float
    uses_charges: bool = False
    by_autograd: bool = False
    allocates: bool = False

    def launch_shapes(self, num_atoms: int) -> Any:
        """Return launch shapes, as `GpuNetwork.launch_shapes`."""
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
        on_cpu: there is `cpu`; takes_ghosts: what it gives has `run_domain`, and what `gpu` gives has `allocate` with a
            number of ghosts, and runs `Atoms` with an exchange.
        predicts_charges: `gpu` is a `ChargeNetwork`.
        trains_on_cpu: training on packed frames is faster than on batches on a CPU too, where numba is installed.
        arithmetic: of the kernels on a GPU by precision, in words; a precision that is absent is not supported.
    """

    on_cpu: bool = True
    takes_ghosts: bool = False
    predicts_charges: bool = False
    trains_on_cpu: bool = False
    arithmetic: Mapping[str, str] = {
        "native": "float32, matrix products in three TF32 parts",
        "tf32": "float32, matrix products in TF32",
    }

    @abstractmethod
    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        """Return "" if `gpu` (on a CUDA device) or `cpu` can evaluate them, else the reason in words."""

    @abstractmethod
    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> GpuNetwork:
        """Return the network with its present weights.

        Args:
            representation, head: such that `unsupported_reason` is "".
            energy_scale: eV per unit of the head.
            device: CUDA, or the CPU under Triton's interpreter.
            precision: of matrix products, "native" (float32-accurate) or "tf32"; or "mixed".
        """

    @abstractmethod
    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> CpuNetwork:
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
    def gpu(self, prior: nn.Module, device: torch.device, elements: Sequence[int]) -> GpuTerm:
        """Return the prior with its present parameters, for these atomic numbers."""

    @abstractmethod
    def cpu(self, prior: nn.Module, elements: Sequence[int]) -> CpuTerm:
        """Return the prior on the CPU, as `gpu`."""


# --- Heads of other properties beside a network on kernels: what a fast path offers for them ---
#
# Such heads read the scalar features of the atoms. That of the charges joins the step, because terms read its charges
# and the gradient of the network starts from their dE/dq too; the others are evaluated on the features when results are
# requested (engine/bound.py).


class FeatureNetwork(GpuNetwork):
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
    def with_charges(self, network: GpuNetwork, head: nn.Module) -> ChargeNetwork:
        """Return the network of `gpu` with the charges of a head, such that `unsupported_property` is ""."""

    @abstractmethod
    def cpu_with_charges(self, network: CpuNetwork, head: nn.Module) -> CpuChargeNetwork:
        """Return the network of `cpu`, as `with_charges`."""


# --- A term whose sizes depend on cells, which are known on the device only ---


class TermWithRoom(GpuTerm):
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
