"""matgl's TensorNet on the kernels of TensorNet; PyTorch's matrix products compute the gated head and its gradient.

The kernels keep the features before the activation, which this head reads.

Shapes: N atoms, F channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensornet.gpu import FusedTensorNet
from ..tensornet.weights import FrozenTensorNet

__all__ = ["FrozenMatgl", "FusedMatgl"]


class _Tower(NamedTuple):
    """A network F → F → F → F → 1 with silu: weights [out, in] and biases."""

    weights: list[Tensor]
    biases: list[Tensor]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return values [N] of features [N, F], and the slopes of the activations, [N, F] each."""
        slopes = []
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = torch.addmm(bias, x, weight.T)
            s = torch.sigmoid(h)
            slopes.append(s * (1 + h * (1 - s)))
            x = h * s
        return torch.addmm(self.biases[-1], x, self.weights[-1].T).squeeze(1), slopes

    def backward(self, slopes: Sequence[Tensor], g: Tensor) -> Tensor:
        """Return the gradient [N, F] in the features, from the gradient [N] in the values."""
        x = g[:, None] * self.weights[-1]
        for weight, slope in zip(reversed(self.weights[:-1]), reversed(slopes), strict=True):
            x = (x * slope) @ weight
        return x


class FrozenMatgl(FrozenTensorNet):
    """Weights of matgl's TensorNet and its gated head, float32, on one device.

    Attributes:
        head_value, head_gate: the two networks of the head.
        energy_scale: eV per unit of the head.
    """

    def _head(self, head: Any, energy_scale: float) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        self.head_value, self.head_gate = self._tower(head.value), self._tower(head.gate)
        self.energy_scale = energy_scale
        return (), ()

    def _tower(self, network: Any) -> _Tower:
        layers = network.layers[::2]
        given = (
            [getattr(layer, name).detach().float().to(self.device) for layer in layers] for name in ("weight", "bias")
        )
        return _Tower(*given)


class FusedMatgl(FusedTensorNet):
    """Runs a frozen TensorNet of matgl over CSR rows."""

    weights: FrozenMatgl
    allocates = True

    def _largest(self) -> float:
        return self.weights.energy_scale * float(self.weights.head_value.weights[-1].abs().max())

    def set_unit(self, unit: float) -> None:
        self.unit = unit

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return ones: the total charge is not used."""
        return torch.ones_like(charge)

    def features(self, buffers: Any) -> Tensor:
        return buffers.readout

    def launch_options(self, shapes: Any) -> dict[str, Any]:
        """Return options with which no kernel begins before PyTorch's have ended."""
        return {"PDL": 0}

    def _energies(self, b: Any, tiles: Any, num_atoms: int) -> None:
        w, x = self.weights, b.readout
        scale = w.energy_scale / self.unit
        value, value_slopes = w.head_value.forward(x)
        gate, gate_slopes = w.head_gate.forward(x)
        gate = torch.sigmoid(gate)
        torch.mul(scale * value, gate, out=b.energy)
        by_value, by_gate = scale * gate, scale * value * gate * (1 - gate)
        torch.add(
            w.head_value.backward(value_slopes, by_value), w.head_gate.backward(gate_slopes, by_gate), out=b.dreadout
        )
