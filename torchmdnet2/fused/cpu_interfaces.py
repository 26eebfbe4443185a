"""What a fast path offers on a CPU: networks and priors over CSR rows of NumPy arrays.

Shapes: N atoms in B structures, E directed edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from ..system import System

__all__ = [
    "Array", "CpuAtoms", "CpuChargeNetwork", "CpuNetwork", "CpuOutputs", "CpuRows", "CpuSums", "CpuTerm", "CpuTermOf",
    "ReadCharges",
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
    """Rows as in `fast_path.Edges`: row_ptr [N + 1], sender [≥ E] int64, vectors [≥ E, 3] float32 Å; cutoff in Å."""

    row_ptr: Array
    sender: Array
    vectors: Array
    cutoff: float


class CpuOutputs(NamedTuple):
    """Of one run on a CPU; forces and virial are None when they were not asked for.

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
        """What the network reads of the total charges, elementwise (float64)."""
        return charge

    @abstractmethod
    def run(self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool = True) -> CpuOutputs:
        """Energies, and forces with row virials when asked."""

    def run_domain(
        self, z: Array, row_ptr: Array, sender: Array, vectors: Array, charge_input: Array, exchange: Any
    ) -> tuple[Array, Array]:
        """Energies [n] eV and dE/dvector [≥ E, 3] eV/Å of the atoms with rows; further ones of z [N] are ghosts."""
        raise NotImplementedError


ReadCharges = Callable[[Array], "Array | None"]
"""Terms that read the predicted charges [N] e: their dE/dq [N] eV/e, float64; None where there are none."""


class CpuChargeNetwork(CpuNetwork):
    """A network that predicts charges, which terms read; its gradient starts from their dE/dq too."""

    @abstractmethod
    def run(
        self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool = True, read: ReadCharges | None = None
    ) -> CpuOutputs:  # fmt: skip
        """As `CpuNetwork.run`; `read` is called once, with the charges, before the gradient."""


class CpuSums(NamedTuple):
    """What terms add to, float64.

    Attributes:
        energy [N] eV, forces [N, 3] eV/Å, virial [N, 9] eV: as `fast_path.TermSums`.
        charge_slope: [N] eV/e, dE/dq of predicted charges.
    """

    energy: Array
    forces: Array
    virial: Array
    charge_slope: Array


class CpuTermOf(ABC):
    """A prior for structures whose positions and cell alone change."""

    @abstractmethod
    def add(self, pos: Array, rows: CpuRows | None, sums: CpuSums, charges: Array | None = None) -> None:
        """Add to the sums.

        Args:
            pos: [N, 3] Å.
            rows: within the cutoff or further (atoms without are ghosts); None where the cutoff is infinite.
            charges: [N] e, predicted by the network.
        """


class CpuTerm(ABC):
    """A prior on the CPU.

    Attributes:
        cutoff, uses_charges: as for `fast_path.GpuTerm`; exchanges: `CpuTermOf.add` takes `exchange`.
        cost: of an edge, in the units of `thread_tuner.amount_of_work`.
        name: in reports.
    """

    name: str = "prior"
    cutoff: float
    uses_charges: bool = False
    exchanges: bool = False
    cost: int = 10

    @abstractmethod
    def prepare(self, system: System) -> CpuTermOf:
        """What depends on elements and structures. Raises ValueError for what the prior cannot do."""
