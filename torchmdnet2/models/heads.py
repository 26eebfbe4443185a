"""Heads, which turn features of atoms into energies, charges, dipoles and other properties.

Shapes: N atoms, F features, C charge channels of all stages together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..potential.cells import CoulombInCells
from ..potential.graph import (
    Features,
    Graph,
    Head,
    PropertyHead,
    atom_counts,
    centered_positions,
    pool,
    sum_over_systems,
)
from ..priors.coulomb.coulomb import Electrostatics, Method
from ..registry import HEADS
from ..system import System
from .layers import MLP, GatedEquivariantBlock

__all__ = [
    "ChargesHead", "DipoleHead", "EquivariantScalarHead", "GatedScalarHead", "ScalarCoulombHead", "ScalarHead",
    "ScalarPropertyHead", "SpatialExtentHead", "VectorHead", "VectorNetwork", "scalar_network",
]  # fmt: skip


Reduce = Literal["sum", "mean"]


def scalar_network(hidden_channels: int, activation: str, num_hidden_layers: int = 0) -> MLP:
    """Return the network F → F/2 → 1 of the scalar heads."""
    return MLP(hidden_channels, hidden_channels // 2, 1, activation, num_hidden_layers)


class VectorNetwork(nn.ModuleList):
    """Two gated blocks F → F/2 → 1 on scalar and vector features."""

    def __init__(self, hidden_channels: int, activation: str):
        half = hidden_channels // 2
        super().__init__(
            [
                GatedEquivariantBlock(hidden_channels, half, activation, activate=True),
                GatedEquivariantBlock(half, 1, activation, activate=False),
            ]
        )

    def forward(self, features: Features) -> tuple[Tensor, Tensor]:
        """Return a scalar and a vector for each atom, [N] and [N, 3].

        Raises:
            ValueError: the representation has no vector features.
        """
        if features.v is None:
            raise ValueError(
                "this head needs vector features: use the model 'equivariant_transformer', or another head"
            )
        x, v = features.x, features.v
        for block in self:
            x, v = block(x, v)
        return x.squeeze(1), v.squeeze(2)


def _share(energies: Tensor, graph: Graph, reduce: str) -> Tensor:
    """Return energies of atoms whose sum over a structure is the sum or the mean of the given ones."""
    if reduce == "sum":
        return energies
    return energies / atom_counts(graph).clamp(min=1)[graph.batch]


def _check_reduce(reduce: str) -> None:
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be 'sum' or 'mean', got '{reduce}'")


@HEADS.register("scalar")
class ScalarHead(Head):
    """Energy of an atom from its scalar features by a small network F → F/2 → 1.

    Args:
        hidden_channels: number of features F.
        activation: name of the activation function.
        num_hidden_layers: number of further layers of width F/2.
        reduce: the energy of a structure is the "sum" over its atoms, or the "mean" for quantities that do not grow
            with the structure (then set subtract_isolated to False).
    """

    def __init__(
        self, hidden_channels: int, activation: str = "silu", num_hidden_layers: int = 0, reduce: Reduce = "sum"
    ):
        super().__init__()
        _check_reduce(reduce)
        self.reduce = reduce
        self.output_network = scalar_network(hidden_channels, activation, num_hidden_layers)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        """Return the energies of the atoms in the model's unit, [N]."""
        energies = self.output_network(features.x).squeeze(1)
        if features.energies is not None:
            energies = energies + features.energies
        return _share(energies, graph, self.reduce)


@HEADS.register("gated_scalar")
class GatedScalarHead(Head):
    """Energy of an atom as the product of a value and a gate between 0 and 1, two networks F → F → F → F → 1.

    The read-out "weighted atom" of matgl (C. Chen, S. P. Ong, Nat. Comput. Sci. 2, 718 (2022), arXiv 2202.02450).

    Args:
        hidden_channels: F.
        activation: name of the activation function.
    """

    def __init__(self, hidden_channels: int, activation: str = "silu"):
        super().__init__()
        self.value = MLP(hidden_channels, hidden_channels, 1, activation, 2)
        self.gate = MLP(hidden_channels, hidden_channels, 1, activation, 2)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        """Return the energies of the atoms in the model's unit, [N]."""
        return (self.value(features.x) * torch.sigmoid(self.gate(features.x))).squeeze(1)


@HEADS.register("equivariant_scalar")
class EquivariantScalarHead(Head):
    """Energy of an atom from its scalar and vector features by two gated blocks F → F/2 → 1.

    Args:
        hidden_channels: F.
        activation: name of the activation function.
        reduce: "sum" or "mean", see ScalarHead.
    """

    reads_vectors = True

    def __init__(self, hidden_channels: int, activation: str = "silu", reduce: Reduce = "sum"):
        super().__init__()
        _check_reduce(reduce)
        self.reduce = reduce
        self.output_network = VectorNetwork(hidden_channels, activation)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        """Return the energies of the atoms in the model's unit, [N]."""
        return _share(self.output_network(features)[0], graph, self.reduce)


@HEADS.register("scalar_coulomb")
class ScalarCoulombHead(Head):
    """Energy of an atom by a network, plus the Coulomb energy of the latent charges of TensorNet2.

    The Coulomb energy is the weighted mean over the charge channels of all stages, damped at short distance by
    1 − exp(1 − 1/(1 − (d/4.6 Å)²)). As in TorchMD-Net, `energy_scale` scales it too, so that the charges of a trained
    model are in e only if the scale is 1. For new models use the head "scalar" and the prior "coulomb" with predicted
    charges and the damping "exp", whose energy is not scaled.

    Args:
        hidden_channels: number of features F.
        q_weights: C weights of the channels, stage by stage.
        activation: name of the activation function.
        num_hidden_layers: number of further layers of width F/2.
        method: "all_pairs", "reaction_field", "dsf", "ewald" or "pme", see `Electrostatics`.
        coulomb_cutoff: cutoff in Å; not used by "all_pairs".
        dielectric: dielectric constant outside the reaction field's cutoff; None means infinite.
        accuracy: relative accuracy of the Ewald summation.
        switch_width: width in Å, before the cutoff, over which the reaction field's energy goes smoothly to zero; 0
            reproduces TorchMD-Net, whose force jumps at the cutoff.

    Raises:
        ValueError: an option is out of range, or the model has no charges or another number of channels.
    """

    reads_charge = True
    qweights: Tensor

    def __init__(
        self,
        hidden_channels: int,
        q_weights: Sequence[float],
        activation: str = "silu",
        num_hidden_layers: int = 0,
        method: Method = "all_pairs",
        coulomb_cutoff: float = 10.0,
        dielectric: float | None = 78.3,
        accuracy: float = 1e-9,
        switch_width: float = 1.0,
    ):
        super().__init__()
        weights = torch.tensor([float(w) for w in q_weights])
        if weights.numel() == 0 or bool((weights < 0).any()) or float(weights.sum()) <= 0:
            raise ValueError(f"q_weights must not be negative, and some must be positive; got {list(q_weights)}")
        self.output_network = scalar_network(hidden_channels, activation, num_hidden_layers)
        self.register_buffer("qweights", weights)
        self.coulomb = Electrostatics(
            method, coulomb_cutoff, damping="exp", damping_upper=4.6, dielectric=dielectric, accuracy=accuracy,
            switch_width=switch_width,
        )  # fmt: skip
        self.pair_cutoff = self.coulomb.cutoff

    def in_cells(self, coulomb: CoulombInCells) -> Head:
        sums = self.coulomb.in_cells(coulomb)
        if sums is self.coulomb:
            return self
        part = copy.copy(self)
        part._modules, part.pair_cutoff = {**self._modules, "coulomb": sums}, sums.cutoff
        return part

    def forward(self, features: Features, graph: Graph) -> Tensor:
        """Return the energies of the atoms in the model's unit, [N]."""
        energies = self.output_network(features.x).squeeze(1)
        if graph.system is None or graph.pairs is None:
            return energies
        channels = 0 if features.charges is None else features.charges.shape[1] * features.charges.shape[2]
        if features.charges is None or channels != self.qweights.numel():
            raise ValueError(
                f"the head has weights for {self.qweights.numel()} charge channels (stages × q_dim), but the model has "
                f"{channels}"
            )
        pairs = graph.pairs(self.coulomb.cutoff)
        weights = self.qweights.double()
        return energies.double() + self.coulomb(
            graph.system, pairs, features.charges.flatten(1), weights / weights.sum()
        )


# --- Heads of properties that are not the energy: charges, dipole, electronic spatial extent, vectors, scalars ---


def _centered(graph: Graph) -> Tensor:
    """Return positions relative to the centre of mass of the atoms that heads count, [N, 3] Å, float64."""
    assert graph.system is not None
    return centered_positions(graph.system, graph.readout)


class _Centered(PropertyHead):
    """Base class of properties that depend on `centered_positions`."""

    def check(self, system: System) -> None:
        """Raise ValueError for a periodic structure, which has no such centre."""
        periodic = system.pbc.any(1)
        if bool(periodic.any()):
            raise ValueError(
                f"structure {int(periodic.nonzero()[0, 0])} is periodic: its dipole and extent depend on the choice of "
                'the cell, so the model does not give them (potential.properties.pop("dipole") leaves the energy alone)'
            )


class _AtomNetwork(PropertyHead):
    """Base class of properties from a small network, which gives a scalar and, if `equivariant`, a vector per atom."""

    reads_edges = False

    def __init__(self, hidden_channels: int, activation: str, num_hidden_layers: int, equivariant: bool, scale: float):
        super().__init__()
        if equivariant and num_hidden_layers:
            raise ValueError("num_hidden_layers is for networks without vectors: set equivariant to False")
        self.equivariant, self.scale = equivariant, float(scale)
        self.reads_vectors = equivariant
        self.output_network: VectorNetwork | torch.nn.Module = (
            VectorNetwork(hidden_channels, activation)
            if equivariant
            else scalar_network(hidden_channels, activation, num_hidden_layers)
        )

    def atom_values(self, features: Features) -> tuple[Tensor, Tensor | None]:
        """Return scalars [N] and vectors [N, 3] or None, float64, in the unit of the property."""
        if self.equivariant:
            x, v = self.output_network(features)
            return x.double() * self.scale, v.double() * self.scale
        return self.output_network(features.x).squeeze(1).double() * self.scale, None


@HEADS.register("charges")
class ChargesHead(_AtomNetwork):
    """Partial charges [N] in e that sum to the total charge: q_i = c_i + (Q − Σ_j c_j)/n.

    Args:
        hidden_channels: F.
        activation: name of the activation function.
        num_hidden_layers: further layers of the network.
    """

    property, per, unit = "charges", "atom", "e"
    reads_charge = True

    def __init__(self, hidden_channels: int, activation: str = "silu", num_hidden_layers: int = 0):
        super().__init__(hidden_channels, activation, num_hidden_layers, False, 1.0)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        charges = self.atom_values(features)[0]
        ones = torch.ones_like(charges)
        size = sum_over_systems(ones, graph.batch, graph.num_systems).clamp(min=1)
        missing = graph.charge.double() - sum_over_systems(charges, graph.batch, graph.num_systems)
        return charges + (missing / size).index_select(0, graph.batch)


@HEADS.register("dipole")
class DipoleHead(_Centered, _AtomNetwork):
    """Dipole moment [B, 3] in e·Å: Σ_i [c_i (r_i − r_com) + μ_i] with μ_i from the vector features.

    For molecules only. TorchMD-Net's DipoleMoment is its length.

    Args:
        hidden_channels: F.
        activation: name of the activation function.
        num_hidden_layers: further layers of the network.
        equivariant: use vector features; the model must have them.
        scale: e·Å per unit of the network.
    """

    property, shape, unit = "dipole", (3,), "e·Å"

    def __init__(
        self,
        hidden_channels: int,
        activation: str = "silu",
        num_hidden_layers: int = 0,
        equivariant: bool = False,
        scale: float = 1.0,
    ):
        super().__init__(hidden_channels, activation, num_hidden_layers, equivariant, scale)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        charges, vectors = self.atom_values(features)
        dipoles = charges[:, None] * _centered(graph)
        return pool(dipoles if vectors is None else dipoles + vectors, graph)


@HEADS.register("spatial_extent")
class SpatialExtentHead(_Centered, _AtomNetwork):
    """Electronic spatial extent ⟨R²⟩ [B]: Σ_i c_i |r_i − r_com|², for molecules only.

    Args:
        hidden_channels: F.
        activation: name of the activation function.
        num_hidden_layers: further layers of the network.
        scale: Å² per unit of the network.
        shift: Å², added to each structure.
    """

    property, unit = "spatial_extent", "Å²"

    def __init__(
        self,
        hidden_channels: int,
        activation: str = "silu",
        num_hidden_layers: int = 0,
        scale: float = 1.0,
        shift: float = 0.0,
    ):
        super().__init__(hidden_channels, activation, num_hidden_layers, False, scale)
        self.shift = float(shift)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        square = (_centered(graph) ** 2).sum(1)
        return pool(self.atom_values(features)[0] * square, graph) + self.shift


@HEADS.register("vector")
class VectorHead(_AtomNetwork):
    """A vector of each structure, [B, 3], or of each atom, [N, 3], from vector features.

    Args:
        hidden_channels: F.
        activation: name of the activation function.
        per: "system" or "atom".
        reduce: "sum" or "mean" over the atoms of a system.
        scale: size of the network's unit.
        property: name of the result.
    """

    shape = (3,)

    def __init__(
        self,
        hidden_channels: int,
        activation: str = "silu",
        per: Literal["system", "atom"] = "system",
        reduce: Reduce = "sum",
        scale: float = 1.0,
        property: str = "vector",
    ):
        super().__init__(hidden_channels, activation, 0, True, scale)
        _check_reduce(reduce)
        if per not in ("system", "atom"):
            raise ValueError(f"per must be 'system' or 'atom', got '{per}'")
        self.per, self.reduce, self.property = per, reduce, property

    def forward(self, features: Features, graph: Graph) -> Tensor:
        vectors = self.atom_values(features)[1]
        assert vectors is not None
        return vectors if self.per == "atom" else pool(vectors, graph, self.reduce)


@HEADS.register("scalar_property")
class ScalarPropertyHead(_AtomNetwork):
    """A scalar of each structure, [B], or of each atom, [N]: a gap, a polarisability, a chemical shift.

    Args:
        hidden_channels: F.
        property: name of the result.
        activation: name of the activation function.
        num_hidden_layers: further layers of the network.
        per: "system" or "atom".
        reduce: "sum" or "mean" over the atoms of a system.
        scale, shift: the result is scale · (sum or mean) + shift.
    """

    def __init__(
        self,
        hidden_channels: int,
        property: str,
        activation: str = "silu",
        num_hidden_layers: int = 0,
        per: Literal["system", "atom"] = "system",
        reduce: Reduce = "sum",
        scale: float = 1.0,
        shift: float = 0.0,
    ):
        super().__init__(hidden_channels, activation, num_hidden_layers, False, scale)
        _check_reduce(reduce)
        if per not in ("system", "atom"):
            raise ValueError(f"per must be 'system' or 'atom', got '{per}'")
        self.per, self.reduce, self.property, self.shift = per, reduce, property, float(shift)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        values = self.atom_values(features)[0]
        return (values if self.per == "atom" else pool(values, graph, self.reduce)) + self.shift
