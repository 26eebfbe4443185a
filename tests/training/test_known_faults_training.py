"""What was found wrong in training, its labels and its closing words; each test fails without the mend."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2.errors import BadConfig
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.data_notes import data_notes
from torchmdnet2.training.run.members import run_members
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup

from .conftest import REFERENCES, make_frames

TRUE = {1: -12.5, 6: -1028.0, 8: -2038.5}
"""What single atoms have here; the frames' own references are others, as of atoms in molecules."""


def atom(z, energy=None, **info):
    """A single atom as a frame."""
    frame = Atoms([z], info=info)
    labels = {} if energy is None else {"energy": energy}
    frame.calc = SinglePointCalculator(frame, forces=np.zeros((1, 3)), **labels)
    return frame


def with_data(raw, frames, **priors):
    """The configuration on these frames, all of them for training but the last four."""
    write(raw["data"]["train"], frames, format="extxyz")
    raw["data"]["split"] = {"validation": 4, "test": 0}
    if priors:
        raw["priors"] = [{"name": "atomref", **priors}]
    return raw


@pytest.fixture
def raw(raw_config, tmp_path):
    raw_config["data"]["train"] = str(tmp_path / "own.xyz")
    return raw_config


def references(raw):
    return make_setup(parse_config(raw)).potential.config["priors"][0]["energies"]


def test_single_atoms_are_the_references_by_default(raw):
    """They were fitted to, which made 896 meV of a 62 meV error."""
    setup = make_setup(parse_config(with_data(raw, [*make_frames(32), *(atom(z, e) for z, e in TRUE.items())])))
    assert setup.potential.config["priors"][0]["energies"] == {str(z): e for z, e in TRUE.items()}
    assert "reference energies: single atoms of data.train for H, C, O" in setup.notes
    assert data_notes(setup, 1000) == []


def test_elements_without_a_single_atom_are_fitted_to_the_rest(raw):
    frames = [f for f in make_frames(40) if len(f) > 3]
    found = references(with_data(raw, [*frames, atom(1, REFERENCES[1])]))
    assert found["1"] == REFERENCES[1]
    assert found["6"] + found["8"] == pytest.approx(REFERENCES[6] + REFERENCES[8], abs=20)
    setup = make_setup(parse_config(raw))
    assert setup.notes == ["reference energies: single atoms of data.train for H; C, O by least squares"]


def test_fitted_references_beside_single_atoms_are_noted(raw):
    frames = [*make_frames(32), *(atom(z, e) for z, e in TRUE.items())]
    raw = with_data(raw, frames, energies="fit")
    raw["data"]["split"] = {"validation": 0, "test": 0}
    setup = make_setup(parse_config(raw))
    assert setup.potential.config["priors"][0]["energies"] != {str(z): e for z, e in TRUE.items()}
    (note,) = (note for note in data_notes(setup, 1000) if "single atoms" in note)
    assert "energies: isolated" in note and "own.xyz, frame 32" in note and "H " in note and " eV" in note


def test_two_energies_of_one_atom_are_noted_and_fitted(raw):
    setup = make_setup(parse_config(with_data(raw, [*make_frames(32), atom(1, -12.5), atom(1, -12.0), atom(6, -5.0)])))
    assert any("H has -12.5 eV in" in note and "that of H is fitted" in note for note in setup.notes)
    found = setup.potential.config["priors"][0]["energies"]
    assert found["6"] == -5.0 and found["1"] not in (-12.5, -12.0)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (atom(8, -2038.5, charge=-1), "is a single O, but has the charge -1"),
        (atom(8), "is a single O, but has no energy"),
        (Atoms("O", cell=[3, 9, 9], pbc=True, info={"energy": -20.0}), "is a single O, but its images are 3.0 Å away"),
    ],
)
def test_why_a_single_atom_is_no_reference_is_said(raw, frame, said):
    frames = [*make_frames(32), atom(1, -12.5), atom(6, -1028.0), frame]
    with pytest.raises(BadConfig, match=rf"no entry for O; .*own\.xyz, frame 34 {said}"):
        references(with_data(raw, frames, energies="isolated"))


def test_a_single_atom_in_a_large_box_is_a_reference(raw):
    frames = [*make_frames(32), *(atom(z, e) for z, e in TRUE.items())]
    for frame in frames[32:]:
        frame.cell, frame.pbc = [12, 12, 12], True
    assert references(with_data(raw, frames, energies="isolated")) == {str(z): e for z, e in TRUE.items()}


def test_labels_that_stand_out_are_named_and_do_not_set_the_scale(raw):
    """One frame with forces a hundred times too large had moved energy_scale from 0.87 to 14.5 eV/Å."""
    clean = make_frames(60)
    raw = with_data(raw, clean)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    right = make_setup(parse_config(raw))
    assert data_notes(right, 1000) == []
    assert right.facts["forces_rms"] == right.statistics["train"].force_rms  # all frames, to the last bit
    clean[17].calc.results["forces"] *= 100
    clean[23].calc.results["energy"] += 50.0
    write(raw["data"]["train"], clean, format="extxyz")
    setup = make_setup(parse_config(raw))
    forces, energies = data_notes(setup, 1000)
    assert "own.xyz, frame 17 (" in forces and forces.count("frame 17") == 1 and "frame 23" not in forces
    assert "own.xyz, frame 23" in energies and "frame 17" not in energies
    assert setup.potential.energy_scale == pytest.approx(right.potential.energy_scale, rel=0.05)
    assert setup.statistics["train"].force_rms > 5 * right.potential.energy_scale


def test_many_large_forces_are_a_part_of_the_data(raw):
    frames = make_frames(60)
    for frame in frames[::5]:
        frame.calc.results["forces"] *= 30
    raw = with_data(raw, frames)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    setup = make_setup(parse_config(raw))
    assert data_notes(setup, 1000) == []
    assert setup.facts["forces_rms"] == setup.statistics["train"].force_rms


def test_wrong_validation_frames_are_noticed(raw, tmp_path):
    other = make_frames(12, seed=1)
    other[3].calc.results["forces"] *= 100
    other[5].positions[1] = other[5].positions[0]
    write(tmp_path / "valid.xyz", other, format="extxyz")
    raw = with_data(raw, make_frames(32))
    raw["data"] |= {"validation": str(tmp_path / "valid.xyz"), "split": {"test": 0}}
    forces, close = data_notes(make_setup(parse_config(raw)), 1000)
    assert forces.startswith("validation frames have far larger forces") and "valid.xyz, frame 3 (" in forces
    assert (
        close.startswith("validation frames have atoms 0.000 Å from each other, in ") and "valid.xyz, frame 5" in close
    )


@pytest.mark.parametrize(
    ("name", "key"), [("total_charge", "charge"), ("Charge", "charge"), ("multiplicity", "spin"), ("mult", "spin")]
)
def test_charges_and_spins_that_are_not_read_are_noted(raw, name, key):
    frames = make_frames(32)
    for k, frame in enumerate(frames):
        frame.info[name] = k % 2
        frame.arrays["mulliken_charges"] = np.zeros(len(frame))  # of atoms: another thing
    raw = with_data(raw, frames)
    (note,) = data_notes(make_setup(parse_config(raw)), 1000)
    assert f"'{name}' in " in note and note.endswith(f"set data.keys.{key}: {name}") and "own.xyz is not read" in note
    raw["data"]["keys"] = {key: name}
    assert not any("not read" in note for note in data_notes(make_setup(parse_config(raw)), 1000))


def crystals(count, seed=0):
    """Crystals with energies, forces and stress of EMT, as frames."""
    rng = np.random.default_rng(seed)
    frames = []
    for k in range(count):
        frame = bulk("Cu", cubic=True)
        frame.numbers[0] = 29 if k % 2 else 13
        frame.set_cell(frame.cell.array @ (np.eye(3) + rng.normal(0, 0.02, (3, 3))), scale_atoms=True)
        frame.rattle(0.1, rng=rng)
        frame.calc = EMT()
        labels = {"energy": frame.get_potential_energy(), "forces": frame.get_forces(), "stress": frame.get_stress()}
        frame.calc = SinglePointCalculator(frame, **labels)
        frames.append(frame)
    return frames


def test_errors_of_an_ensemble_have_one_definition(raw, tmp_path, capsys):
    """The closing lines had 104.8 and 181.5 meV/Å for the same errors, and no stress."""
    raw = with_data(raw, crystals(12))
    raw["data"]["keys"] = {"energy": "energy", "forces": "forces", "stress": "stress"}
    raw["model"]["max_z"], raw["training"]["max_epochs"] = 30, 1
    run_members(parse_config(raw), 2)
    found = json.loads((tmp_path / "run" / "ensemble_metrics.json").read_text())
    assert found["spread"].keys() == {"energy_per_atom", "forces", "stress"}
    for name, value in found["spread"].items():
        assert value["rmse"] == pytest.approx(found["errors"][name]["rmse"], rel=1e-9), name
        assert value["unit"] == found["errors"][name]["unit"] and value["rms_spread"] > 0
    said = capsys.readouterr().out
    rmse = f"{1e3 * found['errors']['forces']['rmse']:.3f} meV/Å"
    (errors, spread) = (line for line in said.splitlines() if "members" in line and rmse in line)
    assert f"RMSE {rmse}" in errors and f"RMSE {rmse}" in spread and "stress" in errors


def test_a_finished_run_whose_model_is_damaged_is_not_done(raw):
    config = parse_config(with_data(raw, make_frames(20)) | {"training": raw["training"] | {"max_epochs": 1}})
    path = run_training(config)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"x" + whole[-8:])
    with pytest.raises(BadConfig, match=r"best\.tmn, the best model .* is damaged .*checksum.*train anew"):
        run_training(config, resume="auto")
    path.write_bytes(whole)
    assert run_training(config, resume="auto") == path
