"""Prior: a physical energy that is added to the energy of the network.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from ..core.devices import Float64Buffers
from ..neighbors import NeighborList
from ..system import System
from .cells import CoulombInCells

__all__ = ["Prior", "PriorSum", "atomic_number"]


def atomic_number(element: int | str, max_z: int = 128) -> int:
    """Return the atomic number of an element, given as a number, a number in text (as in JSON) or a symbol.

    Raises:
        ValueError: there is no such element below `max_z`.
    """
    text = str(element)
    if text.isdigit():
        number = int(text)
    else:
        from ase.data import atomic_numbers

        number = atomic_numbers.get(text, -1)
    if not 0 <= number < max_z:
        raise ValueError(f"'{element}' is not an element: give a symbol, or an atomic number below {max_z}")
    return number


class Prior(Float64Buffers, ABC):
    """Base class of physical energies. Registered in `torchmdnet2.registry.PRIORS`.

    Forces and stress follow from the energy, which must be differentiable in `system.pos` and `system.cell` (through
    `neighbors.vectors(system)`).

    Attributes:
        cutoff: cutoff in Å of the neighbor list for `forward`; None if it needs none. Infinity means all pairs of each
            structure, which must not be periodic; `in_cells` returns a prior for cells.
        uses_charges: True if `forward` needs the charges that the network predicts.
        reads_charge: True if the energy depends on the total charge, other than through those charges.
        constant: True if the energies depend on the elements alone, so that there are no forces and compiled steps
            compute them once.
        repels: True if it repels atoms that are closer than any bond.
    """

    cutoff: float | None = None
    uses_charges: bool = False
    reads_charge: bool = False
    constant: bool = False
    repels: bool = False

    @property
    def needs_whole(self) -> str:
        """Why a domain, which knows a part of a structure, cannot evaluate it; "" if it can."""
        return ""

    def check(self, system: System) -> None:
        """Raise ValueError for a structure that cannot be evaluated.

        `forward` need not check, since a check waits for the GPU.

        Args:
            system: the structure, or a batch.
        """

    def require_values(self) -> None:
        """Raise MissingBackend if values are missing because the package that holds them is not installed."""

    def adopt_values(self, other: Prior) -> None:
        """Take missing values of this kind from another model's prior of the same class.

        Args:
            other: any prior.
        """

    def in_cells(self, coulomb: CoulombInCells) -> Prior:
        """Return the prior for periodic cells: this one, or for a sum over all pairs one that converges in cells.

        Args:
            coulomb: method for Coulomb sums.
        """
        return self

    def for_atoms(self, places: Tensor) -> Prior:
        """Return the prior for some atoms of its structures; by default this one.

        Args:
            places: positions of the atoms in their structures, from 0.
        """
        return self

    @abstractmethod
    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        """Return the energies of the atoms.

        Args:
            system: N atoms in B structures.
            neighbors: all pairs within `cutoff`; None if `cutoff` is None.
            charges: [N] partial charges in e from the network; None if it predicts none.

        Returns:
            [N] energies of the atoms in eV; their sum is the energy of the prior.
        """

    def __add__(self, other: Prior | PriorSum) -> PriorSum:
        return PriorSum([self]) + other


class PriorSum(nn.ModuleList):
    """A sum of priors for a Potential, written `ZBL() + D2() + Coulomb(charges)`."""

    def __add__(self, other: Prior | PriorSum) -> PriorSum:  # type: ignore[override]
        return PriorSum([*self, *(other if isinstance(other, PriorSum) else [other])])
