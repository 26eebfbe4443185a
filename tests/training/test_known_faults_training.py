"""What was found wrong in training, its labels and its closing words; each test fails without the mend."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import checkpoint, load
from torchmdnet2.data import open_dataset
from torchmdnet2.errors import BadConfig, BadData, UnknownElement
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.reporting.evaluation import evaluate
from torchmdnet2.training.run import start as check
from torchmdnet2.training.run.notes import data_notes
from torchmdnet2.training.run.run import run_members, run_training
from torchmdnet2.training.run.setup import make_setup, require_usable
from torchmdnet2.training.run.start import make_trainer, own_torch_state
from torchmdnet2.training.run.subsets import require_searchable
from torchmdnet2.training.steps.batches import Frames
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.trainer import Hooks, predict

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
    single, open_ones = setup.notes  # each frame has one C and one O
    assert single == "reference energies: single atoms of data.train for H; C, O by least squares"
    assert "do not determine the reference energies of C, O, only those of H, CH2O and of combinations" in open_ones


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
    (note,) = data_notes(setup, 1000)  # they disagree with the structures; as outliers they do not count
    assert "forces of 12 of 60 checked training frames" in note
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
    ("name", "key"),
    [
        ("ion_charge", "charge"), ("Charge state", "charge"), ("Q", "charge"), ("spin_state", "spin"),
        ("my_mult", "spin"),
    ],
)  # fmt: skip
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


def test_what_the_data_state_by_other_names_is_in_the_log(raw):
    frames = make_frames(32)
    for k, frame in enumerate(frames):
        frame.info.update(net_charge=2 * (k % 2), multiplicity=1)
    (said,) = [note for note in make_setup(parse_config(with_data(raw, frames))).notes if "states" in note]
    assert said.endswith("own.xyz states: charge by 'net_charge', spin by 'multiplicity'")


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
    assert f"RMSE {rmse}" in errors and f"RMSE of their mean {rmse}" in spread and "stress" in errors


def test_a_finished_run_whose_model_is_damaged_is_not_done(raw):
    config = parse_config(with_data(raw, make_frames(20)) | {"training": raw["training"] | {"max_epochs": 1}})
    path = run_training(config)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"x" + whole[-8:])
    with pytest.raises(BadConfig, match=r"best\.tmn, the best model .* is damaged .*checksum.*start a new training"):
        run_training(config, resume="auto")
    path.write_bytes(whole)
    assert run_training(config, resume="auto") == path


def trained(raw, packing, **loss):
    """A trainer after its epochs, in float64, with the loss of each epoch."""
    raw["training"] |= {"precision": "float64", "loss": loss, "energy_scale": 1.0}
    config = parse_config(raw)
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        if packing:
            assert pack_trainer(trainer) is None
        trainer.run(Hooks())
    return trainer


def kinds(raw, wrong=0.0):
    """Frames of three kinds, of which those of "bad" have wrong labels."""
    frames = make_frames(24)
    for k, frame in enumerate(frames):
        if k % 3:
            frame.info["config_type"] = ["", "bad", "good"][k % 3]
        if k % 3 == 1:
            frame.calc.results["forces"] += wrong
            frame.calc.results["energy"] += wrong
    return with_data(raw, frames, energies={"H": -13.5, "C": -1030.0, "O": -2040.0})


WEIGHTS = {"good": 2.5, "bad": 0.0}


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_weights_of_kinds_are_the_same_in_both_loops(raw, kind):
    plain, packed = (trained(kinds(raw, 3.0), p, kind=kind, config_weights=WEIGHTS) for p in (False, True))
    for a, b in zip(plain.history, packed.history, strict=True):
        for name in ("train_loss", "validation_loss", "train_forces_rmse"):
            assert b[name] == pytest.approx(a[name], rel=1e-9), name
    other = trained(kinds(raw, 3.0), False, kind=kind)
    assert other.history[0]["validation_loss"] != pytest.approx(plain.history[0]["validation_loss"], rel=0.05)


def test_frames_of_weight_zero_teach_nothing(raw):
    clean, wrong = (trained(kinds(raw, w), False, config_weights=WEIGHTS) for w in (0.0, 5.0))
    for a, b in zip(clean.average.parameters(), wrong.average.parameters(), strict=True):
        assert torch.equal(a, b)
    assert wrong.history[0]["train_forces_rmse"] > clean.history[0]["train_forces_rmse"]  # errors are those of all


def test_loss_is_a_mean_of_weighted_squares(raw):
    """By hand, for a batch of every frame, with weights of kinds and of frames."""
    raw["data"]["keys"] = {"weight": "w"}
    raw["training"]["loss"] = {"config_weights": {"good": 2.5}, "energy": 0.0, "forces": 1.0}
    raw = kinds(raw)
    frames = read(raw["data"]["train"], ":")
    frames[4].info["w"], frames[7].info["w"] = 0.25, 3
    write(raw["data"]["train"], frames, format="extxyz")
    raw["data"]["split"] = {"validation": 0, "test": 0}
    setup = make_setup(parse_config(raw))
    assert setup.notes == ["weights in the loss: 2.5 for good (8 frames), their own for 2 frames; 1 for all others"]
    trainer = make_trainer(setup, None)
    batch = setup.frames["train"].batch(range(24))
    loss = float(trainer.backward(batch))
    forces = predict(setup.potential, batch, setup.properties).forces.detach().double()
    squares = (forces - batch.sample.labels["forces"]).square().sum(1).numpy()
    weight = np.array([2.5 if k % 3 == 2 else 1.0 for k in range(24)])
    weight[4], weight[7] = 0.25, 3.0
    assert loss == pytest.approx((weight[batch.sample.system.batch] * squares).sum() / (3 * len(squares)), rel=1e-6)


def test_a_training_with_weights_resumes_to_the_same_bits(raw):
    raw["training"] |= {"loss": {"config_weights": WEIGHTS}, "lr_schedule": "constant"}
    raw = kinds(raw, 1.0)
    folder = raw["output"]["folder"]
    whole = run_training(parse_config(raw)).read_bytes()
    raw["output"]["folder"], epochs = folder + "2", raw["training"]["max_epochs"]
    for raw["training"]["max_epochs"] in (1, epochs):
        path = run_training(parse_config(raw), resume="auto")
    ours, theirs = load(path), load(f"{folder}/best.tmn")
    assert whole and all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    raw["training"]["loss"] = {"config_weights": {"good": 1.0}}
    with pytest.raises(BadConfig, match=r"training\.loss\.config_weights"):
        run_training(parse_config(raw), resume="auto")


def test_wrong_weights_are_refused(raw, tmp_path):
    raw = kinds(raw)
    raw["training"]["loss"] = {"config_weights": {"goood": 1.0}}
    for raw["data"]["cache"] in ("off", str(tmp_path)):  # the second is written, then read
        with pytest.raises(BadConfig, match=r"config_type=goood, did you mean 'good'\? Known: bad, good$"):
            make_setup(parse_config(raw))
    raw["data"]["keys"] = {"config_type": "kind"}
    with pytest.raises(BadData, match="no frame has 'kind', which is the key of config_type"):
        make_setup(parse_config(raw))
    raw["training"]["loss"], raw["data"]["keys"] = {}, {"weight": "w"}
    frames = read(raw["data"]["train"], ":")
    frames[5].info["w"] = -1.0
    write(raw["data"]["train"], frames, format="extxyz")
    with pytest.raises(BadData, match=r"own\.xyz, frame 5: its weight \(w\) must not be negative"):
        make_setup(parse_config(raw))


def test_a_cutoff_without_bounds_is_refused_at_once(raw):
    """`--set model.cutoff=1e9 --check` was silent for minutes."""
    raw = with_data(raw, crystals(8))
    raw["model"] |= {"max_z": 30, "cutoff": 1e9}
    with pytest.raises(
        BadConfig, match=r"model\.cutoff: within 1e\+09 Å, an atom of .*frame \d+ has about .*neighbors"
    ):
        make_setup(parse_config(raw))
    for pbc in ([True, True, False], [False, False, True]):
        write(raw["data"]["train"], [Atoms("H4", np.eye(4)[:, :3], cell=[3, 3, 9], pbc=pbc)] * 8)
        raw["data"]["keys"] = {"energy": None, "forces": None}
        with pytest.raises(BadConfig, match=r"model\.cutoff"):
            require_searchable(Frames(open_dataset(raw["data"]["train"]), range(8), 1e5))
    write(raw["data"]["train"], make_frames(8))
    require_searchable(Frames(open_dataset(raw["data"]["train"]), range(8), 1e9))  # molecules end somewhere


def test_compilation_is_not_timed(monkeypatch):
    """`--check` in a fresh environment said 57 s per epoch, where it was 3: kernels compile in more than one pass."""
    times = iter([40.0, 20.0, 0.4, 0.41, 0.4])
    trainer = SimpleNamespace(packed=True, device=torch.device("cpu"), train=None, config=None, batches=list)
    monkeypatch.setattr(check, "training_batches", lambda *a: [[0], [1]])
    monkeypatch.setattr(check, "_run", lambda *a: next(times))
    monkeypatch.setattr(check, "_activation_bytes", lambda *a: 1.0)
    assert check._measure(trainer) == (0.1, 1.0)


def test_a_frame_that_the_model_does_not_know_is_named(raw):
    """It was "atom 29" and "system 3" of a batch; and training on packed frames took any spin without a word."""
    frames = make_frames(20)
    frames[7].info["spin"] = 3
    raw = with_data(raw, frames)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    with pytest.raises(ValueError, match=r"own\.xyz, frame 7 has spin multiplicity 3"):
        require_usable(make_setup(parse_config(raw)))
    del frames[7].info["spin"]
    setup = make_setup(parse_config(with_data(raw, frames)))
    frames[5].numbers[2] = 7
    write(raw["data"]["train"], frames, format="extxyz")
    other = Frames(open_dataset(raw["data"]["train"]), range(20), setup.potential.cutoff)
    with pytest.raises(UnknownElement, match=r"own\.xyz, frame 5: atom 2 is N"):
        evaluate(setup.potential, other)


@pytest.mark.parametrize("charges", [{"H": 0.1, "C": 0.1, "O": -0.2}, "predicted"])
@pytest.mark.parametrize("check", [True, False])
def test_a_periodic_frame_is_named_where_a_sum_has_no_end(raw, charges, check):
    """It was the place in a batch, as "system 6"."""
    frames = make_frames(20)
    frames[7].set_cell([9, 9, 9])
    frames[7].pbc = True
    raw = with_data(raw, frames)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    raw["priors"] = [{"name": "coulomb", "charges": charges}, {"name": "atomref", "energies": "fit"}]
    raw["properties"] = [{"name": "charges"}] if charges == "predicted" else []
    raw["training"]["max_epochs"] = 1
    with pytest.raises(ValueError, match=r"own\.xyz, frame 7 is periodic, and a sum over all pairs, .* infinitely"):
        run_training(parse_config(raw), check=check)


@pytest.mark.parametrize(("theirs", "said"), [("PBE", False), ("r2SCAN", True), ("not stated", False)])
def test_references_of_another_level_of_theory_are_noted(raw, tmp_path, theirs, said):
    raw = with_data(raw, make_frames(20))
    base = make_setup(parse_config(raw)).potential
    checkpoint.save(base, tmp_path / "base.tmn", {"data": {"level_of_theory": theirs}})
    del raw["model"]
    raw |= {"init": {"file": str(tmp_path / "base.tmn")}, "priors": [{"name": "atomref", "energies": "keep"}]}
    raw["data"]["level_of_theory"] = "PBE"
    found = [note for note in make_setup(parse_config(raw)).notes if "are kept for labels of PBE" in note]
    assert found == (["note: reference energies of r2SCAN are kept for labels of PBE; is that meant?"] if said else [])
