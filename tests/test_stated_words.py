"""Free text and names of entries that may state a charge, a spin or a cell give warnings; usual ones give none."""

from __future__ import annotations

import re
import warnings

import pytest

from torchmdnet2.core.stated_words import kind_of
from torchmdnet2.data import open_dataset, read_structures
from torchmdnet2.errors import StructureWarning


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("1 1", "begins with '1 1', which is not read"),
        ("-1 2 energy=-3.5", "begins with '-1 2', which is not read"),
        ("-1, 2", "begins with '-1 2', which is not read"),
        ('formal_charge="0 1"', "'formal_charge' is not read, since it has 2 values: write charge"),
        ("coordinates in bohr", "'bohr' in a title or comment line is not read: .* write it as in pos_unit=bohr"),
        ("positions (a.u.)", r"'positions \(a.u.' .* is not read: .* write it as in pos_unit=bohr"),
        ('title="all lengths in nanometers" energy=-3.5', "write it as in pos_unit=nm"),
        ("UHF=0.5", "'UHF' is not read: it is not a number of unpaired electrons"),
        ("oxalate 2-", "2-' .* if it states a total charge"),
        ('name="oxalate(2-)"', r"\(2-\)' .* if it states a total charge"),
        ("a dianion of oxalic acid", "dianion' .* if it states a total charge"),
        ('title="H3O+ and water"', "O\\+' .* if it states a total charge"),
        ("charge_state=-2", "'charge_state' is not read"),
        ("charges=-2", "'charges' is not read"),
        ("chg=-2", "'chg' is not read"),
        ("Qtotal=-2", "'Qtotal' is not read"),
        ("ncharge=-2", "'ncharge' is not read"),
        ("sys_chg=2.0", "'sys_chg' is not read"),
        ('charge_mult="-2 1"', "'charge_mult' is not read: .* write charge=-2 spin=1"),
        ('cm="-2,1"', "'cm' is not read: .* write charge=-2 spin=1"),
        ("charge,mult = -2,1", "'charge,mult' is not read: .* write charge=-2 spin=1"),
        ("-2,1", "begins with '-2 1', which is not read: .* write charge=-2 spin=1"),
        ("nelectrons=12", "'nelectrons' is not read: if 12 is the number of all electrons, write charge=-2"),
        ('name="SO4 2-"', "2-' .* if it states a total charge, write it, as in charge=-2"),
        ("NH4+ Mg", "as in charge=1"),
        ("Mg2+", "as in charge=2"),
        ("ion=OH-", "'ion' is not read"),
        ('smiles="[O-]C(=O)C(=O)[O-]"', "the formal charges of 'smiles' sum to -2, and no total charge is stated"),
        ("C2O4(-2)", r"\(-2\)' .* if it states a total charge, write it, as in charge=-2"),
        ("water(+2)", r"as in charge=2"),
        ("C2O4^-2", r"as in charge=-2"),
        ('name="[C2O4]2-"', "as in charge=-2"),
        ("OH2-", "OH2-' .* if it states a total charge, write it, as in charge=-1"),
        ("H2O_2-", "H2O_2-' .* if it states a total charge, write it, as in charge=-2"),
        ("H2O--", "as in charge=-2"),
        ("H2O-2", "as in charge=-2"),
        ("formula=H2O-2", "as in charge=-2"),
        ('formula="(H2O)-2" name=x', "as in charge=-2"),
        ("z=-2", "'z' is not read: if it is the total charge, write charge=-2"),
        ("S=1", "'S' is not read: if it is the spin S, write spin=3"),
        ("S=0.5", "'S' is not read: if it is the spin S, write spin=2"),
        ("state=triplet", "'triplet' .* if it is the spin state, write spin=3"),
        ("nalpha=7 nbeta=5", "'nalpha' and 'nbeta' are not read: .* write charge=-2 spin=3"),
        ("n_beta_electrons=4 n_alpha_electrons=6", "write charge=0 spin=3"),
        ("T1+", r"'T1\+' .* as in charge=1"),
        ('title="dication"', "as in charge=2"),
        ("total_spin=3", r"'total_spin' is not read: .* call it spin, .* keys: \{spin: total_spin\}"),
        ("ion=-2", r"'ion' is not read: .* call it charge, .* keys: \{charge: ion\}"),
        ("ion=-2", "or give its name, .* in `evaluate` by --charge-key ion"),
        ("electrons=12", "'electrons' is not read: .* write charge=-2"),
        ("net_q=-2", "'net_q' is not read"),
        ("net_charge:-2", "write charge=-2"),
        ("id=3_charge_-2", "'charge_-2' in 'id' .* write charge=-2"),
        ('title="oxalate, charge of 2-"', "write charge=-2"),
        ('title="Charge is −2."', "write charge=-2"),
        ('title="water_charge-2"', "write charge=-2"),
        ('title="nopen 2"', "write spin=3"),
        ("coordinates=fractional", "positions are taken as Cartesian, in Å; convert them"),
        ('note="scaled positions"', "positions are taken as Cartesian, in Å; convert them"),
    ],
)
@pytest.mark.parametrize("column", ["", ":forces:R:3"])
def test_what_a_comment_line_says_in_free_text_is_named(tmp_path, comment, words, column):
    rows = [f"{s} 0 0 {z}" + (" 0 0 0" if column else "") for s, z in (("O", 0), ("H", 1), ("H", 2))]
    properties = f"Properties=species:S:1:pos:R:3{column} " if column and not comment[0].isdigit() else ""
    (tmp_path / "a.xyz").write_text(
        "\n".join(["3", comment if not properties else f"{comment} {properties}", *rows, ""])
    )
    for read_it in (read_structures, lambda path: open_dataset(path, {})):
        with pytest.warns(StructureWarning, match=words):
            read_it(tmp_path / "a.xyz")


@pytest.mark.parametrize(
    "comment",
    ["0 1", "12 300", "frame 5", "E = -76.4 hartree", "energy=-76.4 a.u.", "forces in hartree/bohr", "uhf=T", "1 2 3",
     "frame -1", "6-31+G* and def2-SVP", "6-311++G(d,p)", "RHF+MP2", "step=3 name=mol-2", "charge_state=0", "a-b 2-mer",
     "smiles=C[N+](=O)[O-]", "2024-05-01", "anionically",
     "charge_method=DDEC6", "max_charge=0.43", "charge_transfer=2", "core_charge=6", "n_electrons=8", "cm=4", "0,1",
     "charge_mult=\"0 1\"", "nuclear_charge=8", "charge_density=3", "charge=-1 oxalate(-)",
     "name=O-2", "mol-O-2", "O - 2", "z=2", "z=-0.5", "S=7.3", "triplet-triplet", 'note="singlet-triplet gap"',
     "nalpha=4 nbeta=4", "alpha=90 beta=80",
     'title="nuclear charge: 8"', 'title="discharge 3"', "CH4-1", "id=a[1]-3", 'title="UHF 6-31G(d)"', "spin_density=3",
     'title="2-(dimethylamino)ethanol"', 'name="1-[2-{x}]-y"', "(+)-catechin", 'title="(-)-menthol"',
     "nalpha=5 nbeta=3 charge=0 spin=3", "[1 0]-2", "n=-2", "H2O-frame",
     "converged to 10^-5", 'formula="C12 H10 N2 1+, Cl 1-"', "dianion and dication",
     'name="alpha-(1->4)-glucan"', 'title="UHF: -154"', 'title="charge 500 times"'],
)  # fmt: skip
def test_usual_comment_lines_are_no_reason_to_warn(tmp_path, comment):
    (tmp_path / "a.xyz").write_text(f"1\n{comment}\nO 0 0 0\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructureWarning)
        (atoms,) = read_structures(tmp_path / "a.xyz")
    assert ("charge" in atoms.info) == bool(re.search(r"(?<!\w)charge=", comment))
    assert ("spin" in atoms.info) == ("spin=" in comment)


@pytest.mark.parametrize(
    ("comment", "named"),
    [
        ("cell: 8.0 8.0 8.0 90 90 90", True), ("unitcell {8 8 8}", True), ("a=8.0 b=8.0 c=9.0 alpha=90", True),
        ("box 10.0, 10.0, 10.0", True), ("supercell 2 2 2", False), ("cell 5", False), ("a=8.0 b=7", False),
        ('Lattice="8 0 0 0 8 0 0 0 8" note="cell: 8 8 8"', False),
    ],
)  # fmt: skip
def test_a_cell_in_free_text_is_named(tmp_path, comment, named):
    (tmp_path / "a.xyz").write_text(f"1\n{comment}\nO 0.0 0.0 0.0\n")
    for read_it in (read_structures, lambda path: open_dataset(path, {})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read_it(tmp_path / "a.xyz")
        told = [str(one.message) for one in caught]
        assert len(told) == named and all("if it is a cell, write it as Lattice=" in words for words in told)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("charge", "charge"), ("Total Charge", "charge"), ("net-charge", "charge"), ("charges", "like"),
        ("spin", "spin"), ("nuclear_charges", ""), ("formal_charges", ""),
        ("Multiplicity", "spin"), ("uhf", "unpaired"), ("my_charge", "like"), ("spin_state", "like"), ("q", "like"),
        ("supercharged", ""), ("energy", ""), ("energy-unit", "unit:energy"), ("forces_units", "unit:forces"),
        ("units", "unit"), ("lattice unit", "unit:cell"), ("unit_cell", ""), ("units_of_length", "unit:length"),
        ("community", ""), ("comment", ""), ("Total Charge (e)", "charge"), ("charge_state", "like"), ("ion", "like"),
        ("charge_total_note", ""), ("charge_density", ""), ("2S+1", "spin"), ("nopen", "unpaired"),
        ("spin_density", ""), ("e_unit", "unit:energy"), ("r_unit", "unit:length"),
    ],
)  # fmt: skip
def test_what_names_mean(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ('{"charge": -2, "spin": 1}', "write charge=-2"),
        ("$chrg -2", "write charge=-2"),
        ("|chrg=-2|uhf=0|", "write charge=-2"),
        ("oxalate (charge -2)", "write charge=-2"),
        ('title="net charge: -2"', "write charge=-2"),
        ("q: -2", "write charge=-2"),
        ('title="multiplicity 3"', "write spin=3"),
        ('title="charge 0 multiplicity 1"', None),
        ('charge=-2 title="total charge -2"', None),
        ('title="charges by CM5, 3 decimals" freq=3', None),
    ],
)
@pytest.mark.parametrize("way", ["structures", "data"])
def test_free_text_that_states_a_charge_is_named(tmp_path, comment, words, way):
    (tmp_path / "a.xyz").write_text(f"1\n{comment}\nO 0.0 0.0 0.0\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_dataset(tmp_path / "a.xyz", {}) if way == "data" else read_structures(tmp_path / "a.xyz")
    found = [str(one.message) for one in caught]
    assert len(found) == bool(words) and (words is None or words in found[0])
