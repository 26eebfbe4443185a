"""What the kernels of AIMNet2 cover, and where they are. Triton is imported when it is used."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.interfaces import CpuNetwork, FastPath, GpuNetwork
from ..tensornet import PRODUCTS
from .weights import FrozenAIMNet2, unsupported_reason

__all__ = ["AIMNet2Path"]

_CAPABILITY = (8, 0)  # the first GPUs whose Tensor Cores take TF32


class AIMNet2Path(FastPath):
    """AIMNet2 with GELU and a scalar head, in float32."""

    on_cpu = False
    predicts_charges = True

    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
            return "the fused kernels need a GPU of compute capability 8.0 (Ampere, 2020) or later"
        return unsupported_reason(representation, head)

    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> GpuNetwork:
        from .gpu import FusedAIMNet2

        return FusedAIMNet2(FrozenAIMNet2(representation, head, energy_scale, device), PRODUCTS[precision])

    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> CpuNetwork:
        raise NotImplementedError("there are no compiled kernels for AIMNet2 on the CPU")
