"""TensorNet in plain PyTorch, and the algebra of 3×3 tensors on nine components that it uses.

This module specifies the results of the fused kernels. A field of 3×3 tensors is stored as its nine irreducible
components X [N, 9, F]:

    0      isotropic part            I = tr X / 3
    1…3    antisymmetric part        A01, A02, A12 (upper triangle)
    4…8    symmetric traceless part  S00, S01, S02, S11, S12 (S22 = −S00 − S11)

Shapes: N atoms, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from ...potential.graph import Features, Graph, Representation
from ...registry import REPRESENTATIONS
from ...system import outside_transforms
from ..layers import CosineCutoff, activation, feature_norm, radial_basis, reset, safe_divide

__all__ = [
    "TensorNet", "compose", "decompose", "matmul", "part_inner", "part_norms", "per_component", "scale_parts",
    "tensor_norm",
]  # fmt: skip


def compose(x: Tensor) -> Tensor:
    """Return full tensors [N, 3, 3, F] of nine components [N, 9, F]."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x.unbind(1)
    rows = [i + s00, s01 + a01, s02 + a02, s01 - a01, i + s11, s12 + a12, s02 - a02, s12 - a12, i - s00 - s11]
    return torch.stack(rows, 1).unflatten(1, (3, 3))


def decompose(t: Tensor) -> Tensor:
    """Return nine components [N, 9, F] of full tensors [N, 3, 3, F]."""
    # unbind once: the gradient of each t[:, i, j] would fill a whole tensor of zeros
    t00, t01, t02, t10, t11, t12, t20, t21, t22 = t.flatten(1, 2).unbind(1)
    trace = (t00 + t11 + t22) / 3
    return torch.stack(
        [
            trace,
            (t01 - t10) / 2,
            (t02 - t20) / 2,
            (t12 - t21) / 2,
            t00 - trace,
            (t01 + t10) / 2,
            (t02 + t20) / 2,
            t11 - trace,
            (t12 + t21) / 2,
        ],
        1,
    )


def part_inner(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Frobenius inner products of the three parts of X and Y [N, 9, F], each [N, F]."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x.unbind(1)
    j, b01, b02, b12, t00, t01, t02, t11, t12 = y.unbind(1)
    inner_a = 2 * (a01 * b01 + a02 * b02 + a12 * b12)
    diagonal = 2 * (s00 * t00 + s11 * t11) + s00 * t11 + s11 * t00
    return 3 * i * j, inner_a, diagonal + 2 * (s01 * t01 + s02 * t02 + s12 * t12)


def part_norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared Frobenius norms of the three parts of X [N, 9, F]: ‖I‖², ‖A‖², ‖S‖², each [N, F]."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x.unbind(1)
    norm_a = 2 * (a01 * a01 + a02 * a02 + a12 * a12)
    norm_s = 2 * (s00 * s00 + s11 * s11 + s00 * s11 + s01 * s01 + s02 * s02 + s12 * s12)
    return 3 * i * i, norm_a, norm_s


def tensor_norm(x: Tensor) -> Tensor:
    """Return ‖X‖² of X [N, 9, F]: [N, F]."""
    norm_i, norm_a, norm_s = part_norms(x)
    return norm_i + norm_a + norm_s


def scale_parts(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply I, A, S of [N, 9, F] by factors [N, 3, F]."""
    return x * per_component(factors)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return products of full tensors, channel by channel: [N, 3, 3, F] × [N, 3, 3, F]."""
    return (x[:, :, :, None] * y[:, None]).sum(2)


def per_component(parts: Tensor) -> Tensor:
    """Return factors of the parts I, A, S [N, 3, F] as factors of the components [N, 9, F]."""
    # one gather: the second derivative of torch.stack would fill nine whole tensors of zeros
    return parts.index_select(1, _part_of_component(parts.device))


@lru_cache
def _part_of_component(device: torch.device) -> Tensor:
    """Return the part (I, A, S) that each of the nine components belongs to, made once per device."""
    with torch.inference_mode(False), outside_transforms():
        return torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 2], device=device)


# --- TensorNet: Cartesian tensor representations of atomic environments ---
#
# Source: G. Simeon, G. De Fabritiis, "TensorNet: Cartesian Tensor Representations for Efficient Learning of Molecular
# Potentials", NeurIPS 2023, arXiv 2306.06482; total charge after arXiv 2403.02949.


def mix_channels(x: Tensor, linears: nn.ModuleList, first: int) -> Tensor:
    """Mix the channels of I, A, S [N, 9, F] by three linear maps without bias."""
    i, a, s = x.split((1, 3, 5), 1)
    return torch.cat([linears[first](i), linears[first + 1](a), linears[first + 2](s)], 1)


class TensorEmbedding(nn.Module):
    """Tensors from the atoms around each atom (paper §3.2, Eqs. 5–9).

    X_i = Σ_j C(d) z_ij [ f1·1 + f2·skew(u) + f3·(uuᵀ − 1/3) ], then a norm-dependent gate and channel mixing.
    The sum includes j = i with u = 0, which adds f1(0) to the isotropic part; not where `counts_itself` is False.
    """

    counts_itself: bool = True

    def __init__(
        self,
        hidden_channels: int,
        num_rbf: int,
        act: str,
        cutoff: CosineCutoff,
        max_z: int,
        skew_sign: int,
        norm: str = "layer",
    ):
        super().__init__()
        f = hidden_channels
        self.skew_sign = skew_sign
        self.cutoff = cutoff
        self.distance_proj1 = nn.Linear(num_rbf, f)
        self.distance_proj2 = nn.Linear(num_rbf, f)
        self.distance_proj3 = nn.Linear(num_rbf, f)
        self.emb = nn.Embedding(max_z, f)
        self.emb2 = nn.Linear(2 * f, f)
        self.act = activation(act)
        self.linears_tensor = nn.ModuleList(nn.Linear(f, f, bias=False) for _ in range(3))
        self.linears_scalar = nn.ModuleList([nn.Linear(f, 2 * f), nn.Linear(2 * f, 3 * f)])
        self.init_norm = feature_norm(norm, f)

    def forward(self, graph: Graph, rbf: Tensor, envelope: Tensor, rbf_self: Tensor) -> Tensor:
        """
        Args:
            graph: atoms and edges.
            rbf: [E, R] radial basis on the edges.
            envelope: [E] cutoff function on the edges.
            rbf_self: [1, R] radial basis at distance 0.

        Returns:
            X [N, 9, F].
        """
        # emb2 is linear: apply its halves to the atoms instead of to the edges
        of_receiver, of_sender = self.emb2.weight.chunk(2, 1)
        z = self.emb(graph.z)
        z_receiver, z_sender = z @ of_receiver.T + self.emb2.bias, z @ of_sender.T
        z_senders = graph.element_rows(z_sender, lambda numbers: self.emb(numbers) @ of_sender.T)
        z_pair = z_receiver.index_select(0, graph.receiver) + z_senders.index_select(0, graph.sender)
        weight = envelope[:, None] * z_pair
        f = torch.stack([p(rbf) for p in (self.distance_proj1, self.distance_proj2, self.distance_proj3)], 1)
        # skew(u) is written for u from sender to receiver; our edge vectors point from receiver to sender
        u = -safe_divide(graph.vectors, graph.distances[:, None])
        edges = per_component(f * weight[:, None]) * self.geometry(u)[:, :, None]
        x = edges.new_zeros(graph.num_atoms, 9, edges.shape[2]).index_add(0, graph.receiver, edges)
        if self.counts_itself:
            own = self.cutoff(rbf_self.new_zeros(1)) * self.distance_proj1(rbf_self) * (z_receiver + z_sender)
            x = x + torch.cat([own[:, None], x.new_zeros(x.shape[0], 8, x.shape[2])], 1)

        gate = self.init_norm(tensor_norm(x))
        for linear in self.linears_scalar:
            gate = self.act(linear(gate))
        gate = gate.unflatten(1, (3, -1))
        return scale_parts(mix_channels(x, self.linears_tensor, 0), gate)

    def geometry(self, u: Tensor) -> Tensor:
        """Return components of 1, skew(u) and uuᵀ − 1/3 for unit (or zero) vectors u [E, 3]: [E, 9]."""
        ux, uy, uz = u.unbind(1)
        third = (ux * ux + uy * uy + uz * uz) / 3
        skew = self.skew_sign
        return torch.stack(
            [
                torch.ones_like(ux),
                -skew * uz,
                skew * uy,
                -skew * ux,
                ux * ux - third,
                ux * uy,
                ux * uz,
                uy * uy - third,
                uy * uz,
            ],
            1,
        )


class Interaction(nn.Module):
    """Message passing and tensor products (paper §3.2, Eqs. 10–13).

    X ← X/(‖X‖²+1);  Y = mix(X);  M_i = Σ_j g(d_ij) Y_j;  P = (1+0.1q)(YM + MY) for O(3), 2 YM for SO(3);
    D = mix(P/(‖P‖²+1));  X ← X + D + (1+0.1q) D².

    With tensor_norm "root" both divisors are √(‖X‖²+1).
    """

    def __init__(
        self,
        hidden_channels: int,
        num_rbf: int,
        act: str,
        cutoff: CosineCutoff,
        group: str,
        tensor_norm: str = "square",
    ):
        super().__init__()
        f = hidden_channels
        self.group, self.tensor_norm = group, tensor_norm
        self.cutoff = cutoff
        self.act = activation(act)
        self.linears_scalar = nn.ModuleList([nn.Linear(num_rbf, f), nn.Linear(f, 2 * f), nn.Linear(2 * f, 3 * f)])
        self.linears_tensor = nn.ModuleList(nn.Linear(f, f, bias=False) for _ in range(6))

    def normalise(self, x: Tensor) -> Tensor:
        """Return X/(‖X‖²+1), which is largest at ‖X‖ = 1, or X/√(‖X‖²+1), which grows up to 1."""
        square = tensor_norm(x) + 1
        return x / (square if self.tensor_norm == "square" else square.sqrt())[:, None]

    def radial_filter(self, rbf: Tensor, envelope: Tensor) -> Tensor:
        """Return filters of I, A, S on each edge from the radial basis [E, R] and the cutoff function [E]: [E, 3,
        F]."""
        g = rbf
        for linear in self.linears_scalar:
            g = self.act(linear(g))
        return (g * envelope[:, None]).unflatten(1, (3, -1))

    def messages(self, y: Tensor, graph: Graph, rbf: Tensor, envelope: Tensor, rbf_self: Tensor) -> Tensor:
        """Return M [N, 9, F] from Y [N, 9, F]; the sum includes j = i at distance 0."""
        g = per_component(self.radial_filter(rbf, envelope))
        g_self = per_component(self.radial_filter(rbf_self, self.cutoff(rbf_self.new_zeros(1))))
        return (g_self * y).index_add(0, graph.receiver, g * graph.senders(y).index_select(0, graph.sender))

    def forward(self, x: Tensor, graph: Graph, rbf: Tensor, envelope: Tensor, rbf_self: Tensor, q: Tensor) -> Tensor:
        """
        Args:
            x: [N, 9, F].
            graph: atoms and edges.
            rbf, envelope: [E, R] and [E], radial basis and cutoff function on the edges.
            rbf_self: [1, R] radial basis at distance 0.
            q: [N] 1 + 0.1 × total charge of the atom's structure.

        Returns:
            X [N, 9, F].
        """
        x = self.normalise(x)
        y = mix_channels(x, self.linears_tensor, 0)
        m = self.messages(y, graph, rbf, envelope, rbf_self)

        y_full, m_full = compose(y), compose(m)
        q = q[:, None, None, None]
        if self.group == "O(3)":
            p_full = q * (matmul(y_full, m_full) + matmul(m_full, y_full))
        else:
            p_full = 2 * matmul(y_full, m_full)
        p = decompose(p_full)
        d = mix_channels(self.normalise(p), self.linears_tensor, 3)
        d_full = compose(d)
        return x + d + decompose(q * matmul(d_full, d_full))


@REPRESENTATIONS.register("tensornet")
class TensorNet(Representation):
    """TensorNet, which represents atoms by Cartesian tensors. It loads weights of TorchMD-Net 3.x, with the same names.

    Args:
        hidden_channels: number of features F.
        num_layers: number of interaction layers.
        num_rbf: number of radial functions R.
        rbf_type: "expnorm", "gauss", "bessel" or "smooth_bessel".
        trainable_rbf: learn centres and widths of the radial functions.
        activation: name of the activation function.
        cutoff: Å.
        cutoff_lower: Å; edges contribute only beyond it.
        max_z: atomic numbers 0 … max_z − 1.
        group: "O(3)": energies of mirror images are equal; "SO(3)": they may differ.
        skew_sign: sign of the antisymmetric part. +1 is the paper's; −1 reproduces SO(3) models that were trained
            with TorchMD-Net 3.x. Without effect for O(3).
        norm: normalisation of the squared norms of the tensors, in the gate of the embedding and before the head:
            "layer" (layer normalisation, as published), or "log" (γ log(1 + x) + β), which extrapolates better to
            structures unlike those of the training.
        tensor_norm: normalisation of the tensors X in the interactions: "square" (X/(‖X‖²+1), as published) or "root"
            (X/√(‖X‖²+1)).
        linear_readout: add to the energy of an atom a linear function of the isotropic parts of X after the embedding
            and after each layer, which gives low body orders without products.
    """

    takes_ghosts = True
    gives_vectors = False

    def __init__(
        self,
        hidden_channels: int = 128,
        num_layers: int = 2,
        num_rbf: int = 32,
        rbf_type: str = "expnorm",
        trainable_rbf: bool = False,
        activation: str = "silu",
        cutoff: float = 5.0,
        cutoff_lower: float = 0.0,
        max_z: int = 128,
        group: Literal["O(3)", "SO(3)"] = "O(3)",
        skew_sign: Literal[1, -1] = 1,
        norm: Literal["layer", "log"] = "layer",
        tensor_norm: Literal["square", "root"] = "square",
        linear_readout: bool = False,
    ):
        super().__init__()
        if tensor_norm not in ("square", "root"):
            raise ValueError(f"tensor_norm must be 'square' or 'root', got '{tensor_norm}'")
        if group not in ("O(3)", "SO(3)"):
            raise ValueError(f"group must be 'O(3)' or 'SO(3)', got '{group}'")
        if skew_sign not in (1, -1):
            raise ValueError(f"skew_sign must be 1 or -1, got {skew_sign}")
        if hidden_channels < 1 or num_layers < 0:
            raise ValueError("hidden_channels must be at least 1 and num_layers at least 0")
        self.cutoff, self.hidden_channels, self.max_z = float(cutoff), hidden_channels, max_z
        self.group, self.tensor_norm = group, tensor_norm
        self.reads_charge = num_layers > 0
        f = hidden_channels
        self.envelope = CosineCutoff(cutoff_lower, cutoff)
        self.distance_expansion = radial_basis(rbf_type, cutoff_lower, cutoff, num_rbf, trainable_rbf)
        self.tensor_embedding = TensorEmbedding(f, num_rbf, activation, self.envelope, max_z, skew_sign, norm)
        self.layers = nn.ModuleList(
            Interaction(f, num_rbf, activation, self.envelope, group, tensor_norm) for _ in range(num_layers)
        )
        self.linear = nn.Linear(3 * f, f)
        self.out_norm = feature_norm(norm, 3 * f)
        self.act = self.tensor_embedding.act
        # vectors instead of a matrix, so that optimizers for matrices do not train these weights of energies
        stages = num_layers + 1 if linear_readout else 0
        self.linear_readout = nn.ParameterList(torch.zeros(f) for _ in range(stages))

    def reset_parameters(self) -> None:
        """Initialise all parameters again."""
        reset(self)
        for weight in self.linear_readout:
            nn.init.zeros_(weight)

    def forward(self, graph: Graph) -> Features:
        rbf, envelope = self.distance_expansion(graph.distances), self.envelope(graph.distances)
        rbf_self = self.distance_expansion(graph.vectors.new_zeros(1))
        x = self.tensor_embedding(graph, rbf, envelope, rbf_self)
        q = self.product_factor(graph)
        isotropic = [x[:, 0]]
        for layer in self.layers:
            x = layer(x, graph, rbf, envelope, rbf_self, q)
            isotropic.append(x[:, 0])
        return Features(self.read(torch.cat(part_norms(x), 1)), energies=self.linear_energies(isotropic))

    def linear_energies(self, isotropic: Sequence[Tensor]) -> Tensor | None:
        """Return energies of the linear read-out, [N] in the head's unit; None for a model without.

        Args:
            isotropic: isotropic parts of X, [N, F], after the embedding and after each layer.
        """
        if not len(self.linear_readout):
            return None
        return torch.stack([part @ weight for part, weight in zip(isotropic, self.linear_readout, strict=True)]).sum(0)

    def product_factor(self, graph: Graph) -> Tensor:
        """Return the factor of the products of the interactions, from the total charge, [N].

        Args:
            graph: N atoms.
        """
        return (1 + 0.1 * graph.charge)[graph.batch]

    def read(self, norms: Tensor) -> Tensor:
        """Return the scalar features, [N, F].

        Args:
            norms: squared norms of I, A and S, [N, 3F].
        """
        return self.act(self.linear(self.out_norm(norms)))
