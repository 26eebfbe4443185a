"""A built-in label is one entry of the table in data/labels.py, and the head that predicts it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
from ase.io import write

from torchmdnet2.data.labels import LABELS
from torchmdnet2.training.config.sections import LossConfig

from .conftest import make_frames

CODE = """
import json, sys
from torchmdnet2.data.labels import LABELS, LabelSpec
LABELS.add(LabelSpec(False, (), "gap", "energy", "gap of the orbitals", default_weight=3.0))

from torchmdnet2.cli import main
from torchmdnet2.data import open_dataset, write_hdf5
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training

raw = json.load(open("raw.json"))
config = parse_config(raw)
assert config.training.loss.gap == config.training.loss.weight("gap") == 3.0
assert config.training.loss.at(1, 2).gap == 1.5, "a schedule of its weight"
run_training(config)
assert main(["evaluate", "run/best.tmn", "gap.xyz", "--json"]) == 0
main(["config"])

data = open_dataset("gap.xyz", {"energy": "energy", "gap": "gap"}, {"energy": "eV", "length": "bohr", "gap": "hartree"})
write_hdf5("gap.h5", data)
again = open_dataset("gap.h5", {"energy": "energy", "gap": "gap"})
for k in range(4):
    assert abs(float(again[k].labels["gap"]) - float(data[k].labels["gap"])) < 1e-12
"""


def test_a_label_is_one_entry_of_the_table(raw_config, tmp_path):
    """A scalar label of structures: read with its unit, weighted, trained, evaluated, reported, written to HDF5."""
    frames = make_frames(32)
    for atoms in frames:
        atoms.info["gap"] = (4.0 + 0.5 * float((atoms.numbers == 1).sum())) / 27.211386245988
    write(tmp_path / "gap.xyz", frames, format="extxyz")
    raw_config["data"] |= {"train": "gap.xyz", "keys": {"gap": "gap"}, "units": {"gap": "hartree"}}
    raw_config["properties"] = [{"name": "scalar_property", "property": "gap", "scale": "fit", "shift": "fit"}]
    raw_config["training"] |= {"max_epochs": 2, "loss": {"schedule": {"start": 1, "gap": 1.5}}}
    raw_config["output"] = {"folder": "run", "outliers": 0}
    (tmp_path / "raw.json").write_text(json.dumps(raw_config))
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for text in ("gap MAE", "  gap: null", "# gap of the orbitals", "    gap: 3.0", "weight; errors in eV"):
        assert text in done.stdout, done.stdout

    errors = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]["gap"]
    assert errors["unit"] == "eV" and errors["count"] == 6
    gaps = [27.211386245988 * atoms.info["gap"] for atoms in frames]
    assert 0 < errors["rmse"] < 3 * np.std(gaps)
    evaluated, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])
    assert evaluated["gap"]["count"] == 32
    history = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["validation_gap_mae"]) for row in history)
    assert (tmp_path / "run" / "gap_parity.png").is_file()
    assert "gap" in (tmp_path / "run" / "report.html").read_text()


def test_units_and_weights_of_the_table():
    assert {name: spec.unit for name, spec in LABELS.items()} == {
        "energy": "eV", "forces": "eV/Å", "stress": "eV/Å³", "dipole": "e·Å", "charges": "e"
    }  # fmt: skip
    loss = LossConfig()
    assert [loss.weight(name) for name in LABELS] == [10.0, 1.0, 1.0, 1.0, 1.0]
    assert LABELS["scalar:gap"].unit == "" and LABELS["atom_vector:x"].shape(5) == (5, 3)
