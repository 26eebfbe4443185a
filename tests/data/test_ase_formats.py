import ase.db
import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from torchmdnet2 import units
from torchmdnet2.data import AseDataset
from torchmdnet2.errors import BadData

HEAD = "Properties=species:S:1:pos:R:3"
ATOMS = "H 0 0 0\nH 0.1 0.2 0.9\n"
STRESS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # xx, yy, zz, yz, xz, xy
MATRIX = torch.tensor([[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]], dtype=torch.float64)


def write(path, *comments, atoms=ATOMS):
    path.write_text("".join(f"2\n{HEAD} {comment}\n{atoms}" for comment in comments))
    return path


def labelled_frames():
    rng = np.random.default_rng(0)
    frames = []
    for k in range(3):
        atoms = Atoms("OH2", positions=rng.normal(size=(3, 3)), cell=rng.normal(size=(3, 3)) + 5 * np.eye(3), pbc=True)
        atoms.calc = SinglePointCalculator(
            atoms, energy=-2000.123456789 - k, forces=rng.normal(size=(3, 3)), stress=rng.normal(size=6)
        )
        frames.append(atoms)
    return frames


@pytest.mark.parametrize("name", ["frames.extxyz", "frames.xyz", "frames.traj", "frames.db"])
def test_round_trip(tmp_path, name):
    frames = labelled_frames()
    path = tmp_path / name
    ase.io.write(path, frames, **({"format": "extxyz"} if "xyz" in name else {}))
    data = AseDataset(path, {"energy": "energy", "forces": "forces", "stress": "stress"})
    tolerance = 1e-7 if "xyz" in name else 1e-14  # the text has 8 digits
    assert len(data) == 3
    for sample, atoms in zip(data, frames, strict=True):
        expected = {
            "energy": [atoms.get_potential_energy()],
            "forces": atoms.get_forces(),
            "stress": atoms.get_stress(voigt=False)[None],
        }
        for key, value in expected.items():
            assert sample.labels[key].dtype == torch.float64
            np.testing.assert_allclose(sample.labels[key], value, rtol=0, atol=tolerance)
        np.testing.assert_allclose(sample.system.pos, atoms.positions, rtol=0, atol=tolerance)
        np.testing.assert_allclose(sample.system.cell[0], atoms.cell.array, rtol=0, atol=tolerance)
        assert sample.system.pbc.all() and sample.system.z.tolist() == [8, 1, 1]


def test_names_of_labels_are_free(tmp_path):
    frames = labelled_frames()
    for atoms in frames:
        results, atoms.calc = atoms.calc.results, None
        atoms.info["REF_energy"], atoms.arrays["REF_forces"] = results["energy"], results["forces"]
    ase.io.write(tmp_path / "a.xyz", frames, format="extxyz")
    data = AseDataset(tmp_path / "a.xyz", {"energy": "REF_energy", "forces": "REF_forces"})
    np.testing.assert_allclose(data[1].labels["forces"], frames[1].arrays["REF_forces"], atol=1e-7)
    assert float(data[1].labels["energy"]) == pytest.approx(frames[1].info["REF_energy"], abs=1e-7)


def test_key_value_pairs_of_a_database(tmp_path):
    with ase.db.connect(tmp_path / "a.db") as db:
        db.write(Atoms("H2", positions=[[0, 0, 0], [0, 0, 1]]), dft=-31.5, charge=1, data={"grad": np.ones((2, 3))})
    data = AseDataset(tmp_path / "a.db", {"energy": "dft", "forces": "grad", "charge": "charge"})
    assert data[0].labels["energy"].item() == -31.5
    assert torch.equal(data[0].labels["forces"], -torch.ones(2, 3, dtype=torch.float64))  # of a gradient
    assert data[0].system.charge.item() == 1
    with ase.db.connect(tmp_path / "b.db") as db:
        db.write(Atoms("H2", positions=[[0, 0, 0], [0, 0, 1]]), data={"info": {"total_charge": 1, "dft": -31.5}})
    sample = AseDataset(tmp_path / "b.db", {"energy": "dft"})[0]
    assert (sample.labels["energy"].item(), sample.system.charge.item()) == (-31.5, 1)


def test_units_are_converted(tmp_path):
    comment = (
        f'Lattice="2 0 0 0 2 0 0 0 2" pbc="T T T" energy=-0.5 stress="{"0.001 0 0 0 0.001 0 0 0 0.001"}" dipole="1 0 0"'
    )
    path = tmp_path / "a.xyz"
    path.write_text(f"1\n{HEAD}:forces:R:3 {comment}\nH 1 0 0 0.1 0 0\n")
    keys = {name: name for name in ("energy", "forces", "stress", "dipole")}
    sample = AseDataset(path, keys, {"energy": "hartree", "length": "bohr"})[0]
    assert sample.system.pos[0, 0].item() == pytest.approx(0.529177210903, rel=1e-12)
    assert sample.system.cell[0, 0, 0].item() == pytest.approx(2 * 0.529177210903, rel=1e-12)
    assert sample.labels["energy"].item() == pytest.approx(-0.5 * 27.211386245988, rel=1e-12)
    assert sample.labels["forces"][0, 0].item() == pytest.approx(0.1 * 51.42206747, rel=1e-8)
    assert sample.labels["stress"][0, 0, 0].item() == pytest.approx(
        1e-3 * 27.211386245988 / 0.529177210903**3, rel=1e-12
    )
    assert sample.labels["dipole"][0, 0].item() == pytest.approx(0.529177210903, rel=1e-12)
    own = {"forces": "kcal/mol/angstrom", "stress": "GPa", "dipole": "debye"}
    sample = AseDataset(path, keys, own)[0]
    assert sample.system.pos[0, 0].item() == 1.0
    assert sample.labels["forces"][0, 0].item() == pytest.approx(0.1 * units.KCAL_MOL)
    assert sample.labels["stress"][0, 0, 0].item() == pytest.approx(1e-3 / 160.21766, rel=1e-6)
    assert sample.labels["dipole"][0, 0].item() == pytest.approx(0.20819433, rel=1e-6)


@pytest.mark.parametrize("bad", [{"energy": "hartre"}, {"lenght": "bohr"}, {"energy": "bohr"}])
def test_unknown_units_are_refused(tmp_path, bad):
    with pytest.raises(BadData, match=r"[Kk]nown: .*(hartree|length)"):
        AseDataset(write(tmp_path / "a.xyz", "energy=1"), {"energy": "energy"}, bad)


def test_stress_in_voigt_order(tmp_path):
    atoms = Atoms("H", cell=[2, 3, 4], pbc=True)
    atoms.calc = SinglePointCalculator(atoms, stress=STRESS)
    ase.io.write(tmp_path / "a.traj", atoms)
    sample = AseDataset(tmp_path / "a.traj", {"stress": "stress"})[0]
    assert torch.equal(sample.labels["stress"][0], MATRIX)


def test_virial_is_minus_stress_times_volume(tmp_path):
    matrix = " ".join(str(x) for x in MATRIX.flatten().tolist())
    path = write(tmp_path / "a.xyz", f'Lattice="2 0 0 1 3 0 0 0 4" virials="{matrix}"')
    sample = AseDataset(path, {"virial": "virials"})[0]
    assert sample.labels.keys() == {"stress"}
    torch.testing.assert_close(sample.labels["stress"][0], -MATRIX / 24, rtol=1e-14, atol=0)
    with pytest.raises(BadData, match="frame 0: the frame has a virial but no cell"):
        AseDataset(write(tmp_path / "b.xyz", f'virials="{matrix}"'), {"virial": "virials"})
    with pytest.raises(BadData, match="not for both"):
        AseDataset(path, {"virial": "virials", "stress": "stress"})


def test_partial_periodicity_and_cell_of_a_molecule(tmp_path):
    path = write(
        tmp_path / "a.xyz", 'Lattice="9 0 0 0 9 0 0 0 9" pbc="T F T"', 'Lattice="9 0 0 0 9 0 0 0 9" pbc="F F F"'
    )
    data = AseDataset(path)
    assert data[0].system.pbc.tolist() == [[True, False, True]]
    assert data[1].system.pbc.tolist() == [[False] * 3] and data[1].system.cell[0, 0, 0] == 9


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_an_error_that_helps(tmp_path):
    path = write(tmp_path / "train.xyz", "REF_energy=1.0 other=3", "REF_energy=2.0")
    with pytest.raises(BadData, match=r"train\.xyz: no frame has 'energy'.*did you mean 'REF_energy'.*other"):
        AseDataset(path, {"energy": "energy"})
    with pytest.raises(BadData, match=r"unknown label 'enrgy', did you mean 'energy'"):
        AseDataset(path, {"enrgy": "REF_energy"})
    with pytest.raises(BadData, match=r"no frame has 'charge'"):
        AseDataset(path, {"energy": "REF_energy", "charge": "charge"})
    with pytest.raises(BadData, match=r"no frame has 'forces'.*Set forces to null .*evaluate` --forces-key null"):
        AseDataset(path, {"energy": "REF_energy", "forces": "forces"})
    assert len(AseDataset(path, {"energy": "REF_energy", "forces": None, "charge": None})) == 2
    assert AseDataset(path)[0].labels == {}


def test_labels_may_be_missing_in_some_frames(tmp_path):
    path = write(tmp_path / "a.xyz", "energy=1.0 my_note=x", "energy=nan", "")
    data = AseDataset(path, {"energy": "energy"})
    assert data[0].labels["energy"].item() == 1
    assert torch.isnan(data[1].labels["energy"]).all()
    assert data[2].labels == {}
    assert data.summary() == f"{path}: 3 frames; energy in 2; not read: my_note"


def test_charge_and_spin_of_a_frame(tmp_path):
    path = write(tmp_path / "a.xyz", "charge=-1 spin=2", "charge=1.0", "total_charge=2")
    data = AseDataset(path)
    assert [int(s.system.charge) for s in data] == [-1, 1, 2] and [int(s.system.spin) for s in data] == [2, 0, 0]
    assert "charge in 3" in data.summary() and "as it states: charge by 'total_charge'" in data.summary()
    assert [int(s.system.charge) for s in AseDataset(path, {"charge": "total_charge"})] == [0, 0, 2]
    data = AseDataset(path, {"charge": None})
    assert [int(s.system.charge) for s in data] == [0, 0, 0] and "not read: charge, total_charge" in data.summary()


# --- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("energy=inf", "frame 1: energy is infinite"),
        ("energy=none", "frame 1: 'energy' is not made of numbers: none"),
        ("energy", "frame 1: 'energy' is not made of numbers: True"),
        ("energy=1 energy=2", "frame 1: .*'energy' is given twice"),
        ("energy=1 note='energy=2' other={energy = 3}", ""),
        (
            "energy=1 charge=1e20",
            r"frame 1: charge must be a whole number up to 10,000, got 1e\+20; correct it, as in charge=0",
        ),
        ("energy=1 charge=0.5", "frame 1: charge must be a whole number, got 0.5"),
        (
            "energy=1 charge",
            "frame 1: charge must be a whole number, got True: in the comment line of a file, write charge=0",
        ),
        ("energy=1 charge=T", "frame 1: charge must be a whole number, got True"),
        ("energy=1 charge=2-", "frame 1: charge must be a whole number, got 2-; correct it, as in charge=-2, or leave"),
        ("energy=1 spin=nan", "frame 1: spin must be a whole number, got nan"),
        ('energy="1 2"', "frame 1: energy has the shape"),
        ('energy=1 Lattice="nan 0 0 0 1 0 0 0 1"', "frame 1: .*not finite"),
        ('energy=1 pbc="T T T"', "frame 1: .*lattice vector that is zero"),
    ],
)
def test_bad_entries_name_file_and_frame(tmp_path, comment, message):
    path = write(tmp_path / "a.xyz", "energy=1", comment)
    if not message:
        assert AseDataset(path, {"energy": "energy"})[1].system.charge.item() == 0
        return
    with pytest.raises(BadData, match=r"a\.xyz, " + message):
        AseDataset(path, {"energy": "energy"})


@pytest.mark.parametrize("atoms", ["H 0 0 0\n", "H 0 0 0\nQq 0 0 1\n", "H 0 0 0\nH 0 zero 1\n", "H 0 0 0\nH 0 nan 1\n"])
def test_bad_atoms_name_file_and_frame(tmp_path, atoms):
    path = write(tmp_path / "a.xyz", "energy=1")
    path.write_text(path.read_text() + f"2\n{HEAD} energy=1\n{atoms}")
    with pytest.raises(BadData, match=r"a\.xyz, frame 1: "):
        AseDataset(path, {"energy": "energy"})


@pytest.mark.parametrize("name", ["a.xyz", "a.traj", "a.db"])
@pytest.mark.parametrize("content", [b"", b"not what the name says\n" * 50])
def test_files_of_something_else(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=name):
        AseDataset(tmp_path / name)


@pytest.mark.parametrize("name", ["a.xyz", "a.traj"])
def test_truncated_files(tmp_path, name):
    ase.io.write(tmp_path / name, labelled_frames(), **({"format": "extxyz"} if "xyz" in name else {}))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-120])
    with pytest.raises(BadData, match=name):
        AseDataset(tmp_path / name, {"energy": "energy"})


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.xyz"):
        AseDataset(tmp_path / "none.xyz")
