"""Choice of the kernels for TensorNet. Triton and numba are imported on use."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...kernels.interfaces import (
    ChargeNetwork,
    CpuNetwork,
    FastPath,
    Network,
    PairBatch,
    PairNetwork,
    PathWithHeads,
)
from ..heads import ChargesHead, ScalarHead
from .model import TensorNet

__all__ = ["PRODUCTS", "TensorNetHeads", "TensorNetPath", "unsupported_network", "unsupported_tensornet"]


_CAPABILITY = (8, 0)  # the first GPUs whose Tensor Cores take TF32
PRODUCTS = {"native": "tf32x3", "tf32": "tf32", "mixed": "tf32x3"}
"""Precision of matrix products by that of the Evaluator."""


def unsupported_network(representation: Any, device: torch.device) -> str:
    """Return why the kernels cannot evaluate a representation of TensorNet's family; "" if they can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the fused kernels need a GPU of compute capability 8.0 (Ampere, 2020) or later"
    dtype = representation.tensor_embedding.emb.weight.dtype
    if dtype != torch.float32:
        return f"the fused kernels compute in float32, the model is {dtype}"
    f = representation.hidden_channels
    if f < 32 or f & (f - 1):
        return f"the fused kernels need hidden_channels to be a power of two of at least 32, not {f}"
    if not isinstance(representation.act, nn.SiLU):
        return "the fused kernels have the activation silu only"
    if len(representation.layers) == 0 or representation.envelope.lower > 0:
        return "the fused kernels need at least one interaction layer and no lower cutoff"
    return ""


def unsupported_tensornet(representation: Any, head: nn.Module, device: torch.device) -> str:
    """Return why the kernels cannot evaluate a TensorNet or TensorNet2; "" if they can."""
    reason = unsupported_network(representation, device)
    if reason:
        return reason
    if type(head) is not ScalarHead:
        return f"there are no fused kernels for the head {type(head).__name__}"
    return _unsupported_scalar_network(head)


def _unsupported_scalar_network(head: Any) -> str:
    layers = list(head.output_network.layers)
    if len(layers) != 3 or not isinstance(layers[1], nn.SiLU):
        return "the fused kernels have heads of one hidden layer with silu only"
    return ""


class TensorNetHeads(PathWithHeads):
    """Heads that read the features of TensorNet or TensorNet2."""

    def unsupported_property(self, head: nn.Module) -> str:
        if getattr(head, "property", None) != "charges":
            return ""
        if type(head) is not ChargesHead:
            return f"there are no fused kernels for the head {type(head).__name__}"
        return _unsupported_scalar_network(head)

    def with_charges(self, network: Network, head: nn.Module) -> ChargeNetwork:
        from .charged import ChargedTensorNet

        return ChargedTensorNet(network, head)  # type: ignore[arg-type]

    def cpu_with_charges(self, network: Network, head: nn.Module) -> CpuNetwork:
        network.add_charges(head)  # type: ignore[attr-defined]
        return network  # type: ignore[return-value]


class TensorNetPath(TensorNetHeads):
    """TensorNet with a scalar head of one hidden layer, in float32."""

    trains_on_cpu, takes_ghosts, takes_shells = True, True, True
    arithmetic = MappingProxyType(
        {**FastPath.arithmetic, "mixed": "float32, in the interactions float16 fields and products"}
    )

    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        assert isinstance(representation, TensorNet)
        if representation.tensor_norm != "square":
            return "the fused kernels have tensor_norm 'square' only"
        return unsupported_tensornet(representation, head, device)

    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> Network:
        from .gpu import FusedTensorNet
        from .weights import FrozenTensorNet

        weights = FrozenTensorNet(representation, head, energy_scale, device, precision == "mixed")
        return FusedTensorNet(weights, precision=PRODUCTS[precision])

    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> Network:
        from .cpu import CpuTensorNet
        from .weights import FrozenTensorNet

        return CpuTensorNet(FrozenTensorNet(representation, head, energy_scale, "cpu"))  # type: ignore[arg-type]

    def training(self, representation: nn.Module, batch: PairBatch, use_kernels: bool) -> PairNetwork | None:
        from .training import PairTensorNet

        return PairTensorNet(representation, batch, use_kernels)  # type: ignore[arg-type]
