"""Reading many frames at a time gives what reading them one by one gives; packed batches equal collated ones."""

import gzip
import pickle
import random
import warnings

import h5py
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import write

from torchmdnet2.core import files
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
from torchmdnet2.data.labels import CONFIG_TYPE
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


_COLUMNS = "Properties=species:S:1:pos:R:3"
_ONE, _TWO = "H 0.0 0.0 1.0\n", "O 0.0 0.0 0.5\nC 1.5 -2.0 1e0\n"
WHOLE = [
    *[
        f"2\n{_COLUMNS}:forces:R:3 energy={k}.5\nO 0.0 0.1 0.{k} 1.0 2.0 3.0\nH 1.0 2.0 0.{k} 4.0 5.0 6.0\n"
        for k in range(9)
    ],
    f"1\n{_COLUMNS} energy=-1 config_type=a\n{_ONE}",
    f"1\n{_COLUMNS} energy=-1 config_type=b free_energy=-2.5\n{_ONE}",
    f"1\n{_COLUMNS} energy=-1 config_type=c free_energy=-3 Energies=2\n{_ONE}",
    f"2\n{_COLUMNS} charge=1 spin=2\n{_TWO}",
    f"2\n{_COLUMNS} Charge_total=1 converged=F\r\n{_TWO}",
    f"2\n{_COLUMNS}:initial_charges:R:1 scf_converged=F Energy=3\nO 0.0 0.0 0.0 0.5\nC 1.0 0.0 0.0 -1.5\n",
    f"2\n{_COLUMNS} energy=-1 energy_unit=hartree pos_unit=bohr\n{_TWO}",
    f'1\n{_COLUMNS} Lattice="1 0 0 0 1 0 0 0 1"\n{_ONE}',
    f'1\n{_COLUMNS} Lattice="9 0 0 0 8 0 0 0 7" stress="1 0 0 0 1 0 0 0 1"\n{_ONE}',
    f"2\nnet_charge 1 cell: 8 8 8 °\n{_TWO}",
    "2\n\nC 0.0 0.0 0.0\nC 0.0 0.0 1.5\n",
    "\n",
    " \r\n",
]
DAMAGED = [
    f"2\n{_COLUMNS} energy=x\n{_TWO}",
    f"2\n{_COLUMNS} energy=1\nO 0.0 0.0 0.5.5\nC 1.0 0.0 0.0\n",
    f"2\n{_COLUMNS} energy=1\nO 0.0 0.0 0.5\nXx 1.0 0.0 0.0\n",
    f"2\n{_COLUMNS}:forces:R:3 energy=1\nO 0.0 0.0 0.5\nH 1.0 0.0 0.0\n",
    f"2\n{_COLUMNS} charge=1 total_charge=2\n{_TWO}",
    f"2\n{_COLUMNS} energy_unit=furlong energy=1\n{_TWO}",
    f"0\n{_COLUMNS}\n",
]
UNCLEAR = [
    "2\nof ADF, energy=1\nH 0.0 0.0 0.0\nH 0.0 0.0 1.0\nVEC1 1 2 3\nVEC2 4 5 7\n",
    "2\nwhole numbers\nH 0 0 0\nH 0 0 1\n",
    f"3\n{_COLUMNS} energy=1\n{_TWO}",
    f"3\n{_COLUMNS} energy=1\n{_TWO}2\n\n{_TWO}",
    f"1\n{_COLUMNS} energy=1\n{_TWO}",
    f"2\n{_COLUMNS} energy=1\r{_TWO}",
    "junk\n",
    "9" * 12 + "\n",
    "²\n",
    "9" * 5000 + "\n",
    "\ufeff1\n\n" + _ONE,
    "99\n\n" + _ONE,
]


def reading(path, size=None, keys=None, tolerant=True):
    """Return all that reading a file finds, in one go, or by parts of a size as other processes read them."""
    reader, lines, frames, error = ExtxyzReader(path, keys), [], [], ""
    reader.leave_out = lines.append if tolerant else None
    portable = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for part in [reader] if size is None else reader.parts(size):
                own = pickle.loads(pickle.dumps(part)) if part.portable else part
                for chunk in own.chunks():
                    frames += [(select(chunk.sample, np.array([k])), name) for k, name in enumerate(chunk.names)]
                reader.absorb(pickle.loads(pickle.dumps(own)) if part.portable else own)
                portable += part.portable
            reader.require_keys()
        except BadData as failure:
            error = str(failure)
    found = {
        "lines": lines, "error": error, "names": [name for _, name in frames],
        "warnings": list(dict.fromkeys(str(one.message) for one in caught)),
    }  # fmt: skip
    if not error:
        found |= {
            "facts": (
                reader.num_frames,
                frames and reader.fraction,
                reader.counts,
                reader.available,
                [*reader.stated.items()],
            ),
            "more": ([*reader.doubts], [*reader.kinds], reader.summary(), reader.unread()),
        }
    return found, [sample for sample, _ in frames], portable


@pytest.mark.parametrize("pieces", [WHOLE, WHOLE + DAMAGED, WHOLE * 3 + DAMAGED + UNCLEAR])
def test_parts_are_the_frames_of_a_file(tmp_path, monkeypatch, pieces):
    """Content, names, errors, warnings and what a reader knows at the end, however a file is cut."""
    draw, portable = random.Random(1), 0
    monkeypatch.setattr("torchmdnet2.data.ase_formats._MOST_KINDS", 2)
    for _ in range(60):
        text = draw.choice(["", "", "\ufeff"]) + "".join(draw.choices(pieces, k=draw.randrange(20)))
        blob = text.encode()[: -draw.choice([1, 5, 9]) if draw.random() < 0.3 else None]
        name = draw.choice(["a.xyz", "a.extxyz", "a.xyz.gz"])
        cut = draw.random() < 0.3
        (tmp_path / name).write_bytes(gzip.compress(blob)[: -9 if cut else None] if name.endswith("gz") else blob)
        monkeypatch.setattr(files, "_READ", draw.choice([7, 50, 300, 2**24]))
        monkeypatch.setattr("torchmdnet2.data.ase_formats._PART", draw.choice([100, 2**22]))
        keys = draw.choice(
            [None, {"energy": "energy"}, {"energy": "energy", CONFIG_TYPE: "config_type"}, {"energy": "free_energy"}]
        )
        expected, samples, _ = reading(tmp_path / name, keys=keys)
        got, found, own = reading(tmp_path / name, draw.choice([1, 2, 3, 100]), keys)
        portable, failures = portable + own, {*got["lines"], got["error"]}
        if expected["error"]:  # in one go, the last frames before it are neither given nor checked
            found = found[: len(samples)]
            got |= {name: got[name][: len(expected[name])] for name in ("names", "lines")}
        assert got == expected
        for a, b in zip(found, samples, strict=True):
            assert same(a, b) and a.labels.keys() == b.labels.keys()
        strict = [reading(tmp_path / name, size, keys, tolerant=False) for size in (None, draw.choice([1, 2, 3, 100]))]
        errors = [found["error"] for found, _, _ in strict]
        assert errors == [""] * 2 or {*errors} <= failures
    assert portable > 40


@pytest.mark.parametrize("charge", ["0", "1"])
def test_files_beside_hold_for_all_parts(tmp_path, charge):
    text = f"2\n{_COLUMNS} energy=1\n{_TWO}"
    (tmp_path / "a.xyz").write_text(text * 5 + f"1\n{_COLUMNS} energy=1\n{_ONE}" + text)
    (tmp_path / ".CHRG").write_text(charge)
    expected, samples, _ = reading(tmp_path / "a.xyz")
    got, found, _ = reading(tmp_path / "a.xyz", 2)
    assert got == expected and all(map(same, found, samples)) and len(found) == len(samples)
    assert len(samples) == 7 if charge == "0" else "different atoms" in expected["error"]


def test_other_formats_are_their_only_part(tmp_path):
    write(tmp_path / "a.traj", [Atoms("H", [[0, 0, k]]) for k in range(5)])
    (reader,) = file_readers([str(tmp_path / "a.traj")], None, None)
    (part,) = reader.parts(2)
    assert part is reader and not part.portable and sum(len(chunk.names) for chunk in part.chunks()) == 5
    reader.absorb(part)
    assert reader.num_frames == 5


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
