"""Structures for dft.py: conformers and pairs of molecules, relaxed with a model.

    python scripts/organic/dft_structures.py conformers biomolecules.smi work/dft/train-conformers-bio.npz \
        --model r12.tmn --atoms 40
    python scripts/organic/dft_structures.py pairs work/geometries/train-dimers-*.npz work/dft/train-dimers-more.npz \
        --model r12.tmn --number 150 --without benchmark/*.xyz

`conformers` makes conformers of SMILES, relaxes them and keeps up to four of each molecule that differ; a fourth one
has its atoms displaced. `pairs` takes pairs of molecules from shards, one of each name, or places those of SMILES as
`A.B` beside each other at random, and relaxes them for 40 steps, which ends near a minimum; the molecules of every
second pair are then moved together or apart. Structures with the composition of one in the files of `--without` are
left out: these are what a model is judged by. How many fail is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.io import read
from scipy.sparse.csgraph import connected_components
from shards import Geometry, bonded, formula, read_shard, seed_of, write_shard

import torchmdnet2
from torchmdnet2.streams import Ranking

CONFORMERS, KEPT, WINDOW, RMSD = 12, 4, 0.3, 0.5  # made, kept; eV; Å
DISPLACED = 0.04  # Å a coordinate
STEPS = 40  # of a pair
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
    """A pair with another distance of its molecules; unchanged if bonds do not tell two."""
    count, label = connected_components(bonded(geometry))
    if count != 2:
        return geometry
    first, positions = label == 0, geometry.positions.copy()
    between = positions[~first].mean(0) - positions[first].mean(0)
    positions[~first] += (rng.uniform(*APART) - 1) * between
    return geometry._replace(positions=positions)


def placed(path: Path) -> Iterator[Geometry]:
    """Pairs of SMILES `A.B`, at random orientations in contact; SystemExit for a line that is not two molecules."""
    from geometries import beside, embedded  # needs RDKit

    for k, line in enumerate(path.read_text().splitlines()):
        name = line.split()[0] if line.split() else ""
        seed = seed_of("placed", name)
        try:
            one, other = (embedded(smiles, 1, seed)[1][0] for smiles in name.split("."))
        except (ValueError, TypeError, IndexError) as error:  # the number of molecules, their SMILES, no geometry
            raise SystemExit(f"{path}, line {k + 1}: {name!r} is not a pair of SMILES as A.B ({error})") from None
        yield beside(one, other, CONTACT, np.random.default_rng(seed))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("conformers", "pairs"))
    parser.add_argument("input", nargs="+", type=Path, help="SMILES, or shards of pairs")
    parser.add_argument("output", type=Path, help="a shard")
    parser.add_argument("--model", required=True)
    parser.add_argument("--without", nargs="+", default=[], type=Path, help="files of structures")
    parser.add_argument("--number", type=int, default=150, help="of pairs")
    parser.add_argument("--atoms", type=int, default=30, help="of a structure, at most")
    options = parser.parse_args()
    if options.output.exists():
        raise SystemExit(f"{options.output} is there, perhaps with energies: give another name")
    options.known = tested(options.without)
    found = {"conformers": conformers, "pairs": pairs}[options.kind](options)
    print(f"{write_shard(options.output, [g for g in found if accepted(g, options)])} structures")


if __name__ == "__main__":
    main()
