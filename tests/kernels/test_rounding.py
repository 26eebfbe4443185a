"""Energies of a thousand atoms and more: how Tensor Cores add, and how long the sums are that are left to them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchmdnet2.models.tensornet.gpu import FusedTensorNet, Tiles
from torchmdnet2.models.tensornet.weights import pack_halves


def towards_zero(x: Tensor) -> Tensor:
    """float64 → the float32 number next to it on the side of zero, as float64."""
    nearest = x.float()
    return torch.where(nearest.double().abs() > x.abs(), nearest.nextafter(torch.zeros_like(nearest)), nearest).double()


def leading(x: Tensor) -> Tensor:
    """To 11 bits, as `leading` in triton_products.py."""
    return ((x.float().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double()


def of_tf32(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Factors whose products `dot` in triton_products.py adds, the small ones first."""
    a_high, b_high = leading(a), leading(b)
    return [(a - a_high, b_high), (a_high, b - b_high), (a_high, b_high)]


def of_halves(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of `dot_halves` there."""
    a_high, w, low = a.half().double(), *pack_halves(b).double()
    rest = ((a - a_high) * 2048).half().double()
    return [(a_high, low), (rest, (w / 2048).half().double()), (a_high, w)]


def on_matrix_units(a: Tensor, b: Tensor, depth: int, halves: bool) -> Tensor:
    """A @ B as Tensor Cores add: 8 or 16 products at a time, each sum rounded towards zero, `depth` of them before a
    sum is rounded to the nearest."""
    step, factors, unit = (16, of_halves(a, b), 2048) if halves else (8, of_tf32(a, b), 1)
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for first in range(0, a.shape[1], depth):
        part = torch.zeros_like(y)
        for left, right in factors:
            for k in range(first, first + depth, step):
                part = towards_zero(part + left[:, k : k + step] @ right[k : k + step])
        y = (y + part / unit).float().double()
    return y


def shrinking(depth: int, halves: bool) -> float:
    """By how much results are nearer to zero than they should be, relative to their size."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200, 128, generator=generator).double()
    b = torch.randn(128, 64, generator=generator).double()
    exact = a @ b
    found = on_matrix_units(a, b, depth, halves)
    assert float((found - exact).abs().max()) < 1e-6 * float(exact.abs().max())
    return float(((exact - found) * exact.sign()).mean() / exact.abs().mean())


@pytest.mark.parametrize(
    "name",
    [
        "hidden",
        "gate",
        "readout",
        "embedding_mix",
        "mix",
        "update",
        "gradient_product",
        "gradient_mix",
        "gradient_embedding",
    ],
)
@pytest.mark.parametrize("num_atoms", [1029, 2489, 98304])
def test_products_do_not_shrink(num_atoms, name):
    # 1.9e-7 with sums of 64 in TF32, when the energy of 1,029 atoms of water was wrong by 1.1e-6 of it
    tiles = Tiles.for_atoms(num_atoms, 128)
    block = getattr(tiles, name)
    if name != "readout":
        assert shrinking(block.depth, True) < 1.2e-7
    if name == "readout" or block.rows >= 16:  # also where the weights do not fit in halves
        net = FusedTensorNet.__new__(FusedTensorNet)
        net.weights, net.can_overlap = SimpleNamespace(channels=128), False
        net.precision = net.field_precision = net.layer_precision = "tf32x3"
        constants = net._product(num_atoms, 128, tiles, name)[1]
        assert constants["PREC"] == "tf32x3" and shrinking(constants["BK"], False) < 1.2e-7
