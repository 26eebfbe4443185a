"""Distillation of models that were trained on torsion scans (large.py) into one network, see distil.yaml.

    python scripts/organic/distil.py turned work/geometries
    python scripts/organic/distil.py apart work/geometries
    python scripts/organic/distil.py ions work/geometries
    python scripts/organic/label.py work/geometries work/labels --model m0.tmn,m1.tmn --student organic --keep 1
    python scripts/organic/distil.py scans torsions.npz work/scans --model m0.tmn,m1.tmn --start organic
    torchmdnet2 train scripts/organic/distil.yaml

Scans alone teach a few hundred kinds of torsions. The teacher carries what it has learned there to others: `turned`
adds conformers with one bond turned by any angle, which `label.py` labels with all other geometries.

`apart` adds pairs of neutral molecules far from each other, for each dimer, shared proton and substitution, and the
molecules of each fourth cluster of water. `label.py` has groups of up to five geometries of the same molecules, apart
or not, so that relative energies are those of interactions and barriers.

`ions` leaves out ions alone where they are not of the kind `separated`, which `organic` labels.

`scans` writes SUBSET.h5, scans with the reference's energies, and copies.h5. The mean energy of a scan becomes that of
the model that the training starts from: the teacher's would differ by an offset of some meV an atom, larger than the
errors along the scan. Forces and charges are the teacher's. copies.h5 has two copies of each structure for training,
one displaced, one with a bond turned by a few degrees, with the teacher's energy plus what the reference differs from
it in the structure that they come from.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from ase.data import covalent_radii
from large import Scan, read_scans, subset_of
from scipy.spatial.transform import Rotation
from shards import Geometry, bonded, read_shard, seed_of, write_shard
from stretched import side
from substitutions import hangs
from teachers import Labels, Model

from torchmdnet2 import System
from torchmdnet2.data import Sample, write_hdf5
from torchmdnet2.data.labels import GROUP, kind_code

TRIES = 4  # at turning a bond without a collision
FREE = 1.35  # times the sum of covalent radii, least distance of atoms that are three bonds or more apart
DISPLACED, SMALL_ANGLES = 0.03, (4.0, 12.0)  # Å a coordinate, degrees, of copies
LARGEST_FORCE, LARGEST_SPREAD = 20.0, 1.5  # eV/Å, of copies
PARTS = 3  # groups of a scan
PAIRS = ("dimers", "substitutions", "protons")  # kinds of which `apart` has pairs
CLUSTERS = "water"
EVERY = 4  # of these clusters: groups are of five geometries
DISTANCE = 15.0  # Å between molecules: beyond all cutoffs, so that only charges interact


class Axis(NamedTuple):
    """A bond that can be turned: atoms i and j, and which atoms are on the side of j."""

    i: int
    j: int
    side: np.ndarray


def axes_of(geometry: Geometry) -> list[Axis]:
    """Bonds between heavy atoms, outside of rings, with at least one other atom at each end."""
    bonds, heavy = bonded(geometry), geometry.numbers > 1
    return [
        Axis(i, j, np.isin(np.arange(len(bonds)), side(bonds, i, j)))
        for i, j in np.argwhere(np.triu(bonds)).tolist()
        if heavy[i] and heavy[j] and min(bonds[i].sum(), bonds[j].sum()) > 1 and hangs(bonds, i, j)
    ]


def turned_by(positions: np.ndarray, axis: Axis, angle: float) -> np.ndarray:
    """Positions [n, 3] with one side turned about the bond by an angle in radians."""
    along = positions[axis.j] - positions[axis.i]
    turn = Rotation.from_rotvec(angle / np.linalg.norm(along) * along)
    found = positions.copy()
    found[axis.side] = positions[axis.j] + turn.apply(positions[axis.side] - positions[axis.j])
    return found


def _apart(geometry: Geometry, bonds: np.ndarray) -> np.ndarray:
    """Which pairs of atoms do not collide, [n, n]; atoms that are two bonds apart or nearer never do."""
    radii, count = covalent_radii[geometry.numbers], bonds.astype(int)
    distances = np.linalg.norm(geometry.positions[:, None] - geometry.positions[None], axis=2)
    near = bonds | (count @ count > 0) | np.eye(len(bonds), dtype=bool)
    return near | (distances > FREE * (radii[:, None] + radii[None]))


def with_a_bond_turned(geometry: Geometry, rng: np.random.Generator) -> Geometry | None:
    """The geometry with a random bond turned by a random angle; None if it has none, or atoms collide."""
    axes, bonds = axes_of(geometry), bonded(geometry)
    for _ in range(TRIES if axes else 0):
        positions = turned_by(geometry.positions, axes[rng.integers(len(axes))], rng.uniform(0, 2 * np.pi))
        moved = geometry._replace(positions=positions)
        if _apart(moved, bonds).all():
            return moved
    return None


def turned(options: argparse.Namespace) -> None:
    """Write, for each shard of conformers for training and validation, one with a bond of each turned."""
    count = 0
    for subset in ("train", "validation"):
        for path in sorted(options.geometries.glob(f"{subset}-conformers-*.npz")):
            rng = np.random.default_rng(seed_of("turned", path.stem))
            moved = (with_a_bond_turned(geometry, rng) for geometry in read_shard(path))
            found = [geometry for geometry in moved if geometry is not None]
            if found:
                count += write_shard(path.with_name(path.name.replace("conformers", "turned")), found)
    print(f"{count} geometries")


def pair_apart(
    pair: Geometry, molecules: Mapping[str, list[Geometry]], rng: np.random.Generator, rigid: bool
) -> Geometry | None:
    """The two molecules of a pair with DISTANCE between them; None if it is not a pair of known molecules, or if one
    has a charge: AIMNet2 spreads it over both, and the energy is below that of the two alone.

    Args:
        pair: named A.B, the atoms of A first.
        molecules: conformers by name; one of A and B must be among them.
        rng: chooses conformers.
        rigid: keep both molecules as they are. Else each is a conformer, where there is one: atoms of a pair that
            reacts are not where they are in the molecules.
    """
    names, total = pair.name.split("."), len(pair.numbers)
    if pair.charge or any(molecules[name][0].charge for name in names if name in molecules):
        return None
    known = [len(molecules[name][0].numbers) if name in molecules else 0 for name in names]
    if len(names) != 2 or not any(known):
        return None
    first = known[0] or total - known[1]
    if not 0 < first < total or (known[1] and first + known[1] != total):
        return None
    places = [pair.positions[:first], pair.positions[first:]]
    if not rigid:
        places = [
            molecules[name][rng.integers(len(molecules[name]))].positions if name in molecules else own
            for name, own in zip(names, places, strict=True)
        ]
    a, b = (place - place.mean(0) for place in places)
    along = pair.positions[first:].mean(0) - pair.positions[:first].mean(0)
    along /= np.linalg.norm(along)
    between = DISTANCE + (a @ along).max() - (b @ along).min()
    return pair._replace(positions=np.concatenate([a, b + between * along]))


def cluster_apart(cluster: Geometry) -> Geometry:
    """The molecules of a cluster of water, as they are, on a cubic lattice with DISTANCE between points.

    Args:
        cluster: named A.O.O, atoms of A first, then three of each water.
    """
    waters = cluster.name.count(".")
    molecules = np.split(cluster.positions, len(cluster.numbers) - 3 * np.arange(waters, 0, -1))
    side = round(np.ceil(len(molecules) ** (1 / 3)))
    points = DISTANCE * np.argwhere(np.ones((side, side, side)))
    return cluster._replace(
        positions=np.concatenate([x - x.mean(0) + point for x, point in zip(molecules, points, strict=False)])
    )


def apart(options: argparse.Namespace) -> None:
    """Write, for each shard of pairs and of clusters of water for training and validation, the molecules far apart."""
    count = 0
    for subset in ("train", "validation"):
        molecules: dict[str, list[Geometry]] = defaultdict(list)
        for path in sorted(options.geometries.glob(f"{subset}-conformers-*.npz")):
            for geometry in read_shard(path):
                molecules[geometry.name].append(geometry)
        for kind in PAIRS:
            for path in sorted(options.geometries.glob(f"{subset}-{kind}-*.npz")):
                rng = np.random.default_rng(seed_of("apart", path.stem))
                made = [pair_apart(pair, molecules, rng, kind == "dimers") for pair in read_shard(path)]
                found = [geometry for geometry in made if geometry is not None]
                if found:
                    count += write_shard(path.with_name(path.name.replace(kind, f"apart-{kind}")), found)
        for path in sorted(options.geometries.glob(f"{subset}-{CLUSTERS}-[!a]*.npz")):  # not those of an earlier call
            clusters = [geometry for geometry in read_shard(path) if "." in geometry.name]
            found = [cluster_apart(cluster) for cluster in clusters[::EVERY]]
            if found:
                count += write_shard(path.with_name(path.name.replace(CLUSTERS, f"{CLUSTERS}-apart")), found)
    print(f"{count} geometries")


def ions(options: argparse.Namespace) -> None:
    """Leave out, from shards of other kinds for training and validation, what has the atoms and charge of an ion that
    is alone in shards of separated ones: these are labelled by another model, and two energies of one ion differ."""

    def key(geometry: Geometry) -> tuple[int, ...]:
        return (geometry.charge, *sorted(geometry.numbers.tolist()))

    count = 0
    for subset in ("train", "validation"):
        shards = {path: list(read_shard(path)) for path in sorted(options.geometries.glob(f"{subset}-*.npz"))}
        separated = {path for path in shards if path.name.startswith(f"{subset}-separated-")}
        alone = {key(g) for path in separated for g in shards[path] if "." not in g.name}
        for path in shards.keys() - separated:
            left = [geometry for geometry in shards[path] if key(geometry) not in alone]
            if len(left) < len(shards[path]):
                count += len(shards[path]) - len(left)
                write_shard(path, left)
    print(f"{count} geometries left out")


def copies_of(scan: Scan) -> np.ndarray:
    """A displaced copy of each structure of a scan, and then one with a bond turned by a few degrees, [2 k, n, 3]."""
    rng = np.random.default_rng(seed_of("copies", scan.number))
    axes = axes_of(Geometry("", scan.z, scan.positions[0], scan.charge))
    angles = np.deg2rad(rng.uniform(*SMALL_ANGLES, len(scan.positions))) * rng.choice([-1, 1], len(scan.positions))
    moved = [
        turned_by(positions, axes[rng.integers(len(axes))], angle) if axes else positions
        for positions, angle in zip(scan.positions, angles, strict=True)
    ]
    noise = rng.standard_normal((2, *scan.positions.shape))
    return np.concatenate([scan.positions + DISPLACED * noise[0], np.array(moved) + DISPLACED / 3 * noise[1]])


def groups_of(scan: Scan, copy: int) -> np.ndarray:
    """The number of the group of each point of a scan or of a copy of it, [k]: PARTS in turn, so that a batch has
    points of several scans."""
    return np.array([kind_code(f"scan {scan.number} {copy} {k % PARTS}") for k in range(len(scan.positions))])


def samples_of(
    scan: Scan, positions: np.ndarray, energies: np.ndarray, groups: np.ndarray, labels: Labels
) -> Iterator[Sample]:
    """Structures [k, n, 3] of a scan with energies and groups [k], and forces and charges of the labels."""
    for k, (place, energy) in enumerate(zip(positions, energies, strict=True)):
        system = System(
            z=torch.as_tensor(scan.z), pos=torch.as_tensor(place), charge=torch.tensor([float(scan.charge)])
        )
        yield Sample(system, {"energy": torch.tensor([energy]), "forces": labels.forces[k].cpu().double(),
                              "charges": labels.charges[k].cpu().double(),
                              GROUP: torch.tensor([groups[k]])})  # fmt: skip


def scans(options: argparse.Namespace) -> None:
    """Write scans of training and validation, and copies of those for training, with labels."""
    teacher, start = Model(options.model, options.device), Model(options.start, options.device)
    found: dict[str, list[Sample]] = {"train": [], "validation": [], "copies": []}
    for scan in read_scans(options.scans):
        subset = subset_of(scan.smiles)
        if subset not in found:
            continue
        k = len(scan.positions)
        positions = np.concatenate([scan.positions, copies_of(scan)]) if subset == "train" else scan.positions
        count = len(positions)
        given = (
            torch.as_tensor(np.tile(scan.z, (count, 1)), device=teacher.device),
            torch.as_tensor(positions, device=teacher.device),
            torch.full((count,), float(scan.charge), device=teacher.device),
        )
        try:
            labels, own = teacher.label(*given), start.label(*(values[:k] for values in given)).energy.cpu().numpy()
        except ValueError as error:
            raise SystemExit(f"scan {scan.number}, {scan.smiles}: {error}") from None
        reference = scan.energies + np.mean(own - scan.energies)
        found[subset] += samples_of(scan, scan.positions, reference, groups_of(scan, 0), labels)
        energies = labels.energy.cpu().numpy()
        good = (labels.forces.norm(dim=2).amax(1) < LARGEST_FORCE) & (labels.spread < LARGEST_SPREAD)
        chosen = np.flatnonzero(good[k:].cpu().numpy()) + k
        corrected = energies + np.tile(reference - energies[:k], count // k)
        groups = np.concatenate([groups_of(scan, copy) for copy in range(count // k)])
        found["copies"] += samples_of(
            scan, positions[chosen], corrected[chosen], groups[chosen], Labels(*(values[chosen] for values in labels))
        )
    write_samples(options.output, found)


def write_samples(folder: Path, found: Mapping[str, list[Sample]]) -> None:
    """Write NAME.h5 for each list that is not empty, equal molecules together, and print how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, samples in found.items():
        if samples:
            write_hdf5(folder / f"{name}.h5", sorted(samples, key=lambda sample: sample.system.z.tolist()))
        print(f"{name}: {len(samples)} structures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_geometries = {"turned": turned, "apart": apart, "ions": ions}
    for verb, function in of_geometries.items():
        one = verbs.add_parser(verb, help=function.__doc__)
        one.add_argument("geometries", type=Path, help="folder of geometries.py")
    other = verbs.add_parser("scans", help=scans.__doc__)
    other.add_argument("scans", type=Path, help="torsions.npz, see large.py")
    other.add_argument("output", type=Path, help="folder")
    other.add_argument(
        "--model", required=True, help="the teacher: a .tmn file or a name; several with commas: their mean"
    )
    other.add_argument("--start", default="organic", help="the model that the training starts from")
    other.add_argument("--device", default="cpu")
    options = parser.parse_args()
    {**of_geometries, "scans": scans}[options.verb](options)


if __name__ == "__main__":
    main()
