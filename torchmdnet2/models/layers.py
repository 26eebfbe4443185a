"""Layers that models share: activations, networks, norms, cutoff functions, radial functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.devices import Float64Buffers
from ..registry import did_you_mean
from ..system import is_transformed

__all__ = [
    "ACTIVATIONS", "MLP", "BesselBasis", "CosineCutoff", "ExpNormalBasis", "GatedEquivariantBlock", "GaussianBasis",
    "LayerNorm", "LogNorm", "SmoothBesselBasis", "activation", "feature_norm", "radial_basis",
]  # fmt: skip


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
    """Return the activation function of this name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in ACTIVATIONS:
        hint = did_you_mean(name, ACTIVATIONS)
        raise ValueError(f"unknown activation '{name}'{hint} Known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class LogNorm(nn.Module):
    """γ log(1 + x) + β for features x ≥ 0, elementwise. Unlike a layer norm it grows with every feature without bound.

    Args:
        channels: number of features F.
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
    """PyTorch's layer norm, with correct derivatives of every order.

    The forward-mode derivative in PyTorch 2.13 treats mean and variance as constants when it is differentiated again,
    so that Hessians by `jacfwd` within another transform are wrong.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[…, F] → […, F]."""
        if not is_transformed():
            return super().forward(x)
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": LayerNorm, "log": LogNorm}


def feature_norm(name: str, channels: int) -> nn.Module:
    """Return the normalisation "layer" or "log" for F features ≥ 0.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in NORMS:
        raise ValueError(f"unknown norm '{name}'{did_you_mean(name, NORMS) or '.'} Known: {', '.join(NORMS)}")
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
        if num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers must be at least 0, got {num_hidden_layers}")
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
    """Return the length along the last axis; below r = 1e-3 a polynomial of r² with two continuous derivatives.

    The length has a kink at zero. If vectors vanish by symmetry (in methane, in a perfect crystal), forces would follow
    the direction of rounding errors.
    """
    square = (vectors * vectors).sum(-1)
    inside = square < _KINK**2
    t = torch.where(inside, square, 0) / _KINK**2
    return torch.where(inside, _KINK / 8 * t * (15 - 10 * t + 3 * t * t), torch.where(inside, 1, square).sqrt())


def reset(module: nn.Module) -> None:
    """Initialise the parameters of all sub-modules again."""
    for child in module.modules():
        if child is not module and isinstance(child, nn.Linear | nn.Embedding | nn.LayerNorm | LogNorm):
            child.reset_parameters()


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / denominator with finite gradients; 0 where the denominator, or a power of it, is 0."""
    zero = denominator.abs() < torch.finfo(denominator.dtype).tiny ** (1 / 3)
    return torch.where(zero, torch.zeros_like(numerator), numerator / torch.where(zero, 1, denominator))


# --- Radial bases and cutoff functions ---


class CosineCutoff(nn.Module):
    """½ (cos(π d / r_c) + 1) below the cutoff, 0 beyond; with a lower bound, a bump that is 0 at both ends.

    Args:
        lower, upper: Å.

    Source: J. Behler, J. Chem. Phys. 134, 074106 (2011), Eq. 6.
    """

    def __init__(self, lower: float, upper: float):
        super().__init__()
        if not 0 <= lower < upper:
            raise ValueError(f"the cutoff range must satisfy 0 ≤ lower < upper, got {lower} … {upper}")
        self.lower, self.upper = float(lower), float(upper)

    def forward(self, distances: Tensor) -> Tensor:
        """[E] distances in Å → [E] weights."""
        if self.lower > 0:
            phase = 2 * (distances - self.lower) / (self.upper - self.lower) + 1
            inside = (distances > self.lower) & (distances < self.upper)
        else:
            phase = distances / self.upper
            inside = distances < self.upper
        return 0.5 * (torch.cos(math.pi * phase) + 1) * inside


class ExpNormalBasis(Float64Buffers):
    """φ_k(d) = C(d) · exp(−β_k (exp(α(r_l − d)) − μ_k)²), α = 5/(r_c − r_l).

    Args:
        lower, upper: Å.
        num_radial: R.
        trainable: learn centres and widths.

    Source: O. Unke, M. Meuwly, PhysNet, J. Chem. Theory Comput. 15, 3678 (2019), Eq. 8.
    """

    def __init__(self, lower: float, upper: float, num_radial: int, trainable: bool = False):
        super().__init__()
        self.lower, self.alpha = float(lower), 5.0 / (upper - lower)
        self.cutoff = CosineCutoff(0.0, upper)
        start = math.exp(lower - upper)
        means = torch.linspace(start, 1.0, num_radial, dtype=torch.float64)
        betas = torch.full((num_radial,), (2 / num_radial * (1 - start)) ** -2, dtype=torch.float64)
        if trainable:
            self.means = nn.Parameter(means.to(torch.get_default_dtype()))
            self.betas = nn.Parameter(betas.to(torch.get_default_dtype()))
        else:
            self.register_buffer("means", means)
            self.register_buffer("betas", betas)

    def forward(self, distances: Tensor) -> Tensor:
        """[E] distances in Å → [E, R]."""
        d = distances[:, None]
        means, betas = self.means.to(d.dtype), self.betas.to(d.dtype)
        return self.cutoff(d) * torch.exp(-betas * (torch.exp(self.alpha * (self.lower - d)) - means) ** 2)


class GaussianBasis(Float64Buffers):
    """φ_k(d) = exp(−(d − μ_k)² / 2Δ²), μ_k evenly spaced at Δ. No cutoff inside.

    Source: K. Schütt et al., SchNet, J. Chem. Phys. 148, 241722 (2018), Eq. 6.
    """

    def __init__(self, lower: float, upper: float, num_radial: int, trainable: bool = False):
        super().__init__()
        offset = torch.linspace(lower, upper, num_radial, dtype=torch.float64)
        coeff = -0.5 / (offset[1] - offset[0]) ** 2
        if trainable:
            self.offset = nn.Parameter(offset.to(torch.get_default_dtype()))
            self.coeff = nn.Parameter(coeff.to(torch.get_default_dtype()))
        else:
            self.register_buffer("offset", offset)
            self.register_buffer("coeff", coeff)

    def forward(self, distances: Tensor) -> Tensor:
        """[E] distances in Å → [E, R]."""
        d = distances[:, None]
        return torch.exp(self.coeff.to(d.dtype) * (d - self.offset.to(d.dtype)) ** 2)


class BesselBasis(nn.Module):
    """φ_k(d) = √(2/w) sin(k π x/w)/x, x = d − r_l, w = r_c − r_l: waves over the whole range. No cutoff inside.

    Every distance in the data trains every function, unlike with narrow Gaussians.

    Source: J. Gasteiger, J. Groß, S. Günnemann, DimeNet, ICLR 2020, arXiv 2003.03123, Eq. 7.
    """

    def __init__(self, lower: float, upper: float, num_radial: int, trainable: bool = False):
        super().__init__()
        if trainable:
            raise ValueError("the radial basis 'bessel' has nothing to train: leave trainable_rbf out")
        self.lower, self.width, self.num_radial = float(lower), float(upper - lower), num_radial

    def forward(self, distances: Tensor) -> Tensor:
        """[E] distances in Å → [E, R]."""
        k = torch.arange(1, self.num_radial + 1, dtype=distances.dtype, device=distances.device)
        x = (distances[:, None] - self.lower) * (k * math.pi / self.width)
        return math.sqrt(2 / self.width) * (k * math.pi / self.width) * _sinc(x)


class SmoothBesselBasis(nn.Module):
    """Orthonormal waves over the whole range that vanish at the cutoff with their first two derivatives.

    Each is a sum of waves f_n(d) ∝ sinc((n+1)πd/r_c) + sinc((n+2)πd/r_c), made orthogonal to those before it.

    Source: E. Kocer, J. Mason, H. Erturk, AIP Advances 10, 015021 (2020), arXiv 1907.02374, Eqs. 6 to 9.
    """

    def __init__(self, lower: float, upper: float, num_radial: int, trainable: bool = False):
        super().__init__()
        if trainable:
            raise ValueError("the radial basis 'smooth_bessel' has nothing to train: leave trainable_rbf out")
        if lower != 0:
            raise ValueError("the radial basis 'smooth_bessel' begins at 0: leave cutoff_lower out")
        self.upper, self.num_radial = float(upper), num_radial

    def forward(self, distances: Tensor) -> Tensor:
        """[E] distances in Å → [E, R]."""
        n = torch.arange(1, self.num_radial + 2, dtype=distances.dtype, device=distances.device)
        waves = _sinc(distances[:, None] * (n * math.pi / self.upper)).unbind(1)
        result: list[Tensor] = []
        before = 1.0  # d of the function before
        for k in range(self.num_radial):
            a, b = k + 1, k + 2
            size = (-1) ** k * math.sqrt(2) * math.pi * self.upper**-1.5 * a * b / math.sqrt(a * a + b * b)
            wave = size * (waves[k] + waves[k + 1])
            if k:
                e = (k * b) ** 2 / (4 * a**4 + 1)
                d = 1 - e / before
                wave = (wave + math.sqrt(e / before) * result[-1]) / math.sqrt(d)
                before = d
            result.append(wave)
        return torch.stack(result, 1)


def _sinc(x: Tensor) -> Tensor:
    """Return sin(x)/x, by its series where x is small: derivatives of every order are finite."""
    small = x.abs() < 1e-2
    away = torch.where(small, 1.0, x)
    near = torch.where(small, x, 0.0) ** 2
    return torch.where(small, 1 - near / 6 * (1 - near / 20 * (1 - near / 42)), torch.sin(away) / away)


_BASES = {
    "expnorm": ExpNormalBasis,
    "gauss": GaussianBasis,
    "bessel": BesselBasis,
    "smooth_bessel": SmoothBesselBasis,
}


def radial_basis(kind: str, lower: float, upper: float, num_radial: int, trainable: bool = False) -> nn.Module:
    """Return the radial basis "expnorm", "gauss", "bessel" or "smooth_bessel" with R = num_radial functions.

    Raises:
        ValueError: the kind is unknown, or there are fewer than two functions.
    """
    if kind not in _BASES:
        raise ValueError(f"unknown radial basis '{kind}'{did_you_mean(kind, _BASES) or '.'} Known: {', '.join(_BASES)}")
    if num_radial < 2:
        raise ValueError(f"num_radial must be at least 2, got {num_radial}")
    return _BASES[kind](lower, upper, num_radial, trainable)
