"""Structures for dft.py: conformers and pairs of molecules, relaxed with a model.

    python scripts/organic/dft_structures.py conformers molecules.smi work/dft/train-conformers-bio.npz --model r12.tmn
    python scripts/organic/dft_structures.py pairs work/geometries/train-dimers-*.npz work/dft/train-dimers-gpu.npz \
        --model r12.tmn --number 150 --without benchmark/*.xyz

`conformers` makes conformers of SMILES, relaxes them and keeps up to four of each molecule that differ, one of them
with its atoms displaced. `pairs` takes pairs of molecules from shards; half are relaxed to the next minimum nearly,
half of these then moved apart. Structures with the atoms of one in the files of `--without` are left out: these are
what a model is judged by.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import read
from scipy.sparse.csgraph import connected_components
from shards import Geometry, bonded, read_shard, seed_of, write_shard

import torchmdnet2
from torchmdnet2.streams import Ranking

CONFORMERS, KEPT, WINDOW, RMSD = 12, 4, 0.3, 0.5  # made, kept; eV; Å
DISPLACED = 0.04  # Å a coordinate
STEPS = 40  # of a pair
APART = 0.9, 1.8  # times the distance of the centres of two molecules


def tested(paths: list[Path]) -> set[str]:
    """Compositions of the structures of files."""
    return {composition(frame.numbers) for path in paths for frame in read(path, ":")}


def composition(numbers: np.ndarray) -> str:
    """Hill formula of a structure."""
    return Atoms(numbers).get_chemical_formula()


def conformers(options: argparse.Namespace) -> Iterator[Geometry]:
    """Conformers of SMILES."""
    found = torchmdnet2.relax(
        options.model, options.input[0], conformers=CONFORMERS, ranking=Ranking(WINDOW, RMSD, most=KEPT), fmax=0.05
    )
    frames = [frame for outcome in found for frame in outcome.structures]
    for smiles, group in groupby(frames, key=lambda frame: frame.info["smiles"]):
        several = list(group)
        for k, frame in enumerate(several):
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


def pairs(options: argparse.Namespace) -> Iterator[Geometry]:
    """Pairs of molecules, relaxed or moved apart."""
    several = [g for path in options.input for g in read_shard(path) if len(g.numbers) <= options.atoms]
    chosen = sorted(several, key=lambda g: seed_of("pair", g.name))
    chosen = [next(group) for _, group in groupby(chosen, key=lambda g: g.name)][: options.number]
    frames = [Atoms(g.numbers, g.positions, info={"charge": g.charge}) for g in chosen]
    for k, (g, outcome) in enumerate(zip(chosen, torchmdnet2.relax(options.model, frames, steps=STEPS), strict=True)):
        for frame in outcome.structures:
            relaxed = g._replace(positions=frame.positions)
            yield relaxed if k % 2 else moved_apart(relaxed, np.random.default_rng(seed_of("apart", g.name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("conformers", "pairs"))
    parser.add_argument("input", nargs="+", type=Path, help="SMILES, or shards of pairs")
    parser.add_argument("output", type=Path, help="a shard")
    parser.add_argument("--model", required=True)
    parser.add_argument("--without", nargs="*", default=[], type=Path, help="files of structures")
    parser.add_argument("--number", type=int, default=150, help="of pairs")
    parser.add_argument("--atoms", type=int, default=30, help="of a structure, at most")
    options = parser.parse_args()
    known = tested(options.without)
    found = {"conformers": conformers, "pairs": pairs}[options.kind](options)
    kept = [g for g in found if composition(g.numbers) not in known and len(g.numbers) <= options.atoms]
    print(f"{write_shard(options.output, kept)} structures")


if __name__ == "__main__":
    main()
