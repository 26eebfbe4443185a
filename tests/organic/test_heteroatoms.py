"""scripts/organic/heteroatoms.py: random molecules, none of a test set, where there is RDKit."""

from __future__ import annotations

import sys

import pytest


def test_random_molecules(scripts, tmp_path, monkeypatch):
    """Different ones of the known elements, closed shells all of them, the same ones from the same seed."""
    Chem = pytest.importorskip("rdkit.Chem", reason="molecules need RDKit")
    heteroatoms, elements = scripts("heteroatoms"), set(scripts("shards").ELEMENTS)
    monkeypatch.setattr(heteroatoms, "TESTED", {"H4N2"})
    found = heteroatoms.heteroatoms(300, 6, seed=3)
    assert len(set(found)) == 300 and "NN" not in found
    for smiles in found:
        molecule = Chem.MolFromSmiles(smiles)
        numbers = [atom.GetAtomicNum() for atom in molecule.GetAtoms()]
        assert set(numbers) <= elements and len(Chem.GetMolFrags(molecule)) == 1
        assert sum(atom.GetNumRadicalElectrons() for atom in molecule.GetAtoms()) == 0
        assert Chem.GetFormalCharge(molecule) == 0 and not molecule.HasSubstructMatch(heteroatoms.UNSTABLE)
    monkeypatch.setattr(
        sys, "argv", ["heteroatoms", str(tmp_path / "h.smi"), "--number", "300", "--largest", "6", "--seed", "3"]
    )
    heteroatoms.main()
    assert (tmp_path / "h.smi").read_text().split() == found


def test_tested_molecules_are_left_out(scripts):
    pytest.importorskip("rdkit", reason="molecules need RDKit")
    heteroatoms = scripts("heteroatoms")
    from rdkit.Chem import MolFromSmiles
    from rdkit.Chem.rdMolDescriptors import CalcMolFormula

    for smiles in ("NNN", "NNNN", "S1SSSSSSS1", "[SiH3][SiH2][SiH2][SiH2][SiH3]", "OS(=O)(=O)OS(=O)(=O)O"):
        assert CalcMolFormula(MolFromSmiles(smiles)) in heteroatoms.TESTED
