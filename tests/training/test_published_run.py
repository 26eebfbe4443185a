"""Training on a published data set and from a cache, named in the configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2 import checkpoint, load
from torchmdnet2.errors import BadConfig
from torchmdnet2.priors import Atomref
from torchmdnet2.training.config.config import load_config, parse_config
from torchmdnet2.training.reporting.report import model_card
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup

from .conftest import make_frames
from .test_resume import weights_hash

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Frames of one molecule where the files of MD17 go, in their layout."""
    folder = tmp_path / "data" / "md17" / "raw"
    folder.mkdir(parents=True)
    frames = [atoms for atoms in make_frames(200) if len(atoms) == 5 and atoms.numbers[0] == 6][:30]
    unit = 23.0605  # kcal/mol of an eV, roughly
    np.savez(
        folder / "md17_uracil.npz",
        z=frames[0].numbers,
        R=np.array([atoms.positions for atoms in frames]),
        E=np.array([[atoms.get_potential_energy() * unit] for atoms in frames]),
        F=np.array([atoms.get_forces() * unit for atoms in frames]),
    )
    return {"dataset": "md17", "molecule": "uracil", "root": str(tmp_path / "data"), "download": False}


def test_training_on_a_published_data_set(published, raw_config, tmp_path):
    raw_config["data"] = {**published, "split": {"validation": 5, "test": 5}}
    path = run_training(parse_config(raw_config))
    header = checkpoint.read_header(path)
    data = header["metadata"]["data"]
    assert data["frames"] == {"train": 20, "validation": 5, "test": 5}
    assert [name.rsplit("/", 1)[1] for name in data["files"]] == ["md17_uracil.npz"]
    assert data["level_of_theory"] == "PBE+vdW-TS"
    cited = "https://doi.org/10.1126/sciadv.1603015"
    assert data["citation"] == cited and f"| Citation of the data | {cited} |" in model_card(
        header["config"], header["metadata"]
    )
    assert f"please cite the data: {cited}" in (path.parent / "log.txt").read_text(encoding="utf-8")
    assert header["metadata"]["errors"]["test"]["forces"]["count"] == 75
    split = path.parent / "splits.json"
    again = {**raw_config, "data": {**published, "split": {"file": str(split)}}}
    again["output"] = {**raw_config["output"], "folder": str(tmp_path / "again")}
    second = run_training(parse_config(again))
    assert json.loads((second.parent / "splits.json").read_text()) == json.loads(split.read_text())
    assert weights_hash(second) == weights_hash(path)


def test_the_cache_does_not_change_the_weights(raw_config, tmp_path):
    hashes = []
    for name in ("off", str(tmp_path / "caches")):
        raw_config["data"]["cache"] = name
        raw_config["output"]["folder"] = str(tmp_path / f"run{len(hashes)}")
        hashes.append(weights_hash(run_training(parse_config(raw_config))))
    assert hashes[0] == hashes[1]
    assert len([path for path in (tmp_path / "caches").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "rmd71"}, "unknown data set 'rmd71', did you mean 'rmd17'"),
        ({"molecule": "urasil"}, "there is no 'urasil', did you mean 'uracil'"),
        ({"molecule": 3}, r"data\.molecule: should be a valid string"),
        ({"molecule": None}, "the option 'molecule' must be given"),
        ({"version": "2"}, "there is no option 'version'; it has: molecule"),
        ({"train": "a.xyz"}, r"data\.train: is not to be given together with data\.dataset"),
        ({"dataset": None, "train": "a.xyz"}, "molecule requires data.dataset"),
        ({"dataset": None, "molecule": None}, r"data\.train: is required"),
    ],
)
def test_what_does_not_go_together(published, raw_config, change, message):
    raw_config["data"] = {**published, **change}
    with pytest.raises(BadConfig, match=message):
        parse_config(raw_config)


def test_labels_that_a_data_set_does_not_have(published, raw_config):
    raw_config["data"] = {**published, "keys": {"energy": None, "forces": None, "stress": "stress"}}
    with pytest.raises(BadConfig, match=r"data\.keys: md17 has no 'stress'. It has energy, forces"):
        run_training(parse_config(raw_config))


def test_a_budget_of_atoms_trains_and_resumes(raw_config, tmp_path):
    del raw_config["training"]["batch_size"]
    raw_config["training"].update(max_atoms=17, max_edges=60, max_epochs=4)
    raw_config["output"].update(save_every_seconds=0)
    whole = run_training(parse_config(raw_config))
    raw_config["output"]["folder"] = str(tmp_path / "parts")
    raw_config["training"]["num_threads"] = 1

    class Stopped(Exception):
        pass

    def stop(trainer, loss):
        if trainer.step_count == 8:
            raise Stopped

    from torchmdnet2.training.run import run

    original = run.Hooks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Hooks", lambda **hooks: original(**{**hooks, "step": stop}))
        with pytest.raises(Stopped):
            run_training(parse_config(raw_config))
    parts = run_training(parse_config(raw_config), resume="auto")
    assert weights_hash(parts) == weights_hash(whole)


FORMULAS = {"acac": "C5H8O2", "3bpa": "C12H12N2O"}
TEST_SETS = {"acac": "test_MD_300K", "3bpa": "test_300K"}
SMALL = [  # and from random weights
    "init=null", "model.name=tensornet", "model.hidden_channels=8", "model.num_layers=1", "model.num_rbf=4",
    "model.cutoff=2.5",
]  # fmt: skip


@pytest.fixture
def molecules(tmp_path):
    """Few frames under the names of the published files, with energies and forces of a spring model."""
    for molecule, formula in FORMULAS.items():
        for name, seeds in (("train_300K", range(9)), (TEST_SETS[molecule], range(9, 13))):
            path = tmp_path / "root" / molecule / f"{name}.xyz"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, [springs(formula, seed) for seed in seeds], format="extxyz")
    return tmp_path / "root"


def springs(formula, seed):
    """Atoms on a line of 1 Å steps, displaced; each is held by a spring."""
    atoms = Atoms(formula)
    moved = np.random.default_rng(seed).normal(0, 0.1, (len(atoms), 3))
    atoms.positions = np.arange(len(atoms))[:, None] * [1.0, 0.0, 0.0] + moved
    atoms.calc = SinglePointCalculator(atoms, energy=float((moved**2).sum()), forces=-2 * moved)
    return atoms


def recipe(name, root, *more):
    """The configuration for few frames."""
    small = {"data.root": root, "data.download": "false", "data.split": "{train: 6, validation: 3, seed: 1}"}
    small |= {"training.max_epochs": 1, "training.device": "cpu", "output.report": "false"}
    return load_config(CONFIGS / f"{name}.yaml", [*(f"{key}={value}" for key, value in small.items()), *more])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_published_test_set_by_its_name(name, molecules, tmp_path):
    """configs/acac.yaml and configs/3bpa.yaml: test frames are those of the test file."""
    path = run_training(recipe(name, molecules, *SMALL, f"output.folder={tmp_path / 'run'}"))
    data = checkpoint.read_header(path)["metadata"]["data"]
    assert data["frames"] == {"train": 6, "validation": 3, "test": 4} and data["licence"] == "MIT"
    assert {file.rsplit("/", 1)[1] for file in data["files"]} == {"train_300K.xyz", f"{TEST_SETS[name]}.xyz"}
    splits = json.loads((path.parent / "splits.json").read_text())
    assert splits["test"]["files"] == [str(molecules / name / f"{TEST_SETS[name]}.xyz")]
    assert splits["train"]["files"] == [str(molecules / name / "train_300K.xyz")]


@pytest.mark.parametrize("name", FORMULAS)
def test_recipes_start_from_the_network_of_organic(name, molecules):
    """And have none of its other terms, so that they cost what a TensorNet costs."""
    ours = make_setup(recipe(name, molecules)).potential
    organic = load("organic").state_dict()
    assert [type(prior) for prior in ours.priors] == [Atomref] and not ours.properties
    network = {key: value for key, value in ours.state_dict().items() if not key.startswith("priors.")}
    assert len(network) > 20
    for key, value in network.items():
        assert torch.equal(value, organic[key]), key


def test_another_form_than_that_of_the_start_is_refused(molecules):
    message = "model.hidden_channels: is 64 here and 128 in the file of `init`; leave `model` out.*or `init`"
    with pytest.raises(BadConfig, match=message):
        run_training(recipe("acac", molecules, "model.hidden_channels=64"), check=True)


def test_wrong_test_sets_are_refused(molecules):
    for test, message in (
        ("test_MD_30K", "no file 'test_MD_30K', nor has botnet such a subset, did you mean 'test_MD_300K'"),
        ("train_300K", "data.test: train_300K: the model is trained on these frames"),
        (f"[test_MD_300K, {molecules}/acac/train_300K.xyz]", "give subsets of botnet or files, not both"),
    ):
        with pytest.raises(BadConfig, match=re.escape(message)):
            run_training(recipe("acac", molecules, *SMALL, f"data.test={test}"), check=True)
