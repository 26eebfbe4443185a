"""Stage 1: molecules with protonation states, in subsets that share no scaffold.

    python scripts/organic/molecules.py smiles.txt.gz more.smi --output work/molecules.jsonl.gz --number 20000

Reads SMILES, one at the start of each line. Fragments of salts count as separate molecules. Isotopes are removed;
radicals, other elements and molecules that are too large are left out, and counted. For elements that are rare in
screening collections, analogues are made: an atom is replaced by one of the same group. The order is that of hashes,
in which molecules with rare elements or few atoms come earlier. A molecule's subset is decided by the hash of its
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

from torchmdnet2.core.files import atomic_write

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
ANALOGUES = (
    (Chem.MolFromSmarts("[SX2;!$([SH])]"), 34),
    (Chem.MolFromSmarts("[SX2;!$([SH])]"), 34),
    (Chem.MolFromSmarts("[SX1]"), 34),
    (Chem.MolFromSmarts("[sX2]"), 34),
    (Chem.MolFromSmarts("[PX4,PX3]"), 33),
    (Chem.MolFromSmarts("[NX3;!$(N~[!#6;!#1]);!$(N[C,c]=,:*);!$(Nc)]"), 15),
    (Chem.MolFromSmarts("[CX4;H0,H1;!r3;!r4]"), 14),
    (Chem.MolFromSmarts("[CX3;$(C(=O)(O)c),$(C(=O)([OH])C)](=O)[OH]"), 5),
    (Chem.MolFromSmarts("[Cl,Br;$(*c)]"), 53),
    (Chem.MolFromSmarts("[FX1;$(F[CX4])]"), 53),
)
"""Patterns, and the element that replaces their first atom; a carboxyl group becomes B(OH)2."""


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


def analogue(molecule: Chem.Mol, number: int) -> Chem.Mol | None:
    """The molecule with one atom replaced by one of a rare element; None if no atom can be.

    Args:
        molecule: one without rare elements.
        number: decides which of `ANALOGUES` is tried.
    """
    pattern, element = ANALOGUES[number % len(ANALOGUES)]
    places = molecule.GetSubstructMatches(pattern)
    if not places:
        return None
    place = places[number // len(ANALOGUES) % len(places)]
    changed = Chem.RWMol(molecule)
    atom = changed.GetAtomWithIdx(place[0])
    atom.SetAtomicNum(element)
    atom.SetChiralTag(Chem.ChiralType.CHI_UNSPECIFIED)
    if element == 5:
        bond = changed.GetBondBetweenAtoms(place[0], place[1])
        bond.SetBondType(Chem.BondType.SINGLE)
    try:
        Chem.SanitizeMol(changed)
        return Chem.MolFromSmiles(Chem.MolToSmiles(changed))
    except Chem.MolSanitizeException:
        return None


def place_of(molecule: Chem.Mol, smiles: str, seed: int) -> float:
    """Place of a molecule in the order of its subset, 0 to 1: rare elements and few atoms come early."""
    place = seed_of("order", seed, smiles) / 2**31
    rare = bool(RARE & {atom.GetAtomicNum() for atom in molecule.GetAtoms()})
    size = molecule.GetNumAtoms()  # hydrogens are not counted
    return place * (0.4 if rare else 1.0) * (0.1 if size <= 9 else 0.5 if size <= 18 else 1.0)


def reason_against(molecule: Chem.Mol, options: argparse.Namespace) -> str:
    """Why a molecule is left out; "" if it is accepted."""
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
    """Text that decides on the subset; independent of stereochemistry and charge."""
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
    parser.add_argument(
        "--analogues", type=float, default=0.4, help="share of the molecules of which analogues are tried"
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
        for text in sorted(parents):
            number = seed_of("analogue", options.seed, text)
            if RARE & {a.GetAtomicNum() for a in parents[text].GetAtoms()} or number / 2**31 > options.analogues:
                continue
            other = analogue(parents[text], number)
            if other is not None and not reason_against(other, options):
                parents.setdefault(Chem.MolToSmiles(other), other)
        order = sorted(parents, key=lambda s: place_of(parents[s], s, options.seed))
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
