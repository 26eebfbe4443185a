"""Drug-like molecules whose scaffolds are not in the training, as starts of dynamics: one extxyz file for `stability`.

    python scripts/organic/drug_like.py work60/molecules.jsonl.gz drugs.xyz
    torchmdnet2 stability organic drugs.xyz --replicas 200 --temperatures 300 --time 100

The molecules are those of one subset with at least one ring, of H, C, N, O, F, P, S, Cl, Br and I, that break none of
Lipinski's four rules (C. Lipinski and others, Adv. Drug Deliv. Rev. 23, 3 (1997)), in the order of a hash of their
SMILES. They have a few sizes only: `stability` runs replicas of equally many atoms in one batch. Geometries are
conformers relaxed with a force field, as in `geometries.py`; those with atoms that overlap are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import write
from geometries import embedded
from rdkit import Chem, rdBase
from rdkit.Chem import Crippen, Descriptors, Lipinski
from shards import SUBSETS, seed_of

ELEMENTS = {1, 6, 7, 8, 9, 15, 16, 17, 35, 53}


def is_drug_like(molecule: Chem.Mol) -> bool:
    """Lipinski's four rules, a ring, and common elements."""
    return (
        {atom.GetAtomicNum() for atom in molecule.GetAtoms()} <= ELEMENTS
        and molecule.GetRingInfo().NumRings() > 0
        and Descriptors.MolWt(molecule) <= 500
        and Crippen.MolLogP(molecule) <= 5
        and Lipinski.NumHDonors(molecule) <= 5
        and Lipinski.NumHAcceptors(molecule) <= 10
    )


def starts(rows: list[dict], atoms: int, charged: bool) -> Iterator[Atoms]:
    """A conformer of each molecule of a size."""
    for row in rows:
        molecule = Chem.MolFromSmiles(row["smiles"])
        if bool(row["charge"]) != charged or Chem.AddHs(molecule).GetNumAtoms() != atoms or not is_drug_like(molecule):
            continue
        _, found = embedded(row["smiles"], 1, seed_of("drug-like", row["smiles"]))
        for geometry in found:
            start = Atoms(
                geometry.numbers, geometry.positions, info={"charge": geometry.charge, "smiles": row["smiles"]}
            )
            if (start.get_all_distances() + 9 * np.eye(atoms)).min() > 0.8:
                yield start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("molecules", type=Path, help="file of molecules.py, with --atoms 60 for molecules of this size")
    parser.add_argument("output", type=Path, help="extxyz file")
    parser.add_argument("--subset", choices=SUBSETS, default="test")
    parser.add_argument("--sizes", default="22,29,34,39,44,48,52,57", help="numbers of atoms (default: %(default)s)")
    parser.add_argument("--number", type=int, default=200, help="molecules, of all sizes together")
    parser.add_argument("--charged", type=int, default=40, help="of them")
    options = parser.parse_args()
    with gzip.open(options.molecules, "rt") as file:
        rows = [row for row in map(json.loads, file) if row["subset"] == options.subset]
    rows.sort(key=lambda row: seed_of("drug-like order", row["smiles"]))
    sizes, found = [int(size) for size in options.sizes.split(",")], []
    with rdBase.BlockLogs():
        for charged, number in ((True, options.charged), (False, options.number - options.charged)):
            # one of each size in turn, until a size has no more
            turns = zip_longest(*(starts(rows, size, charged) for size in sizes))
            found += list(islice((start for turn in turns for start in turn if start is not None), number))
    found.sort(key=len)
    print(", ".join(f"{number} of {size} atoms" for size, number in Counter(map(len, found)).items()))
    write(options.output, found, format="extxyz")
    charged = sum(start.info["charge"] != 0 for start in found)
    print(f"{options.output}: {len(found)} molecules, {charged} of them charged")


if __name__ == "__main__":
    main()
