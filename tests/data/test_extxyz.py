"""Extended XYZ is read as ASE reads it, and what ASE passes over in silence is read too, or named."""

import bz2
import gzip
import io
import lzma
import random
import re
import sqlite3

import ase.db
import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import chemical_symbols

from torchmdnet2.data import AseDataset, extxyz, open_dataset
from torchmdnet2.data import ase_formats as module
from torchmdnet2.data.ase_formats import _frame
from torchmdnet2.data.extxyz import read_extxyz
from torchmdnet2.data.structures import Found, read_structures
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.streams.records import RecordFile

HEAD = "Properties=species:S:1:pos:R:3"


def some_frames() -> list[Atoms]:
    rng = np.random.default_rng(0)
    frames = []
    for k in range(12):
        n = 1 + k % 4
        atoms = Atoms(rng.choice([1, 6, 17, 92], n), rng.normal(size=(n, 3)))
        if k % 3:
            atoms.set_cell(rng.normal(size=(3, 3)) + 6 * np.eye(3))
            atoms.pbc = [True, k % 2 == 0, False]
        atoms.info.update({"charge": k - 3, "note": "a b", "flag": True, "list": np.arange(4), "virial": np.eye(3)})
        atoms.arrays["label"] = rng.normal(size=(n, 2))
        atoms.arrays["whole"] = rng.integers(0, 9, n)
        atoms.arrays["here"] = rng.random(n) > 0.5
        atoms.set_tags(range(n))
        if k % 4:
            results = {"energy": -1e4 - k, "forces": rng.normal(size=(n, 3)), "stress": rng.normal(size=6)}
            atoms.calc = SinglePointCalculator(atoms, **results)
        frames.append(atoms)
    return frames


def hand_written() -> str:
    return (
        "2\n\nH 0 0 0 extra\nhe 1e0 0 -.5\n"  # no comment; symbols in small letters
        f'1\n{HEAD}:charge:R:1 Lattice="3 0 0 1 4 0 0 0 5"\nO 0 0 0 -0.5\n'  # periodic unless it says otherwise
        '1\nProperties=Z:I:1:pos:R:3 Lattice="3 0 0 0 4 0 0 0 5" pbc="1 0 1" energy=-1\n8 0 0 0\n'
        f"1\n{HEAD} pbc=F energy={{1 2 3}} a='x=y' \\b=\"q\"\nH\t0\t0\t0\n"
        "1\nof ADF, energy=1\nH 0 0 0\nVEC1 1 2 3\nVEC2 4 5 7\n"
        f'1\n{HEAD}:forces:R:3 stress="1 2 3 2 4 5 3 5 6" energy=1e0\nH 0 0 0 1 2 3\n\n\n'
    )


def assert_equal(ours, atoms):
    theirs = _frame(Found(atoms))
    for name in ("numbers", "positions", "cell", "pbc"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.entries.keys() == theirs.entries.keys()
    for name, value in theirs.entries.items():
        mine = ours.entries[name]
        if name == "stress":  # ASE has turned it to six numbers
            mine = mine[(0, 1, 2, 1, 0, 0), (0, 1, 2, 2, 2, 1)]
        assert np.array_equal(mine, value), name


@pytest.mark.parametrize("name", ["a.xyz", "a.xyz.gz", "a.extxyz.bz2", "a.xyz.xz"])
def test_written_by_ase(tmp_path, name):
    ase.io.write(tmp_path / name, some_frames(), format="extxyz")
    expected = ase.io.read(tmp_path / name, index=":", format="extxyz")
    found = list(read_extxyz(str(tmp_path / name)))
    assert len(found) == len(expected) == 12
    for ours, atoms in zip(found, expected, strict=True):
        assert_equal(ours, atoms)


def test_written_by_hand(tmp_path):
    (tmp_path / "a.xyz").write_text(hand_written())
    expected = ase.io.read(tmp_path / "a.xyz", index=":", format="extxyz")
    found = list(read_extxyz(str(tmp_path / "a.xyz")))
    assert len(found) == len(expected) == 6
    for ours, atoms in zip(found, expected, strict=True):
        assert_equal(ours, atoms)


def test_empty_lines_do_not_end_a_file(tmp_path):
    (tmp_path / "a.xyz").write_text("\n".join(f"1\n{HEAD} energy={k}\nH 0 0 0\n" for k in range(3)))
    assert len(ase.io.read(tmp_path / "a.xyz", index=":", format="extxyz")) == 1  # which is why it is not used
    assert [float(s.labels["energy"]) for s in AseDataset(tmp_path / "a.xyz")] == [0, 1, 2]


def test_values_may_hold_equals_signs(tmp_path):
    """As a SMILES that ASE writes without quotes."""
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 0.74]], info={"smiles": "CC(=CC(=O)O)C1=C(C)C1", "charge": 0})
    ase.io.write(tmp_path / "a.xyz", [atoms, atoms], format="extxyz")
    assert "smiles=CC(=CC(=O)O)" in (tmp_path / "a.xyz").read_text()
    assert len(AseDataset(tmp_path / "a.xyz")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two\n\nH 0 0 0\n", "a number of atoms is expected where a frame begins, not 'two'"),
        ("-1\n\n", "a number of atoms is expected"),
        ("0\n\n", "at least one atom"),
        (f"2\n{HEAD}\nH 0 0 0\n", "the file was cut off: it ends after 1 of 2 atoms"),
        (f"2\n{HEAD}\nH 0 0 0\nH 0 0\n", "atom 1 has 3 of its 4 columns"),
        (f"2\n{HEAD}\nH 0 0 0\n1\n{HEAD}\n", "atom 1 has 1 of its 4 columns"),
        (f"1\n{HEAD}:forces:R:3\nH 0 0 0\n", "atom 0 has 4 of its 7 columns"),
        ("1\nProperties=species:S:1:pos:R\nH 0 0 0\n", "is not a list of NAME:KIND:COLUMNS"),
        ("1\nProperties=species:S:1:pos:Q:3\nH 0 0 0\n", "is not a list of NAME:KIND:COLUMNS"),
        ("1\nProperties=species:S:1\nH 0 0 0\n", "no positions"),
        ("1\nProperties=pos:R:3\n0 0 0\n", "neither elements .* nor atomic numbers"),
        ("1\nProperties=Z:R:1:pos:R:3\n1.5 0 0 0\n", "atomic numbers must be whole"),
        (f"1\n{HEAD}\nQq 0 0 0\n", "atom 0: there is no element 'Qq'"),
        (f"1\n{HEAD}\nX 0 0 0\n", "the atomic number of atom 0 is 0"),
        (f'1\n{HEAD} lattice="5 0 0 0 5 0 0 0 5"\nH 0 0 0\n', "'lattice' must be written Lattice"),
        (f"1\n{HEAD} PBC=T\nH 0 0 0\n", "'PBC' must be written pbc"),
        (f"1\n{HEAD}:pos:R:3\nH 0 0 0 1 1 1\n", "'positions' is given twice"),
        (
            f"2\n{HEAD}\nH 0.00 0.00 0.00\nH 0.00 0.00 1.2",
            "cut off: its last number, 1.2, is shorter than all others",
        ),
        (f"2\n{HEAD}\nH 0.00 0.00 0.00\nH 0.00 0.00 -", "it cannot be read"),
        (f'1\n{HEAD} Lattice="1 2 3"\nH 0 0 0\n', "3x3"),
        (f'1\n{HEAD} Lattice="1 0 0 1 0 0 0 0 1"\nH 0 0 0\n', "linearly dependent"),
        (f'1\n{HEAD} pbc="T T"\nH 0 0 0\n', "pbc must be three of T and F"),
        (f'1\n{HEAD} pbc="x y z"\nH 0 0 0\n', "pbc must be three of T and F"),
        (f'1\n{HEAD} pbc="T F F"\nH 0 0 0\n', "lattice vector that is zero"),
    ],
)
def test_faults_name_the_frame(tmp_path, text, message):
    (tmp_path / "a.xyz").write_text(f"1\n{HEAD}\nH 0 0 0\n" * 2 + text)
    with pytest.raises(BadData, match=rf"a\.xyz, frame 2: .*{message}"):
        AseDataset(tmp_path / "a.xyz")


@pytest.mark.parametrize(
    "atoms", ["H 0 0 0\nH 0 0 1", "H 0.10 0.12 0.25\nH 0.01 0.01 1.20", "H 0.1 0.25 0.3\nH 0.1 1.5 2.0"]
)
def test_the_last_line_needs_no_end(tmp_path, atoms):
    (tmp_path / "a.xyz").write_text(f"2\n{HEAD}\n{atoms}")
    assert float(AseDataset(tmp_path / "a.xyz")[0].system.pos[1, 2]) == float(atoms.split()[-1])


def test_a_compressed_file_that_was_cut_off(tmp_path):
    text = "".join(f"1\n{HEAD} energy={k}\nH 0 0 {k}\n" for k in range(5000))
    (tmp_path / "a.xyz.gz").write_bytes(gzip.compress(text.encode())[:-2000])
    with pytest.raises(BadData, match=r"a\.xyz\.gz, frame [1-9]\d+: .* ended before the end-of-stream"):
        AseDataset(tmp_path / "a.xyz.gz", format="extxyz")


def test_a_database_is_read_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3)
    with ase.db.connect(tmp_path / "a.db") as database:
        for k in range(11):
            database.write(Atoms("H", [[0, 0, k]]), key_value_pairs={"gap": float(k)})
        database.delete([4, 9])
    data = AseDataset(tmp_path / "a.db", {"scalar:gap": "gap"})
    assert [float(sample.labels["scalar:gap"]) for sample in data] == [0, 1, 2, 4, 5, 6, 7, 9, 10]
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("update systems set positions = zeroblob(5) where id = 6")
    with pytest.raises(BadData, match=r"a\.db, frame \d+: it cannot be read"):
        AseDataset(tmp_path / "a.db")


WATER = "3\n{}\nO 0.0 0.0 0.1\nH 0.0 0.7 0.6\nH 0.0 -0.7 0.6\n"


def read_by_all(path):
    """The structure as data, structure and record of a stream give it."""
    (sample,), (atoms,), (record,) = open_dataset(path), read_structures(path), RecordFile(str(path))
    assert not record.error and np.allclose(record.starts[0].positions, atoms.positions)
    assert np.allclose(sample.system.pos, atoms.positions)
    return sample, atoms, record.starts[0]


@pytest.mark.parametrize("comment", ["charge: -2; mult: 1", "Charge : -2, Mult: 1", "mult: 1; charge:-2"])
def test_charge_and_multiplicity_behind_a_colon_are_read(tmp_path, comment):
    (tmp_path / "a.xyz").write_text(WATER.format(comment))
    sample, *found = read_by_all(tmp_path / "a.xyz")
    assert (sample.system.charge.item(), sample.system.spin.item()) == (-2, 1)
    assert all((atoms.info["charge"], atoms.info["spin"]) == (-2, 1) for atoms in found)


@pytest.mark.parametrize("comment", ["charge=None", "spin=None", "total_charge=null"])
def test_none_is_an_error(tmp_path, comment):
    (tmp_path / "a.xyz").write_text(WATER.format(comment))
    for read in (lambda path: open_dataset(path)[0], read_structures):
        with pytest.raises(
            BadData, match=r"(charge|spin).* must be a whole number, got (None|null); .*or leave it out"
        ):
            read(tmp_path / "a.xyz")


def test_exponents_of_fortran(tmp_path):
    text = WATER.format('energy=-1.5D+02 dipole="1.0d-01 0.0D0 -2D+0"').replace("0.7 ", "7.0D-01 ")
    (tmp_path / "a.xyz").write_text(text)
    data = open_dataset(tmp_path / "a.xyz", keys={"energy": "energy", "dipole": "dipole"})
    assert data[0].labels["energy"].item() == -150 and data[0].labels["dipole"].tolist() == [[0.1, 0, -2]]
    assert data[0].system.pos[1].tolist() == [0, 0.7, 0.6]
    assert read_by_all(tmp_path / "a.xyz")[1].get_potential_energy() == -150
    (tmp_path / "a.xyz").write_text(text.replace("7.0D-01", "7.0E-D1"))
    with pytest.raises(BadData, match=r"could not convert string to float: '7\.0E-D1'"):
        open_dataset(tmp_path / "a.xyz")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.xyz",
            gzip.compress(WATER.encode(), mtime=0),
            r"a\.xyz: its content is compressed, .* rename it to \S*a\.xyz\.gz",
        ),
        ("a.xyz.gz", bz2.compress(WATER.encode()), r"a \.bz2 file: rename it"),
        ("a.sdf", lzma.compress(b"x" * 99), r"a\.sdf: its content is compressed, as that of a \.xz file"),
        ("a.xyz.gz", WATER.encode(), r"a\.xyz\.gz: its content is not compressed"),
        ("a.sdf.bz2", b"x\n\n\n", r"a\.sdf\.bz2: its content is not compressed"),
        ("a.xyz", WATER.encode("utf-16"), r"a\.xyz: its text is in UTF-16: save it as UTF-8"),
        ("a.xyz", WATER.encode("utf-16-le"), "its text is in UTF-16"),
        ("a.sdf", "x\n\n\n".encode("utf-16"), r"a\.sdf: its text is in UTF-16"),
    ],
)
def test_compressed_and_wide_texts_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    for read in (read_structures, lambda path: open_dataset(path), lambda path: list(RecordFile(str(path)))):
        with pytest.raises(BadData, match=words):
            read(tmp_path / name)


def test_wrong_numbers_of_atoms_and_empty_files_are_named(tmp_path):
    path = tmp_path / "a.xyz"
    for count, more, words in (
        (4, WATER, "atom 3 has 1 of its 4 columns: is the number of atoms, 4, too large"),
        (4, "", "after 3 of 4 atoms, or the number of atoms where the frame begins is too large"),
        (2, WATER, "not 'H 0.0 -0.7 0.6': is the number of atoms of the frame before right, and are the first"),
    ):
        path.write_text(WATER.replace("3\n", f"{count}\n", 1).format("") + more.format(""))
        with pytest.raises(BadData, match=words):
            open_dataset(path)
    path.write_text("")
    with pytest.raises(BadData, match=r"a\.xyz: .*the file is empty"):
        read_structures(path)


@pytest.mark.parametrize(("other", "key"), [("Energy", "energy"), ("ENERGY", "energy"), ("Forces", "forces")])
def test_labels_in_other_letters_are_suggested(tmp_path, other, key):
    (tmp_path / "a.xyz").write_text(WATER.format(f"{other}=1.0"))
    with pytest.warns(StructureWarning, match=f"'{other}' is not read as the {key}, whose name is '{key}'"):
        open_dataset(tmp_path / "a.xyz")
    with pytest.raises(BadData, match=f"no frame has '{key}', which is the key of {key}, did you mean '{other}'"):
        open_dataset(tmp_path / "a.xyz", keys={key: key})


WORDS = [
    "energy=-1.5", "energy=-7", "E=+1e-3", "E(eV)=2.50E+02", "free-energy=-.5", "x=5.", "n=007", "n=1_0",
    f"big={10**20}", "uid=1.5", "Uid=12", "stress=1.5", "virial=3", "Lattice=2.5", "step=12", "flag", "pbc=T",
    'pbc="T T F"', "a=1.5=2.5", "note=a=1.5", 'note="b=1.5 c=2"', "note='b=1.5 c=2'", "it's", '"', "{a=1.5}",
    "v={1 2.5}", "m=[[1, 2], [3, 4]]", "\\x=1.5", "a = 2.5", "b= 3.5", "= 4.5", "y =", "charge: -2; mult=1.5",
    "charge:1", "1 1", "cell: 8 8 8.5", "cell=8.5", "cell=-8.5 8 8", "box=8.0 8.0 8.0", "a=8.5 b=9 c=7.0",
    "a=-8.5 b=9 c=7.0", "a=8e1 b=9 c=7.0", 'box="8 8 8"', "f=1.0D+02", 'stress="1 2 3 4 5 6 7 8 9"',
    'json="_JSON {\\"a\\": 1}"', "z\xa0w=1.5", "x=\u0661.5", "energy=-2.25", "energy", "e=1e999",
    'Lattice="9 0 0 0 8 0 0 0 7"', "Properties=species:S:1:pos:R:3:forces:R:3", 'q"r"=1.5', 's="t"u=2.5', "name=H2O",
    "pbc=1.5",
]  # fmt: skip


def content(parse, comment):
    """What a comment line gives, with the types of its values, or its error."""
    try:
        info, *more = parse(comment)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return repr(error)
    return [(key, type(value), getattr(value, "dtype", None), repr(value)) for key, value in info.items()], more


def test_lines_that_differ_in_numbers_are_parsed_as_any_other():
    draw, quick = random.Random(3), 0
    for _ in range(4000):
        comment = " ".join(draw.choices(WORDS, k=draw.randrange(6)))
        extxyz._parsed.cache_clear()
        for word in ("energy=-1.5", comment):  # the second time from what is known
            expected = content(extxyz._parsed.__wrapped__, f"{comment} {word}")
            assert content(extxyz._head, f"{comment} {word}") == expected, comment
            assert content(extxyz._head, f"{comment} {word}") == expected, comment
        number = re.sub(r"energy=-1.5$", "energy=-123.25", f"{comment} energy=-1.5")
        known = extxyz._parsed.cache_info().misses
        assert content(extxyz._head, number) == content(extxyz._parsed.__wrapped__, number), comment
        quick += extxyz._parsed.cache_info().misses == known
    assert quick > 500


@pytest.mark.parametrize("scale", [1e-9, 1e-8, 1e-4, 1.0, 30.0, 9000.0, 1e5, 1e60])
def test_numbers_are_written_as_python_writes_them(scale):
    """Correctly rounded, also ties, signed zeros and numbers that need more digits."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, scale, (3000, 9))
    values[:500] = np.round(values[:500], 8) + rng.choice([0, 0.5e-8, -0.5e-8], (500, 9))
    values[500] = [0.0, -0.0, 0.5e-8, -0.5e-8, 1.5e-8, 0.125, 1e-300, -1e-9, 9999.999999994]
    values[501] = 2.0 ** -np.arange(3, 30, 3)
    if scale == 9000:
        values[502, :3] = np.nan, np.inf, -np.inf
    numbers = rng.integers(0, 119, len(values))
    line = "%-2s" + " %16.8f" * 9 + "\n"
    lines = extxyz._lines(numbers, values)
    for k, row in enumerate(values.tolist()):
        assert lines(k, k + 1) == line % (chemical_symbols[numbers[k]], *row)


def test_frames_that_are_read_together_are_those_of_their_lines(monkeypatch):
    """Bit by bit, and with the same errors, also where some numbers or lines are odd."""
    rng, together, inner = random.Random(5), [], extxyz._equal_frames

    def counted(text):
        for frame, *places in inner(text):
            together.append(frame is not None)
            yield frame, *places

    def number(decimals):
        odd = ["nan", "1.0D-03", "x", "7", "1e5", "-0.5e-3", ".5", "5.", "+1.50000000", "--1.5", "1-2.00000000"]
        value = f"{rng.uniform(-1, 1) * 10 ** rng.choice([-3, 0, 1, 3]):{rng.choice(['', '16'])}.{decimals}f}"
        return rng.choice(odd) if rng.random() < 0.001 else value

    kinds = ["species:S:1:pos:R:3:forces:R:3", HEAD[11:], f"{HEAD[11:]}:q:R:1", f"{HEAD[11:]}:numbers:R:1", None]
    for _ in range(300):
        kind, size, decimals, lines = rng.choice(kinds), rng.choice([0, 1, 2, 5]), rng.choice([8, 8, 3, 10, 14]), []
        width = 3 if kind is None else sum(map(int, kind.split(":")[2::3])) - 1
        for _ in range(rng.randrange(1, 12)):
            lacking, number_of_atoms = rng.random() < 0.02, size + (rng.random() < 0.05)
            words = [f"energy={number(6)}", "", "\u00e9=1 energy=2.5", 'Lattice="4.0 0 0 0 4 0 0 0 4"', "charge=1"]
            lines += [str(number_of_atoms), (f"Properties={kind} " if kind else "") + rng.choice(words)]
            for _ in range(number_of_atoms - lacking):
                symbol = rng.choice(["C", "H", "Cl", "h"] if rng.random() < 0.99 else ["X", "D", "8", "Qq", "OW1", ""])
                numbers = [number(decimals) for _ in range(width + (rng.random() < 0.005))]
                lines.append(rng.choice(["   ", "   ", " ", "\t"]).join([symbol, *numbers]))
        text = (rng.choice(["\n"] * 9 + ["\r\n"]).join(lines) + "\n").encode()
        text = text[: rng.randrange(len(text))] if rng.random() < 0.1 else text
        found = []
        for way in (counted, lambda _: iter(())):
            monkeypatch.setattr(extxyz, "_equal_frames", way)
            found.append(list(read_extxyz(io.BytesIO(text))))
        for one, other in zip(*found, strict=True):
            if isinstance(one, Exception):
                assert repr(one) == repr(other)
                continue
            assert one.entries.keys() == other.entries.keys() and one.stated.keys() == other.stated.keys()
            pairs = [(getattr(one, name), getattr(other, name)) for name in ("numbers", "positions", "cell", "pbc")]
            pairs += [(one.entries[name], other.entries[name]) for name in one.entries]
            for mine, theirs in [*pairs, *((one.stated[name], other.stated[name]) for name in one.stated)]:
                mine, theirs = np.asarray(mine), np.asarray(theirs)
                assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    assert sum(together) > 300 and not all(together)


def test_control_bytes_are_not_blanks():
    frame = "1\nProperties=species:S:1:pos:R:3\nH 0.10 0.20 0.30\n"
    for byte in "\0\x01":
        damaged = frame.replace(" 0.20", f"{byte} 0.20")
        assert isinstance(next(read_extxyz(io.BytesIO((damaged + frame).encode()))), ValueError)


def test_a_text_is_cut_into_whole_frames():
    """Many frames of one size, as the next ones one by one; damage ends what is cut."""
    frames = [f"2\nProperties=species:S:1:pos:R:3 energy={k}.5\nH 0 0 {k}\n O 0.0 0.0 1.0\n" for k in range(5)]
    other = "1\n\nH 0.0 0.0 0.0\n"
    ends = np.cumsum([len(frame) for frame in frames]).tolist()
    assert extxyz.cut_xyz("".join(frames).encode()) == (ends[:4], False)  # the last one may be continued
    assert extxyz.cut_xyz("".join([*frames, other, other]).encode()) == ([*ends, ends[-1] + len(other)], False)
    assert extxyz.cut_xyz("".join([other, *frames]).encode()) == ([len(other) + end for end in [0, *ends[:4]]], False)
    for damage in ("2\n\nH 0.0 0.0 0.0\n", "two\n", "2\n\n2\n\n", "2\n\n0 0 0\n0 0 0\n2\n"):
        found, damaged = extxyz.cut_xyz("".join([*frames, damage, *frames]).encode())
        assert damaged and found == (ends[:4] if damage == "two\n" else ends)  # another number may belong to a frame
    assert extxyz.cut_xyz("".join(frames).replace("energy", "energy\r").encode()) == ([], True)
    assert extxyz.cut_xyz("".join(frames).replace("\n", "\r\n").encode())[0] == [
        e + 4 * k for k, e in enumerate(ends[:4], 1)
    ]
