import json
import os

import pytest

from torchmdnet2.data import InMemoryDataset, Splits, make_splits
from torchmdnet2.errors import BadData

from .frames import make_sample


def sizes(splits):
    return len(splits.train), len(splits.val), len(splits.test)


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
    together = splits.train + splits.val + splits.test
    assert len(set(together)) == len(together) and set(together) <= set(range(100))
    assert all(part == sorted(part) for part in (splits.train, splits.val, splits.test))


def test_fractions_that_round_lose_no_frame():
    assert sizes(make_splits(11, 0.5, 0.25, 0.25)) == (7, 2, 2)


def test_the_seed_decides():
    first = make_splits(1000, None, 0.1, 0.1, seed=1)
    assert first == make_splits(1000, None, 0.1, 0.1, seed=1)
    assert first != make_splits(1000, None, 0.1, 0.1, seed=2)
    assert first.test != list(range(900, 1000))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((None, None, 5), "train_size and val_size"),
        ((90, 10, 10), "100 frames are not enough for train_size = 90, val_size = 10, test_size = 10"),
        ((0.9, 0.1, 0.1), "not enough"),
        ((1.5, 0, 0), "train_size = 1.5 is not a fraction"),
        ((-1, 0, 0), "train_size must not be negative"),
        ((10, float("nan"), 0), "val_size = nan is not a fraction"),
        ((True, 0, 0), "train_size must be a number of frames"),
        (("80", 0, 0), "train_size must be a number of frames"),
        ((None, 50, 50), "no frame is left to train on"),
        ((0.001, 0, 0), "no frame is left to train on"),
    ],
)
def test_sizes_that_cannot_be(asked, message):
    with pytest.raises(ValueError, match=message):
        make_splits(100, *asked)


@pytest.fixture
def data():
    return InMemoryDataset([make_sample(seed=k) for k in range(20)])


def test_round_trip(tmp_path, data):
    splits = make_splits(20, None, 3, 4)
    splits.save(tmp_path / "splits.json", data)
    assert Splits.load(tmp_path / "splits.json", data) == splits
    assert os.listdir(tmp_path) == ["splits.json"]


def test_splits_belong_to_their_data(tmp_path, data):
    make_splits(20, None, 3, 4).save(tmp_path / "s.json", data)
    shorter = InMemoryDataset([data[k] for k in range(19)])
    with pytest.raises(BadData, match=r"s\.json: .*20 frames, not for 19"):
        Splits.load(tmp_path / "s.json", shorter)
    samples = list(data)
    samples[7].system.pos[0, 0] += 1e-9
    with pytest.raises(BadData, match="made for other frames"):
        Splits.load(tmp_path / "s.json", InMemoryDataset(samples))
    with pytest.raises(BadData, match="made for other frames"):
        Splits.load(tmp_path / "s.json", InMemoryDataset(list(data)[::-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "torchmdnet2 splits 2"}, "its format is not"),
        ({"train": [0, 1, 20]}, "train must be a list of frames between 0 and 19"),
        ({"val": [-1]}, "val must be"),
        ({"val": [1.0]}, "val must be"),
        ({"val": [True]}, "val must be"),
        ({"test": None}, "test must be"),
        ({"train": [1, 2], "val": [5], "test": [3, 2]}, "frame 2 is in the splits twice"),
    ],
)
def test_files_that_are_wrong(tmp_path, data, change, message):
    path = tmp_path / "s.json"
    make_splits(20, None, 3, 4).save(path, data)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadData, match=message):
        Splits.load(path, data)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\x80\x04pickle", b"[" * 100_000])
def test_files_of_something_else(tmp_path, data, content):
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(BadData, match=r"s\.json: this is not a file of splits"):
        Splits.load(tmp_path / "s.json", data)
