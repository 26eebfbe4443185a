"""Choice of the kernels of AIMNet2. Triton and numba are imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn

from ...kernels.interfaces import ChargeNetwork, FastPath, MemberPath, Network
from ..heads import ScalarHead
from ..tensornet import PRODUCTS
from .model import AIMNet2

__all__ = ["AIMNet2Path"]

_CAPABILITY = (8, 0)  # the first GPUs whose Tensor Cores take TF32


class AIMNet2Path(MemberPath):
    """AIMNet2 with GELU and a scalar head, in float32."""

    predicts_charges = True
    arithmetic = MappingProxyType({**FastPath.arithmetic, "mixed": "float32, which is as fast as mixed precision"})

    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        assert isinstance(representation, AIMNet2)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
            return "the fused kernels need a GPU of compute capability 8.0 (Ampere, 2020) or later"
        dtype = representation.embedding.weight.dtype
        if dtype != torch.float32:
            return f"the fused kernels compute in float32, the model is {dtype}"
        if type(head) is not ScalarHead:
            return f"there are no fused kernels for the head {type(head).__name__}"
        networks = [*representation.passes, head.output_network.layers]
        if not all(isinstance(part, nn.Linear | nn.GELU) for network in networks for part in network):  # type: ignore[union-attr]
            return "the fused kernels for AIMNet2 have the activation gelu only"
        if representation.num_layers < 2:
            return "the fused kernels for AIMNet2 need two passes or more"
        for name in ("channels", "num_rbf"):
            size = getattr(representation, name)
            if size & (size - 1):
                return f"the fused kernels for AIMNet2 need {name} to be a power of two, not {size}"
        return ""

    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> Network:
        return self.gpu_members([(representation, head)], energy_scale, device, precision)

    def gpu_members(
        self, networks: Sequence[tuple[nn.Module, nn.Module]], energy_scale: float, device: torch.device, precision: str
    ) -> ChargeNetwork:
        from .gpu import FusedAIMNet2
        from .weights import FrozenAIMNet2

        frozen = [FrozenAIMNet2(representation, head, energy_scale, device) for representation, head in networks]
        return FusedAIMNet2(frozen, PRODUCTS[precision])

    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> Network:
        from .cpu import CpuAIMNet2
        from .weights import FrozenAIMNet2

        return CpuAIMNet2(FrozenAIMNet2(representation, head, energy_scale, "cpu"))
