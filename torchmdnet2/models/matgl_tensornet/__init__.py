"""Choice of the kernels for matgl's TensorNet. Triton is imported on use."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.interfaces import FastPath, Network
from ..heads import GatedScalarHead
from ..tensornet import PRODUCTS, unsupported_network
from .model import MatglTensorNet

__all__ = ["MatglPath"]


class MatglPath(FastPath):
    """matgl's TensorNet with messages of the neighbors and the gated head, in float32, on the GPU."""

    on_cpu = False

    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        assert isinstance(representation, MatglTensorNet)
        if representation.messages != "neighbor":
            return "the fused kernels have messages of the neighbor's tensors, this model's are of the receiver's own"
        reason = unsupported_network(representation, device)
        if reason:
            return reason
        if type(head) is not GatedScalarHead:
            return f"there are no fused kernels for the head {type(head).__name__}"
        if not all(isinstance(layer, nn.SiLU) for layer in list(head.value.layers)[1::2]):
            return "the fused kernels have the activation silu only"
        return ""

    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> Network:
        from .gpu import FrozenMatgl, FusedMatgl

        weights = FrozenMatgl(representation, head, energy_scale, device)
        return FusedMatgl(weights, precision=PRODUCTS[precision])

    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> Network:
        raise NotImplementedError("there are no compiled kernels for matgl's TensorNet on the CPU")
