"""Units against ASE's CODATA 2018 constants and against each other."""

from __future__ import annotations

import ase.units
import pytest

from torchmdnet2 import units
from torchmdnet2.units import factor

ASE = ase.units.create_units("2018")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (units.HARTREE, ASE["Hartree"]),
        (units.BOHR, ASE["Bohr"]),
        (units.KB, ASE["kB"]),
        (units.KJ_MOL, ASE["kJ"] / ASE["mol"]),
        (units.KCAL_MOL, ASE["kcal"] / ASE["mol"]),
        (units.COULOMB, ASE["Hartree"] * ASE["Bohr"]),
        (units.AMU_A2_FS2, ASE["fs"] ** -2),
        (factor("dipole", "debye"), ASE["Debye"]),
        (factor("stress", "GPa"), ASE["GPa"]),
        (factor("energy", "rydberg"), ASE["Ry"]),
        (factor("stress", "kbar"), ASE["GPa"] / 10),
    ],
)
def test_codata(ours, theirs):
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_compound_units():
    assert factor("force", "hartree/bohr") == units.HARTREE / units.BOHR
    assert factor("force", "kcal/mol/angstrom") == units.KCAL_MOL
    assert factor("force", "kJ/mol/nm") == pytest.approx(units.KJ_MOL / 10)
    assert factor("stress", "eV/angstrom^3") == factor("stress", "eV/Å³") == 1.0
    assert factor("stress", "hartree/bohr**3") == pytest.approx(units.HARTREE / units.BOHR**3)


def test_names_in_any_case():
    for name in ("eV", "ev", "EV", "electronvolt"):
        assert factor("energy", name) == 1.0
    assert factor("energy", "Hartree") == factor("energy", "Ha") == factor("energy", "Eh") == units.HARTREE
    for name in ("kcal_mol", "kcalmol", "kcal mol-1", "kcal mol^-1", "kcal/mole", "KCAL/MOL", "kcal per mol", "kcal"):
        assert factor("energy", name) == units.KCAL_MOL
    assert factor("energy", "E_h") == units.HARTREE and factor("energy", "kj_per_mol") == units.KJ_MOL
    assert factor("length", "Angstrom") == factor("length", "Å") == 1.0


def test_milli_is_not_mega():
    assert factor("energy", "meV") == 1e-3
    with pytest.raises(ValueError, match="unknown energy unit 'MeV'"):
        factor("energy", "MeV")


@pytest.mark.parametrize(
    ("kind", "unit", "words"),
    [
        ("energy", "hartrees", "unknown energy unit 'hartrees', known: eV"),
        ("length", "eV", "unknown length unit"),
        ("force", "eV", "ENERGY/LENGTH"),
        ("force", "bohr/eV", "unknown energy unit 'bohr'"),
        ("stress", "eV/angstrom", "unknown stress unit"),
        ("colour", "red", "unknown kind of unit 'colour'"),
        ("energy", "", "unknown energy unit"),
    ],
)
def test_unknown_units(kind, unit, words):
    with pytest.raises(ValueError, match=words):
        factor(kind, unit)
