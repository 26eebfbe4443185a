"""Message passing over distances: graph network, Transformer and Equivariant Transformer.

Sources: K. Schütt et al., SchNet, J. Chem. Phys. 148, 241722 (2018), Eqs. 3–5 (graph network); P. Thölke, G. De
Fabritiis, "TorchMD-NET: Equivariant Transformers for Neural Network based Molecular Potentials", ICLR 2022, arXiv
2202.02541, whose invariant part is the Transformer (Eqs. 3–5).

Shapes: N atoms, E directed edges (for attention with the self edges), F features, R radial functions, H heads.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ...core.exchange import Exchange, with_ghosts
from ...potential.graph import Features, Graph, Representation
from ...registry import REPRESENTATIONS
from ..layers import CosineCutoff, LayerNorm, radial_basis, safe_divide
from ..layers import activation as make_activation

__all__ = [
    "Aggregation",
    "DistanceInfluence",
    "EdgesWithSelf",
    "EquivariantTransformer",
    "GraphNetwork",
    "NeighborEmbedding",
    "Transformer",
    "check_heads",
]


DistanceInfluence = Literal["keys", "values", "both", "none"]


def check_heads(hidden_channels: int, num_heads: int, distance_influence: str) -> None:
    """Raise ValueError if F is not a multiple of H or the distance influence is unknown."""
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
        """Return rows of all senders, as the graph."""
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


class MessagePassing(Representation):
    """Base class of the three models: radial functions and an embedding of each atom, optionally with its neighbors.

    Args:
        hidden_channels: number of features F.
        num_rbf, rbf_type, trainable_rbf: radial functions.
        neighbor_embedding: start from the elements of the neighbors too.
        cutoff, cutoff_lower: range in Å.
        max_z: atomic numbers 0 … max_z − 1 can be represented.
    """

    takes_ghosts = True

    def __init__(
        self, hidden_channels: int, num_rbf: int, rbf_type: str, trainable_rbf: bool, neighbor_embedding: bool,
        cutoff: float, cutoff_lower: float, max_z: int,
    ):  # fmt: skip
        super().__init__()
        self.cutoff, self.hidden_channels, self.max_z = float(cutoff), hidden_channels, max_z
        f = hidden_channels
        self.envelope = CosineCutoff(cutoff_lower, cutoff)
        self.embedding = nn.Embedding(max_z, f)
        self.distance_expansion = radial_basis(rbf_type, cutoff_lower, cutoff, num_rbf, trainable_rbf)
        self.neighbor_embedding = NeighborEmbedding(f, num_rbf, self.envelope, max_z) if neighbor_embedding else None

    def embed(self, graph: Graph, rbf: Tensor) -> Tensor:
        """Radial functions on the graph's edges [E, R] → [N, F]."""
        x = self.embedding(graph.z)
        return x if self.neighbor_embedding is None else self.neighbor_embedding(x, graph, rbf)


class AttentionLayer(nn.Module):
    """Projections of the atoms and edges, and the attention weights a_ij = act(Σ q_i k_j dk_ij) per head (Eq. 4).

    Args:
        hidden_channels, num_rbf, num_heads: F, R, H.
        act, attn_act: names of activation functions.
        influence: where the distance enters.
        vectors: whether values have parts for x and for both terms of v.
    """

    def __init__(
        self, hidden_channels: int, num_rbf: int, num_heads: int, act: str, attn_act: str, influence: str, vectors: bool
    ):
        super().__init__()
        f = hidden_channels
        values = 3 * f if vectors else f
        self.num_heads = num_heads
        self.layernorm = LayerNorm(f)
        self.act = make_activation(act)
        self.attn_activation = make_activation(attn_act)
        self.q_proj = nn.Linear(f, f)
        self.k_proj = nn.Linear(f, f)
        self.v_proj = nn.Linear(f, values)
        self.o_proj = nn.Linear(f, values)
        self.vec_proj = nn.Linear(f, 3 * f, bias=False) if vectors else None
        self.dk_proj = nn.Linear(num_rbf, f) if influence in ("keys", "both") else None
        self.dv_proj = nn.Linear(num_rbf, values) if influence in ("values", "both") else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.layernorm.reset_parameters()
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.vec_proj, self.dk_proj, self.dv_proj):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def attend(self, x: Tensor, edges: EdgesWithSelf) -> tuple[Tensor, Tensor]:
        """Normalised x [N, F] → attention weights [E, H] and values of the senders [E, H, ·], both without cutoff."""
        senders = edges.senders(x)
        maps = ((self.q_proj, x), (self.k_proj, senders), (self.v_proj, senders))
        q, k, values = (p(rows).unflatten(1, (self.num_heads, -1)) for p, rows in maps)
        score = q.index_select(0, edges.receiver) * k.index_select(0, edges.sender)
        if self.dk_proj is not None:
            score = score * self._filters(self.dk_proj, edges)
        return self.attn_activation(score.sum(2)), values.index_select(0, edges.sender)

    def filtered(self, value: Tensor, edges: EdgesWithSelf) -> Tensor:
        """Return values [E, H, ·] times their filters dv_ij."""
        return value if self.dv_proj is None else value * self._filters(self.dv_proj, edges)

    def _filters(self, projection: nn.Linear, edges: EdgesWithSelf) -> Tensor:
        return self.act(projection(edges.rbf)).unflatten(1, (self.num_heads, -1))


# --- Transformer ---


class Attention(AttentionLayer):
    """One update of x [N, F]: o_proj of Σ_j a_ij v_j dv_ij C(d_ij)."""

    def forward(self, x: Tensor, edges: EdgesWithSelf) -> Tensor:
        """x [N, F] → its change [N, F]."""
        attention, value = self.attend(self.layernorm(x), edges)
        attention = attention * edges.envelope[:, None]
        messages = (self.filtered(value, edges) * attention[:, :, None]).flatten(1)
        return self.o_proj(torch.zeros_like(x).index_add(0, edges.receiver, messages))


@REPRESENTATIONS.register("transformer")
class Transformer(MessagePassing):
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
        check_heads(hidden_channels, num_heads, distance_influence)
        super().__init__(
            hidden_channels, num_rbf, rbf_type, trainable_rbf, neighbor_embedding, cutoff, cutoff_lower, max_z
        )
        f = hidden_channels
        self.attention_layers = nn.ModuleList(
            Attention(f, num_rbf, num_heads, activation, attn_activation, distance_influence, vectors=False)
            for _ in range(num_layers)
        )
        self.out_norm = LayerNorm(f)

    def forward(self, graph: Graph) -> Features:
        edges = EdgesWithSelf.build(graph, self.distance_expansion, self.envelope)
        x = self.embed(graph, edges.rbf[: graph.distances.shape[0]])
        for layer in self.attention_layers:
            x = x + layer(x, edges)
        return Features(self.out_norm(x))


# --- Equivariant Transformer ---


class EquivariantAttention(AttentionLayer):
    """One update of x [N, F] and v [N, 3, F] (paper Eqs. 4–9).

    (m_x, s1, s2) = v_j dv_ij; x gets Σ_j a_ij m_x; v gets Σ_j (s1 v_j + s2 u_ij). With `vector_cutoff` the cutoff
    function multiplies the values, and all messages go to zero at the cutoff. Without it, the cutoff function
    multiplies the attention weight alone, and the vector messages jump at the cutoff.
    """

    def __init__(
        self, hidden_channels: int, num_rbf: int, num_heads: int, act: str, attn_act: str, influence: str,
        vector_cutoff: bool,
    ):  # fmt: skip
        super().__init__(hidden_channels, num_rbf, num_heads, act, attn_act, influence, vectors=True)
        self.vector_cutoff = vector_cutoff

    def forward(self, x: Tensor, v: Tensor, edges: EdgesWithSelf) -> tuple[Tensor, Tensor]:
        """x [N, F], v [N, 3, F] → their changes."""
        assert self.vec_proj is not None
        attention, value = self.attend(self.layernorm(x), edges)
        if self.vector_cutoff:
            value = value * edges.envelope[:, None, None]
        else:
            attention = attention * edges.envelope[:, None]
        message, s1, s2 = self.filtered(value, edges).chunk(3, 2)
        message = (message * attention[:, :, None]).flatten(1)
        vectors = edges.senders(v).index_select(0, edges.sender) * s1.flatten(1)[:, None]
        vectors = vectors + s2.flatten(1)[:, None] * edges.directions[:, :, None]

        v1, v2, v3 = self.vec_proj(v).chunk(3, 2)
        o1, o2, o3 = self.o_proj(torch.zeros_like(x).index_add(0, edges.receiver, message)).chunk(3, 1)
        change_v = v3 * o1[:, None] + torch.zeros_like(v).index_add(0, edges.receiver, vectors)
        return (v1 * v2).sum(1) * o2 + o3, change_v


@REPRESENTATIONS.register("equivariant_transformer")
class EquivariantTransformer(MessagePassing):
    """Equivariant Transformer. Parameter names are those of TorchMD-Net 3.x, whose weights it loads.

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
        vector_cutoff: let the vector messages go to zero at the cutoff. False reproduces TorchMD-Net's default, whose
            energy jumps when a pair crosses the cutoff: use it to reproduce such models, not for dynamics.
    """

    gives_vectors = True

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
        vector_cutoff: bool = True,
    ):
        check_heads(hidden_channels, num_heads, distance_influence)
        super().__init__(
            hidden_channels, num_rbf, rbf_type, trainable_rbf, neighbor_embedding, cutoff, cutoff_lower, max_z
        )
        f = hidden_channels
        self.attention_layers = nn.ModuleList(
            EquivariantAttention(f, num_rbf, num_heads, activation, attn_activation, distance_influence, vector_cutoff)
            for _ in range(num_layers)
        )
        self.out_norm = LayerNorm(f)

    def forward(self, graph: Graph) -> Features:
        edges = EdgesWithSelf.build(graph, self.distance_expansion, self.envelope)
        x = self.embed(graph, edges.rbf[: graph.distances.shape[0]])
        v = x.new_zeros(graph.num_atoms, 3, self.hidden_channels)
        for layer in self.attention_layers:
            change_x, change_v = layer(x, v, edges)
            x, v = x + change_x, v + change_v
        return Features(self.out_norm(x), v)


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
class GraphNetwork(MessagePassing):
    """Graph network. Parameter names are those of TorchMD-Net 3.x, whose weights it loads.

    Args:
        hidden_channels: F.
        num_layers: number of interaction blocks.
        num_rbf: R, radial functions.
        rbf_type: "expnorm", "gauss", "bessel" or "smooth_bessel".
        trainable_rbf: learn centres and widths of the radial functions.
        activation: name of the activation function.
        neighbor_embedding: start from the elements of the neighbors too.
        aggregation: aggregation over neighbors. "add", "mean" and "softmax" (a smooth maximum) are smooth when a
            neighbor crosses the cutoff. The forces of "max" jump there, and wherever another neighbor becomes the
            largest: use it for properties, not for dynamics; a warning says so.
        cutoff: Å.
        cutoff_lower: Å; edges contribute only beyond it.
        max_z: atomic numbers 0 … max_z − 1.
    """

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
        if aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation must be {', '.join(get_args(Aggregation))}, got '{aggregation}'")
        if aggregation == "max":
            warnings.warn(
                "graph_network with aggregation 'max' has forces that jump when atoms move: take 'softmax', a smooth "
                "maximum, for dynamics and relaxations",
                stacklevel=2,
            )
        super().__init__(
            hidden_channels, num_rbf, rbf_type, trainable_rbf, neighbor_embedding, cutoff, cutoff_lower, max_z
        )
        f = hidden_channels
        self.interactions = nn.ModuleList(
            InteractionBlock(f, num_rbf, f, activation, self.envelope, aggregation) for _ in range(num_layers)
        )

    def forward(self, graph: Graph) -> Features:
        rbf = self.distance_expansion(graph.distances)
        x = self.embed(graph, rbf)
        for block in self.interactions:
            x = x + block(x, graph, rbf)
        return Features(x)
