"""Radial functions: values, and derivatives at distance zero."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import ELEMENTS, REFERENCES

from torchmdnet2 import Potential
from torchmdnet2.models.layers import radial_basis
from torchmdnet2.testing import check_potential, example_systems


def test_bessel_values():
    d = torch.linspace(0.01, 5, 500, dtype=torch.float64)
    found = radial_basis("bessel", 0.0, 5.0, 8)(d)
    k = torch.arange(1, 9, dtype=torch.float64)
    expected = math.sqrt(2 / 5) * torch.sin(k * math.pi * d[:, None] / 5) / d[:, None]
    assert float((found - expected).abs().max()) < 1e-13


@pytest.mark.parametrize("order", [0, 1, 2])
def test_bessel_is_smooth_where_its_series_ends(order):
    """The series for short distances and the sine give the same derivatives."""

    def derivative(d: float) -> torch.Tensor:
        x = torch.tensor([d], dtype=torch.float64, requires_grad=True)
        values = radial_basis("bessel", 0.0, 5.0, 3)(x)[0]
        for _ in range(order):
            values = torch.stack([torch.autograd.grad(v, x, create_graph=True)[0][0] for v in values])
        return values.detach()

    switch = 1e-2 * 5 / math.pi  # of the first function
    assert float((derivative(switch * (1 - 1e-9)) - derivative(switch * (1 + 1e-9))).abs().max()) < 1e-8
    assert torch.isfinite(derivative(0.0)).all()


def test_a_model_with_bessel_functions():
    model = {"name": "tensornet", "hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
    torch.manual_seed(0)
    potential = Potential.from_config(
        {
            "model": {**model, "rbf_type": "bessel"},
            "priors": [{"name": "atomref", "energies": REFERENCES, "max_z": 20}],
            "elements": ELEMENTS,
        }
    ).double()
    systems = example_systems(ELEMENTS, potential.cutoff)
    check_potential(potential.eval(), [systems["molecule"], systems["tiny cell"]])


def test_bessel_functions_are_not_trained():
    with pytest.raises(ValueError, match="trainable_rbf"):
        radial_basis("bessel", 0.0, 5.0, 8, trainable=True)


def test_smooth_bessel_functions():
    """Orthonormal over the sphere, and zero at the cutoff with two derivatives, as arXiv 1907.02374 derives them."""
    d = torch.linspace(0, 5, 20001, dtype=torch.float64)
    basis = radial_basis("smooth_bessel", 0.0, 5.0, 5)
    values = basis(d)
    overlap = torch.trapezoid(values[:, :, None] * values[:, None] * (d**2)[:, None, None], d, dim=0)
    assert float((overlap - torch.eye(5)).abs().max()) < 1e-6
    x = torch.tensor([5.0, 0.0], dtype=torch.float64, requires_grad=True)
    for k in range(5):
        value = basis(x)[:, k]
        (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert max(abs(float(v[0].detach())) for v in (value, first, second)) < 1e-10
        assert abs(float(first[1].detach())) < 1e-10 and torch.isfinite(second).all()


def test_smooth_bessel_functions_begin_at_zero():
    with pytest.raises(ValueError, match="cutoff_lower"):
        radial_basis("smooth_bessel", 0.5, 5.0, 3)
    with pytest.raises(ValueError, match="trainable_rbf"):
        radial_basis("smooth_bessel", 0.0, 5.0, 3, trainable=True)
