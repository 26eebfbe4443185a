"""Stage 2: geometries of the molecules, on the CPU. Resumable: shards that are there are kept.

    python scripts/organic/geometries.py work/molecules.jsonl.gz work/geometries --processes 16

Kinds: `conformers` (distance geometry, relaxed with MMFF94), `strained` (stretched or compressed bonds, displaced
atoms), `dimers` (two molecules of one subset at random orientations, from close contact to separation), `clusters` (a
molecule in one to eight waters) and `water` (clusters of 2 to 20 waters).
"""

from __future__ import annotations

import argparse
import gzip
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rdkit import Chem, rdBase
from rdkit.Chem import AllChem
from shards import SUBSETS, Geometry, keep_settings, seed_of, write_shard

RADII = {1: 1.1, 5: 1.92, 6: 1.7, 7: 1.55, 8: 1.52, 9: 1.47, 14: 2.1, 15: 1.8, 16: 1.8, 17: 1.75, 33: 1.85, 34: 1.9,
         35: 1.85, 53: 1.98}  # fmt: skip
"""van der Waals radii in Å (S. Alvarez, Dalton Trans. 2013, 8617; A. Bondi, J. Phys. Chem. 1964, 68, 441)."""
WATER = Geometry("O", np.array([8, 1, 1]), np.array([[0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]]), 0)
STRAINED = 3  # of each molecule
LARGEST = 64  # atoms of a dimer or cluster


def embedded(smiles: str, count: int, seed: int) -> tuple[Chem.Mol, list[Geometry]]:
    """Up to `count` conformers of a molecule, and the molecule with its hydrogens."""
    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    options = AllChem.ETKDGv3()
    options.randomSeed, options.maxIterations = seed, 50
    found = list(AllChem.EmbedMultipleConfs(molecule, count, options))
    if found and AllChem.MMFFHasAllMoleculeParams(molecule):
        AllChem.MMFFOptimizeMoleculeConfs(molecule, maxIters=200)
    numbers = np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()])
    charge = Chem.GetFormalCharge(molecule)
    return molecule, [Geometry(smiles, numbers, molecule.GetConformer(k).GetPositions(), charge) for k in found]


def strained(molecule: Chem.Mol, geometry: Geometry, rng: np.random.Generator) -> Geometry:
    """A bond by −15 to +45 % of its length, what hangs on it moving along where it is in no ring; atoms by 0.03 Å."""
    bonds = [bond for bond in molecule.GetBonds() if not bond.IsInRing()] or list(molecule.GetBonds())
    positions = geometry.positions + rng.normal(0, 0.03, geometry.positions.shape)
    if bonds:
        bond = bonds[rng.integers(len(bonds))]
        a, b = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        moved = _side(molecule, a, b)
        positions[sorted(moved)] += rng.uniform(-0.15, 0.45) * (geometry.positions[b] - geometry.positions[a])
    return geometry._replace(positions=positions)


def _side(molecule: Chem.Mol, a: int, b: int) -> set[int]:
    """The atoms beyond the bond a–b, b among them; b alone in a ring."""
    side, left = {b}, [b]
    while left:
        at = left.pop()
        for k in (atom.GetIdx() for atom in molecule.GetAtomWithIdx(at).GetNeighbors()):
            if k not in side and (at, k) != (b, a):
                side.add(k)
                left.append(k)
    return {b} if a in side else side


def rotation(rng: np.random.Generator) -> np.ndarray:
    """A random one, [3, 3] (uniform: G. Stewart, SIAM J. Numer. Anal. 17, 403 (1980))."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q if np.linalg.det(q) > 0 else -q


def beside(one: Geometry, other: Geometry, closeness: float, rng: np.random.Generator) -> Geometry:
    """Another molecule at a random orientation and direction, moved in until a pair of atoms touches.

    Args:
        closeness: distance of the closest pair, relative to the sum of its van der Waals radii.
    """
    a = one.positions - one.positions.mean(0)
    b = (other.positions - other.positions.mean(0)) @ rotation(rng)
    direction = rng.normal(size=3)
    direction /= np.linalg.norm(direction)
    touching = closeness * (_radii(one)[:, None] + _radii(other)[None, :])
    between = (b[None, :] - a[:, None]).reshape(-1, 3)
    along = between @ direction
    across = (between**2).sum(1) - along**2
    inside = touching.ravel() ** 2 - across
    # each pair touches at the larger root of |between + t·direction| = touching
    shift = max(0.0, float((np.sqrt(inside[inside > 0]) - along[inside > 0]).max(initial=0)))
    numbers = np.concatenate([one.numbers, other.numbers])
    name = f"{one.name}.{other.name}"
    return Geometry(name, numbers, np.concatenate([a, b + shift * direction]), one.charge + other.charge)


def _radii(geometry: Geometry) -> np.ndarray:
    return np.array([RADII[int(z)] for z in geometry.numbers])


def with_waters(geometry: Geometry, count: int, rng: np.random.Generator) -> Geometry:
    """Waters around a molecule, each at the closest of some places."""
    for _ in range(count):
        places = [beside(geometry, WATER, rng.uniform(0.68, 0.85), rng) for _ in range(8)]
        geometry = min(places, key=lambda g: float(np.linalg.norm(g.positions[-3:].mean(0) - g.positions.mean(0))))
    return geometry


def shard(kind: str, molecules: list[dict], partners: list[str], path: str, options: dict) -> tuple[str, int]:
    """Make the geometries of one shard and write it. Returns its path and how many there are."""
    found: list[Geometry] = []
    with rdBase.BlockLogs():
        for k, row in enumerate(molecules):
            smiles = row["smiles"]
            seed = seed_of(options["seed"], kind, smiles, *([Path(path).name, k] if kind == "water" else []))
            rng = np.random.default_rng(seed)
            if kind == "water":
                found.append(with_waters(WATER, int(rng.integers(1, 20)), rng))
                continue
            molecule, conformers = embedded(smiles, options["conformers"] if kind == "conformers" else 1, seed)
            if kind == "conformers" or not conformers:
                found += conformers
            elif kind == "strained":
                found += [strained(molecule, conformers[0], rng) for _ in range(STRAINED)]
            elif kind == "clusters":
                room = (LARGEST - len(conformers[0].numbers)) // 3
                if room > 0:
                    found.append(with_waters(conformers[0], int(rng.integers(1, min(room, 8) + 1)), rng))
            else:
                other = embedded(partners[rng.integers(len(partners))], 1, seed)[1]
                if other and abs(conformers[0].charge + other[0].charge) <= 2:
                    pair = beside(conformers[0], other[0], rng.choice([0.75, 0.85, 0.95, 1.1, 1.5]), rng)
                    found += [pair] if len(pair.numbers) <= LARGEST else []
    return path, write_shard(Path(path), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("molecules", help="of stage 1")
    parser.add_argument("output", type=Path, help="folder for the shards")
    parser.add_argument("--kinds", default="conformers,strained,dimers,clusters,water")
    parser.add_argument("--conformers", type=int, default=2, help="of each molecule")
    parser.add_argument("--dimer-atoms", type=int, default=30, help="most atoms of a molecule in dimers and clusters")
    parser.add_argument("--waters", type=int, default=2000, help="water clusters for training")
    parser.add_argument("--shard", type=int, default=1000, help="molecules in a shard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    settings = {k: v for k, v in vars(options).items() if k not in ("molecules", "output", "processes", "kinds")}
    keep_settings(options.output, "geometries", settings, ["rdkit", "numpy"])
    with gzip.open(options.molecules, "rt") as file:
        molecules = [json.loads(line) for line in file]
    small = [m for m in molecules if Chem.AddHs(Chem.MolFromSmiles(m["smiles"])).GetNumAtoms() <= options.dimer_atoms]
    work = []
    for subset in SUBSETS:
        for kind in options.kinds.split(","):
            rows = [m for m in (small if kind in ("dimers", "clusters") else molecules) if m["subset"] == subset]
            if kind == "water":
                rows = [{"smiles": "O"}] * (options.waters if subset == "train" else options.waters // 20)
            partners = [m["smiles"] for m in small if m["subset"] == subset]
            for k, first in enumerate(range(0, len(rows), options.shard)):
                path = options.output / f"{subset}-{kind}-{k:04d}.npz"
                if not path.exists() and (partners or kind != "dimers"):
                    work.append((kind, rows[first : first + options.shard], partners, str(path), settings))
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for path, count in pool.map(shard, *zip(*work, strict=True)) if work else ():
            print(f"{path}: {count} geometries", flush=True)
    files = list(options.output.glob("*.npz"))
    print(f"{len(files)} shards, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
