"""Potentials by name: one resolver behind every way to give a model, plug-ins, and what is said of wrong names."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import shutil
import sys

import pytest
import torch
from ase.build import molecule
from ase.io import read, write
from commands import fill, run

from torchmdnet2 import load, potentials
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator
from torchmdnet2.checkpoint import read_header, save
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadConfig, UnknownModel
from torchmdnet2.potentials import find_model, named_models
from torchmdnet2.training.config.config import parse_config


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships "water"; the working directory has m.tmn, the same file, and data.xyz."""
    work, folder = tmp_path / "work", tmp_path / "shipped"
    work.mkdir()
    folder.mkdir()
    fill(work)
    potential = load(work / "m.tmn")
    save(potential, folder / "water.tmn", {"licence": "MIT", "data": {"level_of_theory": "random"}})
    monkeypatch.setattr(potentials, "FOLDER", folder)
    monkeypatch.chdir(work)
    return work


def plug_in(monkeypatch, folder, packages: dict[str, str], model) -> None:
    """Packages on the import path, each with an entry point: name of a potential -> package."""
    entries = []
    for package, name in packages.items():
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        shutil.copy(model, folder / package / f"{name}.tmn")
        entries.append(importlib.metadata.EntryPoint(name, package, potentials.GROUP))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == potentials.GROUP else [])


def test_nothing_is_shipped_yet(capsys):
    """Until weights are there, the command says so; every file in the folder must be a whole model file."""
    files = list(potentials.FOLDER.glob("*.tmn"))
    for file in files:
        header = read_header(file)
        assert header["metadata"]["licence"] and header["metadata"]["data"]["level_of_theory"]
        assert file.stat().st_size < 9e6
    code, out, _ = run(capsys, "models")
    assert code == 0 and ("This version ships no potential" in out) == (not named_models())


def test_every_entry_takes_the_name(shipped, capsys):
    atoms, path = molecule("H2O"), "m.tmn"
    expected = load(path)
    assert torch.equal(load("water").state_dict()["head.output_network.layers.0.weight"],
                       expected.state_dict()["head.output_network.layers.0.weight"])  # fmt: skip
    energies = []
    for model in ("water", path):
        atoms.calc = TorchMDNet2Calculator(model)
        energies.append(atoms.get_potential_energy())
        atoms.calc = CommitteeCalculator([model, path])
        energies.append(atoms.get_potential_energy())
    assert len(set(energies)) == 1
    assert len(Ensemble.load(["water", "water"]).members) == 2
    code, out, _ = run(capsys, "evaluate", "water", "data.xyz", "--json")
    assert code == 0 and json.loads(out)["frames"] == 6
    assert run(capsys, "md", "water", "data.xyz", "--steps", "2", "--output", "x")[0] == 0
    assert run(capsys, "info", "water")[0] == 0
    assert run(capsys, "export", "water", "back.ckpt")[0] == 0
    code, out, _ = run(capsys, "card", "water")
    assert code == 0 and "# water" in out and "random" in out
    assert (code, out) == run(capsys, "models", "water")[:2]


def test_openmm_takes_the_name(shipped):
    pytest.importorskip("openmm")
    from openmm.app import Element, Topology

    from torchmdnet2.adapters.openmm import create_force

    topology = Topology()
    residue = topology.addResidue("HOH", topology.addChain())
    for symbol in "OHH":
        topology.addAtom(symbol, Element.getBySymbol(symbol), residue)
    create_force("water", topology)
    pytest.importorskip("openmmml")
    from openmmml import MLPotential

    MLPotential("torchmdnet2", modelPath="water").createSystem(topology)


def test_calculators_of_a_name_can_be_sent_to_other_machines(shipped, tmp_path, monkeypatch):
    """What is kept is the name and the checksum: the folder of the package may differ, its weights may not."""
    atoms = molecule("H2O")
    atoms.calc = TorchMDNet2Calculator("water")
    before = atoms.get_potential_energy()
    blob = pickle.dumps(atoms.calc)
    moved = tmp_path / "elsewhere"
    shutil.move(potentials.FOLDER, moved)
    monkeypatch.setattr(potentials, "FOLDER", moved)
    atoms.calc = pickle.loads(blob)
    assert atoms.get_potential_energy() == before
    other = load("water")
    other.energy_scale = other.config["energy_scale"] = 0.3
    save(other, moved / "water.tmn")
    with pytest.raises(ValueError, match="checksum"):
        pickle.loads(blob).get_potential_energy(molecule("H2O"))


def test_fine_tuning_takes_the_name(shipped):
    data = {"train": "data.xyz", "split": {"validation": 1, "test": 1}}
    for init in ("water", {"file": "water"}, {"file": "m.tmn"}):
        config = parse_config({"data": data, "init": init})
        assert config.model["hidden_channels"] == 8 and config.init is not None
    with pytest.raises(BadConfig, match=r"watr.*did you mean 'water'"):
        parse_config({"data": data, "init": "watr"})


def test_fine_tuning_from_a_name_runs_and_records_the_checksum(shipped, capsys):
    import hashlib

    import yaml

    config = {
        "data": {"train": "data.xyz", "split": {"validation": 1, "test": 1}},
        "init": "water",
        "training": {"max_epochs": 1, "device": "cpu"},
        "output": {"folder": "run", "report": False},
    }
    (shipped / "c.yaml").write_text(yaml.safe_dump(config))
    code, _, err = run(capsys, "train", "c.yaml")
    assert code == 0, err
    digest = hashlib.sha256((potentials.FOLDER / "water.tmn").read_bytes()).hexdigest()
    assert digest in (shipped / "run" / "metrics.json").read_text() + str(read_header("run/best.tmn"))


def test_wrong_names(shipped, capsys):
    with pytest.raises(UnknownModel, match="did you mean 'water'"):
        load("watre")
    with pytest.raises(FileNotFoundError, match=r"no such model file, and no potential has this name\. .* water"):
        load("organic")
    with pytest.raises(FileNotFoundError, match=r"none\.tmn: no such model file$"):
        load("none.tmn")
    with pytest.raises(FileNotFoundError, match=r"no such model file$"):
        load("folder/water")
    code, _, err = run(capsys, "md", "watre", "data.xyz")
    assert code == 1 and "did you mean 'water'" in err


def test_names_and_files(shipped):
    """A path is a file; a bare word is a name first, and a file of that name where there is no such name."""
    shutil.copy("m.tmn", "plain")
    shutil.copy("m.tmn", "water")
    assert find_model("plain") == (shipped / "plain").relative_to(shipped)
    assert find_model("water") == potentials.FOLDER / "water.tmn"
    assert str(find_model("./water")) == "water" and find_model(shipped / "water") == shipped / "water"


def test_plug_ins(shipped, tmp_path, monkeypatch, capsys):
    """A package brings a potential, and is not imported for it; the package's own names come first."""
    plug_in(monkeypatch, tmp_path, {"brings_one": "ethanol", "brings_another": "water"}, "m.tmn")
    assert load("ethanol").elements == [1, 8] and "brings_one" not in sys.modules
    assert find_model("water").parent == potentials.FOLDER
    (tmp_path / "brings_one" / "ethanol.tmn").write_bytes(b"damaged")
    code, out, _ = run(capsys, "models", "--json")
    found = {facts["name"]: facts for facts in json.loads(out)}
    assert code == 0 and set(found) == {"ethanol", "water"}
    assert "not a torchmdnet2 model file" in found["ethanol"]["error"] and found["ethanol"]["package"] == "brings_one"
    assert found["water"]["licence"] == "MIT" and found["water"]["elements"] == ["H", "O"]
    code, out, _ = run(capsys, "models")
    assert code == 0 and "brings_one" in out and "MIT" in out and "random" in out


def test_two_packages_with_one_name(shipped, tmp_path, monkeypatch):
    plug_in(monkeypatch, tmp_path, {"brings_one": "ethanol", "brings_another": "ethanol"}, "m.tmn")
    with pytest.raises(UnknownModel, match="brings_another and brings_one both provide"):
        load("ethanol")
    assert load("water").elements == [1, 8]


def test_a_plug_in_whose_file_is_missing(shipped, monkeypatch):
    entry = importlib.metadata.EntryPoint("ethanol", "not_there", potentials.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    with pytest.raises(FileNotFoundError, match=r"not_there.ethanol\.tmn"):
        load("ethanol")


# --- SMILES ------------------------------------------------------------------------------------------------------


def test_smiles_in_the_command_line(shipped, capsys):
    pytest.importorskip("rdkit", reason="SMILES need RDKit")
    assert run(capsys, "md", "water", "--smiles", "O", "--steps", "2", "--output", "s")[0] == 0
    assert sorted(read("s.xyz", 0).get_chemical_symbols()) == ["H", "H", "O"]
    code, _, err = run(capsys, "md", "water", "--smiles", "[OH-]", "--steps", "2", "--output", "t", "--charge", "1")
    assert code == 2 and "charge is -1" in err


def test_smiles_or_a_file(shipped, capsys):
    write("w.xyz", molecule("H2O"))
    for arguments in ((), ("w.xyz", "--smiles", "O")):
        code, _, err = run(capsys, "md", "water", *arguments)
        assert code == 2 and "--smiles" in err


def test_smiles_without_rdkit(shipped, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    code, _, err = run(capsys, "md", "water", "--smiles", "O")
    assert code == 1 and "torchmdnet2[smiles]" in err
