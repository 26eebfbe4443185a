"""Charge, spin, units and cell that a file states: the same by every way in, from every format."""

import h5py
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.db import connect
from ase.io import write

from torchmdnet2 import System
from torchmdnet2.data import open_dataset, read_structures
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.units import BOHR, HARTREE

POSITIONS = np.array([[0.0, 0.0, 0.0], [0.0, 1.4, 1.1], [0.0, -1.4, 1.1]])
UNITS = {"pos_unit": "bohr", "energy_unit": "hartree", "forces_unit": "hartree/bohr"}
STATES = {"total_charge": -1, "multiplicity": 2}
FORMATS = {"xyz": None, "extxyz": "ase/extxyz", "traj": None, "db": None, "json": "ase/json"}


def frame(cell=20.0, **info):
    atoms = Atoms("OH2", POSITIONS, cell=[cell] * 3 if cell else None, pbc=bool(cell), info=info)
    atoms.calc = SinglePointCalculator(atoms, energy=-76.0, forces=np.full((3, 3), 0.01))
    return atoms


@pytest.fixture(params=FORMATS)
def written(tmp_path, request):
    """Writes a frame; returns path and format."""

    def make(atoms):
        path = tmp_path / f"a.{request.param}"
        path.unlink(missing_ok=True)
        if request.param in ("db", "json"):
            connect(path).write(atoms, atoms.info)
        else:
            write(path, atoms)
        return path, FORMATS[request.param]

    return make


def by_data(path, format, keys=None, units=None):
    data = open_dataset(path, {"energy": "energy", "forces": "forces", **(keys or {})}, units, format=format)
    return data[0].system, data[0].labels


def by_structures(path, format):
    (atoms,) = read_structures(path)
    return System.from_ase(atoms), {}


WAYS = {"data": by_data, "structures": by_structures}


@pytest.mark.filterwarnings("ignore::torchmdnet2.errors.StructureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_charge_spin_units_and_cell(written, way):
    path, format = written(frame(**STATES, **UNITS))
    system, labels = WAYS[way](path, format)
    assert (system.charge.item(), system.spin.item()) == (-1, 2)
    np.testing.assert_allclose(system.pos, POSITIONS * BOHR, rtol=1e-7)
    np.testing.assert_allclose(system.cell[0], np.eye(3) * 20 * BOHR, rtol=1e-7)
    if labels:
        assert labels["energy"].item() == pytest.approx(-76 * HARTREE)
        np.testing.assert_allclose(labels["forces"], 0.01 * HARTREE / BOHR, rtol=1e-7)


def test_a_file_without_statements(written):
    system, labels = by_data(*written(frame()))
    assert (system.charge.item(), system.spin.item(), labels["energy"].item()) == (0, 0, -76)
    np.testing.assert_allclose(system.pos, POSITIONS, rtol=1e-7)
    assert not by_data(*written(frame(cell=0)))[0].pbc.any()


@pytest.mark.parametrize(
    ("info", "keys", "expected"),
    [
        ({"total_charge": -1, "net_charge": 0}, {"charge": "net_charge"}, 0),
        ({"total_charge": -1, "net_charge": 0}, {"charge": "total_charge"}, -1),
        ({"total_charge": -1, "net_charge": 0}, {}, None),
        ({"my_q": -2}, {"charge": "my_q"}, -2),
        ({"total_charge": -1}, {"charge": None}, 0),
    ],
)
def test_a_key_chooses_among_statements(written, info, keys, expected):
    path, format = written(frame(**info))
    if expected is None:
        with pytest.raises(BadData, match=r"total charge is -1 by 'total_charge' and 0 by 'net_charge'"):
            by_data(path, format, keys)
    else:
        assert by_data(path, format, keys)[0].charge.item() == expected


@pytest.mark.parametrize(
    ("info", "units", "words"),
    [
        (
            {"energy_unit": "hartree"},
            {"energy": "kcal/mol"},
            "states energy_unit=hartree, but the given unit is kcal",
        ),
        ({"energy_unit": "hartree"}, None, "but no unit of the forces"),
        ({"pos_unit": "bohr"}, None, "but no unit of the forces"),
        ({"energy_unit": "hartre"}, None, "energy_unit=hartre: unknown energy unit"),
        ({"forces_unit": "hartree/bohr"}, None, "but no unit of the energy: give it as in units: {energy: eV}"),
        ({"units": "kcal/mol/angstrom"}, None, "but no unit of the energy"),
        ({"f_unit": "a.u."}, None, "but no unit of the energy"),
    ],
)
def test_units_that_cannot_be_used_are_an_error(written, info, units, words):
    path, format = written(frame(**info))
    with pytest.raises(BadData, match=f"frame 0: .*{words}"):
        by_data(path, format, units=units)


def test_an_energy_beside_forces_in_other_units_needs_one_only_if_it_is_read(written):
    forces = 0.01 * HARTREE / BOHR
    for units in ({"energy": "eV"}, None):
        keys = {} if units else {"energy": None}
        labels = by_data(*written(frame(forces_unit="hartree/bohr")), keys, units)[1]
        np.testing.assert_allclose(labels["forces"], forces, rtol=1e-7)
    labels = by_data(*written(frame(forces_unit="eV/bohr")))[1]
    assert labels["energy"].item() == -76


@pytest.mark.parametrize(
    "name",
    ["dft_gradient", "Gradients", "engrad", "orca_engrad", "grad_hartree_bohr", "dE_dr", "neg_gradient", "forces2"],
)
@pytest.mark.parametrize("suffix", ["xyz", "npz", "h5"])
def test_gradients_by_name_are_negated_in_every_format(tmp_path, name, suffix):
    values, path = np.arange(9.0).reshape(3, 3), tmp_path / f"a.{suffix}"
    content = {"positions": POSITIONS[None], "numbers": np.array([8, 1, 1]), "energy": [-76.0], name: values[None]}
    if suffix == "npz":
        np.savez(path, **content)
    elif suffix == "h5":
        with h5py.File(path, "w") as file:
            for key, value in content.items():
                file[f"a/{key}"] = value
    else:
        atoms = frame()
        atoms.set_array(name, values)
        write(path, atoms)
    keys = {"energy": "energy", "forces": name}
    if suffix == "h5":
        keys |= {"numbers": "numbers", "positions": "positions"}
    units = {"energy": "eV", "length": "angstrom"} | ({"forces": "hartree/bohr"} if "hartree" in name else {})
    by = (HARTREE / BOHR if "hartree" in name else 1) * (1 if name in ("neg_gradient", "forces2") else -1)
    data = open_dataset(path, keys, units)
    np.testing.assert_allclose(data[0].labels["forces"], by * values, rtol=1e-12)
    with pytest.raises(BadData, match="'energy_per_atom' is an energy per atom, and the energy of the frame is needed"):
        open_dataset(path, {**keys, "energy": "energy_per_atom"}, units)


def test_structures_have_no_results_in_other_units(tmp_path):
    write(tmp_path / "a.xyz", frame(energy_unit="hartree"))
    with pytest.warns(StructureWarning, match=r"states energy_unit=hartree; energies and forces are left out"):
        (atoms,) = read_structures(tmp_path / "a.xyz")
    assert atoms.calc is None
    np.testing.assert_allclose(atoms.positions, POSITIONS, rtol=1e-7)
    write(tmp_path / "a.xyz", frame(energy_unit="eV"))
    assert read_structures(tmp_path / "a.xyz")[0].get_potential_energy() == -76
