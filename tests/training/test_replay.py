"""Replay: structures that a fine-tuning labels by the model that it starts from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import System, checkpoint
from torchmdnet2.errors import BadConfig, BadData, UndeterminedEnergyWarning
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup

pytestmark = pytest.mark.usefixtures("without_notes")


@pytest.fixture(scope="module")
def base(data_file, tmp_path_factory):
    """A model with charges, trained for a few epochs on C, H, O."""
    folder = tmp_path_factory.mktemp("base")
    frames = read(data_file, ":")
    for atoms in frames:
        atoms.arrays["q"] = atoms.numbers / 10.0 - np.mean(atoms.numbers / 10.0)
    write(folder / "charged.xyz", frames, format="extxyz")
    raw = {
        "data": {
            "train": str(folder / "charged.xyz"),
            "keys": {"charges": "q"},
            "split": {"validation": 6, "test": 6},
        },
        "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "properties": [{"name": "charges"}],
        "training": {"batch_size": 5, "max_epochs": 10, "lr": 1e-2, "warmup_steps": 4, "device": "cpu"},
        "output": {"folder": str(folder / "run"), "report": False},
    }
    return run_training(parse_config(raw))


@pytest.fixture
def general(data_file, tmp_path):
    """Structures without labels."""
    path = tmp_path / "general.xyz"
    write(path, [Atoms(a.numbers, a.positions + 0.01) for a in read(data_file, ":20")], format="extxyz")
    return path


@pytest.fixture
def raw(raw_config, base, data_file, general, tmp_path):
    """Fine-tuning on frames with other forces and reference energies."""
    frames = []
    for atoms in read(data_file, ":"):
        new = Atoms(atoms.numbers, atoms.positions)
        energy = atoms.get_potential_energy() + 2.0 * len(atoms)
        new.calc = SinglePointCalculator(new, energy=energy, forces=1.3 * atoms.get_forces())
        frames.append(new)
    write(tmp_path / "mine.xyz", frames, format="extxyz")
    del raw_config["model"]
    raw_config["data"]["train"] = str(tmp_path / "mine.xyz")
    raw_config["init"] = {"file": str(base), "replay": str(general)}
    return raw_config


def test_labels_are_those_of_the_model_as_it_starts(raw, general):
    setup = make_setup(parse_config(raw))
    train = setup.frames["train"]
    assert len(train) == 20 + 20 and len(setup.frames["validation"]) == 6
    assert setup.statistics["train"].num_frames == 40 and setup.statistics["train"].labelled["charges"] == 20
    assert setup.labelled == {"energy": 40, "forces": 40, "charges": 20}
    assert any(note.startswith("replay: 20 structures") for note in setup.notes)
    assert str(general) in setup.digests
    sample = train.batch(range(20, 40)).sample
    system = System.from_ase(read(general, ":"))
    found = setup.potential.double().eval()(system)
    torch.testing.assert_close(sample.labels["energy"], found.energy, rtol=0, atol=1e-3)  # float32
    torch.testing.assert_close(sample.labels["forces"], found.forces, rtol=0, atol=1e-4)
    torch.testing.assert_close(sample.labels["charges"], found.charges, rtol=0, atol=1e-5)
    # reference energies were fitted to the new frames before: energies fit to the new level of theory
    theirs = checkpoint.load(raw["init"]["file"], dtype=torch.float64)(system)
    change = (sample.labels["energy"] - theirs.energy) / system.atom_counts
    assert float(change.mean()) == pytest.approx(2.0, abs=0.3)
    # the user's frames have no charges
    assert sample.labels["charges"].isfinite().all()
    mixed = train.batch([0, 30]).sample.labels["charges"]
    assert mixed.isnan().any() and mixed.isfinite().any()
    assert train.name(30).endswith("(replay)")


def test_energies_of_elements_that_only_replay_has_are_not_of_the_new_level(raw, general, tmp_path):
    """Reference energies are fitted to the new frames alone, of oxygen and hydrogen: the log and the model say so."""
    mine = [atoms for atoms in read(raw["data"]["train"], ":") if 6 not in atoms.numbers]
    write(tmp_path / "water.xyz", mine, format="extxyz")
    raw["data"].update(train=str(tmp_path / "water.xyz"), split={"validation": 1, "test": 0})
    setup = make_setup(parse_config(raw))
    (said,) = (note for note in setup.notes if "do not determine the reference energies of" in note)
    assert "C" in said.partition("energies of ")[2].partition(", only")[0].split(", ")
    other = next(atoms for atoms in read(general, ":") if 6 in atoms.numbers)
    with pytest.warns(UndeterminedEnergyWarning, match="do not determine the reference energy of that composition"):
        setup.potential.eval()(System.from_ase(other))


# the plain loop before a release: test_packed.py and test_levels.py show that both loops train alike
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_less_is_forgotten(raw, base, general, data_file, tmp_path, packed):
    """Trained on forces that are 1.3 times as large, predictions for other molecules change less with replay."""
    mine = [atoms for atoms in read(raw["data"]["train"], ":") if len(atoms) < 5]
    write(tmp_path / "small.xyz", mine, format="extxyz")
    raw["data"].update(train=str(tmp_path / "small.xyz"), split={"validation": 3, "test": 0})
    large = [a for a in read(data_file, ":") if len(a) == 5]
    write(general, [Atoms(a.numbers, a.positions) for a in large[::2]], format="extxyz")
    raw["training"].update(max_epochs=15, batch_size=4, cuda_graphs="auto" if packed else False)
    system = System.from_ase(large[1::2])
    before = checkpoint.load(base, dtype=torch.float64)(system)
    changes = {}
    for replay in (str(general), None):
        raw["init"]["replay"] = replay
        raw["output"].update(folder=str(tmp_path / f"run-{replay is not None}"))
        after = checkpoint.load(run_training(parse_config(raw)), dtype=torch.float64)(system)
        forces = (after.forces - before.forces).square().mean().sqrt()
        charges = (after.charges - before.charges).square().mean().sqrt()
        changes[replay is not None] = float(forces), float(charges)
    assert changes[True][0] < 0.7 * changes[False][0]
    assert changes[True][1] < 0.7 * changes[False][1]


def test_refusals(raw, general, tmp_path):
    raw["init"]["replay"] = str(tmp_path / "none.xyz")
    with pytest.raises(FileNotFoundError, match=r"none\.xyz"):
        make_setup(parse_config(raw))
    write(general, Atoms("CS", [[0, 0, 0], [0, 0, 1.5]]), format="extxyz")
    raw["init"]["replay"] = str(general)
    with pytest.raises(BadData, match=r"init\.replay: .*general\.xyz, frame 0.*S"):
        make_setup(parse_config(raw))
    raw["output"].update(folder=str(tmp_path), overwrite=True)
    with pytest.raises(BadConfig, match="replay"):
        raw["init"]["replay"] = str(tmp_path / "best.tmn")
        run_training(parse_config(raw))
