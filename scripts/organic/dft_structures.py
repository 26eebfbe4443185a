"""Structures for dft.py: conformers and groups of molecules, relaxed with a model, and parts of liquids.

    python scripts/organic/dft_structures.py conformers biomolecules.smi work/dft/train-conformers-bio.npz \
        --model r12.tmn --atoms 40
    python scripts/organic/dft_structures.py pairs work/geometries/train-dimers-*.npz work/dft/train-dimers-more.npz \
        --model r12.tmn --number 150 --without benchmark/*.xyz
    python scripts/organic/dft_structures.py liquid npt.traj work/dft/train-water-liquid.npz --name O --number 60 \
        --molecules 9 14 --atoms 42

`conformers` makes conformers of SMILES, relaxes them and keeps up to four of each molecule that differ; a fourth one
has its atoms displaced. `pairs` takes pairs of molecules from shards, one of each name, or places those of SMILES as
`A.B` or `A.B.C` beside each other at random, and relaxes them for 40 steps, which ends near a minimum; the molecules of
every second group are then moved together or apart. `liquid` takes molecules with their neighbors from a trajectory of
a cell with one kind of molecule, as `torchmdnet2 md` writes it. Structures with the composition of one in the files of
`--without` are left out: these are what a model is judged by. How many fail is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.geometry import find_mic
from ase.io import read
from scipy.sparse.csgraph import connected_components
from shards import Geometry, bonded, formula, read_shard, seed_of, write_shard

import torchmdnet2
from torchmdnet2.streams import Ranking

CONFORMERS, KEPT, WINDOW, RMSD = 12, 4, 0.3, 0.5  # made, kept; eV; Å
DISPLACED = 0.04  # Å a coordinate
STEPS = 40  # of the relaxation of a pair or group
CONTACT = 0.85  # of the sum of van der Waals radii
APART = 0.9, 1.8  # times the distance of the centres of two molecules


def tested(paths: list[Path]) -> set[str]:
    """Compositions of the structures of files."""
    return {formula(frame.numbers) for path in paths for frame in read(path, ":")}


def accepted(geometry: Geometry, options: argparse.Namespace) -> bool:
    """Whether a structure is small enough, and has another composition than those that are left out."""
    return len(geometry.numbers) <= options.atoms and formula(geometry.numbers) not in options.known


def results(model: str, given: str | list[Atoms], **options: Any) -> Iterator[tuple[int, Atoms]]:
    """Relaxed structures whose bonds are those before, each with the number of its record."""
    failed = 0
    for k, outcome in enumerate(torchmdnet2.relax(model, given, **options)):
        good = [frame for frame in outcome.structures if not frame.info.get("bonds_changed")]
        failed += len(outcome.errors) + len(outcome.structures) - len(good)
        yield from ((k, frame) for frame in good)
    if failed:
        print(f"{failed} failed, or changed their bonds")


def conformers(options: argparse.Namespace) -> Iterator[Geometry]:
    """Conformers of SMILES."""
    ranking = Ranking(WINDOW, RMSD, most=KEPT)
    for path in options.input:
        found = results(options.model, str(path), conformers=CONFORMERS, ranking=ranking, fmax=0.05)
        for _, group in groupby(found, key=lambda row: row[0]):
            for k, (_, frame) in enumerate(group):
                smiles = frame.info["smiles"]
                rng = np.random.default_rng(seed_of("displaced", smiles, k))
                moved = rng.normal(0, DISPLACED, frame.positions.shape) * (k == KEPT - 1)
                yield Geometry(smiles, frame.numbers, frame.positions + moved, round(frame.info["charge"]))


def moved_apart(geometry: Geometry, rng: np.random.Generator) -> Geometry:
    """Molecules at other distances from the first one; unchanged if the name has another number of molecules."""
    count, label = connected_components(bonded(geometry))
    if count != len(geometry.name.split(".")):
        return geometry
    positions, scale = geometry.positions.copy(), rng.uniform(*APART)
    first = positions[label == 0].mean(0)
    for k in range(1, count):
        positions[label == k] += (scale - 1) * (positions[label == k].mean(0) - first)
    return geometry._replace(positions=positions)


def placed(path: Path) -> Iterator[Geometry]:
    """Molecules of SMILES `A.B` or `A.B.C`, in contact at random orientations; SystemExit for other lines.

    From the third molecule on, each takes of some places the one that is nearest to the centre of the others.
    """
    from geometries import PLACES, beside, embedded, innermost  # needs RDKit

    for k, line in enumerate(path.read_text().splitlines()):
        name = line.split()[0] if line.split() else ""
        seed = seed_of("placed", name)
        rng = np.random.default_rng(seed)
        try:
            group, *others = (embedded(smiles, 1, seed)[1][0] for smiles in name.split("."))
        except (TypeError, ValueError, IndexError) as error:  # not SMILES, no atoms, or no geometry
            raise SystemExit(f"{path}, line {k + 1}: {name!r} is not SMILES as A.B ({error})") from None
        if not others:
            raise SystemExit(f"{path}, line {k + 1}: {name!r} is one molecule, and not SMILES as A.B")
        for third, other in enumerate(others):
            places = [beside(group, other, CONTACT, rng) for _ in range(PLACES if third else 1)]
            group = innermost(places, len(other.numbers))
        yield group


def pairs(options: argparse.Namespace) -> Iterator[Geometry]:
    """Pairs of molecules, relaxed or moved apart."""
    found = (placed(path) if path.suffix == ".smi" else read_shard(path) for path in options.input)
    several = [g for group in found for g in group if accepted(g, options)]
    chosen = sorted(several, key=lambda g: seed_of("pair", g.name))
    chosen = [next(group) for _, group in groupby(chosen, key=lambda g: g.name)][: options.number]
    frames = [Atoms(g.numbers, g.positions, info={"charge": g.charge}) for g in chosen]
    for k, frame in results(options.model, frames, steps=STEPS):
        relaxed = chosen[k]._replace(positions=frame.positions)
        rng = np.random.default_rng(seed_of("apart", relaxed.name))
        yield relaxed if k % 2 else moved_apart(relaxed, rng)


def liquid(options: argparse.Namespace) -> Iterator[Geometry]:
    """Molecules of liquids with their nearest neighbors, whole."""
    for path in options.input:
        frames = read(path, ":")
        for k in range(options.number):
            rng = np.random.default_rng(seed_of("liquid", path.name, k))
            yield neighbors(frames[k * len(frames) // options.number], options.name, options.molecules, rng)


def neighbors(frame: Atoms, name: str, sizes: tuple[int, int], rng: np.random.Generator) -> Geometry:
    """A random molecule of a cell, and those whose centres are nearest to its own.

    Args:
        frame: a periodic cell with whole molecules, of one kind.
        name: SMILES of the molecule.
        sizes: least and largest number of molecules.
    """
    count, label = connected_components(bonded(Geometry(name, frame.numbers, frame.positions, 0)))
    molecules = [frame[label == k] for k in range(count)]
    centres = np.array([one.positions.mean(0) for one in molecules])
    chosen = rng.integers(count)
    between, distances = find_mic(centres - centres[chosen], frame.cell, frame.pbc)
    number = rng.integers(sizes[0], sizes[1] + 1)
    near = np.argsort(distances)[:number]
    positions = [molecules[k].positions - centres[k] + between[k] for k in near]
    return Geometry(
        ".".join([name] * number), np.concatenate([molecules[k].numbers for k in near]), np.concatenate(positions), 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("input", nargs="+", type=Path, help="SMILES, shards of pairs, or trajectories")
    parser.add_argument("output", type=Path, help="a shard")
    parser.add_argument("--model", default="organic", help="relaxes conformers and pairs")
    parser.add_argument("--without", nargs="+", default=[], type=Path, help="files of structures")
    parser.add_argument("--number", type=int, default=150, help="of pairs, or from a trajectory")
    parser.add_argument("--name", default="O", help="of liquid: SMILES of the molecule")
    parser.add_argument("--molecules", nargs=2, type=int, default=(9, 14), help="of liquid: least and most")
    parser.add_argument("--atoms", type=int, default=30, help="of a structure, at most")
    options = parser.parse_args()
    if options.output.exists():
        raise SystemExit(f"{options.output} is there, perhaps with energies: give another name")
    options.known = tested(options.without)
    found = KINDS[options.kind](options)
    print(f"{write_shard(options.output, [g for g in found if accepted(g, options)])} structures")


KINDS = {"conformers": conformers, "pairs": pairs, "liquid": liquid}

if __name__ == "__main__":
    main()
