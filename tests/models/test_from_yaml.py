"""Delta learning and atom filters from a YAML file to a trained model; every model and property with its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from torchmdnet2 import Potential, System, load
from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig
from torchmdnet2.priors import Coulomb
from torchmdnet2.registry import HEADS, PRIORS, REPRESENTATIONS
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.config.schema import section_of

REFERENCES = {1: -13.5, 6: -1030.0, 8: -2040.0}
BASELINE = [{"name": "zbl", "cutoff": 3.0}, {"name": "d2", "cutoff": 5.0}]
MODEL = {"name": "graph_network", "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 9}


def frames(num: int, references: dict[int, float], priors: list) -> list[Atoms]:
    """Structures whose labels are reference energies and priors, and nothing for a network to learn."""
    config = {"model": {**MODEL, "hidden_channels": 2}, "head": None, "priors": priors, "elements": [1, 6, 8]}
    exact = Potential.from_config(config).double().eval()
    rng, result = np.random.default_rng(3), []
    corners = 1.25 * np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    for k in range(num):
        atoms = Atoms(rng.permutation([6, 1, 8, 1, 6])[: 3 + k % 3], corners[: 3 + k % 3])
        atoms.positions += rng.normal(0, 0.08, atoms.positions.shape)
        label = exact(System.from_ase(atoms))
        energy = float(label.energy) + sum(references[z] for z in atoms.numbers)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=label.forces.numpy())
        result.append(atoms)
    return result


def train(folder, atoms: list[Atoms], **sections) -> Potential:
    """Write the data and the YAML, train on the command line, load the model."""
    from ase.io import write

    write(folder / "data.xyz", atoms, format="extxyz")
    config = {
        "data": {"train": str(folder / "data.xyz"), "split": {"validation": 4, "test": 4}},
        "model": MODEL,
        "training": {"max_epochs": 2, "batch_size": 8, "device": "cpu", "num_threads": 1, "precision": "float64"},
        "output": {"folder": str(folder / "run"), "report": False},
        **sections,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "train.yaml")]) == 0
    return load(folder / "run" / "best.tmn")


def test_delta_learning(tmp_path):
    """The network learns what the priors leave over, which is nothing here; the trained model gives totals."""
    atoms = frames(24, REFERENCES, BASELINE)
    trained = train(tmp_path, atoms, priors=[{"name": "atomref", "energies": "fit"}, *BASELINE])
    assert [p.registered_name for p in trained.priors] == ["atomref", "zbl", "d2"]
    table = trained.priors[0].initial
    # fitted to the labels less the other priors: the references are found to all digits that the file holds
    assert {z: float(table[z]) for z in REFERENCES} == pytest.approx(REFERENCES, abs=1e-5)
    system = System.from_ase(atoms[0])
    result = trained(system)
    rest = result.atom_energies - trained.prior_energies(system)
    assert abs(float(result.energy) - atoms[0].get_potential_energy()) == pytest.approx(
        abs(float(rest.sum())), abs=1e-4
    )
    assert float(result.energy) < -1000 and float(rest.abs().max()) < 10


def test_atom_filter(tmp_path):
    """Hydrogens have no energy, no reference energy and no share in the labels' fit, but forces act on them."""
    references = {1: 0.0, 6: -1030.0, 8: -2040.0}
    atoms = frames(24, references, [])
    trained = train(tmp_path, atoms, atom_filter=1, priors=[{"name": "atomref", "energies": "fit"}])
    assert trained.atom_filter == 1
    assert {z: float(trained.priors[0].initial[z]) for z in references} == pytest.approx(references, abs=1e-5)
    result = trained(System.from_ase(atoms[1]))
    hydrogen = torch.tensor(atoms[1].numbers) == 1
    assert 0 < int(hydrogen.sum()) and not result.atom_energies[hydrogen].any()
    assert float(result.forces[hydrogen].abs().max()) > 0


@pytest.mark.parametrize("registry", [REPRESENTATIONS, HEADS, PRIORS], ids=["models", "heads", "priors"])
def test_every_argument_is_a_typed_key(registry):
    """Models, heads, properties and priors take each of their arguments from YAML, with a type and a meaning."""
    for name in registry:
        section = section_of(registry[name], leave_out=("hidden_channels",) if registry is HEADS else ())
        arguments = set(inspect.signature(registry[name]).parameters) - set(section.model_fields)
        assert arguments <= ({"hidden_channels"} if registry is HEADS else set())
        for key, field in section.model_fields.items():
            assert field.annotation is not Any, f"{name}.{key}"
            assert key == "name" or field.description, f"{name}.{key}"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"model": {"name": "tensornet2", "q_dim": "four"}}, "model.q_dim"),
        ({"model": {"name": "graph_network", "aggregation": "mul"}}, "model.aggregation"),
        ({"model": {"name": "equivariant_transformer", "vector_cutof": True}}, "did you mean 'vector_cutoff'"),
        ({"priors": [{"name": "coulomb", "method": "emd"}]}, "priors.0.method"),
        ({"priors": [{"name": "coulomb", "charges": {"Xx": 1.0}}]}, "'Xx' is not an element"),
        ({"priors": [{"name": "zbl", "envelope": 3}]}, "priors.0.envelope"),
        ({"properties": [{"name": "dipole", "equivariant": "yes please"}]}, "properties.0.equivariant"),
    ],
)
def test_wrong_arguments_are_named(section, words):
    with pytest.raises(BadConfig, match=words):
        parse_config({"data": {"train": "x"}, **section})


def test_charges_by_symbol():
    by_symbol, by_number = (Coulomb(charges) for charges in ({"Na": 1.0, "Cl": -1.0}, {11: 1.0, "17": -1.0}))
    assert torch.equal(by_symbol.table, by_number.table) and float(by_symbol.table.abs().sum()) == 2


@pytest.mark.parametrize("model", list(REPRESENTATIONS))
def test_every_model_trains_with_predicted_charges(model, tmp_path):
    """From YAML to a file: every model, with a Coulomb energy of charges that are learned from energies and forces."""
    sections: dict[str, Any] = {"model": {**MODEL, "name": model}}
    if model != "tensornet2":
        sections["properties"] = [{"name": "charges"}]
    coulomb = {"name": "coulomb", "charges": "predicted", "damping": "exp"}
    trained = train(tmp_path, frames(24, REFERENCES, BASELINE), priors=[{"name": "atomref"}, coulomb], **sections)
    result = trained(System.from_ase(frames(1, REFERENCES, [])[0]))
    assert trained.config["model"]["name"] == model and trained.priors[1].uses_charges
    assert float(result.charges.abs().max()) > 1e-6 and abs(float(result.charges.sum())) <= 1e-10
