"""`{name: pair_potential}`: the fit to the forces, and the training on what it leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii
from ase.io import write

from torchmdnet2 import System, load
from torchmdnet2.data import open_dataset
from torchmdnet2.errors import BadConfig
from torchmdnet2.priors import ZBL, PairPotential
from torchmdnet2.priors.pair_potential import FITTED
from torchmdnet2.scan import scan_molecule
from torchmdnet2.testing import without_network
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.references import FITS, fit_pair_potential
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.steps.batches import Frames

CH = [0.5, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 2.5]
HH = [0.0, 3.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0]


def labelled(count, table, cutoff=3.0, others=(), symbols="CH3"):
    """Four atoms in random shapes, with the energies and forces of a pair potential and of other priors."""
    potential = without_network([PairPotential(table, cutoff), *others], [1, 6]).double().eval()
    random, corners = np.random.default_rng(1), np.array([[0, 0, 0], [1.1, 0, 0], [0, 1.1, 0], [0, 0, 1.1]])
    frames = []
    for _ in range(count):
        atoms = Atoms(symbols, corners + random.normal(0, 0.15, (4, 3)))
        result = potential(System.from_ase(atoms))
        atoms.calc = SinglePointCalculator(atoms, energy=float(result.energy), forces=result.forces.numpy())
        frames.append(atoms)
    return frames


@pytest.fixture
def frames(tmp_path):
    def made(table, **more):
        write(tmp_path / "pairs.xyz", labelled(40, table, **more))
        data = open_dataset(tmp_path / "pairs.xyz", {"energy": "energy", "forces": "forces"})
        return Frames(data, range(40), 3.0)

    return made


def test_the_fit_finds_the_pair_potential_that_made_the_forces(frames):
    table = {"C-H": CH, "H-H": HH}
    found = fit_pair_potential(frames(table), [1, 6], 3.0)
    assert list(found) == ["H-H", "H-C", "C-C"]
    ours = without_network([PairPotential(found, 3.0)], [1, 6]).double()
    truth = without_network([PairPotential(table, 3.0)], [1, 6]).double()
    systems = System.from_ase(labelled(5, table))
    assert float((ours(systems).forces - truth(systems).forces).detach().abs().max()) < 1e-3


def test_other_priors_are_subtracted_first(raw_config, tmp_path):
    """The repulsion of ZBL is not fitted a second time, and nothing is left to the reference energies."""
    table = {"C-H": CH, "H-H": HH}
    write(tmp_path / "pairs.xyz", labelled(40, table, others=[ZBL(2.5)]))
    raw_config["data"]["train"] = str(tmp_path / "pairs.xyz")
    raw_config["priors"] = [
        {"name": "zbl", "cutoff": 2.5},
        {"name": "pair_potential", "cutoff": 3.0},
        {"name": "atomref", "energies": "fit"},
    ]
    _, pairs, references = make_setup(parse_config(raw_config)).potential.config["priors"]
    ours = without_network([PairPotential(pairs["parameters"], 3.0)], [1, 6]).double()
    truth = without_network([PairPotential(table, 3.0)], [1, 6]).double()
    systems = System.from_ase(labelled(5, table))
    assert float((ours(systems).forces - truth(systems).forces).detach().abs().max()) < 1e-3
    assert references["energies"]["6"] + 3 * references["energies"]["1"] == pytest.approx(0, abs=0.01)


def repulsion(coefficients, pair):
    """eV/Å at 0.8 times the sum of the covalent radii."""
    z = [{"H": 1, "C": 6}[name] for name in pair.split("-")]
    pos = torch.zeros(2, 3, dtype=torch.float64)
    pos[1, 2] = 0.8 * covalent_radii[z].sum()
    potential = without_network([PairPotential({pair: coefficients}, 9.0)], [1, 6]).double()
    return float(potential(System(z=torch.tensor(z), pos=pos)).forces.detach()[1, 2])


def test_every_pair_gets_a_wall(frames):
    """C–C is in no frame, and H and H only attract each other."""
    found = fit_pair_potential(frames({"C-H": CH, "H-H": [0, 0, 0, 0, 1.0, 0, 0, 0]}), [1, 6], 3.0)
    assert found["C-C"][:3] == [0, 0, 0] and found["C-C"][3] > 0 == sum(found["C-C"][4:])
    for pair in ("C-C", "H-H"):
        assert repulsion(found[pair], pair) == pytest.approx(10, rel=0.1), pair
    assert sum(found["H-H"][4:]) > 0.5  # the attraction is there as well
    found = fit_pair_potential(frames({"C-H": CH, "H-H": HH}), [1, 6], 3.0, "repulsion")
    assert not any(sum(values[4:]) for values in found.values()) and repulsion(found["H-C"], "H-C") >= 9


def test_attraction_of_heavy_atoms_only(frames):
    """Pairs with hydrogen only repel; all have a wall of 20 eV/Å."""
    found = fit_pair_potential(
        frames({"C-C": CH, "C-H": HH, "H-H": HH}, symbols="C3H"), [1, 6], 3.0, "heavy_attraction"
    )
    assert sum(found["C-C"][4:]) > 0.5 and not sum(found["H-C"][4:]) and not sum(found["H-H"][4:])
    assert all(repulsion(values, pair) >= 18 for pair, values in found.items())
    assert set(FITS) == set(FITTED)


def test_training(raw_config, tmp_path):
    """Fitted before training, kept as numbers in the model; the walls are there after it."""
    raw_config["priors"] = [{"name": "pair_potential", "cutoff": 3.0}, {"name": "atomref", "energies": "fit"}]
    config = parse_config(raw_config)
    assert config.priors[0]["parameters"] == "fit" and parse_config(config.to_dict()).priors == config.priors
    prior = make_setup(config).potential.priors[0]
    path = run_training(config)
    potential = load(path)
    assert torch.equal(potential.priors[0].table, prior.table.cpu()) and float(prior.table.abs().max()) > 0.1
    assert set(potential.config["priors"][0]["parameters"]) == {"H-H", "H-C", "H-O", "C-C", "C-O", "O-O"}
    atoms = Atoms("OCH", [[0, 0, 0], [0, 0, 1.2], [0, 1.0, 1.7]])
    report = scan_molecule(path, atoms, ["bond"])
    assert not [finding for _, finding in report.findings if finding.kind in ("wall", "force jump", "energy jump")]
    raw_config["priors"][0]["parameters"] = {"C-H": CH}
    assert parse_config(raw_config).priors[0]["parameters"] == {"C-H": CH}
    raw_config["priors"][0]["parameters"] = "repulsion"
    assert float(make_setup(parse_config(raw_config)).potential.priors[0].table.min()) == 0
    raw_config["priors"][0]["parameters"] = "heavy_attraction"
    table = make_setup(parse_config(raw_config)).potential.priors[0]
    assert parse_config(raw_config).priors[0]["parameters"] == "heavy_attraction" and float(table.table.max()) > 0
    raw_config["priors"][0]["parameters"] = "best"
    with pytest.raises(BadConfig, match="parameters"):
        parse_config(raw_config)


def test_a_fit_needs_forces(raw_config):
    raw_config["priors"] = [{"name": "pair_potential"}]
    raw_config["data"]["keys"] = {"energy": "energy", "forces": None}
    with pytest.raises(BadConfig, match="the fit needs forces"):
        make_setup(parse_config(raw_config))
