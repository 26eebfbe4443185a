"""The novelty of atoms: its fit, what it finds, model files, and the command calibrate."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from ase.build import molecule
from ase.io import write
from tiny import tiny_potential

from torchmdnet2 import Potential, System, load
from torchmdnet2.checkpoint import from_bytes, read_header, save, to_bytes
from torchmdnet2.cli import main
from torchmdnet2.errors import BadCheckpoint, BadData
from torchmdnet2.potential.novelty import NoveltyWarning, Watch, calibrate, largest
from torchmdnet2.registry import REPRESENTATIONS


def frames(name: str, count: int, seed: int = 0, size: float = 0.05) -> list:
    made = []
    for k in range(count):
        atoms = molecule(name)
        atoms.rattle(size, seed=1000 * seed + k)
        made.append(atoms)
    return made


def batch(atoms: list) -> list[System]:
    """Two batches."""
    half = len(atoms) // 2
    return [System.from_ase(atoms[:half]), System.from_ase(atoms[half:])]


def calibrated(potential: Potential, name: str = "CH3CH2OH", rate: float = 0.05) -> Potential:
    train, validation = batch(frames(name, 60)), batch(frames(name, 40, seed=1))
    potential.calibration = calibrate(potential.representation, train, validation, rate)
    return potential


@pytest.fixture(scope="module")
def potential() -> Potential:
    return calibrated(tiny_potential())


def scores(potential: Potential, atoms: list) -> torch.Tensor:
    system = System.from_ase(atoms)
    return largest(potential.novelty(system), system)


def test_frames_of_the_same_kind_are_known_and_others_are_not(potential):
    assert (scores(potential, frames("CH3CH2OH", 100, seed=2)) > 1).float().mean() < 0.15
    for name in ("CH3COOH", "CH3OCH3", "CO2", "C2H4", "SiH4"):
        assert (scores(potential, frames(name, 10, seed=3)) > 1).all(), name


def test_it_rises_with_the_length_of_a_bond(potential):
    found = []
    for factor in (1.0, 1.2, 1.4, 1.6):
        atoms = molecule("CH3CH2OH")
        atoms.set_distance(2, 3, factor * atoms.get_distance(2, 3), fix=0)  # O–H
        found.append(potential.novelty(System.from_ase(atoms)))
    tops = [float(score.max()) for score in found]
    assert tops == sorted(tops) and tops[0] < 1 < tops[1] and tops[3] > 2 * tops[1]
    assert int(found[3].argmax()) in (2, 3), "the atoms of the bond"
    assert found[3].dtype == torch.float64


def test_the_rate_is_that_of_the_validation_frames():
    potential = tiny_potential()
    validation = frames("CH3CH2OH", 40, seed=1)
    for rate, above in ((0.25, 9), (0.05, 1), (0.001, 0)):
        fitted = calibrated(potential, rate=rate)
        assert int((scores(fitted, validation) > 1).sum()) == above, rate
        assert fitted.calibration.facts["rate"] == pytest.approx(max(rate, 1 / 41), abs=1 / 41)


def test_the_fit_is_that_of_all_frames_at_once():
    """Batches do not matter, and neither do shifts of the features that are large against their spread."""
    potential = tiny_potential()
    train, validation = frames("CH3CH2OH", 30), batch(frames("CH3CH2OH", 40, seed=1))
    one, many = (
        calibrate(potential.representation, parts, validation)
        for parts in ([System.from_ase(train)], [System.from_ase(atoms) for atoms in train])
    )
    test = System.from_ase(molecule("CH3OCH3"))
    torch.testing.assert_close(one(potential.representation, test), many(potential.representation, test))


@pytest.mark.parametrize("name", [name for name in REPRESENTATIONS if not name.startswith("test")])
def test_every_model_has_it(name):
    small = {"name": name, "hidden_channels": 16, "num_layers": 1, "cutoff": 4.0, "max_z": 20}
    torch.manual_seed(0)
    try:
        potential = Potential.from_config({"model": small, "elements": [1, 6, 8]}).double().eval()
    except TypeError:  # heads of several kinds belong to some models
        pytest.skip(f"{name} takes other arguments")
    calibrated(potential)
    known, unknown = scores(potential, frames("CH3CH2OH", 20, seed=2)), scores(potential, frames("CO2", 5))
    assert known.median() < 1 < unknown.min()


def test_model_files_keep_it(potential, tmp_path):
    save(potential, tmp_path / "a.tmn")
    system = System.from_ase(frames("CH3OCH3", 1))
    again = load(tmp_path / "a.tmn")
    torch.testing.assert_close(again.novelty(system), potential.novelty(system), rtol=1e-4, atol=1e-6)
    assert torch.equal(again(system).forces, potential(system).forces)
    low = load(tmp_path / "a.tmn", dtype="float32").novelty(system)  # the checksum is of the same weights
    torch.testing.assert_close(low, potential.novelty(system), rtol=0.02, atol=0.01)
    save(again, tmp_path / "b.tmn")
    assert (tmp_path / "a.tmn").read_bytes() == (tmp_path / "b.tmn").read_bytes()
    assert read_header(tmp_path / "a.tmn")["novelty"]["train_frames"] == 60


def test_it_belongs_to_its_weights(potential):
    changed = copy.deepcopy(potential)
    with torch.no_grad():
        next(changed.representation.parameters()).mul_(1.01)
    with pytest.raises(ValueError, match="other weights"):
        changed.novelty(System.from_ase(molecule("CH4")))
    with pytest.warns(UserWarning, match="saved without its calibration"):
        blob = to_bytes(changed)
    assert from_bytes(blob).calibration is None
    swapped = copy.deepcopy(potential)  # a file that somebody put together
    swapped.calibration.facts["weights"] = "0" * 64
    swapped.calibration.fits = lambda representation: True
    with pytest.raises(BadCheckpoint, match="belongs to other weights"):
        from_bytes(to_bytes(swapped))


def test_fine_tuning_starts_without_it(potential):
    from torchmdnet2.training.run.fine_tuning import fine_tuned

    parts = {"model": potential.config["model"], "head": {"name": "scalar"}, "properties": [], "priors": []}
    tuned, _ = fine_tuned(potential, parts, [1, 6, 8])
    assert tuned.calibration is None and potential.calibration.fits(tuned.representation), "the same weights as yet"


def test_damaged_calibrations_are_refused(potential):
    for change in ({"limit": potential.calibration.limit[:1]}, {"elements": [1]}, {"facts": {}}):
        broken = copy.deepcopy(potential)
        vars(broken.calibration).update(change)
        broken.calibration.fits = lambda representation: True
        with pytest.raises(BadCheckpoint):
            from_bytes(to_bytes(broken))


def test_files_without_it_are_as_before():
    plain = to_bytes(tiny_potential())
    assert b"novelty" not in plain and from_bytes(plain).calibration is None
    with pytest.raises(ValueError, match="torchmdnet2 calibrate"):
        tiny_potential().novelty(System.from_ase(molecule("CH4")))


def test_what_cannot_be_fitted():
    fit = tiny_potential().representation
    train, validation = batch(frames("CH4", 10)), batch(frames("CH4", 20))
    with pytest.raises(BadData, match="at least 20"):
        calibrate(fit, train, train)
    with pytest.raises(BadData, match="no training frames"):
        calibrate(fit, [], validation)
    with pytest.raises(BadData, match="15 atoms in 3 training frames are too few to calibrate with: give at least 32"):
        calibrate(fit, batch(frames("CH4", 3)), validation)
    with pytest.raises(BadData, match="Z = 8"):
        calibrate(fit, train, batch(frames("H2O", 20)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(fit, train, validation, rate=1.0)


def test_elements_that_were_not_among_the_training_atoms(potential):
    found = potential.novelty(System.from_ase(molecule("SiH4")))
    assert found[0] == torch.inf and found[1:].isfinite().all()


# --- warnings --------------------------------------------------------------------------------------------------------


def test_an_element_is_told_once_and_not_for_one_frame_in_fifty():
    watch, system = Watch(), System.from_ase(molecule("CO2"))
    calm, moved, broken = (torch.tensor(s) for s in ([0.4, 0.5, 0.5], [0.4, 1.6, 0.5], [0.4, 0.5, 9.0]))
    for score in (calm, calm, moved, calm, calm):
        watch(score, system)
    assert watch.outside == 1 and not watch.reported
    with pytest.warns(NoveltyWarning, match=r"atom 2 \(O\) at 1 ps is unlike .* 9.00") as told:
        watch(broken, system, " at 1 ps")
        watch(broken, system)
    assert len(told) == 1 and watch.reported == {8}
    assert watch.summary() == "largest novelty 9.00, above 1 in 3 of 7 checked frames"


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tiny_potential(dtype=torch.float32), "m.tmn")
    write("train.xyz", frames("CH3CH2OH", 60))
    write("validation.xyz", frames("CH3CH2OH", 40, seed=1))
    write("other.xyz", frames("CH3OCH3", 10))
    return tmp_path


FIT = ["calibrate", "m.tmn", "c.tmn", "--train", "train.xyz", "--validation", "validation.xyz"]


def test_command(folder, capsys):
    before = (folder / "m.tmn").read_bytes()
    assert main([*FIT, "--test", "validation.xyz", "other.xyz", "--rate", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "fitted to 60 frames" in out and "wrote c.tmn" in out
    assert "false alarms" in out and "100.0 %" in out
    assert (folder / "m.tmn").read_bytes() == before
    assert load("c.tmn").calibration is not None and load("c.tmn").dtype == torch.float32
    assert main(["calibrate", "c.tmn", "--test", "validation.xyz", "other.xyz"]) == 0
    assert "7.5 %" in capsys.readouterr().out  # 3 of the 40 that set the limit
    first = (folder / "c.tmn").read_bytes()
    assert main([*FIT, "--frames", "30"]) == 0 and (folder / "c.tmn.old").read_bytes() == first
    facts = read_header("c.tmn")["novelty"]
    assert (facts["train_frames"], facts["validation_frames"]) == (30, 30)


def test_validation_frames_that_repeat_training_frames_are_left_out(folder, capsys):
    """Also those of another file, and of a part of a file."""
    write("copy.xyz", [*frames("CH3CH2OH", 40, seed=1), *frames("CH3CH2OH", 60)])
    assert main([*FIT[:-1], "copy.xyz"]) == 0
    assert "note: 60 of 100 validation frames repeat training frames and are left out" in capsys.readouterr().err
    assert read_header("c.tmn")["novelty"]["validation_frames"] == 40
    write("copy.xyz", frames("CH3CH2OH", 60))
    assert main([*FIT[:-1], "copy.xyz"]) == 1
    assert "0 validation frames are too few to calibrate with: give at least 20" in capsys.readouterr().err


def test_command_with_the_frames_of_a_split(folder):
    from torchmdnet2.data import open_dataset, splits_entry

    data, files = open_dataset("train.xyz"), ["train.xyz"]
    parts = {"train": range(30), "validation": range(30, 55), "test": range(55, 60)}
    splits = {name: splits_entry(data, list(part), files) for name, part in parts.items()}
    (folder / "splits.json").write_text(json.dumps(splits))
    assert main(["calibrate", "m.tmn", "c.tmn", "--train", "train.xyz", "--split", "splits.json"]) == 0
    facts = read_header("c.tmn")["novelty"]
    assert (facts["train_frames"], facts["validation_frames"]) == (30, 25)


@pytest.mark.parametrize(
    "words, told",
    [
        (["m.tmn", "m.tmn", "--train", "train.xyz", "--validation", "validation.xyz"], "would be written too"),
        (["m.tmn", "train.xyz", "--train", "train.xyz", "--validation", "validation.xyz"], "must end in .tmn"),
        (["m.tmn", "c.tmn", "--train", "train.xyz"], "--validation or --split"),
        (["m.tmn", "--train", "train.xyz", "--validation", "validation.xyz"], "give the file to write"),
        (["m.tmn"], "nothing to do"),
        (
            ["m.tmn", "c.tmn", "--train", "train.xyz", "--validation", "validation.xyz", "--split", "splits.json"],
            "--split chooses the validation frames from --train: leave --validation out",
        ),
        (
            ["m.tmn", "c.tmn", "--train", "train.xyz", "--split", "splits.json"],
            "splits.json: the file has no validation frames of train.xyz",
        ),
        ([*FIT[1:], "--frames", "0"], "--frames must be at least 1, got 0"),
        (["m.tmn", "--test", "train.xyz", "other.xyz", "--rate", "0.1"], "--rate"),
        (["m.tmn", "c.tmn", "--train", "train.xyz", "--validation", "./train.xyz"], "is among the files of --train"),
        (["m.tmn", "--test", "train.xyz", "other.xyz"], "not calibrated"),
        (["m.tmn", "c.tmn", "--train", "no.xyz", "--validation", "validation.xyz"], "no.xyz"),
        (
            ["m.tmn", "c.tmn", "--train", "train.xyz", "--validation", "nitrogen.xyz"],
            "nitrogen.xyz, frame 0: atom 0 is N",
        ),
    ],
)
def test_refusals_of_the_command(folder, capsys, words, told):
    from torchmdnet2.data import open_dataset, splits_entry

    write("nitrogen.xyz", frames("N2", 20))
    entry = splits_entry(open_dataset("train.xyz"), [0, 1], ["train.xyz"])
    (folder / "splits.json").write_text(json.dumps({"train": entry}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["calibrate", *words]) in (1, 2)
    assert told in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_kill_leaves_what_was_there(folder, monkeypatch):
    (folder / "c.tmn").write_bytes(b"earlier")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def killed(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)  # the new file is written and not yet in place
    assert main(FIT) == 130
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_charges_are_those_of_the_data(folder, capsys):
    """Read from HDF5 too, as the frames of scripts/organic are."""
    pytest.importorskip("h5py")
    from torchmdnet2.data import open_dataset, write_hdf5

    for seed in (0, 1):
        charged = frames("CH3CH2OH", 40, seed)
        for atoms in charged:
            atoms.info["charge"] = 1
        write("charged.xyz", charged)
        if not seed:
            write_hdf5("charged.h5", open_dataset("charged.xyz"))
    save(tiny_potential(total_charges=[0, 1]), "both.tmn")
    save(tiny_potential(total_charges=[0]), "neutral.tmn")
    files = ["--train", "charged.h5", "--validation", "charged.xyz"]
    assert main(["calibrate", "both.tmn", "c.tmn", *files]) == 0
    assert main(["calibrate", "neutral.tmn", "n.tmn", *files]) == 1
    assert "charge 1" in capsys.readouterr().err and not (folder / "n.tmn").exists()
