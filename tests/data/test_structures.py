"""What files state of charge, spin, units, cell and number of structures is read from every format, or named."""

from __future__ import annotations

import gzip
import re
import warnings

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2.data import open_dataset
from torchmdnet2.data.structures import read_structures
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.streams.records import RecordFile

from .frames import LINES, POSITIONS, SYMBOLS

CHARGES = "M  CHG  2   4  -1   6  -1\n"


def v2000(properties=CHARGES, code=(), symbols=SYMBOLS, items="", header=" by hand"):
    """An oxalate, with a charge code in the lines of some atoms."""
    codes = dict(code)
    lines = [
        f"{x:10.4f}{y:10.4f}{z:10.4f} {s:<3} 0{codes.get(k, 0):3d}  0  0\n"
        for k, (s, (x, y, z)) in enumerate(zip(symbols, POSITIONS, strict=True))
    ]
    bonds = "  1  2  1  0\n  1  3  2  0\n  1  4  1  0\n  2  5  2  0\n  2  6  1  0\n"
    counts = "  6  5  0  0  0  0            999 V2000\n"
    return f"oxalate\n{header}\n\n{counts}{''.join(lines)}{bonds}{properties}M  END\n{items}$$$$\n"


def v3000(charge=" CHG=-1"):
    atoms = "".join(
        f"M  V30 {k + 1} {s} {x} {y} {z} 0{charge if k in (3, 5) else ''}\n"
        for k, (s, (x, y, z)) in enumerate(zip(SYMBOLS, POSITIONS, strict=True))
    )
    return (
        "oxalate\n by hand\n\n  0  0  0     0  0            999 V3000\nM  V30 BEGIN CTAB\nM  V30 COUNTS 6 0 0 0 0\n"
        f"M  V30 BEGIN ATOM\n{atoms}M  V30 END ATOM\nM  V30 END CTAB\nM  END\n$$$$\n"
    )


def states(path, **options):
    return [(atoms.info.get("charge"), atoms.info.get("spin")) for atoms in read_structures(path, **options)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (v2000(), (-2, None)),
        (v2000("M  CHG  1   4  -1\nM  CHG  1   6  -1\n"), (-2, None)),
        (v2000("", {3: 5, 5: 5}), (-2, None)),
        (v2000(CHARGES, {0: 1, 1: 1}), (-2, None)),  # the lines of atoms are not valid beside M  CHG
        (v2000("M  CHG  2   3   1   6  -1\n"), (0, None)),
        (v2000(""), (None, None)),
        (v2000("M  RAD  1   3   2\n"), (0, 2)),
        (v2000("M  RAD  1   3   3\n"), (0, 3)),
        (v2000("", {2: 4}), (None, 2)),
        (v3000(), (-2, None)),
        (v3000(" CHG=1 RAD=0"), (2, None)),
        (v2000("", items="> <total_charge>\n-2\n\n> <Multiplicity>\n1\n\n"), (-2, 1)),
        (v2000("", items="> <PUBCHEM_TOTAL_CHARGE>\n-2\n\n"), (-2, None)),
        (v2000(items="> <charge> (1)\n-2.0\n\n"), (-2, None)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["sdf", "mol"])
def test_formal_charges_and_radicals_of_molfiles(tmp_path, text, expected, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_text(text if suffix == "sdf" else text.replace("$$$$\n", ""))
    (atoms,) = read_structures(path)
    assert (atoms.info.get("charge"), atoms.info.get("spin")) == expected
    assert atoms.get_chemical_formula() == "C2O4"
    np.testing.assert_allclose(atoms.positions, POSITIONS, atol=1e-12)


def test_charges_of_a_molfile_that_differ_are_an_error(tmp_path):
    (tmp_path / "a.sdf").write_text(v2000(items="> <charge>\n-1\n\n"))
    with pytest.raises(BadData, match=r"a.sdf: the total charge is -1 by 'charge' and -2 by the formal charges"):
        read_structures(tmp_path / "a.sdf")


def test_all_molecules_of_an_sdf_are_read_each_with_its_charge(tmp_path):
    with gzip.open(tmp_path / "a.sdf.gz", "wt") as file:
        file.write(v2000() + v2000("") + v3000())
    assert states(tmp_path / "a.sdf.gz") == [(-2, None), (None, None), (-2, None)]
    assert states(tmp_path / "a.sdf.gz", index=-1) == [(-2, None)]
    assert states(tmp_path / "a.sdf.gz", index=slice(1, None)) == [(None, None), (-2, None)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (v2000(symbols=["C", "C", "O", "O", "O", "R#"]), "atom 5 is 'R#', which is not an element"),
        (v2000("M  CHG  2   4  -1\n"), "has fewer than 2 pairs"),
        (v2000("M  CHG  1   9  -1\n"), "names atom 9, but there are 6"),
        (v2000()[:200], "it ends after . of its 6 atoms|not a molfile"),
        (v3000().replace("COUNTS 6", "COUNTS 7"), "number of atoms differs"),
        (v3000().replace("COUNTS 6 0", "COUNTS 6 1"), "number of bonds differs"),
        (v2000().replace("$$$$\n", "") + v2000(), r"a\.sdf: .*a second molecule begins in line 18 of it: .*\$\$\$\$"),
        (v2000() + v2000().replace("$$$$\n", "") + v3000(), "molecule 1: .*a second molecule begins in line 18"),
        (v3000().replace("$$$$\n", "") + v2000(), "a second molecule begins in line"),
        (v2000() + v2000().replace("M  END\n", ""), "molecule 1: .*no line 'M  END': it is cut off"),
        (v2000().replace("M  END\n$$$$\n", "") + v2000(), "a second molecule begins in line 17"),
        (v2000() + v3000().replace("M  END\n", ""), "molecule 1: .*no line 'M  END'"),
        (v2000().replace("  6  5  0", "  7  5  0"), "says 7 atoms and 5 bonds, and the line of bond 5 is"),
        (v2000().replace("  6  5  0", "  5  5  0"), "says 5 atoms and 5 bonds, and the line of bond 1 is '-1.36"),
        (v2000().replace("  6  5  0", "  6  6  0"), "says 6 atoms and 6 bonds, and the line of bond 6 is 'M  CHG"),
        (v2000().replace("  6  5  0", " 66  5  0"), "it ends after .* of its 66 atoms"),
        (v2000().replace("  6  5  0", "  6  4  0"), "says 6 atoms and 4 bonds, and there are more lines"),
    ],
)
def test_damaged_molfiles_are_named(tmp_path, text, words):
    (tmp_path / "a.sdf").write_text(text)
    with pytest.raises(BadData, match=words):
        read_structures(tmp_path / "a.sdf")


def sdf(symbols, bonds, properties=""):
    """A V2000 record; its atoms are 1.5 Å apart, `bonds` has (atom, atom, type), counted from 1."""
    atoms = "".join(f"{1.5 * k:10.4f}{0:10.4f}{0:10.4f} {s:<3} 0  0\n" for k, s in enumerate(symbols))
    lines = "".join(f"{one:3d}{two:3d}{kind:3d}  0\n" for one, two, kind in bonds)
    return (
        f"x\n by hand\n\n{len(symbols):3d}{len(bonds):3d}  0  0  0  0            999 V2000\n{atoms}{lines}"
        f"{properties}M  END\n$$$$\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (sdf("CCOOOO", [(1, 2, 1), (1, 3, 2), (1, 4, 1), (2, 5, 2), (2, 6, 1)]), "molecule has the charge -2"),
        (sdf("NHHHH", [(1, k, 1) for k in (2, 3, 4, 5)]), "molecule has the charge 1"),
        (sdf("NCHHH", [(1, 2, 3), (2, 3, 1)]), None),
        (sdf("NOO", [(1, 2, 2), (1, 3, 1)], "M  RAD  1   1   2\n"), None),
        (sdf("OHH", [(1, 2, 1), (1, 3, 1)]), None),
        (sdf("OH", [(1, 2, 1)]), "has the charge -1: add lines M  CHG, or M  RAD"),
        (sdf("OH", [(1, 2, 1)], "M  RAD  1   1   2\n"), None),
        (sdf("OH", [(1, 2, 1)], "M  CHG  1   1   0\n"), None),
        (sdf("CNOOHHH", [(1, 2, 1), (2, 3, 1), (2, 4, 2), *((1, k, 1) for k in (5, 6, 7))],
             "M  CHG  2   2   1   3  -1\n"), None),
        (sdf("CNOOHHH", [(1, 2, 1), (2, 3, 1), (2, 4, 2), *((1, k, 1) for k in (5, 6, 7))]), None),  # without charges
        (sdf("CNOOHHH", [(1, 2, 1), (2, 3, 2), (2, 4, 2), *((1, k, 1) for k in (5, 6, 7))]), None),
        (sdf("CNHHHNH", [(1, 2, 4), (2, 3, 1), (1, 6, 4), *((1, k, 1) for k in (4, 5))]), None),  # aromatic
        (sdf("OH", [(1, 2, 1)]).replace("M  END\n", "M  END\n> <charge>\n-1\n\n"), None),
        (sdf("OHH", [(1, 2, 1), (1, 3, 1)]).replace(
            "M  END\n", "M  END\n> <PUBCHEM_MMFF94_PARTIAL_CHARGES>\n3\n1 -0.86\n2 0.43\n3 0.43\n\n"), None),
        (sdf("OHH", [(1, 2, 1), (1, 3, 1)]).replace("M  END\n", "M  END\n> <PartialCharges>\n1.0 0.5 0.5\n\n"),
         "'PartialCharges' of the atoms sum to 2, and no total charge is stated"),
        (sdf("OH", [(1, 2, 1)], "M  CHG  1   1  -1\n").replace("M  END\n", "M  END\n> <resp>\n-0.7 -0.3\n\n"), None),
        (sdf("OH", [(1, 2, 1)], "M  CHG  1   1   1\n").replace("M  END\n", "M  END\n> <resp>\n-0.7 -0.3\n\n"),
         "sum to -1, and the total charge is stated as 1"),
    ],
)  # fmt: skip
def test_a_charge_that_bonds_or_partial_charges_show_is_named(tmp_path, text, words):
    (tmp_path / "a.sdf").write_text(text)
    for read_it in (read_structures, lambda path: open_dataset(path, {}, format="ase/sdf")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read_it(tmp_path / "a.sdf")
        found = [str(one.message) for one in caught if issubclass(one.category, StructureWarning)]
        assert len(found) == bool(words) and (not words or (words in found[0] and "a.sdf: " in found[0]))


def ring(kind, n=6):
    return [(k + 1, (k + 1) % n + 1, kind) for k in range(n)]


BARE = {
    "ethanol": sdf("CCO", [(1, 2, 1), (2, 3, 1)]),
    "benzene": sdf("CCCCCC", ring(4)),
    "Kekulé's benzene": sdf("CCCCCC", [(a, b, 1 + k % 2) for k, (a, b, _) in enumerate(ring(1))]),
    "ethanol with its polar hydrogen": sdf("CCOH", [(1, 2, 1), (2, 3, 1), (3, 4, 1)]),
    "acetate": sdf("CCOO", [(1, 2, 1), (2, 3, 2), (2, 4, 1)], "M  CHG  1   4  -1\n"),
}
WHOLE = {
    "CCl4": sdf(["C", "Cl", "Cl", "Cl", "Cl"], [(1, k, 1) for k in range(2, 6)]),
    "CO2": sdf("OCO", [(1, 2, 2), (2, 3, 2)]),
    "CO": sdf("CO", [(1, 2, 3)], "M  CHG  2   1  -1   2   1\n"),
    "C60": sdf(["C"] * 60, [(k + 1, (k + d) % 60 + 1, 1) for k in range(60) for d in ((1, 30) if k < 30 else (1,))]),
    "a carbene": sdf("CFF", [(1, 2, 1), (1, 3, 1)], "M  RAD  1   1   1\n"),
    "cyanide": sdf("CN", [(1, 2, 3)], "M  CHG  1   1  -1\n"),
    "CO without charges": sdf("CO", [(1, 2, 3)]),
    "cyanide with its charge at N": sdf("CN", [(1, 2, 3)], "M  CHG  1   2  -1\n"),
    "without bonds": sdf("CCO", []),
    "ethene": sdf("CCHHHH", [(1, 2, 2), (1, 3, 1), (1, 4, 1), (2, 5, 1), (2, 6, 1)]),
    "a carbonyl": sdf(["Ni", "C", "O"], [(1, 2, 1), (2, 3, 2)]),
    "water": sdf("OHH", [(1, 2, 1), (1, 3, 1)]),
}


@pytest.mark.parametrize("text", BARE.values(), ids=BARE)
def test_a_molecule_without_its_hydrogens_is_refused(tmp_path, text):
    (tmp_path / "a.sdf").write_text(WHOLE["water"] + text)
    with pytest.raises(BadData, match=r"a\.sdf: molecule 1: hydrogens are missing: .*Add them"):
        read_structures(tmp_path / "a.sdf")
    with pytest.raises(BadData, match="hydrogens are missing"):
        open_dataset(tmp_path / "a.sdf")
    _, record = RecordFile(str(tmp_path / "a.sdf"))
    assert record.error.startswith("hydrogens are missing") and not record.starts


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_molecules_that_have_no_hydrogens_are_read(tmp_path, text):
    (tmp_path / "a.sdf").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_structures(tmp_path / "a.sdf")) == 1


def test_hydrogens_of_a_v3000_file_are_counted(tmp_path):
    bonds = "M  V30 BEGIN BOND\nM  V30 1 1 1 2\nM  V30 2 1 1 3\nM  V30 3 1 1 4\nM  V30 4 1 2 5\nM  V30 5 1 2 6\n"
    bonds += "M  V30 END BOND\n"
    text = v3000("").replace("6 0 0 0 0", "6 5 0 0 0").replace("M  V30 END CTAB\n", f"{bonds}M  V30 END CTAB\n")
    (tmp_path / "a.sdf").write_text(text)
    assert len(read_structures(tmp_path / "a.sdf")) == 1  # three neighbors: not counted
    (tmp_path / "a.sdf").write_text(text.replace("M  V30 5 1 2 6\n", "").replace("6 5 0 0 0", "6 4 0 0 0"))
    with pytest.raises(BadData, match="hydrogens are missing: by their bonds its carbons need 2 or more"):
        read_structures(tmp_path / "a.sdf")


def test_drawings_and_several_radicals_are_named(tmp_path):
    (tmp_path / "a.sdf").write_text(v2000(header="  program 01010112002D"))
    with pytest.warns(StructureWarning, match="are a drawing"):
        read_structures(tmp_path / "a.sdf")
    (tmp_path / "a.sdf").write_text(v2000() + v2000(header="  program 01010112002D"))
    with pytest.warns(StructureWarning, match=r"a\.sdf: molecule 1: the header of the molfile says 2D"):
        read_structures(tmp_path / "a.sdf")
    with pytest.warns(StructureWarning, match=r"record 1 \(oxalate\): the header of the molfile says 2D"):
        assert not any(record.error for record in RecordFile(str(tmp_path / "a.sdf")))
    (tmp_path / "a.sdf").write_text(v2000("M  RAD  2   3   2   5   2\n"))
    with pytest.warns(StructureWarning, match="2 atoms of the molfile are radicals"):
        assert states(tmp_path / "a.sdf") == [(0, None)]


def test_isotopes_are_hydrogen_with_their_mass(tmp_path):
    water = "3\nnote=x\nO 0 0 0\nD 0 0.76 0.6\nT 0 -0.76 0.6\n"
    (tmp_path / "a.xyz").write_text(water)
    sdf = "w\n\n\n  3  0  0  0  0  0            999 V2000\n" + "".join(
        f"    {x:.4f}    {y:.4f}    0.0000 {s:<3} 0  0\n"
        for s, x, y in (("O", 0, 0), ("D", 0, 0.76), ("T", 0.76, 0))
    )  # fmt: skip
    (tmp_path / "a.sdf").write_text(sdf + "M  END\n")
    write(tmp_path / "h.pdb", molecule("H2O"))
    lines = (tmp_path / "h.pdb").read_text().splitlines()
    hydrogens = [k for k, line in enumerate(lines) if line[76:78] == " H"]
    for k, symbol in zip(hydrogens, "DT", strict=True):
        lines[k] = lines[k][:76] + f" {symbol}" + lines[k][78:]
    (tmp_path / "a.pdb").write_text("\n".join(lines) + "\n")
    for suffix in ("xyz", "sdf", "pdb"):
        (atoms,) = read_structures(tmp_path / f"a.{suffix}")
        assert atoms.numbers.tolist() == [8, 1, 1]
        np.testing.assert_allclose(atoms.get_masses(), [15.999, 2.014, 3.016], atol=1e-3)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    mark = "\ufeff".encode()
    write(tmp_path / "a.pdb", molecule("H2O"))
    write(tmp_path / "a.xyz", molecule("H2O"))
    write(tmp_path / "a.gen", molecule("H2O"), format="gen")
    (tmp_path / "a.sdf").write_text(v2000())
    for name in ("a.pdb", "a.xyz", "a.gen", "a.sdf"):
        before = read_structures(tmp_path / name)[0]
        (tmp_path / name).write_bytes(mark + (tmp_path / name).read_bytes())
        after = read_structures(tmp_path / name)[0]
        assert before.numbers.tolist() == after.numbers.tolist()
        np.testing.assert_array_equal(before.positions, after.positions)


def test_elements_and_atomic_numbers_that_differ_are_an_error(tmp_path):
    text = "2\nProperties=species:S:1:pos:R:3:Z:I:1\nO 0 0 0 8\nO 0 0 1.2 16\n"
    (tmp_path / "a.xyz").write_text(text)
    with pytest.raises(ValueError, match="atom 1 is O by its species, but Z = 16"):
        read_structures(tmp_path / "a.xyz")
    (tmp_path / "a.xyz").write_text(text.replace("16", "8"))
    assert read_structures(tmp_path / "a.xyz")[0].numbers.tolist() == [8, 8]


# --- PDB -------------------------------------------------------------------------------------------------------------


def pdb(path, cell=None, charges=()):
    write(path, Atoms(SYMBOLS, POSITIONS))
    lines = [line for line in path.read_text().splitlines() if not line.startswith("CRYST1")]
    of_atoms = [k for k, line in enumerate(lines) if line.startswith("ATOM")]
    for atom, charge in charges:
        lines[of_atoms[atom]] = lines[of_atoms[atom]][:78].ljust(78) + charge
    if cell is not None:
        angles = "  90.00  90.00  90.00"
        lines.insert(0, f"CRYST1{cell[0]:9.3f}{cell[1]:9.3f}{cell[2]:9.3f}{angles} P 1           1")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("charges", "expected"),
    [([(3, "1-"), (5, "1-")], -2), ([(3, "-1"), (0, "2+")], 1), ([(3, "-")], -1), ([(3, "ZZ")], None), ([], None)],
)
def test_charges_of_atoms_in_pdb_files(tmp_path, charges, expected):
    assert states(pdb(tmp_path / "a.pdb", charges=charges)) == [(expected, None)]


@pytest.mark.parametrize(
    ("remark", "expected"),
    [("total charge -2", -2), ("  2 NET CHARGE: -2", -2), ("charge = 1", 1), ("the charge 3 was fitted", None),
     ("3   CHARGE COUNT -2", None)],
)  # fmt: skip
def test_a_remark_of_a_pdb_file_states_the_charge(tmp_path, remark, expected):
    path = pdb(tmp_path / "a.pdb")
    path.write_text(f"REMARK {remark}\n{path.read_text()}")
    assert states(path) == [(expected, None)]
    text = pdb(path, charges=[(3, "1-")]).read_text()
    path.write_text(f"REMARK total charge -2\n{text}")
    with pytest.raises(BadData, match=r"is -1 by the charges of its atoms .* and -2 by 'REMARK total charge -2'"):
        states(path)


def test_models_of_a_pdb_file_have_their_own_charges(tmp_path):
    text = pdb(tmp_path / "a.pdb", charges=[(3, "1-"), (5, "1-")]).read_text()
    other = pdb(tmp_path / "b.pdb").read_text()
    text = text.replace("MODEL     1\n", "").replace("ENDMDL\n", "")
    other = other.replace("MODEL     1\n", "").replace("ENDMDL\n", "")
    (tmp_path / "c.pdb").write_text(f"MODEL     1\n{text}ENDMDL\nMODEL     2\n{other}ENDMDL\nEND\n")
    assert states(tmp_path / "c.pdb") == [(-2, None), (None, None)]


@pytest.mark.parametrize("cell", [(1, 1, 1), (0, 0, 0)])
def test_a_dummy_cell_of_a_pdb_file_is_none(tmp_path, cell):
    path = pdb(tmp_path / "a.pdb", cell)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (atoms,) = read_structures(path)
    assert not atoms.pbc.any() and not atoms.cell.array.any()
    assert any("1 × 1 × 1 Å" in str(warning.message) for warning in caught) == (cell == (1, 1, 1))
    assert read_structures(pdb(path, (20, 20, 20)))[0].pbc.all()


def test_a_placeholder_of_a_cell_is_named_in_data_and_streams_once(tmp_path):
    """In the words of a single structure, by the file where it is known."""
    frame = molecule("H2O", cell=np.eye(3), pbc=True)
    write(tmp_path / "a.xyz", [frame] * 3, format="extxyz")
    words = "the cell of 1 × 1 × 1 Å is a placeholder; the structure is read as a molecule"
    for read, first in (
        (lambda path: open_dataset(path, {})[2].system.pbc.numpy(), f"{tmp_path / 'a.xyz'}: "),
        (lambda path: read_structures(path)[0].pbc, f"{tmp_path / 'a.xyz'}: "),
        (lambda path: [record.parsed().starts[0].pbc for record in RecordFile(str(path))], ""),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            assert not np.any(read(tmp_path / "a.xyz"))
        assert [str(warning.message) for warning in caught] == [first + words]


# --- titles -----------------------------------------------------------------------------------------------------------

CELL = "1.0\n8 0 0\n0 8 0\n0 0 8\nC O\n2 4\nCartesian\n"
TITLED = {
    "a.mol": v2000("", header="").replace("oxalate\n", "{}\n", 1).replace("$$$$\n", ""),
    "a.sdf": v2000("", header="").replace("\n\n\n", "\n\n{}\n", 1),
    "a.pdb": "TITLE     {}\n"
    + "".join(
        f"HETATM{k + 1:5d}  {s:<3} OXA A   1    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00          {s:>2}\n"
        for k, (s, (x, y, z)) in enumerate(zip(SYMBOLS, POSITIONS, strict=True))
    )
    + "END\n",
    "POSCAR": "{}\n" + CELL + "".join(f"{x} {y} {z}\n" for x, y, z in POSITIONS),
    "a.xsf": "# {}\nATOMS\n"
    + "".join(f"{6 if s == 'C' else 8} {x} {y} {z}\n" for s, (x, y, z) in zip(SYMBOLS, POSITIONS, strict=True)),
    "coord": "$title\n{}\n$coord\n" + "".join(
        f"{x / 0.529} {y / 0.529} {z / 0.529} {s.lower()}\n" for s, (x, y, z) in zip(SYMBOLS, POSITIONS, strict=True)
    ) + "$end\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TITLED)
@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("oxalate(2-)", r"\(2-\)' .* if it states a total charge, write it, as in charge=-2"),
        ("C2O4-2", "'C2O4-2' .* if it states a total charge, write it, as in charge=-2"),
        ("oxalate, charge -2", "'charge -2' .* write charge=-2"),
        ("triplet", "write spin=3"),
        ("2-(4-pyridyl)ethanol, conformer 2", None),
    ],
)
def test_a_charge_in_a_title_is_named(tmp_path, name, title, words):
    text = TITLED[name].replace("{}", title)
    if name in ("a.mol", "a.sdf"):  # without bonds, which show the charge, too
        text = re.sub(r"  6  5  0(.*\n)((?:.*\n){6})(?:.*\n){5}", r"  6  0  0\1\2", text)
    (tmp_path / name).write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_structures(tmp_path / name)
    told = [str(one.message) for one in caught if "is not read" in str(one.message)]
    assert len(told) == bool(words) and (not words or re.search(f"{name}: .*{words}", told[0]))


def test_a_title_beside_a_stated_charge_is_not_named(tmp_path):
    (tmp_path / "a.sdf").write_text(v2000().replace("oxalate\n", "oxalate(2-)\n", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_structures(tmp_path / "a.sdf")[0].info["charge"] == -2


# --- extended XYZ ----------------------------------------------------------------------------------------------------


def xyz(path, comment, columns="", values=()):
    rows = [f"{line} {' '.join(values[k : k + 1])}" for k, line in enumerate(LINES.splitlines())]
    path.write_text(f"6\nProperties=species:S:1:pos:R:3{columns} {comment}\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("comment", "columns", "values", "expected"),
    [
        ("total_charge=-2", "", (), (-2, None)),
        ("Total-Charge=-2.0 multiplicity=1", "", (), (-2, 1)),
        ("tot_charge=-1.9999999999 mult=3", "", (), (-2, 3)),
        ("unpaired_electrons=2", "", (), (None, 3)),
        ("charge=-2 total_charge=-2", "", (), (-2, None)),
        ("", ":initial_charges:R:1", ("0", "0", "0", "-1", "0", "-1"), (-2, None)),
        ("", ":initial_charges:R:1", ("0.3", "0.3", "-0.65", "-0.65", "-0.65", "-0.65"), (-2, None)),
        ("", ":charge:R:1", ("0.3", "0.3", "-0.65", "-0.65", "-0.65", "-0.651"), (-2, None)),
        ("", ":formal_charges:I:1", ("0", "0", "0", "-1", "0", "-1"), (-2, None)),
        ("", ":initial_magmoms:R:1", ("1", "1", "0", "0", "0", "0"), (None, 3)),
        ("", ":initial_charges:R:1", ("0", "0", "0", "0", "0", "0"), (None, None)),
    ],
)
def test_names_and_columns_that_state_charge_and_spin(tmp_path, comment, columns, values, expected):
    assert states(xyz(tmp_path / "a.xyz", comment, columns, values)) == [expected]


def test_positions_in_the_unit_that_the_header_states(tmp_path):
    path = xyz(tmp_path / "a.xyz", 'Lattice="10 0 0 0 10 0 0 0 10" pos-unit=bohr')
    (atoms,) = read_structures(path)
    np.testing.assert_allclose(atoms.positions, np.array(POSITIONS) * 0.529177210903, rtol=1e-12)
    np.testing.assert_allclose(atoms.cell.lengths(), 5.29177210903, rtol=1e-12)
    assert not any("unit" in key for key in atoms.info)
    with pytest.raises(BadData, match="pos-unit=ell: unknown length unit"):
        read_structures(xyz(path, "pos-unit=ell"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "q.in",
            "$molecule\n-1 1\nO 0.0 0.0 0.0\n$end\n",
            r"q.in: ase.io finds no atoms in it, .* the format aims\. If the file",
        ),
        (
            "w.nwi",
            "geometry\n O 0 0\nend\n",
            r"w.nwi: .*\(as the format nwchem-in of ase.io\)",
        ),
        ("a.abc", "nothing", "a.abc: cannot be read as a structure: ASE knows no format of structures with this name"),
        (
            "a.mol2",
            "@<TRIPOS>MOLECULE\n",
            r"\(mol2\): convert the file to SDF, which keeps charges, or to extended XYZ",
        ),
        (
            "a.xyz",
            "1\n\n8 0 0 0\n",
            "a.xyz: .* there is no element '8'; a column of atomic numbers needs Properties=Z:I",
        ),
        ("a.xyz", "1\n\nO 0 0 0\n" * 2 + "2\n\nO 0 0 0\n", "a.xyz, structure 2: .* after 1 of 2 atoms"),
        ("a.xyz", "one\n\nO 0 0 0\n", "a.xyz: .* a number of atoms is expected"),
        ("a.sdf", "\n", "a.sdf: .*it has no molecules"),
        ("a.sdf", "one\ntwo\n", "a.sdf: .*not a molfile that can be read: it ends within its header"),
        ("a.mol", "\n\n\n  0  0  0  0  0  0  0  0  0  0999 V2000\nM  END\n", "a.mol: .*it has no atoms"),
        ("a.xyz", "1\ncharge=0.5\nO 0 0 0\n", "a.xyz: .*charge.* 0.5"),
        ("a.xyz", "1\n\nO 0,1 0,0 0,25\n", r"a.xyz: .*the number 0,1 has a decimal comma: write 0\.1"),
        ("a.sdf", v2000("").replace("0.0000", "0,0000", 1), "a.sdf: .*the number .*0,0000 has a decimal comma"),
        ("POSCAR", "x\n1.0\n8,0 0 0\n0 8 0\n0 0 8\nO\n1\nDirect\n0 0 0\n", "POSCAR: .*8,0 has a decimal comma"),
        ("POSCAR", "x\n1.0\n8 0 0\n0 8 0\n0 0 8\nQq\n1\nDirect\n0 0 0\n", "POSCAR: .*'Qq' is not an element"),
        (
            "a.sdf",
            v3000().replace("M  V30 END ATOM", "M  V30 END ATOM\nM  V30 BEGIN BOND\nM  V30 1 1 1 9\nM  V30 END BOND"),
            "a.sdf: .*the bond '1 1 1 9' names an atom that is not there",
        ),
        ("a.dat", "molecule {\n-2 1\nO 0 0 0\n}\n", "a.dat: .*: a part that its format needs is missing"),
        ("a.sdf", v3000(" CHG=-1 RAD=5"), "unknown code 5 of a radical; 1, 2 and 3 are"),
        ("a.sdf", v2000("M  RAD  1   3   5\n"), "unknown code 5 of a radical; 1, 2 and 3 are"),
    ],
)
def test_what_cannot_be_read_is_said_in_words(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadData, match=words):
        read_structures(tmp_path / name)


def test_comment_lines_in_other_encodings(tmp_path):
    (tmp_path / "a.xyz").write_bytes(b"1\ncharge=-1 name=caf\xe9\nO 0 0 0\n")
    assert states(tmp_path / "a.xyz") == [(-1, None)]
    assert open_dataset(tmp_path / "a.xyz", {})[0].system.charge.item() == -1


def test_velocities_and_fixed_atoms_of_xyz_are_kept(tmp_path):
    from ase.constraints import FixAtoms

    atoms = molecule("CH3OH")
    atoms.set_velocities(np.ones((6, 3)))
    atoms.set_constraint(FixAtoms([1]))
    write(tmp_path / "a.xyz", [molecule("H2O"), atoms], format="extxyz")
    _, again = read_structures(tmp_path / "a.xyz")
    np.testing.assert_allclose(again.get_velocities(), np.ones((6, 3)), rtol=1e-6)
    assert again.constraints[0].index.tolist() == [1]


HARTREE, BOHR = 27.211386245988, 0.529177210903  # eV, Å


def in_atomic_units(**more):
    """Hydroxide whose entries say that its numbers are in atomic units."""
    atoms = Atoms("OH", [[0, 0, 0], [0, 0, 1.8]], info={"charge": -1, **more})
    atoms.info |= {"energy_unit": "hartree", "pos_unit": "bohr", "force_unit": "hartree/bohr"}
    atoms.calc = SinglePointCalculator(atoms, energy=-75.0, forces=np.full((2, 3), 0.01))
    return atoms


@pytest.mark.parametrize("given", [None, "ase", "other"])
@pytest.mark.parametrize("format", ["extxyz", "traj"])
def test_stated_units_hold_for_positions_and_labels_whoever_reads_the_file(tmp_path, format, given):
    path = tmp_path / f"a.{format}"
    write(path, [in_atomic_units()] * 2, format=format)
    sample = open_dataset(path, format=f"ase/{format}" if given == "other" else given)[1]
    assert float(sample.labels["energy"]) == pytest.approx(-75.0 * HARTREE, rel=1e-6)
    assert float(sample.labels["forces"][0, 0]) == pytest.approx(0.01 * HARTREE / BOHR, rel=1e-6)
    assert float(sample.system.pos[1, 2]) == pytest.approx(1.8 * BOHR, rel=1e-6)
    assert int(sample.system.charge[0]) == -1
    with pytest.raises(BadData, match=r"energy_unit=hartree.*given unit is eV"):
        open_dataset(path, format=given if given == "ase" else None, units={"energy": "eV"})


@pytest.mark.parametrize("format", ["extxyz", "traj"])
def test_structures_are_in_angstrom_and_without_results_in_other_units(tmp_path, format):
    path = tmp_path / f"a.{format}"
    write(path, in_atomic_units(reference=-75.0), format=format)
    with pytest.warns(StructureWarning, match=f"a.{format}: the file states energy_unit=hartree.*left out"):
        (atoms,) = read_structures(path)
    assert atoms.calc is None and atoms.positions[1, 2] == pytest.approx(1.8 * BOHR, rel=1e-6)
    # what the other entries are in is still said
    assert "pos_unit" not in atoms.info and atoms.info["energy_unit"] == "hartree"


def test_a_key_chooses_between_charges_that_differ_in_every_format(tmp_path):
    atoms = molecule("H2O")
    atoms.info |= {"total_charge": 2, "net_charge": -2}
    for name in ("a.xyz", "a.traj"):
        write(tmp_path / name, atoms)
        with pytest.raises(BadData, match=r"total_charge.*net_charge"):
            open_dataset(tmp_path / name, keys={})
        assert int(open_dataset(tmp_path / name, keys={"charge": "net_charge"})[0].system.charge[0]) == -2


def pdb_atom(name, element="  ", place=" ", x=0.0, residue=1):
    return f"HETATM    1 {name}{place}LIG A{residue:4d}    {x:8.3f}   0.000   0.000  0.50  0.00          {element}\n"


GRO_NAMES = [("MOL", "H1"), ("MOL", "CL"), ("NA", "NA"), ("ALA", "CA"), ("SOL", "OW"), ("SOL", "MW")]
GRO = (
    "t\n6\n"
    + "".join(f"    1{r:<5}{n:>5}    1{k:8.3f}   0.000   0.000\n" for k, (r, n) in enumerate(GRO_NAMES))
    + " 9. 9. 9.\n"
)
CIF = (
    "data_x\n_cell_length_a 9\n_cell_length_b 9\n_cell_length_c 9\n_cell_angle_alpha 90\n_cell_angle_beta 90\n"
    "_cell_angle_gamma 90\n_symmetry_space_group_name_H-M 'P 1'\nloop_\n_atom_site_label\n_atom_site_type_symbol\n"
    "_atom_site_fract_x\n_atom_site_fract_y\n_atom_site_fract_z\n_atom_site_occupancy\nNa1 Na+ 0 0 0 {}\n"
    "Cl1 Cl- 0.25 0 0 1.0\n"
)
DUMP = (
    "ITEM: TIMESTEP\n0\nITEM: NUMBER OF ATOMS\n1\nITEM: BOX BOUNDS pp pp pp\n0 9\n0 9\n0 9\n"
    "ITEM: ATOMS id type x y z\n1 1 0 0 0\n"
)


@pytest.mark.parametrize(
    ("name", "text", "elements", "words"),
    [
        (
            "a.pdb",
            pdb_atom(" CA ") + pdb_atom("CL1 ", x=1.8),
            ["C", "Cl"],
            r"a.pdb: the file states no .*CA → C, CL1 → Cl",
        ),
        ("a.pdb", pdb_atom("HG11") + pdb_atom("1HB ", x=1.0), ["H", "H"], "HG11 → H, 1HB → H"),
        ("a.pdb", pdb_atom("CA  ", "CA"), ["Ca"], None),
        (
            "a.pdb",
            pdb_atom(" O  ", " O", "A") + pdb_atom(" O  ", " O", "B", 0.1),
            ["O"],
            "1 atom of alternate locations left out",
        ),
        ("a.pdb", pdb_atom(" O  ", " O", "A") + pdb_atom(" O  ", " O", "B", 3.0, 2), ["O", "O"], None),
        ("a.gro", GRO, ["H", "Cl", "Na", "C", "O", "X"], "H1 → H, CL → Cl, NA → Na, CA → C, OW → O, MW → X"),
        ("a.cif", CIF.format("0.5"), ["Na", "Cl"], r"a.cif: sites are partly occupied \(Na 0.5\)"),
        ("a.cif", CIF.format("1.0"), ["Na", "Cl"], None),
    ],
)
def test_what_a_reader_guesses_or_leaves_out_is_named(tmp_path, name, text, elements, words):
    (tmp_path / name).write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (atoms,) = read_structures(tmp_path / name)
    assert atoms.get_chemical_symbols() == elements
    found = [str(one.message) for one in caught if issubclass(one.category, StructureWarning)]
    assert len(found) == bool(words)
    if words:
        assert re.search(words, found[0])


@pytest.mark.parametrize(
    ("name", "format", "head", "words"),
    [
        ("a.gro", "gromacs", 2, "it was cut off: it ends after 4 of its 9 atoms"),
        ("coord", "turbomole", 1, r"it was cut off: it ends within \$coord \(a line \$end is missing\)"),
        ("a.gen", "gen", 2, "it was cut off: it ends after 4 of its 9 atoms"),
        ("POSCAR", "vasp", 8, "cannot be read as a structure"),
        ("a.cube", "cube", 6, "cannot be read as a structure"),
        ("a.xyz", "extxyz", 2, "the file was cut off: it ends after 4 of 9 atoms"),
        ("a.sdf", "sdf", 4, "no line 'M  END': it is cut off"),
    ],
)
def test_files_that_end_between_two_atoms_are_refused_where_their_format_shows_it(tmp_path, name, format, head, words):
    atoms = molecule("CH3CH2OH")
    atoms.center(5)
    write(tmp_path / name, atoms, format=format)
    assert len(read_structures(tmp_path / name)[0]) == 9
    lines = (tmp_path / name).read_text().splitlines(keepends=True)
    (tmp_path / name).write_text("".join(lines[: head + 4]))
    with pytest.raises(BadData, match=rf"{name}: .*{words}"):
        read_structures(tmp_path / name)


def test_types_that_are_no_elements_are_refused(tmp_path):
    (tmp_path / "a.lammpstrj").write_text(DUMP)
    with pytest.raises(
        BadData, match=r"a.lammpstrj: the file states no elements: write the dump with the column element"
    ):
        read_structures(tmp_path / "a.lammpstrj")
    (tmp_path / "a.lammpstrj").write_text(DUMP.replace("type", "type element").replace("1 1 0", "1 1 Cu 0"))
    assert read_structures(tmp_path / "a.lammpstrj")[0].get_chemical_symbols() == ["Cu"]
    box = "".join(f"0 9 {x}lo {x}hi\n" for x in "xyz")
    for masses in ("", "Masses\n\n1 63.546\n\n"):
        text = f"LAMMPS data, units = metal\n\n1 atoms\n1 atom types\n{box}\n{masses}Atoms # atomic\n\n1 1 0 0 0\n"
        (tmp_path / "a.data").write_text(text)
        if masses:
            assert read_structures(tmp_path / "a.data", format="lammps-data")[0].get_chemical_symbols() == ["Cu"]
        else:
            with pytest.raises(BadData, match=r"a.data: the file states no elements: the section Masses is needed"):
                read_structures(tmp_path / "a.data", format="lammps-data")


@pytest.mark.parametrize("line", ["M  CHG  1   1  -1", "M CHG  1   1  -1", "m  chg 1 1 -1", " M  CHG  1   1  -1"])
def test_charges_of_a_molfile_written_by_hand(tmp_path, line):
    atoms = "".join(f"{x:10.4f}    0.0000    0.0000 {s}   0  0\n" for x, s in ((0, "O"), (0.97, "H")))
    head = f"ion\n\n\n  2  1  0  0  0  0  0  0  0  0999 V2000\n{atoms}  1  2  1  0\n"
    (tmp_path / "a.sdf").write_text(f"{head}{line}\nM  END\n$$$$\n")
    assert read_structures(tmp_path / "a.sdf")[0].info["charge"] == -1
    (tmp_path / "a.sdf").write_text(f"{head}M  END\n{line}\n$$$$\n")
    with pytest.raises(BadData, match="stands after the line 'M  END', where it has no effect"):
        read_structures(tmp_path / "a.sdf")
