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

from ..exchange import Exchange, with_ghosts
from .base import Graph
from .layers import activation as make_activation
from .layers import safe_divide
from .radial import CosineCutoff

__all__ = ["Attention", "DistanceInfluence", "EdgesWithSelf", "NeighborEmbedding", "check_heads"]

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


class Attention(nn.Module):
    """The maps of an update by attention: a_ij = act(Σ q_i k_j dk_ij) per head, values v_j dv_ij (Eqs. 4 and 5).

    Args:
        hidden_channels: F.
        num_rbf: R.
        num_heads: H.
        act, attn_act: activation functions of the filters and of the attention weights.
        influence: where the distance enters.
        vectors: values and outputs have three parts of F, and vector features [N, 3, F] are mapped too.
    """

    def __init__(
        self, hidden_channels: int, num_rbf: int, num_heads: int, act: str, attn_act: str,
        influence: DistanceInfluence, vectors: bool,
    ):  # fmt: skip
        super().__init__()
        f, out = hidden_channels, 3 * hidden_channels if vectors else hidden_channels
        self.num_heads = num_heads
        self.layernorm = nn.LayerNorm(f)
        self.act = make_activation(act)
        self.attn_activation = make_activation(attn_act)
        self.q_proj = nn.Linear(f, f)
        self.k_proj = nn.Linear(f, f)
        self.v_proj = nn.Linear(f, out)
        self.o_proj = nn.Linear(f, out)
        if vectors:
            self.vec_proj = nn.Linear(f, out, bias=False)
        self.dk_proj = nn.Linear(num_rbf, f) if influence in ("keys", "both") else None
        self.dv_proj = nn.Linear(num_rbf, out) if influence in ("values", "both") else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.layernorm.reset_parameters()
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def weights(self, x: Tensor, edges: EdgesWithSelf) -> tuple[Tensor, Tensor]:
        """Normalised x [N, F] → attention weights [E, H] without the cutoff function, values [E, H, ·] of senders."""
        senders = edges.senders(x)
        maps = ((self.q_proj, x), (self.k_proj, senders), (self.v_proj, senders))
        q, k, values = (p(rows).unflatten(1, (self.num_heads, -1)) for p, rows in maps)
        score = q.index_select(0, edges.receiver) * k.index_select(0, edges.sender)
        if self.dk_proj is not None:
            score = score * self.act(self.dk_proj(edges.rbf)).unflatten(1, (self.num_heads, -1))
        return self.attn_activation(score.sum(2)), values.index_select(0, edges.sender)

    def filtered(self, values: Tensor, edges: EdgesWithSelf) -> Tensor:
        """Values [E, H, ·] times those of the distances."""
        if self.dv_proj is None:
            return values
        return values * self.act(self.dv_proj(edges.rbf)).unflatten(1, (self.num_heads, -1))


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
