"""Torsion scans for `organic-large`: AIMNet2's network, trained further on energies along torsions, see large.yaml.

    python scripts/organic/large.py pack MLFF_test_data/TorsionTest2000 torsions.npz
    python scripts/organic/distil.py scans torsions.npz work/scans --model m0.tmn,m1.tmn --start m0.tmn,m1.tmn
    python scripts/organic/label.py work/geometries work/labels --model m0.tmn,m1.tmn
    torchmdnet2 train scripts/organic/large.yaml
    python scripts/organic/large.py errors torsions.npz work/large/best.tmn aimnet2 --subset test

torsions.npz holds scans one after the other: `num_atoms`, `charge`, `energy_eV`, `scan` (number of its scan) of each
structure, `z` and `pos_half_milliangstrom` (Å · 2000, int16) of all atoms, and `smiles` of each scan. TorsionTest2000
of github.com/leifjacobson/MLFF_test_data (MIT licence, © 2025 Leif Jacobson) has ωB97X-D3BJ/def2-TZVPD energies of
2,109 scans of 24 structures; `pack` makes torsions.npz of its JSON files. All scans of a molecule, its stereoisomers
included, are in one subset.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from ase.data import atomic_numbers
from ase.units import kcal, mol
from shards import SUBSETS, seed_of

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.core.files import atomic_write, written_aside
from torchmdnet2.units import HARTREE

HELD_OUT = 0.1  # of the molecules for validation, and for test
OF_STRUCTURES = {"num_atoms": np.int16, "charge": np.int8, "energy_eV": np.float64, "scan": np.int32}  # arrays
OF_ATOMS = {"z": np.int8, "pos_half_milliangstrom": np.int16}


class Scan(NamedTuple):
    """Structures of one molecule: number, SMILES, z [n], positions [k, n, 3] in Å, energies [k] in eV, charge in e."""

    number: int
    smiles: str
    z: np.ndarray
    positions: np.ndarray
    energies: np.ndarray
    charge: int


def subset_of(smiles: str) -> str:
    """The subset of a molecule, the same for its stereoisomers."""
    place = seed_of("torsions", smiles.translate(str.maketrans("", "", "@/\\"))) / 2**31
    return SUBSETS[1] if place < HELD_OUT else SUBSETS[2] if place < 2 * HELD_OUT else SUBSETS[0]


def pack(options: argparse.Namespace) -> None:
    """Write a folder of JSON files, each a list of the structures of a scan, as torsions.npz."""
    content: dict[str, list] = {name: [] for name in (*OF_STRUCTURES, *OF_ATOMS, "smiles")}
    for k, path in enumerate(sorted(options.folder.glob("*.json"))):
        try:
            scan = json.loads(path.read_text(encoding="utf-8"))
            content["smiles"].append(scan[0]["smiles"])
            for row in scan:
                z, positions = [atomic_numbers[symbol] for symbol in row["elements"]], np.array(row["coordinates"])
                content["num_atoms"].append(len(z))
                content["charge"].append(row["charge"])
                content["energy_eV"].append(row[f"E[{options.method}](Ha)"] * HARTREE)
                content["scan"].append(k)
                content["z"] += z
                content["pos_half_milliangstrom"] += np.rint(2000 * (positions - positions.mean(0))).tolist()
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise SystemExit(f"{path} is not a scan: {type(error).__name__} {error}") from None
    if not content["smiles"]:
        raise SystemExit(f"{options.folder} has no JSON files")
    if np.abs(content["pos_half_milliangstrom"]).max() > np.iinfo(np.int16).max:
        raise SystemExit(f"{options.folder} has a structure larger than 32 Å")
    with written_aside(options.output) as file:
        np.savez_compressed(
            file, **{name: np.array(rows, (OF_STRUCTURES | OF_ATOMS).get(name)) for name, rows in content.items()}
        )
    print(f"{len(content['smiles'])} scans, {len(content['scan'])} structures")


def read_scans(path: Path) -> Iterator[Scan]:
    """The scans of a file; what is wrong with it ends the program."""
    try:
        with np.load(path, allow_pickle=False) as data:
            content = {name: data[name] for name in (*OF_STRUCTURES, *OF_ATOMS, "smiles")}
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    sizes, number, smiles = content["num_atoms"].astype(np.int64), content["scan"].astype(np.int64), content["smiles"]
    for names, length in ((OF_STRUCTURES, len(sizes)), (OF_ATOMS, sizes.sum())):
        for name in names:
            if len(content[name]) != length:
                raise SystemExit(f"{path}: {name} has {len(content[name])} rows, and num_atoms asks for {length}")
    starts = np.flatnonzero(np.diff(number, prepend=number[:1] - 1))
    if len(np.unique(number[starts])) != len(starts):
        raise SystemExit(f"{path}: the structures of a scan do not follow each other")
    if len(starts) and not 0 <= number.min() <= number.max() < len(smiles):
        raise SystemExit(f"{path}: scans are numbered {number.min()} to {number.max()}, and smiles has {len(smiles)}")
    first = np.cumsum(sizes) - sizes
    for rows in np.split(np.arange(len(sizes)), starts[1:]) if len(starts) else ():
        k, n = number[rows[0]], sizes[rows[0]]
        atoms = slice(first[rows[0]], first[rows[-1]] + sizes[rows[-1]])
        energies, charges = content["energy_eV"][rows], content["charge"][rows]
        z = content["z"][atoms].astype(np.int64)
        if (sizes[rows] != n).any() or (z != np.tile(z[:n], len(rows))).any() or (charges != charges[0]).any():
            raise SystemExit(f"{path}: the structures of scan {k} have different atoms or charges")
        if not np.isfinite(energies).all():
            raise SystemExit(f"{path}: an energy of scan {k} is not finite")
        positions = content["pos_half_milliangstrom"][atoms].reshape(-1, n, 3) / 2000
        yield Scan(int(k), str(smiles[k]), z[:n], positions, energies, int(charges[0]))


def evaluator_of(name: str, device: str) -> Evaluator:
    """A model by its file or name; one that cannot be loaded ends the program."""
    try:
        return Evaluator(load(name, device), graphs=False)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


def energies_of(evaluator: Evaluator, scan: Scan, device: str) -> np.ndarray:
    """Energies of the structures of a scan by a model, [k] eV; a scan that it refuses ends the program."""
    count, n = scan.positions.shape[:2]
    system = System(
        z=torch.as_tensor(np.tile(scan.z, count)),
        pos=torch.as_tensor(scan.positions.reshape(-1, 3)),
        batch=torch.arange(count).repeat_interleave(n),
        charge=torch.full((count,), float(scan.charge), dtype=torch.float64),
    )
    try:
        return evaluator(system.to(device=torch.device(device)), forces=False).energy.cpu().numpy()
    except ValueError as error:
        raise SystemExit(f"scan {scan.number}, {scan.smiles}: {error}") from None


def errors_of(evaluators: list[Evaluator], scan: Scan, device: str) -> tuple[float, float]:
    """Errors of a scan by the mean of the evaluators' energies, in kcal/mol: mean |ΔE − ΔE_ref| relative to the
    reference's lowest point, and that of highest − lowest energy."""
    computed = np.mean([energies_of(evaluator, scan, device) for evaluator in evaluators], 0)
    lowest = int(scan.energies.argmin())
    profile = np.abs((computed - computed[lowest]) - (scan.energies - scan.energies[lowest])).mean()
    barrier = abs(np.ptp(computed) - np.ptp(scan.energies))
    return float(profile) / (kcal / mol), float(barrier) / (kcal / mol)


def errors(options: argparse.Namespace) -> None:
    """Print mean absolute errors of models on the scans of a subset."""
    if options.every < 1:
        raise SystemExit("--every: take 1 for all scans, 2 for every second one")
    scans = [scan for scan in read_scans(options.scans) if subset_of(scan.smiles) == options.subset][:: options.every]
    if not scans:
        raise SystemExit(f"{options.scans} has no molecule of the subset {options.subset}")
    evaluators = {  # all at once: a wrong name is found before the first is evaluated
        model: [evaluator_of(name, options.device) for name in model.split(",")] for model in options.models
    }
    print(f"{len(scans)} scans, {options.subset}; kcal/mol\n{'model':40s} {'profile':>8s} {'barrier':>8s}")
    found = {}
    for model, members in evaluators.items():
        rows = np.array([errors_of(members, scan, options.device) for scan in scans])
        profile, barrier = rows.mean(0).tolist()
        found[model] = {"scans": len(scans), "profile": profile, "barrier": barrier}
        print(f"{model:40s} {profile:8.3f} {barrier:8.3f}", flush=True)
    if options.json:
        atomic_write(options.json, json.dumps({"subset": options.subset, "errors": found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    zero = verbs.add_parser("pack", help=pack.__doc__)
    zero.add_argument("folder", type=Path, help="folder of the JSON files, such as MLFF_test_data/TorsionTest2000")
    zero.add_argument("output", type=Path, help="torsions.npz")
    zero.add_argument("--method", default="wB97X-D3BJ/def2-TZVPD", help="of the energies, as the files name it")
    other = verbs.add_parser("errors", help=errors.__doc__)
    other.add_argument("scans", type=Path, help="torsions.npz")
    other.add_argument("models", nargs="+", help=".tmn files or names; several with commas: their mean")
    other.add_argument("--subset", choices=SUBSETS, default="validation", help="choose models on validation")
    other.add_argument("--every", type=int, default=1, help="take every n-th scan")
    other.add_argument("--json", type=Path)
    other.add_argument("--device", default="cpu")
    options = parser.parse_args()
    {"pack": pack, "errors": errors}[options.verb](options)


if __name__ == "__main__":
    main()
