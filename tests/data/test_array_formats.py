"""HDF5 and npz as ANI, AIMNet2 and others write them: names by keys, charges, cells, stress in every shape."""

import h5py
import numpy as np
import pytest

from torchmdnet2.data import open_dataset
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.units import BOHR, HARTREE, factor

KCAL_MOL = factor("energy", "kcal/mol")
RNG = np.random.default_rng(0)
HARTREES = {"energy": "hartree", "length": "angstrom"}
EV = {"energy": "eV", "length": "angstrom"}
POS, FORCES = RNG.normal(size=(3, 2, 3)), RNG.normal(size=(3, 2, 3))
ENERGY = np.array([-75.5, -75.25, -75.125])
CELL = np.array([[4.0, 0, 0], [1, 5, 0], [0, 0, 6]])  # 120 Å³
VOIGT = RNG.normal(size=(3, 6))
FULL = VOIGT[:, [[0, 5, 4], [5, 1, 3], [4, 3, 2]]]
STRESS = {"Voigt": VOIGT, "nine": FULL.reshape(3, 9), "full": FULL}


def write(path, groups):
    with h5py.File(path, "w") as file:
        for name, content in groups.items():
            for key, value in content.items():
                file[f"{name}/{key}"] = value
    return path


SPECIES = {
    "symbols, as ANI-1": np.array([b"O", b"H"]),
    "symbols of variable length": np.array(["O", "H"], dtype=object),
    "numbers of each frame, as ANI-2x": np.tile([8, 1], (3, 1)),
    "numbers": np.array([8, 1], dtype=np.uint8),
}


@pytest.mark.parametrize("species", SPECIES)
@pytest.mark.parametrize("group", ["2", "gdb11_s02/gdb11_s02-0", ""])
def test_ani(tmp_path, species, group):
    content = {"coordinates": POS, "species": SPECIES[species], "energies": ENERGY, "forces": FORCES}
    path = write(tmp_path / "a.h5", {group: content})
    for cache in ("off", tmp_path / "caches"):
        data = open_dataset(path, units=HARTREES, cache=cache)
        assert len(data) == 3 and [sample.system.z.tolist() for sample in data] == [[8, 1]] * 3
        assert data[1].labels["energy"].item() == -75.25 * HARTREE
        assert np.array_equal(data[1].labels["forces"], FORCES[1] * HARTREE)
        assert np.array_equal(data[1].system.pos, POS[1])
    with pytest.raises(BadData, match="has no attribute 'units'; give units"):
        open_dataset(path)


def test_ani1x_and_other_energies_by_keys(tmp_path):
    content = {"coordinates": POS, "atomic_numbers": [8, 1], "wb97x_dz.energy": ENERGY, "wb97x_dz.forces": FORCES}
    path = write(tmp_path / "a.h5", {"H1O1": {**content, "ccsd(t)_cbs.energy": [1.0, np.nan, 3.0]}})
    assert open_dataset(path, units=HARTREES)[0].labels["energy"].item() == ENERGY[0] * HARTREE
    other = open_dataset(path, {"energy": "ccsd(t)_cbs.energy"}, HARTREES)
    assert other[2].labels["energy"].item() == 3 * HARTREE and np.isnan(other[1].labels["energy"].item())


@pytest.mark.parametrize("charge", ["charge", "total_charge", "mol_charge"])
def test_aimnet2(tmp_path, charge):
    water = {"coord": np.zeros((1, 3, 3)) + np.eye(3), "numbers": [[8, 1, 1]], charge: [1.0], "energy": [-2000.0]}
    pairs = {
        "coord": POS.astype("f4"),
        "numbers": [[8, 1], [1, 9], [17, 1]],
        charge: np.array([-1, 0, 0], dtype="f4"),
        "mult": [1, 1, 3],
        "energy": ENERGY.astype("f4"),
        "forces": FORCES.astype("f4"),
        "charges": np.array([[-0.7, -0.3], [0.1, -0.1], [0, 0]]),
        "dipole": np.zeros((3, 3)),
        "volumes": np.ones((3, 2)),
    }
    path = write(tmp_path / "a.h5", {"002": pairs, "003": water})
    keys = {"energy": "energy", "forces": "forces", "charges": "charges"}
    for cache in ("off", tmp_path / "caches"):
        data = open_dataset(path, keys, EV, cache=cache)
        assert [sample.system.charge.item() for sample in data] == [-1, 0, 0, 1]
        assert [sample.system.spin.item() for sample in data] == [1, 1, 3, 0]
        assert data[1].system.z.tolist() == [1, 9] and data[0].labels["charges"].tolist() == [-0.7, -0.3]
        assert data[2].labels["energy"].dtype.itemsize == 8 and data[2].labels["energy"].item() == -75.125
    assert "volumes" in data.summary()
    assert open_dataset(path, {**keys, "charge": None}, EV)[0].system.charge.item() == 0
    write(path, {"002": {**pairs, "tot_charge": [0, 0, 0]}})
    with pytest.raises(BadData, match=r"both state the charge: choose one with keys\.charge"):
        open_dataset(path, keys, EV)
    assert open_dataset(path, {**keys, "charge": charge}, EV)[0].system.charge.item() == -1


def test_names_of_no_layout_by_keys(tmp_path):
    path = write(tmp_path / "a.h5", {"g": {"X": POS, "elements": [b"O", b"H"], "Y": ENERGY}})
    with pytest.raises(
        BadData, match=r"but has X, Y, elements\. Give other names as keys\.numbers and keys\.positions"
    ):
        open_dataset(path, {"energy": "Y"}, EV)
    data = open_dataset(path, {"energy": "Y", "numbers": "elements", "positions": "X"}, EV)
    assert data[2].labels["energy"].item() == ENERGY[2] and data[2].system.z.tolist() == [8, 1]
    np.savez(tmp_path / "a.npz", X=POS, elements=[8, 1], Y=ENERGY)
    with pytest.raises(BadData, match=r"the file has: X, Y, elements\. Give another name as keys\.positions"):
        open_dataset(tmp_path / "a.npz", {"energy": "Y"}, EV)
    other = open_dataset(tmp_path / "a.npz", {"energy": "Y", "numbers": "elements", "positions": "X"}, EV)
    assert other[2].labels["energy"].item() == ENERGY[2] and np.array_equal(other[2].system.pos, POS[2])
    (tmp_path / "a.xyz").write_text("1\n\nH 0 0 0\n")
    with pytest.raises(BadData, match=r"keys\.positions is for formats of arrays"):
        open_dataset(tmp_path / "a.xyz", {"positions": "X"})


def test_unknown_symbols(tmp_path):
    path = write(tmp_path / "a.h5", {"g": {"coordinates": POS, "species": [b"O", b"Q"], "energies": ENERGY}})
    with pytest.raises(BadData, match="there is no element 'Q'"):
        open_dataset(path, units=EV)[0]


@pytest.mark.parametrize("form", STRESS)
@pytest.mark.parametrize("label", ["stress", "virial"])
@pytest.mark.parametrize("kind", ["h5", "npz"])
def test_stress_and_virial_in_every_shape(tmp_path, form, label, kind):
    path = tmp_path / f"a.{kind}"
    content = {"coord": POS, "numbers": [8, 1], "energy": ENERGY, "cell": CELL, label: STRESS[form]}
    if kind == "h5":
        write(path, {"g": content})
    else:
        np.savez(path, **content)
    by = -1 / 120 if label == "virial" else 1.0
    for cache in ("off", tmp_path / "caches"):
        data = open_dataset(path, {"energy": "energy", label: label}, EV, cache=cache)
        assert data[2].labels["stress"][0].numpy() == pytest.approx(by * FULL[2], abs=1e-14)
        assert data[2].system.pbc.all() and np.array_equal(data[2].system.cell[0], CELL)
    kbar = open_dataset(path, {"stress": label}, {**EV, "stress": "kB"})[0].labels["stress"][0]
    assert kbar.numpy() == pytest.approx(FULL[0] / 1602.1766208, rel=1e-7)


def test_npz_with_cells_and_charges_of_each_frame(tmp_path):
    cells = CELL * np.array([1, 2, 3])[:, None, None]
    content = {"R": POS, "z": [8, 1], "E": ENERGY, "lattice": cells, "pbc": [True, True, False]}
    np.savez(tmp_path / "a.npz", **content, total_charge=[-1, 0, 1], multiplicity=[1, 2, 1])
    data = open_dataset(tmp_path / "a.npz", units=EV)
    assert [sample.system.charge.item() for sample in data] == [-1, 0, 1]
    assert [sample.system.spin.item() for sample in data] == [1, 2, 1]
    assert np.array_equal(data[2].system.cell[0], 3 * CELL) and data[2].system.pbc[0].tolist() == [True, True, False]
    bohr = open_dataset(tmp_path / "a.npz", units={"energy": "eV", "length": "bohr"})
    assert bohr[0].system.cell[0, 2, 2].item() == pytest.approx(6 * 0.529177210903)


def test_a_virial_without_a_cell(tmp_path):
    content = {"coord": POS, "numbers": [8, 1], "energy": ENERGY, "virial": FULL}
    np.savez(tmp_path / "a.npz", **content)
    for path in (tmp_path / "a.npz", write(tmp_path / "a.h5", {"g": content})):
        with pytest.raises(BadData, match="the frame has a virial but no cell"):
            list(open_dataset(path, {"virial": "virial"}, EV))


WATER = {"types": [8, 1, 1], "pos": np.zeros((2, 3, 3)) + np.eye(3), "energy": [-76.0, -75.0]}


@pytest.mark.parametrize(
    ("of_file", "of_group", "keys", "expected"),
    [
        ({}, {"charge": -1, "multiplicity": 2}, None, (-1, 2, 1.0)),
        ({"total_charge": np.array([-2.0])}, {}, None, (-2, 0, 1.0)),
        ({"charge": 1}, {"charge": -1}, None, (-1, 0, 1.0)),
        ({"charge": 1}, {}, {"charge": None, "energy": "energy"}, (0, 0, 1.0)),
        ({"energy_unit": np.bytes_("hartree"), "pos_unit": "bohr"}, {}, None, (0, 0, HARTREE)),
        ({"units": "hartree bohr"}, {}, None, (0, 0, HARTREE)),
        ({"charge": -1}, {"net_charge": -2}, None, "attribute 'charge' and -2 by attribute 'net_charge'"),
        ({"charge": 0.5}, {}, None, "must be a whole number"),
        (
            {"energy_unit": "hartre", "pos_unit": "bohr"},
            {},
            None,
            "dataset 'energy': energy_unit=hartre: unknown energy unit",
        ),
    ],
)
def test_attributes_of_hdf5_files_and_groups(tmp_path, of_file, of_group, keys, expected):
    path = write(tmp_path / "a.h5", {"m": WATER})
    with h5py.File(path, "r+") as file:
        file.attrs.update(of_file)
        file["m"].attrs.update(of_group)
    units = None if any("unit" in name for name in of_file) else EV
    for cache in ("off", tmp_path / "caches"):
        if isinstance(expected, str):
            with pytest.raises(BadData, match=expected):
                open_dataset(path, keys, units, cache=cache)
            continue
        for sample in open_dataset(path, keys, units, cache=cache):
            assert (sample.system.charge.item(), sample.system.spin.item()) == expected[:2]
        assert sample.labels["energy"].item() == pytest.approx(-75 * expected[2])


def test_attributes_and_given_units_that_differ(tmp_path):
    path = write(tmp_path / "a.h5", {"m": WATER})
    with h5py.File(path, "r+") as file:
        file["m"].attrs["energy_unit"] = "hartree"
    with pytest.raises(BadData, match="states energy_unit=hartree, but the given unit differs"):
        open_dataset(path, units=EV)


@pytest.mark.parametrize(("charges", "charge", "said"), [(-1, None, True), (-1, -1, False), (0, None, False)])
@pytest.mark.parametrize("form", ["h5", "npz"])
def test_charges_of_atoms_without_a_total_charge_are_named(tmp_path, form, charges, charge, said, recwarn):
    content = {**WATER, "mulliken": np.full((2, 3), charges / 3), **({} if charge is None else {"charge": charge})}
    path = tmp_path / f"a.{form}"
    if form == "h5":
        write(path, {"m": content})
    else:
        np.savez(path, **{{"types": "z"}.get(name, name): value for name, value in content.items()})
    data = open_dataset(path, units=EV)
    assert data[0].system.charge.item() == (charge or 0)
    found = [str(one.message) for one in recwarn if issubclass(one.category, StructureWarning)]
    assert len(found) == said and (not said or "'mulliken' of the atoms sum to -1" in found[0])


@pytest.mark.parametrize(
    ("energy", "forces", "units", "expected"),
    [
        ("energy_hartree", "forces_hartree_bohr", None, (HARTREE, HARTREE / BOHR)),
        ("E(kcal/mol)", "F_kcal_mol_ang", None, (KCAL_MOL, KCAL_MOL)),
        ("dft_energy_eV", "dft_forces", None, (1.0, 1.0)),
        ("dft_energy", "dft_forces", None, (1.0, 1.0)),
        ("energy_Au", "forces", None, (1.0, 1.0)),
        ("energy_hartree", "forces_ev_per_ang", {"energy": "hartree"}, (HARTREE, 1.0)),
        ("energy_hartree", "forces_hartree_bohr", {"energy": "kcal/mol"}, None),
        ("energy_kcalmol", "forces_kcalmolA", None, (KCAL_MOL, KCAL_MOL)),
        ("mp2_kcal", "forces_kcal_A", None, (KCAL_MOL, KCAL_MOL)),
        ("EnergyHartree", "ForcesHartreeBohr", None, (HARTREE, HARTREE / BOHR)),
        ("hartree_energy", "hartree_per_bohr_forces", None, (HARTREE, HARTREE / BOHR)),
        ("E_kcal_mol_dft", "F_eVA", None, (KCAL_MOL, 1.0)),
        ("hartree_fock_energy", "hartree_fock_forces", None, (1.0, 1.0)),
        ("au_energy", "au_forces", None, (1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("form", ["xyz", "h5", "npz"])
def test_units_in_the_names_of_labels(tmp_path, form, energy, forces, units, expected):
    path, keys = tmp_path / f"a.{form}", {"energy": energy, "forces": forces}
    content = {"pos": np.zeros((1, 3, 3)) + np.eye(3), energy: [-76.0], forces: np.full((1, 3, 3), 0.5)}
    if form == "h5":
        write(path, {"m": {"types": [8, 1, 1], **{name.replace("/", "_"): value for name, value in content.items()}}})
        keys = {label: name.replace("/", "_") for label, name in keys.items()}
    elif form == "npz":
        np.savez(path, z=[8, 1, 1], **content)
    else:
        rows = "".join(f"{s} {x} {y} {z} 0.5 0.5 0.5\n" for s, (x, y, z) in zip("OHH", content["pos"][0], strict=True))
        path.write_text(f"3\nProperties=species:S:1:pos:R:3:{forces}:R:3 {energy}=-76.0\n{rows}")
    if form != "xyz":
        units = EV if units is None and expected == (1.0, 1.0) else {"length": "angstrom", **(units or {})}
    if expected is None:
        with pytest.raises(BadData, match=r"given unit|states a unit, but the unit of"):
            open_dataset(path, keys, units)
        return
    labels = open_dataset(path, keys, units)[0].labels
    assert labels["energy"].item() == pytest.approx(-76 * expected[0])
    np.testing.assert_allclose(labels["forces"], 0.5 * expected[1], rtol=1e-6)
