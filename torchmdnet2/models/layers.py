"""Small layers that the models share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..registry import did_you_mean
from ..system import is_transformed

__all__ = ["ACTIVATIONS", "MLP", "GatedEquivariantBlock", "LayerNorm", "LogNorm", "activation", "feature_norm"]

_KINK = 1e-3  # length of vector features below which `smooth_length` is not the length


class ShiftedSoftplus(nn.Module):
    """ln(½ eˣ + ½) = softplus(x) − ln 2 (SchNet, Schütt et al. 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.softplus(x) - math.log(2.0)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "ssp": ShiftedSoftplus,
    "mish": nn.Mish,
    "gelu": nn.GELU,
}


def activation(name: str) -> nn.Module:
    """The activation function of this name.

    Raises:
        ValueError: unknown name.
    """
    if name not in ACTIVATIONS:
        hint = did_you_mean(name, ACTIVATIONS)
        raise ValueError(f"unknown activation '{name}'{hint} Known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class LogNorm(nn.Module):
    """γ log(1 + x) + β for features x ≥ 0, elementwise: unlike a layer norm it grows with every feature without bound.

    Args:
        channels: F, of γ and β.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, F] → […, F]."""
        return self.weight * torch.log1p(x) + self.bias


class LayerNorm(nn.LayerNorm):
    """That of PyTorch, with right derivatives of every order.

    The forward-mode derivative of PyTorch's (2.13) takes mean and variance for constants when it is differentiated
    itself, so that Hessians by `jacfwd` within another transform are wrong.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[…, F] → […, F]."""
        if not is_transformed():
            return super().forward(x)
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": LayerNorm, "log": LogNorm}


def feature_norm(name: str, channels: int) -> nn.Module:
    """The normalisation "layer" or "log" of F features that are not negative.

    Raises:
        ValueError: unknown name.
    """
    if name not in NORMS:
        raise ValueError(f"unknown norm '{name}'{did_you_mean(name, NORMS)} Known: {', '.join(NORMS)}")
    return NORMS[name](channels)


class MLP(nn.Module):
    """Linear, activation, n × (Linear, activation), Linear.

    Args:
        in_channels, hidden_channels, out_channels: widths.
        activation_name: a key of ACTIVATIONS.
        num_hidden_layers: n.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        activation_name: str,
        num_hidden_layers: int = 0,
    ):
        super().__init__()
        widths = [in_channels, *[hidden_channels] * (num_hidden_layers + 1)]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), activation(activation_name)]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden_channels, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return self.layers(x)


class GatedEquivariantBlock(nn.Module):
    """Scalars and vectors (x, v) → (x', g ⊙ W₂v) with (x', g) = MLP([x, ‖W₁v‖]).

    Source: K. Schütt et al., PaiNN, ICML 2021, arXiv 2102.03150, Fig. 3; as in P. Thölke, G. De Fabritiis, ICLR 2022.

    Args:
        in_channels, out_channels: F and O.
        activation_name: a key of ACTIVATIONS.
        activate: apply the activation to x' too.
    """

    def __init__(self, in_channels: int, out_channels: int, activation_name: str, activate: bool):
        super().__init__()
        self.vec1_proj = nn.Linear(in_channels, in_channels, bias=False)
        self.vec2_proj = nn.Linear(in_channels, out_channels, bias=False)
        self.update_net = MLP(2 * in_channels, in_channels, 2 * out_channels, activation_name)
        self.act = activation(activation_name) if activate else None
        nn.init.xavier_uniform_(self.vec1_proj.weight)
        nn.init.xavier_uniform_(self.vec2_proj.weight)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, F], v [N, 3, F] → [N, O], [N, 3, O]."""
        length = smooth_length(self.vec1_proj(v).transpose(1, 2))
        x, gate = self.update_net(torch.cat([x, length], 1)).chunk(2, 1)
        return x if self.act is None else self.act(x), gate[:, None] * self.vec2_proj(v)


def smooth_length(vectors: Tensor) -> Tensor:
    """Length along the last axis; below r = 1e-3 a polynomial of r² that meets it with two derivatives.

    The length itself has a kink at zero: where vectors vanish by symmetry (in methane, in a perfect crystal), forces
    would follow the direction of what rounding leaves of them.
    """
    square = (vectors * vectors).sum(-1)
    inside = square < _KINK**2
    t = torch.where(inside, square, 0) / _KINK**2
    return torch.where(inside, _KINK / 8 * t * (15 - 10 * t + 3 * t * t), torch.where(inside, 1, square).sqrt())


def reset(module: nn.Module) -> None:
    """Draw the parameters of all sub-modules anew."""
    for child in module.modules():
        if child is not module and isinstance(child, nn.Linear | nn.Embedding | nn.LayerNorm | LogNorm):
            child.reset_parameters()


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator with finite gradients; 0 where the denominator is 0 or so small that its powers are."""
    zero = denominator.abs() < torch.finfo(denominator.dtype).tiny ** (1 / 3)
    return torch.where(zero, torch.zeros_like(numerator), numerator / torch.where(zero, 1, denominator))
