"""Files as blocks of records: each record once and in order, however the text is cut."""

from __future__ import annotations

import gzip
import io
import random
from functools import partial

import numpy as np
import pytest
from ase import Atoms

from torchmdnet2 import System
from torchmdnet2.core import files
from torchmdnet2.data import Sample, write_hdf5
from torchmdnet2.errors import BadData
from torchmdnet2.streams import records
from torchmdnet2.streams.records import RecordFile, _decoded, _read_sdf, _read_xyz

WATER = "3\nc\nO 0.0 0.0 0.1\nH 0.1 0.2 0.3\nH 1.0 2.0 3.0\n"
PIECES = {
    ".xyz": [
        *[WATER, "1\n\nHe 0.0 0.0 0.0\n"] * 6,
        "2\nx=1\nH 0 0 0\nH 0 0 1\n",
        "0\nempty\n",
        WATER[:-14],
        WATER + "H 1.0 0.0 0.0\n",
        "junk\n",
        "9" * 20 + "\n",
        "9" * 5000 + "\n",
        "²\n",
        "\n",
        "  \n",
        "VEC1 1.0 0.0 0.0\n",
        "2\n",
        "99\nq\nH 1.0 1.0 1.0\n",
        "\r\n",
        "1\r\nc\r\nH 0.0 0.0 0.0\r\n",
        "1\nc\rd\nH 0.0 0.0 0.0\n",
    ],
    ".sdf": ["a\nb\n$$$$\n", "$$$$\n", "x\n$$$$ more\n", "l\r\n$$$$\r\n", "m\n", " $$$$\n", "z\rk\n"],
}


@pytest.mark.parametrize(("suffix", "read"), [(".xyz", _read_xyz), (".sdf", _read_sdf)])
def test_blocks_are_the_records_of_the_lines(tmp_path, monkeypatch, suffix, read):
    """Whole records that are cut from a text, damaged ones, and those after them, beside a reader of single lines."""
    draw, path, cut = random.Random(1), tmp_path / f"in{suffix}", 0
    for _ in range(400):
        text = "".join(draw.choices(PIECES[suffix], k=draw.randrange(12)))
        text = text[: len(text) - draw.choice([0, 0, 0, 1, 5])]
        path.write_bytes(text.encode())
        expected = [_content(record) for record in read(_decoded(io.BytesIO(text.encode())))]
        monkeypatch.setattr(files, "_READ", draw.choice([7, 50, 2**24]))
        first, size = draw.choice([0, 0, 1, 4]), draw.choice([1, 2, 5])
        blocks = list(RecordFile(str(path)).blocks(first, size))
        found = [record for block in blocks for record in block]
        assert [_content(record) for record in found] == expected[first:]
        assert [record.number for record in found] == list(range(len(expected)))[first:]
        cut += sum(isinstance(block, records.Part) for block in blocks)
    assert cut > 100


def _content(record):
    return record.error, record.name, record.molfile, None if record.parse is None else record.parse.args


COMMENTS = (
    "charge=1", "units_of_length=bohr", 'Lattice="9 0 0 0 9 0 0 0 9"', "Properties=species:S:1:pos:R:3",
    "Properties=pos:R:3:species:S:1", "energy=1.0 Properties=species:S:1:pos:R:3",
)  # fmt: skip
FRAMES = [
    "1\nunits_of_length=bohr\nHe 0.0 0.0 0.0\n",
    "1\nunits_of_length=bohr\nHe 0.0 0.0 2.0\n",
    "2\nc\nH 0.0 0.0 0.0\nH 0.0 0.0 1.0\n",
    "2\nc\nH 0.0 0.0\n0.0 H 0.0 0.0 1.0\n",
    '2\nv="1.0 2.0 3.0"\nH 0.0 0.0 0.0\nH 0.0 0.0 1.0\n',
    WATER,
    WATER.replace("0.3", "0.4"),
    WATER.replace("H 0.1", "D 0.1"),
    WATER.replace("H 0.1", "C 0.1"),
    WATER.replace("0.3", "x"),
    WATER.replace(" 0.3", ""),
    WATER.replace("2.0 3.0", "2.0 3.0 1.0"),
    *(WATER.replace("c", comment) for comment in COMMENTS),
]


def test_frames_are_parsed_as_if_each_was_the_first(tmp_path):
    draw = random.Random(2)
    for _ in range(60):
        frames = draw.choices(FRAMES, k=12) + FRAMES[:5]
        draw.shuffle(frames)
        frames += FRAMES[:5] + FRAMES[4:5]
        for k, (record, alone) in enumerate(zip(_parsed("".join(frames)), frames, strict=True)):
            (other,) = _parsed(alone)
            assert record.error == other.error, (k, frames)
            for a, b in zip(record.starts, other.starts, strict=True):
                assert a == b and str(a.info) == str(b.info) and np.array_equal(a.get_masses(), b.get_masses())
                assert (a.calc is None) == (b.calc is None) and a.info is not b.info


def _parsed(text):
    return [record.parsed() for record in _read_xyz(io.StringIO(text))]


def test_copies_share_nothing():
    one, two = (record.starts[0] for record in _parsed('1\nv="1.0 2.0 3.0"\nH 0.0 0.0 1.0\n' * 2))
    two.info["v"][0] = 9.0
    assert one.info["v"][0] == 1.0


def test_blocks_of_large_records_are_small(tmp_path, monkeypatch):
    path = tmp_path / "in.xyz"
    path.write_text(WATER * 50)
    monkeypatch.setattr(files, "_READ", 100)
    monkeypatch.setattr(records, "runs_of_records", partial(files.runs_of_records, most=400))
    sizes = [len(list(block)) for block in RecordFile(str(path)).blocks(0, 1000)]
    assert sum(sizes) == 50 and max(sizes) < 15


@pytest.mark.parametrize("text", [gzip.compress(WATER.encode() * 9)[:-20], b"3 no gzip"], ids=["cut", "no gzip"])
def test_a_damaged_compressed_file_is_named(tmp_path, text):
    path = tmp_path / "in.xyz.gz"
    path.write_bytes(text)
    with pytest.raises(BadData, match=r"in\.xyz\.gz: (it cannot be decompressed|its content is not compressed)"):
        list(RecordFile(str(path)))


def test_hdf5_is_read_as_structures(tmp_path):
    """With charges and cells; a frame that cannot be used has a reason, and does not end the reading."""
    h5py = pytest.importorskip("h5py")
    ion = Atoms("OH", [[0, 0, 0], [0, 0, 0.97]], info={"charge": -1})
    crystal = Atoms("OH", [[0, 0, 0], [0, 0, 0.97]], cell=np.diag([3.0, 4.0, 5.0]), pbc=True)
    frames = [ion, crystal, crystal]
    write_hdf5(tmp_path / "in.h5", [Sample(System.from_ase(atoms), {}) for atoms in frames])
    with h5py.File(tmp_path / "in.h5", "a") as file:
        next(reversed(file.values()))["pos"][-1] = np.nan
    first, second, third = RecordFile(str(tmp_path / "in.h5"))
    for record, expected in ((first, ion), (second, crystal)):
        (atoms,) = record.starts
        assert atoms == expected and atoms.info == expected.info
    assert not third.starts and "not finite" in third.error
