"""TensorNet as matgl defines it.

Source: https://github.com/materialyzeai/matgl, described in T. W. Ko et al., npj Comput. Mater. 11, 253 (2025).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ...potential.graph import Graph
from ...registry import REPRESENTATIONS
from ..tensornet.model import Interaction, TensorNet, per_component

__all__ = ["MatglTensorNet"]


class _Neighbors(Interaction):
    """M_i = Σ_j g(d_ij) Y_j over the neighbors alone."""

    def messages(self, y: Tensor, graph: Graph, rbf: Tensor, envelope: Tensor, rbf_self: Tensor) -> Tensor:
        edges = per_component(self.radial_filter(rbf, envelope)) * graph.senders(y).index_select(0, graph.sender)
        return y.new_zeros(y.shape).index_add(0, graph.receiver, edges)


class _Own(Interaction):
    """M_i = Σ_j g(d_ij) Y_i: the neighbors give the filters alone."""

    def messages(self, y: Tensor, graph: Graph, rbf: Tensor, envelope: Tensor, rbf_self: Tensor) -> Tensor:
        filters = per_component(self.radial_filter(rbf, envelope))
        return y.new_zeros(y.shape).index_add(0, graph.receiver, filters) * y


@REPRESENTATIONS.register("matgl_tensornet")
class MatglTensorNet(TensorNet):
    """matgl's variant of TensorNet, for potentials that `torchmdnet2 import` makes from matgl's files.

    Sums of the embedding and of the messages leave out the atom itself, radial functions are smooth Bessel functions,
    there is no activation before the head, and the total charge is not used.

    Args:
        hidden_channels: F.
        num_layers: number of interaction layers.
        num_rbf: R, radial functions.
        activation: name of the activation function.
        cutoff: Å.
        max_z: atomic numbers 0 … max_z − 1.
        group: "O(3)": energies of mirror images are equal; "SO(3)": they may differ.
        messages: the tensors in a message: those of the "neighbor", or the "own" ones of the receiving atom, as in
            models trained with matgl's DGL backend.
    """

    def __init__(
        self,
        hidden_channels: int = 128,
        num_layers: int = 2,
        num_rbf: int = 3,
        activation: str = "silu",
        cutoff: float = 5.0,
        max_z: int = 128,
        group: Literal["O(3)", "SO(3)"] = "O(3)",
        messages: Literal["neighbor", "own"] = "neighbor",
    ):
        if messages not in ("neighbor", "own"):
            raise ValueError(f"messages must be 'neighbor' or 'own', got '{messages}'")
        super().__init__(
            hidden_channels, num_layers, num_rbf, "smooth_bessel", False, activation, cutoff, 0.0, max_z, group
        )
        self.messages = messages
        layer = _Neighbors if messages == "neighbor" else _Own
        self.layers = nn.ModuleList(
            layer(hidden_channels, num_rbf, activation, self.envelope, group) for _ in range(num_layers)
        )
        self.tensor_embedding.counts_itself = False
        self.reads_charge = False

    def product_factor(self, graph: Graph) -> Tensor:
        return graph.vectors.new_ones(graph.num_atoms)

    def read(self, norms: Tensor) -> Tensor:
        return self.linear(self.out_norm(norms))
