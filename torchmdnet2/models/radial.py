"""Radial bases and cutoff functions.

Shapes: E edges, R radial functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..core.devices import Float64Buffers
from ..registry import did_you_mean

__all__ = ["BesselBasis", "CosineCutoff", "ExpNormalBasis", "GaussianBasis", "SmoothBesselBasis", "radial_basis"]


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

    Unlike narrow bells, each function is trained by every distance in the data.

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
    """sin(x)/x, by its series where x is small: derivatives of every order are finite."""
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
    """The radial basis "expnorm", "gauss", "bessel" or "smooth_bessel" with R = num_radial functions.

    Raises:
        ValueError: unknown kind, or fewer than two functions.
    """
    if kind not in _BASES:
        raise ValueError(f"unknown radial basis '{kind}'{did_you_mean(kind, _BASES)} Known: {', '.join(_BASES)}")
    if num_radial < 2:
        raise ValueError(f"num_radial must be at least 2, got {num_radial}")
    return _BASES[kind](lower, upper, num_radial, trainable)
