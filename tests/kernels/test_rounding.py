"""Energies of a thousand atoms and more: how Tensor Cores add, and how long the sums are that are left to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchmdnet2.models.tensornet.gpu import Tiles


def towards_zero(x: Tensor) -> Tensor:
    """float64 → the float32 number next to it on the side of zero, as float64."""
    nearest = x.float()
    return torch.where(nearest.double().abs() > x.abs(), nearest.nextafter(torch.zeros_like(nearest)), nearest).double()


def leading(x: Tensor) -> Tensor:
    """To 11 bits, as `leading` in triton_products.py."""
    return ((x.float().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double()


def on_matrix_units(a: Tensor, b: Tensor, depth: int) -> Tensor:
    """A @ B as `dot` in triton_products.py adds: eight products at a time, each sum rounded towards zero, `depth` of
    them before a sum is rounded to the nearest."""
    a_high, b_high = leading(a), leading(b)
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for first in range(0, a.shape[1], depth):
        part = torch.zeros_like(y)
        for left, right in ((a - a_high, b_high), (a_high, b - b_high), (a_high, b_high)):
            for k in range(first, first + depth, 8):
                part = towards_zero(part + left[:, k : k + 8] @ right[k : k + 8])
        y = (y + part).float().double()
    return y


def shrinking(depth: int) -> float:
    """By how much results are nearer to zero than they should be, relative to their size."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200, 128, generator=generator).double()
    b = torch.randn(128, 64, generator=generator).double()
    exact = a @ b
    return float(((exact - on_matrix_units(a, b, depth)) * exact.sign()).mean() / exact.abs().mean())


@pytest.mark.parametrize("name", ["hidden", "gate", "readout"])
@pytest.mark.parametrize("num_atoms", [1029, 2489, 98304])
def test_scalar_networks_do_not_shrink(num_atoms, name):
    # 1.9e-7 with sums of 64, when the energy of 1,029 atoms of water was wrong by 1.1e-6 of it
    assert shrinking(getattr(Tiles.for_atoms(num_atoms, 128), name).depth) < 1.2e-7
