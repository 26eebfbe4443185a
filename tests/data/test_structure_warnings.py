"""Structures that lack hydrogens, and oxidation numbers that do not cancel, give warnings."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, graphene, molecule, nanotube
from ase.io import write

from torchmdnet2.data import open_dataset, structure_warnings, structures
from torchmdnet2.data.structures import from_smiles, read_structures


def told_of_hydrogens(path, read=read_structures):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(path)
    told = [str(one.message) for one in caught if "need hydrogens" in str(one.message)]
    assert all(f"{path}: the structure has carbons that need hydrogens" in one for one in told)
    return told


@pytest.mark.parametrize("suffix", ["pdb", "xyz"])
@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        *[(name, True) for name in ("CH3CH2OH", "C6H6", "CH3CONH2", "C2H4", "C5H5N", "C4H4S", "CH3COCl", "CH3CN")],
        *[(name, False) for name in ("C60", "CO2", "CO", "HCN", "CCl4", "C2F4", "H2O", "CS2", "OCS", "C2F4", "CN")],
        *[(name, False) for name in ("C2H3", "CH3CO", "C3H7", "CCH", "COF2", "NCCN")],
    ],
)
def test_a_file_without_its_hydrogens_is_named(tmp_path, name, lacks, suffix):
    """Molecules, radicals among them, and the same without hydrogens."""
    atoms = molecule(name)
    for bare in (False, True) if lacks else (False,):
        write(tmp_path / f"a.{suffix}", atoms[atoms.numbers != 1] if bare else atoms)
        for read in (read_structures, lambda path: open_dataset(path, {})):
            told = told_of_hydrogens(tmp_path / f"a.{suffix}", read)
            assert len(told) == bare and all("and has none: add them" in one for one in told)


@pytest.mark.parametrize(
    "smiles",
    [
        "CCO",
        "NCC(=O)O",
        "c1ccccc1O",
        "CC(N)C(=O)NCC(=O)O",
        "OCC(O)CO",
        "O=C(O)C1OC(O)C(O)C(O)C1O",
        "O=C(O)CCl",
        "CC(S)CO",
    ],
)
def test_a_file_with_polar_hydrogens_alone_is_named(tmp_path, smiles):
    pytest.importorskip("rdkit")
    atoms = from_smiles(smiles)
    nearest = (atoms.get_all_distances() + 9 * np.eye(len(atoms))).argmin(1)
    for polar in (False, True):
        kept = atoms[~((atoms.numbers == 1) & (atoms.numbers[nearest] == 6))] if polar else atoms
        write(tmp_path / "a.xyz", kept)
        told = told_of_hydrogens(tmp_path / "a.xyz")
        assert len(told) == polar and all("and has few: add them" in one for one in told)


def ring(size, bond):
    angles = 2 * np.pi * np.arange(size) / size
    circle = np.stack([np.cos(angles), np.sin(angles), 0 * angles], 1)
    return Atoms(["C"] * size, circle * bond / (2 * np.sin(np.pi / size)))


def vacancy():
    sheet = graphene(size=(4, 4, 1), vacuum=5)
    del sheet[3]
    return sheet


CARBONS = {
    "graphene": lambda: graphene(size=(2, 2, 1), vacuum=5),
    "a vacancy": vacancy,
    "a nanotube": lambda: nanotube(6, 0, length=2),
    "diamond": lambda: bulk("C", "diamond", a=3.567),
    "TiC": lambda: bulk("TiC", "rocksalt", a=4.33),
    "SiC": lambda: bulk("SiC", "zincblende", a=4.36),
    "copper": lambda: bulk("Cu", cubic=True),
    "C3": lambda: Atoms("C3", [[0, 0, 0], [0, 0, 1.29], [0, 0, 2.58]]),
    "C10": lambda: ring(10, 1.29),
    "stretched CO": lambda: Atoms("CO", [[0, 0, 0], [0, 0, 1.6]]),
    "CO2 with a charge": lambda: Atoms("CO2", [[0, 0, 0], [1.15, 0, 0.5], [-1.15, 0, 0.5]]),
    "the radical HOCO": lambda: Atoms("COOH", [[0, 0, 0], [1.18, 0, 0], [-0.7, 1.1, 0], [-1.65, 1.0, 0]]),
    "carbonyl on a metal": lambda: Atoms("NiCO", [[0, 0, 0], [1.82, 0, 0], [2.97, 0, 0]]),
}


@pytest.mark.parametrize("made", CARBONS.values(), ids=CARBONS)
def test_carbons_that_need_no_hydrogens_are_read(tmp_path, made):
    write(tmp_path / "a.xyz", made())
    assert not told_of_hydrogens(tmp_path / "a.xyz")


def test_a_large_structure_and_a_crystal_without_hydrogens_are_named(tmp_path):
    atoms = ring(6, 1.39)
    (crystal := atoms.copy()).center(3.0)
    crystal.pbc, crystal.numbers = True, [6, 6, 6, 6, 6, 7]
    large = Atoms()
    for k in range(100):
        moved = atoms.copy()
        moved.translate([0, 0, 4.0 * k])
        large += moved
    for made in (crystal, large):
        write(tmp_path / "a.xyz", made)
        assert told_of_hydrogens(tmp_path / "a.xyz")


def test_bonds_in_large_structures_are_those_of_all_distances(monkeypatch):
    """ASE takes minutes for thousands of atoms without a cell, unless they lie in a box."""
    far = np.arange(5000)[:, None] // [400, 20, 1] % [20, 20, 20] * 4.0
    ethylenes = Atoms("CCHHHH" * 5000, (far[:, None] + molecule("C2H4").positions).reshape(-1, 3))
    start = time.perf_counter()
    found = structure_warnings._bonds_of(ethylenes, np.flatnonzero(ethylenes.numbers == 6))
    assert time.perf_counter() - start < 20 and len(found[0]) == 5000 * 6
    part = ethylenes[:120]
    few = structure_warnings._bonds_of(part, np.arange(12, 120, 7))
    monkeypatch.setattr(structure_warnings, "_PAIRS", 0)
    many = structure_warnings._bonds_of(part, np.arange(12, 120, 7))
    rows = [sorted(zip(a.tolist(), b.tolist(), v.round(9).tolist(), strict=True)) for a, b, v in (few, many)]
    assert rows[0] == rows[1] and rows[0]
    ethylenes.positions[7] = np.nan  # which other checks refuse
    assert not structure_warnings._lacks_hydrogens(ethylenes)


def test_hydrogens_are_looked_for_once_in_a_trajectory(tmp_path, monkeypatch):

    looked = []
    monkeypatch.setattr(structures, "warn_of_hydrogens", lambda atoms, where: looked.append(len(atoms)))
    write(tmp_path / "a.xyz", [molecule("CH4")] * 5 + [molecule("C2H6")] * 5 + [molecule("CH4")])
    assert len(read_structures(tmp_path / "a.xyz")) == 11 and looked == [5, 8, 5]


SITES = """data_x
_cell_length_a 8
_cell_length_b 8
_cell_length_c 8
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_space_group_name_H-M_alt '{}'
{}
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
"""


@pytest.mark.parametrize(
    ("group", "types", "sites", "total"),
    [
        ("P 1", "", "O1 O1- 0.1 0.1 0.1\nH1 H 0.2 0.1 0.1\n", "-1"),
        ("P -1", "", "O1 O2- 0.1 0.1 0.1\nMg1 Mg2+ 0.5 0.5 0.5\n", "-2"),  # two O and one Mg in the cell
        ("P 1", "loop_\n_atom_type_symbol\n_atom_type_oxidation_number\nNa 1\nO -2\n",
         "Na1 Na 0 0 0\nO1 O 0.5 0 0\n", "-1"),
        ("P 1", "", "Na1 Na+ 0 0 0\nCl1 Cl-1 0.5 0 0\n", None),
        ("P 1", "", "Na1 Na 0 0 0\nCl1 Cl 0.5 0 0\n", None),
        ("P 1", "loop_\n_atom_type_symbol\n_atom_type_oxidation_number\nFe 2.67\nO -2\n",
         "Fe1 Fe 0 0 0\nFe2 Fe 0.5 0 0\nFe3 Fe 0 0.5 0\nO1 O 0.5 0.5 0\nO2 O 0 0 0.5\nO3 O 0.5 0 0.5\n"
         "O4 O 0 0.5 0.5\n", None),
        ("P 1", "loop_\n_atom_type_symbol\n_atom_type_oxidation_number\nFe 2.67\nO -2\n",
         "Fe1 Fe 0 0 0\nFe2 Fe 0.5 0 0\nFe3 Fe 0 0.5 0\nO1 O 0.5 0.5 0\nO2 O 0 0 0.5\nO3 O 0.5 0 0.5\n", "2.01"),
        ("P 1", "", "_atom_site_occupancy\nCa1 Ca2+ 0 0 0 0.5\nCl1 Cl- 0.5 0 0 1\n", None),
    ],
)  # fmt: skip
def test_oxidation_numbers_of_cif_that_do_not_cancel(tmp_path, recwarn, group, types, sites, total):
    (tmp_path / "a.cif").write_text(SITES.format(group, types) + sites)
    (atoms,) = read_structures(tmp_path / "a.cif")
    assert not any(key.startswith("_") for key in atoms.info) and "charge" not in atoms.info
    told = [str(each.message) for each in recwarn if "sum to" in str(each.message)]
    assert len(told) == (total is not None)
    if total is not None:
        assert "a.cif" in told[0] and f"state charge={total}, and if not, atoms may be missing" in told[0]
