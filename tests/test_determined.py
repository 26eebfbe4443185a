"""Reference energies that data do not determine: which combinations are, and warnings of all others."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from torchmdnet2 import Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import UndeterminedEnergyWarning
from torchmdnet2.potential.determined import Determined, formula
from torchmdnet2.training.run.references import determined_by, fit_references, least_change

WATER, METHANE, METHANOL, ETHANOL = {1: 2, 8: 1}, {1: 4, 6: 1}, {1: 4, 6: 1, 8: 1}, {1: 6, 6: 2, 8: 1}
TRUE = {1: -13.6, 6: -1030.0, 8: -2043.0}


def frames(*compositions):
    energies = [sum(TRUE[z] * n for z, n in c.items()) for c in compositions]
    return {"elements": [1, 6, 8], "compositions": compositions, "energies": energies}


@pytest.mark.parametrize(
    ("compositions", "inside", "outside"),
    [
        ([WATER, {1: 12, 8: 6}], [WATER, {1: 20, 8: 10}], [{1: 2}, {8: 2}, METHANE]),
        ([WATER, METHANE], [WATER, METHANE, {1: 6, 6: 1, 8: 1}, {1: 0, 6: 1, 8: -2}], [METHANOL, {1: 2}, {6: 1}]),
        ([ETHANOL, METHANOL], [{1: 2, 6: 1}, {8: 1, 1: 2}], [{8: 1}, METHANE]),
    ],
)
def test_combinations_are_known_and_others_are_not(compositions, inside, outside):
    found = determined_by(frames(*compositions))
    for composition, expected in [*((c, True) for c in inside), *((c, False) for c in outside)]:
        counts = np.array([[composition.get(z, 0) for z in (1, 6, 8)]])
        assert found.covers(counts, [1, 6, 8])[0] == expected, formula(composition)
    # what the fit gives for combinations is right
    fitted = fit_references(frames(*compositions))
    for composition in inside:
        energy = sum(TRUE[z] * n for z, n in composition.items())
        assert sum(fitted[z] * n for z, n in composition.items()) == pytest.approx(energy, abs=1e-6)


def test_data_that_determine_all_leave_nothing_to_say():
    assert determined_by(frames(WATER, METHANE, METHANOL, ETHANOL)) is None
    assert determined_by(frames(WATER, METHANE), known={8: -2043.0}) is None
    assert fit_references(frames(WATER, METHANE, METHANOL)) == pytest.approx(TRUE)
    assert determined_by(frames(WATER), atom_filter=1).compositions == [{8: 1}]  # there is carbon without data
    assert determined_by(frames(WATER), atom_filter=6) is None


def test_what_is_not_determined_changes_as_little_as_possible():
    # one composition of another level of theory: hydrogen must not take a third of the energy
    change = least_change([ETHANOL], [3900.0], [1, 6, 8], known=TRUE)
    assert sum(change[z] * n for z, n in ETHANOL.items()) == pytest.approx(3900.0)
    assert 0 < change[1] < 2 < 100 < change[6] < change[8]
    # a new element takes what the known ones do not explain
    change = least_change([{1: 3, 6: 1, 9: 1}], [-2700.0], [1, 6, 9], known=[1, 6])
    assert change[9] == pytest.approx(-2700.0, abs=0.5)
    assert abs(change[6]) < 0.2


def test_forces_alone_determine_no_energy():
    found = Determined(Determined([]).stored())
    assert "the training frames have no energies" in found.sentence([1, 8])
    with pytest.warns(UndeterminedEnergyWarning, match=r"is H2O: .* of that composition\. Its total energy means"):
        found.warn(System(z=[8, 1, 1], pos=[[0.0, 0, 0], [0, 0, 1], [0, 1, 0]]))


def test_few_compositions_stand_for_many():
    table = np.array([[2 * n, n, 0] for n in range(1, 200)] + [[4, 2, 1], [0, 0, 3]])
    found = Determined.of(table, [1, 6, 8])
    assert found.compositions == [{8: 1}, {1: 2, 6: 1}]
    assert found.single([1, 6, 8]) == [8]
    assert Determined.of(np.zeros((3, 2)), [1, 8]).compositions == []


def test_models_keep_it_and_warn_once(tmp_path):
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 4, "max_z": 9},
        "priors": [{"name": "atomref", "energies": {"1": -13.6, "8": -2043.0}}],
        "elements": [1, 6, 8],
        "compositions": [{"1": 2, "8": 1}],
    }
    save(Potential.from_config(config), tmp_path / "water.tmn")
    model = load(tmp_path / "water.tmn")
    assert model.determined == Determined([WATER])
    pos = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [0, 0.96, 0]], dtype=torch.float64)
    water = System(z=torch.tensor([8, 1, 1]), pos=pos)
    hydroxyl = System(z=torch.tensor([8, 1]), pos=pos[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(System.concatenate([water, water]))
    with pytest.warns(UndeterminedEnergyWarning, match="structure 1 is HO: .* only those of H2O and of combinations"):
        model(System.concatenate([water, hydroxyl]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(hydroxyl)
