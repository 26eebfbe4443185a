"""SMILES of small random molecules of one to three elements: chains, branches and rings of N, O, P, S, Si and others.

    python scripts/organic/heteroatoms.py heteroatoms.smi --number 4000

Screening collections have few such molecules: hydrazines, polysulfides, silanes, phosphanes and their acids. Molecules
of the formulas in ICONF, a test of GMTKN55, are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rdkit import Chem, rdBase
from rdkit.Chem.rdMolDescriptors import CalcMolFormula

from torchmdnet2.core.files import atomic_write

VALENCES = {"N": 3, "O": 2, "P": 3, "S": 2, "Si": 4, "C": 4, "B": 3, "Se": 2, "As": 3, "F": 1, "Cl": 1, "Br": 1, "I": 1}
FREQUENCIES = (4, 4, 4, 4, 4, 4, 1, 1, 1, 1, 1, 0.5, 0.5)
OXO = {"P": (0, 1), "S": (0, 1, 2), "As": (0, 1), "Se": (0, 1)}
"""Number of doubly bonded oxygen atoms that an atom without a free valence may get."""
TESTED = {"H5N3", "H6N4", "H6N3P3", "H12N3P3", "H12Si5", "H12Si6", "H14Si6", "H7P7", "O4S4", "S8", "H2O7S2", "H4O7P2"}
"""Formulas of ICONF (S. Grimme and others, see L. Goerigk and others, Phys. Chem. Chem. Phys. 19, 32184 (2017))."""
UNSTABLE = Chem.MolFromSmarts("[$(O~O~O),$([N,O]~[F,Cl,Br,I]),$([F,Cl,Br,I]~[F,Cl,Br,I]),$([#7]~[#7]~[#7]~[#7]~[#7])]")
RINGS = (3, 4, 5, 6, 7, 8)


def random_molecule(rng: np.random.Generator, largest: int) -> Chem.Mol:
    """A tree of 2 to `largest` atoms of one to three elements, half of the time with a ring or with oxo atoms.

    Raises:
        Chem.MolSanitizeException: it has impossible valences.
    """
    molecule, free = Chem.RWMol(), list[int]()

    def add(symbol: str, neighbor: int | None, order: int = 1) -> None:
        index = molecule.AddAtom(Chem.Atom(symbol))
        free.append(VALENCES[symbol] - order * (neighbor is not None))
        if neighbor is not None:
            molecule.AddBond(neighbor, index, Chem.BondType.DOUBLE if order == 2 else Chem.BondType.SINGLE)
            free[neighbor] -= order

    weights = np.array(FREQUENCIES) / sum(FREQUENCIES)
    symbols = rng.choice(list(VALENCES), int(rng.integers(1, 4)), replace=False, p=weights).tolist()
    add(max(symbols, key=VALENCES.__getitem__), None)
    for _ in range(int(rng.integers(1, largest))):
        open_ones = [k for k, valences in enumerate(free) if valences > 0]
        if not open_ones:
            break
        add(symbols[rng.integers(len(symbols))], open_ones[rng.integers(len(open_ones))])
    apart = Chem.GetDistanceMatrix(molecule)
    pairs = [(i, j) for j in range(len(free)) for i in range(j) if free[i] and free[j] and apart[i, j] + 1 in RINGS]
    if pairs and rng.random() < 0.5:
        i, j = pairs[rng.integers(len(pairs))]
        molecule.AddBond(i, j, Chem.BondType.SINGLE)
        free[i], free[j] = free[i] - 1, free[j] - 1
    for k in range(len(free) if rng.random() < 0.5 else 0):
        symbol = molecule.GetAtomWithIdx(k).GetSymbol()
        for _ in range(rng.choice(OXO.get(symbol, (0,)))):
            oxygen = molecule.AddAtom(Chem.Atom("O"))
            molecule.AddBond(k, oxygen, Chem.BondType.DOUBLE)
            if symbol in ("P", "As"):
                molecule.GetAtomWithIdx(k).SetNoImplicit(True)
                molecule.GetAtomWithIdx(k).SetNumExplicitHs(free[k])
    Chem.SanitizeMol(molecule)
    return molecule.GetMol()


def heteroatoms(number: int, largest: int, seed: int) -> list[str]:
    """SMILES of `number` different molecules."""
    rng, found = np.random.default_rng(seed), dict[str, None]()
    with rdBase.BlockLogs():
        while len(found) < number:
            try:
                molecule = random_molecule(rng, largest)
            except Chem.MolSanitizeException:
                continue
            if CalcMolFormula(molecule) not in TESTED and not molecule.HasSubstructMatch(UNSTABLE):
                found.setdefault(Chem.MolToSmiles(molecule))
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="text file, a SMILES on each line")
    parser.add_argument("--number", type=int, default=4000, help="molecules")
    parser.add_argument(
        "--largest", type=int, default=8, help="most atoms of a molecule, without hydrogens and oxo atoms"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    atomic_write(options.output, "\n".join(heteroatoms(options.number, options.largest, options.seed)) + "\n")


if __name__ == "__main__":
    main()
