"""Heads: from per-atom features to per-atom energies.

Shapes: N atoms, F features, C charge channels of all stages together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..priors.electrostatics import Electrostatics, Method
from ..registry import HEADS
from .base import Features, Graph, Head, atom_counts
from .layers import MLP, GatedEquivariantBlock

__all__ = [
    "EquivariantScalarHead",
    "GatedScalarHead",
    "ScalarCoulombHead",
    "ScalarHead",
    "VectorNetwork",
    "scalar_network",
]

Reduce = Literal["sum", "mean"]


def scalar_network(hidden_channels: int, activation: str, num_hidden_layers: int = 0) -> MLP:
    """The network F → F/2 → 1 of the scalar heads."""
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
        """One scalar and one vector per atom, [N] and [N, 3].

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
    """Atomic energies whose sum over a structure is the sum or the mean of those given."""
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
        hidden_channels: F.
        activation: name of the activation function.
        num_hidden_layers: further layers of width F/2.
        reduce: the energy of a structure is the "sum" over its atoms, or their "mean" for quantities that do not grow
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
        """[N] atomic energies, in the model's unit."""
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
        """[N] atomic energies, in the model's unit."""
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
        """[N] atomic energies, in the model's unit."""
        return _share(self.output_network(features)[0], graph, self.reduce)


@HEADS.register("scalar_coulomb")
class ScalarCoulombHead(Head):
    """Energy of an atom by a network, plus the Coulomb energy of the latent charges of TensorNet2.

    The Coulomb energy is the weighted mean over the charge channels of all stages, damped at short distance by
    1 − exp(1 − 1/(1 − (d/4.6 Å)²)). `energy_scale` scales it too, as in TorchMD-Net, so the charges of a trained model
    are in e only where that is 1. For new models take the head "scalar" and the prior "coulomb" with predicted charges
    and damping "exp" instead: its energy is not scaled.

    Args:
        hidden_channels: F.
        q_weights: C weights of the channels, stage by stage.
        activation: name of the activation function.
        num_hidden_layers: further layers of width F/2.
        method: "all_pairs", "reaction_field", "ewald" or "pme", see `Electrostatics`.
        coulomb_cutoff: Å; not used by "all_pairs".
        dielectric: outside the reaction field's cutoff; None means infinite.
        accuracy: of the Ewald summation, relative.
        switch_width: Å before the cutoff over which the reaction field's energy goes smoothly to zero; 0 reproduces
            TorchMD-Net, whose force jumps there.

    Raises:
        ValueError: an option is out of range; the model has no charges or another number of channels.
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

    def forward(self, features: Features, graph: Graph) -> Tensor:
        """[N] atomic energies, in the model's unit."""
        energies = self.output_network(features.x).squeeze(1)
        if graph.system is None or graph.pairs is None:
            return energies
        channels = 0 if features.charges is None else features.charges.shape[1] * features.charges.shape[2]
        if features.charges is None or channels != self.qweights.numel():
            raise ValueError(
                f"the head has weights for {self.qweights.numel()} charge channels (stages × q_dim), the model has "
                f"{channels}"
            )
        pairs = graph.pairs(self.coulomb.cutoff)
        weights = self.qweights.double()
        return energies.double() + self.coulomb(
            graph.system, pairs, features.charges.flatten(1), weights / weights.sum()
        )
