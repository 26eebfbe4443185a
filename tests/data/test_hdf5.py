import os
import pickle
import sys
import threading

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torchmdnet2.core.stated_words import formal_charge
from torchmdnet2.data import HDF5Dataset, InMemoryDataset, collate, open_dataset, write_hdf5
from torchmdnet2.errors import BadData, MissingBackend
from torchmdnet2.units import BOHR, HARTREE

from .frames import make_mixture, make_sample, same

ALL = {name: name for name in ("energy", "forces", "stress", "dipole", "charges")}


def test_round_trip_is_exact(tmp_path):
    samples = make_mixture()
    write_hdf5(tmp_path / "a.h5", samples)
    data = HDF5Dataset(tmp_path / "a.h5", ALL)
    assert len(data) == len(samples)
    for sample, original in zip(data, samples, strict=True):
        assert same(sample, original)
        assert sample.labels.keys() == original.labels.keys()
    assert data.name(4) == f"{tmp_path / 'a.h5'}, group 'group_0000003', frame 1"
    assert os.listdir(tmp_path) == ["a.h5"]
    assert "energy in 5, forces in 4, stress in 2, dipole in 1, charges in 1" in data.summary()


def test_without_h5py(tmp_path, monkeypatch):
    """Bar R31: it is no core dependency; other formats need it not, and its absence is named with the remedy."""
    write_hdf5(tmp_path / "a.h5", [make_sample()])
    monkeypatch.setitem(sys.modules, "h5py", None)
    for needs_it in (lambda: open_dataset(tmp_path / "a.h5"), lambda: write_hdf5(tmp_path / "b.h5", [make_sample()])):
        with pytest.raises(MissingBackend, match=r"HDF5 files need h5py: pip install 'torchmdnet2\[hdf5\]'"):
            needs_it()
    assert os.listdir(tmp_path) == ["a.h5"]


def test_large_groups_are_divided(tmp_path):
    samples = [make_sample(seed=k) for k in range(23)]
    write_hdf5(tmp_path / "a.h5", iter(samples), max_group=10)
    data = HDF5Dataset(tmp_path / "a.h5")
    assert "23 frames in 3 groups" in data.summary()
    assert all(same(a, b) for a, b in zip(data, samples, strict=True))


def test_writing_is_all_or_nothing(tmp_path):
    write_hdf5(tmp_path / "a.h5", [make_sample()])
    before = (tmp_path / "a.h5").read_bytes()
    bad = make_sample()
    bad.system.pos[0, 0] = torch.nan
    with pytest.raises(BadData, match="sample 1: atom 0"):
        write_hdf5(tmp_path / "a.h5", [make_sample(seed=3), bad])
    assert (tmp_path / "a.h5").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.h5"]


def test_everything_is_checksummed_and_has_units(tmp_path):
    write_hdf5(tmp_path / "a.h5", make_mixture())
    seen = {}

    def visit(name, node):
        if isinstance(node, h5py.Dataset):
            assert node.fletcher32, name
            seen[name.split("/")[1]] = node.attrs.get("units")

    with h5py.File(tmp_path / "a.h5") as file:
        file.visititems(visit)
    assert {name for name, unit in seen.items() if unit is None} == {"types", "charge", "spin", "pbc"}
    assert seen["forces"] == b"eV/angstrom" and seen["stress"] == b"eV/angstrom^3"


# --- the layout of TorchMD-Net ---------------------------------------------------------------------------------------


def write_peer(path, num_frames=4, **extra):
    """Two molecules as TorchMD-Net has them: no units, types per atom or per frame."""
    rng = np.random.default_rng(0)
    first = {
        "types": np.array([8, 1, 1]),
        "pos": rng.normal(size=(num_frames, 3, 3)).astype(np.float32),
        "energy": -54321.0123456789 + rng.normal(size=num_frames),
        "forces": rng.normal(size=(num_frames, 3, 3)).astype(np.float32),
        **extra,
    }
    with h5py.File(path, "w") as file:
        for name, value in first.items():
            if value is not None:
                file[f"a/{name}"] = value
        file["b/types"] = np.tile(np.array([6, 1]), (2, 1))
        file["b/pos"] = rng.normal(size=(2, 2, 3))
        file["b/energy"] = rng.normal(size=(2, 1))
        file["b/partial_charges"] = rng.normal(size=(2, 2))
        file["_metadata/atomic_number"] = np.arange(10)
    return first


EV = {"energy": "eV", "length": "angstrom"}


def test_peer_layout(tmp_path):
    first = write_peer(tmp_path / "a.h5")
    data = HDF5Dataset(tmp_path / "a.h5", {"energy": "energy", "forces": "forces", "charges": "partial_charges"}, EV)
    assert len(data) == 6
    assert data[3].labels["energy"].item() == first["energy"][3]  # in float64, not to 0.004 eV
    np.testing.assert_array_equal(data[3].labels["forces"], first["forces"][3].astype(float))
    assert data[0].labels.keys() == {"energy", "forces"} and data[4].labels.keys() == {"energy", "charges"}
    assert data[4].system.z.tolist() == [6, 1] and data[4].labels["energy"].shape == (1,)
    assert "not read" not in data.summary()


def test_w19_charges_spins_and_cells_of_frames(tmp_path):
    cells = np.stack([np.eye(3) * (5 + k) for k in range(4)])
    write_peer(tmp_path / "a.h5", charge=np.array([0, 1, -1, 2]), spin=np.array([2]), box=cells)
    data = HDF5Dataset(tmp_path / "a.h5", units={"energy": "eV", "length": "nm"})
    assert [int(s.system.charge) for s in data] == [0, 1, -1, 2, 0, 0]
    assert [int(s.system.spin) for s in data] == [2, 2, 2, 2, 0, 0]
    assert [s.system.cell[0, 1, 1].item() for s in data] == [50, 60, 70, 80, 0, 0]
    assert [s.system.pbc.all().item() for s in data] == [True] * 4 + [False] * 2
    write_peer(tmp_path / "b.h5", charge=-1, cell=np.diag([5.0, 6, 0]), pbc=np.array([1, 0, 0]))
    data = HDF5Dataset(tmp_path / "b.h5", units=EV)
    assert data[2].system.charge.item() == -1
    assert data[2].system.pbc.tolist() == [[True, False, False]] and data[2].system.cell[0, 1, 1] == 6
    unread = HDF5Dataset(tmp_path / "b.h5", {"energy": "energy", "charge": None}, EV)
    assert unread[2].system.charge.item() == 0


# --- the layout of SPICE ---------------------------------------------------------------------------------------------


def write_spice(path, smiles="[NH3+:1][CH2:2]", units=True, **attributes):
    rng = np.random.default_rng(1)
    values = {
        "atomic_numbers": (np.array([7, 6], dtype=np.int16), None),
        "conformations": (rng.normal(size=(3, 2, 3)).astype(np.float32), "bohr"),
        "dft_total_energy": (-100 - rng.random(3), "hartree"),
        "dft_total_gradient": (rng.normal(size=(3, 2, 3)).astype(np.float32), "hartree/bohr"),
        "formation_energy": (-rng.random(3), "hartree"),
        "mbis_charges": (rng.normal(size=(3, 2, 1)).astype(np.float32), "elementary_charge"),
    }
    with h5py.File(path, "w") as file:
        for name, (value, unit) in values.items():
            file[f"molecule/{name}"] = value
            if units and unit:
                file[f"molecule/{name}"].attrs["units"] = attributes.get(name, unit)
        file["molecule/smiles"] = [smiles]
        file["molecule/subset"] = ["some subset"]
    return {name: value for name, (value, _) in values.items()}


def test_spice_layout(tmp_path):
    values = write_spice(tmp_path / "spice.hdf5")
    sample = HDF5Dataset(tmp_path / "spice.hdf5", {"energy": "energy", "forces": "forces"})[1]
    np.testing.assert_allclose(sample.system.pos, values["conformations"][1].astype(float) * BOHR, rtol=1e-15)
    np.testing.assert_allclose(sample.labels["energy"], values["dft_total_energy"][1:2] * HARTREE, rtol=1e-15)
    gradient = values["dft_total_gradient"][1].astype(float) * HARTREE / BOHR
    np.testing.assert_allclose(sample.labels["forces"], -gradient, rtol=1e-14)
    assert sample.system.z.tolist() == [7, 6]
    assert sample.system.charge.item() == 1  # from the SMILES


def test_charge_and_spin_under_other_names_are_listed(tmp_path):
    """In what `train` notes, and not where their names were given or are the usual ones."""
    write_spice(tmp_path / "a.h5")
    assert open_dataset(tmp_path / "a.h5").stated == {"charge": "'smiles'"}
    assert not open_dataset(tmp_path / "a.h5", {"energy": "energy", "charge": None}).stated
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["molecule/mult"] = [2, 2, 2]
        file.attrs["total_charge"] = 1
    data = open_dataset(tmp_path / "a.h5")
    assert data.stated == {"charge": "attribute 'total_charge'", "spin": "'mult'"}
    assert data.summary().endswith("; as it states: charge by attribute 'total_charge', spin by 'mult'")
    assert not open_dataset(tmp_path / "a.h5", {"charge": None, "spin": "mult"}).stated
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["molecule/charge"], file["molecule/spin"] = [1, 1, 1], file["molecule/mult"]
        del file["molecule/mult"]
    assert not open_dataset(tmp_path / "a.h5").stated


def test_spice_other_datasets(tmp_path):
    values = write_spice(tmp_path / "a.h5", mbis_charges="e")
    data = HDF5Dataset(tmp_path / "a.h5", {"energy": "formation_energy", "charges": "charges", "charge": None})
    assert data[2].labels["energy"].item() == values["formation_energy"][2] * HARTREE
    np.testing.assert_array_equal(data[2].labels["charges"], values["mbis_charges"][2, :, 0].astype(float))
    assert data[2].system.charge.item() == 0
    explicit = HDF5Dataset(tmp_path / "a.h5", {"forces": "dft_total_gradient"})[2]
    assert torch.equal(explicit.labels["forces"], HDF5Dataset(tmp_path / "a.h5")[2].labels["forces"])
    assert "not read: formation_energy, mbis_charges, subset" in HDF5Dataset(tmp_path / "a.h5").summary()


def test_gradient_is_the_slope_of_the_energy(tmp_path):
    """Hooke's law in hartree and bohr: forces as read must be minus the slope of energies as read."""
    r, step = np.array([2.0, 2.0 + 1e-3]), 1e-3
    pos = np.zeros((2, 2, 3))
    pos[:, 1, 0] = r
    slope = np.zeros((2, 2, 3))
    slope[:, 1, 0], slope[:, 0, 0] = 0.7 * (r - 1.5), -0.7 * (r - 1.5)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value, unit in (
            ("conformations", pos, "bohr"),
            ("dft_total_energy", 0.35 * (r - 1.5) ** 2, "hartree"),
            ("dft_total_gradient", slope, "hartree/bohr"),
        ):
            file[f"m/{name}"] = value
            file[f"m/{name}"].attrs["units"] = np.bytes_(unit)
        file["m/atomic_numbers"] = [1, 1]
    a, b = HDF5Dataset(tmp_path / "a.h5")
    moved = b.system.pos[1, 0] - a.system.pos[1, 0]
    assert moved.item() == pytest.approx(step * BOHR)
    force = -(b.labels["energy"] - a.labels["energy"]) / moved
    mean = (a.labels["forces"][1, 0] + b.labels["forces"][1, 0]) / 2
    torch.testing.assert_close(force[0], mean, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("smiles", "charge"),
    [
        ("CCO", 0),
        ("[NH3+]CC(=O)[O-]", 0),
        ("[Ca+2]", 2),
        ("[Fe++]", 2),
        ("[O-:3][S:1](=[O:2])(=[O:4])[O-:5]", -2),
        ("[H:1][C@@:2]([N+:3])[13CH2-:4].[Cl-:5]", -1),
        ("C-C=C", 0),
    ],
)
def test_formal_charges(smiles, charge):
    assert formal_charge(smiles) == charge


# --- many readers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "many.h5"
    write_hdf5(path, [make_sample(seed=k) for k in range(60)], max_group=7)
    return path


def test_pickles_while_open(many):
    data = HDF5Dataset(many)
    first = data[0]
    assert data._file is not None
    copy = pickle.loads(pickle.dumps(data))
    assert copy._file is None and same(copy[0], first)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_the_same(many, method):
    data = HDF5Dataset(many)
    batches = [list(range(k, 60, 6)) for k in range(6)]
    alone = [collate([data[i] for i in batch]) for batch in batches]  # opens the file before the workers start
    loader = DataLoader(
        data, batch_sampler=batches, collate_fn=collate, num_workers=2, multiprocessing_context=method, timeout=100
    )
    shared = list(loader)
    assert len(shared) == 6 and all(same(a, b) for a, b in zip(alone, shared, strict=True))
    assert same(data[59], make_sample(seed=59))  # and the handle here still works


def test_workers_read_the_same_from_memory(many):
    data = InMemoryDataset(list(HDF5Dataset(many)))
    batches = [list(range(k, 60, 6)) for k in range(6)]
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=2, timeout=100)
    assert all(same(collate([data[i] for i in b]), got) for b, got in zip(batches, loader, strict=True))


def test_a_handle_is_not_shared_with_a_forked_process(many):
    data = HDF5Dataset(many)
    assert same(data[0], make_sample(seed=0))
    parent = data._file
    data._pid = -2  # as after a fork
    assert same(data[1], make_sample(seed=1))
    assert not parent and data._file is not parent and data._pid == os.getpid()


def test_threads_read_the_same(many):
    data = HDF5Dataset(many)
    wrong = []

    def read(offset):
        wrong.extend(i for k in range(60) if not same(data[i := (k + offset) % 60], make_sample(seed=i)))

    threads = [threading.Thread(target=read, args=(13 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
