"""Labels beyond energies: dipoles, charges, scalars of structures and of atoms, by themselves and beside energies."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2 import checkpoint
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig, BadData
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.run import run_training

from .conftest import make_frames

CHARGE = {1: 0.2, 6: -0.1, 8: -0.4}  # e, of free atoms; shifted so that they add up to the total charge


def labelled(frames):
    """Dipoles, charges, a gap and an atomic shift that follow from the structure; some absent."""
    for k, atoms in enumerate(frames):
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        charges = np.array([CHARGE[z] for z in atoms.numbers])
        charges -= charges.mean()
        centre = atoms.get_center_of_mass()
        dipole = charges @ (atoms.positions - centre)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        atoms.info["mu"] = dipole / 0.529177210903  # e·bohr
        atoms.info["r2"] = float(((atoms.positions - centre) ** 2).sum())
        atoms.arrays["q"] = charges
        atoms.arrays["shift"] = np.linalg.norm(atoms.positions - centre, axis=1)
        if k % 4:
            atoms.info["gap"] = (4.0 + 0.5 * (atoms.numbers == 1).sum()) / 27.211386245988
    return frames


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("properties") / "p.xyz"
    write(path, labelled(make_frames(32)), format="extxyz")
    return path


def config(raw_config, file, keys, properties, **training):
    raw_config["data"] |= {"train": str(file), "keys": keys}
    raw_config["properties"] = properties
    raw_config["training"] |= training
    return raw_config


EVERYTHING = {"dipole": "mu", "charges": "q", "properties": {"gap": "gap", "shift": "shift", "spatial_extent": "r2"}}
HEADS = [
    {"name": "dipole"},
    {"name": "charges"},
    {"name": "scalar_property", "property": "gap", "scale": "fit", "shift": "fit"},
    {"name": "scalar_property", "property": "shift", "per": "atom", "scale": "fit", "shift": "fit"},
    {"name": "spatial_extent", "scale": "fit"},
]
UNITS = {"dipole": "e*bohr", "properties": {"gap": "hartree"}}


def test_everything_beside_energies(raw_config, file, capsys):
    raw = config(raw_config, file, EVERYTHING, HEADS, max_epochs=20, lr=2e-2, batch_size=4)
    raw["data"]["units"] = UNITS
    raw["model"]["cutoff"] = 4.0
    raw["training"]["loss"] = {"kinds": {"charges": "l1"}, "properties": {"gap": 30.0}, "dipole": 3.0}
    path = run_training(parse_config(raw))
    rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    for name in ("energy", "forces", "dipole", "charges", "gap", "shift"):
        first, last = rows[0][f"validation_{name}_rmse"], rows[-1][f"validation_{name}_rmse"]
        assert last < 0.7 * first, (name, first, last)
    errors = checkpoint.read_header(path)["metadata"]["errors"]
    assert errors["test"]["gap"]["unit"] == "eV" and errors["test"]["dipole"]["unit"] == "e·Å"
    assert errors["test"]["shift"]["unit"] == ""
    assert "note: 6 of 20 training frames have no gap" in (path.parent / "log.txt").read_text()
    # bar R30: the same numbers from ASE's calculator and from the command line
    from ase.io import read

    frames = read(file, ":")
    indices = json.loads((path.parent / "splits.json").read_text())["test"]["indices"]
    calc = TorchMDNet2Calculator(path, dtype="float64")
    dipole, charges = [], []
    for i in indices:
        atoms = frames[i].copy()
        dipole.append(calc.get_property("dipole", atoms) - np.asarray(frames[i].info["mu"]) * 0.529177210903)
        charges.append(calc.get_property("charges", atoms) - frames[i].arrays["q"])
    assert errors["test"]["dipole"]["mae"] == pytest.approx(np.abs(np.concatenate(dipole)).mean(), rel=1e-6)
    assert errors["test"]["charges"]["mae"] == pytest.approx(np.abs(np.concatenate(charges)).mean(), rel=1e-6)
    capsys.readouterr()
    predicted = path.parent / "predicted.xyz"
    split = ["--split", str(path.parent / "splits.json"), "--json", "--device", "cpu", "--output", str(predicted)]
    assert main(["evaluate", str(path), str(file), *split]) == 0
    for i, atoms in zip(indices, read(predicted, ":"), strict=True):
        assert np.allclose(atoms.get_charges(), calc.get_property("charges", frames[i].copy()), rtol=0, atol=1e-6)
        assert np.allclose(atoms.arrays["reference_charges"], frames[i].arrays["q"], rtol=0, atol=1e-6)
    found = json.loads(capsys.readouterr().out)
    for name, value in errors["test"].items():
        if name != "forces_by_element":
            assert found[name]["rmse"] == pytest.approx(value["rmse"], rel=1e-6), name


def test_properties_without_energies(raw_config, file):
    """As QM9's dipole moment is trained: its length alone, no energy."""
    keys = {"energy": None, "forces": None, "properties": {"dipole_norm": "norm", "gap": "gap"}}
    from ase.io import read

    frames = read(file, ":")
    for atoms in frames:
        atoms.info["norm"] = float(np.linalg.norm(atoms.info["mu"]))
    norm = file.parent / "norm.xyz"
    write(norm, frames, format="extxyz")
    raw = config(raw_config, norm, keys, [{"name": "dipole"}, HEADS[2]], max_epochs=10, lr=1e-2)
    raw["data"]["units"] = {"properties": {"dipole_norm": "e*bohr", "gap": "hartree"}}
    raw["head"], raw["priors"] = None, []
    path = run_training(parse_config(raw))
    errors = checkpoint.read_header(path)["metadata"]["errors"]["test"]
    assert errors.keys() == {"dipole_norm", "gap"} and errors["dipole_norm"]["unit"] == "e·Å"
    potential = checkpoint.load(path)
    assert potential.head is None and list(potential.properties) == ["dipole", "gap"]


def test_fitted_scale_and_shift(raw_config, file):
    from torchmdnet2.training.run.setup import make_setup

    raw = config(raw_config, file, {"properties": {"gap": "gap"}}, [{**HEADS[2], "reduce": "mean"}])
    setup = make_setup(parse_config(raw))
    gaps = []
    for i in range(len(setup.frames["train"])):
        value = setup.frames["train"][i].sample.labels.get("scalar:gap", torch.full((1,), float("nan")))
        gaps += value[torch.isfinite(value)].tolist()
    head = setup.potential.properties["gap"]
    assert head.shift == pytest.approx(np.mean(gaps), rel=1e-9)
    assert head.scale == pytest.approx(np.std(gaps), rel=1e-9)
    assert setup.potential.config["properties"][0]["scale"] == head.scale  # what is saved


def keys(**given):
    return {"data": {"keys": given}}


def units(**given):
    return {"data": {"units": {"properties": given}}}


def loss(**given):
    return {"training": {"loss": given}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (keys(properties={"gapp": "gap"}), "data.keys.properties.gapp: no head predicts it, did you mean 'gap'"),
        (keys(properties={"energy": "e"}), "has a separate key, data.keys.energy"),
        (keys(dipole="mu"), "data.keys.dipole: the model does not predict it"),
        (keys(charges="q"), "data.keys.charges: the model does not predict it"),
        (keys(properties={}), "'gap' has no label to learn from; add data.keys.properties.gap"),
        (units(gap="hartre"), "unknown unit 'hartre'"),
        (units(gpa="eV"), "data.units.properties.gpa: no such label, did you mean 'gap'"),
        (loss(properties={"gp": 1.0}), "training.loss.properties.gp: no such label, did you mean 'gap'"),
        (loss(kinds={"force": "l1"}), "training.loss.kinds.force: no such label, did you mean 'forces'"),
        ({"head": {"name": "dipole"}}, "'dipole' does not predict energies: it belongs to `properties`"),
        ({"properties": [{"name": "scalar"}]}, "'scalar' predicts energies: it belongs to `head`"),
        ({"properties": [{"name": "dipolle"}]}, "unknown head 'dipolle', did you mean 'dipole'"),
        ({"properties": [{"name": "charges", "scale": "fit"}]}, "scale: 'charges' has none"),
        ({"properties": [{"name": "vector"}]}, "this head needs vector features"),
        ({"head": None}, "head: without one there are no energies to train; set data.keys.energy to null"),
        (
            loss(energy=0.0, forces=0.0, properties={"gap": 0.0}),
            "none of the labels in data.keys (energy, forces, scalar:gap) has a weight above 0",
        ),
    ],
)
def test_what_does_not_fit_together(raw_config, file, change, message):
    raw = config(raw_config, file, {"properties": {"gap": "gap"}}, [HEADS[2]])
    for section, value in change.items():
        if isinstance(value, dict) and section in ("data", "training"):
            raw[section] |= value
        else:
            raw[section] = value
    with pytest.raises(BadConfig) as caught:
        parse_config(raw)
    assert message in str(caught.value)


def test_a_property_key_that_is_not_in_the_file(raw_config, file):
    raw = config(raw_config, file, {"properties": {"gap": "homo_lumo"}}, [HEADS[2]])
    with pytest.raises(BadData, match="no frame has 'homo_lumo', which is the key of gap"):
        run_training(parse_config(raw), check=True)
