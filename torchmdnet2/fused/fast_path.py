"""What a fast path offers: the interfaces that runtime/ and training/ call, and that each fused model implements.

A network is evaluated on a GPU (`GpuNetwork`), on a CPU (`CpuNetwork`) and differentiated in training (`PairNetwork`);
a prior adds its energies and forces to those of the network (`GpuTerm`, `CpuTerm`).

Shapes: N atoms, B structures, C room for directed edges, M atoms and P pairs of a training batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from .differentiable_ops import MultilinearOp
    from .pair_sums import Pairs

__all__ = [
    "Array", "Atoms", "CpuNetwork", "CpuOutputs", "CpuTerm", "Edges", "FastPath", "GpuBuffers", "GpuNetwork",
    "GpuTerm", "PairBatch", "PairNetwork", "PriorPath", "TermSums",
]  # fmt: skip

Array = NDArray[Any]


class Atoms(NamedTuple):
    """Atoms in the order of the rows, which may be a spatial order.

    Attributes:
        z: [N] int32 atomic numbers.
        charge_input: [N] float32, `GpuNetwork.charge_input` of the total charge of each atom's structure.
        batch: [N] int32 structure of each atom, ascending.
    """

    z: Tensor
    charge_input: Tensor
    batch: Tensor


class Edges(NamedTuple):
    """Neighbor list as CSR rows, sorted by sender and shift within a row; both directions of every pair are listed.

    Attributes:
        row_ptr: [N + 1] int32.
        sender: [C] int32; entries beyond row_ptr[N] have any value.
        vectors: [C, 3] float32, Å from the atom of the row to the sender.
    """

    row_ptr: Tensor
    sender: Tensor
    vectors: Tensor


class TermSums(NamedTuple):
    """What terms add to. Rows are places of atoms; each row is written by one program, so that sums are reproducible.

    Attributes:
        energy: [N] float64 eV.
        forces: [N, 3] float32 eV/Å.
        virial: [N, 9] float32 eV, Σ vec ⊗ dE/dvec over the edges of the row; not used where no stress is computed.
    """

    energy: Tensor
    forces: Tensor
    virial: Tensor


class GpuBuffers(Protocol):
    """Static buffers of a network. The results are in `GpuNetwork.unit`."""

    energy: Tensor  # [N] float32
    forces: Tensor  # [N, 3] float32
    virial: Tensor  # [N, 9] float32

    @property
    def nbytes(self) -> int: ...


class GpuNetwork(ABC):
    """A network with its head over CSR rows. `run` only launches kernels: a CUDA graph can hold it.

    Attributes:
        device: of the weights.
        unit: eV, the unit of energies and their gradients in the buffers.
    """

    device: torch.device
    unit: float = 1.0

    def charge_input(self, charge: Tensor) -> Tensor:
        """What the network reads of the total charges, elementwise (float64)."""
        return charge

    def launch_shapes(self, num_atoms: int) -> Any:
        """Block shapes for N atoms, a hashable value: each one is checked against the Potential on its first use."""
        return None

    def launch_options(self, shapes: Any) -> dict[str, Any]:
        """How launches overlap the kernel before (triton_launch.py), also those of the step around the network."""
        return {"PDL": 0}

    @abstractmethod
    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> GpuBuffers:
        """Buffers for N atoms and C edges."""

    @abstractmethod
    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        """Fill `energy`, `forces` and, when asked, `virial` of the buffers."""


class GpuTerm(ABC):
    """A prior on kernels of its own. `run` only launches.

    Attributes:
        cutoff: Å of the list that it needs. The list that it is given may reach further: mask edges by the distance.
    """

    cutoff: float

    def allocate(self, num_atoms: int, capacity: int) -> Any:
        """Buffers of its own, for N atoms and C edges."""
        return None

    @abstractmethod
    def run(self, buffers: Any, atoms: Atoms, edges: Edges, sums: TermSums, with_virial: bool) -> None:
        """Add energies, forces and, when asked, virial rows to the sums."""


class CpuOutputs(NamedTuple):
    """Of one run on a CPU; forces and virial are None when they were not asked for.

    Attributes:
        energy: [N] eV, those of isolated atoms not yet subtracted.
        forces: [N, 3] eV/Å.
        virial: [N, 9] eV, Σ vec ⊗ dE/dvec over the edges of each row.
    """

    energy: Array
    forces: Array | None
    virial: Array | None


class CpuNetwork(ABC):
    """A network with its head over CSR rows of NumPy arrays."""

    def charge_input(self, charge: Tensor) -> Tensor:
        """What the network reads of the total charges, elementwise (float64)."""
        return charge

    @abstractmethod
    def run(
        self, z: Array, row_ptr: Array, sender: Array, vectors: Array, charge_input: Array, with_forces: bool = True
    ) -> CpuOutputs:
        """Energies, and forces with row virials when asked.

        Args:
            z: [N] integers.
            row_ptr: [N + 1], sender: [E or more] int64; rows as in `Edges`.
            vectors: [E or more, 3] float32 Å.
            charge_input: [N] float32.
        """


class CpuTerm(ABC):
    """A prior on the CPU.

    Attributes:
        cutoff: Å of the list that it needs; as for `GpuTerm`.
    """

    cutoff: float

    @abstractmethod
    def run(self, z: Array, row_ptr: Array, sender: Array, vectors: Array, with_forces: bool) -> CpuOutputs:
        """Energies (float64), and forces with row virials when asked."""


class PairBatch(NamedTuple):
    """A training batch as pairs of atoms; the last K atoms stand alone, one of each element.

    Attributes:
        pairs: P unordered pairs, and the rows of their edges.
        z: [M] atomic numbers, element: [M] their places in the list of K elements.
        charge: [M] total charge of each atom's structure in e.
        num_elements: K.
    """

    pairs: Pairs
    z: Tensor
    element: Tensor
    charge: Tensor
    num_elements: int


class PairNetwork(ABC):
    """Scalar features of the atoms as a function of pair vectors, twice differentiable.

    Attributes:
        with_weights: operations that take weights, and in which slots: forces need no derivative there.
    """

    with_weights: Mapping[MultilinearOp, frozenset[int]]

    @abstractmethod
    def __call__(self, r: Tensor) -> Tensor:
        """[P, 3] Å → [M, F]."""


class FastPath(ABC):
    """The fast path of one class of representations.

    Attributes:
        trains_on_cpu: training on packed frames is faster than on batches on a CPU too, where numba is installed.
    """

    trains_on_cpu: bool = False

    @abstractmethod
    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        """ "" when `gpu` (on a CUDA device) or `cpu` can evaluate them, else the reason in words."""

    @abstractmethod
    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> GpuNetwork:
        """The network with its weights of now.

        Args:
            representation, head: such that `unsupported_reason` is "".
            energy_scale: eV per unit of the head.
            device: CUDA, or the CPU under Triton's interpreter.
            precision: of matrix products, "native" (float32-accurate) or "tf32".
        """

    @abstractmethod
    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> CpuNetwork:
        """As `gpu`, on the CPU."""

    def training(self, representation: nn.Module, batch: PairBatch, use_kernels: bool) -> PairNetwork | None:
        """The representation on pairs, for packed training; None: it is called as it is, on directed edges."""
        return None


class PriorPath(ABC):
    """The fast path of one class of priors."""

    @abstractmethod
    def unsupported_reason(self, prior: nn.Module, device: torch.device) -> str:
        """ "" when `gpu` (on a CUDA device) or `cpu` can evaluate it, else the reason in words."""

    @abstractmethod
    def gpu(self, prior: nn.Module, device: torch.device) -> GpuTerm:
        """The prior with its parameters of now."""

    @abstractmethod
    def cpu(self, prior: nn.Module) -> CpuTerm:
        """As `gpu`, on the CPU."""
