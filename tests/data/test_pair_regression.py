"""Signs and units of forces and stress are told from frames of which no two are similar."""

import numpy as np
import pytest
import torch
from crystals import crystals

from torchmdnet2.data import InMemoryDataset, Sample, statistics
from torchmdnet2.data.pair_regression import ORDERS, PLAIN, regression


def found(samples):
    data = InMemoryDataset(samples)
    return regression(data, np.arange(len(data)), statistics(data))


@pytest.fixture(scope="module")
def right():
    return crystals()


def test_right_labels_have_the_factor_one(right):
    result = found(right)
    assert result.explained > 0.97
    for factor in (result.energy, result.stress[PLAIN]):
        assert abs(factor.value - 1) < 0.15 and factor.gain > 30
        assert max(factor.positive, factor.near, factor.close) < 2
    assert result.stress[PLAIN].gain - max(f.gain for name, f in result.stress.items() if name != PLAIN) > 30


@pytest.mark.parametrize("ratio", [-1.0, 23.06, 1 / 23.06, 1 / 27.211, 1 / 51.422, 14.4, 1.8897])
def test_the_ratio_of_other_units_or_signs(right, ratio):
    wrong = [Sample(s.system, {**s.labels, "forces": s.labels["forces"] * ratio}) for s in right]
    factor = found(wrong).energy
    assert abs(factor.value * ratio - 1) < 0.15 and factor.gain > 30
    assert (factor.positive if ratio < 0 else factor.close) > 15


@pytest.mark.parametrize("ratio", [-1.0, 160.2, -1602.2, 1.6e6, 1 / 183.6])
def test_the_ratio_of_other_stresses(right, ratio):
    wrong = [Sample(s.system, {**s.labels, "stress": s.labels["stress"] * ratio}) for s in right]
    factor = found(wrong).stress[PLAIN]
    assert abs(factor.value / ratio - 1) < 0.15 and factor.gain > 30


@pytest.mark.parametrize("name", [name for name in ORDERS if name != PLAIN])
def test_another_order_of_six_numbers(right, name):
    wrong = []
    for sample in right:
        stress, order = sample.labels["stress"].clone(), [(1, 2), (0, 2), (0, 1)]
        for read, place in zip(ORDERS[name], order, strict=True):
            one, two = order[read]
            stress[0, one, two] = stress[0, two, one] = sample.labels["stress"][0][place]
        wrong.append(Sample(sample.system, {**sample.labels, "stress": stress}))
    result = found(wrong).stress
    assert max(result, key=lambda key: result[key].gain) == name and result[name].gain - result[PLAIN].gain > 15


def test_energies_per_atom():
    result = found(crystals(per_atom=True))
    assert result.per_atom.gain - result.energy.gain > 15 and abs(result.per_atom.value - 1) < 0.15


def test_labels_without_relation_say_nothing(right):
    rng = np.random.default_rng(3)
    wrong = [Sample(s.system, {**s.labels, "energy": torch.tensor([rng.normal()])}) for s in right]
    assert found(wrong).energy.gain < 6


def test_where_nothing_can_be_told(right):
    assert found(right[:19]) is None
    assert found([Sample(s.system, {**s.labels, "forces": 0 * s.labels["forces"]}) for s in right]) is None
    noise = torch.Generator().manual_seed(0)
    random = [torch.randn(s.labels["forces"].shape, generator=noise, dtype=torch.float64) for s in right]
    unrelated = found([Sample(s.system, {**s.labels, "forces": f}) for s, f in zip(right, random, strict=True)])
    assert unrelated.energy is None and unrelated.explained < 0.1 and not unrelated.stress
    partly = [Sample(s.system, {**s.labels, "forces": s.labels["forces"].clone()}) for s in right]
    for sample in partly[:25]:
        sample.labels["forces"][0, 0] = torch.nan
    assert found(partly) is None
