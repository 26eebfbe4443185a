"""AIMNet2 and its head as kernels take them: float32, layers padded with zeros, numbers in the order of the buffers.

Shapes: A features, R radial functions, H combinations, F output features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tensornet.weights import HALVES_BELOW, pack_halves

__all__ = ["PAD", "FrozenAIMNet2", "Layer", "in_halves", "padded", "side_by_side"]

PAD = 64
"""Widths of layers are multiples of this."""


class Layer(NamedTuple):
    """y = x W + b, GELU where `activated`. weight [K, N], transposed [N, K], bias [N]."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor
    activated: bool


def padded(width: int) -> int:
    """Return the next multiple of PAD."""
    return -(-width // PAD) * PAD


def side_by_side(members: Sequence[FrozenAIMNet2]) -> FrozenAIMNet2:
    """Return the weights of M members of one form, with a first dimension M."""
    whole = copy.copy(members[0])

    def stack(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.stack(list(values))
        if isinstance(values[0], Layer):
            weight, transposed, bias, activated = zip(*values, strict=True)
            return Layer(stack(weight), stack(transposed), stack(bias), activated[0])
        return type(values[0])(map(stack, zip(*values, strict=True)))

    for name in ("embedding", "combine", "combine_charges", "passes", "head", "energy"):
        setattr(whole, name, stack([getattr(member, name) for member in members]))
    return whole


def in_halves(weights: FrozenAIMNet2) -> FrozenAIMNet2 | None:
    """Return weights whose layers have matrices [M, 2, K, N] in half precision (`pack_halves`); None if they do not
    fit."""
    networks = [*weights.passes, weights.head]
    # gradients begin as the last layer: half precision holds them if they are near 1
    largest = max(float(layer.weight.abs().max()) for network in networks for layer in network)
    if not (largest < HALVES_BELOW and 1e-3 < float(weights.energy[0].abs().max()) < 1e2):
        return None

    def layers(network: Sequence[Layer]) -> list[Layer]:
        return [
            layer._replace(weight=pack_halves(layer.weight, 1), transposed=pack_halves(layer.transposed, 1))
            for layer in network
        ]

    whole = copy.copy(weights)
    whole.passes, whole.head = [layers(network) for network in weights.passes], layers(weights.head)
    return whole


class FrozenAIMNet2:
    """Weights on one device.

    Attributes:
        channels, num_rbf, num_vectors: A, R, H; features: A·R; width: of what a pass reads; hidden_channels: F.
        embedding: [Z, A·R]; combine: [A, R, H]; combine_charges: [R, H]; shifts: [R] Å; eta: 1/Å².
        passes: layers of each pass, the last one of all but the last pass giving [features, charge, weight].
        head: layers of the head but for its last one; energy: [N] weights and [1] bias of that, in eV.
    """

    def __init__(self, representation: Any, head: Any, energy_scale: float, device: torch.device | str):
        self.device = torch.device(device)
        r = representation
        self.channels, self.num_rbf, self.num_vectors = r.channels, r.num_rbf, r.num_vectors
        self.features = r.channels * r.num_rbf
        self.cutoff, self.exact_charge = float(r.cutoff), bool(r.exact_charge)
        self.hidden_channels = r.hidden_channels
        self.width = padded(2 * self.features + r.channels * r.num_vectors + 1 + r.num_rbf + r.num_vectors)
        self.embedding = self._tensor(r.embedding.weight)
        self.combine = self._tensor(r.convolve.combine)
        self.combine_charges = self._tensor(r.convolve_charges.combine[0])
        self.eta, self.shifts = float(r.radial.eta), self._tensor(r.radial.shifts)
        self.passes = [self._network(network, k < r.num_layers - 1) for k, network in enumerate(r.passes)]
        *hidden, last = [part for part in head.output_network.layers if isinstance(part, nn.Linear)]
        self.head = [self._layer(part.weight, part.bias, True) for part in hidden]
        weight = last.weight.detach()[0] * energy_scale
        size = self.head[-1].bias.shape[0]
        self.energy = (
            nn.functional.pad(self._tensor(weight), (0, size - len(weight))),
            self._tensor(last.bias * energy_scale),
        )

    def _tensor(self, value: Tensor) -> Tensor:
        return value.detach().float().contiguous().to(self.device)

    def _network(self, network: nn.Sequential, changes: bool) -> list[Layer]:
        parts: list[Any] = list(network)
        linear, layers = parts[::2], []
        for k, part in enumerate(linear):
            weight, bias = part.weight.detach(), part.bias.detach()
            if changes and part is linear[-1]:
                weight, bias = (torch.cat([t[2:], t[:2]]) for t in (weight, bias))  # features before charges
            width = self.width if k == 0 else padded(weight.shape[1])
            layers.append(self._layer(weight, bias, 2 * k + 1 < len(parts), width))
        return layers

    def _layer(self, weight: Tensor, bias: Tensor, activated: bool, width: int | None = None) -> Layer:
        """Return the layer of weight [out, in], as if it read `width` numbers."""
        outputs, inputs = weight.shape
        whole = torch.zeros(padded(outputs), padded(inputs) if width is None else width)
        whole[:outputs, :inputs] = weight.detach().float().cpu()
        whole_bias = torch.zeros(padded(outputs))
        whole_bias[:outputs] = bias.detach().float().cpu()
        return Layer(self._tensor(whole.T), self._tensor(whole), self._tensor(whole_bias), activated)
