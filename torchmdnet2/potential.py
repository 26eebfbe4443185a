"""Potential: representation + head + priors → energy, forces, stress. The specification of every faster path.

Shapes: N atoms, E directed edges, B structures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UnknownElement
from .models.base import Features, Graph, Head, Representation, sum_over_systems
from .neighbors import NeighborList, neighbor_list
from .priors.base import Prior
from .registry import HEADS, PRIORS, REPRESENTATIONS
from .system import System

__all__ = ["Potential", "Result", "require_stress"]

SYMBOLS = (
    "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr "
    "Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt "
    "Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv "
    "Ts Og"
).split()


@dataclass(eq=False)
class Result:
    """What a potential gives.

    Attributes:
        energy: [B] eV, float64.
        forces: [N, 3] eV/Å, −dE/dpos; None when not asked for.
        stress: [B, 3, 3] eV/Å³, (1/V) dE/dε, symmetric, tensile positive; None when not asked for.
        atom_energies: [N] eV, float64, priors included; their sum is the energy.
        charges: [N] partial charges in e; None where the model has none.
    """

    energy: Tensor
    forces: Tensor | None = None
    stress: Tensor | None = None
    atom_energies: Tensor | None = None
    charges: Tensor | None = None


class Potential(nn.Module):
    """A neural-network potential, completed by physical priors.

    The energy of a structure is Σ_i [ energy_scale · (ε_i − ε_i⁰) + priors_i ] + energy_shift, ε_i being the head's
    output and ε_i⁰ that of the same atom alone and neutral, so that separated atoms have exactly the energies of
    the priors (reference energies). Sums are taken in float64.

    Args:
        representation: structure → per-atom features.
        head: per-atom features → per-atom energies.
        priors: terms that are added.
        energy_scale: eV per unit of the head.
        energy_shift: eV, added once to each structure (0 except for models trained on standardised energies).
        subtract_isolated: subtract ε_i⁰; False for models that were trained without.
        elements: atomic numbers that the model was trained on; None means all that it can represent.
        config: what `from_config` would need to build this potential, kept in the checkpoint.
    """

    _known: Tensor
    priors: Iterable[Prior]

    def __init__(
        self,
        representation: Representation,
        head: Head,
        priors: Iterable[Prior] = (),
        energy_scale: float = 1.0,
        energy_shift: float = 0.0,
        subtract_isolated: bool = True,
        elements: Iterable[int] | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.representation = representation
        self.head = head
        self.priors = nn.ModuleList(priors)  # type: ignore[assignment]
        self.energy_scale, self.energy_shift = float(energy_scale), float(energy_shift)
        self.subtract_isolated = subtract_isolated
        top = representation.max_z
        self.elements = sorted({int(z) for z in (range(1, top) if elements is None else elements)})
        if self.elements and not 0 < self.elements[0] <= self.elements[-1] < top:
            raise ValueError(f"elements must be atomic numbers 1 … {top - 1} (max_z − 1), got {self.elements}")
        known = torch.zeros(top, dtype=torch.bool)
        known[self.elements] = True
        self.register_buffer("_known", known, persistent=False)
        self.config: dict[str, Any] = dict(config or {})
        self.metadata: dict[str, Any] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Potential:
        """Build an untrained potential from plain data.

        Args:
            config: {"model": {"name": …, arguments}, "head": {"name": …, arguments}, "priors": [{"name": …,
                arguments}, …], "energy_scale", "energy_shift", "subtract_isolated", "elements"}; all but "model"
                may be absent.

        Raises:
            KeyError: a name is not registered.
            TypeError, ValueError: an argument is unknown or out of range.
        """
        model = dict(config["model"])
        representation = REPRESENTATIONS[model.pop("name")](**model)
        head = {"name": "scalar", **config.get("head", {})}
        head_class = HEADS[head.pop("name")]
        priors = [dict(p) for p in config.get("priors", [])]
        return cls(
            representation,
            head_class(representation.hidden_channels, **head),
            [PRIORS[p.pop("name")](**p) for p in priors],
            energy_scale=config.get("energy_scale", 1.0),
            energy_shift=config.get("energy_shift", 0.0),
            subtract_isolated=config.get("subtract_isolated", True),
            elements=config.get("elements"),
            config=config,
        )

    # --- properties ----------------------------------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """Cutoff of the network's neighbor list, Å."""
        return self.representation.cutoff

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the network."""
        return next(self.representation.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return self._known.device

    # --- evaluation ----------------------------------------------------------------------------------------------

    def forward(
        self,
        system: System,
        forces: bool = True,
        stress: bool = False,
        neighbors: NeighborList | None = None,
        create_graph: bool | None = None,
    ) -> Result:
        """Energy, forces and stress of a batch of structures.

        Args:
            system: N atoms in B structures, on the potential's device; never changed.
            forces, stress: what to compute.
            neighbors: edges within `cutoff`, to reuse a list; searched when None.
            create_graph: keep the graph, so that the results can be differentiated again; by default only in
                training mode.

        Returns:
            Result; forces and stress in the floating-point type of `system.pos`.

        Raises:
            ValueError: a position, cell or charge is not finite (names the atom); stress without a cell.
            UnknownElement: an atom's element is not one the model was trained on.
        """
        create_graph = self.training if create_graph is None else create_graph
        system.validate()
        self.check_elements(system.z)
        with torch.inference_mode(False), torch.enable_grad():
            if neighbors is None:
                neighbors = neighbor_list(system, self.cutoff)
            system, leaves = _with_leaves(system, forces, stress)
            atom_energies, charges = self.atom_energies(system, neighbors)
            energy = sum_over_systems(atom_energies, system.batch, system.num_systems) + self.energy_shift
            gradients = _gradients(energy, leaves, create_graph)
            result = Result(energy, atom_energies=atom_energies, charges=charges)
            if forces:
                result.forces = -gradients["pos"]
            if stress:
                gradient = gradients["strain"]
                result.stress = (gradient + gradient.transpose(1, 2)) / (2 * system.volume.detach()[:, None, None])
        if not create_graph:
            for name, value in vars(result).items():
                setattr(result, name, None if value is None else value.detach())
        return result

    def atom_energies(self, system: System, neighbors: NeighborList) -> tuple[Tensor, Tensor | None]:
        """Energies [N] (eV, float64, priors included) and charges [N] or None of the atoms; differentiable."""
        graph = Graph.build(system, neighbors, self.dtype)
        features = self.representation(graph)
        energies = self.head(features, graph).double()
        if self.subtract_isolated:
            alone = torch.diff(neighbors.row_ptr) == 0
            alone = alone & (system.charge == 0)[system.batch]
            # equal up to rounding for an atom alone: make it exact
            energies = torch.where(alone, 0.0, energies - self.isolated_energies()[system.z])
        total = energies * self.energy_scale
        lists = {self.cutoff: neighbors}
        for prior in self.priors:
            if prior.cutoff is not None and prior.cutoff not in lists:
                lists[prior.cutoff] = neighbor_list(system, prior.cutoff)
            total = total + prior(system, None if prior.cutoff is None else lists[prior.cutoff])
        return total, _partial_charges(features)

    def isolated_energies(self) -> Tensor:
        """ε⁰ of each element by atomic number, [max_z] float64 in the head's unit; 0 for unknown elements."""
        z = torch.tensor(self.elements, dtype=torch.long, device=self.device)
        graph = Graph.isolated(z, self.dtype)
        energies = self.head(self.representation(graph), graph).double()
        return energies.new_zeros(self._known.shape[0]).index_put((z,), energies)

    def check_elements(self, z: Tensor) -> None:
        """Raise UnknownElement when an atomic number is not one that the model was trained on."""
        top = self._known.shape[0]
        unknown = ~self._known[z.clamp(0, top - 1)] | (z < 0) | (z >= top)
        if bool(unknown.any()):
            atom = int(unknown.nonzero()[0, 0])
            number = int(z[atom])
            name = f"{SYMBOLS[number]} (Z = {number})" if 0 < number < len(SYMBOLS) else f"Z = {number}"
            trained = ", ".join(SYMBOLS[e] if e < len(SYMBOLS) else str(e) for e in self.elements)
            raise UnknownElement(f"atom {atom} is {name}, and this model knows only {trained}")


def require_stress(system: System) -> None:
    """Raise ValueError unless every structure has a cell with a volume."""
    flat = system.volume.detach() == 0
    if bool(flat.any()):
        raise ValueError(f"system {int(flat.nonzero()[0, 0])} has no cell with a volume, so it has no stress")


def _with_leaves(system: System, forces: bool, stress: bool) -> tuple[System, dict[str, Tensor]]:
    """The system as a function of the positions and of a symmetric strain at zero."""
    leaves: dict[str, Tensor] = {}
    pos, cell = system.pos, system.cell
    if pos.is_inference():
        pos, cell = pos.clone(), cell.clone()
        system = System(
            z=system.z.clone(), pos=pos, batch=system.batch.clone(), cell=cell, pbc=system.pbc.clone(),
            charge=system.charge.clone(), spin=system.spin.clone(),
        )  # fmt: skip
    if forces:
        pos = leaves["pos"] = pos if pos.requires_grad else pos.detach().requires_grad_()
    if stress:
        require_stress(system)
        strain = leaves["strain"] = pos.new_zeros(system.num_systems, 3, 3).requires_grad_()
        symmetric = (strain + strain.transpose(1, 2)) / 2
        pos = pos + torch.einsum("ni,nij->nj", pos, symmetric[system.batch])
        cell = cell + cell @ symmetric
    return system.replace(pos=pos, cell=cell), leaves


def _gradients(energy: Tensor, leaves: dict[str, Tensor], create_graph: bool) -> dict[str, Tensor]:
    if not leaves or not energy.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(energy.sum(), list(leaves.values()), create_graph=create_graph, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def _partial_charges(features: Features) -> Tensor | None:
    return None if features.charges is None else features.charges[:, -1]
