"""The registry of data formats: a format of another package is one class, and no name is told that is not there."""

import numpy as np
import pytest

from torchmdnet2.cli.common import read_structure
from torchmdnet2.data import FORMATS, Frame, FrameReader, open_dataset, read_structures, register_format
from torchmdnet2.errors import BadData
from torchmdnet2.streams.records import RecordFile
from torchmdnet2.training.config.config import parse_config


@pytest.fixture
def plugin(monkeypatch):
    """A format as another package defines it: "x y z energy" a line, one hydrogen atom a frame."""
    monkeypatch.setattr(FORMATS, "_classes", dict(FORMATS._classes))

    @register_format("lines")
    class Lines(FrameReader):
        extensions = ("lines",)

        def frames(self):
            with open(self.path) as file:
                for line in file:
                    *pos, energy = map(float, line.split())
                    entries = {"energy": energy, "forces": np.zeros((1, 3))}
                    yield Frame(np.array([1]), np.array([pos]), np.zeros((3, 3)), np.zeros(3, dtype=bool), entries)

    return Lines


def test_a_format_of_a_plugin(plugin, tmp_path):
    (tmp_path / "a.lines").write_text("0 0 0 1\n0 0 1 2\n")
    (tmp_path / "b.dat").write_text("0 0 0 1\n0 0 1 x\n")
    data = open_dataset(tmp_path / "a.lines", units={"energy": "hartree"})
    assert len(data) == 2 and data[1].labels["energy"].item() == pytest.approx(2 * 27.211386245988)
    assert len(open_dataset(tmp_path / "a.lines", cache=tmp_path / "caches")) == 2
    with pytest.raises(BadData, match=r"b\.dat, frame 1: it cannot be read: could not convert .*'x'"):
        open_dataset(tmp_path / "b.dat", format="lines")
    with pytest.raises(BadData, match=r"Known: .*lines"):
        open_dataset(tmp_path / "b.dat")
    with pytest.raises(BadData, match=r"unknown data format 'line', did you mean 'lines'\? Known: auto, .*, lines"):
        open_dataset(tmp_path / "b.dat", format="line")
    config = {"model": {"name": "tensornet"}, "data": {"train": "a.lines", "format": "lines"}}
    assert parse_config(config).data.format == "lines"


def test_structures_of_all_registered_formats(plugin, tmp_path):
    """What trainings read, the commands that take structures read too."""
    (tmp_path / "a.lines").write_text("0 0 0 1\n0 0 1 2\n")
    (tmp_path / "a.dat").write_text("0 0 2 1\n")
    np.savez(tmp_path / "a.npz", R=np.ones((3, 2, 3)) * [[[0], [0.4]]], z=[1, 1], r_unit="Ang")
    assert [len(read_structures(tmp_path / name)) for name in ("a.lines", "a.npz")] == [2, 3]
    assert read_structures(tmp_path / "a.dat", format="lines")[0].positions.tolist() == [[0, 0, 2]]
    assert read_structure(f"{tmp_path}/a.lines@1").positions.tolist() == [[0, 0, 1]]  # md, scan
    assert [record.starts[0].positions[0, 2] for record in RecordFile(str(tmp_path / "a.lines"))] == [0, 1]  # score
    with pytest.raises(BadData, match="unknown data format 'line', did you mean 'lines'"):
        read_structures(tmp_path / "a.dat", format="line")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vasp-outt", "did you mean 'vasp-out'"),
        ("extxyz/plain", "extxyz has no variants"),
        ("ase/extxy", "did you mean 'extxyz'"),
        ("nothing/at/all", "Known: auto, ace, ase, .*xyz"),
    ],
)
def test_unknown_formats_are_refused_before_files_are_looked_at(name, words):
    with pytest.raises(BadData, match=words):
        open_dataset("missing.xyz", format=name)
    with pytest.raises(Exception, match=rf"data\.format.*{words}"):
        parse_config({"model": {"name": "tensornet"}, "data": {"train": "missing.xyz", "format": name}})


def test_formats_of_ase_by_their_names(tmp_path):
    from ase.build import molecule
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    atoms = molecule("CH4")
    atoms.calc = SinglePointCalculator(atoms, energy=-3.0, forces=np.ones((5, 3)))
    write(tmp_path / "run.json", atoms)
    with pytest.raises(BadData, match=r"or give the format, as in data\.format: json \(--format json\)"):
        open_dataset(tmp_path / "run.json")
    for name in ("json", "ase/json", "ase"):
        sample = open_dataset(tmp_path / "run.json", format=name)[0]
        assert sample.labels["energy"].item() == -3 and (sample.labels["forces"] == 1).all()


@pytest.mark.parametrize(
    "name", [*(name for name in FORMATS if name not in ("dpdata", "mlip", "npy")), "mlip/Cu", "vasp-out"]
)
def test_empty_files_are_named_in_every_format(tmp_path, name):
    (tmp_path / "empty.data").write_text("")
    with pytest.raises(BadData, match=r"empty\.data"):
        open_dataset(tmp_path / "empty.data", format=name)[0]


# --- stress and virial in extended XYZ ------------------------------------------------------------------------------

FULL = np.array([[0.01, 0.006, 0.005], [0.006, 0.02, 0.004], [0.005, 0.004, 0.03]])
WRITTEN = {
    "Voigt": '"0.01 0.02 0.03 0.004 0.005 0.006"',
    "Voigt with commas": '"0.01, 0.02, 0.03, 0.004, 0.005, 0.006"',
    "Voigt in braces": "{0.01 0.02 0.03 0.004 0.005 0.006}",
    "Voigt in brackets": "[0.01, 0.02, 0.03, 0.004, 0.005, 0.006]",
    "nine": '"0.01 0.006 0.005 0.006 0.02 0.004 0.005 0.004 0.03"',
    "list in quotes": '"[[0.01, 0.006, 0.005], [0.006, 0.02, 0.004], [0.005, 0.004, 0.03]]"',
    "list of numpy": "'[[0.01 0.006 0.005] [0.006 0.02 0.004] [0.005 0.004 3e-2]]'",
    "list": "[[0.01, 0.006, 0.005], [0.006, 0.02, 0.004], [0.005, 0.004, 0.03]]",
    "list without spaces": "[[0.01,0.006,0.005],[0.006,0.02,0.004],[0.005,0.004,0.03]]",
    "JSON": '"_JSON [[0.01, 0.006, 0.005], [0.006, 0.02, 0.004], [0.005, 0.004, 0.03]]"',
}


def written(path, entry):
    head = 'Lattice="4 0 0 0 4 0 0 0 5" Properties=species:S:1:pos:R:3:forces:R:3 energy=-7.5'
    path.write_text(f'2\n{head} {entry} note="a stress = b"\nCu 0 0 0 0.1 0 0\nCu 2 2 2.4 -0.1 0 0\n')
    return path


@pytest.mark.parametrize("key", ["stress", "virial", "REF_stress", "virials"])
@pytest.mark.parametrize("form", WRITTEN)
def test_stress_as_people_write_it(tmp_path, form, key):
    path = written(tmp_path / "a.xyz", f"{key}={WRITTEN[form]}")
    label, by = ("virial", -1 / 80) if "virial" in key else ("stress", 1.0)
    data = open_dataset(path, {"energy": "energy", label: key})
    assert data[0].labels["stress"].numpy()[0] == pytest.approx(by * FULL, abs=1e-15)
    assert data[0].labels["energy"].item() == -7.5 and data.available == {"energy", "forces", "note", key}


@pytest.mark.parametrize("value", ["NOTHING", '"0.1 0.2"', '"1 2 3 4 5 6 x y z"', "[[1, 2], [3]]", '""'])
def test_what_cannot_be_a_stress_matters_only_where_it_is_asked_for(tmp_path, value):
    path = written(tmp_path / "a.xyz", f"stress={value}")
    assert open_dataset(path)[0].labels.keys() == {"energy", "forces"}
    with pytest.raises(BadData, match=r"a\.xyz, frame 0: .*stress"):
        open_dataset(path, {"stress": "stress"})
