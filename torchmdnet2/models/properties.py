"""Heads of properties that are not the energy: charges, dipole, electronic spatial extent, vectors, scalars.

Shapes: N atoms, B structures, F features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..dipole import centered_positions
from ..registry import HEADS
from ..system import System
from .base import Features, Graph, PropertyHead, pool, sum_over_systems
from .heads import Reduce, VectorNetwork, _check_reduce, scalar_network

__all__ = ["ChargesHead", "DipoleHead", "ScalarPropertyHead", "SpatialExtentHead", "VectorHead"]


def _centered(graph: Graph) -> Tensor:
    """Positions relative to the centre of mass of the atoms that are read out, [N, 3] Å, float64."""
    assert graph.system is not None
    return centered_positions(graph.system, graph.readout)


class _Centered(PropertyHead):
    """What needs `centered_positions`."""

    def check(self, system: System) -> None:
        """Raise ValueError for a periodic structure, which has no such centre."""
        periodic = system.pbc.any(1)
        if bool(periodic.any()):
            raise ValueError(
                f"system {int(periodic.nonzero()[0, 0])} is periodic: its dipole and extent depend on the choice of "
                'the cell, so the model does not give them (potential.properties.pop("dipole") leaves the energy alone)'
            )


class _AtomNetwork(PropertyHead):
    """A scalar per atom, and with `equivariant` a vector per atom too, by a small network."""

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
        """[N] scalars and [N, 3] vectors or None, float64, in the unit of the property."""
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
    """Dipole moment [B, 3] in e·Å: Σ_i [c_i (r_i − r_com) + μ_i], μ_i being the vector features' share.

    For molecules only. Its length is what TorchMD-Net's DipoleMoment gives.

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
