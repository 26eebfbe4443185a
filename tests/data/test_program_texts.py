"""Charge, multiplicity and unit of lengths in texts of programs: the whole structure's, and no other numbers."""

import re
import warnings

import numpy as np
import pytest
from ase.build import molecule
from ase.io import write

from torchmdnet2.data import open_dataset
from torchmdnet2.data.program_texts import program_statements, states_charges, states_more
from torchmdnet2.data.structures import read_structures
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.units import BOHR

from .frames import LINES, POSITIONS, SYMBOLS

ATOMS = "O 0.0 0.0 0.0\nH 0.0 0.76 0.6\nH 0.0 -0.76 0.6\n"
HEAD = "%mem=1GB\n# hf/3-21g\n\n"
COORD = "$coord\n0 0 0 o\n0 1.4 1.1 h\n0 -1.4 1.1 h\n{}$end\n"
DFT = """&FORCE_EVAL
   &DFT
     BASIS_SET_FILE_NAME X
     {}
     &SCF
       MAX_SCF 20
     &END SCF
   &END DFT
   &MM
     CHARGE 2
   &END MM
&END FORCE_EVAL
"""


@pytest.mark.parametrize(
    ("format", "text", "charges", "spins"),
    [
        ("gaussian-in", HEAD + "water\n\n-2,1\n", [-2], [1]),
        ("gaussian-in", HEAD + "12 3\n\n-1 2\n", [-1], [2]),
        ("gaussian-in", HEAD.replace("# hf", "#p hf\n# opt") + "a\nb 4 5\n\n\n1, 3\n0 1\n", [1], [3]),
        ("gaussian-in", HEAD + "dimer\n\n-1,1 -1,1 0,1\n", [-1], [1]),
        ("gaussian-in", HEAD + "oniom\n\n-1 2 0 1 0 1\r\n", [-1], [2]),
        ("gaussian-in", (HEAD + "water\n\n-2,1\n").replace("\n", "\r\n"), [-2], [1]),
        ("gaussian-out", " Charge = -2 Multiplicity = 1\n", [-2], [1]),
        (
            "gaussian-out",
            " Charge = -1 Multiplicity = 1 in supermolecule\n Charge = -1 Multiplicity = 1 in fragment      1.\n"
            " Charge =  0 Multiplicity = 1 in fragment      2.\n",
            [-1],
            [1],
        ),
        (
            "gaussian/log",
            " Charge = -1 Multiplicity = 2 for low   level calculation on real  system.\n"
            " Charge =  0 Multiplicity = 1 for high  level calculation on model system.\n"
            " Charge =  0 Multiplicity = 1 for low   level calculation on model system.\n",
            [-1],
            [2],
        ),
        ("gaussian/fchk", "Charge                                     I               -1\n", [-1], []),
        ("turbomole", "$eht charge=-2 unpaired=1\n$charges 5\n", [-2], [2]),
        ("turbomole", "$eht   charge = 1\n", [1], []),
        ("turbomole-gradient", "$chrg -1\n$spin 2\n", [-1], [3]),
        ("espresso-in", "&system\n tot_charge = -1.0d0\n", [-1], []),
        ("cp2k-restart", DFT.format("CHARGE  -2"), [-2], []),
        ("cp2k-restart", DFT.format("MULTIPLICITY  3\n     CHARGE  -1"), [-1], [3]),
        ("cp2k-restart", DFT.format("CHARGE  -1\n     MULTIPLICITY  2"), [-1], [2]),
        ("cp2k-restart", DFT.format("UKS T"), [], []),
        ("cp2k/output", " DFT| Charge                                     -2\n", [-2], []),
        ("aims-output", "  Charge =  -1.000000E+00: Charged system requested.\n", [-1], []),
        ("castep-castep", "  net charge of system                           :  -1.000\n", [-1], []),
        ("abinit-in", "acell 8 8 8\ncharge -1\n", [-1], []),
        ("onetep-in", "charge : -2\nspin_polarized T\n", [-2], []),
        ("octopus-in", "ExcessCharge = 1\n", [1], []),
        ("dftb", "Hamiltonian = DFTB {\n  Charge = -1.0\n}\n", [-1], []),
        ("psi4/out", "    Charge       = -1\n    Multiplicity = 2\n", [-1], [2]),
        ("nwchem-in", "charge -2\nscf\n rohf\n nopen 2\nend\n", [-2], [3]),
        ("nwchem-in", "scf\n uhf\n triplet\nend\n", [], [3]),
        ("nwchem-in", "scf; singlet; end\n", [], [1]),
        ("aims", "charge -2\nfixed_spin_moment 2\n", [-2], [3]),
        ("cjson", '{"formalCharges": [0, -1, 0, -1], "totalCharge": -2}', [-2, -2], []),
        ("cjson", '{"formalCharges": [0, 0]}', [], []),
        ("abinit-out", " outvars: echo values\n       cellcharge   -2.00000000E+00\n", [-2], []),
        ("gpaw-out", "  Total Charge: -2.000000 \n", [-2], []),
        ("siesta/output", "redata: Net charge of the system               =   -2.000 |e|\n", [-2], []),
        ("turbomole", "$charge\n  -2.000  0.0\n$eht charge=-2 unpaired=0\n$end\n", [-2, -2], [1]),
        ("turbomole", "$charge from file\n$end\n", [], []),
    ],
)
def test_what_texts_of_programs_state(format, text, charges, spins):
    found = program_statements(format, text)
    assert states_charges(format)
    assert [[one.value for one in found[name]] for name in ("charge", "spin")] == [charges, spins]


def test_the_statement_is_its_line_and_other_formats_state_nothing():
    (stated,) = program_statements("turbomole", "$title\n$eht   charge=-2 unpaired=0\n$end\n")["charge"]
    assert stated.source == "its line '$eht charge=-2 unpaired=0'"
    assert not states_charges("vasp/outcar") and program_statements("vasp", "charge -2")["charge"] == []
    with pytest.raises(BadData, match="charge must be a whole number"):
        program_statements("espresso-in", "tot_charge = 0.5")


@pytest.mark.parametrize(
    ("name", "format", "text", "expected"),
    [
        ("a.gjf", "gaussian-in", f"{HEAD}12 3\n\n-1 2\n{ATOMS}\n", (-1, 2)),
        ("a.com", "gaussian-in", f"{HEAD}water dimer\n\n-1 1 -1 1\n{ATOMS}\n", (-1, 1)),
        ("coord", "turbomole", COORD.format("$eht charge=1 unpaired=2\n"), (1, 3)),
        ("coord", "turbomole", COORD.format("$chrg -1\n"), (-1, None)),
    ],
)
def test_structures_have_the_charge_of_their_text(tmp_path, name, format, text, expected):
    (tmp_path / name).write_text(text)
    (atoms,) = read_structures(tmp_path / name, format=format)
    assert atoms.get_chemical_formula() == "H2O"
    assert (atoms.info.get("charge"), atoms.info.get("spin")) == expected


def test_inputs_are_read_without_the_empty_lines_that_ase_needs(tmp_path):
    text = f"start w\ncharge -1\ngeometry units angstrom\n{ATOMS}end\ntask dft\n"
    (tmp_path / "w.nwi").write_text(text)
    (atoms,) = read_structures(tmp_path / "w.nwi")
    assert atoms.get_chemical_formula() == "H2O" and atoms.info["charge"] == -1


def test_a_coord_file_has_the_charge_of_the_control_file_beside_it(tmp_path):
    (tmp_path / "coord").write_text(COORD.format(""))
    assert "charge" not in read_structures(tmp_path / "coord")[0].info
    (tmp_path / "control").write_text("$title\n$coord file=coord\n$eht charge=-2 unpaired=0\n$end\n")
    assert read_structures(tmp_path / "coord")[0].info["charge"] == -2
    (tmp_path / "coord").write_text(COORD.format("$chrg -1\n"))
    with pytest.raises(BadData, match=r"-1 by its line '\$chrg -1' and -2 by its line"):
        read_structures(tmp_path / "coord")


@pytest.mark.parametrize(
    ("name", "text", "beside", "stated"),
    [
        (
            "geometry.in",
            "atom 0 0 0 O\natom 0 0.76 0.6 H\n",
            "control.in",
            "xc pbe\n  charge  -1\ncharge_mix_param 2\n",
        ),
        (
            "a.cell",
            "%BLOCK LATTICE_CART\n8 0 0\n0 8 0\n0 0 8\n%ENDBLOCK LATTICE_CART\n"
            "%BLOCK POSITIONS_ABS\nO 0 0 0\nH 0 0.76 0.6\n%ENDBLOCK POSITIONS_ABS\n",
            "a.param",
            "task : singlepoint\ncharge : -1\ncut_off_energy : 500\n",
        ),
        ("geo.gen", "2 C\nO H\n1 1 0 0 0\n2 2 0 0.76 0.6\n", "dftb_in.hsd", "Hamiltonian = DFTB {\n Charge = -1\n}\n"),
    ],
)
def test_a_structure_has_the_charge_of_the_input_of_its_program(tmp_path, name, text, beside, stated):
    (tmp_path / name).write_text(text)
    assert "charge" not in read_structures(tmp_path / name)[0].info
    (tmp_path / beside).write_text(stated)
    assert read_structures(tmp_path / name)[0].info["charge"] == -1
    (tmp_path / "a.xyz").write_text("1\n\nHe 0 0 0\n")  # its program is another one
    assert "charge" not in read_structures(tmp_path / "a.xyz")[0].info


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xyz", "3\n\nO 0 0 0\nH 0 0.76 0.6\nH 0 -0.76 0.6\n"),
        ("coord", COORD.format("")),
        ("a.gen", "3 C\nO H\n1 1 0 0 0\n2 2 0 0.76 0.6\n3 2 0 -0.76 0.6\n"),
    ],
)
def test_a_structure_has_the_charge_and_spin_of_the_files_of_xtb_beside_it(tmp_path, name, text):
    (tmp_path / name).write_text(text)

    def stated(info=None):
        keys = {} if name == "a.xyz" else None
        if keys is not None:
            (sample,) = open_dataset(tmp_path / name, keys)
            assert (sample.system.charge.item(), sample.system.spin.item()) == (info[0] or 0, info[1] or 0)
        (atoms,) = read_structures(tmp_path / name)
        return atoms.info.get("charge"), atoms.info.get("spin")

    assert stated((None, None)) == (None, None)
    (tmp_path / ".CHRG").write_text("-2\n")
    (tmp_path / ".UHF").write_text("0\n")
    assert stated((-2, None)) == (-2, None)
    (tmp_path / ".UHF").write_text("  2  \n")
    assert stated((-2, 3)) == (-2, 3)
    (tmp_path / ".CHRG").write_text("many\n")
    with pytest.raises(BadData, match=r"\.CHRG: \.CHRG must be a whole number, got many"):
        read_structures(tmp_path / name)


def test_the_files_of_xtb_against_what_a_file_states(tmp_path):
    water, ion = "3\n{}\nO 0 0 0\nH 0 0.76 0.6\nH 0 -0.76 0.6\n", "2\n{}\nO 0 0 0\nH 0 0.76 0.6\n"
    path = tmp_path / "a.xyz"
    (tmp_path / ".CHRG").write_text("-2")
    path.write_text(water.format("charge=0"))
    for read in (read_structures, lambda path: open_dataset(path, {})):
        with pytest.raises(BadData, match=r"0 by 'charge' and -2 by the file \.CHRG beside it"):
            read(path)
    path.write_text(water.format("") * 2)
    assert [atoms.info["charge"] for atoms in read_structures(path)] == [-2, -2]
    path.write_text(water.format("") + ion.format(""))
    for read in (read_structures, lambda path: open_dataset(path, {})):
        with pytest.raises(BadData, match=r"the file \.CHRG beside it is of one molecule, and the structures have"):
            read(path)
    (tmp_path / ".CHRG").write_text("0")
    assert len(read_structures(path)) == len(open_dataset(path, {})) == 2
    path.write_text(water.format("") + ion.format("charge=1"))
    assert [atoms.info.get("charge") for atoms in read_structures(path)] == [0, 1]
    write(tmp_path / "a.traj", molecule("H2O"))
    assert "charge" not in read_structures(tmp_path / "a.traj")[0].info


OUTCAR = (
    "   POMASS =   16.000; ZVAL   =    6.000    mass and valenz\n   ions per type =               1   2\n"
    "   NELECT =      {:.4f}    total number of electrons\n  Ionic Valenz\n   ZVAL   =   6.00  1.00\n"
)
VASPRUN = (
    '<i name="NELECT">     {:.8f}</i>\n<array name="atomtypes"><set>\n'
    "<rc><c>   1</c><c>O </c><c>     16.000</c><c>      6.000</c><c> PAW_PBE O </c></rc>\n"
    "<rc><c>   2</c><c>H </c><c>      1.000</c><c>      1.000</c><c> PAW_PBE H </c></rc>\n</set></array>\n"
)
ESPRESSO = (
    "     number of electrons       =         {:.2f}\n"
    "     atomic species   valence    mass     pseudopotential\n        O              6.00    15.99900     O( 1.00)\n"
    "        H              1.00     1.00800     H( 1.00)\n\n"
    "     site n.     atom                  positions (alat units)\n"
    + "".join(f"         {k}           {s}   tau(   {k}) = (   0.0   0.0   0.0  )\n" for k, s in enumerate("OHH", 1))
)


@pytest.mark.parametrize(
    ("format", "text"),
    [("vasp-out", OUTCAR), ("vasp/outcar", OUTCAR), ("vasp-xml", VASPRUN), ("espresso-out", ESPRESSO)],
)
def test_a_number_of_electrons_shows_the_charge(format, text):
    for electrons, charge in ((8, []), (10, [-2]), (7, [1])):
        found = program_statements(format, text.format(electrons))
        assert [one.value for one in found["charge"]] == charge and not found["spin"]
    assert states_more(format)
    with pytest.warns(StructureWarning, match=r"its number of electrons, 8\.5, shows a charge of -0\.5, which is not"):
        assert not program_statements(format, text.format(8.5))["charge"]
    damaged = text.replace("ZVAL   =   6.00", "").replace("<c>   1</c>", "").replace("site n.", "")
    assert format == "vasp-xml" or not program_statements(format, damaged.format(10))["charge"]


def test_several_entries_in_a_line_of_an_nwchem_input_are_read():
    found = program_statements("nwchem-in", "charge -1; geometry\nend\ndft; mult 2; end\nscf; doublet; uhf; end\n")
    assert {name: [one.value for one in each] for name, each in found.items()} == {"charge": [-1], "spin": [2, 2]}


def test_rows_of_many_types_in_an_outcar_are_read_as_one(tmp_path):
    text = OUTCAR.replace("1   2\n", "   1" * 10 + "\n" + " " * 35 + "   1   2\n")
    text = text.replace("  6.00  1.00\n", "  6.00" * 8 + "\n" + " " * 13 + "  6.00" * 3 + "  1.00\n")
    assert not program_statements("vasp-out", text.format(68))["charge"]
    assert [one.value for one in program_statements("vasp-out", text.format(69))["charge"]] == [-1]
    unlike = text.replace("  6.00" * 3, "  6.00")
    assert not program_statements("vasp-out", unlike.format(69))["charge"]


def test_a_number_of_electrons_beside_a_poscar_is_named(tmp_path):
    text = "x\n1.0\n8 0 0\n0 8 0\n0 0 8\nO\n1\nCartesian\n0 0 0\n"
    (tmp_path / "POSCAR").write_text(text)
    (tmp_path / "INCAR").write_text("ENCUT = 400\n# NELECT = 8\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructureWarning)
        read_structures(tmp_path / "POSCAR")
    (tmp_path / "INCAR").write_text("ENCUT = 400\n NELECT = 8\n")
    with pytest.warns(StructureWarning, match="POSCAR: 'NELECT = 8' in the INCAR beside it is not read"):
        read_structures(tmp_path / "POSCAR")


DUMP = "ITEM: UNITS\n{}\nITEM: TIMESTEP\n0\nITEM: NUMBER OF ATOMS\n3\nITEM: BOX BOUNDS ff ff ff\n-9 9\n-9 9\n-9 9\n"
COLUMNS = "ITEM: ATOMS id type {}x y z\n1 1 O 0 0 0\n2 2 H 0 0.76 0.6\n3 2 H 0 -0.76 0.6\n"


@pytest.mark.parametrize(
    ("format", "text", "unit"),
    [
        ("nwchem-in", f"geometry units au\n{ATOMS}end\n", BOHR),
        ("nwchem-in", f"geometry nocenter units angstroms noautosym\n{ATOMS}end\n", 1),
        ("nwchem-in", f"geometry\n{ATOMS}end\n", 1),
        ("gaussian-in", f"#p hf units=(deg,AU)\n\nwater\n\n0,1\n{ATOMS}\n", BOHR),
        ("gaussian-in", f"# hf\n units=au\n\nwater\n\n0 1\n{ATOMS}\n", BOHR),
        ("gaussian-in", f"# hf\n\nunits=au\n\n0 1\n{ATOMS}\n", 1),
        ("turbomole", "$coord angs\n0 0 0 o\n0 0.76 0.6 h\n0 -0.76 0.6 h\n$end\n", 1),
        ("turbomole", "$coord\n0 0 0 o\n0 0.76 0.6 h\n0 -0.76 0.6 h\n$end\n", BOHR),
        ("turbomole", "$coord frac\n0 0 0 o\n0 0.76 0.6 h\n0 -0.76 0.6 h\n$end\n", None),
        ("turbomole", "$coord\n0 0 0 o\n0 0.76 0.6 h\n0 -0.76 0.6 h\n$periodic 3\n$end\n", None),
        ("lammps-dump-text", DUMP.format("electron") + COLUMNS.format("element "), BOHR),
        ("lammps-dump-text", DUMP.format("real") + COLUMNS.format("element "), 1),
        ("lammps-dump-text", DUMP.format("lj") + COLUMNS.format("element "), None),
    ],
)
def test_lengths_in_the_unit_that_the_text_states(tmp_path, format, text, unit):
    (tmp_path / "a").write_text(text)
    if unit is None:
        with pytest.raises(BadData, match=r"a: its line '.*' states (lengths|a cell) in a form that is not supported"):
            read_structures(tmp_path / "a", format=format)
    else:
        (atoms,) = read_structures(tmp_path / "a", format=format)
        np.testing.assert_allclose(sorted(abs(atoms.positions[:, 1])), [0, 0.76 * unit, 0.76 * unit], rtol=1e-6)


def test_a_changed_control_file_renews_a_cache(tmp_path):
    path, cache = tmp_path / "coord", tmp_path / "cache"
    path.write_text(COORD.format(""))

    def charge():
        return float(open_dataset(path, {}, format="turbomole", cache=cache)[0].system.charge)

    assert charge() == 0
    for value in (-2, 2):
        (tmp_path / "control").write_text(f"$eht charge={value} unpaired=0\n$end\n")
        assert charge() == value


# --- logs of quantum chemistry programs -------------------------------------------------------------------------------

GAUSSIAN_INPUT = "%mem=1GB\n# wb97xd/def2tzvp\n\noxalate\n\n-2 1\n{atoms}\n\n"
ORIENTATION = "\n".join(
    f" {k + 1:6d} {8 if s == 'O' else 6:10d} {0:11d} {x:15.6f} {y:11.6f} {z:11.6f}"
    for k, (s, (x, y, z)) in enumerate(zip(SYMBOLS, POSITIONS, strict=True))
)
RULE = " " + "-" * 69
GAUSSIAN_LOG = (
    f" Entering Gaussian System, Link 0=g16\n Gaussian 16:  ES64L-G16RevA.03 25-Dec-2016\n {'-' * 20}\n # hf/3-21g\n "
    f"{'-' * 20}\n Symbolic Z-matrix:\n Charge = -2 Multiplicity = 1\n"
    f"                         Input orientation:\n{RULE}\n Center  Atomic  Atomic  Coordinates (Angstroms)\n Number  "
    f"Number  Type  X  Y  Z\n{RULE}\n{ORIENTATION}\n{RULE}\n SCF Done:  E(RHF) =  -377.0  A.U. after 5 cycles\n"
)
ORCA_LOG = (
    "                                 * O   R   C   A *\n\nNumber of atoms       ...      6\n"
    " Total Charge           Charge          ....   -2\n"
    " Multiplicity           Mult            ....    1\n"
    "---------------------------------\nCARTESIAN COORDINATES (ANGSTROEM)\n---------------------------------\n"
    f"{LINES}\n\n---\nFINAL SINGLE POINT ENERGY      -377.000000000000\n\n"
    "                             ****ORCA TERMINATED NORMALLY****\n"
)


@pytest.mark.parametrize(
    ("name", "format", "text"),
    [
        ("a.gjf", "gaussian-in", GAUSSIAN_INPUT.format(atoms=LINES)),
        ("a.log", "gaussian-out", GAUSSIAN_LOG),
        ("a.out", "orca-output", ORCA_LOG),
    ],
)
def test_charge_and_multiplicity_of_quantum_chemistry_programs(tmp_path, name, format, text):
    (tmp_path / name).write_text(text)
    found = read_structures(tmp_path / name, format=format)
    assert len(found) >= 1 and found[-1].numbers.tolist() == [6, 6, 8, 8, 8, 8]
    assert all((atoms.info["charge"], atoms.info["spin"]) == (-2, 1) for atoms in found)


def test_a_log_of_two_charges_is_an_error(tmp_path):
    text = GAUSSIAN_LOG.replace(" Charge = -2 M", " Charge = -1 Multiplicity = 2\n Charge = -2 M")
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(BadData, match=r"the total charge is -1 by its line .* and -2 by its line"):
        read_structures(tmp_path / "a.log", format="gaussian-out")


def gaussian_job(route="# hf/3-21g", method="RHF", charge=-2, energy=-377.0, change=("", "")):
    text = GAUSSIAN_LOG.replace("# hf/3-21g", route).replace("E(RHF)", f"E({method})").replace("-377.0", str(energy))
    text = text.replace("Charge = -2", f"Charge = {charge}").replace(*change)
    return text + " 1\\1\\GINC-NODE\\SP\n\n Normal termination of Gaussian 16 at Mon Jan  1 00:00:00 2024.\n"


@pytest.mark.parametrize(
    "second",
    [
        gaussian_job(energy=-377.5),
        gaussian_job("#N Geom=AllCheck Guess=TCheck SCRF=Check GenChk RHF/3-21G Freq", energy=-377.5),
        gaussian_job("#p hf/3-21G opt=(calcfc,tight) iop(3/124=40)", energy=-377.5, change=(" Entering", " Leaving")),
        gaussian_job("#p hf/chkbas geom=allcheck", energy=-377.5),
        gaussian_job(
            "#N Geom=AllCheck Guess=TCheck SCRF=Check GenChk RHF/3-21G Freq", energy=-377.5,
            change=("\n SCF", '\n Basis read from chk: "a.chk"  (6D, 7F)\n SCF'),
        ),
    ],
    ids=["again", "frequencies", "without a header", "basis of the checkpoint file", "frequencies with that basis"],
)  # fmt: skip
@pytest.mark.parametrize("route", ["# hf/3-21g", "# opt freq hf 3-21G", "#p RHF/3-21g"])
@pytest.mark.parametrize("basis", ["", "\n Standard basis: 3-21G (6D, 7F)"])
def test_jobs_of_one_molecule_are_all_read(tmp_path, second, route, basis):
    (tmp_path / "a.log").write_text(gaussian_job(route, change=("\n SCF", f"{basis}\n SCF")) + second)
    found = read_structures(tmp_path / "a.log", format="gaussian-out")
    assert [atoms.get_potential_energy() / 27.211386 for atoms in found] == pytest.approx([-377, -377.5], abs=1e-3)
    data = open_dataset(tmp_path / "a.log", format="gaussian-out")
    assert [sample.system.charge.item() for sample in data] == [-2, -2]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (gaussian_job(charge=0), "job 1 is C2O4, charge -2, .*job 2 is C2O4, charge 0"),
        (gaussian_job("# b3lyp/6-31g*", "RB3LYP"), "different methods: job 1 .*hf/3-21g.*job 2 .*b3lyp/6-31g"),
        (gaussian_job("# hf/def2tzvp"), "different methods"),
        (gaussian_job("# hf", change=("\n SCF", "\n Standard basis: def2TZVP (5D, 7F)\n SCF")), "different methods"),
        (gaussian_job("# mp3/3-21g", change=("\n SCF", "\n Standard basis: 3-21G\n SCF")), "different methods"),
        (gaussian_job(change=("\n SCF", "\n R6Disp:  Grimme-D3(BJ) Dispersion\n SCF")), "different methods"),
        (gaussian_job(change=("\n SCF", "\n EUMP2 = -378\n SCF")), "different methods"),
        (gaussian_job(change=("\n SCF", "\n Solvent              : Water,\n SCF")), "different methods"),
        (gaussian_job(change=("      1          6  ", "      1          7  ")), "job 2 is CNO4"),
    ],
    ids=["charge", "method", "basis", "basis in the text", "MP3", "dispersion", "MP2", "solvent", "molecule"],
)
def test_jobs_of_other_molecules_and_methods_are_named(tmp_path, second, words):
    (tmp_path / "a.log").write_text(gaussian_job() + second)
    for read in (read_structures, open_dataset):
        with pytest.raises(BadData, match=r"a\.log: it has 2 jobs .*split it into a file for each job") as caught:
            read(tmp_path / "a.log", format="gaussian-out")
        assert re.search(words, str(caught.value))


def test_jobs_of_orca_are_told_apart(tmp_path):
    head = "$$$$$$$$$$$$$$$$  JOB NUMBER  {} $$$$$$$$$$$$$$\n"
    other = ORCA_LOG.replace("....   -2", "....    0")
    (tmp_path / "a.out").write_text(head.format(1) + ORCA_LOG + head.format(2) + other)
    with pytest.raises(BadData, match=r"it has 2 jobs .*job 1 is C2O4, charge -2, .*job 2 is C2O4, charge 0"):
        read_structures(tmp_path / "a.out", format="orca-output")


NWCHEM_HEAD = (
    "              Northwest Computational Chemistry Package (NWChem) 7.0.2\n\n"
    "                                NWChem Input Module\n                                -------------------\n\n"
)
NWCHEM_GEOMETRY = (
    '\n                             Geometry "geometry" -> "geometry"\n          ----------------\n\n'
    " Output coordinates in angstroms (scale by  1.889725989 to convert to a.u.)\n\n"
    "  No.       Tag          Charge          X              Y              Z\n"
    " ---- ---------------- ---------- -------------- -------------- --------------\n"
    + "".join(
        f"{k + 1:5d} {s}  {6 if s == 'C' else 8:.4f} {x:.8f} {y:.8f} {z:.8f}\n"
        for k, (s, (x, y, z)) in enumerate(zip(SYMBOLS, POSITIONS, strict=True))
    )
    + "\n"
)
NWCHEM_BASIS = (
    ' Summary of "ao basis" -> "ao basis" (cartesian)\n ------------------------------\n'
    "       Tag                 Description            Shells   Functions and Types\n"
    " ---------------- ------------------------------  ------  ---------------------\n"
    " C                           {0}                  3        5   2s1p\n"
    " O                           {0}                  3        5   2s1p\n\n\n"
)


def nwchem_scf(charge=-2, basis="sto-3g", energy=-377.0, more="", closed="    0"):
    """A task with Hartree-Fock, as its output shows it."""
    return (
        "                                 NWChem SCF Module\n                                 -----------------\n\n"
        f'  ao basis        = "ao basis"\n  closed shells   =    23\n  open shells     = {closed}\n'
        f"  charge          =  {charge:.2f}\n  wavefunction    = RHF \n\n{NWCHEM_BASIS.format(basis)}"
        f"       Final RHF  results \n      ------------------ \n\n         Total SCF energy = {energy:.9f}\n{more}\n\n"
    )


def nwchem_dft(charge=-2, basis="sto-3g", energy=-377.0, functional="B3LYP"):
    return (
        "                                 NWChem DFT Module\n                                 -----------------\n\n"
        f"{NWCHEM_BASIS.format(basis)}          Charge           :    {charge}\n          Spin multiplicity:     1\n\n"
        f"              XC Information\n              --------------\n             {functional} Method XC Potential\n"
        "            Hartree-Fock (Exact) Exchange  0.200\n\n             Grid Information\n      ----------------\n\n"
        f"         Total DFT energy =    {energy:.9f}\n\n\n"
    )


NWCHEM_TASK = (
    "                                NWChem Input Module\n                                -------------------\n\n"
)


def nwchem(*tasks):
    return NWCHEM_HEAD + NWCHEM_GEOMETRY + NWCHEM_TASK.join(tasks)


@pytest.mark.parametrize(("task", "spin"), [(nwchem_scf(), 1), (nwchem_scf(closed="    2"), 3), (nwchem_dft(), 1)])
def test_charge_and_multiplicity_of_nwchem(tmp_path, task, spin):
    (tmp_path / "a.nwo").write_text(nwchem(task))
    (atoms,) = read_structures(tmp_path / "a.nwo", format="nwchem-out")
    assert atoms.get_chemical_formula() == "C2O4" and (atoms.info["charge"], atoms.info["spin"]) == (-2, spin)
    assert atoms.get_potential_energy() == pytest.approx(-377 * 27.211386, abs=1e-2)


@pytest.mark.parametrize("geometry", ["", NWCHEM_GEOMETRY])
@pytest.mark.parametrize("task", [nwchem_scf, nwchem_dft])
def test_tasks_of_nwchem_are_all_read(tmp_path, task, geometry):
    """Also a task without a geometry, which has that of the task before."""
    (tmp_path / "a.nwo").write_text(nwchem(task(), geometry + task(energy=-377.5)))
    found = read_structures(tmp_path / "a.nwo", format="nwchem-out")
    assert [atoms.get_potential_energy() / 27.211386 for atoms in found] == pytest.approx([-377, -377.5], abs=1e-3)
    assert all(atoms.info["charge"] == -2 and np.allclose(atoms.positions, POSITIONS) for atoms in found)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (nwchem_dft(), "different methods: job 1 .*, hf/sto-3g; job 2 .*b3lyp method xc potential"),
        (nwchem_scf(basis="6-31g*"), "different methods: job 1 .*hf/sto-3g; job 2 .*hf/6-31g"),
        (nwchem_scf(more="          Total MP2 energy           -378.1"), "different methods: .*hf/sto-3g mp2"),
        (nwchem_scf(more=" CCSD total energy / hartree       =       -378.1"), "different methods: .*hf/sto-3g ccsd"),
        (nwchem_scf(charge=0), "job 1 is C2O4, charge -2, .*job 2 is C2O4, charge 0"),
        (NWCHEM_GEOMETRY.replace("    1 C  6.0000", "    1 N  7.0000") + nwchem_scf(), "job 2 is CNO4"),
    ],
)
def test_tasks_of_nwchem_of_other_molecules_and_methods_are_named(tmp_path, second, words):
    (tmp_path / "a.nwo").write_text(nwchem(nwchem_scf(), second))
    for read in (read_structures, open_dataset):
        with pytest.raises(BadData, match=r"a\.nwo: it has 2 jobs .*split it into a file for each job") as caught:
            read(tmp_path / "a.nwo", format="nwchem-out")
        assert re.search(words, str(caught.value))
    (tmp_path / "a.nwo").write_text(nwchem(nwchem_dft(), nwchem_dft(functional="PBE0")))
    with pytest.raises(BadData, match="different methods"):
        read_structures(tmp_path / "a.nwo", format="nwchem-out")


def test_a_log_without_structures_is_an_error(tmp_path):
    (tmp_path / "a.log").write_text(" Entering Gaussian System\n Error termination\n")
    with pytest.raises(BadData, match=r"a.log: ase.io finds no atoms in it"):
        read_structures(tmp_path / "a.log", format="gaussian-out")
