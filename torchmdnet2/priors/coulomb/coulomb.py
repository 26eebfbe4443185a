"""Coulomb energy of fixed or predicted charges as a prior, and the methods for sums over point charges.

All pairs, reaction field, damped shifted force, Ewald and particle-mesh sums. Sources: P. P. Ewald, Ann. Phys. 369, 253
(1921), in the form of M. Allen, D. Tildesley, Computer Simulation of Liquids (2017), §6.2; damped shifted force:
C. Fennell, J. Gezelter, J. Chem. Phys. 124, 234104 (2006); reaction field: I. Tironi et al., J. Chem. Phys. 102, 5451
(1995); short-range damping "exp": D. Anstine, R. Zubatyuk, O. Isayev, AIMNet2, Chem. Sci. 16, 10228 (2025).

Shapes: N atoms, E directed edges, C charge channels.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ...errors import StructureWarning
from ...neighbors import NeighborList
from ...neighbors.pairs import pair_distances, require_molecules, sum_pairs, taper
from ...potential.cells import CoulombInCells
from ...potential.prior import Prior, atomic_number
from ...registry import PRIORS
from ...system import System
from ...units import COULOMB
from .ewald import EwaldPlan, EwaldSum, active_plan, require_all_or_none

__all__ = ["Coulomb", "Damping", "Electrostatics", "Method"]


_CHARGED = 1e-3  # e; a smaller total charge may be rounding of charges in tables


@PRIORS.register("coulomb")
class Coulomb(Prior):
    """Adds the Coulomb energy of partial charges; see `Electrostatics` for the methods and the damping.

    Args:
        charges: "predicted" takes the charges of the network. Fixed charges in e are given by element {symbol or atomic
            number: charge} (elements that are not listed have 0), or by atom [q_1, …, q_n] if every structure has these
            n atoms in this order.
        method: "all_pairs" (molecules), "reaction_field", "dsf", "ewald" or "pme" (periodic structures).
        cutoff: Å; not used by "all_pairs".
        damping: "none", "exp" or "cosine".
        damping_lower: distance in Å at which the damping "cosine" begins to rise from 0.
        damping_upper: distance in Å at which the damping ends.
        dielectric: dielectric constant outside the reaction field's cutoff; None means infinite.
        accuracy: relative accuracy of the Ewald summation.
        switch_width: width in Å, before the cutoff, over which the reaction field's energy goes smoothly to zero; with
            0 the force jumps at the cutoff.

    Raises:
        ValueError: an option is unknown or out of range, `charges` is empty, the network does not predict the required
            charges, or the number of atoms of a structure differs from that of `charges`.
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

    @property
    def needs_whole(self) -> str:
        if self.energy.method in ("ewald", "pme"):
            return (
                f"the prior 'coulomb' with method '{self.energy.method}' sums over the whole structure, which domains "
                "do not know: method 'reaction_field' is a sum over near pairs"
            )
        if self.source == "atom":
            return "the prior 'coulomb' has charges by atom, whose order domains do not keep"
        return ""

    def check(self, system: System) -> None:
        """Refuse structures whose number of atoms differs from that of the charges, or that the method cannot sum.

        Args:
            system: the structure, or a batch.

        Raises:
            ValueError: there is such a structure.
        """
        if self.energy.method == "all_pairs":
            require_molecules(system)
        if self.source == "atom":
            self._check_sizes(system)
        if self.energy.method in ("ewald", "pme"):
            periodic = require_all_or_none(system)
            self._warn_of_background(system, periodic)

    def _warn_of_background(self, system: System, periodic: Tensor) -> None:
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
                f"structure {first} is a periodic cell of charge {float(total[first]):.6g}: a uniform background "
                "neutralises it; its energy cannot be compared with that of a cell of other shape or size",
                StructureWarning,
                stacklevel=2,
            )

    def _check_sizes(self, system: System) -> None:
        size = system.atom_counts
        wrong = (size != self.per_atom.shape[0]).nonzero()
        if wrong.numel():
            first = int(wrong[0, 0])
            raise ValueError(
                f"structure {first} has {int(size[first])} atoms, but the prior 'coulomb' has fixed charges of "
                f"{self.per_atom.shape[0]} atoms"
            )

    def in_cells(self, coulomb: CoulombInCells) -> Prior:
        """Return a prior that sums over images in cells, if this one sums over all pairs; else this one.

        Args:
            coulomb: method for Coulomb sums.
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
                raise ValueError("the prior 'coulomb' needs charges, but this model predicts none: give fixed charges")
            q = charges
        else:
            q = self.fixed_charges(system)
        return self.energy(system, neighbors, q[:, None], torch.ones(1, device=q.device))

    def fixed_charges(self, system: System) -> Tensor:
        """Return the fixed charges of atoms.

        Args:
            system: N atoms.

        Returns:
            [N] e, float64.
        """
        return self.table[system.z] if self.source == "element" else self._repeat(system)

    def _repeat(self, system: System) -> Tensor:
        """Return the charges by atom for every structure, in the order of the batch."""
        batch = system.batch
        order = torch.argsort(batch, stable=True)
        size = system.atom_counts
        place = torch.arange(system.num_atoms, device=system.device) - (size.cumsum(0) - size)[batch[order]]
        # a padded structure ends with atoms beyond the list
        charges = self.per_atom[place.clamp(max=self.per_atom.shape[0] - 1)]
        return torch.zeros_like(charges).index_copy(0, order, charges)


Method = Literal["all_pairs", "reaction_field", "dsf", "ewald", "pme"]
Damping = Literal["none", "exp", "cosine"]

PME_CUTOFF, PME_ACCURACY = 10.0, 1e-8
"""Real-space cutoff in Å, and relative accuracy, of PME in cells by default."""
DSF_CUTOFF, DSF_ALPHA = 15.0, 0.2
"""Cutoff in Å and α in 1/Å of damped shifted forces, as in AIMNet2."""


# --- Energies of point charges ---


class Electrostatics(nn.Module):
    """Energy ½ Σ_i Σ_{j≠i} k_e q_i q_j f(d) s(d) of point charges; f damps short distances, the method defines s.

    * "all_pairs": s = 1/d, every pair of a molecule, O(n²) per molecule; not for periodic structures.
    * "reaction_field": s = 1/d + k d² − c below the cutoff, 0 beyond, for a medium of the given dielectric constant
      outside. Alone, this form has a jump k_e q_i q_j · 3/((2ε+1) r_c²) of the force at the cutoff unless ε is
      infinite. So over the last `switch_width` the pair's energy goes smoothly to zero (two continuous derivatives).
    * "dsf": damped shifted force, s = v(d) − v(r_c) − v'(r_c) (d − r_c) below the cutoff with v = erfc(α d)/d, α =
      0.2/Å, and − q_i² (α/√π + v(r_c)/2) for each atom. It estimates the Ewald sum in O(N). Energy and force are 0 at
      the cutoff. Where f is not 1, (1 − f)/d is subtracted.
    * "ewald": s = 1/d over all periodic images, to the given accuracy, in a conducting surrounding. A uniform
      background neutralises a charged cell. Molecules in the same batch are summed over all pairs. The sum is exactly
      invariant under translation, and its work grows as N² at a given cutoff: use it up to about a thousand atoms.
    * "pme": the same by particle-mesh Ewald in O(N log N). It is invariant under translation, and equal for a cell and
      its supercell, to the given accuracy, which determines the mesh and the order of its splines.

    The damping f is 1 beyond `damping_upper`. "exp" is 1 − exp(1 − 1/(1 − (d/upper)²)), as in AIMNet2; "cosine" rises
    from 0 at `damping_lower` as ½ − ½ cos. So a short-range network can describe close pairs alone.

    Args:
        method: "all_pairs", "reaction_field", "dsf", "ewald" or "pme".
        cutoff: cutoff in Å of the pairs ("reaction_field", "dsf") or of the real-space part ("ewald", "pme").
        damping: "none", "exp" or "cosine".
        damping_lower, damping_upper: Å.
        dielectric: relative permittivity outside the reaction field's cutoff; None means infinite.
        accuracy: relative size of the terms that Ewald summation leaves out, and of the mesh's error. 1e-6 is enough
            for most simulations with "pme"; below 1e-9 it agrees with "ewald" to 1e-8 eV per atom.
        switch_width: Å, for "reaction_field"; 0 is the plain form, as in TorchMD-Net and OpenMM.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self,
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
        if method not in get_args(Method):
            raise ValueError(f"method must be {_or(get_args(Method))}, got '{method}'")
        if damping not in ("none", "exp", "cosine"):
            raise ValueError(f"damping must be none, exp or cosine, got '{damping}'")
        if damping != "none" and not 0 <= damping_lower < damping_upper:
            raise ValueError(f"damping must have 0 ≤ lower < upper, got {damping_lower} … {damping_upper} Å")
        if method != "all_pairs" and not (0 < cutoff < math.inf):
            raise ValueError(f"the cutoff must be a positive number of Å, got {cutoff}")
        if method in ("ewald", "pme", "dsf") and damping != "none" and damping_upper > cutoff:
            raise ValueError(f"damping ends at {damping_upper} Å, beyond the cutoff of {cutoff} Å")
        if dielectric is not None and dielectric < 1:
            raise ValueError(f"the dielectric constant must be at least 1, got {dielectric}")
        if not 0 < accuracy < 1e-2:
            raise ValueError(f"the accuracy must be between 0 and 0.01, got {accuracy}")
        if method == "reaction_field" and not 0 <= switch_width < cutoff:
            raise ValueError(f"switch_width must be between 0 and the cutoff, got {switch_width} and {cutoff} Å")
        self.method, self.damping = method, damping
        self.cutoff = math.inf if method == "all_pairs" else float(cutoff)
        self.damping_lower, self.damping_upper = float(damping_lower), float(damping_upper)
        ratio = 0.5 if dielectric is None else (dielectric - 1) / (2 * dielectric + 1)
        self.reaction, self.shift = ratio / self.cutoff**3, (1 + ratio) / self.cutoff
        self.switch_width = float(switch_width)
        # real and reciprocal terms decay as exp(−(α r)²) and exp(−(k/2α)²); this α gives both the same accuracy
        self.reach = math.sqrt(-math.log(accuracy))
        self.accuracy = float(accuracy)

    def in_cells(self, coulomb: CoulombInCells) -> Electrostatics:
        """Return a sum over the images of periodic cells, with the same damping, instead of a sum over all pairs.

        Args:
            coulomb: "pme" with a real-space cutoff of 10 Å and a relative accuracy of 1e-8, or "dsf" with 15 Å.

        Returns:
            The sum for cells; itself if it is not a sum over all pairs.
        """
        if self.method != "all_pairs":
            return self
        cutoff = PME_CUTOFF if coulomb == "pme" else DSF_CUTOFF
        if self.damping != "none":
            cutoff = max(cutoff, self.damping_upper)
        return Electrostatics(
            coulomb, cutoff, self.damping, self.damping_lower, self.damping_upper, accuracy=PME_ACCURACY
        )  # type: ignore[arg-type]

    def forward(self, system: System, neighbors: NeighborList, charges: Tensor, weights: Tensor) -> Tensor:
        """Return the energies of the atoms.

        Args:
            system: N atoms.
            neighbors: pairs within `cutoff`.
            charges: [N, C] in e.
            weights: [C] weights of the channels, whose sum is 1.

        Returns:
            [N] energies in eV, float64.

        Raises:
            ValueError: a structure is periodic with "all_pairs", or periodic in some directions only with "ewald" or
                "pme".
        """
        q = charges.double() * weights.double().sqrt()
        if self.method in ("ewald", "pme"):
            return COULOMB * self._ewald(system, neighbors, q)
        d = pair_distances(system, neighbors)
        if self.method == "dsf":
            return COULOMB * self._shifted_force(system, neighbors, q, d)
        kernel = 1 / d
        if self.method == "reaction_field":
            end = taper(d, self.cutoff - self.switch_width, self.cutoff)
            kernel = (kernel + self.reaction * d * d - self.shift) * end
        return COULOMB * sum_pairs(_products(q, neighbors) * self.factor(d) * kernel, neighbors, system.num_atoms)

    def factor(self, d: Tensor) -> Tensor:
        """Return the damping f(d) of distances in Å, [E]."""
        if self.damping == "exp":
            t = (d / self.damping_upper).clamp(max=1 - 1e-6)
            return 1 - torch.exp(1 - 1 / (1 - t * t))
        if self.damping == "cosine":
            phase = ((d - self.damping_lower) / (self.damping_upper - self.damping_lower)).clamp(0, 1)
            return 0.5 - 0.5 * torch.cos(math.pi * phase)
        return torch.ones_like(d)

    def _ewald(self, system: System, neighbors: NeighborList, q: Tensor) -> Tensor:
        plan = active_plan(self) or self.plan(system)
        d = pair_distances(system, neighbors)
        short = (torch.erfc(self.alpha * d) - 1 + self.factor(d)) / d
        of_receiver = system.batch.index_select(0, neighbors.edge_index[0])
        short = torch.where(plan.periodic.index_select(0, of_receiver), short, 0.0)
        return sum_pairs(_products(q, neighbors) * short, neighbors, system.num_atoms) + plan.energies(system, q)

    @property
    def at_cutoff(self) -> tuple[float, float]:
        """For "dsf": v = erfc(α d)/d and its slope at the cutoff, 1/Å and 1/Å²."""
        value = math.erfc(DSF_ALPHA * self.cutoff) / self.cutoff
        falling = 2 * DSF_ALPHA / math.sqrt(math.pi) * math.exp(-((DSF_ALPHA * self.cutoff) ** 2))
        return value, -(value + falling) / self.cutoff

    @property
    def alone(self) -> float:
        """For "dsf": the constant that is subtracted for an atom of charge 1, 1/Å."""
        return DSF_ALPHA / math.sqrt(math.pi) + self.at_cutoff[0] / 2

    def _shifted_force(self, system: System, neighbors: NeighborList, q: Tensor, d: Tensor) -> Tensor:
        end, (value, slope) = self.cutoff, self.at_cutoff
        kernel = (torch.erfc(DSF_ALPHA * d) - 1 + self.factor(d)) / d - value - slope * (d - end)
        pairs = _products(q, neighbors) * torch.where(d < end, kernel, 0.0)
        return sum_pairs(pairs, neighbors, system.num_atoms) - self.alone * (q * q).sum(1)

    @property
    def alpha(self) -> float:
        """Ewald parameter, 1/Å."""
        return self.reach / self.cutoff

    def plan(self, system: System, room: float = 0.0, mesh_room: float = 0.0) -> EwaldPlan:
        """Return the sizes of "ewald" and "pme" for these structures; see `EwaldPlan`.

        Raises:
            ValueError: a structure is periodic in some directions only.
        """
        sums = EwaldSum(self.method == "pme", self.alpha, 2 * self.alpha * self.reach, self.accuracy, self.factor)
        return EwaldPlan(sums, system, room, mesh_room)


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _products(q: Tensor, neighbors: NeighborList) -> Tensor:
    """Return Σ_c q_ic q_jc of each pair, [E]."""
    receiver, sender = neighbors.edge_index
    return (q.index_select(0, receiver) * q.index_select(0, sender)).sum(1)
