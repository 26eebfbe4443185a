"""How smooth models are where a proton moves between two of N and O: second derivatives of the force along its way.

    python scripts/organic/roughness.py work/geometries organic m0.tmn,m1.tmn,m2.tmn,m3.tmn

The molecules are conformers that are not trained on, one way in each, at fixed other atoms. Steps of 0.5 fs do not see
a peak of the force that is narrower than 0.05 Å, and the conserved energy jumps there (docs/dev/organic.md, "What makes
the conserved energy jump").
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from protons import sites, within
from shards import Geometry, read_shard, seed_of
from teachers import Model, Teacher

STEP = 0.01  # Å
APART = 2.3, 2.9  # Å, between N or O and O or N
ENDS = 0.95, 0.93  # Å, from the donor to the first place, and from the last to the acceptor
CLEAR = 1.3  # Å, from the proton to other atoms
BATCH = 64


class Way(NamedTuple):
    """h: index of the proton; direction [3] from the donor to the acceptor; positions [P, n, 3] in Å."""

    geometry: Geometry
    h: int
    direction: np.ndarray
    positions: np.ndarray


def ways(folder: Path, subset: str, atoms: int) -> Iterator[Way]:
    """The first molecules of each name and charge that have such a way, of at most so many atoms."""
    found = set()
    for path in sorted(folder.glob(f"{subset}-conformers-*.npz")):
        rng = np.random.default_rng(seed_of("rough", path.stem))
        for geometry in read_shard(path):
            key = (geometry.name, geometry.charge)
            if "." in geometry.name or len(geometry.numbers) > atoms or key in found:
                continue
            if (way := way_of(geometry, rng)) is not None:
                found.add(key)
                yield way


def way_of(geometry: Geometry, rng: np.random.Generator) -> Way | None:
    """One proton of the molecule, chosen at random, at places STEP apart; None if it has no acceptor, or no room."""
    z, x = geometry.numbers, geometry.positions
    triples = [t for t in within(geometry, sites(geometry)) if {int(z[t[1]]), int(z[t[2]])} <= {7, 8}]
    if not triples:
        return None
    h, d, a = triples[rng.integers(len(triples))]
    apart = np.linalg.norm(x[a] - x[d])
    direction = (x[a] - x[d]) / apart
    places = x[d] + direction * np.arange(ENDS[0], apart - ENDS[1], STEP)[:, None]
    others = np.delete(x, [h, d, a], axis=0)
    room = np.linalg.norm(places[:, None] - others[None], axis=2).min(initial=np.inf)
    if not APART[0] < apart < APART[1] or room < CLEAR:
        return None
    positions = np.repeat(x[None], len(places), 0)
    positions[:, h] = places
    return Way(geometry, h, direction, positions)


def curvature(way: Way, model: Teacher) -> np.ndarray:
    """Second derivative of the force on the proton along its way, [P - 2] eV/Å³."""
    forces = []
    for places in torch.as_tensor(way.positions).split(BATCH):
        numbers = torch.as_tensor(way.geometry.numbers).repeat(len(places), 1)
        charge = torch.full((len(places),), float(way.geometry.charge))
        found = model.label(numbers, places, charge).forces
        forces.append(found[:, way.h].double().cpu().numpy() @ way.direction)
    return np.diff(np.concatenate(forces), 2) / STEP**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", type=Path, help="folder of geometries.py")
    parser.add_argument("models", nargs="+", help="names or .tmn files; A.tmn,B.tmn is their mean")
    parser.add_argument("--subset", default="validation")
    parser.add_argument("--number", type=int, default=40, help="of ways in ions, and in molecules, at most")
    parser.add_argument("--atoms", type=int, default=46, help="of a molecule, at most")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    found = list(ways(options.geometries, options.subset, options.atoms))
    kinds = {"ions": [way for way in found if way.geometry.charge],
             "molecules": [way for way in found if not way.geometry.charge]}  # fmt: skip
    if not found:
        raise SystemExit(f"{options.geometries}: no {options.subset}-conformers-*.npz has a way of a proton")
    print(f"{'model':24} {'kind':10} {'ways':>4}  second derivative of the force, eV/Å³: rms, median of ways, largest")
    for name in options.models:
        model = Model(name, options.device)
        for kind, chosen in kinds.items():
            if rows := [curvature(way, model) for way in chosen[: options.number]]:
                rms = np.array([np.sqrt(np.mean(row**2)) for row in rows])
                print(f"{name[-24:]:24} {kind:10} {len(rows):4d}  {np.sqrt(np.mean(rms**2)):8.0f} {np.median(rms):8.0f}"
                      f" {max(np.abs(row).max() for row in rows):8.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
