"""The cache holds what the source holds, is made again when the source changes, and never gives damaged numbers."""

import gzip
import json
import multiprocessing
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

from torchmdnet2.data import (
    LABELS,
    CachedDataset,
    ConcatDataset,
    HDF5Dataset,
    Sample,
    cache,
    cache_root,
    collate,
    open_dataset,
    write_hdf5,
)
from torchmdnet2.data.cache import build_folder, cache_folder, write_cache
from torchmdnet2.data.dataset import BLOCK, Column, ColumnWriter, expand
from torchmdnet2.data.reader import Chunk, LoadedDataset
from torchmdnet2.errors import BadData
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.neighbors.frames import EdgeMemory, search

from .frames import METHANE, make_mixture, make_sample, same
from .test_readers import some_orders

KEYS = {name: name for name in LABELS}


@pytest.fixture
def source(tmp_path):
    write_hdf5(tmp_path / "a.h5", make_mixture() + [make_sample(seed=k) for k in range(5)])
    return tmp_path / "a.h5"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches"


def cached(source, folder, keys=KEYS):
    return open_dataset(source, keys, cache=folder)


def check_equal(data, reference):
    assert len(data) == len(reference) and data.sizes().tolist() == reference.sizes().tolist()
    for k, sample in enumerate(reference):
        assert same(data[k], sample) and data[k].labels.keys() == sample.labels.keys()
        assert data.name(k) == reference.name(k)
    for order in some_orders(len(data)):
        got, expected = data.batch(order), collate([reference[i] for i in order])
        assert same(got, expected) and got.labels.keys() == expected.labels.keys()
        assert torch.equal(got.system.batch, expected.system.batch)


# --- columns ---------------------------------------------------------------------------------------------------------


def test_expand():
    assert expand(np.array([2, 7, 5]), np.array([3, 1, 0])).tolist() == [2, 3, 4, 7]
    assert expand(np.zeros(0, int), np.zeros(0, int)).tolist() == []


def test_columns_keep_rows_of_any_number_and_shape(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(30_000, 3))
    writer = ColumnWriter(tmp_path, "x", "f8", (3,))
    for part in np.split(values, [1, 1, 5, 4000, 12_345]):
        writer.append(part)
    column = Column(tmp_path, "x", json.loads(json.dumps(writer.finish())))
    assert np.array_equal(column.all(), values)
    first, count = rng.integers(0, 20_000, 50), rng.integers(0, 9_000, 50)
    column = Column(tmp_path, "x", ColumnWriterFacts(column))
    assert np.array_equal(column.ranges(first, count), values[expand(first, count)])
    with pytest.raises(ValueError, match="shape"):
        ColumnWriter(tmp_path, "y", "f8", (3,)).append(values[:, :2])


def ColumnWriterFacts(column):
    import hashlib

    sums = column.path.with_suffix(".crc").read_bytes()
    return {"dtype": "<f8", "row": [3], "rows": len(column), "crc_sha256": hashlib.sha256(sums).hexdigest()}


def test_every_block_of_a_column_is_checked(tmp_path):
    values = np.arange(40_000, dtype=np.int64)
    writer = ColumnWriter(tmp_path, "x", "i8")
    writer.append(values)
    facts = writer.finish()
    blob = bytearray((tmp_path / "x.bin").read_bytes())
    blob[3 * BLOCK + 77] ^= 4
    (tmp_path / "x.bin").write_bytes(blob)
    bad = 3 * BLOCK // 8 + 9
    column = Column(tmp_path, "x", facts)
    assert np.array_equal(column.rows(np.array([0, 20_000])), [0, 20_000])  # other blocks can be used
    for read in (
        lambda c: c.rows(np.array([1, bad])),
        lambda c: c.ranges(np.array([bad - 3]), np.array([2])),
        lambda c: c.ranges(np.array([5]), np.array([39_000])),
        lambda c: c.all(),
    ):
        with pytest.raises(BadData, match=rf"x\.bin: the cache is damaged between bytes {3 * BLOCK} and {4 * BLOCK}"):
            read(Column(tmp_path, "x", facts))


# --- any source ------------------------------------------------------------------------------------------------------


def test_hdf5(source, folder):
    data = cached(source, folder)
    assert isinstance(data, CachedDataset)
    check_equal(data, HDF5Dataset(source, KEYS))
    assert "11 frames in 6 groups" in data.summary()
    assert data.facts["labelled"] == {"energy": 10, "forces": 9, "stress": 2, "dipole": 1, "charges": 1}
    assert data.facts["elements"] == {"1": [11, 2 * 8 + 3 * 4], "6": [3, 3], "8": [8, 8]}
    assert data.facts["atoms"] == [3, 39 / 11, 5]


def test_extended_xyz_also_compressed_and_several_files(tmp_path, folder):
    text = "".join(
        f"2\nProperties=species:S:1:pos:R:3:forces:R:3 {'energy=' + str(k) if k % 3 else ''} charge={k % 2}"
        f"{' Lattice=' + chr(34) + '5 0 0 0 6 0 1 0 7' + chr(34) if k % 2 else ''}\nH 0 0 {k} 0 0 1\nO 1 0 0 0 0 -1\n"
        for k in range(9)
    )
    (tmp_path / "b.xyz").write_text(text)
    (tmp_path / "c.extxyz.gz").write_bytes(gzip.compress(text.encode()))
    paths = [tmp_path / "b.xyz", tmp_path / "c.extxyz.gz"]
    reference = open_dataset(paths)
    assert isinstance(reference, ConcatDataset)
    check_equal(open_dataset(paths, cache=folder), reference)


def test_a_key_that_is_nowhere(source, folder):
    with pytest.raises(BadData, match="no frame has 'enrgy'"):
        cached(source, folder, {"energy": "enrgy"})
    assert [path for path in folder.iterdir() if not path.name.endswith(".lock")] == []


def test_further_labels(tmp_path, folder):
    sample = make_sample()
    sample.labels["scalar:gap"] = torch.tensor([1.5], dtype=torch.float64)
    write_hdf5(tmp_path / "g.h5", [make_sample(METHANE), sample])
    keys = {"energy": "energy", "scalar:gap": "gap"}
    check_equal(cached(tmp_path / "g.h5", folder, keys), HDF5Dataset(tmp_path / "g.h5", keys))


# --- when it is made again -------------------------------------------------------------------------------------------


def made(monkeypatch):
    """Counts how many caches are made."""
    calls = []
    build = cache._build
    monkeypatch.setattr(cache, "_build", lambda *args: (calls.append(args[0]), build(*args)))
    return calls


def test_made_once_and_again_when_the_source_changes(source, folder, monkeypatch):
    calls = made(monkeypatch)
    first = cached(source, folder)[0]
    cached(source, folder)
    assert len(calls) == 1
    os.utime(source, ns=(0, 0))  # copied, say: the content decides, and is hashed only once
    cached(source, folder)
    assert len(calls) == 1
    monkeypatch.setattr(cache, "file_facts", lambda path: pytest.fail("hashed again"))
    cached(source, folder)
    monkeypatch.undo()
    calls = made(monkeypatch)
    write_hdf5(source, [make_sample(seed=100 + k, labels=list(LABELS), cell=4 * np.eye(3)) for k in range(11)])
    assert not same(cached(source, folder)[0], first) and len(calls) == 1
    blob = bytearray(source.read_bytes())
    energy = HDF5Dataset(source)[3].labels["energy"].numpy().tobytes()
    blob[blob.index(energy)] ^= 1  # same size; the new time tells it
    source.write_bytes(blob)
    with pytest.raises(BadData, match=r"a\.h5, group 'group_0000000', frame \d: dataset 'energy' is damaged"):
        cached(source, folder)


def test_other_options_have_their_own(source, folder, monkeypatch):
    calls = made(monkeypatch)
    assert cached(source, folder)[0].labels.keys() == {"energy", "forces"}
    assert cached(source, folder, {"energy": "energy"})[0].labels.keys() == {"energy"}
    cached(source, folder)
    assert len(set(calls)) == len(calls) == 2


def test_auto_is_for_large_sources(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHMDNET2_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    memory = open_dataset(source, KEYS, cache="auto")
    assert isinstance(memory, LoadedDataset)
    check_equal(memory, HDF5Dataset(source, KEYS))
    monkeypatch.setattr("torchmdnet2.data.AUTO_BYTES", 1000)
    data = open_dataset(source, KEYS, cache="auto")
    assert isinstance(data, CachedDataset) and data.folder.parent == tmp_path / "own"
    shutil.rmtree(data.folder)
    monkeypatch.setattr("torchmdnet2.data.AUTO_BYTES", source.stat().st_size + 1)
    assert isinstance(open_dataset(source, KEYS, cache="auto"), LoadedDataset)
    monkeypatch.setattr("torchmdnet2.data._on_disk", lambda paths: 0)  # a compressed file
    monkeypatch.setattr("torchmdnet2.data.AUTO_BYTES", 500)
    assert isinstance(open_dataset(source, KEYS, cache="auto"), CachedDataset)
    assert isinstance(open_dataset(source, KEYS), HDF5Dataset)
    monkeypatch.setattr("torchmdnet2.data.HDF5Dataset", None)  # the file is not looked into again
    assert isinstance(open_dataset(source, KEYS, cache="auto"), CachedDataset)


def test_a_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"the cache .* cannot be written.*data\.cache"):
        cached(source, tmp_path / "file")


def fork(function):
    """Run a function in a process of its own."""

    def on_one_thread():
        torch.set_num_threads(1)  # OpenMP's threads do not survive the fork: waiting for them would never end
        function()

    process = multiprocessing.get_context("fork").Process(target=on_one_thread)
    process.start()
    return process


def test_killed_while_it_is_made(source, folder, monkeypatch):
    """No part of a cache is ever taken for a whole one."""

    def dies():
        monkeypatch.setattr("torchmdnet2.data.cache.CacheWriter.finish", lambda *args, **facts: os._exit(9))
        open_dataset(source, cache=folder)

    process = fork(dies)
    process.join()
    assert process.exitcode == 9
    check_equal(open_dataset(source, cache=folder), HDF5Dataset(source))


def test_several_processes_at_once(source, folder):
    def makes():
        data = open_dataset(source, cache=folder)
        assert data.edges(3.0).count.sum() > 0 and same(data[7], HDF5Dataset(source)[7])

    running = [fork(makes) for _ in range(4)]
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 4
    assert len([path for path in folder.iterdir() if not path.name.startswith(".")]) == 1


# --- damage ----------------------------------------------------------------------------------------------------------


def read_everything(data):
    for k in range(len(data)):
        data[k]
    data.edges(3.0).gather(np.arange(len(data)))


def test_every_byte_of_every_file_matters(source, folder):
    data = cached(source, folder)
    data.edges(3.0)
    rng = np.random.default_rng(0)
    files = sorted(path for path in data.folder.rglob("*") if path.suffix in (".bin", ".crc", ".json"))
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        if not content:
            continue
        for place in rng.integers(0, len(content), 3):
            broken = bytearray(content)
            broken[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(broken)
            with pytest.raises(BadData) as error:
                read_everything(CachedDataset(data.folder))
            assert str(path.with_suffix("")) in str(error.value), path
        for length in (0, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(BadData, match=path.name.split(".")[0]):
                read_everything(CachedDataset(data.folder))
        path.unlink()
        if path.parent == data.folder or path.name != "index.json":  # lists that are not there are made
            with pytest.raises(BadData, match=path.name.split(".")[0]):
                read_everything(CachedDataset(data.folder))
        path.write_bytes(content)
    read_everything(CachedDataset(data.folder))


def test_a_cache_of_another_version_is_refused(source, folder):
    from torchmdnet2.data import cache as folders

    data = cached(source, folder)
    folders.write_index(data.folder, {**data.facts, "format": "torchmdnet2 cache 99"})
    with pytest.raises(BadData, match=r"index\.json: the format of this cache is 'torchmdnet2 cache 99'"):
        CachedDataset(data.folder)


def test_a_file_that_changes_while_it_is_read_is_refused(source, folder, monkeypatch):
    monkeypatch.setattr(cache, "missing_keys", lambda _: os.utime(source, (0, 0)))
    with pytest.raises(BadData, match=r"a\.h5: the file changed while it was read"):
        cached(source, folder)


def test_a_cache_has_room_for_32_labels(tmp_path):
    sample = make_sample(labels=())
    for count in (32, 33):
        labels = {f"scalar:{k}": torch.zeros(1) for k in range(count)}
        chunk = Chunk(Sample(sample.system, labels), "a", 0)
        if count == 32:
            write_cache(tmp_path / "room", [chunk])
            continue
        with pytest.raises(BadData, match="at most 32 different labels"):
            write_cache(tmp_path / "full", [chunk])


# --- neighbor lists --------------------------------------------------------------------------------------------------


def same_list(a, b):
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("edge_index", "shift", "row_ptr"))


@pytest.mark.parametrize("cutoff", [1.5, 6.0])
def test_lists_equal_a_fresh_search(source, folder, cutoff, monkeypatch):
    """Dense search of molecules, per-frame search of the rest; from memory, from files, and from neither."""
    data, periodic = cached(source, folder), {3, 4}
    files, memory, none = data.edges(cutoff), EdgeMemory(cutoff, 2**30), EdgeMemory(cutoff, 0)
    molecules = [k for k in range(len(data)) if k not in periodic]
    most = 0
    for order in [*some_orders(len(data)), molecules, molecules[::-1]]:
        frames, batch = np.array(order), data.batch(order).system
        expected = neighbor_list(batch, cutoff)
        found = [files.gather(frames), *(store.gather(frames, batch) for store in (memory, memory, none))]
        for edges in found:
            assert same_list(edges.joined(data.sizes()[frames], cutoff), expected)
            assert edges.count.tolist() == files.count[frames].tolist()
        most = max(most, int(expected.row_ptr.diff().max()))
    assert files.neighbors[2] == most and 0 <= files.neighbors[0] <= files.neighbors[1] <= most
    monkeypatch.setattr("torchmdnet2.neighbors.frames._DENSE_PAIRS", 50)
    batch = data.batch(molecules).system
    assert same_list(search(batch, cutoff).joined(data.sizes()[molecules], cutoff), neighbor_list(batch, cutoff))


def test_lists_of_another_cutoff_are_refused(source, folder):
    data = cached(source, folder)
    data.edges(3.0)
    (data.folder / "neighbors-3.0").rename(data.folder / "neighbors-4.0")
    with pytest.raises(BadData, match=r"neighbors-4\.0: these neighbor lists have the cutoff 3\.0 Å"):
        CachedDataset(data.folder).edges(4.0)


def test_it_travels_to_workers_by_its_name(source, folder):
    data = cached(source, folder)
    blob = pickle.dumps(data)
    assert len(blob) < 1000
    check_equal(pickle.loads(blob), data)
    lists = data.edges(3.0)
    assert len(pickle.dumps(lists._columns["sender"])) < 1000
    frames = np.arange(len(data))
    assert np.array_equal(pickle.loads(pickle.dumps(lists)).gather(frames).sender, lists.gather(frames).sender)


# --- size ------------------------------------------------------------------------------------------------------------


def test_writing_nothing(tmp_path):
    with pytest.raises(BadData, match="no frames"):
        write_cache(tmp_path / "x", [])
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed(tmp_path):
    for name, age in ((".made.abc", 7200), (".made.new", 0), (".made.old.xyz", 7200), (".madeup.abc", 7200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pos.bin").write_bytes(b"0" * 100)
        for path in (tmp_path / name / "pos.bin", tmp_path / name):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    with build_folder(tmp_path / "made") as aside:
        (aside / "x").write_text("x")
    assert {path.name for path in tmp_path.iterdir()} == {"made", ".made.new", ".madeup.abc"}


def test_caches_of_readers_that_gave_other_numbers_are_not_used(monkeypatch, tmp_path):
    before = cache_folder(["a.xyz"], {}, tmp_path)
    assert cache_folder(["a.xyz"], {}, tmp_path) == before
    monkeypatch.setattr("torchmdnet2.data.cache.CACHE_FORMAT", "another")
    assert cache_folder(["a.xyz"], {}, tmp_path) != before
