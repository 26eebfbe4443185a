"""Atomref: exact in float64, whatever is done to the model around it."""

from __future__ import annotations

import json

import pytest
import torch
from ase.build import molecule

from torchmdnet2 import System
from torchmdnet2.priors import Atomref
from torchmdnet2.testing import check_prior, without_network

ENERGIES = {1: -13.587222780835477, 6: -1029.4889999855063, 8: -2041.9816003861047}
SYSTEM = System.from_ase([molecule("CH3CH2OH"), molecule("H2O")])
TOTAL = torch.tensor(
    [2 * ENERGIES[6] + 6 * ENERGIES[1] + ENERGIES[8], 2 * ENERGIES[1] + ENERGIES[8]], dtype=torch.float64
)


def total(prior) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.float64).index_add(0, SYSTEM.batch, prior(SYSTEM, None).detach())


def test_conformance():
    check_prior(Atomref(ENERGIES))
    check_prior(Atomref(ENERGIES, trainable=True))


@pytest.mark.parametrize("trainable", [False, True])
def test_exact_after_casting(trainable):
    prior = Atomref(ENERGIES, trainable=trainable)
    for change in (prior.float, prior.half, prior.double, lambda: prior.to(torch.bfloat16)):
        change()
        assert prior.initial.dtype == torch.float64
        assert (total(prior) - TOTAL).abs().max() < 1e-11
        assert prior(SYSTEM, None).dtype == torch.float64


def test_keys_as_in_json():
    assert torch.equal(total(Atomref(json.loads(json.dumps(ENERGIES)))), total(Atomref(ENERGIES)))


def test_elements_without_energy_have_none():
    assert total(Atomref()).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("z", [-1, 128, "200"])
def test_out_of_range(z):
    with pytest.raises(ValueError, match="below 128"):
        Atomref({z: -1.0})


def test_training_reaches_it():
    prior = Atomref(ENERGIES, trainable=True)
    prior(SYSTEM, None).sum().backward()
    gradient = prior.change.grad
    assert gradient[[1, 6, 8]].tolist() == [8.0, 2.0, 2.0] and gradient.sum() == 12.0
    assert not list(Atomref(ENERGIES).parameters())


def test_an_element_beyond_the_table_is_named():
    """Not an IndexError, which on a GPU ends the process."""
    potential = without_network([Atomref(ENERGIES, max_z=9)], (1, 6, 8, 17)).eval()
    assert float((potential(SYSTEM).energy - TOTAL).abs().max()) < 1e-11
    with pytest.raises(ValueError, match=r"max_z = 9.*Z = 17"):
        potential(SYSTEM.replace(z=SYSTEM.z.clamp(min=17)))
