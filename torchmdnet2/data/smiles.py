"""A molecule from its SMILES, by RDKit (the extra `smiles`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import BadData, MissingBackend

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["from_smiles"]


def from_smiles(smiles: str, seed: int = 0) -> Atoms:
    """A conformer with hydrogens, by distance geometry (ETKDG version 3), relaxed with the force field MMFF94.

    The formal charge is in `info["charge"]`, the multiplicity 2S+1 of unpaired electrons in `info["spin"]`. Molecules
    with elements that MMFF94 does not know are left as distance geometry places them.

    Args:
        smiles: one molecule.
        seed: of the distance geometry: equal seeds give equal conformers.

    Raises:
        MissingBackend: RDKit is not installed.
        BadData: not a SMILES, several molecules, or no conformer is found.

    Source: S. Riniker, G. Landrum, J. Chem. Inf. Model. 55, 2562 (2015); T. Halgren, J. Comput. Chem. 17, 490 (1996).
    """
    try:
        from rdkit import Chem, rdBase
        from rdkit.Chem import AllChem, Descriptors
    except ImportError as error:
        raise MissingBackend("SMILES need RDKit: pip install 'torchmdnet2[smiles]'") from error
    from ase import Atoms

    chem: Any = Chem
    with rdBase.BlockLogs():  # its messages are in ours
        molecule = chem.MolFromSmiles(smiles)
        if molecule is None:
            raise BadData(f"'{smiles}' is not a SMILES that RDKit can read")
        if not molecule.GetNumAtoms() or len(chem.GetMolFrags(molecule)) > 1:
            raise BadData(f"'{smiles}': a SMILES of one molecule is needed, without '.'; give a structure file instead")
        charge, radicals = chem.GetFormalCharge(molecule), Descriptors.NumRadicalElectrons(molecule)
        molecule = chem.AddHs(molecule)
        options = AllChem.ETKDGv3()
        options.randomSeed = seed
        if AllChem.EmbedMolecule(molecule, options) < 0:
            options.useRandomCoords = True  # for large rings and cages
            if AllChem.EmbedMolecule(molecule, options) < 0:
                raise BadData(f"'{smiles}': RDKit finds no conformer; give a structure file instead")
        if AllChem.MMFFHasAllMoleculeParams(molecule):
            AllChem.MMFFOptimizeMolecule(molecule, maxIters=2000)
    atoms = Atoms(
        [atom.GetAtomicNum() for atom in molecule.GetAtoms()], molecule.GetConformer().GetPositions(),
        info={"smiles": smiles, "charge": charge},
    )  # fmt: skip
    if radicals:
        atoms.info["spin"] = radicals + 1
    return atoms
