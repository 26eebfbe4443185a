"""Transformer: attention over neighbors with scalar features only.

Source: the invariant part of P. Thölke, G. De Fabritiis, "TorchMD-NET: Equivariant Transformers for Neural Network
based Molecular Potentials", ICLR 2022, arXiv 2202.02541 (Eqs. 3–5).

Shapes: N atoms, E directed edges and self edges together, F features, R radial functions, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...potential.graph import Features, Graph, Representation
from ...registry import REPRESENTATIONS
from ..layers import LayerNorm
from ..layers import activation as make_activation
from ..radial import CosineCutoff, radial_basis
from .attention import DistanceInfluence, EdgesWithSelf, NeighborEmbedding, check_heads

__all__ = ["Transformer"]


class Attention(nn.Module):
    """One update of x [N, F]: o_proj of Σ_j a_ij v_j dv_ij, a_ij = C(d_ij) act(Σ q_i k_j dk_ij) per head (Eq. 4)."""

    def __init__(self, hidden_channels: int, num_rbf: int, num_heads: int, act: str, attn_act: str, influence: str):
        super().__init__()
        f = hidden_channels
        self.num_heads = num_heads
        self.layernorm = LayerNorm(f)
        self.act = make_activation(act)
        self.attn_activation = make_activation(attn_act)
        self.q_proj = nn.Linear(f, f)
        self.k_proj = nn.Linear(f, f)
        self.v_proj = nn.Linear(f, f)
        self.o_proj = nn.Linear(f, f)
        self.dk_proj = nn.Linear(num_rbf, f) if influence in ("keys", "both") else None
        self.dv_proj = nn.Linear(num_rbf, f) if influence in ("values", "both") else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.layernorm.reset_parameters()
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.dk_proj, self.dv_proj):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, edges: EdgesWithSelf) -> Tensor:
        """x [N, F] → its change [N, F]."""
        num_heads = self.num_heads
        x = self.layernorm(x)
        senders = edges.senders(x)
        maps = ((self.q_proj, x), (self.k_proj, senders), (self.v_proj, senders))
        q, k, values = (p(rows).unflatten(1, (num_heads, -1)) for p, rows in maps)
        score = q.index_select(0, edges.receiver) * k.index_select(0, edges.sender)
        if self.dk_proj is not None:
            score = score * self.act(self.dk_proj(edges.rbf)).unflatten(1, (num_heads, -1))
        attention = self.attn_activation(score.sum(2)) * edges.envelope[:, None]
        value = values.index_select(0, edges.sender)
        if self.dv_proj is not None:
            value = value * self.act(self.dv_proj(edges.rbf)).unflatten(1, (num_heads, -1))
        messages = (value * attention[:, :, None]).flatten(1)
        return self.o_proj(torch.zeros_like(x).index_add(0, edges.receiver, messages))


@REPRESENTATIONS.register("transformer")
class Transformer(Representation):
    """Transformer. Parameter names are those of TorchMD-Net 3.x, whose weights it loads.

    Args:
        hidden_channels: F, a multiple of num_heads.
        num_layers: number of attention layers.
        num_rbf: R, radial functions.
        rbf_type: "expnorm", "gauss", "bessel" or "smooth_bessel".
        trainable_rbf: learn centres and widths of the radial functions.
        activation: name of the activation function.
        attn_activation: the one of the attention weights.
        neighbor_embedding: start from the elements of the neighbors too.
        num_heads: H.
        distance_influence: where the distance enters: "keys", "values", "both" or "none".
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
        attn_activation: str = "silu",
        neighbor_embedding: bool = True,
        num_heads: int = 8,
        distance_influence: DistanceInfluence = "both",
        cutoff: float = 5.0,
        cutoff_lower: float = 0.0,
        max_z: int = 100,
    ):
        super().__init__()
        check_heads(hidden_channels, num_heads, distance_influence)
        self.cutoff, self.hidden_channels, self.max_z = float(cutoff), hidden_channels, max_z
        f = hidden_channels
        self.envelope = CosineCutoff(cutoff_lower, cutoff)
        self.embedding = nn.Embedding(max_z, f)
        self.distance_expansion = radial_basis(rbf_type, cutoff_lower, cutoff, num_rbf, trainable_rbf)
        self.neighbor_embedding = NeighborEmbedding(f, num_rbf, self.envelope, max_z) if neighbor_embedding else None
        self.attention_layers = nn.ModuleList(
            Attention(f, num_rbf, num_heads, activation, attn_activation, distance_influence) for _ in range(num_layers)
        )
        self.out_norm = LayerNorm(f)

    def forward(self, graph: Graph) -> Features:
        edges = EdgesWithSelf.build(graph, self.distance_expansion, self.envelope)
        x = self.embedding(graph.z)
        if self.neighbor_embedding is not None:
            x = self.neighbor_embedding(x, graph, edges.rbf[: graph.distances.shape[0]])
        for layer in self.attention_layers:
            x = x + layer(x, edges)
        return Features(self.out_norm(x))
