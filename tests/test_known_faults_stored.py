"""What a file stores and a later step must not ignore: levels of theory, units, cutoffs, elements. One test each."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from variants import ELEMENTS, variant

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import from_bytes, load, save, to_bytes
from torchmdnet2.data import open_dataset
from torchmdnet2.data.cache import read_index, write_index
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadConfig, BadData
from torchmdnet2.training.config.build_potential import open_base
from torchmdnet2.training.run.fine_tuning import fine_tuned
from torchmdnet2.units import factor

PRIORS = [
    {"name": "zbl", "cutoff": 3.7},
    {"name": "d2", "cutoff": 7.1, "switch_width": 0.9},
    {"name": "d3", "elements": ELEMENTS, "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 8.3},
    {"name": "coulomb", "charges": {"1": 0.1, "6": -0.1, "8": -0.2}, "method": "reaction_field", "cutoff": 6.2},
]  # fmt: skip


@pytest.fixture
def frames(tmp_path):
    water = molecule("H2O")
    water.calc = SinglePointCalculator(water, energy=-5.0, forces=np.ones((3, 3)))
    path = tmp_path / "water.xyz"
    write(path, [water] * 3)
    return path


# --- cutoffs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: prior["name"])
def test_cutoffs_of_priors_come_back(prior):
    potential = from_bytes(to_bytes(variant("graph_network", priors=[prior])))
    assert potential.priors[0].cutoff == prior["cutoff"] and potential.config["priors"] == [prior]


@pytest.mark.parametrize("part", ["representation", "prior"])
def test_a_cutoff_that_was_changed_in_place_is_not_lost(part):
    """The file stores the configuration: it had the old cutoff, without a word."""
    potential = variant("graph_network", priors=PRIORS[:1])
    module = potential.representation if part == "representation" else potential.priors[0]
    module.cutoff = 3.3
    with pytest.raises(ValueError, match=r"cutoff: the potential has 3\.3, and its config, .*: change both"):
        to_bytes(potential)


def test_neighbor_lists_of_a_cache_are_of_the_cutoff_asked_for(frames, tmp_path):
    data = open_dataset(frames, cache=str(tmp_path / "cache"))
    assert [int(data.edges(cutoff).count[0]) for cutoff in (1.2, 3.0)] == [4, 6]
    folder = data.folder / "neighbors-3.0"
    write_index(folder, {**read_index(folder), "cutoff": 1.2})
    with pytest.raises(BadData, match=r"neighbors-3\.0: these neighbor lists have the cutoff 1\.2 Å"):
        data.edges(3.0)


# --- units ------------------------------------------------------------------------------------------------------------


def test_a_cache_of_other_units_or_keys_is_another_one(frames, tmp_path):
    for _ in range(2):  # written, then read
        for unit in ("eV", "kcal/mol"):
            data = open_dataset(frames, units={"energy": unit}, cache=str(tmp_path / "cache"))
            labels = data[0].labels
            assert float(labels["energy"]) == pytest.approx(-5 * factor("energy", unit))
            assert labels["forces"].numpy() == pytest.approx(factor("energy", unit))
        for length in ("angstrom", "bohr"):
            data = open_dataset(frames, units={"length": length}, cache=str(tmp_path / "cache"))
            assert data[0].system.pos.numpy() == pytest.approx(molecule("H2O").positions * factor("length", length))
        only = open_dataset(frames, keys={"energy": "energy"}, cache=str(tmp_path / "cache"))
        assert set(only[0].labels) == {"energy"}


def test_a_unit_for_a_model_file_is_refused(tmp_path):
    """It was ignored: model files are in eV."""
    save(variant("graph_network"), tmp_path / "base.tmn")
    with pytest.raises(BadConfig, match=r"init\.energy_unit: .*base\.tmn is a model file, which is in eV"):
        open_base(str(tmp_path / "base.tmn"), "kcal/mol")
    assert open_base(str(tmp_path / "base.tmn")).elements == ELEMENTS


# --- level of theory --------------------------------------------------------------------------------------------------


def of_level(level: str | None) -> Potential:
    potential = variant("graph_network")
    potential.metadata = {} if level is None else {"data": {"level_of_theory": level}}
    return potential


def test_an_ensemble_of_several_levels_of_theory_says_so(tmp_path):
    for name, level in {"a": "PBE", "b": "CCSD(T)"}.items():
        save(of_level(level), tmp_path / f"{name}.tmn")
    with pytest.warns(UserWarning, match=r"trained on labels of CCSD\(T\) and PBE"):
        Ensemble.load([tmp_path / "a.tmn", tmp_path / "b.tmn"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in ("PBE", None, "not stated"):
            Ensemble([load(tmp_path / "a.tmn"), of_level(other)])


# --- elements ---------------------------------------------------------------------------------------------------------


def test_max_z_that_does_not_reach_the_elements_of_the_file_is_refused():
    base = variant("graph_network", elements=[1, 8])
    parts = {"model": {**base.config["model"], "max_z": 8}, "priors": []}
    with pytest.raises((BadConfig, ValueError), match="max_z"):
        fine_tuned(base, parts, [1])
    wider = fine_tuned(base, {**parts, "model": {**base.config["model"], "max_z": 60}}, [1, 53])[0]
    assert wider.elements == [1, 8, 53] and json.loads(json.dumps(wider.config))["model"]["max_z"] == 60
