"""Coulomb energy of fixed or predicted charges."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ...errors import StructureWarning
from ...neighbors import NeighborList
from ...neighbors.pairs import require_molecules
from ...potential.cells import CoulombInCells
from ...potential.prior import Prior, atomic_number
from ...registry import PRIORS
from ...system import System
from .electrostatics import Damping, Electrostatics, Method
from .ewald import require_all_or_none

__all__ = ["Coulomb"]


_CHARGED = 1e-3  # e, beyond the rounding of charges in tables


@PRIORS.register("coulomb")
class Coulomb(Prior):
    """Coulomb energy of partial charges, see `Electrostatics` for the methods and the damping.

    Args:
        charges: "predicted": those of the network; or fixed ones in e, by element {symbol or atomic number: charge}
            (elements that are not listed have 0), or by atom [q_1, …, q_n] where every structure has these n atoms in
            this order.
        method: "all_pairs" (molecules), "reaction_field", "dsf", "ewald" or "pme" (periodic structures).
        cutoff: Å; not used by "all_pairs".
        damping: "none", "exp" or "cosine".
        damping_lower: where the damping "cosine" begins to rise from 0, Å.
        damping_upper: where the damping ends, Å.
        dielectric: outside the reaction field's cutoff; None means infinite.
        accuracy: of the Ewald summation, relative.
        switch_width: Å before the cutoff over which the reaction field's energy goes smoothly to zero; 0 ends it with
            a jump of the force.

    Raises:
        ValueError: an option is unknown or out of range; `charges` is empty; charges are needed that the network does
            not predict; a structure has another number of atoms than `charges`.
    """

    table: Tensor
    per_atom: Tensor

    def __init__(
        self,
        charges: Literal["predicted"] | Mapping[int | str, float] | Sequence[float] = "predicted",
        method: Method = "all_pairs",
        cutoff: float = 10.0,
        damping: Damping = "none",
        damping_lower: float = 0.0,
        damping_upper: float = 4.6,
        dielectric: float | None = None,
        accuracy: float = 1e-9,
        switch_width: float = 1.0,
    ):
        super().__init__()
        self.energy = Electrostatics(
            method, cutoff, damping, damping_lower, damping_upper, dielectric, accuracy, switch_width
        )
        self.cutoff = self.energy.cutoff
        table, per_atom = torch.zeros(128, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        if len(charges) == 0:
            raise ValueError("charges is empty: give those of each element or of each atom, or 'predicted'")
        if isinstance(charges, str):
            if charges != "predicted":
                raise ValueError(f"charges must be 'predicted' or numbers, got '{charges}'")
            self.source = "predicted"
        elif isinstance(charges, Mapping):
            self.source = "element"
            for z, charge in charges.items():
                table[atomic_number(z)] = float(charge)
        else:
            self.source = "atom"
            per_atom = torch.tensor([float(q) for q in charges], dtype=torch.float64)
        self.uses_charges = self.source == "predicted"
        self.register_buffer("table", table)
        self.register_buffer("per_atom", per_atom)

    def check(self, system: System) -> None:
        """Refuse another number of atoms than there are charges, and structures that the method cannot sum.

        Args:
            system: the structure, or a batch.

        Raises:
            ValueError: there are such structures.
        """
        if self.energy.method == "all_pairs":
            require_molecules(system)
        if self.source == "atom":
            self._check_sizes(system)
        if self.energy.method in ("ewald", "pme"):
            periodic = require_all_or_none(system)
            self._tell_of_background(system, periodic)

    def _tell_of_background(self, system: System, periodic: Tensor) -> None:
        """Warn of charged cells."""
        if not bool(periodic.any()):
            return
        total = system.charge.detach().double()
        if self.source != "predicted":
            total = torch.zeros_like(total).index_add(0, system.batch, self.fixed_charges(system))
        charged = (periodic & (total.abs() > _CHARGED)).nonzero()
        if charged.numel():
            first = int(charged[0, 0])
            warnings.warn(
                f"system {first} is a periodic cell of charge {float(total[first]):.6g}: a uniform background "
                "neutralises it; energies of cells of other shape or size do not compare with its energy",
                StructureWarning,
                stacklevel=2,
            )

    def _check_sizes(self, system: System) -> None:
        size = system.atom_counts
        wrong = (size != self.per_atom.shape[0]).nonzero()
        if wrong.numel():
            first = int(wrong[0, 0])
            raise ValueError(
                f"system {first} has {int(size[first])} atoms, and the prior 'coulomb' has fixed charges of "
                f"{self.per_atom.shape[0]} atoms"
            )

    def in_cells(self, coulomb: CoulombInCells) -> Prior:
        """By a sum over images, where this sums over all pairs.

        Args:
            coulomb: how Coulomb energies are summed.
        """
        energy = self.energy.in_cells(coulomb)
        if energy is self.energy:
            return self
        part = copy.copy(self)
        part._modules, part.cutoff = {"energy": energy}, energy.cutoff
        return part

    def for_atoms(self, places: Tensor) -> Coulomb:
        if self.source != "atom":
            return self
        part = copy.deepcopy(self)
        part.per_atom = self.per_atom[places]
        return part

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        if self.source == "predicted":
            if charges is None:
                raise ValueError("the prior 'coulomb' needs charges, and this model predicts none: give fixed charges")
            q = charges
        else:
            q = self.fixed_charges(system)
        return self.energy(system, neighbors, q[:, None], torch.ones(1, device=q.device))

    def fixed_charges(self, system: System) -> Tensor:
        """The charges that are not predicted.

        Args:
            system: N atoms.

        Returns:
            [N] e, float64.
        """
        return self.table[system.z] if self.source == "element" else self._repeat(system)

    def _repeat(self, system: System) -> Tensor:
        """The charges of the atoms of every structure, in the order of the batch."""
        batch = system.batch
        order = torch.argsort(batch, stable=True)
        size = system.atom_counts
        place = torch.arange(system.num_atoms, device=system.device) - (size.cumsum(0) - size)[batch[order]]
        # atoms beyond the list are those that a padded structure ends with
        charges = self.per_atom[place.clamp(max=self.per_atom.shape[0] - 1)]
        return torch.zeros_like(charges).index_copy(0, order, charges)
