"""Frozen weights of TensorNet2, prepared once for the fused kernels.

Besides those of TensorNet: of the filters the first layer as a table of its radial half and weights of the charges, the
others split into float16 numbers; and the networks that predict charges. Shapes: F channels, L layers, C charge
channels, padded with zeros to a power of two of at least 16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tensornet.weights import Filters, FrozenTensorNet

__all__ = ["ChargeWeights", "FilterWeights", "FrozenTensorNet2", "SplitMatrix", "padded_channels", "split"]


class SplitMatrix(NamedTuple):
    """W [K, N] = unit · (high + low).

    Attributes:
        parts: [2, K, N] float16.
        unit: a power of two, with which the largest number is between 2¹⁴ and 2¹⁵.
    """

    parts: Tensor
    unit: float


class FilterWeights(NamedTuple):
    """Weights of the filters of one layer.

    Attributes:
        charges: [C, 2F], from the charges of the receiver (first F) and the sender to the first layer.
        charges_t: [F, 2C], the transposes, beside each other.
        second, third: [F, 2F] and [2F, 3F]; second_bias, third_bias.
        second_t, third_t: [2F, F] and [3F, 2F], the transposes.

    On a GPU charges_t, second, third and their transposes are a `SplitMatrix` each, else tensors.
    """

    charges: Tensor
    charges_t: Any
    second: Any
    second_bias: Tensor
    third: Any
    third_bias: Tensor
    second_t: Any
    third_t: Any


class ChargeWeights(NamedTuple):
    """Weights of one network that predicts charges: layer norm of 3F, 3F → F → F → 2C. Transposes end in _t.

    Attributes:
        gamma, beta: [3F].
        first: [3F, F]; first_gamma, first_offset: [F] W₁ γ and b₁ + W₁ β, see tensornet/triton_atoms.py.
    """

    gamma: Tensor
    beta: Tensor
    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    third: Tensor
    third_bias: Tensor
    first_t: Tensor
    second_t: Tensor
    third_t: Tensor
    first_gamma: Tensor
    first_offset: Tensor


def padded_channels(q_dim: int) -> int:
    """Return C."""
    return max(16, 1 << (q_dim - 1).bit_length())


def split(w: Tensor) -> SplitMatrix:
    """Return W [K, N] in two float16 numbers.

    Raises:
        ValueError: a weight is not finite.
    """
    largest = float(w.abs().max())
    if not math.isfinite(largest):
        raise ValueError("a weight is not finite: the model file is damaged, or its training diverged")
    unit = math.ldexp(1.0, math.frexp(largest)[1] - 15)
    exact = w.double() / unit
    high = exact.half()
    return SplitMatrix(torch.stack([high, (exact - high.double()).half()]), unit)


class FrozenTensorNet2(FrozenTensorNet):
    """Weights of a TensorNet2 and its scalar head in the layout of the kernels, on one device.

    Attributes:
        layer_tables: L × [K, 4, 1, F], the radial half of the filters' first layer, with its bias.
        filters: L of `FilterWeights`; charge_networks: L + 1 of `ChargeWeights`.
        q_dim, exact_charge: of the model; norm_eps: of the layer norms.
        cutoff: Å.
    """

    _vanish = False
    _operand = staticmethod(split)  # of the products per edge, as the kernels read it

    def __init__(self, model: Any, head: nn.Module, energy_scale: float, device: torch.device | str):
        super().__init__(model, head, energy_scale, device)
        self.q_dim: int = model.q_dim
        self.charge_channels = padded_channels(model.q_dim)
        self.cutoff = float(model.cutoff)
        networks = [model.charge_predict_0, *model.charge_predicts]
        self.exact_charge: bool = networks[0].exact
        self.norm_eps: float = networks[0].q_norm.eps
        with torch.no_grad():
            self.filters = [self._filter_weights(layer) for layer in model.layers]
            self.charge_networks = [self._charge_weights(network) for network in networks]

    def _filters(self, exact: Any, layer: Any) -> Filters:
        first = layer.linears_scalar[0]
        radial = first.weight.shape[1] - 2 * exact.q_dim
        return lambda d: (exact.distance_expansion(d) @ first.weight[:, :radial].T + first.bias)[:, None]

    def _give(self, t: Any) -> Any:
        if isinstance(t, SplitMatrix):
            return SplitMatrix(self._give(t.parts), t.unit)
        return t.detach().contiguous().to(self.device)

    def _pad(self, w: Tensor, dim: int) -> Tensor:
        """Return zeros for the charge channels that the model does not have."""
        shape = list(w.shape)
        shape[dim] = self.charge_channels - self.q_dim
        return torch.cat([w, w.new_zeros(shape)], dim)

    def _filter_weights(self, layer: Any) -> FilterWeights:
        first, second, third = (linear.weight.detach().float().cpu() for linear in layer.linears_scalar)
        receiver, sender = (self._pad(w, 1) for w in first[:, -2 * self.q_dim :].chunk(2, 1))
        given = (
            torch.cat([receiver.T, sender.T], 1), self._operand(torch.cat([receiver, sender], 1)),
            self._operand(second.T), layer.linears_scalar[1].bias, self._operand(third.T),
            layer.linears_scalar[2].bias, self._operand(second), self._operand(third),
        )  # fmt: skip
        return FilterWeights(*(self._give(t) for t in given))

    def _charge_weights(self, network: Any) -> ChargeWeights:
        norm = network.q_norm
        linears = [m for m in network.q_mlp.layers if isinstance(m, nn.Linear)]
        (w1, b1), (w2, b2), (w3, b3) = ((m.weight.detach(), m.bias.detach()) for m in linears)
        w3 = torch.cat([self._pad(w, 0) for w in w3.chunk(2)])
        b3 = torch.cat([self._pad(b, 0) for b in b3.chunk(2)])
        gamma, beta, exact = norm.weight.double(), norm.bias.double(), w1.double()
        given = (
            norm.weight, norm.bias, w1.T, b1, w2.T, b2, w3.T, b3, w1, w2, w3, (exact @ gamma).float(),
            (b1.double() + exact @ beta).float(),
        )  # fmt: skip
        return ChargeWeights(*(self._give(t) for t in given))
