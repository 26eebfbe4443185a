"""ZBL against its formula, pair by pair, and the shipped checks."""

from __future__ import annotations

import math

import pytest
import torch
from ase.data import covalent_radii

from torchmdnet2 import System
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.priors import ZBL
from torchmdnet2.testing import check_prior, example_systems

SYSTEMS = example_systems((1, 6, 8), 5.0)


def by_hand(z1: int, z2: int, d: float, prefactor: float, power: float) -> float:
    """k_e Z Z'/d φ(d/a) in eV with the constants of 2018 written out."""
    x = d / (prefactor * 0.529177210903 / (z1**power + z2**power))
    terms = ((0.1818, 3.2), (0.5099, 0.9423), (0.2802, 0.4029), (0.02817, 0.2016))
    return 14.39964548 * z1 * z2 / d * sum(a * math.exp(-b * x) for a, b in terms)


def energy(prior: ZBL, z1: int, z2: int, d: float) -> float:
    pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.6 * d, 0.8 * d]], dtype=torch.float64)
    system = System(z=torch.tensor([z1, z2]), pos=pos)
    return float(prior(system, pair_list(system, prior.cutoff)).sum())


@pytest.mark.parametrize(("z1", "z2", "d"), [(1, 1, 0.3), (6, 8, 1.1), (14, 79, 2.9), (1, 92, 3.9)])
def test_universal_repulsion(z1, z2, d):
    expected = by_hand(z1, z2, d, 0.8854, 0.23) * 0.5 * (1 + math.cos(math.pi * d / 4))
    assert energy(ZBL(4.0), z1, z2, d) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("z1", "z2", "d"), [(1, 1, 0.3), (6, 8, 1.1), (14, 79, 2.4)])
def test_within_the_covalent_radii(z1, z2, d):
    t = d / (covalent_radii[z1] + covalent_radii[z2])
    envelope = 1 - 28 * t**6 + 48 * t**7 - 21 * t**8
    expected = by_hand(z1, z2, d, 0.4543, 0.3) * envelope
    assert 0 < envelope < 1
    prior = ZBL(envelope="covalent", screening="refitted", scale=0.5)
    assert energy(prior, z1, z2, d) == pytest.approx(0.5 * expected, rel=1e-8)
    assert energy(prior, z1, z2, 1.01 * d / t) == 0


def test_within_given_radii():
    prior = ZBL(envelope="covalent", radii={"H": 0.3, "O": 0.5})
    t = 0.75 / 0.8
    expected = by_hand(1, 8, 0.75, 0.8854, 0.23) * (1 - 28 * t**6 + 48 * t**7 - 21 * t**8)
    assert prior.cutoff == 1.0 and expected > 1e-3
    assert energy(prior, 1, 8, 0.75) == pytest.approx(expected, rel=1e-8)
    assert (
        energy(prior, 1, 8, 0.81)
        == energy(prior, 6, 6, 0.4)
        == energy(prior, 1, 6, 0.31)
        == 0
        < energy(prior, 1, 6, 0.2)
    )


@pytest.mark.parametrize(
    "options",
    [{"cutoff": 4.0}, {"envelope": "covalent", "screening": "refitted"}, {"envelope": "covalent", "radii": {"C": 1.1}}],
)
def test_conformance(options):
    check_prior(ZBL(**options), SYSTEMS.values())


def test_errors():
    for options in ({"envelope": "none"}, {"screening": "other"}, {"cutoff": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            ZBL(**options)
    for options, words in (
        ({"radii": {"H": 0.3}}, "covalent"),
        ({"envelope": "covalent", "radii": {"H": -1.0}}, "radius of H"),
    ):
        with pytest.raises(ValueError, match=words):
            ZBL(**options)
