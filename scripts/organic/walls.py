"""Where a student lacks walls: its energy along stretched bonds beside the teacher's.

    python scripts/organic/walls.py organic work/geometries --aimnet2 aimnet2_wb97m-d3_ens.jpt

In each of some conformers one bond of hydrogen to N, O or S, one C–H bond and two bonds of heavy atoms are stretched,
with the atoms beyond them; none in a ring. A hole is a place where the student is more than 1 eV below the teacher.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from shards import Geometry, bonded, read_shard
from stretched import side
from teachers import GFN2, AIMNet2, Student, Teacher

STRETCH = np.array([1.0, 1.2, 1.35, 1.5, 1.65, 1.8, 2.0])  # times the length
WANTED = {"N–H, O–H, S–H": 1, "C–H": 1, "heavy atoms": 2}  # of each conformer, at most
HOLE = 1.0  # eV


def scans(geometry: Geometry, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Kinds of bonds, each with its stretched positions [len(STRETCH), n, 3]."""
    bonds, z, left = bonded(geometry), geometry.numbers, dict(WANTED)
    for a, b in rng.permutation(np.argwhere(np.triu(bonds))).tolist():
        heavy, hydrogen = sorted((int(z[a]), int(z[b])), reverse=True)
        kind = "heavy atoms" if hydrogen > 1 else "C–H" if heavy == 6 else "N–H, O–H, S–H"
        moved = side(bonds, a, b)
        beyond = np.isin(np.arange(len(z)), moved)
        if left[kind] and heavy > 1 and (bonds[beyond][:, ~beyond].sum() == 1):  # not in a ring
            left[kind] -= 1
            positions = np.repeat(geometry.positions[None], len(STRETCH), 0)
            along = geometry.positions[b] - geometry.positions[a]
            positions[:, moved] += (STRETCH - 1)[:, None, None] * along
            yield kind, positions


def differences(geometry: Geometry, positions: np.ndarray, teacher: Teacher, student: Student) -> np.ndarray:
    """Energies of the teacher and of the student along a scan, both from its first point, [2, len(STRETCH)] eV."""
    count = len(positions)
    numbers = torch.as_tensor(geometry.numbers).repeat(count, 1)
    charge = torch.full((count,), float(geometry.charge))
    places = torch.as_tensor(positions)
    found = teacher.label(numbers, places, charge).energy, student.energies(numbers, places, charge)
    energies = np.stack([energy.double().cpu().numpy() for energy in found])
    return energies - energies[:, :1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", help="a .tmn file, or the name of a potential")
    parser.add_argument("geometries", type=Path, help="folder of stage 2")
    parser.add_argument("--aimnet2", help="TorchScript file of the teacher; default: GFN2-xTB")
    parser.add_argument("--subset", default="validation")
    parser.add_argument("--molecules", type=int, default=80, help="number of conformers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float32)
    teacher = AIMNet2(options.aimnet2, options.device) if options.aimnet2 else GFN2()
    student, rng = Student(options.student, options.device), np.random.default_rng(options.seed)
    paths = sorted(options.geometries.glob(f"{options.subset}-conformers-*.npz"))
    geometries = [geometry for path in paths for geometry in read_shard(path)]
    found = defaultdict(list)
    for k in rng.permutation(len(geometries))[: options.molecules]:
        for kind, positions in scans(geometries[k], rng):
            found[kind].append(differences(geometries[k], positions, teacher, student))
    print(f"{'bonds':16} {'number':>6}  length ×  teacher, eV  student − teacher, eV: mean, sd  holes")
    for kind, rows in found.items():
        energies = np.array(rows)
        error = energies[:, 1] - energies[:, 0]
        for k, stretch in enumerate(STRETCH[1:], 1):
            off, holes = error[:, k], np.mean(error[:, k] < -HOLE)
            print(f"{kind:16} {len(rows):6d}  {stretch:8.2f}  {np.median(energies[:, 0, k]):11.2f}"
                  f"  {off.mean():27.2f}, {off.std():4.2f}  {holes:5.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
