"""Every fault of an HDF5 file is an error that names the file and the record."""

import h5py
import numpy as np
import pytest

from torchmdnet2.data import HDF5Dataset, open_dataset, write_hdf5
from torchmdnet2.errors import BadData
from torchmdnet2.units import HARTREE

from .frames import make_sample
from .test_hdf5 import EV, write_peer, write_spice


def read_all(path, **options):
    return list(HDF5Dataset(path, **options))


def test_missing_units(tmp_path):
    write_peer(tmp_path / "a.h5")
    with pytest.raises(BadData, match=r"a\.h5, group 'a', dataset 'pos': it has no attribute 'units'; give"):
        read_all(tmp_path / "a.h5")
    with pytest.raises(BadData, match=r"dataset 'energy': it has no attribute 'units'"):
        read_all(tmp_path / "a.h5", units={"length": "angstrom"})
    write_spice(tmp_path / "b.h5", units=False)
    with pytest.raises(BadData, match=r"b\.h5, group 'molecule', dataset 'conformations': it has no attribute 'units'"):
        read_all(tmp_path / "b.h5")
    assert len(read_all(tmp_path / "b.h5", units={"energy": "hartree", "length": "bohr"})) == 3


def test_units_in_the_file_come_first(tmp_path):
    write_spice(tmp_path / "a.h5")
    stated, declared = read_all(tmp_path / "a.h5")[0], read_all(tmp_path / "a.h5", units=EV)[0]
    assert stated.labels["energy"].item() == declared.labels["energy"].item()


@pytest.mark.parametrize("name", ["unit", "Units", "UNIT"])
def test_units_in_any_spelling_come_first(tmp_path, name):
    write_peer(tmp_path / "a.h5")
    plain = read_all(tmp_path / "a.h5", units=EV)[0].labels["energy"].item()
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["a/energy"].attrs[name] = "hartree"
    stated = read_all(tmp_path / "a.h5", units=EV)[0].labels["energy"].item()
    assert stated == pytest.approx(plain * HARTREE)


@pytest.mark.parametrize(
    ("charges", "attributes", "words"),
    [
        ([-2, -2], {"total_charge": -1}, "-1 by attribute 'total_charge' and -2 by dataset 'charge'"),
        ([-1, -2], {"charge": -1}, "-1 by attribute 'charge' and -2 by dataset 'charge'"),
        ([-1, -1], {"charge": -1}, None),
    ],
)
def test_attributes_and_datasets_that_differ(tmp_path, charges, attributes, words):
    write_peer(tmp_path / "a.h5", 2, charge=np.array(charges))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["a"].attrs.update(attributes)
    if words is None:
        assert read_all(tmp_path / "a.h5", units=EV)[0].system.charge.item() == -1
        return
    with pytest.raises(BadData, match=f"group 'a': the total charge is {words}"):
        read_all(tmp_path / "a.h5", units=EV)
    assert HDF5Dataset(tmp_path / "a.h5", {"charge": "charge"}, EV)[0].system.charge.item() == charges[0]


def test_unknown_units(tmp_path):
    write_spice(tmp_path / "a.h5", dft_total_energy="hartrees")
    with pytest.raises(BadData, match=r"group 'molecule', dataset 'dft_total_energy': unknown energy unit 'hartrees'"):
        read_all(tmp_path / "a.h5")
    write_spice(tmp_path / "a.h5", dft_total_gradient="hartree")
    with pytest.raises(BadData, match=r"dft_total_gradient': unknown force unit"):
        read_all(tmp_path / "a.h5")


def test_wrong_keys(tmp_path):
    write_peer(tmp_path / "a.h5")
    with pytest.raises(BadData, match=r"no frame has 'enery'.*did you mean 'energy'.*partial_charges"):
        HDF5Dataset(tmp_path / "a.h5", {"energy": "enery"}, EV)
    with pytest.raises(BadData, match=r"no frame has 'stress', which is the key of stress"):
        open_dataset(tmp_path / "a.h5", {"energy": "energy", "stress": "stress"}, EV)
    with pytest.raises(BadData, match="no frame has 'virial'"):
        HDF5Dataset(tmp_path / "a.h5", {"virial": "virial"}, EV)


FRAMES = 4
BAD = [
    ({"types": None}, r"group 'a': the group needs types and pos or .*, but has energy, forces, pos"),
    ({"types": np.array([8, 1])}, r"group 'a', frame 0: there are 3 positions, but the atomic numbers"),
    (
        {"types": np.array([8.0, 1, 1])},
        r"group 'a', frame 0: there are 3 positions, but the atomic numbers are float64",
    ),
    ({"types": np.array([8, 0, 1])}, r"group 'a', frame 0: the atomic number of atom 1 is 0"),
    ({"types": np.tile([8, 1, 1], (3, 1))}, r"group 'a', dataset 'types': its shape \(3, 3\) does not fit 4 frames"),
    ({"pos": np.zeros((FRAMES, 3, 2))}, r"group 'a', frame 0: pos has the shape \(3, 2\), not \(3, 3\)"),
    ({"pos": np.full((FRAMES, 3, 3), np.nan)}, r"group 'a', frame 0: atom 0: its position is not finite"),
    ({"energy": np.zeros(3)}, r"group 'a', dataset 'energy': its shape \(3,\) does not fit 4 frames"),
    ({"energy": 1.0}, r"group 'a', dataset 'energy': its shape \(\) does not fit"),
    ({"energy": np.zeros((FRAMES, 2))}, r"group 'a', frame 0: energy has the shape \(2,\)"),
    ({"energy": np.array([0, 1, -np.inf, 3])}, r"group 'a', frame 2: energy is infinite"),
    ({"energy": np.array([b"a", b"b", b"c", b"d"])}, r"group 'a', dataset 'energy': numbers are expected"),
    ({"forces": np.zeros((FRAMES, 2, 3))}, r"group 'a', frame 0: forces has the shape \(2, 3\)"),
    ({"charge": np.array([0, 0.5, 0, 0])}, r"group 'a', frame 1: charge must be a whole number, got 0\.5"),
    ({"charge": np.array([0, 1])}, r"group 'a', dataset 'charge': its shape \(2,\) does not fit"),
    ({"spin": np.array([1, 1, 1, -3])}, r"group 'a', frame 3: .*spin multiplicity is negative"),
    ({"cell": np.zeros((FRAMES, 3))}, r"group 'a', frame 0: cell has the shape|dataset 'cell'|frame 0: cell"),
    ({"cell": np.eye(3), "pbc": np.ones((FRAMES, 2))}, r"group 'a', frame 0: pbc has the shape \(2,\)"),
    ({"cell": np.full((3, 3), np.nan)}, r"group 'a', frame 0: structure 0: its cell is not finite"),
    ({"cell": np.diag([5, 5, 1e-9])}, r"group 'a', frame 0: a lattice vector is shorter than 0\.1 Å; is the unit"),
    ({"cell": np.eye(3), "box": np.eye(3)}, r"group 'a': it has both a cell and a box"),
    ({"Unit-Cell": np.eye(3)}, r"group 'a': 'Unit-Cell' is not read as a cell: call it cell"),
    ({"lattice_vectors": np.tile(np.eye(3), (FRAMES, 1, 1))}, r"group 'a': 'lattice_vectors' is not read as a cell"),
    ({"cell": np.eye(3), "pbc": np.array([1, 0.5, 0])}, r"group 'a', frame 0: pbc must consist of 0 and 1, not"),
    ({"cell": np.eye(3), "pbc": np.array([1, np.nan, 0])}, r"group 'a', frame 0: pbc must consist of 0 and 1, not"),
    ({"pos": 1.0}, r"group 'a': positions of the shape \[frames, atoms, 3\] are expected, not \(\)"),
    ({"pos": np.zeros(3)}, r"group 'a': positions of the shape \[frames, atoms, 3\] are expected, not \(3,\)"),
    (
        {"charge": np.array([0, 0, 1e20, 0])},
        r"group 'a', frame 2: charge must be a whole number up to 10,000, got 1e\+20; ",
    ),
    (
        {"spin": np.array([0, 2**40, 0, 0])},
        r"group 'a', frame 1: spin must be a whole number up to 10,000, got 1099511",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_bad_values(tmp_path, change, message):
    write_peer(tmp_path / "a.h5", FRAMES, **change)
    with pytest.raises(BadData, match=r"a\.h5, " + message):
        read_all(tmp_path / "a.h5", units=EV)


def test_nan_is_no_label(tmp_path):
    write_peer(tmp_path / "a.h5", energy=np.array([0, np.nan, 2, 3]))
    assert [bool(s.labels["energy"].isnan()) for s in read_all(tmp_path / "a.h5", units=EV)] == [0, 1, 0, 0, 0, 0]


def test_other_hdf5_files(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["pos"] = np.zeros((3, 3))
    with pytest.raises(BadData, match=r"a\.h5, group 'pos': a group of frames is expected"):
        read_all(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["m/types/inner"] = [1]
        file["m/pos"] = np.zeros((1, 1, 3))
    with pytest.raises(BadData, match=r"b\.h5, group 'm': it is damaged"):
        read_all(tmp_path / "b.h5", units=EV)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_group("_metadata")
    with pytest.raises(BadData, match=r"c\.h5: the file has no frames"):
        read_all(tmp_path / "c.h5")
    (tmp_path / "d.h5").write_text("not HDF5")
    with pytest.raises(BadData, match=r"d\.h5: it is damaged or not an HDF5 file"):
        read_all(tmp_path / "d.h5")
    with pytest.raises(FileNotFoundError, match=r"e\.h5"):
        read_all(tmp_path / "e.h5")


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    write_hdf5(tmp_path / "a.h5", [make_sample(seed=k) for k in range(6)])
    return tmp_path / "a.h5"


def chunk_places(path):
    """dataset -> (offset, size) of its first chunk in the file."""
    with h5py.File(path) as file:
        group = file["group_0000000"]
        chunks = {name: group[name].id.get_chunk_info(0) for name in group}
    return {name: (chunk.byte_offset, chunk.size) for name, chunk in chunks.items()}


@pytest.mark.parametrize("name", ["types", "pos", "energy", "forces", "charge", "spin"])
def test_a_flipped_bit_in_the_numbers_is_found(written, name):
    offset, size = chunk_places(written)[name]
    intact = written.read_bytes()
    for place in (0, size // 2, size - 1):  # the last bytes are the checksum
        content = bytearray(intact)
        content[offset + place] ^= 0x10
        written.write_bytes(content)
        with pytest.raises(BadData, match=rf"a\.h5, group 'group_0000000', frame 0: dataset '{name}' is damaged"):
            read_all(written)


def test_flipped_bytes_anywhere_are_found_or_harmless(written):
    """No flip may give other numbers: either BadData, or exactly the frames that were written."""
    from .frames import same

    expected = [make_sample(seed=k) for k in range(6)]
    intact = written.read_bytes()
    found = 0
    for place in np.random.default_rng(0).integers(0, len(intact), 300).tolist():
        content = bytearray(intact)
        content[place] ^= 0xFF
        written.write_bytes(content)
        try:
            got = read_all(written)
        except BadData as error:
            assert str(written) in str(error)
            found += 1
            continue
        assert len(got) == 6 and all(same(a, b) for a, b in zip(got, expected, strict=True)), place
    assert found > 200


def test_a_damaged_root_is_named(written):
    """Also where the file is asked first which layout it has."""
    intact = written.read_bytes()
    for place in (48, 96, 144):  # the header of the root group
        content = bytearray(intact)
        content[place] ^= 1
        written.write_bytes(content)
        with pytest.raises(BadData, match=r"a\.h5: it is damaged"):
            open_dataset(written)


def test_truncated_files_are_found(written):
    intact = written.read_bytes()
    for part in (0.0, 0.1, 0.5, 0.9, 0.999):
        written.write_bytes(intact[: int(part * len(intact))])
        with pytest.raises(BadData, match=r"a\.h5"):
            read_all(written)
