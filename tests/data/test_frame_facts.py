"""Statistics are the same whatever the source, and those of a cache are found once."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from torchmdnet2.data import CachedDataset, InMemoryDataset, Sample, collate, open_dataset, statistics, write_hdf5
from torchmdnet2.data.dataset import FrameFacts, structure_keys
from torchmdnet2.errors import BadData
from torchmdnet2.system import System

from .frames import METHANE, make_mixture, make_sample

KEYS = {name: name for name in ("energy", "forces", "stress", "dipole", "charges")}


@pytest.fixture
def samples():
    frames = make_mixture() + [make_sample(METHANE if k % 3 else (8, 1, 1), seed=k) for k in range(30)]
    frames[0].labels["forces"][:] = math.nan
    frames[2].labels["forces"][1] = math.nan
    return frames


@pytest.fixture
def cache(samples, tmp_path):
    write_hdf5(tmp_path / "a.h5", samples)
    return open_dataset(tmp_path / "a.h5", KEYS, cache=tmp_path / "caches")


def check_equal(found, expected):
    for field in dataclasses.fields(found):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        assert np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b, field.name


@pytest.mark.parametrize("chosen", [None, [5], list(range(20, 3, -1)), [0, 0, 7]])
def test_a_cache_says_what_its_frames_say(cache, chosen):
    plain = InMemoryDataset(list(cache))
    for _ in range(2):  # found, and read again
        check_equal(statistics(cache, chosen), statistics(plain, chosen))


def test_they_are_found_once(cache, monkeypatch):
    statistics(cache)
    monkeypatch.setattr(CachedDataset, "batch", lambda *_: pytest.fail("frames were read again"))
    assert statistics(CachedDataset(cache.folder), range(5)).num_frames == 5


def test_few_frames_do_not_make_all_of_them_be_read(cache):
    statistics(cache, [3])
    assert not (cache.folder / "statistics").exists()
    statistics(cache, range(9))
    assert (cache.folder / "statistics" / "index.json").is_file()


def test_other_names_and_fewer_labels(cache):
    fewer = statistics(cache.with_labels({"charges": "charges", "dipole": "vector:mu"}))
    assert fewer.labelled.keys() == {"charges", "vector:mu"} and fewer.force_rms is None
    assert np.isnan(fewer.energies).all()
    whole = statistics(cache)
    assert whole.labelled["dipole"] == fewer.labelled["vector:mu"] and whole.force_rms is not None


def test_a_folder_that_cannot_be_written(cache, samples, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr("torchmdnet2.data.cache.write_facts", refuse)
    assert statistics(cache).num_frames == len(samples)


def test_damage_is_named(cache):
    statistics(cache)
    path = cache.folder / "statistics" / "counts.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"counts\.bin"):
        statistics(cache)


def test_the_same_structure_has_the_same_key():
    one, other = make_sample(seed=1), make_sample(METHANE, seed=2)
    batch = collate([one, other, one, Sample(one.system.replace(pos=one.system.pos + 1e-7))])
    keys = structure_keys(batch)
    assert keys[0] == keys[2] != keys[1]
    assert structure_keys(collate([other, one]))[1] == keys[0]  # wherever it stands


def test_any_change_changes_the_key():
    water = make_sample(seed=1).system
    swapped = torch.tensor([0, 2, 1])
    cell = torch.eye(3, dtype=torch.float64)[None] * 9
    others = [
        water,
        water.replace(pos=water.pos + torch.tensor([2e-5, 0, 0])),
        water.replace(pos=water.pos[swapped]),
        water.replace(pos=-water.pos),
        water.replace(z=torch.tensor([16, 1, 1])),
        water.replace(charge=torch.ones(1)),
        water.replace(spin=torch.ones(1, dtype=torch.long)),
        water.replace(cell=cell),
        water.replace(cell=cell, pbc=torch.tensor([[True, True, False]])),
        System(z=water.z[:2], pos=water.pos[:2]),
    ]
    keys = structure_keys(collate([Sample(system) for system in others]))
    assert len(np.unique(keys)) == len(others)


def test_random_structures_have_keys_of_their_own():
    pos = torch.arange(3 * 60_000).reshape(-1, 3) * 1e-5  # as near to each other as can be told apart
    system = System(z=torch.ones(60_000, dtype=torch.long), pos=pos.double(), batch=torch.arange(60_000))
    keys = structure_keys(Sample(system))
    assert len(np.unique(keys)) == 60_000
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(0)
    assert abs(bits - 0.5).max() < 0.02


def test_parts_are_joined(samples):
    data = InMemoryDataset(samples)
    parts = [data.facts_of(np.arange(k, k + 6)) for k in range(0, 36, 6)]
    joined, whole = FrameFacts.joined(parts), data.facts_of(np.arange(36))
    assert np.array_equal(joined.counts, whole.counts) and joined.labelled.keys() == whole.labelled.keys()
    assert np.array_equal(joined.keys, whole.keys) and np.array_equal(joined.force_square, whole.force_square)
