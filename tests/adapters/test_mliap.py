"""The file for `pair_style mliap unified`, on data whose exchange copies the owners of periodic images."""

from __future__ import annotations

import pickletools
import zipfile

import numpy as np
import pytest
import torch
from lammps_cases import PRISM, scattered

from torchmdnet2 import Potential, System, load
from torchmdnet2.adapters.mliap import MliapModel, export_mliap
from torchmdnet2.checkpoint import save, to_bytes
from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig, UnknownElement
from torchmdnet2.units import KCAL_MOL


def make(**config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 2, "num_rbf": 8, "cutoff": 3.5}
        model.update(config.pop("model", {}))
        config = {"model": model, "elements": [1, 6, 8], "total_charges": [0, 1], **config}
        return Potential.from_config(config).double().eval()


class Data:
    """What ML-IAP shows: local atoms and images, with edges of the local ones."""

    def __init__(self, atoms, elements, cutoff):
        n, cell = len(atoms), atoms.cell.array
        shifts = [s for s in np.ndindex(5, 5, 5) if s != (2, 2, 2)]
        images = np.concatenate([atoms.positions + (np.array(s) - 2) @ cell for s in shifts])
        owner = np.tile(np.arange(n), len(shifts))
        near = np.linalg.norm(images[:, None] - atoms.positions, axis=2).min(1, initial=np.inf) < cutoff
        self.owner = owner[near]
        pos = np.concatenate([atoms.positions, images[near]])
        vectors = pos[None] - atoms.positions[:, None]
        listed = np.linalg.norm(vectors, axis=2) < cutoff
        listed[range(n), range(n)] = False
        pair = np.argwhere(listed).astype(np.int32)
        self.nlocal, self.ntotal, self.npairs = n, len(pos), len(pair)
        self.pair_i, self.pair_j, self.rij = pair[:, 0].copy(), pair[:, 1].copy(), vectors[listed]
        symbols = np.array([elements.index(s) for s in atoms.get_chemical_symbols()], dtype=np.int32)
        self.elems = np.concatenate([symbols, symbols[self.owner]])
        self.eatoms, self.energy, self.forces, self.virial = np.zeros(n), None, np.zeros((n, 3)), np.zeros((3, 3))
        self.exchanges = 0

    def forward_exchange(self, given, taken, width):
        assert given.shape == taken.shape == (self.ntotal, width)
        self.exchanges += 1
        taken.copy_(given)
        taken[self.nlocal :] = given[torch.from_numpy(self.owner)]

    def reverse_exchange(self, given, taken, width):
        self.exchanges += 1
        taken.copy_(given)
        taken.index_add_(0, torch.from_numpy(self.owner), given[self.nlocal :])

    def update_pair_forces(self, pairs):
        everyone = np.zeros((self.ntotal, 3))
        np.add.at(everyone, self.pair_i, pairs)
        np.add.at(everyone, self.pair_j, -pairs)
        self.forces = everyone[: self.nlocal].copy()
        np.add.at(self.forces, self.owner, everyone[self.nlocal :])
        self.virial = self.rij.T @ pairs


@pytest.mark.parametrize(("units", "charge"), [("metal", 0.0), ("real", 1.0)])
def test_exported_file_gives_the_potential(tmp_path, units, charge):
    potential, elements = make(priors=[{"name": "zbl", "cutoff": 4.0}]), ["O", "H", "C"]
    export_mliap(potential, tmp_path / "model.pt", elements, charge, units, host=True)
    model = torch.load(tmp_path / "model.pt", weights_only=False)  # as LAMMPS does
    assert (model.element_types, model.rcutfac, model.ndescriptors, model.nparams) == (elements, 2.0, 1, 1)
    atoms = scattered(14, PRISM, True, 1)
    data = Data(atoms, elements, 4.0)
    model.compute_forces(data)
    atoms.info["charge"] = charge
    expected, unit = potential(System.from_ase(atoms), stress=True), KCAL_MOL if units == "real" else 1.0
    np.testing.assert_allclose(data.forces * unit, expected.forces.numpy(), rtol=0, atol=1e-10)
    np.testing.assert_allclose(data.eatoms * unit, expected.atom_energies.numpy(), rtol=0, atol=1e-10)
    assert data.energy * unit == pytest.approx(float(expected.energy), abs=1e-9)
    stress = (data.virial + data.virial.T) / 2 / atoms.cell.volume * unit
    np.testing.assert_allclose(stress, expected.stress[0].numpy(), rtol=0, atol=1e-10)
    assert data.exchanges == 4 and np.abs(data.forces).max() > 0.1


def test_a_process_without_atoms_takes_part_in_all_exchanges():
    model, none = MliapModel(to_bytes(make()), ("H", "C", "O"), 0.0, "metal", True), scattered(0, PRISM, True, 1)
    data = Data(none, ["H", "C", "O"], 3.5)
    model.compute_forces(data)
    assert data.exchanges == 4 and data.energy == 0


def test_the_file_holds_one_class_and_plain_data(tmp_path):
    export_mliap(make(), tmp_path / "model.pt", ["H", "C", "O"])
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
        found = list(pickletools.genops(archive.read(name)))
    words = [argument for operation, argument, _ in found if operation.name.endswith("BINUNICODE")]
    assert words == ["torchmdnet2.adapters.mliap", "MliapModel", "H", "C", "O", "metal"]
    names = [operation.name for operation, _, _ in found]
    assert names.count("STACK_GLOBAL") == names.count("REDUCE") == 1
    assert not {"GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "BINPERSID"} & set(names)


def test_what_cannot_be_is_refused():
    blob, elements = to_bytes(make()), ("H", "C", "O")
    data = Data(scattered(5, PRISM, True, 1), list(elements), 3.5)
    with pytest.raises(RuntimeError, match="LAMMPS runs on the CPU"):
        MliapModel(blob, elements, 0.0, "metal", False).compute_forces(data)
    with pytest.raises(RuntimeError, match="has no exchange for ML-IAP"):
        MliapModel(blob, elements, 0.0, "metal", True).compute_forces(object())
    with pytest.raises(BadConfig, match="metal or real"):
        MliapModel(blob, elements, 0.0, "lj", True)
    with pytest.raises(BadConfig, match="'Q' is not an element"):
        MliapModel(blob, ("Q",), 0.0, "metal", True)
    with pytest.raises(UnknownElement, match="is N"):
        MliapModel(blob, ("N",), 0.0, "metal", True)
    with pytest.raises(ValueError, match="the total charge 2"):
        MliapModel(blob, elements, 2.0, "metal", True)
    with pytest.raises(ValueError, match="takes a mean"):
        MliapModel(to_bytes(make(head={"name": "scalar", "reduce": "mean"})), elements, 0.0, "metal", True)


def test_command(tmp_path, capsys):
    save(make(), tmp_path / "model.tmn")
    paths = [str(tmp_path / "model.tmn"), str(tmp_path / "model.pt")]
    assert main(["export", *paths, "--to", "lammps", "--elements", "H,O"]) == 0
    assert "pair_style mliap unified" in capsys.readouterr().out
    model = torch.load(paths[1], weights_only=False)
    assert model.element_types == ["H", "O"]
    for key, value in load(paths[0]).state_dict().items():
        torch.testing.assert_close(model._potential.state_dict()[key], value)
    assert main(["export", *paths, "--to", "lammps"]) == 2
    assert "--elements" in capsys.readouterr().err
    assert main(["export", *paths, "--elements", "H"]) == 2
    assert "--to lammps" in capsys.readouterr().err
