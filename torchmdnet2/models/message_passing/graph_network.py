"""Graph network: continuous-filter convolutions.

Source: K. Schütt et al., SchNet, J. Chem. Phys. 148, 241722 (2018), Eqs. 3–5.

Shapes: N atoms, E directed edges, F features, R radial functions.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ...potential.graph import Features, Graph, Representation
from ...registry import REPRESENTATIONS
from ..layers import CosineCutoff, radial_basis, safe_divide
from ..layers import activation as make_activation
from .transformers import NeighborEmbedding

__all__ = ["Aggregation", "GraphNetwork"]


Aggregation = Literal["add", "mean", "softmax", "max"]


class ContinuousFilter(nn.Module):
    """h_i = lin2(aggr_j W_ij ⊙ lin1(x)_j) with an aggregation that is smooth when neighbors come and go.

    With messages m_j, cutoff function C_j and s = Σ_j C_j:

    * "add": Σ_j C_j m_j.
    * "mean": Σ_j C_j m_j / D(s), the weighted mean: D(s) = s for s ≥ 1; below, D = s + (1 − s)³/3 lets the mean of the
      last neighbor go to zero with it (two continuous derivatives).
    * "softmax": Σ_j C_j e^{m_j} m_j / Σ_j C_j e^{m_j} · s/D(s), channel by channel: a smooth maximum.
    * "max": the largest C_j m_j. It has kinks.
    """

    def __init__(self, hidden_channels: int, num_filters: int, aggregation: Aggregation):
        super().__init__()
        self.aggregation = aggregation
        self.lin1 = nn.Linear(hidden_channels, num_filters, bias=False)
        self.lin2 = nn.Linear(num_filters, hidden_channels)
        nn.init.xavier_uniform_(self.lin1.weight)
        nn.init.xavier_uniform_(self.lin2.weight)
        nn.init.zeros_(self.lin2.bias)

    def forward(self, x: Tensor, graph: Graph, filters: Tensor, envelope: Tensor) -> Tensor:
        """x [N, F], filters W [E, F'] without the cutoff function, cutoff function [E] → [N, F]."""
        messages = graph.senders(self.lin1(x)).index_select(0, graph.sender) * filters
        envelope = envelope[:, None]

        def total(values: Tensor) -> Tensor:
            zeros = values.new_zeros(graph.num_atoms, values.shape[1])
            return zeros.index_add(0, graph.receiver, values)

        def largest(values: Tensor) -> Tensor:
            # include_self=False: the zeros count only for atoms without neighbors
            zeros = values.new_zeros(graph.num_atoms, values.shape[1])
            index = graph.receiver.long()[:, None].expand_as(values)
            return zeros.scatter_reduce(0, index, values, "amax", include_self=False)

        if self.aggregation == "add":
            return self.lin2(total(messages * envelope))
        if self.aggregation == "max":
            return self.lin2(largest(messages * envelope))
        weight = total(envelope)
        size = weight + (1 - weight).clamp(min=0) ** 3 / 3
        if self.aggregation == "mean":
            return self.lin2(total(messages * envelope) / size)
        share = envelope * torch.exp(messages - largest(messages.detach()).index_select(0, graph.receiver))
        return self.lin2(safe_divide(total(share * messages), total(share)) * weight / size)


class InteractionBlock(nn.Module):
    """x_i changes by lin(act(conv(x)_i)), filters W = C(d) · (Linear, act, Linear)(φ(d))."""

    def __init__(
        self, hidden_channels: int, num_rbf: int, num_filters: int, act: str, cutoff: CosineCutoff, aggr: Aggregation
    ):
        super().__init__()
        self.cutoff = cutoff
        self.mlp = nn.Sequential(
            nn.Linear(num_rbf, num_filters), make_activation(act), nn.Linear(num_filters, num_filters)
        )
        self.conv = ContinuousFilter(hidden_channels, num_filters, aggr)
        self.act = make_activation(act)
        self.lin = nn.Linear(hidden_channels, hidden_channels)
        for linear in (self.mlp[0], self.mlp[2], self.lin):
            nn.init.xavier_uniform_(linear.weight)  # type: ignore[arg-type]
            nn.init.zeros_(linear.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, graph: Graph, rbf: Tensor) -> Tensor:
        """x [N, F] → its change [N, F]."""
        return self.lin(self.act(self.conv(x, graph, self.mlp(rbf), self.cutoff(graph.distances))))


@REPRESENTATIONS.register("graph_network")
class GraphNetwork(Representation):
    """Graph network. Parameter names are those of TorchMD-Net 3.x, whose weights it loads.

    Args:
        hidden_channels: F.
        num_layers: number of interaction blocks.
        num_rbf: R, radial functions.
        rbf_type: "expnorm", "gauss", "bessel" or "smooth_bessel".
        trainable_rbf: learn centres and widths of the radial functions.
        activation: name of the activation function.
        neighbor_embedding: start from the elements of the neighbors too.
        aggregation: over the neighbors: "add", "mean" or "softmax" (a smooth maximum), which are smooth when a neighbor
            crosses the cutoff; or "max", whose forces jump there and wherever two neighbors change places: for
            properties, not for dynamics; a warning says so.
        cutoff: Å.
        cutoff_lower: Å; edges contribute only beyond it.
        max_z: atomic numbers 0 … max_z − 1.
    """

    takes_ghosts = True
    gives_vectors = False

    def __init__(
        self,
        hidden_channels: int = 128,
        num_layers: int = 6,
        num_rbf: int = 50,
        rbf_type: str = "expnorm",
        trainable_rbf: bool = True,
        activation: str = "silu",
        neighbor_embedding: bool = True,
        aggregation: Aggregation = "add",
        cutoff: float = 5.0,
        cutoff_lower: float = 0.0,
        max_z: int = 100,
    ):
        super().__init__()
        if aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation must be {', '.join(get_args(Aggregation))}, got '{aggregation}'")
        if aggregation == "max":
            warnings.warn(
                "graph_network with aggregation 'max' has forces that jump when atoms move: take 'softmax', a smooth "
                "maximum, for dynamics and relaxations",
                stacklevel=2,
            )
        self.cutoff, self.hidden_channels, self.max_z = float(cutoff), hidden_channels, max_z
        f = hidden_channels
        self.envelope = CosineCutoff(cutoff_lower, cutoff)
        self.embedding = nn.Embedding(max_z, f)
        self.distance_expansion = radial_basis(rbf_type, cutoff_lower, cutoff, num_rbf, trainable_rbf)
        self.neighbor_embedding = NeighborEmbedding(f, num_rbf, self.envelope, max_z) if neighbor_embedding else None
        self.interactions = nn.ModuleList(
            InteractionBlock(f, num_rbf, f, activation, self.envelope, aggregation) for _ in range(num_layers)
        )

    def forward(self, graph: Graph) -> Features:
        rbf = self.distance_expansion(graph.distances)
        x = self.embedding(graph.z)
        if self.neighbor_embedding is not None:
            x = self.neighbor_embedding(x, graph, rbf)
        for block in self.interactions:
            x = x + block(x, graph, rbf)
        return Features(x)
