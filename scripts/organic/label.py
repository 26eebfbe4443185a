"""Stage 3: labels of the teacher, with short dynamics from every geometry. Can be resumed file by file.

    python scripts/organic/label.py work/geometries work/labels --aimnet2 aimnet2_wb97m-d3_ens.jpt --device cuda

Each geometry is labelled, and then moves by Langevin dynamics at a random temperature: 300, 500, 700 or 1000 K for
training, 300 or 600 K for validation and test. A frame is labelled every few steps. Structures of equal size
are evaluated together, also from different shards: their labels are in one HDF5 file, SUBSET-SIZE-NUMBER.h5, which
`torchmdnet2 train` reads. Frames of a molecule, of at most GROUP geometries, have a number in common, `group`: their
relative energies can be trained (keys: {group: group}, loss: {relative_energy: 2}). Frames with forces above
--largest-force, with atoms nearer than NEAREST, or where the teacher's networks disagree by more than --largest-spread,
are left out and counted. A
larger spread is worth while for training frames: an inaccurate repulsive wall is better than none.

With --student MODEL.tmn the student drives the dynamics of training frames (active learning): of the frames that it
runs into, the --keep share is kept where student and teacher disagree most. Frames of validation and test are always
made in one way (teacher, steps of 0.5 fs, seed 0, three frames at most, a spread of 1.5 eV/Å at most), so that errors
of different runs compare.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from ase.data import atomic_masses
from shards import Geometry, keep_settings, read_shard, seed_of
from teachers import GFN2, AIMNet2, Labels, Model, Student, Teacher
from torch import Tensor

from torchmdnet2.core.files import written_aside
from torchmdnet2.data.labels import kind_code

TEMPERATURES = (300.0, 500.0, 700.0, 1000.0)  # K, of training frames
SAME = dict.fromkeys(("turned", "shifts"), "conformers")  # in groups
SAME |= dict.fromkeys(("dimers", "substitutions", "protons", "apart"), "pairs")
GROUP = 5  # most geometries of a molecule whose frames are in one group: a batch should have many molecules
NEAREST = 0.5  # Å, between atoms; there a teacher may give an energy as for bonded ones
HELD_OUT = (300.0, 600.0)  # of validation and test frames
TIMESTEP, FRICTION = 0.5, 0.02  # fs, 1/fs
HELD_OUT_FRAMES = 3  # of the dynamics from a geometry, at most
HELD_OUT_SPREAD = 1.5  # eV/Å, largest spread of the teacher's networks
BOLTZMANN = 8.617333262e-5  # eV/K
ACCELERATION = 9.64853321e-3  # Å/fs² of 1 eV/Å on 1 u
Frames = tuple[Tensor, Labels, Tensor]
"""positions [B, n, 3] Å, labels, whether to keep each [B]."""


class Sampler:
    """Dynamics and labels of structures with equal numbers of atoms.

    Args:
        teacher: gives the labels.
        student: drives the dynamics; None: the teacher does.
        options: of the command line.
    """

    def __init__(self, teacher: Teacher, student: Student | None, options: argparse.Namespace):
        self.teacher, self.student, self.options = teacher, student, options
        self.left_out: dict[str, int] = defaultdict(int)

    def frames(
        self, geometries: list[Geometry], temperatures: Sequence[float], seed: int, held_out: bool = False
    ) -> Iterator[Frames]:
        """The geometries, then frames of dynamics from each at one of the temperatures in K.

        A structure with a force of three times the largest accepted one stops, and gives no more frames.
        """
        device = self.teacher.device  # type: ignore[attr-defined]
        self.largest_spread = HELD_OUT_SPREAD if held_out else self.options.largest_spread
        generator = torch.Generator(device).manual_seed(seed)
        numbers = torch.as_tensor(np.array([g.numbers for g in geometries]), device=device)
        charge = torch.tensor([float(g.charge) for g in geometries], device=device)
        positions = torch.as_tensor(np.array([g.positions for g in geometries]), device=device)
        first = self._labelled(numbers, positions, charge)
        yield first
        too_large = 3 * self.options.largest_force
        alive = torch.isfinite(first[1].energy) & (first[1].forces.abs().amax((1, 2)) < too_large)
        count = min(self.options.frames, HELD_OUT_FRAMES) if held_out else self.options.frames
        if not count or not bool(alive.any()):
            return
        numbers, charge, positions = numbers[alive], charge[alive], positions[alive]
        self.alive = alive.cpu()
        mass = torch.as_tensor(atomic_masses, device=device)[numbers][:, :, None]
        pick = torch.randint(len(temperatures), (len(numbers),), generator=generator, device=device)
        thermal = (BOLTZMANN * torch.tensor(temperatures, device=device)[pick].double())[:, None, None]
        width = (thermal * ACCELERATION / mass).sqrt()  # of the velocities, Å/fs

        def noise() -> Tensor:
            return torch.randn(positions.shape, generator=generator, dtype=torch.float64, device=device)

        engine: Any = self.teacher if held_out else self.student or self.teacher
        timestep = TIMESTEP if held_out else self.options.timestep
        between = (engine is self.student and self.options.student_every) or self.options.every
        every = max(1, round(between * TIMESTEP / timestep))

        def pushed(moving: Tensor) -> tuple[Tensor, Tensor]:
            """Forces, 0 on structures that have stopped, and which structures still move: one that explodes must not
            harm others."""
            forces = engine.forces(numbers, positions, charge).double()
            moving = moving & (forces.abs().amax((1, 2)) < too_large)  # not of NaN either
            return torch.where(moving[:, None, None], forces, 0.0), moving

        # near a minimum, half of the kinetic energy becomes potential energy: twice the temperature at the start
        velocity = 2**0.5 * width * noise()
        forces, moving = pushed(torch.ones_like(pick, dtype=torch.bool))
        keep = float(np.exp(-FRICTION * timestep))
        for step in range(1, count * every + 1):
            # BAOAB: B. Leimkuhler, C. Matthews, Appl. Math. Res. Express 2013, 34
            last = positions
            velocity = velocity + timestep / 2 * ACCELERATION * forces / mass
            positions = positions + timestep / 2 * velocity
            velocity = keep * velocity + (1 - keep**2) ** 0.5 * width * noise()
            positions = torch.where(moving[:, None, None], positions + timestep / 2 * velocity, last)
            forces, moving = pushed(moving)
            velocity = velocity + timestep / 2 * ACCELERATION * forces / mass
            if step % every == 0:
                yield self._labelled(numbers, positions, charge, moving, None if held_out else forces)

    def _labelled(
        self,
        numbers: Tensor,
        positions: Tensor,
        charge: Tensor,
        moving: Tensor | None = None,
        student: Tensor | None = None,
    ) -> Frames:
        labels = self.teacher.label(numbers, positions, charge)
        largest = labels.forces.norm(dim=2).amax(1)
        apart = (positions[:, :, None] - positions[:, None]).norm(dim=3)
        apart.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        tests = {
            "ran away": torch.zeros_like(largest, dtype=torch.bool) if moving is None else ~moving,
            "not finite": ~torch.isfinite(labels.energy) | ~torch.isfinite(largest),
            "atoms at one place": ~(apart.amin((1, 2)) > NEAREST),
            "large forces": ~(largest < self.options.largest_force),
            "teacher is uncertain": ~(labels.spread < self.largest_spread),
        }
        if self.student is not None and student is not None:
            error = (student - labels.forces).norm(dim=2).amax(1).masked_fill(tests["ran away"], torch.nan)
            tests["student is right"] = ~(error >= error.nanquantile(1 - self.options.keep))
        good = torch.ones_like(largest, dtype=torch.bool)
        for reason, bad in tests.items():
            self.left_out[reason] += int((good & bad).sum())
            good = good & ~bad
        return positions, labels, good


class Job(NamedTuple):
    """Geometries of equal size and of one subset, each with its kind and the number of its group, if there are groups;
    name: of the file of their labels."""

    name: str
    geometries: list[Geometry]
    kinds: list[str]
    groups: Sequence[float] = ()


def jobs_of(folder: Path, batch: int, seed: int, first: Sequence[str] = ()) -> list[Job]:
    """All geometries of a folder in batches of equal sizes, the small subsets first and then in random order.

    Kinds in `first` come before the others of their size, and the jobs of training with them before other jobs.

    Args:
        folder: of the shards.
        batch: most structures of 32 atoms in a job; more of smaller ones.
        seed: of the order.
        first: kinds of training frames to begin with, if the time may not be enough for all.
    """
    found: dict[tuple[str, int], list[tuple[str, Geometry, str]]] = defaultdict(list)
    for path in sorted(folder.glob("*.npz")):
        subset, kind = path.stem.split("-")[:2]
        for k, geometry in enumerate(read_shard(path)):
            found[subset, len(geometry.numbers)].append((f"{path.stem} {k}", geometry, kind))
    jobs = []
    for (subset, size), placed in found.items():
        placed.sort(key=lambda row: seed_of("row", _seed(subset, seed), row[0]))
        groups = groups_of((geometry, kind) for _, geometry, kind in placed)
        rows = [(geometry._replace(name=place), kind, group)
                for (place, geometry, kind), group in zip(placed, groups, strict=True)]  # fmt: skip
        early = subset == "train" and any(kind in first for _, kind, _ in rows)
        if early:
            rows.sort(key=lambda row: row[1] not in first)
        count = -(-len(rows) * max(size, 8) // (32 * batch))  # equal ones: few structures are no work for a GPU
        for k in range(count):
            chosen = rows[k::count] if not early else rows[k * len(rows) // count : (k + 1) * len(rows) // count]
            jobs.append(Job(f"{subset}-{size:03d}-{k:04d}", *map(list, zip(*chosen, strict=True))))

    def place(job: Job) -> tuple[bool, bool, int]:
        train = job.name.startswith("train")
        return train, train and not set(first) & set(job.kinds), seed_of("job", seed, job.name)

    return sorted(jobs, key=place)


def groups_of(geometries: Iterable[tuple[Geometry, str]]) -> Iterator[float]:
    """The number of the group of each geometry with its kind: geometries of one molecule and of one kind, or of one
    pair of molecules. Energies of a pair are relative to those of its molecules apart, see distil.py."""
    counts: Counter[tuple] = Counter()
    for geometry, kind in geometries:
        key = (SAME.get(kind, kind), geometry.name, geometry.charge, tuple(sorted(geometry.numbers.tolist())))
        yield kind_code(f"{key} {counts[key] // GROUP}")
        counts[key] += 1


def _seed(subset: str, seed: int) -> int:
    """Held-out frames do not depend on the seed."""
    return seed if subset == "train" else 0


def label_job(job: Job, target: Path, sampler: Sampler) -> int:
    """Label a job and write it, one group for each kind; the layout is TorchMD-Net's. Returns the number of frames.

    If all frames are left out, an empty file SUBSET-SIZE-NUMBER.none is written: training refuses HDF5 without frames.
    """
    subset = job.name.split("-")[0]
    temperatures = sampler.options.temperatures if subset == "train" else HELD_OUT
    seed = seed_of(_seed(subset, sampler.options.seed), job.name)
    found = list(sampler.frames(job.geometries, temperatures, seed, held_out=subset != "train"))
    rows = torch.arange(len(job.geometries))
    owners = torch.cat([rows if k == 0 else rows[sampler.alive] for k, _ in enumerate(found)]).numpy()
    good = torch.cat([keep for _, _, keep in found]).cpu().numpy()
    if not good.any():
        target.with_suffix(".none").touch()
        return 0
    arrays = {
        "pos": (torch.cat([p for p, _, _ in found]), np.float32, "angstrom"),
        "energy": (torch.cat([labels.energy for _, labels, _ in found]), np.float64, "eV"),
        "forces": (torch.cat([labels.forces for _, labels, _ in found]), np.float32, "eV/angstrom"),
        "partial_charges": (torch.cat([labels.charges for _, labels, _ in found]), np.float32, "e"),
    }
    on_host = {key: (value.cpu().numpy().astype(dtype), unit) for key, (value, dtype, unit) in arrays.items()}
    types = np.array([g.numbers for g in job.geometries], np.int16)
    charge, kinds = np.array([g.charge for g in job.geometries], np.int16), np.array(job.kinds)
    with written_aside(target) as aside, h5py.File(aside, "w") as file:
        for kind in sorted(set(job.kinds)):
            chosen = good & (kinds[owners] == kind)
            if chosen.any():
                group = file.create_group(kind)
                group["types"], group["charge"] = types[owners[chosen]], charge[owners[chosen]]
                if job.groups:
                    group["group"] = np.array(job.groups)[owners[chosen]]
                for key, (values, unit) in on_host.items():
                    group.create_dataset(key, data=values[chosen]).attrs["units"] = np.bytes_(unit)
        settings = {"teacher": sampler.teacher.description, "level_of_theory": sampler.teacher.level}
        if sampler.student is not None and subset == "train":
            settings |= {"dynamics": sampler.student.description, "student_sha256": sampler.student.sha256}
        facts = {**settings, "frames": int(good.sum()), "left_out": sampler.left_out}
        file.create_group("_metadata").attrs["json"] = json.dumps(facts)
    return int(good.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", type=Path)
    parser.add_argument("output", type=Path)
    teacher = parser.add_mutually_exclusive_group(required=True)
    teacher.add_argument("--aimnet2", help="TorchScript file of an AIMNet2 ensemble")
    teacher.add_argument("--gfn2", action="store_true", help="GFN2-xTB, for a trial on the CPU")
    teacher.add_argument("--model", help="a .tmn file or the name of a potential")
    parser.add_argument("--student", help="a .tmn file that drives the dynamics of training frames")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the student's frames, the most wrong ones")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="0/1", help="i/n: of n processes this is the i-th, from 0 on")
    parser.add_argument("--frames", type=int, default=6, help="of the dynamics, from each geometry")
    parser.add_argument("--every", type=int, default=40, help="times 0.5 fs between frames")
    parser.add_argument("--student-every", type=int, help="the same, where the student drives; default: --every")
    parser.add_argument("--timestep", type=float, default=TIMESTEP, help="fs, of training frames")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES, help="K, of training frames")
    parser.add_argument("--largest-force", type=float, default=30.0, help="eV/Å")
    parser.add_argument("--largest-spread", type=float, default=1.5, help="eV/Å, of the teacher's networks")
    parser.add_argument("--batch", type=int, default=512, help="structures of 32 atoms at a time")
    parser.add_argument("--first", nargs="*", default=[], help="kinds of training geometries to begin with")
    parser.add_argument("--most-frames", type=int, help="begin no file after so many frames; default: make all")
    parser.add_argument("--minutes", type=float, help="begin no file so long after the first; default: make all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ends = math.inf
    torch.set_default_dtype(torch.float32)
    chosen: Teacher = (
        Model(options.model, options.device)
        if options.model
        else GFN2()
        if options.gfn2
        else AIMNet2(options.aimnet2, options.device)
    )
    student = Student(options.student, options.device) if options.student else None
    names = ("frames", "every", "timestep", "keep", "largest_force", "largest_spread", "batch", "seed")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"teacher": chosen.description, "teacher_sha256": chosen.sha256}
    if options.first:  # it decides which geometries are in one file
        settings["first"] = options.first
    if options.student_every:
        settings["student_every"] = options.student_every
    if options.temperatures != TEMPERATURES:
        settings["temperatures"] = options.temperatures
    keep_settings(options.output, "labels", settings, ["torch", "numpy", "h5py", "tblite"])
    part, parts = map(int, options.part.split("/"))
    left_out: Counter[str] = Counter()
    frames = files = 0
    for job in jobs_of(options.geometries, options.batch, options.seed, options.first)[part::parts]:
        target = options.output / f"{job.name}.h5"
        if time.monotonic() > ends:
            print(f"part {options.part}: the time is up; run the same command again for the rest", flush=True)
            break
        if options.most_frames is not None and frames >= options.most_frames:
            print(f"part {options.part}: there are enough frames", flush=True)
            break
        if not target.exists() and not target.with_suffix(".none").exists():
            sampler = Sampler(chosen, student, options)
            frames, files = frames + label_job(job, target, sampler), files + 1
            left_out.update(sampler.left_out)
            if files == 1 and options.minutes is not None:  # it may compile kernels for a minute
                ends = time.monotonic() + 60 * options.minutes
    print(f"part {options.part}: {frames} frames in {files} files; left out: {dict(left_out)}", flush=True)


if __name__ == "__main__":
    main()
