import json

import numpy as np
import pytest

from torchmdnet2.data import ConcatDataset, InMemoryDataset, make_splits, read_splits, splits_entry
from torchmdnet2.errors import BadData

from .frames import make_sample


def sizes(splits):
    return tuple(len(splits[name]) for name in ("train", "validation", "test"))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((80, 10, 10), (80, 10, 10)),
        ((None, 0.1, 5), (85, 10, 5)),
        ((0.8, 0.1, None), (80, 10, 10)),
        ((50, 0.1, 0), (50, 10, 0)),
        ((0.5, 0.25, 0.25), (50, 25, 25)),
        ((0.7, 0.2, 0.1), (70, 20, 10)),  # 0.7·100 is not exactly 70 in binary
        ((1, 0, 0), (1, 0, 0)),
        ((1.0, 0, 0), (100, 0, 0)),
    ],
)
def test_sizes(asked, expected):
    splits = make_splits(100, *asked, seed=3)
    assert sizes(splits) == expected
    together = [i for part in splits.values() for i in part]
    assert len(set(together)) == len(together) and set(together) <= set(range(100))
    assert all(part == sorted(part) for part in splits.values())


def test_fractions_that_round_lose_no_frame():
    assert sizes(make_splits(11, 0.5, 0.25, 0.25)) == (7, 2, 2)


def test_the_seed_decides():
    first = make_splits(1000, None, 0.1, 0.1, seed=1)
    assert first == make_splits(1000, None, 0.1, 0.1, seed=1)
    assert first != make_splits(1000, None, 0.1, 0.1, seed=2)
    assert first["test"] != list(range(900, 1000))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((None, None, 5), "only one of the sizes can be None .* train and validation"),
        ((90, 10, 10), "100 frames are not enough for train = 90, validation = 10, test = 10"),
        ((0.9, 0.1, 0.1), "not enough"),
        ((1.5, 0, 0), "train = 1.5 is not a fraction"),
        ((-1, 0, 0), "train must not be negative, got -1"),
        ((10, float("nan"), 0), "validation = nan is not a fraction"),
        ((True, 0, 0), "train must be a number of frames"),
        (("80", 0, 0), "train must be a number of frames"),
        ((None, 50, 50), "is left to train on with train = the rest, validation = 50, test = 50"),
        ((0.001, 0, 0), "no frame of [0-9]+ is left to train on"),
    ],
)
def test_sizes_that_cannot_be(asked, message):
    with pytest.raises(ValueError, match=message):
        make_splits(100, *asked)


@pytest.fixture
def data():
    return InMemoryDataset([make_sample(seed=k) for k in range(20)])


FILES = ["a.xyz", "b.xyz"]


def write(path, data, splits, files=FILES):
    path.write_text(json.dumps({name: splits_entry(data, part, files) for name, part in splits.items()}))
    return path


def test_round_trip(tmp_path, data):
    splits = make_splits(20, None, 3, 4)
    path = write(tmp_path / "s.json", data, splits)
    assert read_splits(path, data, FILES) == splits
    assert read_splits(path, data, ["elsewhere.xyz"]) == splits  # the frames decide, not where they are
    other = InMemoryDataset([make_sample(seed=100 + k) for k in range(3)])
    entries = {"train": splits_entry(data, [1, 2], FILES), "test": splits_entry(other, [0, 1, 2], ["c.xyz"])}
    path.write_text(json.dumps(entries))
    assert read_splits(path, data, FILES) == {"train": [1, 2]}
    assert read_splits(path, other, ["c.xyz"]) == {"test": [0, 1, 2]}


def test_splits_belong_to_their_data(tmp_path, data):
    path = write(tmp_path / "s.json", data, make_splits(20, None, 3, 4))
    samples = list(data)
    moved = InMemoryDataset([*samples[:7], make_sample(seed=99), *samples[8:]])
    for other in (InMemoryDataset(samples[:19]), moved, InMemoryDataset(samples[::-1]), ConcatDataset([data, data])):
        with pytest.raises(BadData, match=r"s\.json: these splits belong to other frames"):
            read_splits(path, other, FILES)


def test_files_without_fingerprints(tmp_path, data):
    (tmp_path / "s.json").write_text(json.dumps({"train": {"files": FILES, "indices": [3, 4]}}))
    assert read_splits(tmp_path / "s.json", data, FILES) == {"train": [3, 4]}
    with pytest.raises(BadData, match="other frames"):
        read_splits(tmp_path / "s.json", data, FILES[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": [0, 1, 20]}, "train must be a list of frames between 0 and 19"),
        ({"validation": [-1]}, "validation must be"),
        ({"validation": [1.0]}, "validation must be"),
        ({"validation": [True]}, "validation must be"),
        ({"test": None}, "not a file of splits"),
        ({"train": [1, 2], "validation": [5], "test": [3, 2]}, "frame 2 is in the splits twice"),
        ({"train": [1, 2], "validation": [5, 5], "test": [3]}, "frame 5 is in the splits twice"),
        ({"tset": [1]}, "unknown subset 'tset'"),
    ],
)
def test_files_that_are_wrong(tmp_path, data, change, message):
    path = write(tmp_path / "s.json", data, make_splits(20, None, 3, 4))
    content = json.loads(path.read_text())
    for name, indices in change.items():
        content[name] = {**content["train"], "indices": indices}
    path.write_text(json.dumps(content))
    with pytest.raises(BadData, match=message):
        read_splits(path, data, FILES)


def test_training_frames_may_be_drawn_repeatedly(tmp_path, data):
    drawn = {"train": [1, 1, 2], "validation": [5], "test": [3]}
    assert read_splits(write(tmp_path / "s.json", data, drawn), data, FILES) == drawn


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"{", b"\x80\x04pickle", b"[" * 100_000])
def test_files_of_something_else(tmp_path, data, content):
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(BadData, match=r"s\.json: this is not a file of splits"):
        read_splits(tmp_path / "s.json", data, FILES)


def test_a_file_that_is_not_there(tmp_path, data):
    with pytest.raises(FileNotFoundError, match="there is no file of splits at"):
        read_splits(tmp_path / "s.json", data, FILES)


def test_groups_stay_whole():
    """In a random order, with sizes near those that are asked for; the same without the names of the groups."""
    groups = np.repeat([7, 3, 9, 1, 4, 8, 2, 6, 5, 0], [10, 30, 20, 10, 40, 10, 30, 20, 10, 20])
    shuffled = np.random.default_rng(1).permutation(groups)
    parts = make_splits(200, None, 0.2, 0.1, seed=4, groups=shuffled)
    assert sorted(k for part in parts.values() for k in part) == list(range(200))
    inside = [set(shuffled[part].tolist()) for part in parts.values()]
    assert not inside[0] & inside[1] and not inside[0] & inside[2] and not inside[1] & inside[2]
    assert abs(len(parts["validation"]) - 40) <= 30 and 0 < len(parts["test"]) <= 40
    assert parts != make_splits(200, None, 0.2, 0.1, seed=5, groups=shuffled)
    alone = make_splits(200, None, 0.2, 0.1, seed=4, groups=np.arange(200))
    assert [len(part) for part in alone.values()] == [140, 40, 20]
    for few in (np.zeros(200, dtype=int), np.repeat([0, 1], 100)):  # frames are divided
        assert make_splits(200, None, 0.2, 0.1, seed=4, groups=few) == make_splits(200, None, 0.2, 0.1, seed=4)
