"""Conformers by distance geometry, and which of the relaxed ones are kept. By RDKit (the extra `smiles`)."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.stated import charge_and_spin
from ..errors import BadConfig, BadData, needs_extra
from .records import FAULTS, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Preparation", "Ranking", "embed", "require_rdkit"]

_MATCHES = 1000  # ways to lay a molecule on itself that are tried


def require_rdkit() -> None:
    """Raise MissingBackend where RDKit is not installed."""
    with needs_extra("smiles"):
        import rdkit  # noqa: F401


@dataclass(frozen=True)
class Preparation:
    """Parses records, and makes conformers of SMILES and where they are asked for.

    Attributes:
        conformers: of each molecule; None: one of a SMILES, and the structures of other records unchanged.
        seed: of the distance geometry.
    """

    conformers: int | None = None
    seed: int = 0

    def __call__(self, records: list[Record]) -> list[Record]:
        for record in records:
            if not record.ready:
                record.parsed()
                if (record.smiles or self.conformers is not None) and not record.error:
                    try:
                        embed(record, self.conformers or 1, self.seed)
                    except FAULTS as error:
                        record.starts, record.error = [], str(error)
                record.ready = True
        return records


def embed(record: Record, count: int, seed: int) -> None:
    """Give a record conformers by distance geometry (ETKDG version 3), instead of its structure if it has one.

    The record gets a molfile with all hydrogens. The total charge is in `info["charge"]` of each conformer, the
    multiplicity of unpaired electrons in `info["spin"]`.

    Args:
        record: with a SMILES or a molfile.
        count: of conformers; RDKit may find fewer.
        seed: of the distance geometry, 0 or more.

    Raises:
        BadData: no molecule, several, or no conformer is found.

    Source: S. Riniker, G. Landrum, J. Chem. Inf. Model. 55, 2562 (2015).
    """
    from ase import Atoms
    from rdkit import Chem, rdBase
    from rdkit.Chem import AllChem, Descriptors

    chem: Any = Chem
    with rdBase.BlockLogs():  # its messages are in ours
        if record.smiles:
            molecule = chem.MolFromSmiles(record.smiles)
        else:
            molecule = chem.MolFromMolBlock(record.molfile, removeHs=False)
        if molecule is None or not molecule.GetNumAtoms():
            raise BadData(f"'{record.smiles}' is not a SMILES that RDKit can read" if record.smiles else
                          "RDKit cannot read its bonds")  # fmt: skip
        if len(chem.GetMolFrags(molecule)) > 1:
            raise BadData("it is several molecules, and conformers are made of one")
        charge, radicals = chem.GetFormalCharge(molecule), Descriptors.NumRadicalElectrons(molecule)
        molecule = chem.AddHs(molecule)
        options = AllChem.ETKDGv3()
        # RDKit multiplies the seed by the number of the conformer: with 0, all would be the same
        options.randomSeed, options.numThreads = seed + 1, 0 if multiprocessing.parent_process() is None else 1
        found = list(AllChem.EmbedMultipleConfs(molecule, count, options))
        if not found:
            options.useRandomCoords = True  # for large rings and cages
            found = list(AllChem.EmbedMultipleConfs(molecule, count, options))
        if not found:
            raise BadData("RDKit finds no conformer; give a file with its structure")
        molecule.SetProp("_Name", record.name)
        record.molfile = chem.MolToMolBlock(molecule, confId=found[0])
    info = {"charge": charge, **({"spin": radicals + 1} if radicals else {})}
    info |= {"smiles": record.smiles} if record.smiles else {}
    if record.starts:  # what else the file states, and it must agree
        stated = record.starts[0].copy()
        charge_and_spin(stated, charge)
        info = {**stated.info, **info}
    numbers = [atom.GetAtomicNum() for atom in molecule.GetAtoms()]
    record.starts = [Atoms(numbers, molecule.GetConformer(k).GetPositions(), info=dict(info)) for k in found]


@dataclass(frozen=True)
class Ranking:
    """Which conformers of a molecule are kept, and in which order: by energy, without duplicates.

    Attributes:
        window: eV above the lowest.
        rmsd: Å, of the atoms that are not hydrogen, after the best superposition, symmetry included: closer ones, of
            energies that differ by less than `energy`, are the same conformer.
        energy: eV.
        most: how many are kept at most; None: all.

    Raises:
        BadConfig: a number is out of range.
    """

    window: float = 0.26
    rmsd: float = 0.25
    energy: float = 0.005
    most: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.window < math.inf and 0 <= self.rmsd < math.inf) or (self.most is not None and self.most < 1):
            raise BadConfig(
                "of conformers, window and rmsd must be numbers, 0 or more, and those to keep at least 1; got "
                f"{self.window}, {self.rmsd} and {self.most}"
            )

    def __call__(self, structures: list[Atoms], molfile: str) -> list[Atoms]:
        """The ones to keep, each with `conformer` (0 is the lowest) and `relative_energy` in its info.

        Structures that have not converged, or whose bonds changed, come last: their energies do not compare.
        """
        from rdkit import Chem
        from rdkit.Chem import rdMolAlign
        from rdkit.Geometry import Point3D

        def place(atoms: Atoms) -> tuple[bool, float]:
            return bool(atoms.info["bonds_changed"]) or not atoms.info["converged"], atoms.info["energy"]

        chem: Any = Chem
        kept: list[Atoms] = []
        molecules: list[Any] = []
        template = chem.MolFromMolBlock(molfile, removeHs=False, sanitize=False)
        for atoms in sorted(structures, key=place):
            above = atoms.info["energy"] - kept[0].info["energy"] if kept else 0.0
            if above > self.window or len(kept) == self.most:
                continue
            molecule = chem.Mol(template)
            for k, (x, y, z) in enumerate(atoms.positions.tolist()):
                molecule.GetConformer().SetAtomPosition(k, Point3D(x, y, z))
            molecule = chem.RemoveHs(molecule, sanitize=False)
            near = (
                other
                for one, other in zip(kept, molecules, strict=True)
                if abs(one.info["energy"] - atoms.info["energy"]) < self.energy
            )
            if any(rdMolAlign.GetBestRMS(chem.Mol(molecule), o, maxMatches=_MATCHES) < self.rmsd for o in near):
                continue
            atoms.info |= {"conformer": len(kept), "relative_energy": above}
            kept.append(atoms)
            molecules.append(molecule)
        return kept
