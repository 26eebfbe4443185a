"""Stage 1: molecules with protonation states, in subsets that share no scaffold.

    python scripts/organic/molecules.py smiles.txt.gz more.smi --output work/molecules.jsonl.gz --number 20000

Reads SMILES, one at the start of each line. Fragments of salts count as molecules of their own. Isotopes are removed;
radicals, other elements and molecules that are too large are left out, and counted. Molecules with rare elements are
taken first, the others in an order that their hash decides. A molecule's subset is decided by the hash of its
Bemis-Murcko scaffold, or of its formula and number of bonds where it has no ring; protonation states are in the subset
of their parent.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rdkit import Chem, rdBase
from rdkit.Chem import Descriptors
from rdkit.Chem.Scaffolds import MurckoScaffold
from shards import ELEMENTS, keep_settings, seed_of

from torchmdnet2.files import atomic_write

# group -> (atom that changes, change of charge), at a pH where it is charged; first atom of the pattern
PROTONATION = (
    (Chem.MolFromSmarts("[OX2H1;$(OC=O),$(OS(=O)=O),$(OP=O)]"), -1),  # carboxylic, sulfonic and phosphorous acids
    (Chem.MolFromSmarts("[SX2H1;$(Sc)]"), -1),  # thiophenols
    (Chem.MolFromSmarts("[NX3;!$(N~[!#6;!#1]);!$(NC=[O,S,N]);!$(Nc);!$(NC#N);!$(N[C,c]=[C,c])]"), +1),  # amines
    (Chem.MolFromSmarts("[NX2;$(N=C(N)N),$(N=CN)]"), +1),  # guanidines, amidines
    (Chem.MolFromSmarts("[nX2;r5;$(n1cncc1),$(n1ccnc1)]"), +1),  # imidazoles
    (Chem.MolFromSmarts("[nX2;r6]"), +1),  # pyridines
)
RARE = {5, 14, 15, 33, 34, 53}


def protonated(molecule: Chem.Mol, largest_charge: int) -> Iterator[Chem.Mol]:
    """Forms with one group, or one acid and one base, charged."""
    forms = []
    for pattern, change in PROTONATION:
        for (atom,) in molecule.GetSubstructMatches(pattern)[:2]:
            if molecule.GetAtomWithIdx(atom).GetFormalCharge() == 0:
                forms.append(((atom, change),))
    acids, bases = ([f[0] for f in forms if f[0][1] == sign] for sign in (-1, 1))
    if acids and bases:
        forms.append((acids[0], bases[0]))
    for form in forms:
        changed = Chem.RWMol(molecule)
        for index, change in form:
            atom = changed.GetAtomWithIdx(index)
            atom.SetFormalCharge(change)
            atom.SetNumExplicitHs(max(0, atom.GetTotalNumHs() + change))
            atom.SetNoImplicit(True)
        try:
            Chem.SanitizeMol(changed)
        except Chem.MolSanitizeException:
            continue
        if abs(Chem.GetFormalCharge(changed)) <= largest_charge:
            yield changed.GetMol()


def reason_against(molecule: Chem.Mol, options: argparse.Namespace) -> str:
    """Why a molecule is left out, "" where it is taken."""
    numbers = {atom.GetAtomicNum() for atom in molecule.GetAtoms()}
    if not numbers <= set(ELEMENTS):
        return "other elements"
    if Descriptors.NumRadicalElectrons(molecule):
        return "radicals"
    if abs(Chem.GetFormalCharge(molecule)) > options.largest_charge:
        return "too charged"
    if molecule.GetNumAtoms(onlyExplicit=False) > options.atoms:
        return "too large"
    return ""


def scaffold_of(molecule: Chem.Mol) -> str:
    """What decides on the subset: independent of stereochemistry and charge."""
    flat = Chem.Mol(molecule)
    Chem.RemoveStereochemistry(flat)
    scaffold = Chem.MolToSmiles(MurckoScaffold.GetScaffoldForMol(flat))
    if scaffold:
        return scaffold
    return "chain " + "".join(sorted(a.GetSymbol() for a in flat.GetAtoms())) + str(flat.GetNumBonds())


def subset_of(scaffold: str, seed: int, held_out: float) -> str:
    """ "validation" or "test" for a part of the scaffolds, each `held_out` of all."""
    place = seed_of("subset", seed, scaffold) / 2**31
    return "validation" if place < held_out else "test" if place < 2 * held_out else "train"


def read(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            yield from (line.split()[0] for line in file if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smiles", nargs="+", help="text files, may be .gz")
    parser.add_argument("--output", required=True, type=Path, help="a .jsonl.gz file")
    parser.add_argument("--number", type=int, default=20000, help="molecules, before protonation states")
    parser.add_argument("--atoms", type=int, default=64, help="most atoms of a molecule, hydrogens included")
    parser.add_argument("--largest-charge", type=int, default=2)
    parser.add_argument(
        "--held-out", type=float, default=0.03, help="part of the scaffolds for validation, and for test"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "smiles")}
    keep_settings(options.output.parent, "molecules", settings, ["rdkit"])

    left_out: Counter[str] = Counter()
    parents: dict[str, Chem.Mol] = {}
    with rdBase.BlockLogs():
        for text in read(options.smiles):
            whole = Chem.MolFromSmiles(text)
            if whole is None:
                left_out["unreadable"] += 1
                continue
            for molecule in Chem.GetMolFrags(whole, asMols=True):
                for atom in molecule.GetAtoms():
                    atom.SetIsotope(0)
                reason = reason_against(molecule, options)
                if reason:
                    left_out[reason] += 1
                else:
                    parents.setdefault(Chem.MolToSmiles(molecule), molecule)
        rare = {s for s, m in parents.items() if RARE & {a.GetAtomicNum() for a in m.GetAtoms()}}
        order = sorted(parents, key=lambda s: (s not in rare, seed_of("order", options.seed, s)))
        rows: dict[str, dict[str, object]] = {}
        for text in order[: options.number]:
            scaffold = scaffold_of(parents[text])
            subset = subset_of(scaffold, options.seed, options.held_out)
            for form in (parents[text], *protonated(parents[text], options.largest_charge)):
                smiles = Chem.MolToSmiles(form)
                if not reason_against(form, options):
                    charge = Chem.GetFormalCharge(form)
                    rows.setdefault(
                        smiles, {"smiles": smiles, "charge": charge, "subset": subset, "scaffold": scaffold}
                    )
    lines = "".join(json.dumps(row) + "\n" for row in rows.values())
    atomic_write(options.output, gzip.compress(lines.encode(), mtime=0))
    counts = Counter(str(row["subset"]) for row in rows.values())
    charged = sum(row["charge"] != 0 for row in rows.values())
    print(f"{len(rows)} molecules and ions ({dict(counts)}; {charged} charged); left out: {dict(left_out)}")


if __name__ == "__main__":
    main()
