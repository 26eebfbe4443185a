"""Formats of TorchMD-Net besides its HDF5: sets of .npy files, and the Ace layout."""

import h5py
import numpy as np
import pytest

from torchmdnet2.data import CachedDataset, open_dataset
from torchmdnet2.data.ace_format import AceReader
from torchmdnet2.errors import BadData
from torchmdnet2.units import KCAL_MOL

RNG = np.random.default_rng(0)
UNITS = {"energy": "kcal/mol", "length": "angstrom"}


# --- .npy ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path):
    """Two molecules, 4 and 2 frames."""
    written = {}
    for k, (z, frames) in enumerate((([8, 1, 1], 4), ([6, 1, 1, 1, 1], 2))):
        pos, forces = RNG.normal(size=(2, frames, len(z), 3)).astype(np.float32)
        energy = RNG.normal(size=(frames, 1)) - 5e4
        for name, array in (("coords", pos), ("embed", np.array(z)), ("energy", energy), ("forces", forces)):
            np.save(tmp_path / f"{name}_{k}.npy", array)
        written[k] = (z, pos, energy, forces)
    return written


def keys(folder, **more):
    return {name: str(folder / f"{file}_*.npy") for name, file in
            {"numbers": "embed", "energy": "energy", "forces": "forces", **more}.items()}  # fmt: skip


@pytest.mark.parametrize("cached", [False, True])
def test_npy(tmp_path, sets, cached, monkeypatch):
    monkeypatch.setattr("torchmdnet2.data.npy_format._CHUNK_ATOMS", 9)  # three waters at a time
    cache = tmp_path / "caches" if cached else "off"
    data = open_dataset(str(tmp_path / "coords_*.npy"), keys(tmp_path), UNITS, cache=cache)
    assert isinstance(data, CachedDataset) == cached and len(data) == 6
    assert data.name(5) == f"{tmp_path / 'coords_1.npy'}, frame 1"
    index = 0
    for z, pos, energy, forces in sets.values():
        for k in range(len(pos)):
            sample = data[index]
            assert sample.system.z.tolist() == z
            np.testing.assert_array_equal(sample.system.pos, pos[k].astype(float))
            np.testing.assert_allclose(sample.labels["energy"], energy[k] * KCAL_MOL, rtol=1e-15)
            np.testing.assert_allclose(sample.labels["forces"], forces[k].astype(float) * KCAL_MOL, rtol=1e-14)
            index += 1
    assert "6 frames; energy in 6, forces in 6" in data.summary()


def test_npy_cache_follows_all_files(tmp_path, sets):
    def first():
        data = open_dataset(str(tmp_path / "coords_*.npy"), keys(tmp_path), UNITS, cache=tmp_path / "caches")
        return float(data[0].labels["energy"])

    before = first()
    np.save(tmp_path / "energy_0.npy", sets[0][2] + 1)
    assert first() == pytest.approx(before + KCAL_MOL, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "embed_1.npy").unlink(), "2 files of coordinates, but 1 of numbers"),
        (lambda d: np.save(d / "embed_1.npy", np.array([6, 1])), r"embed_1\.npy: 5 whole atomic numbers"),
        (lambda d: np.save(d / "energy_1.npy", np.zeros(3)), r"energy_1\.npy: energy has the shape \(3,\)"),
        (lambda d: np.save(d / "forces_0.npy", np.zeros((4, 3, 2))), r"forces_0\.npy: forces has the shape"),
        (lambda d: np.save(d / "coords_0.npy", np.zeros((4, 9))), r"coords_0\.npy: coordinates of the shape"),
        (lambda d: np.save(d / "coords_0.npy", np.full((4, 3, 3), np.inf)), r"coords_0\.npy, frame 0: atom 0"),
        (lambda d: np.save(d / "energy_0.npy", np.array([{}] * 4)), r"energy_0\.npy: it is damaged or not a .npy file"),
        (lambda d: (d / "forces_1.npy").write_bytes(b"\x93NUMPY"), r"forces_1\.npy: it is damaged"),
        (lambda d: np.save(d / "energy_0.npy", np.array(["a"] * 4)), r"energy_0\.npy: numbers are expected"),
    ],
)
def test_bad_npy(tmp_path, sets, change, message):
    change(tmp_path)
    with pytest.raises(BadData, match=message):
        open_dataset(str(tmp_path / "coords_*.npy"), keys(tmp_path), UNITS)


def test_npy_needs_numbers_and_units(tmp_path, sets):
    with pytest.raises(BadData, match=r"give keys\.numbers"):
        open_dataset(str(tmp_path / "coords_*.npy"), {"energy": "x"}, UNITS)
    with pytest.raises(BadData, match="state no units"):
        open_dataset(str(tmp_path / "coords_*.npy"), keys(tmp_path), {"length": "angstrom"})
    with pytest.raises(BadData, match="cannot be mixed"):
        (tmp_path / "a.xyz").write_text("")
        open_dataset([tmp_path / "a.xyz", tmp_path / "coords_0.npy"], keys(tmp_path), UNITS)


# --- Ace -------------------------------------------------------------------------------------------------------------

UNIT = {"positions": "Å", "forces": "eV/Å", "partial_charges": "e", "dipole_moment": "e*Å", "dipole_moments": "e*Å"}
Z, CHARGES = np.array([7, 1, 1, 1, 1]), np.array([1, 0, 0, 0, 0])


def put(group, name, values):
    group[name] = values
    group[name].attrs["units"] = "eV" if "energ" in name else UNIT[name]


def write_ace(path, version, frames=3):
    pos, forces = RNG.normal(size=(2, frames, 5, 3)).astype(np.float32)
    energy, charges, dipole = RNG.normal(size=frames), RNG.normal(size=(frames, 5)), RNG.normal(size=(frames, 3))
    with h5py.File(path, "w") as file:
        file.attrs["layout"], file.attrs["layout_version"], file.attrs["name"] = "Ace", version, "test"
        if version == "1.0":
            molecule = file.create_group("NH4")
            for k in range(frames):
                group = molecule.create_group(f"conformations/c{k}")
                values = {"positions": pos, "formation_energy": energy[:, None], "forces": forces}
                values |= {"partial_charges": charges, "dipole_moment": dipole}
                for name, value in values.items():
                    put(group, name, value[k])
        else:
            molecule = file.create_group("master/NH4")
            values = {"positions": pos, "formation_energies": energy, "forces": forces}
            values |= {"partial_charges": charges, "dipole_moments": dipole}
            for name, value in values.items():
                put(molecule, name, value)
        molecule["atomic_numbers"], molecule["formal_charges"] = Z, CHARGES
    return pos.astype(float), energy, forces.astype(float), charges, dipole


ALL = {name: name for name in ("energy", "forces", "charges", "dipole")}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("cached", [False, True])
def test_ace(tmp_path, version, cached):
    pos, energy, forces, charges, dipole = write_ace(tmp_path / "a.h5", version)
    data = open_dataset(tmp_path / "a.h5", ALL, cache=tmp_path / "caches" if cached else "off")
    assert len(data) == 3 and data.name(2) == f"{tmp_path / 'a.h5'}, molecule 'NH4', frame 2"
    for k, sample in enumerate(data):
        assert sample.system.z.tolist() == Z.tolist() and sample.system.charge.tolist() == [1]
        for value, expected in (
            (sample.system.pos, pos[k]),
            (sample.labels["energy"], energy[k : k + 1]),
            (sample.labels["forces"], forces[k]),
            (sample.labels["charges"], charges[k]),
            (sample.labels["dipole"], dipole[k : k + 1]),
        ):
            np.testing.assert_allclose(value, expected, rtol=1e-14)
    default = open_dataset(tmp_path / "a.h5", {"energy": "energy", "charge": None})
    assert default[0].labels.keys() == {"energy"} and default[0].system.charge.tolist() == [0]


def test_bad_ace(tmp_path):
    write_ace(tmp_path / "a.h5", "2.0")
    with pytest.raises(BadData, match="no frame has 'stress'"):
        open_dataset(tmp_path / "a.h5", {"stress": "stress"})
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["master/NH4/forces"].attrs["units"]
    with pytest.raises(BadData, match=r"a\.h5, molecule 'NH4': dataset 'forces' has no attribute 'units'"):
        open_dataset(tmp_path / "a.h5", ALL)
    assert len(open_dataset(tmp_path / "a.h5", ALL, {"forces": "eV/angstrom"})) == 3
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["master/NH4/forces"].attrs["units"] = "kcal"
    with pytest.raises(BadData, match="dataset 'forces': unknown force unit 'kcal'"):
        open_dataset(tmp_path / "a.h5", ALL)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.attrs["layout_version"] = "3.0"
    with pytest.raises(BadData, match=r"version '3\.0' of the Ace layout"):
        open_dataset(tmp_path / "a.h5", ALL)
    write_ace(tmp_path / "b.h5", "1.0")
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        del file["NH4/atomic_numbers"]
    with pytest.raises(BadData, match=r"b\.h5, molecule 'NH4': it is damaged or not of the Ace layout"):
        open_dataset(tmp_path / "b.h5", ALL)
    write_ace(tmp_path / "c.h5", "2.0", frames=0)
    with pytest.raises(BadData, match=r"c\.h5: the file has no frames"):
        open_dataset(tmp_path / "c.h5", ALL)
    with pytest.raises(FileNotFoundError, match=r"there is no data file .*d\.h5"):
        AceReader(tmp_path / "d.h5")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("atomic_numbers", [7.5, 1, 1, 1, 1], "dataset 'atomic_numbers' must hold whole numbers"),
        ("formal_charges", [0.9, 0, 0, 0, 0], "dataset 'formal_charges' must hold whole numbers"),
        ("formal_charges", [np.nan, 0, 0, 0, 0], "dataset 'formal_charges' must hold whole numbers"),
        ("formal_charges", [1, 0], "5 formal charges are expected"),
        (
            "atomic_numbers",
            [7, 1, 1],
            r"atomic numbers of the shape \(3,\) do not fit positions of the shape .*3, 5, 3.*",
        ),
        ("forces", np.zeros((3, 4, 3)), r"forces has the shape \(3, 4, 3\), which does not fit 3 frames of 5 atoms"),
    ],
)
def test_whole_numbers_of_ace(tmp_path, name, values, message):
    write_ace(tmp_path / "a.h5", "2.0")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["master/NH4"][name]
        file["master/NH4"][name] = np.array(values)
        file["master/NH4"][name].attrs["units"] = UNIT.get(name, "")
    with pytest.raises(BadData, match=rf"a\.h5, molecule 'NH4': {message}"):
        open_dataset(tmp_path / "a.h5", ALL)
