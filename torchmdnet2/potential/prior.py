"""Prior: a physical term that is added to the network's energy.

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
    """1 of 1, "1" (as in JSON) and "H".

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
    """One physical term. Registered in `torchmdnet2.registry.PRIORS`.

    Forces and stress follow from the energy: a prior has only to be differentiable in `system.pos` and
    `system.cell` (through `neighbors.vectors(system)`).

    Attributes:
        cutoff: Å of the neighbor list that `forward` is given; None when it needs none; infinity for all pairs of
            each structure, which must then not be periodic: `in_cells` gives what evaluates cells.
        uses_charges: `forward` needs the charges that the network predicts.
        reads_charge: the total charge changes the energy, other than by those charges.
        constant: the energies depend on the elements alone: no forces, and fast paths compute them once.
        repels: it keeps atoms apart that are nearer than any bond.
    """

    cutoff: float | None = None
    uses_charges: bool = False
    reads_charge: bool = False
    constant: bool = False
    repels: bool = False

    def check(self, system: System) -> None:
        """Raise ValueError for a structure that this cannot do. `forward` need not look: looking waits for a GPU.

        Args:
            system: the structure, or a batch.
        """

    def require_values(self) -> None:
        """Raise MissingBackend where values are lacking that a package holds which is not installed."""

    def adopt_values(self, other: Prior) -> None:
        """Take such values from another model's prior of the same class, where they are lacking.

        Args:
            other: any prior.
        """

    def in_cells(self, coulomb: CoulombInCells) -> Prior:
        """What takes the place of this in periodic cells: itself, or for a sum over all pairs one that ends.

        Args:
            coulomb: how Coulomb energies are summed.
        """
        return self

    def for_atoms(self, places: Tensor) -> Prior:
        """The prior of a structure made of some atoms of each of its structures, by their places there: itself.

        Args:
            places: of the atoms in their structures, from 0.
        """
        return self

    @abstractmethod
    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        """
        Args:
            system: N atoms in B structures.
            neighbors: all pairs within `cutoff`; None when `cutoff` is None.
            charges: [N] partial charges in e predicted by the network; None where it predicts none.

        Returns:
            [N] energies of the atoms in eV, their sum being the energy of the term.
        """

    def __add__(self, other: Prior | PriorSum) -> PriorSum:
        return PriorSum([self]) + other


class PriorSum(nn.ModuleList):
    """A sum of priors, written `ZBL() + D2() + Coulomb(charges)`; what a Potential takes as its `priors`."""

    def __add__(self, other: Prior | PriorSum) -> PriorSum:  # type: ignore[override]
        return PriorSum([*self, *(other if isinstance(other, PriorSum) else [other])])
