"""Stage 2: geometries of the molecules, on the CPU. Can be resumed: existing shards are kept.

    python scripts/organic/geometries.py work/molecules.jsonl.gz work/geometries --processes 16 --also monomers.npz

Kinds: `conformers` (distance geometry, relaxed with a force field), `strained` (stretched or compressed bonds,
displaced atoms), `dimers` (two molecules of one subset at random orientations, from hard contact to separation),
`clusters` (a molecule in one to eight waters), `water` (clusters of 2 to 20 molecules of water, one in four with
hydronium, hydroxide or a halide), `protons` (a proton on its way within a molecule or between two, see protons.py),
`stretched` (a bond at up to twice its length, rare types more often, see stretched.py), `substitutions` (a lone pair
takes the place of a group at a carbon, see substitutions.py; more of them with small molecules, in one shard),
`separated` (ions alone, and up to 9 Å away from a molecule or another ion) and `shifts` (hydrogen between two atoms of
a small molecule, one of them carbon, see shifts.py).
A shard holds all kinds that are made from its molecules, so that a part of the shards is as balanced as all of them.
The last five are made last, from all files of conformers that lack them, also those of earlier versions.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from molecules import scaffold_of, subset_of
from protons import shared_protons
from rdkit import Chem, rdBase
from rdkit.Chem import AllChem
from shards import ELEMENTS, SUBSETS, Geometry, keep_settings, read_shard, rotation, seed_of, write_shard
from shifts import hydrogen_shifts
from stretched import side, stretched_bonds
from substitutions import substitutions

RADII = {1: 1.1, 5: 1.92, 6: 1.7, 7: 1.55, 8: 1.52, 9: 1.47, 14: 2.1, 15: 1.8, 16: 1.8, 17: 1.75, 33: 1.85, 34: 1.9,
         35: 1.85, 53: 1.98}  # fmt: skip
"""van der Waals radii in Å (S. Alvarez, Dalton Trans. 2013, 8617; A. Bondi, J. Phys. Chem. 1964, 68, 441)."""
WATER = Geometry("O", np.array([8, 1, 1]), np.array([[0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]]), 0)
IONS = (
    Geometry("[OH3+]", np.array([8, 1, 1, 1]),
             np.array([[0, 0, 0.2], [0.94, 0, -0.08], [-0.47, 0.814, -0.08], [-0.47, -0.814, -0.08]]), 1),
    Geometry("[OH-]", np.array([8, 1]), np.array([[0, 0, 0], [0, 0, 0.965]]), -1),
    *(Geometry(f"[{name}-]", np.array([z]), np.zeros((1, 3)), -1)
      for name, z in (("F", 9), ("Cl", 17), ("Br", 35), ("I", 53))),
)  # fmt: skip
CONTACTS = (0.55, 0.65, 0.75, 0.8, 0.85, 0.9, 1.0, 1.15, 1.4, 2.0)
"""Closest distances of dimers, relative to the sums of van der Waals radii."""
APART = (0.9, 2.8)
"""Closest distances of separated pairs: about 3 to 9 Å, beyond the cutoff of the network."""
PROTONS = 90  # shared ones of a shard
STRETCHED = 200  # bonds of a shard
SUBSTITUTIONS = 60  # of a shard
SEPARATED = 60  # pairs of a shard
SHIFTS = 120  # of hydrogen in a shard
SMALL_SUBSTITUTIONS, SMALL = 4000, 14  # of all small molecules together, and most atoms of one
PLACES = 8  # tried for each molecule of a cluster
LARGEST = 64  # atoms of a dimer or cluster


def embedded(smiles: str, count: int, seed: int) -> tuple[Chem.Mol, list[Geometry]]:
    """Up to `count` conformers of a molecule, and the molecule with its hydrogens."""
    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    options = AllChem.ETKDGv3()
    options.randomSeed, options.maxIterations = seed, 30
    found = list(AllChem.EmbedMultipleConfs(molecule, count, options))
    if found and AllChem.MMFFHasAllMoleculeParams(molecule):
        AllChem.MMFFOptimizeMoleculeConfs(molecule, maxIters=60)
    elif found and AllChem.UFFHasAllMoleculeParams(molecule):
        AllChem.UFFOptimizeMoleculeConfs(molecule, maxIters=60)
    numbers = np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()])
    charge = Chem.GetFormalCharge(molecule)
    return molecule, [Geometry(smiles, numbers, molecule.GetConformer(k).GetPositions(), charge) for k in found]


def strained(molecule: Chem.Mol, geometry: Geometry, rng: np.random.Generator) -> Geometry:
    """Change a bond by −20 to +60 %, moving the atoms beyond it unless it is in a ring; displace atoms by 0.03 Å."""
    bonds = [bond for bond in molecule.GetBonds() if not bond.IsInRing()] or list(molecule.GetBonds())
    positions = geometry.positions + rng.normal(0, 0.03, geometry.positions.shape)
    if bonds:
        bond = bonds[rng.integers(len(bonds))]
        a, b = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        moved = side(Chem.GetAdjacencyMatrix(molecule) > 0, a, b)
        positions[moved] += rng.uniform(-0.2, 0.6) * (geometry.positions[b] - geometry.positions[a])
    return geometry._replace(positions=positions)


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


def innermost(places: list[Geometry], size: int) -> Geometry:
    """The geometry whose last `size` atoms are nearest to its centre."""
    return min(places, key=lambda g: float(np.linalg.norm(g.positions[-size:].mean(0) - g.positions.mean(0))))


def with_waters(geometry: Geometry, count: int, rng: np.random.Generator) -> Geometry:
    """Water molecules around a molecule, each at the closest of some places."""
    for _ in range(count):
        geometry = innermost([beside(geometry, WATER, rng.uniform(0.68, 0.85), rng) for _ in range(PLACES)], 3)
    return geometry


def water_cluster(rng: np.random.Generator) -> Geometry:
    """A cluster of 2 to 20 molecules of water; in one of four clusters, an ion replaces a molecule."""
    first = IONS[rng.integers(len(IONS))] if rng.random() < 0.25 else WATER
    return with_waters(first, int(rng.integers(1, 20)), rng)


def derived(conformers: list[Geometry], options: dict, rng: np.random.Generator) -> dict[str, list[Geometry]]:
    """Dimers and clusters of the small molecules among some conformers."""
    small = [g for g in conformers if len(g.numbers) <= options["dimer_atoms"]]
    found: dict[str, list[Geometry]] = {"dimers": [], "clusters": []}
    for geometry in small:
        other = small[rng.integers(len(small))]
        if len(geometry.numbers) + len(other.numbers) <= LARGEST and abs(geometry.charge + other.charge) <= 2:
            found["dimers"].append(beside(geometry, other, rng.choice(CONTACTS), rng))
        room = (LARGEST - len(geometry.numbers)) // 3
        if rng.random() < options["solvated"]:
            found["clusters"].append(with_waters(geometry, int(rng.integers(1, min(room, 8) + 1)), rng))
    return found


def shard(subset: str, k: int, molecules: list[dict], folder: str, options: dict) -> str:
    """Make all kinds of geometries from some molecules, and write them. Returns the counts, in words."""
    found: dict[str, list[Geometry]] = {"conformers": [], "strained": []}
    with rdBase.BlockLogs():
        for row in molecules:
            seed = seed_of(options["seed"], row["smiles"])
            rng = np.random.default_rng(seed)
            molecule, conformers = embedded(row["smiles"], options["conformers"], seed)
            found["conformers"] += conformers
            if conformers:
                found["strained"].append(strained(molecule, conformers[-1], rng))
    rng = np.random.default_rng(seed_of(options["seed"], subset, k))
    found |= derived(found["conformers"], options, rng)
    found["water"] = [water_cluster(rng) for _ in range(options["waters"] if k else 10 * options["waters"])]
    return _write(folder, subset, f"{k:04d}", found)


def _write(folder: str, subset: str, name: str, found: dict[str, list[Geometry]]) -> str:
    for kind, geometries in found.items():  # the file of the first kind is the last one: with it the shard is complete
        if kind != "conformers":
            write_shard(Path(folder) / f"{subset}-{kind}-{name}.npz", geometries)
    write_shard(Path(folder) / f"{subset}-conformers-{name}.npz", found["conformers"])
    return f"{subset} {name}: { ({kind: len(made) for kind, made in found.items()}) }"


def additions(conformers: Path, options: dict) -> None:
    """Write the kinds that need only a file of conformers next to it, also in folders of earlier versions."""
    for kind, make in ADDITIONS.items():
        target = conformers.with_name(conformers.name.replace("-conformers-", f"-{kind}-"))
        if not target.exists():
            rng = np.random.default_rng(seed_of(options["seed"], target.stem))
            write_shard(target, make(list(read_shard(conformers)), options, rng))


def _protons(found: list[Geometry], options: dict, rng: np.random.Generator) -> list[Geometry]:
    small = [g for g in found if len(g.numbers) <= options["dimer_atoms"]]
    partners = small + [WATER, *IONS] * max(1, len(small) // (2 * len(IONS) + 2))  # a third of the partners
    found += [WATER, IONS[0]] * (len(found) // 40)  # these give protons, too
    return shared_protons(found, partners, RADII, PROTONS, LARGEST, rng)


def _stretched(found: list[Geometry], options: dict, rng: np.random.Generator) -> list[Geometry]:
    return stretched_bonds(found, min(STRETCHED, len(found)), rng)


def _substitutions(found: list[Geometry], options: dict, rng: np.random.Generator) -> list[Geometry]:
    small = [g for g in found if len(g.numbers) <= options["dimer_atoms"]]
    return substitutions(small, list(IONS), RADII, SUBSTITUTIONS, LARGEST, rng)


def _separated(found: list[Geometry], options: dict, rng: np.random.Generator) -> list[Geometry]:
    """Every ion alone, and pairs; half of them with one of these ions, most of the others with a charged molecule."""
    small = [g for g in found if len(g.numbers) <= options["dimer_atoms"]] or [WATER]
    charged = [g for g in small if g.charge] or [WATER]
    made = list(IONS)
    for _ in range(SEPARATED):
        one = [small, charged, IONS][rng.choice(3, p=[0.6, 0.2, 0.2])]
        other = [small, charged, IONS][rng.choice(3, p=[0.2, 0.3, 0.5])]
        a, b = one[rng.integers(len(one))], other[rng.integers(len(other))]
        if len(a.numbers) + len(b.numbers) <= LARGEST and abs(a.charge + b.charge) <= 2:
            made.append(beside(a, b, rng.uniform(*APART), rng))
    return made


def small_substitutions(folder: Path, options: dict) -> None:
    """Substitutions of the small training molecules; a single shard has too few for reactions among them."""
    target = folder / "train-substitutions-small.npz"
    if not target.exists():
        files = sorted(folder.glob("train-conformers-*.npz"))
        small = [g for path in files for g in read_shard(path) if len(g.numbers) <= SMALL]
        rng = np.random.default_rng(seed_of(options["seed"], target.stem))
        write_shard(target, substitutions(small, list(IONS), RADII, SMALL_SUBSTITUTIONS, LARGEST, rng))


def _shifts(found: list[Geometry], options: dict, rng: np.random.Generator) -> list[Geometry]:
    return hydrogen_shifts([g for g in found if len(g.numbers) <= options["dimer_atoms"]], SHIFTS, rng)


ADDITIONS = {"protons": _protons, "stretched": _stretched, "substitutions": _substitutions, "separated": _separated,
             "shifts": _shifts}  # fmt: skip


def others(path: Path, folder: str, options: dict, held_out: float) -> Iterator[str]:
    """Geometries of a file in the form of a shard, with `smiles`: divided by scaffold, with dimers and clusters."""
    by_subset: dict[str, list[Geometry]] = {subset: [] for subset in SUBSETS}
    with np.load(path, allow_pickle=False) as data:
        smiles, conformers = data["smiles"], data["conformers"].astype(int)
    geometries = read_shard(path)
    for text, count in zip(smiles, conformers, strict=True):
        molecule = Chem.MolFromSmiles(text.decode() if isinstance(text, bytes) else str(text))
        subset = "train" if molecule is None else subset_of(scaffold_of(molecule), options["seed"], held_out)
        taken = set(np.linspace(0, count - 1, min(count, options["also_frames"])).astype(int).tolist())
        part = [next(geometries) for _ in range(count)]
        by_subset[subset] += [g for k, g in enumerate(part) if k in taken and set(g.numbers) <= set(ELEMENTS)]
    for subset, chosen in by_subset.items():
        rng = np.random.default_rng(seed_of(options["seed"], path.name, subset))
        moved = [g._replace(positions=g.positions + rng.normal(0, 0.05, g.positions.shape)) for g in chosen]
        if chosen:
            yield _write(folder, subset, path.stem, {"conformers": chosen, "strained": moved,
                                                     **derived(chosen, options, rng)})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("molecules", help="of stage 1")
    parser.add_argument("output", type=Path, help="folder for the shards")
    parser.add_argument("--conformers", type=int, default=2, help="of each molecule")
    parser.add_argument("--dimer-atoms", type=int, default=30, help="most atoms of a molecule in dimers and clusters")
    parser.add_argument("--solvated", type=float, default=0.5, help="part of the small molecules that get water")
    parser.add_argument("--waters", type=int, default=12, help="clusters of water in a shard; ten times in the first")
    parser.add_argument("--shard", type=int, default=250, help="molecules in a shard")
    parser.add_argument("--also", nargs="*", default=[], type=Path, help="files of geometries, see shards.py")
    parser.add_argument("--also-frames", type=int, default=10, help="most geometries of each molecule in them")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.03,
        help="share of held-out scaffolds as in stage 1, for the molecules of --also",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    settings = {k: v for k, v in vars(options).items() if k not in ("molecules", "output", "processes", "also")}
    keep_settings(options.output, "geometries", settings, ["rdkit", "numpy"])
    with gzip.open(options.molecules, "rt") as file:
        molecules = [json.loads(line) for line in file]
    work = []
    for subset in SUBSETS:
        rows = [m for m in molecules if m["subset"] == subset]
        parts = [rows[first : first + options.shard] for first in range(0, len(rows), options.shard)]
        work += [(k, subset, part) for k, part in enumerate(parts)]
    work = [(subset, k, part, str(options.output), settings) for k, subset, part in sorted(work, key=lambda w: w[:2])
            if not (options.output / f"{subset}-conformers-{k:04d}.npz").exists()]  # fmt: skip
    for path in options.also:
        for text in others(path, str(options.output), settings, options.held_out):
            print(text, flush=True)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for text in pool.map(shard, *zip(*work, strict=True)) if work else ():
            print(text, flush=True)
    for path in sorted(options.output.glob("*-conformers-*.npz")):
        additions(path, settings)
    small_substitutions(options.output, settings)
    files = list(options.output.glob("*.npz"))
    print(f"{len(files)} shards, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
