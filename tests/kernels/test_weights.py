"""Filter tables hold values and slopes of the radial filters to float32's precision, whatever the model."""

from __future__ import annotations

import copy

import pytest
import torch

from torchmdnet2 import Potential
from torchmdnet2.models.tensornet.weights import FrozenTensorNet, fit_tables
from torchmdnet2.models.tensornet2.weights import FrozenTensorNet2, split


def filters_of(sharpness=1.0, **model):
    torch.manual_seed(0)
    potential = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, **model}})
    net = copy.deepcopy(potential.representation).double().requires_grad_(False)
    with torch.no_grad():
        for linear in net.layers[0].linears_scalar:
            linear.weight.mul_(sharpness)
    return lambda d: net.layers[0].radial_filter(net.distance_expansion(d), net.envelope(d))


@pytest.mark.parametrize(
    ("options", "knots"),
    [
        ({"num_rbf": 16}, 512),
        ({"num_rbf": 32}, 1024),
        ({"num_rbf": 32, "sharpness": 3.0}, 2048),
        ({"num_rbf": 8, "rbf_type": "bessel"}, 1024),
    ],
)
def test_the_table_is_as_large_as_the_slopes_need(options, knots):
    filters = filters_of(**options)
    table, (segments,) = fit_tables(5.0, [(filters, True)])
    assert table.num_knots == knots
    assert segments.shape == (knots, 4, 3, 32) and not segments[-1].any()  # nothing lies beyond the cutoff
    d = torch.linspace(0.65, 4.99, 2003, dtype=torch.float64)
    value, slope = torch.func.jvp(filters, (d,), (torch.ones_like(d),))
    place = table.distances()
    below = torch.searchsorted(place, d, right=True) - 1
    t = (d - place[below])[:, None, None]
    c = segments.float().double()[below]
    found = c[:, 0] + t * (c[:, 1] + t * (c[:, 2] + t * c[:, 3]))
    assert float((found - value).abs().max() / value.abs().max()) < 1e-7
    found = c[:, 1] + t * (2 * c[:, 2] + 3 * t * c[:, 3])
    assert float((found - slope).abs().max() / slope.abs().max()) < 8e-7


def test_functions_that_are_not_zero_at_the_cutoff_need_no_more_knots():
    """The first layer of TensorNet2's filters has a bias."""
    torch.manual_seed(0)
    model = {"name": "tensornet2", "hidden_channels": 32, "num_layers": 2, "num_rbf": 32, "q_dim": 8}
    potential = Potential.from_config({"model": model})
    frozen = FrozenTensorNet2(potential.representation, potential.head, 1.0, "cpu")
    assert frozen.table.num_knots == 1024
    assert all(float(table[-2].abs().max()) > 0.01 for table in frozen.layer_tables)


@pytest.mark.parametrize("mixed", [False, True])
def test_filters_of_the_embedding_are_combinations_of_few_functions(mixed):
    """Down to 0.4 Å, although a bias makes them combinations of 33."""
    torch.manual_seed(0)
    potential = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 32, "num_rbf": 32}})
    frozen = FrozenTensorNet(potential.representation, potential.head, 1.0, "cpu", mixed)
    table, maps, maps_t = frozen.embedding_by_elements
    assert table.shape[-2:] == (1, 32) and torch.equal(maps.transpose(1, 2), maps_t)
    places = frozen.table.distances()
    knots = slice(int(torch.searchsorted(places, 0.4)), -1)
    if mixed:
        whole, words = (t.view(torch.float32)[knots, 0] for t in (frozen.embedding_table, table))
    else:
        whole, words = (t[knots, 0] for t in (frozen.embedding_table, table))
    values = torch.einsum("kr,prf->kpf", words[:, 0], maps)
    assert float((values - whole).abs().max() / whole.abs().max()) < (1e-4 if mixed else 1e-6)


def test_too_many_functions_are_not_combined():
    torch.manual_seed(0)
    potential = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 32, "num_rbf": 64}})
    assert FrozenTensorNet(potential.representation, potential.head, 1.0, "cpu").embedding_by_elements is None


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6])
def test_two_float16_numbers_hold_22_bits_of_a_weight(scale):
    torch.manual_seed(0)
    w = scale * torch.randn(64, 32)
    (high, low), unit = split(w)
    assert high.dtype == low.dtype == torch.float16
    error = (high.double() + low.double()) * unit - w.double()
    assert float(error.abs().max()) <= 2.0**-23 * float(w.abs().max())


def test_weights_that_are_all_zero_are_split():
    (high, low), _unit = split(torch.zeros(4, 4))
    assert not high.any() and not low.any()


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="a weight is not finite"):
        split(torch.tensor([[1.0, float("inf")]]))
