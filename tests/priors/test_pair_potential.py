"""The pair potential against its formula; its wall; the shipped checks."""

from __future__ import annotations

import math

import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.priors import PairPotential
from torchmdnet2.priors.pair_potential import ATTRACTIVE, REPULSIVE
from torchmdnet2.testing import check_prior

TABLE = {"C-H": [0.5, 0.0, 2.0, 0.3, 0.0, 1.0, 0.0, 2.5], "1-1": [0, 0, 0, 12.0, 0, 0, 0, 0]}


def energies(prior, z1, z2, distances):
    found = []
    for d in distances:
        pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.6 * d, 0.8 * d]], dtype=torch.float64)
        system = System(z=torch.tensor([z1, z2]), pos=pos)
        found.append(float(prior(system, pair_list(system, prior.cutoff)).sum()))
    return found


def test_formula():
    prior, exponents = PairPotential(TABLE, cutoff=3.5), (3.2, 4.0, 5.0, 6.5, 1.0, 1.5, 2.0, 2.6)
    assert exponents == (*REPULSIVE, *ATTRACTIVE)
    for d in (0.6, 1.1, 2.9):
        terms = [(1, -1)[k > 3] * c * math.exp(-a * (d - 1)) for k, (c, a) in enumerate(zip(TABLE["C-H"], exponents))]
        expected = sum(terms) * (1 - (d / 3.5) ** 2) ** 3
        assert energies(prior, 1, 6, [d]) == energies(prior, 6, 1, [d]) == [pytest.approx(expected, rel=1e-12)]
        assert energies(prior, 1, 1, [d])[0] > 0 and energies(prior, 6, 6, [d]) == [0]
    assert energies(prior, 1, 6, [3.5001]) == [0]


def test_pairs_without_parameters_have_no_energy():
    """Each two elements have a row of their own: none is taken for another one."""
    prior = PairPotential({"C-H": TABLE["C-H"], "8-1": TABLE["1-1"], "C-C": TABLE["1-1"], "O-O": TABLE["C-H"]})
    for z1 in range(1, 19):
        for z2 in range(1, 19):
            known = {z1, z2} in ({1, 6}, {1, 8}, {6}, {8})
            assert (energies(prior, z1, z2, [1.1]) != [0]) == known, (z1, z2)
    many = PairPotential({f"{a}-{b}": [a, b, *[0] * 6] for a in range(1, 30) for b in range(a, 30)})
    for a, b in ((1, 29), (5, 5), (17, 8), (29, 28)):
        assert many.table[many.place[a] + many.place[b]].tolist()[:2] == [min(a, b), max(a, b)]


def test_checks():
    """Forces, symmetries, cells, batches, smoothness at the cutoff."""
    check_prior(PairPotential({f"{a}-{b}": TABLE["C-H"] for a, b in ("CC", "HO", "CO", "HH", "CH")}, cutoff=3.5))


def test_a_wall_whatever_the_coefficients():
    generator = torch.Generator().manual_seed(0)
    distances = torch.linspace(0.2, 3.9, 90).tolist()
    for _ in range(5):
        coefficients = torch.rand(8, generator=generator, dtype=torch.float64) ** 4 * 20
        energy = torch.tensor(energies(PairPotential({"H-O": coefficients.tolist()}), 1, 8, distances))
        rising = energy.diff() > 1e-12
        assert energy[0] > 0 and int((rising[1:] & ~rising[:-1]).sum()) <= 1  # one minimum at most


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parameters": {"CH": [1.0] * 8}}, "is not a pair of elements"),
        ({"parameters": {"C-Xx": [1.0] * 8}}, "not an element"),
        ({"parameters": {"C-H": [1.0] * 7}}, "parameters of 1-6 must be 8 numbers"),
        ({"parameters": {"C-H": [-1.0] * 8}}, "not negative"),
        ({"cutoff": math.inf}, "cutoff"),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(ValueError, match=words):
        PairPotential(**arguments)
