"""Layers shared by the Transformer and the Equivariant Transformer.

Source: P. Thölke, G. De Fabritiis, "TorchMD-NET: Equivariant Transformers for Neural Network based Molecular
Potentials", ICLR 2022, arXiv 2202.02541.

Shapes: N atoms, E directed edges and self edges together, F features, R radial functions, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ...core.exchange import Exchange, with_ghosts
from ...potential.graph import Graph
from ..layers import safe_divide
from ..radial import CosineCutoff

__all__ = ["DistanceInfluence", "EdgesWithSelf", "NeighborEmbedding", "check_heads"]


DistanceInfluence = Literal["keys", "values", "both", "none"]


def check_heads(hidden_channels: int, num_heads: int, distance_influence: str) -> None:
    """Raise ValueError when F does not split into H heads or the distance influence is unknown."""
    if num_heads < 1 or hidden_channels % num_heads:
        raise ValueError(f"hidden_channels ({hidden_channels}) must be a multiple of num_heads ({num_heads})")
    if distance_influence not in ("keys", "values", "both", "none"):
        raise ValueError(f"distance_influence must be keys, values, both or none, got '{distance_influence}'")


@dataclass(eq=False)
class EdgesWithSelf:
    """The edges of a graph followed by one self edge per atom, at distance zero.

    Attributes:
        receiver, sender: [E].
        rbf: [E, R] radial basis.
        envelope: [E] cutoff function.
        directions: [E, 3] unit vectors from receiver to sender, zero for self edges.
        exchange: as of the graph.
    """

    receiver: Tensor
    sender: Tensor
    rbf: Tensor
    envelope: Tensor
    directions: Tensor
    exchange: Exchange | None = None

    @classmethod
    def build(cls, graph: Graph, basis: nn.Module, cutoff: CosineCutoff) -> EdgesWithSelf:
        """Extend the edges of the graph."""
        atoms = torch.arange(graph.num_atoms, device=graph.z.device)
        zeros = graph.vectors.new_zeros(graph.num_atoms, 3)
        rbf_self = basis(graph.vectors.new_zeros(1)).expand(graph.num_atoms, -1)
        distances = torch.cat([graph.distances, zeros[:, 0]])
        return cls(
            receiver=torch.cat([graph.receiver, atoms]),
            sender=torch.cat([graph.sender, atoms]),
            rbf=torch.cat([basis(graph.distances), rbf_self]),
            envelope=cutoff(distances),
            directions=torch.cat([safe_divide(graph.vectors, graph.distances[:, None]), zeros]),
            exchange=graph.exchange,
        )

    def senders(self, rows: Tensor) -> Tensor:
        """As of the graph."""
        return with_ghosts(rows, self.exchange)


class NeighborEmbedding(nn.Module):
    """x_i ← combine([x_i, Σ_j e(z_j) ⊙ (W φ(d_ij)) C(d_ij)]) over the neighbors, without the atom itself (Eq. 3).

    Args:
        hidden_channels: F.
        num_rbf: R.
        cutoff: envelope.
        max_z: atomic numbers 0 … max_z − 1.
    """

    def __init__(self, hidden_channels: int, num_rbf: int, cutoff: CosineCutoff, max_z: int):
        super().__init__()
        self.cutoff = cutoff
        self.embedding = nn.Embedding(max_z, hidden_channels)
        self.distance_proj = nn.Linear(num_rbf, hidden_channels)
        self.combine = nn.Linear(2 * hidden_channels, hidden_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.embedding.reset_parameters()
        for linear in (self.distance_proj, self.combine):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, graph: Graph, rbf: Tensor) -> Tensor:
        """x [N, F], radial basis on the graph's edges [E, R] → [N, F]."""
        weight = self.distance_proj(rbf) * self.cutoff(graph.distances)[:, None]
        senders = graph.element_rows(self.embedding(graph.z), self.embedding)
        messages = senders.index_select(0, graph.sender) * weight
        neighbors = torch.zeros_like(x).index_add(0, graph.receiver, messages)
        return self.combine(torch.cat([x, neighbors], 1))
