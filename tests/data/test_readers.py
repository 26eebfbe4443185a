"""Reading many frames at a time gives what reading them one by one gives; packed batches equal collated ones."""

import h5py
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import write

from torchmdnet2.data import (
    AseDataset,
    ConcatDataset,
    HDF5Dataset,
    InMemoryDataset,
    Subset,
    collate,
    file_readers,
    write_hdf5,
)
from torchmdnet2.data.ase_formats import ExtxyzReader
from torchmdnet2.data.check import check_batch
from torchmdnet2.data.dataset import select
from torchmdnet2.errors import BadData

from .frames import make_mixture, make_sample, same
from .test_hdf5 import ALL, write_peer, write_spice
from .test_peer_formats import write_ace

EV = {"energy": "eV", "length": "angstrom"}


def check_chunks(data):
    """Chunks hold all frames in order, under their names, bit for bit; returns how many chunks there were."""
    k = chunks = 0
    for chunk in data.chunks():
        chunks += 1
        for b in range(chunk.sample.system.num_systems):
            got, expected = select(chunk.sample, np.array([b])), data[k]
            assert same(got, expected) and got.labels.keys() == expected.labels.keys()
            assert f"{chunk.where}, frame {chunk.first + b}" == data.name(k)
            k += 1
    assert k == len(data)
    return chunks


def test_hdf5_chunks(tmp_path, monkeypatch):
    write_hdf5(tmp_path / "a.h5", make_mixture() + [make_sample(seed=k, charge=k % 3 - 1.0) for k in range(10)])
    assert check_chunks(HDF5Dataset(tmp_path / "a.h5", ALL)) == 6
    monkeypatch.setattr("torchmdnet2.data.hdf5._CHUNK_FRAMES", 4)
    assert check_chunks(HDF5Dataset(tmp_path / "a.h5", ALL)) == 8
    write_peer(tmp_path / "b.h5", charge=np.array([0, 1, -1, 2]), spin=np.array([2]), box=np.eye(3) * 5)
    assert check_chunks(HDF5Dataset(tmp_path / "b.h5", units=EV)) == 2
    write_spice(tmp_path / "c.h5")
    check_chunks(HDF5Dataset(tmp_path / "c.h5", ALL | {"stress": None, "dipole": None}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": np.array([8])}, "frame 0: there are 3 positions, but the atomic numbers"),
        ({"energy": np.array([0, 1, -np.inf, 3])}, "group 'a', frame 2: energy is infinite"),
        ({"charge": np.array([0, 0.5, 0, 0])}, "group 'a', frame 1: charge must be a whole number"),
        ({"forces": np.zeros((4, 3, 3)).reshape(4, 9)}, "group 'a', frame 0: forces has the shape"),
        ({"pos": np.where(np.arange(36).reshape(4, 3, 3) == 20, np.nan, 1)}, "group 'a', frame 2: atom 0: its pos"),
        ({"cell": np.full((3, 3), np.nan)}, "group 'a', frame 0: structure 0: its cell is not finite"),
    ],
)
def test_chunks_name_what_is_wrong(tmp_path, change, message):
    write_peer(tmp_path / "a.h5", **change)
    with pytest.raises(BadData, match=message):
        list(HDF5Dataset(tmp_path / "a.h5", units=EV).chunks())


@pytest.mark.parametrize("kind", ["xyz", "h5", "npz", "npy", "ace 1.0", "ace 2.0"])
def test_a_frame_that_cannot_be_used_is_left_out(tmp_path, kind):
    """In every format, with a line that names it; all others are there, under their numbers."""
    pos, energy = np.random.default_rng(0).normal(size=(6, 3, 3)), np.arange(6.0)
    pos[3, 1, 0] = np.nan
    z, path = np.array([8, 1, 1]), tmp_path / f"a.{kind[:3]}"
    if kind == "xyz":
        for place, value in zip(pos, energy, strict=True):
            write(path, Atoms(z, place, info={"energy": value}), append=True, format="extxyz")
    elif kind == "h5":
        write_peer(path, types=z, pos=pos, energy=energy, forces=np.zeros_like(pos))
    elif kind == "npz":
        np.savez(path, z=z, R=pos, E=energy)
    elif kind == "npy":
        for name, values in {"pos": pos, "z": z, "energy": energy}.items():
            np.save(tmp_path / f"{name}.npy", values)
    else:
        path = tmp_path / "a.h5"
        write_ace(path, kind[4:], 6)
        with h5py.File(path, "r+") as file:
            (file["NH4/conformations/c3"] if kind == "ace 1.0" else file["master/NH4"])["positions"][
                (..., 0) if kind == "ace 1.0" else 3
            ] = np.nan
    path = tmp_path / "pos.npy" if kind == "npy" else path
    keys = {"energy": "E" if kind == "npz" else "energy"}
    if kind == "npy":
        keys = {name: str(tmp_path / f"{file}.npy") for name, file in (("energy", "energy"), ("numbers", "z"))}
    (reader,) = file_readers([str(path)], keys, {} if "ace" in kind else EV)
    lines = []
    with pytest.raises(BadData, match="frame 3"):
        list(reader.chunks())
    reader.leave_out = lines.append
    names = [name for chunk in reader.chunks() for name in chunk.names]
    assert [int(name[-1]) for name in names if "group 'b'" not in name] == [0, 1, 2, 4, 5]
    assert len(lines) == 1 and "frame 3" in lines[0] and "not finite" in lines[0]


def test_a_flipped_byte_is_named_by_chunks_too(tmp_path):
    write_hdf5(tmp_path / "a.h5", [make_sample(seed=k) for k in range(3)])
    data = HDF5Dataset(tmp_path / "a.h5")
    pos = data[1].system.pos.numpy().tobytes()
    del data  # which has the file open, and this part of it in memory
    blob = bytearray((tmp_path / "a.h5").read_bytes())
    blob[blob.index(pos) + 5] ^= 1
    (tmp_path / "a.h5").write_bytes(blob)
    with pytest.raises(BadData, match=r"group 'group_0000000', frame \d: dataset 'pos' is damaged"):
        list(HDF5Dataset(tmp_path / "a.h5").chunks())


def test_ase_chunks_are_cut_where_labels_change(tmp_path):
    lines = [f"1\nProperties=species:S:1:pos:R:3{' energy=' + str(k) if k % 5 else ''}\nH 0 0 {k}\n" for k in range(9)]
    (tmp_path / "a.xyz").write_text("".join(lines))
    data, reader = AseDataset(tmp_path / "a.xyz"), ExtxyzReader(tmp_path / "a.xyz")
    sizes = [chunk.sample.system.num_systems for chunk in reader.chunks()]
    assert sizes == [1, 4, 1, 3]
    assert reader.summary() == data.summary() and "9 frames; energy in 7" in data.summary()
    data.chunks = reader.chunks
    check_chunks(data)


def test_check_batch_finds_the_frame():
    samples = [make_sample(seed=k) for k in range(5)]
    check_batch(collate(samples), "there")
    samples[3].system.z[1] = 200
    with pytest.raises(BadData, match="there, frame 13: the atomic number of atom 1 is 200"):
        check_batch(collate(samples), "there", 10)


def some_orders(n):
    rng = np.random.default_rng(0)
    return [[0], [n - 1, 0], list(range(n)), rng.permutation(n).tolist(), rng.integers(0, n, 2 * n).tolist()]


def test_batches_of_every_kind_of_data_set_equal_collated_samples(tmp_path):
    samples = make_mixture()
    write_hdf5(tmp_path / "a.h5", samples)
    memory, file = InMemoryDataset(samples), HDF5Dataset(tmp_path / "a.h5", ALL)
    both = ConcatDataset([memory, file, InMemoryDataset(samples[:2])])
    for data in (memory, file, both, Subset(both, [13, 2, 7, 5, 0])):
        assert data.sizes().tolist() == [sample.system.num_atoms for sample in data]
        for order in some_orders(len(data)):
            got, expected = data.batch(order), collate([data[i] for i in order])
            assert same(got, expected) and got.labels.keys() == expected.labels.keys(), order
            assert torch.equal(got.system.batch, expected.system.batch)


def test_datasets_are_closed_when_their_group_is_done(tmp_path):
    """HDF5 keeps chunks of every open one: reading a file would take as much memory as it is large."""
    write_hdf5(tmp_path / "a.h5", make_mixture())
    data, most = HDF5Dataset(tmp_path / "a.h5"), 0
    for chunk in data.chunks():
        assert {name.split("/")[0] for name in data._handles} <= {chunk.where.split("'")[1]}
        most = max(most, len(data._handles))
    assert most > 3 and not data._handles


def test_h5_files_of_the_reader_stay_closed_for_others(tmp_path):
    write_hdf5(tmp_path / "a.h5", make_mixture())
    next(HDF5Dataset(tmp_path / "a.h5").chunks())
    with h5py.File(tmp_path / "a.h5") as file:
        assert len(file) == 5
