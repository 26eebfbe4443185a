"""A charge, spin, unit or cell that a structure states is used at every way in, or refused: it never becomes 0."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.db import connect
from ase.io import read, write
from tiny import tiny_potential

from torchmdnet2 import Potential, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.core import stated, stated_words
from torchmdnet2.core.stated import charge_and_spin, whole_number
from torchmdnet2.data import AseDataset, Sample, open_dataset, read_structures
from torchmdnet2.data.check import check_batch
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.scan import scan_molecule

HARTREE, BOHR = 27.211386245988, 0.529177210903
SYMBOLS = "CCO4"
POSITIONS = np.array([[0.77, 0, 0], [-0.77, 0, 0], [1.36, 1.1, 0], [1.36, -1.1, 0], [-1.36, 1.1, 0], [-1.36, -1.1, 0]])
SDF = (
    "oxalate\n by hand\n\n  6  0  0  0  0  0            999 V2000\n"
    + "".join(
        f"{x:10.4f}{y:10.4f}{z:10.4f} {s}   0  0\n" for s, (x, y, z) in zip("CCOOOO", POSITIONS, strict=True)
    )
    + "M  CHG  2   4  -1   6  -1\nM  END\n$$$$\n"
)  # fmt: skip


def oxalate(**info):
    return Atoms(SYMBOLS, POSITIONS, info=info)


def with_charges(values):
    atoms = oxalate()
    atoms.set_initial_charges(values)
    return atoms


WAYS = {
    "charge": lambda: oxalate(charge=-2),
    "total_charge": lambda: oxalate(total_charge=-2.0),
    "text": lambda: oxalate(tot_charge="-2"),
    "rounding": lambda: oxalate(charge=-1.9999999999),
    "initial charges": lambda: with_charges([0, 0, 0, -1, 0, -1]),
    "partial charges": lambda: with_charges([0.7, 0.7, -0.85, -0.85, -0.85, -0.85]),
    "two that agree": lambda: oxalate(charge=-2, net_charge=-2),
}


@pytest.fixture(scope="module")
def potential():
    """Sees the charge; knows the elements of oxalate, -2 and 0."""
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "q_dim": 4},
        "elements": [1, 6, 8], "total_charges": [-2, 0],
    }  # fmt: skip
    config["model"] = {**config["model"], "name": "tensornet2"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = Potential.from_config(config).double().eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return made


@pytest.fixture(scope="module")
def energies(potential):
    """Of both charges."""
    systems = [System(z=[6, 6, 8, 8, 8, 8], pos=torch.tensor(POSITIONS), charge=q) for q in (0, -2)]
    neutral, ion = (float(potential(system).energy) for system in systems)
    assert abs(neutral - ion) > 1e-3
    return {0: neutral, -2: ion}


@pytest.mark.parametrize("way", WAYS)
def test_the_charge_is_used_by_systems_calculators_and_data(potential, energies, tmp_path, way):
    atoms = WAYS[way]()
    assert System.from_ase(atoms).charge.tolist() == [-2.0]
    atoms.calc = TorchMDNet2Calculator(potential)
    assert atoms.get_potential_energy() == pytest.approx(energies[-2], abs=1e-9)
    assert atoms.calc.atoms.info["charge"] == -2
    (result,) = TorchMDNet2Calculator(potential).evaluate([WAYS[way]()])
    assert result["energy"] == pytest.approx(energies[-2], abs=1e-9)
    # ASE writes no info into a database
    for name in ("a.xyz", "a.traj", "a.db") if "charges" in way else ("a.xyz", "a.traj"):
        write(tmp_path / name, WAYS[way]())
        assert AseDataset(tmp_path / name)[0].system.charge.tolist() == [-2.0]


@pytest.mark.parametrize("way", ["total_charge", "initial charges", "sdf"])
def test_the_charge_is_used_by_the_commands(potential, energies, tmp_path, capsys, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    save(potential, "m.tmn")
    name = "a.sdf" if way == "sdf" else "a.xyz"
    if way == "sdf":
        (tmp_path / name).write_text(SDF)
    else:
        write(name, WAYS[way]())
    assert main(["md", "m.tmn", name, "--steps", "1", "--every", "1", "--dtype", "float64", "--device", "cpu"]) == 0
    assert f"note: {name} states the total charge -2" in capsys.readouterr().err
    ran = float((tmp_path / "md.csv").read_text().splitlines()[1].split(",")[3])
    assert ran == pytest.approx(energies[-2], abs=1e-3)
    assert main(["md", "m.tmn", name, "--steps", "1", "--charge", "-1"]) == 2
    assert "--charge: " in capsys.readouterr().err
    if way != "sdf":
        frame = WAYS[way]()
        frame.calc = SinglePointCalculator(frame, energy=energies[-2], forces=np.zeros((6, 3)))
        write("l.xyz", frame, columns=["symbols", "positions", "forces", *frame.arrays.keys() & {"initial_charges"}])
        assert main(["evaluate", "m.tmn", "l.xyz", "--json", "--device", "cpu"]) == 0
        assert json.loads(capsys.readouterr().out)["energy"]["mae"] < 1e-6
    else:
        assert main(["evaluate", "m.tmn", name, "--unlabelled", "--output", "p.xyz", "--device", "cpu"]) == 0
        assert read("p.xyz").get_potential_energy() == pytest.approx(energies[-2], abs=1e-6)


def test_runs_and_stability_from_structures_in_memory_use_the_charge(potential, energies, tmp_path):
    options = MDOptions(steps=1, every=1, output=str(tmp_path / "r"))
    run_md(potential, with_charges([0, 0, 0, -1, 0, -1]), options, dtype="float64")
    frame = read(tmp_path / "r.xyz", 0)
    assert frame.info["charge"] == -2
    with pytest.raises(ValueError, match=r"total charge is -2 .*, but charge=0 is given"):
        run_md(potential, with_charges([0, 0, 0, -1, 0, -1]), options, charge=0)


@pytest.mark.parametrize(
    ("atoms", "words"),
    [
        (oxalate(charge=-2, total_charge=0), r"total charge is -2 by info\['charge'\] and 0 by info\['total_charge'\]"),
        (oxalate(spin=1, multiplicity=3), r"spin multiplicity is 1 by info\['spin'\] and 3 by info\['multiplicity'\]"),
        (oxalate(total_charge=0.5), r"info\['total_charge'\] must be a whole number, got 0.5"),
        (oxalate(multiplicity=True), "must be a whole number, got True"),
        (oxalate(**{"pos-unit": "bohr"}), "pos-unit=bohr is stated, and positions of ase.Atoms are in Å"),
    ],
)
def test_statements_that_differ_are_an_error_that_names_both(potential, atoms, words):
    with pytest.raises(BadData, match=words):
        System.from_ase(atoms)
    with pytest.raises(BadData, match=words):
        TorchMDNet2Calculator(potential).get_potential_energy(atoms)


def test_initial_charges_against_an_entry_and_the_constructor(potential):
    atoms = with_charges([0, 0, 0, -1, 0, -1])
    with pytest.raises(BadData, match="by the sum of the initial charges, but charge=-1 is given"):
        TorchMDNet2Calculator(potential, charge=-1).get_potential_energy(atoms)
    atoms.info["charge"] = 0
    with pytest.raises(BadData, match="by the sum of the initial charges"):
        System.from_ase(atoms)
    atoms.set_initial_charges(None)
    assert System.from_ase(atoms).charge.tolist() == [0.0]


def test_what_cannot_be_used_is_named():
    with pytest.warns(StructureWarning, match="the initial charges do not sum to a whole number"):
        assert System.from_ase(with_charges([0.1, 0.2, 0, 0, 0, 0])).charge.tolist() == [0.0]
    with pytest.warns(StructureWarning, match=r"info\['ion_charge'\] is not read"):
        assert charge_and_spin(oxalate(ion_charge=-2)) == (None, None)
    with pytest.warns(StructureWarning, match="begins with '-2 1', which is not read"):
        charge_and_spin(oxalate(**{"-2": True, "1": True}))
    with pytest.warns(StructureWarning, match=r"info\['formal_charge'\] is not read, since it has 2 values"):
        charge_and_spin(oxalate(formal_charge=np.array([0, 1])))
    assert charge_and_spin(oxalate(formal_charge=np.array([0, 0, 0, -1, 0, -1]))) == (-2, None)
    assert charge_and_spin(oxalate(total_charge=None, multiplicity=None)) == (None, None)


def test_nuclear_charges_are_no_charges(tmp_path):
    water = "3\nProperties=species:S:1:pos:R:3:charges:R:1\nO 0 0 0 {}\nH 0 0 1 {}\nH 0 1 0 {}\n"
    for charges, total in (((8, 1, 1), None), ((1, 1, 1), 3), ((2, 0, 0), 2), ((-6, 1, 1), -4)):
        (tmp_path / "a.xyz").write_text(water.format(*charges))
        with warnings.catch_warnings():
            warnings.simplefilter("error", StructureWarning)
            assert read_structures(tmp_path / "a.xyz")[0].info.get("charge") == total


def test_other_values_of_atoms_are_no_charges(tmp_path):
    columns = ("hirshfeld_ratios", "hirshfeld_volumes", "mbis_radii", "bader_volume", "charge_variance", "q_std")
    head = "".join(f":{name}:R:1" for name in columns)
    (tmp_path / "a.xyz").write_text(f"1\nProperties=species:S:1:pos:R:3{head}\nO 0 0 0{' 3.0' * len(columns)}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructureWarning)
        assert "charge" not in read_structures(tmp_path / "a.xyz")[0].info


@pytest.mark.parametrize("comment", ["oxalate 2-, frame {}", 'name="triplet {}"', 'title="{} in bohr"', "id={} z=-2",
                                     "time = {}, a = 9.{}, b = 9.8, c = 9.8"])  # fmt: skip
def test_a_statement_in_all_frames_is_named_once(tmp_path, comment):
    (tmp_path / "a.xyz").write_text("".join(f"1\n{comment.format(k, k)}\nO 0 0 0\n" for k in range(9)))
    for read_it in (read_structures, lambda path: list(open_dataset(path, {}))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            read_it(tmp_path / "a.xyz")
        assert len([one for one in caught if "is not read" in str(one.message)]) == 1


def test_a_count_of_unpaired_electrons_and_words_for_the_multiplicity(tmp_path):
    assert charge_and_spin(oxalate(uhf=2))[1] == 3
    assert charge_and_spin(oxalate(uhf=True))[1] is None
    assert charge_and_spin(oxalate(spin="Triplet"))[1] == 3
    with pytest.warns(StructureWarning, match="not a number of unpaired electrons"):
        assert charge_and_spin(oxalate(UHF=-76.1))[1] is None
    (tmp_path / "a.xyz").write_text("1\nunpaired=1 charge=-1\nO 0 0 0\n")
    for keys in ({}, {"spin": "unpaired"}):
        assert open_dataset(tmp_path / "a.xyz", keys)[0].system.spin.tolist() == [2]


@pytest.mark.parametrize(
    ("name", "value", "spin"), [("uhf", 2, 3), ("n_unpaired", 1, 2), ("UHF", -76.1, 0), ("mult", 3, 3)]
)
@pytest.mark.parametrize("suffix", ["h5", "npz"])
def test_unpaired_electrons_in_arrays(tmp_path, name, value, spin, suffix):
    arrays = {"coord": np.zeros((2, 1, 3)), "numbers": np.array([[8], [8]]), name: np.array([value, value])}
    path = tmp_path / f"a.{suffix}"
    if suffix == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for key, array in arrays.items():
                file[f"one/{key}"] = array
    else:
        np.savez(path, **arrays)
    units = {"energy": "eV", "length": "angstrom"}
    assert [s.system.spin.item() for s in open_dataset(path, {}, units)] == [spin, spin]
    if spin and suffix == "h5":
        (sample, _) = open_dataset(path, {"spin": name}, units, cache="off")  # frame by frame
        assert sample.system.spin.item() == spin


@pytest.fixture(params=["h5", "npz"])
def arrays_of_oxalate(request, tmp_path):
    """A function that writes a file of two frames of oxalate, with further arrays, and gives its path."""

    def made(**more):
        arrays = {"coord": np.stack([POSITIONS] * 2), "numbers": np.array([6, 6, 8, 8, 8, 8]), **more}
        path = tmp_path / f"a.{request.param}"
        if request.param == "npz":
            np.savez(path, **arrays)
            return path
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for key, array in arrays.items():
                file[f"one/{key}"] = array
        return path

    return made


EV = {"energy": "eV", "length": "angstrom"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"Q": [-2, -2]}, "'Q' is not read"),
        ({"ion_charge": -2}, "'ion_charge' is not read"),
        ({"formal_charges": [0, 0, 0, -1, 0, -1]}, "'formal_charges' of the atoms sum to -2"),
        ({"hirshfeld": np.full((2, 6), -1 / 3)}, "'hirshfeld' of the atoms sum to -2"),
        ({"q": np.full((2, 6, 1), -1 / 3)}, "'q' of the atoms sum to -2"),
        ({"nelectrons": [46, 46]}, "'nelectrons' is not read: .* write charge=-2"),
        ({"n_alpha": [23, 23], "n_beta": [23, 23]}, "'n_alpha' and 'n_beta' are not read: .* write charge=-2 spin=1"),
        ({"charge_mult": [[-2, 1], [-2, 1]]}, "'charge_mult' is not read: .* write charge=-2 spin=1"),
    ],
)
def test_charges_of_arrays_that_are_not_read_are_named(arrays_of_oxalate, more, words):
    path = arrays_of_oxalate(**{name: np.asarray(values) for name, values in more.items()})
    with pytest.warns(StructureWarning, match=words):
        assert open_dataset(path, {}, EV)[1].system.charge.tolist() == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructureWarning)
        path = arrays_of_oxalate(charge=-2, **{name: np.asarray(values) for name, values in more.items()})
        assert open_dataset(path, {}, EV)[1].system.charge.tolist() == [-2]
    if "the atoms" in words:
        for charge in (0, np.array([0, 0])):
            path = arrays_of_oxalate(charge=charge, **{name: np.asarray(values) for name, values in more.items()})
            with pytest.warns(StructureWarning, match=f"{words}, and the total charge is stated as 0"):
                open_dataset(path, {}, EV)


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"total_charges": [-2, -2]}, (-2, 0)), ({"multiplicities": [3, 3]}, (0, 3)),
        ({"S": [1, 1]}, "'S' is not read: if it is the spin S, write spin=3"),
        ({"spins": [[1, 1, 0, 0, 0, 0]] * 2}, "'spins' of the atoms sum to 2, and no multiplicity is stated"),
        ({"nelectrons": [44, 44]}, (0, 0)), ({"n_alpha": [22, 22], "n_beta": [22, 22]}, (0, 0)),
        ({"spins": [[1, -1, 0, 0, 0, 0]] * 2}, (0, 0)), ({"S": [0.3, 0.3]}, (0, 0)),
        ({"charge_mult": [[0, 1]] * 2}, (0, 0)), ({"charges": [[6, 6, 8, 8, 8, 8]] * 2}, (0, 0)),
    ],
)  # fmt: skip
def test_further_names_in_arrays(arrays_of_oxalate, more, state):
    path = arrays_of_oxalate(**{name: np.asarray(values) for name, values in more.items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        system = open_dataset(path, {}, EV)[1].system
    told = [str(one.message) for one in caught if issubclass(one.category, StructureWarning)]
    if isinstance(state, str):
        assert len(told) == 1 and state in told[0] and str(path) in told[0]
    else:
        assert not told and (system.charge.item(), system.spin.item()) == state


def test_attributes_of_groups_that_name_an_ion_are_told_once(tmp_path):
    with pytest.importorskip("h5py").File(path := tmp_path / "a.h5", "w") as file:
        for k, name in enumerate(("oxalic acid", "oxalate(2-)", "carbonate(2-)")):
            file[f"{k}/pos"], file[f"{k}/types"] = POSITIONS[None], [6, 6, 8, 8, 8, 8]
            file[f"{k}"].attrs["name"] = name
    with pytest.warns(StructureWarning) as caught:
        open_dataset(path, {}, EV)
    (told,) = [str(one.message) for one in caught]
    assert "group '1': 'oxalate(2-)' in 'name' is not read" in told


def test_smiles_and_texts_in_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", R=POSITIONS[None], z=[6, 6, 8, 8, 8, 8], name="oxalate(2-)")
    with pytest.warns(StructureWarning, match=r"\(2-\)' .* if it states a total charge"):
        open_dataset(tmp_path / "a.npz", {}, EV)
    h5py = pytest.importorskip("h5py")
    for number, smiles in ((1, ["[O-]C(=O)C(=O)[O-]"]), (2, ["[O-]C(=O)C(=O)[O-]", "OC(=O)C(=O)[O-]"])):
        for charge in (None, -1):
            path = tmp_path / f"{number}{charge}.h5"
            with h5py.File(path, "w") as file:
                file["one/pos"], file["one/types"] = np.stack([POSITIONS] * number), [6, 6, 8, 8, 8, 8]
                file["one/smiles"] = smiles
                if charge is not None:
                    file["one"].attrs["charge"] = charge  # what is stated by name comes first
            wanted = [-2, -1] if charge is None else [charge] * 2
            assert open_dataset(path, {}, EV).batch(range(number)).system.charge.tolist() == wanted[:number]
    with h5py.File(path := tmp_path / "attribute.h5", "w") as file:
        file["one/pos"], file["one/types"] = POSITIONS[None], [6, 6, 8, 8, 8, 8]
        file["one"].attrs["smiles"] = smiles[0]
    with pytest.warns(StructureWarning, match="formal charges of 'smiles' sum to -2"):
        open_dataset(path, {}, EV)


@pytest.mark.parametrize(
    ("stated", "given", "words"),
    [
        ({"e_unit": "Ha"}, {}, "its 'e_unit=Ha' states a unit, but the unit of energy is eV"),
        ({"r_unit": "Bohr"}, {}, "its 'r_unit=Bohr' states a unit, but the unit of length is angstrom"),
        ({"units": "kcal/mol"}, {}, "its 'units=kcal/mol' states a unit, but the unit of energy is eV"),
        ({"force_unit": "hartree/bohr"}, {"forces": "eV/angstrom"}, "but the unit of forces is eV/angstrom"),
    ],
)
def test_units_of_npz_files_against_those_given(tmp_path, stated, given, words):
    arrays = {"R": POSITIONS[None], "z": [6, 6, 8, 8, 8, 8], "E": [-1.0], "F": np.ones((1, 6, 3))}
    np.savez(tmp_path / "a.npz", **arrays, **stated)
    keys = {"energy": "energy", "forces": "forces"}
    with pytest.raises(BadData, match=words):
        open_dataset(tmp_path / "a.npz", keys, {**EV, **given})
    if "force_unit" in stated:
        sample = open_dataset(tmp_path / "a.npz", keys, EV)[0]
        assert sample.labels["forces"][0, 0].item() == pytest.approx(HARTREE / BOHR)


@pytest.mark.parametrize(
    "entry",
    [
        'cell="10 0 0 0 10 0 0 0 10"',
        'Box="10 10 10"',
        'unit_cell="9 9 9 90 90 90"',
        'lattice_parameters="9 9 9 90 90 90"',
        'cellpar="9 9 9 90 90 90"',
    ],
)
def test_a_cell_that_is_not_called_lattice_is_refused(tmp_path, entry):
    (tmp_path / "a.xyz").write_text(f"1\nProperties=species:S:1:pos:R:3 {entry}\nO 0 0 0\n")
    for read_it in (read_structures, lambda path: open_dataset(path, {})):
        with pytest.raises(BadData, match="is not read as a cell: write it as Lattice="):
            read_it(tmp_path / "a.xyz")
    (tmp_path / "a.xyz").write_text('1\nLattice="9 0 0 0 9 0 0 0 9" cell="9 0 0 0 9 0 0 0 9"\nO 0 0 0\n')
    assert read_structures(tmp_path / "a.xyz")[0].cell.volume == pytest.approx(729)
    (tmp_path / "a.xyz").write_text('1\ncell="0 0 0" box=small\nO 0 0 0\n')
    assert not read_structures(tmp_path / "a.xyz")[0].pbc.any()


def test_dipoles_need_a_unit_where_another_length_is_stated(tmp_path):
    comment = 'pos_unit=bohr energy=1 dipole="1 0 0"'
    (tmp_path / "a.xyz").write_text(f"1\n{comment}\nO 0 0 0\n")
    keys = {"energy": "energy", "dipole": "dipole"}
    with pytest.raises(BadData, match=r"states pos_unit=bohr, but no unit of the dipole: .*{dipole: debye}"):
        open_dataset(tmp_path / "a.xyz", keys)
    data = open_dataset(tmp_path / "a.xyz", keys, {"dipole": "e*bohr"})
    assert data[0].labels["dipole"][0, 0].item() == pytest.approx(0.529177210903)


def test_entries_that_are_read_are_those_that_state_something(tmp_path):
    (tmp_path / "a.xyz").write_text("1\ntotal_charge=-1 charge_total_note=x tot=5 energy_unit=eV energy=1\nO 0 0 0\n")
    summary = open_dataset(tmp_path / "a.xyz", {"energy": "energy"}).summary()
    assert "charge by 'total_charge'" in summary and "not read: charge_total_note, tot;" in summary


IPI = (
    "# CELL(abcABC):   18.89726  18.89726  37.79452  90.0  90.0  60.0  Step:  {}  Bead:   0 positions{{{}}}  cell{{{}}}"
)


@pytest.mark.parametrize(("unit", "by"), [("atomic_unit", BOHR), ("angstrom", 1.0)])
def test_units_and_cell_of_a_trajectory_of_i_pi(tmp_path, unit, by):
    frames = "".join(f"1\n{IPI.format(k, unit, 'atomic_unit')}\nO 1.0 0.0 {k}.0\n" for k in range(2))
    (tmp_path / "a.xyz").write_text(frames)
    found = read_structures(tmp_path / "a.xyz")
    assert found[1].cell.cellpar() == pytest.approx([10, 10, 20, 90, 90, 60], abs=1e-4) and found[1].pbc.all()
    assert found[1].positions == pytest.approx(np.array([[1.0, 0.0, 1.0]]) * by)
    assert found[1].info["Step"] == 1 and "pos_unit" not in found[1].info
    system = open_dataset(tmp_path / "a.xyz", {})[1].system
    np.testing.assert_allclose(system.cell[0], found[1].cell.array, atol=1e-6)
    np.testing.assert_allclose(system.pos, found[1].positions, atol=1e-6)


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        (IPI.format(0, "atomic_unit", "atomic_unit").replace("positions", "forces"), "a trajectory of forces, not of"),
        ("# CELL(H): 9 0 0 0 9 0 0 0 9 Step: 1 positions{angstrom} cell{angstrom}", r"CELL\(H\) is not read: write it"),
        ("CELL(abcABC): 9 9 9 90 90 90", r"the cell CELL\(abcABC\) is not read: .* as pos_unit=… and cell_unit=…"),
    ],
)
def test_another_header_of_i_pi_is_an_error(tmp_path, comment, words):
    (tmp_path / "a.xyz").write_text(f"1\n{comment}\nO 0.0 0.0 0.0\n")
    for read_it in (read_structures, lambda path: open_dataset(path, {})):
        with pytest.raises(BadData, match=words):
            read_it(tmp_path / "a.xyz")


def test_a_charge_in_a_dictionary_is_named():
    with pytest.warns(
        StructureWarning, match=r"'charge' in info\['molecule'\] is not read: write charge=-2 outside of it"
    ):
        charge_and_spin(oxalate(molecule={"charge": -2, "multiplicity": 1}))
    with pytest.warns(StructureWarning, match=r"'multiplicity' in info\['molecule'\] is not read: write spin=3"):
        charge_and_spin(oxalate(molecule={"charge": 0, "multiplicity": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructureWarning)
        assert charge_and_spin(oxalate(occupancy={"0": {"C": 1.0}}, molecule={"charge": 0})) == (None, None)


def test_a_warning_is_shown_once(potential, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(potential, "m.tmn")
    (tmp_path / "a.xyz").write_text("3\n0 3 \nO 0 0 0\nH 0 0.76 0.6\nH 0 -0.76 0.6\n")
    assert main(["md", "m.tmn", "a.xyz", "--steps", "1", "--every", "1"]) == 0
    assert capsys.readouterr().err.count("begins with '0 3'") == 1


@pytest.mark.parametrize("copied", [lambda atoms: atoms, deepcopy])
def test_what_a_reader_has_told_a_calculator_does_not_repeat(potential, tmp_path, copied):
    for name in ("a.xyz", "b.xyz"):
        (tmp_path / name).write_text("3\noxalate 2- Q=-2\nO 0 0 0\nH 0 0.76 0.6\nH 0 -0.76 0.6\n")
        with pytest.warns(StructureWarning) as caught:
            (atoms,) = read_structures(tmp_path / name)
        assert len(caught) == 2 and all(str(one.message).startswith(f"{tmp_path / name}: '") for one in caught)
    atoms = copied(atoms)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructureWarning)
        TorchMDNet2Calculator(potential).get_potential_energy(atoms)
        System.from_ase(atoms)
    atoms.info["chg"] = 3
    with pytest.warns(StructureWarning) as caught:  # a further entry is named
        System.from_ase(atoms)
    assert [str(one.message)[:24] for one in caught] == ["info['chg'] is not read: "[:24]]
    with pytest.warns(StructureWarning, match=r"info\['Q'\]"):  # and so are all of a structure in memory
        System.from_ase(Atoms(atoms, info={**atoms.info}))


def test_magnetic_moments_state_the_multiplicity_of_molecules():
    assert System.from_ase(molecule("O2")).spin.tolist() == [3]
    assert System.from_ase(molecule("CH3")).spin.tolist() == [2]
    assert System.from_ase(molecule("H2O")).spin.tolist() == [0]
    iron = bulk("Fe", cubic=True)
    iron.set_initial_magnetic_moments([2.0, 2.0])
    with pytest.warns(StructureWarning, match="of a periodic structure are not read"):
        assert System.from_ase(iron).spin.tolist() == [0]
    antiparallel = molecule("O2")
    antiparallel.set_initial_magnetic_moments([1, -1])
    assert System.from_ase(antiparallel).spin.tolist() == [1]
    triplet = molecule("O2")
    triplet.info["spin"] = 1
    with pytest.raises(BadData, match="by the sum of the initial magnetic moments"):
        System.from_ase(triplet)


def test_triplet_oxygen_is_refused_by_a_model_of_the_lowest_spin(potential, tmp_path, capsys):
    save(potential, tmp_path / "m.tmn")
    for k, info in enumerate(({"multiplicity": 3}, {"spin": 3}, {})):
        atoms = molecule("O2")
        if info:
            atoms.set_initial_magnetic_moments(None)
        atoms.info.update(info)
        write(tmp_path / f"{k}.xyz", atoms)
        assert main(["md", str(tmp_path / "m.tmn"), str(tmp_path / f"{k}.xyz"), "--steps", "1"]) == 1
        assert "spin multiplicity 3" in capsys.readouterr().err


def test_a_cell_of_one_angstrom_is_no_cell(potential, tmp_path):
    atoms = molecule("CH3CH2OH")
    atoms.set_cell([1, 1, 1])
    atoms.pbc = True
    for use in (System.from_ase, TorchMDNet2Calculator(potential).get_potential_energy):
        with pytest.raises(BadData, match=r"cell of 1 × 1 × 1 Å, .* set atoms.pbc = False"):
            use(atoms)
    atoms.info["energy"] = 1.0
    write(tmp_path / "a.xyz", atoms)
    assert not AseDataset(tmp_path / "a.xyz")[0].system.pbc.any()
    atoms.set_cell([4, 1, 4])  # another one is meant
    assert System.from_ase(atoms).pbc.all()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.1 + 0.2 - 0.3, 0), (0.9999999999, 1), (np.float32(-1.9999999), -2), ("+2", 2), (np.array([3]), 3), (-0.0, 0)],
)
def test_rounded_charges_are_the_whole_number_that_they_mean(tmp_path, value, expected):
    assert whole_number(value, "charge") == expected
    assert System.from_ase(oxalate(charge=value)).charge.tolist() == [expected]
    write(tmp_path / "a.xyz", oxalate(charge=value))
    assert AseDataset(tmp_path / "a.xyz")[0].system.charge.tolist() == [expected]


def test_rounded_charges_of_tensors_are_known_charges(potential, energies):
    """They were cut to 0, or refused as untrained."""
    system = System.from_ase(oxalate()).replace(charge=torch.tensor([-2 + 1e-9], dtype=torch.float64))
    assert float(potential(system).energy) == pytest.approx(energies[-2], abs=1e-6)
    several = System.concatenate([system, system.replace(charge=torch.tensor([0.1 + 0.2 - 0.3], dtype=torch.float64))])
    assert check_batch(Sample(several), "a.npz").system.charge.tolist() == [-2.0, 0.0]
    with pytest.raises(BadData, match=r"a.npz, frame 0: charge must be a whole number"):
        check_batch(Sample(system.replace(charge=torch.tensor([-1.9], dtype=torch.float64))), "a.npz")


# --- units -----------------------------------------------------------------------------------------------------------


def labelled(path, count=2, **info):
    frames = []
    for _ in range(count):
        atoms = molecule("H2O")
        atoms.info.update({"energy": -2.0, **info})
        atoms.arrays["forces"] = np.full((3, 3), 0.5)
        frames.append(atoms)
    write(path, frames, format="extxyz")
    return path


@pytest.mark.parametrize(
    ("info", "energy", "force", "length"),
    [
        ({"energy-unit": "hartree", "force-unit": "hartree/bohr"}, HARTREE, HARTREE / BOHR, 1),
        ({"energy_units": "Ha", "forces_units": "Ha/Bohr"}, HARTREE, HARTREE / BOHR, 1),
        ({"unit_of_energy": "kcal/mol", "forces_unit": "kcal/mol/Angstrom"}, 0.0433641, 0.0433641, 1),
        ({"energy_unit": "au", "force_unit": "au", "pos_unit": "au"}, HARTREE, HARTREE / BOHR, BOHR),
        ({"units": "hartree bohr hartree/bohr"}, HARTREE, HARTREE / BOHR, BOHR),
        ({"units": "metal"}, 1, 1, 1),
        ({"xyz_units": "au", "force_unit": "eV/A"}, 1, 1, BOHR),
        ({"geom_unit": "Bohr", "force_unit": "eV/A"}, 1, 1, BOHR),
        ({"energy-unit": "eV", "length-unit": "Angstrom"}, 1, 1, 1),
    ],
)
def test_units_that_frames_state_are_used(tmp_path, info, energy, force, length):
    data = AseDataset(labelled(tmp_path / "a.xyz", **info))
    assert float(data[1].labels["energy"]) == pytest.approx(-2 * energy, rel=1e-5)
    assert data[1].labels["forces"].numpy() == pytest.approx(np.full((3, 3), 0.5 * force), rel=1e-5)
    assert float(data[1].system.pos[0, 2]) == pytest.approx(molecule("H2O").positions[0, 2] * length, rel=1e-5)
    name = next(iter(info))
    assert f"{name}={info[name]}" in data.summary()


@pytest.mark.parametrize(
    ("info", "units", "words"),
    [
        (
            {"energy-unit": "hartree", "force-unit": "eV/A"},
            {"energy": "eV"},
            "states energy-unit=hartree, but the given unit is",
        ),
        ({"energy-unit": "hartree"}, None, "states energy-unit=hartree, but no unit of the forces: give it"),
        ({"energy-unit": "furlong", "force-unit": "eV/A"}, None, "energy-unit=furlong: unknown energy unit"),
    ],
)
def test_units_that_differ_or_are_not_known_are_an_error(tmp_path, info, units, words):
    with pytest.raises(BadData, match=words):
        AseDataset(labelled(tmp_path / "a.xyz", **info), units=units)


@pytest.mark.parametrize("suffix", ["xyz", "npz", "h5"])
def test_units_under_the_name_of_a_label(tmp_path, suffix):
    """`REF_energy_unit` beside `keys: {energy: REF_energy}`; that of another label has no effect."""
    path, stated = (
        tmp_path / f"a.{suffix}",
        {"REF_energy_unit": "Ha", "REF_forces-units": "Ha/bohr", "mp2_energy_unit": "J"},
    )
    if suffix == "xyz":
        atoms = molecule("H2O")
        atoms.info.update({"REF_energy": -2.0, **stated})
        atoms.arrays["REF_forces"] = np.full((3, 3), 0.5)
        write(path, atoms)
    elif suffix == "npz":
        np.savez(path, R=np.eye(3)[None], z=[8, 1, 1], REF_energy=[-2.0], REF_forces=np.full((1, 3, 3), 0.5), **stated)
    else:
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["m/pos"], file["m/types"], file["m/REF_energy"] = np.eye(3)[None], [8, 1, 1], [-2.0]
            file["m/REF_forces"] = np.full((1, 3, 3), 0.5)
            file["m"].attrs.update(stated)
    units = None if suffix == "xyz" else {"length": "angstrom"}
    labels = open_dataset(path, {"energy": "REF_energy", "forces": "REF_forces"}, units)[0].labels
    assert float(labels["energy"]) == pytest.approx(-2 * HARTREE)
    assert float(labels["forces"][0, 0]) == pytest.approx(0.5 * HARTREE / BOHR)


def test_units_in_the_metadata_of_a_database(tmp_path):
    """As SchNetPack writes them."""
    with connect(tmp_path / "a.db") as database:
        database.metadata = {
            "_property_unit_dict": {"energy": "Hartree", "U0": "kcal/mol", "forces": "Hartree/Bohr", "mu": "D"},
            "_distance_unit": "Bohr",
        }
        database.write(molecule("H2O"), data={"energy": [-2.0], "U0": [-3.0], "forces": np.full((3, 3), 0.5)})
    for key, energy in (("energy", -2 * HARTREE), ("U0", -3 * 0.0433641)):
        sample = open_dataset(tmp_path / "a.db", {"energy": key, "forces": "forces"})[0]
        assert float(sample.labels["energy"]) == pytest.approx(energy, rel=1e-5)
        assert float(sample.labels["forces"][0, 0]) == pytest.approx(0.5 * HARTREE / BOHR)
        np.testing.assert_allclose(sample.system.pos, molecule("H2O").positions * BOHR)
    np.testing.assert_allclose(read_structures(tmp_path / "a.db")[0].positions, molecule("H2O").positions * BOHR)
    with pytest.raises(BadData, match="the given unit is eV"):
        open_dataset(tmp_path / "a.db", {"energy": "energy"}, {"energy": "eV"})


def test_units_of_what_is_not_read_are_no_error(tmp_path):
    path = labelled(tmp_path / "a.xyz", dipole_unit="my own", stress_unit="?", unit_cell="conventional")
    assert float(AseDataset(path)[0].labels["energy"]) == -2
    with pytest.warns(StructureWarning, match="units=parsec is not read"):
        AseDataset(labelled(tmp_path / "a.xyz", units="parsec"))


def test_given_units_complete_those_of_the_file(tmp_path):
    path = labelled(tmp_path / "a.xyz", **{"energy-unit": "hartree"})
    data = AseDataset(path, units={"forces": "eV/angstrom", "energy": "Ha"})
    assert float(data[0].labels["energy"]) == pytest.approx(-2 * HARTREE)
    assert float(data[0].labels["forces"][0, 0]) == 0.5


# --- OpenMM ----------------------------------------------------------------------------------------------------------


def topology(formal, box=None):
    app = pytest.importorskip("openmm.app")
    from openmm import Vec3
    from openmm.unit import angstrom

    made = app.Topology()
    residue = made.addResidue("OXA", made.addChain())
    for symbol, charge in zip("CCOOOO", formal, strict=True):
        made.addAtom(symbol, app.Element.getBySymbol(symbol), residue, formalCharge=charge)
    if box is not None:
        made.setPeriodicBoxVectors([Vec3(box, 0, 0), Vec3(0, box, 0), Vec3(0, 0, box)] * angstrom)
    return made


def test_formal_charges_of_an_openmm_topology(potential):
    pytest.importorskip("openmm")
    from torchmdnet2.adapters.openmm import TorchMDNet2Energy, create_force

    made = {}
    original = TorchMDNet2Energy.__init__

    def charge_of(topology, **options):
        force = create_force(potential, topology, **options)
        made[id(force)] = force
        return seen[-1]["charge"], force.usesPeriodicBoundaryConditions()

    seen = []

    def record(self, source, options, potential=None):
        seen.append(options)
        original(self, source, options, potential)

    TorchMDNet2Energy.__init__ = record
    try:
        every = [0, 0, 0, -1, 0, -1]
        assert charge_of(topology(every)) == (-2, False)
        assert charge_of(topology(every), charge=-2) == (-2, False)
        with pytest.raises(BadData, match=r"-2 by the formal charges of the topology.*, but charge=0 is given"):
            charge_of(topology(every), charge=0)
        some = [None, None, None, -1, None, -1]
        with pytest.warns(StructureWarning, match="formal charges of 2 of 6 atoms"):
            assert charge_of(topology(some)) == (-2, False)
        with pytest.raises(BadData, match=r"of 2 atoms, but charge=0 is given.* correct the formal charges"):
            charge_of(topology(some), charge=0)
        assert charge_of(topology([None] * 6)) == (0, False)
        assert charge_of(topology(every, box=1.0)) == (-2, False)
        assert charge_of(topology(every, box=20.0)) == (-2, True)
    finally:
        TorchMDNet2Energy.__init__ = original


def warnings_of_water(folder, values, comment):
    """Write a water with a fifth column; yield the warnings of each way to read it."""
    atoms = molecule("H2O")
    rows = zip(atoms.symbols, atoms.positions, values, strict=True)
    lines = "".join(f"{s} {x} {y} {z} {value}\n" for s, (x, y, z), value in rows)
    (folder / "a.xyz").write_text(f"3\n{comment}\n{lines}")
    for read_all in (read_structures, lambda path: open_dataset(path, {})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read_all(folder / "a.xyz")
        yield [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("name", "values", "info", "said"),
    [
        ("q", [-1.2, -0.4, -0.4], "", "sum to -2"),
        ("partial_charges", [-0.4, -0.3, -0.3], "", "sum to -1"),
        ("dft_mbis_charges", [0.5, 0.3, 0.2], "", "sum to 1"),
        ("mulliken", [-0.4, 0.2, 0.2], "", None),
        ("mulliken", [-0.4, -0.4, -0.2], "charge=-1", None),
        ("mulliken", [-1.2, -0.4, -0.4], "charge=0", "sum to -2, and the total charge is stated as 0"),
        ("resp", [-0.8, 0.4, 0.4], "net_charge=-2", "sum to 0, and the total charge is stated as -2"),
        ("hirshfeld", [0.0, 0.0, 0.0], "charge=-2", None),
        ("hirshfeld", [-1.2, -0.3, -0.3], "charge=-2", None),
        ("mulliken_spin", [0.8, 0.1, 0.1], "charge=0", None),
        ("chg", [-2, 0, 0], "", "sum to -2"),
        ("oxidation_states", [-2, 1, 1], "", None),
        ("oxidation_states", [-2, 0, 0], "", "sum to -2"),
        ("magmoms", [1.0, 0.5, 0.5], "", "sum to 2, and no multiplicity is stated: if they are spins, write spin=3"),
        ("spins", [1.0, 1.0, 0.0], "", "sum to 2, and no multiplicity"),
        ("spins", [1.0, 1.0, 0.0], "spin=3", None),
        ("spins", [1.0, 1.0, 0.0], 'Lattice="9 0 0 0 9 0 0 0 9"', None),
        ("spins", [0.5, -0.5, 0.0], "", None),
        ("mulliken_populations", [8.5, 0.75, 0.75], "", None),
        ("hirshfeld", [-0.4, 0.1, 0.13], "", None),
        ("nuclear_charges", [8, 1, 1], "", None),
        ("formalCharge", [-2, 0, 0], "", "sum to -2"),
        ("fcharge", [-1, 0, 0], "", "sum to -1"),
        ("corecharges", [6, 1, 1], "", None),
    ],
)
def test_charges_of_atoms_that_do_not_sum_to_zero_are_named(tmp_path, name, values, info, said):
    for found in warnings_of_water(tmp_path, values, f"Properties=species:S:1:pos:R:3:{name}:R:1 {info}"):
        assert len(found) == bool(said) and (said is None or f"'{name}' of the atoms {said}" in found[0])


@pytest.mark.parametrize(
    ("values", "comment", "total"),
    [
        ([-1, 0, 0], "", -1), ([-0.9, -0.55, -0.55], "", -2), ([-1.2, -0.4, -0.4], "charge=-2", None),
        ([-1.2, -0.4, -0.4], "charge=0", -2), ([-0.8, 0.4, 0.4], "", None), ([-0.8, 0.1, 0.1], "", None),
        ([1, 0, 0], "", None), ([1, 2, 3], "", None), (["a", "b", "c"], "", None),
    ],
)  # fmt: skip
def test_charges_in_a_fifth_column_without_a_name_are_named(tmp_path, values, comment, total):
    for found in warnings_of_water(tmp_path, values, comment):
        assert len(found) == bool(total) and all(f"'column_5_charges' of the atoms sum to {total}" in w for w in found)
    assert np.allclose(read_structures(tmp_path / "a.xyz")[0].positions, molecule("H2O").positions)


@pytest.mark.parametrize(("charge", "spin", "right"), [(0, 1, True), (0, 2, False), (-2, 1, True), (-1, 1, False)])
def test_a_multiplicity_that_the_electrons_exclude_is_refused(charge, spin, right):
    potential = tiny_potential(elements=[1, 8])
    atoms = molecule("H2O")
    atoms.info = {"charge": charge, "spin": spin}
    if right:
        potential(System.from_ase(atoms))
    else:
        with pytest.raises(ValueError, match=f"structure 1 has spin multiplicity {spin}, which its"):
            potential(System.from_ase([molecule("H2O"), atoms]))


def test_frames_without_atoms_are_an_error(tmp_path):
    for text in ("0\n\n", "1\nenergy=1.0\nH 0.0 0.0 0.0\n0\nenergy=1.0\n"):
        (tmp_path / "a.xyz").write_text(text)
        with pytest.raises(BadData, match=r"a.xyz, frame [01]: there must be one structure with at least one atom"):
            open_dataset(tmp_path / "a.xyz", {})


@pytest.mark.parametrize("given", [[molecule("H2O")], "w.xyz", None])
@pytest.mark.parametrize("use", [lambda p, x: run_md(p, x, MDOptions(steps=1)), lambda p, x: scan_molecule(p, x)])
def test_something_else_than_a_structure_is_a_type_error(potential, given, use):
    with pytest.raises(TypeError, match=f"one ase.Atoms is needed, got {type(given).__name__}: .*read_structures"):
        use(potential, given)


def test_several_numbers_as_the_charge_are_an_error():
    with pytest.raises(BadData, match="charge must be a whole number"):
        charge_and_spin(oxalate(charge=[0, 0, 0, -1, 0, -1]))


def test_frames_that_state_nothing_are_skipped_only_if_they_do(monkeypatch):
    """The quick way past plain numbers, for entries of all names and kinds that mean something somewhere."""
    names = [*stated_words._CHARGE, *stated_words._SPIN, *stated_words._UNPAIRED, *stated._SYMBOLS, "z", "Z", "ion"]
    names += ["q", "n_electrons", "n_alpha", "nbeta", "energy", "forces", "my_charge", "smiles", "comment", "units", 3]
    values = [-2, 2.0, np.float64(3), np.int64(-1), np.array([1, 2]), np.zeros((2, 3)), None, True, np.True_, "NH4+"]
    values += [{"charge": 1}]
    infos = [{name: value} for name in names for value in values]
    infos += [{"nalpha": 5, "nbeta": value, "energy": 1.5} for value in values]

    def found(info):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = stated.statements(info, {}, numbers=np.array([7, 1, 1, 1, 1]))
            except BadData as error:
                result = str(error)
        return result, [str(one.message) for one in caught]

    quick = [found(info) for info in infos]
    skipped = sum(stated._is_mute(name) for name in names)
    monkeypatch.setattr(stated, "_is_mute", lambda name: False)
    assert [found(info) for info in infos] == quick and skipped == 4
