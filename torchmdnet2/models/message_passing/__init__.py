"""Choice of the kernels for messages with radial filters."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...kernels.interfaces import FastPath, Network
from ..heads import EquivariantScalarHead, ScalarHead
from .model import EquivariantTransformer, GraphNetwork, Transformer

__all__ = ["MessagePath"]


class MessagePath(FastPath):
    """Equivariant Transformer, Transformer and graph network in float32 on a GPU, with heads of energies."""

    arithmetic = MappingProxyType({"native": "float32"})

    def unsupported_reason(self, representation: nn.Module, head: nn.Module, device: torch.device) -> str:
        assert isinstance(representation, EquivariantTransformer | Transformer | GraphNetwork)
        name = type(representation).__name__
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
            return f"there are kernels for {name} on a GPU only"
        dtype = representation.embedding.weight.dtype
        if dtype != torch.float32:
            return f"the fused kernels compute in float32, the model is {dtype}"
        if representation.envelope.lower > 0:
            return "the fused kernels need no lower cutoff"
        channels = representation.hidden_channels
        if channels & (channels - 1):
            return f"the fused kernels need hidden_channels to be a power of two, not {channels}"
        if isinstance(representation, GraphNetwork):
            layers = list(representation.interactions)
            if any(block.conv.aggregation != "add" for block in layers):  # type: ignore[union-attr]
                return "the fused kernels have the aggregation 'add' only"
        else:
            layers = list(representation.attention_layers)
            if not all(isinstance(layer.attn_activation, nn.SiLU) for layer in layers):
                return "the fused kernels have the attention activation silu only"
        if not layers:
            return "the fused kernels need at least one layer"
        if type(head) not in (ScalarHead, EquivariantScalarHead):
            return f"there are no fused kernels for the head {type(head).__name__}"
        return ""

    def gpu(
        self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device, precision: str
    ) -> Network:
        from . import gpu as network

        networks: dict[type[nn.Module], Any] = {
            GraphNetwork: network.GraphNetworkNetwork,
            Transformer: network.TransformerNetwork,
            EquivariantTransformer: network.EquivariantTransformerNetwork,
        }
        return networks[type(representation)](representation, head, energy_scale, device)

    def cpu(self, representation: nn.Module, head: nn.Module, energy_scale: float) -> Network:
        raise NotImplementedError("see unsupported_reason")
