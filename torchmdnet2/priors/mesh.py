"""Smooth particle-mesh Ewald: the reciprocal part of an Ewald sum by fast Fourier transform, O(N log N).

Source: U. Essmann et al., J. Chem. Phys. 103, 8577 (1995), Eqs. 3.6–4.7.

Shapes: N atoms, C charge channels, p spline order, M = M_1 × M_2 × M_3 mesh points.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .lattice import inverse, volume

__all__ = ["Mesh", "mesh_potential", "mesh_sizes", "order_and_spacing", "spline_moduli"]


class Mesh(NamedTuple):
    """M_1, M_2, M_3, on the host and as numbers [3] int64 on the device; and |b|² of the splines on half the mesh."""

    sizes: tuple[int, ...]
    numbers: Tensor
    moduli: Tensor

    @classmethod
    def of(cls, sizes: list[int], order: int, device: torch.device) -> Mesh:
        x, y, z = (spline_moduli(size, order, device) for size in sizes)
        moduli = x[:, None, None] * y[:, None] * z[: sizes[2] // 2 + 1]
        return cls(tuple(sizes), torch.tensor(sizes, device=device), moduli)


def order_and_spacing(accuracy: float, alpha: float) -> tuple[int, float]:
    """Spline order p and mesh spacing h in Å for an accuracy relative to the charges' own potential, about α.

    The error of the splines is below 0.05 (α h)^p (measured on random charges, p = 6 … 16); it is made four times
    smaller than asked for, since forces have a larger one. The order grows with the digits asked for, so that work on
    atoms (p³ each) and on mesh points (1/h³ each) stay alike.
    """
    digits = round(-math.log10(accuracy))
    order = min(max(2 * (1 + digits // 2), 4), 16)
    return order, (5 * accuracy) ** (1 / order) / alpha


def mesh_potential(pos: Tensor, cell: Tensor, q: Tensor, alpha: float, order: int, mesh: Mesh) -> Tensor:
    """Potential of the smooth charges at the atoms, their own included: what Σ_k gives in an Ewald sum.

    Energies are invariant under translation up to the error of the mesh, and forces add up to zero likewise.

    Args:
        pos: [N, 3] Å, float64.
        cell: [3, 3] Å, rows.
        q: [N, C] e.
        alpha: Ewald parameter, 1/Å.
        order: p, even.
        mesh: its points, at most as far apart along the lattice vectors as `order_and_spacing` says.

    Returns:
        [N, C] e/Å, differentiable in positions, cell and charges.
    """
    sizes = mesh.sizes
    points, weights = _spread(pos @ inverse(cell), mesh, order)

    # charges on the mesh, its Fourier transform times the influence function, and back
    on_mesh = q.new_zeros(math.prod(sizes), q.shape[1])
    on_mesh = on_mesh.index_add(0, points.flatten(), (weights[:, :, None] * q[:, None]).flatten(0, 1))
    transform = torch.fft.rfftn(on_mesh.unflatten(0, sizes), dim=(0, 1, 2))
    influence = _influence(cell, alpha, mesh)
    potential = torch.fft.irfftn(transform * influence[..., None], s=sizes, dim=(0, 1, 2)) * math.prod(sizes)
    at_points = potential.flatten(0, 2).index_select(0, points.flatten()).unflatten(0, points.shape)
    return (at_points * weights[:, :, None]).sum(1)


def mesh_sizes(cell: Tensor, order: int, spacing: float) -> list[int]:
    """M_1, M_2, M_3 for a cell [3, 3] in Å: points along the lattice vectors at most `spacing` apart.

    Vectors, not planes: a wave k turns by k·a_i along the vector a_i, however skew the cell is.
    """
    lengths = cell.detach().norm(dim=1).tolist()
    return [_even_composite(max(order, math.ceil(length / spacing))) for length in lengths]


def _spread(fractional: Tensor, mesh: Mesh, order: int) -> tuple[Tensor, Tensor]:
    """Mesh points [N, p³] that each atom touches, and its spline weights there."""
    sizes, u = mesh.sizes, fractional * mesh.numbers
    first = torch.floor(u.detach())
    weights = _spline(u - first, order)  # [N, 3, p]: weight of the point first − k
    offset = torch.arange(order, device=u.device)
    index = (first.long()[:, :, None] - offset) % mesh.numbers[:, None]
    x, y, z = index.unbind(1)
    points = (x[:, :, None, None] * sizes[1] + y[:, None, :, None]) * sizes[2] + z[:, None, None, :]
    wx, wy, wz = weights.unbind(1)
    products = wx[:, :, None, None] * wy[:, None, :, None] * wz[:, None, None, :]
    return points.flatten(1), products.flatten(1)


def _spline(t: Tensor, order: int) -> Tensor:
    """Cardinal B-splines M_p(t + k), k = 0 … p − 1, for t in [0, 1): [..., p] (Eq. 4.1)."""
    values = torch.stack([t, 1 - t], -1)  # M_2(t), M_2(t + 1)
    t = t[..., None]
    for n in range(3, order + 1):
        k = torch.arange(n, device=t.device)
        below = torch.nn.functional.pad(values, (1, 1))  # M_{n−1} at t + k − 1, k = 0 … n
        values = ((t + k) * below[..., 1:] + (n - t - k) * below[..., :-1]) / (n - 1)
    return values


def _influence(cell: Tensor, alpha: float, mesh: Mesh) -> Tensor:
    """4π/V exp(−k²/4α²)/k² |b(k)|² on the half mesh of a real transform, [M_1, M_2, M_3/2 + 1]; 0 at k = 0."""
    sizes, device = mesh.sizes, cell.device
    n = [torch.fft.fftfreq(m, 1 / m, dtype=torch.float64, device=device) for m in sizes[:2]]
    n.append(torch.fft.rfftfreq(sizes[2], 1 / sizes[2], dtype=torch.float64, device=device))
    index = torch.stack(torch.meshgrid(*n, indexing="ij"), -1)
    k = 2 * math.pi * index @ inverse(cell).T
    k2 = (k * k).sum(-1)
    zero = k2 == 0
    k2 = torch.where(zero, 1.0, k2)
    strength = torch.where(zero, 0.0, torch.exp(-k2 / (4 * alpha * alpha)) / k2)
    return 4 * math.pi / volume(cell) * (strength * mesh.moduli)


def spline_moduli(size: int, order: int, device: torch.device) -> Tensor:
    """|b(n)|² = 1/|Σ_k M_p(k + 1) exp(2πi n k/M)|², [M] (Eq. 4.4)."""
    at_integers = _spline(torch.zeros(1, dtype=torch.float64, device=device), order)[0, 1:]  # M_p(1) … M_p(p − 1)
    n = torch.arange(size, dtype=torch.float64, device=device)
    phase = 2 * math.pi * n[:, None] * torch.arange(order - 1, device=device) / size
    total = (at_integers * torch.cos(phase)).sum(1) ** 2 + (at_integers * torch.sin(phase)).sum(1) ** 2
    return 1 / total


def _even_composite(size: int) -> int:
    """The next even number without prime factors above 7, which transforms fast."""
    while True:
        rest = size
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1 and size % 2 == 0:
            return size
        size += 1
