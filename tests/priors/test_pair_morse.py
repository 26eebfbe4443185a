"""Morse pairs: the formula, the shipped checks, the fit to forces, and what the configuration says of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii
from ase.io import write

from torchmdnet2 import System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadConfig
from torchmdnet2.priors import PairMorse
from torchmdnet2.priors.pairs import pair_list
from torchmdnet2.testing import check_prior, example_systems
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup

PARAMETERS = {"C-H": [3.3, 6.3], "8-1": [4.4, 8.9], "C-C": [2.7, 5.3], "O-O": [0.5, 0.0]}


def energy(prior: PairMorse, z1: int, z2: int, d: float) -> float:
    pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.6 * d, 0.8 * d]], dtype=torch.float64)
    system = System(z=torch.tensor([z1, z2]), pos=pos)
    return float(prior(system, pair_list(system, prior.cutoff)).sum())


@pytest.mark.parametrize(
    ("z1", "z2", "d", "r", "q"), [(1, 6, 0.9, 3.3, 6.3), (6, 1, 1.8, 3.3, 6.3), (8, 1, 1.0, 4.4, 8.9)]
)
def test_formula(z1, z2, d, r, q):
    beyond = d - covalent_radii[z1] - covalent_radii[z2]
    t = min(max(beyond - 0.1, 0.0), 1.0)
    x = math.exp(-2.2 * beyond)
    expected = (1 - 10 * t**3 + 15 * t**4 - 6 * t**5) * (r * x * x - q * x)
    assert energy(PairMorse(PARAMETERS), z1, z2, d) == pytest.approx(expected, rel=1e-12)


def test_pairs_without_parameters_have_no_energy():
    """Each two elements have a row of their own: none is taken for another one."""
    prior = PairMorse(PARAMETERS)
    for z1 in range(1, 19):
        for z2 in range(1, 19):
            known = {z1, z2} in ({1, 6}, {1, 8}, {6}, {8})
            assert (energy(prior, z1, z2, 0.9 * (covalent_radii[z1] + covalent_radii[z2])) != 0) == known, (z1, z2)
    many = PairMorse({f"{a}-{b}": [float(a), float(b)] for a in range(1, 30) for b in range(a, 30)})
    for a, b in ((1, 29), (5, 5), (17, 8), (29, 28)):
        row = many.table[many.place[a] + many.place[b]].tolist()
        assert row == [min(a, b), max(a, b)]


def test_conformance():
    check_prior(PairMorse(PARAMETERS), example_systems((1, 6, 8), 3.0).values())
    check_prior(PairMorse(), example_systems((1, 6, 8), 3.0).values())


def test_errors():
    for options, words in (
        ({"parameters": {"CH": [1, 1]}}, "not a pair of elements"),
        ({"parameters": {"C-Xy": [1, 1]}}, "not an element"),
        ({"parameters": {"C-H": [1, -1]}}, "not negative"),
        ({"parameters": {"C-H": [1]}}, "must be"),
        ({"start": 1.0, "end": 0.5}, "start < end"),
    ):
        with pytest.raises(ValueError, match=words):
            PairMorse(**options)


@pytest.fixture
def raw(tmp_path):
    """Configuration of a small training on frames whose forces are those of Morse pairs."""
    truth, rng, frames = (
        PairMorse({"C-H": [3.3, 6.3], "O-H": [4.4, 8.9], "C-O": [3.0, 6.0]}),
        np.random.default_rng(0),
        [],
    )
    for _ in range(40):
        positions = np.array([[0, 0, 0], [1.1, 0, 0], [-0.4, 1.3, 0], [-0.4, 1.9, 0.75]]) + rng.normal(0, 0.06, (4, 3))
        atoms = Atoms("CHOH", positions)
        system = System.from_ase(atoms)
        pos = system.pos.requires_grad_()
        total = truth(system, pair_list(system, truth.cutoff)).sum()
        forces = -torch.autograd.grad(total, pos)[0].numpy()
        atoms.calc = SinglePointCalculator(atoms, energy=float(total.detach()), forces=forces)
        frames.append(atoms)
    write(tmp_path / "frames.xyz", frames, format="extxyz")
    return {
        "data": {"train": str(tmp_path / "frames.xyz"), "split": {"validation": 4, "test": 4}},
        "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "priors": [{"name": "pair_morse"}, {"name": "atomref"}],
        "training": {"batch_size": 4, "max_epochs": 1, "device": "cpu"},
        "output": {"folder": str(tmp_path / "run"), "report": False},
    }


def test_the_fit_finds_the_pairs_that_made_the_forces(raw, tmp_path):
    config = parse_config(raw)
    assert config.priors[0]["parameters"] == "fit"
    setup = make_setup(config)
    found = setup.potential.config["priors"][0]["parameters"]
    for pair, expected in (("1-6", [3.3, 6.3]), ("1-8", [4.4, 8.9]), ("6-8", [3.0, 6.0])):
        assert found[pair] == pytest.approx(expected, rel=0.02), pair
    assert found["6-6"] == [0.5, 0.0]  # no such pair: the repulsion that every pair has
    assert "pairs with a minimum: H–C, H–O, C–O" in " ".join(setup.notes)
    # what is left of the energies is a constant, and it is in the reference energies
    prior = setup.potential.priors[0]
    system = setup.frames["train"].batch([0]).sample
    left = float(system.labels["energy"]) - float(prior(system.system, pair_list(system.system, prior.cutoff)).sum())
    references = sum(setup.potential.config["priors"][1]["energies"][str(z)] for z in system.system.z.tolist())
    assert left == pytest.approx(references, abs=0.02)
    save(setup.potential, tmp_path / "model.tmn")
    again = load(tmp_path / "model.tmn")
    assert torch.equal(again.priors[0].table, prior.table) and again.config["priors"][0]["parameters"] == found


def test_every_pair_is_repulsive_within_the_frames(raw):
    """Also where forces alone would say otherwise: here all atoms attract each other."""
    from ase.io import read

    frames = read(raw["data"]["train"], ":")
    for atoms in frames:
        pull = atoms.positions.mean(0) - atoms.positions
        atoms.calc = SinglePointCalculator(atoms, energy=0.0, forces=20 * pull)
    write(raw["data"]["train"], frames, format="extxyz")
    prior = make_setup(parse_config(raw)).potential.priors[0]
    shortest = {(1, 6): 1.1, (6, 8): 1.36, (1, 8): 0.96}  # Å without noise
    for (a, b), d in shortest.items():
        values = [energy(prior, a, b, k * d) for k in (0.3, 0.5, 0.6, 0.7)]
        assert all(x > y for x, y in itertools.pairwise(values)), (a, b, values)


def test_the_fit_is_refused_without_forces(raw):
    raw["data"]["keys"] = {"forces": None}
    with pytest.raises(BadConfig, match="needs forces"):
        make_setup(parse_config(raw))


def test_other_priors_are_subtracted_first(raw):
    alone = make_setup(parse_config(raw)).potential.config["priors"][0]["parameters"]
    raw["priors"].append({"name": "zbl", "cutoff": 2.5})
    beside = make_setup(parse_config(raw)).potential.config["priors"][0]["parameters"]
    assert beside["1-6"][0] < alone["1-6"][0] - 0.1  # a part of the repulsion is ZBL's


def test_what_is_wrong_in_a_configuration(raw):
    for parameters, words in ({"C-H": [1.0, -2.0]}, "not negative"), ("fitted", "parameters"):
        raw["priors"][0]["parameters"] = parameters
        with pytest.raises(BadConfig, match=words):
            parse_config(raw)
