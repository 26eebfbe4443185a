"""Single .npz files: sGDML's and rMD17's names, units, and whatever can be wrong with them."""

import numpy as np
import pytest

from torchmdnet2.data import CachedDataset, open_dataset
from torchmdnet2.data.npy_format import NpzReader
from torchmdnet2.errors import BadData
from torchmdnet2.units import BOHR, HARTREE, KCAL_MOL

RNG = np.random.default_rng(0)
Z = np.array([8, 1, 1])
POS, FORCES = RNG.normal(size=(2, 5, 3, 3))
ENERGY = RNG.normal(size=5) - 5e4
UNITS = {"energy": "kcal/mol", "length": "angstrom"}
SGDML = {"R": POS, "z": Z.astype(np.uint8), "E": ENERGY[:, None], "F": FORCES}
RMD17 = {"coords": POS, "nuclear_charges": Z, "energies": ENERGY, "forces": FORCES, "old_energies": ENERGY}
KEYS = {"energy": "energy", "forces": "forces"}  # the defaults of a training


def written(folder, content):
    np.savez(folder / "a.npz", **content)
    return folder / "a.npz"


@pytest.mark.parametrize("content", [SGDML, RMD17, {**SGDML, "z": np.tile(Z, (5, 1))}])
@pytest.mark.parametrize("keys", [KEYS, None])
@pytest.mark.parametrize("cached", [False, True])
def test_both_sets_of_names(tmp_path, content, keys, cached, monkeypatch):
    monkeypatch.setattr("torchmdnet2.data.npy_format._CHUNK_ATOMS", 6)  # two frames at a time
    data = open_dataset(written(tmp_path, content), keys, UNITS, cache=tmp_path / "caches" if cached else "off")
    assert isinstance(data, CachedDataset) == cached and len(data) == 5
    batch = data.batch(range(5))
    assert batch.system.z.tolist() == 5 * Z.tolist()
    np.testing.assert_array_equal(batch.system.pos, POS.reshape(-1, 3))
    np.testing.assert_allclose(batch.labels["energy"], ENERGY * KCAL_MOL, rtol=1e-15)
    np.testing.assert_allclose(batch.labels["forces"], FORCES.reshape(-1, 3) * KCAL_MOL, rtol=1e-14)
    assert data.name(3).endswith("a.npz, frame 3")


def test_a_key_of_its_own_and_charges(tmp_path):
    content = {**RMD17, "charge": np.full(5, -1), "old_energies": ENERGY + 1}
    sample = open_dataset(written(tmp_path, content), {"energy": "old_energies"}, UNITS)[0]
    assert sample.labels.keys() == {"energy"} and float(sample.system.charge[0]) == -1
    assert float(sample.labels["energy"][0]) == pytest.approx((ENERGY[0] + 1) * KCAL_MOL, rel=1e-15)


def test_a_placeholder_of_a_cell_is_an_error(tmp_path):
    """Here nothing says that it comes of a PDB file, and the cell is easily left out."""
    cells = np.tile(8 * np.eye(3), (5, 1, 1))
    cells[3] = np.eye(3)
    content = {**SGDML, "cell": cells, "pbc": [True, True, True]}
    with pytest.raises(BadData, match=r"a\.npz, frame 3: the cell of 1 × 1 × 1 Å is a placeholder, .* leave the cell"):
        open_dataset(written(tmp_path, content), KEYS, UNITS)
    assert len(open_dataset(written(tmp_path, {**content, "pbc": [False] * 3}), KEYS, UNITS)) == 5


def test_charge_spin_and_units_under_other_names_are_listed(tmp_path):
    """In what `train` notes, and not where their names were given or are the usual ones."""
    path = written(tmp_path, {**SGDML, "total_charge": -1, "mult": np.full(5, 2), "e_unit": "eV", "r_unit": "A"})
    stated = open_dataset(path, KEYS).stated
    assert stated == {
        "charge": "'total_charge'", "spin": "'mult'", "unit of energy": "e_unit=eV", "unit of length": "r_unit=A",
    }  # fmt: skip
    assert "as it states: charge by 'total_charge', spin by 'mult', unit of" in open_dataset(path, KEYS).summary()
    given = {**KEYS, "charge": "total_charge", "spin": None}
    assert open_dataset(path, given).stated.keys() == {"unit of energy", "unit of length"}
    assert not open_dataset(written(tmp_path, {**SGDML, "charge": -1, "spin": 2}), KEYS, UNITS).stated


def test_units_that_the_file_states(tmp_path):
    path = written(tmp_path, {**SGDML, "e_unit": "hartree", "r_unit": np.bytes_("bohr")})
    sample = open_dataset(path, KEYS)[0]
    np.testing.assert_allclose(sample.system.pos, POS[0] * BOHR, rtol=1e-15)
    np.testing.assert_allclose(sample.labels["forces"], FORCES[0] * HARTREE / BOHR, rtol=1e-14)
    with pytest.raises(BadData, match="state no units; give them"):
        open_dataset(written(tmp_path, {**SGDML, "e_unit": "N/A", "r_unit": "Ang"}), KEYS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"R": None}, "positions must be called R, coords"),
        ({"z": None}, "atomic numbers must be called z, nuclear_charges"),
        ({"E": ENERGY[:4]}, r"array 'E': energy has the shape \(4,\)"),
        ({"F": FORCES[:, :2]}, r"array 'F': forces has the shape \(5, 2, 3\)"),
        ({"z": np.array([8, 1])}, "3 whole atomic numbers"),
        ({"z": np.array([8, 1, 1.5])}, "3 whole atomic numbers"),
        ({"R": np.where(POS == POS[2, 1, 0], np.nan, POS)}, r"a\.npz, frame 2: atom 1"),
        ({"E": np.array([{}] * 5)}, "'E' is damaged or does not consist of numbers"),
        ({"E": np.array(["x"] * 5)}, "'E' has the type .* instead of numbers"),
        ({"E": None}, "no frame has 'energy'"),
        ({"lattice": np.eye(2)}, r"'lattice': cell has the shape \(2, 2\)"),
        ({"unit_cell": np.eye(3)}, r"a\.npz: 'unit_cell' is not read as a cell: call it cell"),
        ({"Lattice": np.tile(np.eye(3), (5, 1, 1))}, r"a\.npz: 'Lattice' is not read as a cell"),
        ({"lattice": np.eye(3), "box": np.eye(3)}, r"a\.npz: it has both a box and a lattice"),
    ],
)
def test_faults_are_named(tmp_path, change, message):
    content = {name: array for name, array in {**SGDML, **change}.items() if array is not None}
    with pytest.raises(BadData, match=message):
        open_dataset(written(tmp_path, content), KEYS, UNITS)


def test_damaged_files(tmp_path):
    path = written(tmp_path, SGDML)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[whole.index(POS.tobytes()[:64]) + 5] ^= 1
    for content in (b"", b"junk" * 50, whole[: len(whole) // 2], bytes(changed)):
        path.write_bytes(content)
        with pytest.raises(BadData, match=r"a\.npz: .*damaged"):
            open_dataset(path, KEYS, UNITS)


def test_other_files_of_the_name(tmp_path):
    with open(tmp_path / "a.npz", "wb") as file:
        np.save(file, POS)
    with pytest.raises(BadData, match=r"a\.npz: it is not a \.npz file"):
        open_dataset(tmp_path / "a.npz", KEYS, UNITS)
    with pytest.raises(FileNotFoundError, match=r"there is no data file .*b\.npz"):
        NpzReader(tmp_path / "b.npz")
