"""Molecules from SMILES."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from torchmdnet2.data.structures import from_smiles
from torchmdnet2.errors import BadData, MissingBackend

pytest.importorskip("rdkit", reason="SMILES need RDKit")


def test_a_molecule():
    atoms = from_smiles("CCO", seed=3)
    assert atoms.get_chemical_formula() == "C2H6O" and atoms.info == {"smiles": "CCO", "charge": 0}
    distances = atoms.get_all_distances()[np.triu_indices(9, 1)]
    assert 0.9 < distances.min() < 1.15 and abs(atoms.get_distance(0, 1) - 1.52) < 0.03
    assert np.array_equal(atoms.positions, from_smiles("CCO", seed=3).positions)


def test_charges_and_radicals():
    assert from_smiles("C[NH3+]").info["charge"] == 1 and from_smiles("[O-]C(=O)C").info["charge"] == -1
    assert from_smiles("[CH3]").info["spin"] == 2 and "spin" not in from_smiles("C").info


@pytest.mark.parametrize("smiles", ["C(", "", "CCO.O", "not a molecule"])
def test_what_is_no_molecule(smiles):
    with pytest.raises(BadData, match="SMILES"):
        from_smiles(smiles)


def test_without_a_conformer_or_rdkit(monkeypatch):
    from rdkit.Chem import AllChem

    with pytest.raises(BadData, match=r"'C\(' is not a SMILES that RDKit can read"):
        from_smiles("C(")
    monkeypatch.setattr(AllChem, "EmbedMolecule", lambda *_: -1)
    with pytest.raises(BadData, match="'CCO': RDKit finds no conformer; give a structure file instead"):
        from_smiles("CCO")
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingBackend, match=r"pip install 'torchmdnet2\[smiles\]'"):
        from_smiles("CCO")
