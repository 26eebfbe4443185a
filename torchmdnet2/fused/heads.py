"""Heads of other properties beside a network on kernels: what a fast path offers for them.

Such heads read the scalar features of the atoms. That of the charges joins the step, because terms read its charges and
the gradient of the network starts from their dE/dq too; the others are evaluated on the features when results are asked
for (runtime/property_heads.py).

Shapes: N atoms, F features.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from .cpu_interfaces import CpuChargeNetwork, CpuNetwork
from .fast_path import ChargeNetwork, FastPath, GpuNetwork

__all__ = ["FeatureNetwork", "PathWithHeads"]


class FeatureNetwork(GpuNetwork):
    """A network that keeps the features which its head has read."""

    @abstractmethod
    def features(self, buffers: object) -> Tensor:
        """After `run`: `Features.x` of the rows, [N or more, F] float32."""


class PathWithHeads(FastPath):
    """The fast path of representations that other heads than that of the energy can read."""

    @abstractmethod
    def unsupported_property(self, head: nn.Module) -> str:
        """ "" when the network can be evaluated with this head of another property, else the reason in words."""

    @abstractmethod
    def with_charges(self, network: GpuNetwork, head: nn.Module) -> ChargeNetwork:
        """The network of `gpu` with the charges of a head, such that `unsupported_property` is ""."""

    @abstractmethod
    def cpu_with_charges(self, network: CpuNetwork, head: nn.Module) -> CpuChargeNetwork:
        """The network of `cpu`, as `with_charges`."""
