"""Heads: from per-atom features to per-atom energies."""

from __future__ import annotations

from torch import Tensor

from ..registry import HEADS
from .base import Features, Graph, Head
from .layers import MLP

__all__ = ["ScalarHead"]


@HEADS.register("scalar")
class ScalarHead(Head):
    """Energy of an atom from its scalar features by a small network F → F/2 → 1.

    Args:
        hidden_channels: F.
        activation: name of the activation function.
        num_hidden_layers: further layers of width F/2.
    """

    def __init__(self, hidden_channels: int, activation: str = "silu", num_hidden_layers: int = 0):
        super().__init__()
        self.output_network = MLP(hidden_channels, hidden_channels // 2, 1, activation, num_hidden_layers)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        """[N] atomic energies, in the model's unit."""
        return self.output_network(features.x).squeeze(1)
