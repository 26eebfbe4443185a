"""Conformers by distance geometry, and the choice among relaxed ones, by RDKit (the extra `smiles`)."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.stated import charge_and_spin
from ..errors import BadConfig, BadData, needs_extra
from .records import FAULTS, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Preparation", "Ranking", "embed", "require_rdkit"]

_MATCHES = 1000  # largest number of symmetric superpositions that are tried


def require_rdkit() -> None:
    """Raise MissingBackend if RDKit is not installed."""
    with needs_extra("smiles"):
        import rdkit  # noqa: F401


@dataclass(frozen=True)
class Preparation:
    """Parses records and makes conformers.

    Attributes:
        conformers: number for each molecule; None makes one for a SMILES and keeps the structures of other records.
        seed: seed of the distance geometry.
    """

    conformers: int | None = None
    seed: int = 0

    def __call__(self, block: Iterable[Record]) -> list[Record]:
        records = list(block)
        for record in records:
            if not record.ready:
                if record.parse is not None and record.molfile and self.conformers is not None:
                    record.parse = partial(record.parse, drawn=True)  # new coordinates are made, and hydrogens added
                record.parsed()
                if (record.smiles or self.conformers is not None) and not record.error:
                    try:
                        embed(record, self.conformers or 1, self.seed)
                    except FAULTS as error:
                        record.starts, record.error = [], str(error)
                record.ready = True
        return records


def embed(record: Record, count: int, seed: int) -> None:
    """Replace the structure of a record by conformers from distance geometry (ETKDG version 3).

    The record gets a molfile with all hydrogens. Each conformer has the total charge in `info["charge"]` and the
    multiplicity of unpaired electrons in `info["spin"]`.

    Args:
        record: a record with a SMILES or a molfile.
        count: number of conformers; RDKit may find fewer.
        seed: seed of the distance geometry, 0 or more.

    Raises:
        BadData: RDKit reads no molecule, reads several, or finds no conformer.

    Source: S. Riniker, G. Landrum, J. Chem. Inf. Model. 55, 2562 (2015).
    """
    from ase import Atoms
    from rdkit import Chem, rdBase
    from rdkit.Chem import AllChem, Descriptors

    chem: Any = Chem
    with rdBase.BlockLogs():  # our messages replace RDKit's
        if record.smiles:
            molecule = chem.MolFromSmiles(record.smiles)
        else:
            molecule = chem.MolFromMolBlock(record.molfile, removeHs=False)
        if molecule is None or not molecule.GetNumAtoms():
            raise BadData(f"'{record.smiles}' is not a SMILES that RDKit can read" if record.smiles else
                          "RDKit cannot read its bonds")  # fmt: skip
        if len(chem.GetMolFrags(molecule)) > 1:
            raise BadData("it has several molecules, but conformers need a single one: leave out ions and solvents")
        charge, radicals = chem.GetFormalCharge(molecule), Descriptors.NumRadicalElectrons(molecule)
        molecule = chem.AddHs(molecule)
        options = AllChem.ETKDGv3()
        # RDKit multiplies the seed by the number of the conformer: with 0 all conformers would be equal
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
    if record.starts:  # further statements of the file, which must agree
        stated = record.starts[0].copy()
        charge_and_spin(stated, charge)
        info = {**stated.info, **info}
    numbers = [atom.GetAtomicNum() for atom in molecule.GetAtoms()]
    record.starts = [Atoms(numbers, molecule.GetConformer(k).GetPositions(), info=dict(info)) for k in found]


@dataclass(frozen=True)
class Ranking:
    """Selects and sorts the conformers of a molecule by energy, without duplicates.

    Attributes:
        window: largest energy above the lowest conformer, eV.
        rmsd: Å. Conformers count as equal if the RMSD of their heavy atoms, after the best superposition with symmetry,
            is smaller, and their energies differ by less than `energy`.
        energy: eV, see `rmsd`.
        most: largest number of conformers; None keeps all.

    Raises:
        BadConfig: a number is out of range.
    """

    window: float = 0.26
    rmsd: float = 0.25
    energy: float = 0.005
    most: int | None = None

    def __post_init__(self) -> None:
        given = self.window, self.rmsd, 1 if self.most is None else self.most
        if not (all(isinstance(n, Real) and 0 <= n < math.inf for n in given) and given[2] >= 1):
            raise BadConfig(
                "window and rmsd of conformers must be 0 or more, and the number to keep at least 1; got "
                f"{self.window!r}, {self.rmsd!r} and {self.most!r}"
            )

    def __call__(self, structures: list[Atoms], molfile: str) -> list[Atoms]:
        """Return the conformers to keep, each with `conformer` (0 is the lowest) and `relative_energy` in its info.

        Structures that have not converged, or whose bonds changed, come last, since their energies are not comparable.
        """
        from rdkit import Chem
        from rdkit.Chem import rdMolAlign, rdMolTransforms
        from rdkit.Geometry import Point3D

        def place(atoms: Atoms) -> tuple[bool, float]:
            return bool(atoms.info["bonds_changed"]) or not atoms.info["converged"], atoms.info["energy"]

        chem: Any = Chem
        kept: list[Atoms] = []
        molecules: list[Any] = []
        template = chem.MolFromMolBlock(molfile, removeHs=False, sanitize=False)
        chem.SanitizeMol(template, catchErrors=True)  # aromatic bonds: a ring that is turned over is the same
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
            # a conformer and its mirror image have the same energy; of a chiral molecule no conformer is one
            mirrored = chem.Mol(molecule)
            rdMolTransforms.TransformConformer(mirrored.GetConformer(), np.diag([-1.0, 1.0, 1.0, 1.0]))
            if any(
                rdMolAlign.GetBestRMS(chem.Mol(one), other, maxMatches=_MATCHES) < self.rmsd
                for other in near
                for one in (molecule, mirrored)
            ):
                continue
            atoms.info |= {"conformer": len(kept), "relative_energy": above}
            kept.append(atoms)
            molecules.append(molecule)
        return kept
