"""A run from YAML to the finished folder."""

from __future__ import annotations

import copy
import csv
import json
import re

import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2 import checkpoint
from torchmdnet2.errors import BadConfig, BadData
from torchmdnet2.system import System
from torchmdnet2.training.config.config import load_config, parse_config
from torchmdnet2.training.reporting.report import model_card
from torchmdnet2.training.run import start
from torchmdnet2.training.run import start as check
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.trainer import TrainingDiverged

from .conftest import REFERENCES, make_frames


@pytest.fixture(scope="module")
def finished(data_file, tmp_path_factory):
    """A run with a report."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    raw = {
        "data": {"train": str(data_file), "split": {"validation": 6, "test": 6}, "level_of_theory": "Morse pairs"},
        "model": {"hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "cutoff": 3.5, "max_z": 10},
        "training": {
            "batch_size": 4,
            "max_epochs": 30,
            "lr": 1e-2,
            "warmup_steps": 10,
            "device": "cpu",
            "num_threads": 1,
        },
        "output": {"folder": str(folder), "licence": "CC0-1.0"},
    }
    threads, dtype, state = torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state()
    path = run_training(parse_config(raw))
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert torch.equal(torch.get_rng_state(), state)
    return path


def test_it_learns(finished):
    rows = list(csv.DictReader((finished.parent / "metrics.csv").open()))
    first, last = rows[0], rows[-1]
    assert len(rows) == 30
    assert float(last["validation_forces_mae"]) < 0.5 * float(first["validation_forces_mae"])
    lines = [json.loads(line) for line in (finished.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 31))
    assert lines[-1]["validation_loss"] == float(last["validation_loss"])


def test_folder_is_complete(finished):
    names = {p.name for p in finished.parent.iterdir()}
    plots = {"learning_curve.png", "energy_parity.png", "force_parity.png", "errors_by_element.png"}
    files = {"config.yaml", "splits.json", "log.txt", "metrics.csv", "metrics.jsonl", "metrics.json", "card.md"}
    assert names == plots | files | {"best.tmn", "state.safetensors", "report.html", "outliers.xyz"}
    for plot in plots:
        assert (finished.parent / plot).read_bytes().startswith(b"\x89PNG")
    assert load_config(finished.parent / "config.yaml").training.max_epochs == 30
    splits = json.loads((finished.parent / "splits.json").read_text())
    indices = [i for part in splits.values() for i in part["indices"]]
    assert sorted(indices) == list(range(32))
    assert "epoch 30/30" in (finished.parent / "log.txt").read_text()


def test_errors_in_the_model_file_equal_those_recomputed(finished, data_file):
    from ase.io import read

    potential = checkpoint.load(finished, dtype=torch.float64)
    splits = json.loads((finished.parent / "splits.json").read_text())
    frames = read(data_file, ":")
    energy, forces, hydrogen = [], [], []
    for i in splits["test"]["indices"]:
        result = potential(System.from_ase(frames[i]))
        energy.append((float(result.energy) - frames[i].get_potential_energy()) / len(frames[i]))
        error = result.forces.numpy() - frames[i].get_forces()
        forces.append(error.ravel())
        hydrogen.append(error[frames[i].numbers == 1].ravel())
    saved = potential.metadata["errors"]["test"]
    assert saved == json.loads((finished.parent / "metrics.json").read_text())["test"]
    for name, found in (("energy_per_atom", np.array(energy)), ("forces", np.concatenate(forces))):
        assert saved[name]["count"] == found.size
        assert saved[name]["mae"] == pytest.approx(np.abs(found).mean(), rel=1e-9)
        assert saved[name]["rmse"] == pytest.approx(np.sqrt((found**2).mean()), rel=1e-9)
    assert saved["forces_by_element"]["H"]["mae"] == pytest.approx(np.abs(np.concatenate(hydrogen)).mean(), rel=1e-9)


def test_card_states_what_matters(finished):
    header = checkpoint.read_header(finished)
    card = model_card(header["config"], header["metadata"], title="run")
    assert card == (finished.parent / "card.md").read_text()
    digest = next(iter(header["metadata"]["data"]["files"].values()))
    for text in ("H, C, O", "Morse pairs", "3.5 Å", "CC0-1.0", digest, "meV/Å", "forces on C", "Reference energies"):
        assert text in card, text
    assert model_card({}, {}).startswith("# Model")  # a file of unknown origin has a card too
    about = {"about": {"Not for": "Radicals."}}
    assert "## Not for\n\nRadicals.\n" in model_card({}, about) and model_card({}, {"about": "text"})
    assert "| Citation of the data | see below |" in model_card({}, {"about": {"Cite": "A paper."}})


def test_reference_energies_are_fitted_in_float64(finished):
    config = checkpoint.read_header(finished)["config"]
    fitted = config["priors"][0]["energies"]
    for z, energy in REFERENCES.items():
        assert abs(fitted[str(z)] - energy) < 5  # up to the bonds, which the fit shares out among the elements
    assert config["elements"] == [1, 6, 8]
    assert 0.1 < config["energy_scale"] < 10


def test_references_are_fitted_to_what_the_other_priors_leave(raw_config):
    from torchmdnet2.training.run.setup import make_setup

    raw_config["priors"] = [{"name": "zbl", "cutoff": 4.0}, {"name": "atomref", "energies": "fit"}]
    setup = make_setup(parse_config(raw_config))
    only_zbl = {**setup.potential.config, "priors": setup.potential.config["priors"][:1]}
    zbl = type(setup.potential).from_config(only_zbl)
    counts, rest = [], []
    for i in range(len(setup.frames["train"])):
        batch = setup.frames["train"][i]
        system = batch.sample.system
        repulsion = float(zbl.prior_energies(system, batch.neighbors).sum())
        assert repulsion > 1.0
        counts.append([int((system.z == z).sum()) for z in (1, 6, 8)])
        rest.append(float(batch.sample.labels["energy"]) - repulsion)
    expected = np.linalg.lstsq(np.array(counts, dtype=float), np.array(rest), rcond=None)[0]
    fitted = setup.potential.config["priors"][1]["energies"]
    assert [fitted[z] for z in ("1", "6", "8")] == pytest.approx(expected, rel=1e-9)


def test_given_and_absent_references_and_own_files(raw_config, tmp_path):
    from ase.io import write

    write(tmp_path / "test.xyz", make_frames(5, seed=9), format="extxyz")
    del raw_config["data"]["split"]["test"]
    raw_config["data"]["test"] = str(tmp_path / "test.xyz")
    raw_config["priors"] = [{"name": "atomref", "energies": {"H": -13.5, "C": -1030.0, "O": -2040.0}}]
    path = run_training(parse_config(raw_config))
    header = checkpoint.read_header(path)
    assert header["config"]["priors"][0]["energies"] == {"1": -13.5, "6": -1030.0, "8": -2040.0}
    assert header["metadata"]["data"]["frames"] == {"train": 26, "validation": 6, "test": 5}
    raw_config["priors"][0]["energies"].pop("O")
    raw_config["output"]["folder"] = str(tmp_path / "other")
    with pytest.raises(BadConfig, match="no entry for O"):
        run_training(parse_config(raw_config))
    raw_config["priors"] = []
    path = run_training(parse_config(raw_config))
    assert checkpoint.read_header(path)["config"]["priors"] == []


def test_split_file_is_used_again(finished, raw_config):
    split = finished.parent / "splits.json"
    raw_config["data"]["split"] = {"file": str(split)}
    path = run_training(parse_config(raw_config))
    assert json.loads((path.parent / "splits.json").read_text()) == json.loads(split.read_text())


def test_impossible_splits(raw_config):
    raw_config["data"]["split"] = {"train": 30, "validation": 6, "test": 6}
    with pytest.raises(BadConfig, match=r"data\.split: 32 frames are not enough for"):
        run_training(parse_config(raw_config))
    raw_config["data"]["split"] = {"file": "none.json"}
    with pytest.raises(BadConfig, match=r"data\.split\.file: there is no file of splits at none\.json"):
        run_training(parse_config(raw_config))


@pytest.mark.parametrize(("split", "sizes"), [
    ({"validation": 6}, (23, 6, 3)), ({"train": 20, "validation": 6}, (20, 6, 3)),
    ({"train": 26, "validation": 6}, (26, 6, 0)), ({"train": 24, "validation": 6}, (24, 6, 2)),
    ({"train": 0.5, "validation": 0.25, "test": 0.25}, (16, 8, 8)),
])  # fmt: skip
def test_a_tenth_is_for_testing_or_what_is_left(raw_config, capsys, split, sizes):
    raw_config["data"]["split"] = split
    run_training(parse_config(raw_config), check=True)
    text = capsys.readouterr().out
    assert "{} train, {} validation".format(*sizes) in text
    assert (f"{sizes[2]} test" in text) == (sizes[2] > 0)


@pytest.mark.parametrize("channels, num_threads, expected", [(8, None, 1), (8, 2, 2), (512, None, 2), (512, 1, 1)])
def test_small_steps_run_on_one_thread(raw_config, channels, num_threads, expected, monkeypatch):
    """Threads wait for each other, on busy cores for longer than a small step takes."""
    raw_config["model"]["hidden_channels"], raw_config["training"]["num_threads"] = channels, num_threads
    raw_config["training"]["batch_size"] = 20
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    config = parse_config(raw_config)
    with start.own_torch_state(config):
        setup = make_setup(config)
        start.take_threads(setup, start.make_trainer(setup, None))
        used = seen[-1]
    assert used == expected and seen[-1] == 2, "PyTorch's number is as before afterwards"
    monkeypatch.undo()
    assert torch.get_num_threads() == before


def test_check_times_one_thread(raw_config, monkeypatch, capsys):
    monkeypatch.setattr(start, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    times = iter([(0.2, 0.0), (0.02, 0.0)])
    monkeypatch.setattr(check, "_measure", lambda trainer: next(times))
    raw_config["training"]["num_threads"] = None
    try:
        run_training(parse_config(raw_config), check=True)
    finally:
        torch.set_num_threads(before)
    output = " ".join(capsys.readouterr().out.split())
    assert "threads: 2, 200 ms a step; with one 20 ms" in output and "training.num_threads: 1" in output


def test_check_writes_nothing(raw_config, tmp_path, capsys):
    assert run_training(parse_config(raw_config), check=True) is None
    text = capsys.readouterr().out
    for part in (
        "20 train, 6 validation, 6 test",
        "neighbors within the cutoff",
        "4 steps per epoch",
        "memory of a step",
        "reference energies (eV): H ",
        "closest atoms: ",
        "the configuration is fine; nothing was written",
    ):
        assert part in text, text
    assert not (tmp_path / "run").exists()


def test_check_says_what_is_unusual(raw_config, tmp_path, capsys):
    """As of lengths in another unit, or forces that are no forces."""
    frames = make_frames(32)
    for atoms in frames:
        energy = atoms.get_potential_energy()
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=1e4 * atoms.get_forces())
        atoms.positions *= 30
    write(tmp_path / "far.xyz", frames, format="extxyz")
    raw_config["data"]["train"] = str(tmp_path / "far.xyz")
    run_training(parse_config(raw_config), check=True)
    text = " ".join(capsys.readouterr().out.split())
    assert "note: most atoms have no neighbor; is data.units.length right?" in text
    assert "note: that is unusual; are data.units right?" in text
    assert re.search(r"the configuration is fine, but read the \d+ notes above; nothing was written", text)


def test_check_of_replayed_steps(raw_config, monkeypatch, capsys):
    """What is measured on a GPU, here without one."""
    measure = check._measure

    def packed(trainer):
        assert pack_trainer(trainer) is None
        return measure(trainer)

    monkeypatch.setattr(check, "_measure", packed)
    run_training(parse_config(raw_config), check=True)
    assert "4 steps per epoch of " in capsys.readouterr().out


def test_missing_label_stops_the_run_before_training(raw_config, tmp_path):
    raw_config["data"]["keys"] = {"energy": "energy", "forces": "REF_forces"}
    with pytest.raises(BadData, match="REF_forces"):
        run_training(parse_config(raw_config))
    assert not (tmp_path / "run" / "best.tmn").exists()


def test_loss_that_is_not_finite_names_the_frames(raw_config, monkeypatch):
    from torchmdnet2.training.steps import trainer

    original = trainer.predict

    def poisoned(potential, batch, properties, create_graph=False):
        result = original(potential, batch, properties, create_graph)
        for position, frame in enumerate(batch.frames):
            if frame == bad:
                factor = torch.ones_like(result.energy)
                factor[position] = float("nan")
                result.energy = result.energy * factor
        return result

    from torchmdnet2.training.run.setup import make_setup

    raw_config["training"]["cuda_graphs"] = False  # the plain loop, which predict belongs to
    config = parse_config(raw_config)
    bad = make_setup(config).splits["train"]["indices"][7]
    monkeypatch.setattr(trainer, "predict", poisoned)
    with pytest.raises(TrainingDiverged, match=rf"not finite in \S*morse\.xyz, frame {bad}\."):
        run_training(config)


def test_energies_without_forces(raw_config, tmp_path):
    raw = copy.deepcopy(raw_config)
    raw["data"]["keys"] = {"energy": "energy", "forces": None}
    path = run_training(parse_config(raw))
    assert set(checkpoint.read_header(path)["metadata"]["errors"]["test"]) == {"energy", "energy_per_atom"}


def test_frames_without_some_or_all_labels_are_used_as_far_as_they_go(raw_config, tmp_path):
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    frames = make_frames(12, seed=3)
    for atoms in frames[2:6]:  # energies only
        atoms.calc = SinglePointCalculator(atoms, energy=atoms.get_potential_energy())
    for atoms in frames[6:8]:  # neither
        atoms.calc = None
    write(tmp_path / "partial.xyz", frames, format="extxyz")
    raw_config["data"] = {"train": str(tmp_path / "partial.xyz"), "split": {"validation": 0, "test": 0}}
    raw_config["training"]["batch_size"] = 1
    path = run_training(parse_config(raw_config))
    errors = checkpoint.read_header(path)["metadata"]["errors"]["train"]
    assert errors["energy"]["count"] == 10
    assert errors["forces"]["count"] == 3 * sum(len(atoms) for atoms in frames[:2] + frames[8:])
    log = (path.parent / "log.txt").read_text()
    assert "note: 2 of 12 training frames have no energy" in log
    assert "note: 6 of 12 training frames have no forces" in log


@pytest.mark.parametrize("schedule", ["plateau", "constant"])
def test_other_choices_run(raw_config, schedule):
    raw_config["training"].update(lr_schedule=schedule, weight_decay=0.01, ema_decay=0.0, gradient_clipping=None)
    raw_config["training"].update(precision="float64", early_stopping_patience=1, loss={"kind": "huber"})
    path = run_training(parse_config(raw_config))
    assert checkpoint.load(path).dtype == torch.float64


def test_a_training_that_stops_early_says_so(raw_config):
    """The steps are far too large."""
    raw_config["training"].update(
        early_stopping_patience=1, max_epochs=20, lr=1.0, lr_schedule="constant", warmup_steps=4, ema_decay=0.0
    )
    path = run_training(parse_config(raw_config))
    text = (path.parent / "log.txt").read_text()
    best = checkpoint.load(path).metadata["training"]["best_epoch"]
    assert f"stopped early, at training.early_stopping_patience; best epoch: {best}\n" in text
    assert "epoch 20/20" not in text


def test_what_would_fail_later_fails_before_training(raw_config, tmp_path):
    from ase.io import write

    frames = make_frames(4, seed=5)
    frames[2].numbers[1] = 16
    write(tmp_path / "sulphur.xyz", frames, format="extxyz")
    del raw_config["data"]["split"]["test"]
    raw_config["data"]["test"] = str(tmp_path / "sulphur.xyz")
    raw_config["model"]["max_z"] = 20
    with pytest.raises(BadData, match="test frames hold S, which no training frame does"):
        run_training(parse_config(raw_config))
    unlabelled = make_frames(3, seed=7)
    for atoms in unlabelled:
        atoms.calc.results["energy"] = float("nan")
        atoms.calc.results["forces"][:] = float("nan")
    write(tmp_path / "none.xyz", unlabelled, format="extxyz")
    raw_config["data"].update(test=None, split={}, validation=str(tmp_path / "none.xyz"))
    with pytest.raises(BadData, match="none of the validation frames has a label to train on"):
        run_training(parse_config(raw_config))
    assert not list(tmp_path.glob("run/best*"))


@pytest.mark.parametrize("numba", [True, False])
def test_the_log_says_what_a_cpu_trains_with(raw_config, tmp_path, monkeypatch, numba):
    if numba:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr("torchmdnet2.training.steps.loop.find_spec", lambda name: None)
    raw_config["training"].update(device="cpu", max_epochs=1)
    raw_config["output"].update(report=False)
    folder = run_training(parse_config(raw_config)).parent
    said = (folder / "log.txt").read_text()
    assert ("steps run on compiled kernels" in said) == numba
    assert ("pip install 'torchmdnet2[cpu]'" in said) == (not numba)
