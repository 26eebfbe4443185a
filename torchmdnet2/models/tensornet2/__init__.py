"""Choice of the kernels for TensorNet2. Triton is imported on use."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.interfaces import Network, PairBatch, PairNetwork
from ..tensornet import PRODUCTS, TensorNetHeads, unsupported_tensornet
from .model import TensorNet2

__all__ = ["TensorNet2Path"]


class TensorNet2Path(TensorNetHeads):
    """TensorNet2 with charges and a scalar head of one hidden layer, in float32."""

    trains_on_cpu = True
    predicts_charges = True

    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        assert isinstance(representation, TensorNet2)
        if not 1 <= representation.q_dim <= 64:
            return f"the fused kernels for TensorNet2 take a q_dim of 1 to 64, not {representation.q_dim}"
        return unsupported_tensornet(representation, head, device)

    def unsupported_property(self, head: nn.Module) -> str:
        if getattr(head, "reads_edges", True):  # it may read the latent charges, which are not kept
            return f"there are no fused kernels for the head {type(head).__name__}"
        return super().unsupported_property(head)

    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> Network:
        from .gpu import FusedTensorNet2
        from .weights import FrozenTensorNet2

        return FusedTensorNet2(FrozenTensorNet2(representation, head, energy_scale, device), PRODUCTS[precision])

    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> Network:
        from .cpu import CpuTensorNet2, Float32TensorNet2

        return CpuTensorNet2(Float32TensorNet2(representation, head, energy_scale, "cpu"))

    def training(self, representation: nn.Module, batch: PairBatch, use_kernels: bool) -> PairNetwork | None:
        from .training import PairTensorNet2

        return PairTensorNet2(representation, batch, use_kernels)  # type: ignore[arg-type]
