"""Train variants of a recipe with several seeds on several GPUs, and measure them on hotter frames.

    python -m scripts.bench extrapolation label TRAIN.xyz DATA/NAME [--processes 16]     # make a set of hot frames
    python -m scripts.bench extrapolation run PLAN.yaml … OUTPUT --data DATA [--gpus 4] [--threads 6] [--minutes 25]
    python -m scripts.bench extrapolation teach DATA/NAME CHEAP.xyz DATA/NAME_taught MODEL.tmn …
    python -m scripts.bench extrapolation replay STRUCTURES.xyz NUMBER LABELS.h5 …

`label` makes the surrogate on which settings are chosen, so that published test frames stay unseen: the geometries
of TRAIN.xyz start GFN2-xTB dynamics at 300 K (train.xyz), 600 K and 1200 K (test_600K.xyz, test_1200K.xyz), all with
GFN2-xTB labels. A plan names a configuration, settings that all trainings share, variants and seeds; see
scripts/plans/extrapolation.yaml. Trainings are done seed by seed. Each GPU has one process with --threads trainings at
a time, each in a separate thread and stream: a step is a sequence of small kernels that leaves most of a GPU idle,
and kernels of several processes would run in turn. Weights do not depend on --threads. A training
that cannot be finished in the --minutes that are left is not begun. OUTPUT keeps a JSON file, the predictions and the
model of each training, and table.txt: errors as mean ± spread over the seeds, and those of the mean prediction of all
seeds, which tell variance from bias. A run that was cut off continues; without a GPU everything runs on the
CPU.

`teach` makes a set for a student: the 450 training frames of NAME, and the frames of CHEAP.xyz with the labels that
they have plus the mean prediction of the models, which were trained on the difference of expensive and cheap labels
(examples/teach_with_xtb.py). Its validation frames are those of NAME, which neither has seen.

`replay` draws structures from data files, at most ten of each, for `init.replay`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.io import read, write

from torchmdnet2 import Potential
from torchmdnet2.core.yaml_reader import apply_override, parse_yaml
from torchmdnet2.data import open_dataset

from .accuracy import (
    KEYS,
    VALIDATION,
    Job,
    OutOfTime,
    Tree,
    config_of,
    merged,
    number_of_frames,
    training_file,
)
from .harness import ROOT, again, shared

TEMPERATURES = {"train": (300, 500), "test_600K": (600, 160), "test_1200K": (1200, 160)}
"""File -> K, frames."""


def label(options: argparse.Namespace) -> None:
    """Make the surrogate set by examples/label_with_xtb.py."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, (temperature, frames) in TEMPERATURES.items():
        path = options.folder / f"{name}.xyz"
        if not path.is_file():
            # a part of the frames would look like all of them
            command = [ROOT / "examples/label_with_xtb.py", options.given, path.with_suffix(".part")]
            numbers = ["--frames", frames, "--temperatures", temperature, "--processes", options.processes]
            subprocess.run([sys.executable, *map(str, [*command, *numbers])], check=True)
            path.with_suffix(".part").rename(path)


def teach(options: argparse.Namespace) -> None:
    """Make the set of a student."""
    plan: Tree = {"config": "configs/acac-scratch.yaml", "sets": [options.given.name], "frames": 450}
    plan |= {"seeds": [1], "variants": {"": {}}}
    ((_, job),) = jobs_of(plan, options.given.parent, "cpu")
    job.make()
    assert job.setup is not None
    options.folder.mkdir(parents=True, exist_ok=True)
    frames = read(training_file(options.given), ":")
    drawn = {name: [frames[k] for k in job.setup.frames[name].indices] for name in ("train", "validation")}
    taught = options.folder / "taught.xyz"
    command = [ROOT / "examples/teach_with_xtb.py", "add", options.cheap, taught, *options.models]
    subprocess.run([sys.executable, *map(str, command), "--largest-spread", "1"], check=True)
    write(options.folder / "validation.xyz", drawn["validation"], format="extxyz")
    for path in options.given.glob("test*.xyz"):
        shutil.copy(path, options.folder)
    write(options.folder / "train.xyz", [*drawn["train"], *read(taught, ":")], format="extxyz")


def replay(options: argparse.Namespace) -> None:
    """Draw structures for `init.replay`: some of each of a few files, each of which holds molecules of one size."""
    rng = np.random.default_rng(0)
    drawn: list[Atoms] = []
    for k in rng.permutation(len(options.files)).tolist():
        data = open_dataset(str(options.files[k]), keys={}, cache="off")
        for index in rng.permutation(len(data))[: min(10, options.number - len(drawn))].tolist():
            system = data[index].system
            (atoms,) = system.to_ase()
            atoms.info["charge"] = int(system.charge[0])
            drawn.append(atoms)
    part = options.structures.with_suffix(".part")
    write(part, drawn, format="extxyz")
    part.rename(options.structures)
    print(f"{options.structures}: {len(drawn)} structures")


def jobs_of(plan: Tree, data: Path, device: str) -> list[tuple[str, Job]]:
    """Variant and training, seed by seed."""
    base = parse_yaml((ROOT / plan["config"]).read_text(encoding="utf-8"), plan["config"])
    jobs = []
    for seed in plan["seeds"]:
        for name in plan["sets"]:
            for variant, changes in plan["variants"].items():
                tree = merged(merged(base, plan.get("settings") or {}), changes or {})
                tree = merged(tree, {"training": {"seed": seed}})
                options = argparse.Namespace(split_seed=1, device=device)
                frames = plan["frames"] or number_of_frames(training_file(data / name))
                config = config_of(tree, data / name, frames, frames, options)
                jobs.append((f"{name}-{variant}", Job(f"{name}-{variant}-{seed}", data / name, config)))
    return jobs


def predictions(potential: Potential, path: Path) -> dict[str, np.ndarray]:
    """Energies [S] eV and forces [S·n, 3] eV/Å of all frames, and their labels."""
    data, found = open_dataset(str(path), keys=KEYS), []
    for first in range(0, len(data), 32):
        sample = data.batch(np.arange(first, min(first + 32, len(data))))
        result = potential(sample.system.to(potential.device))
        found.append((result.energy, result.forces, sample.labels["energy"], sample.labels["forces"]))
    names = ("energy", "forces", "energy_label", "forces_label")
    return {
        name: torch.cat(part).detach().cpu().numpy() for name, part in zip(names, zip(*found, strict=True), strict=True)
    }


def rms(energy: np.ndarray, forces: np.ndarray, labels: dict[str, np.ndarray]) -> list[float]:
    """Root mean squares of energies in meV and of forces in meV/Å."""
    differences = energy - labels["energy_label"], forces - labels["forces_label"]
    return [1e3 * float(np.sqrt(np.mean(d**2))) for d in differences]


def _not_taken(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[Job]:
    """Trainings that no other thread or process has begun; they belong to this one."""
    for job in jobs:
        try:
            os.close(os.open(options.output / f"{job.name}.taken", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield job


def work(options: argparse.Namespace) -> None:
    """Train in several threads, each of which takes one training after the other."""
    sys.setswitchinterval(1e-4)  # a step is 0.2 ms of Python: others need not wait 5 ms for their turn
    plans = json.loads((options.output / "plans.json").read_text())
    # before the threads start: reading a configuration draws random numbers, which belong to the process
    jobs = [job for plan in plans for _, job in jobs_of(plan, options.data, options.device)]
    lock = threading.Lock()  # torch's random numbers, and what is compiled, belong to the process
    known = [0.0]  # seconds of a step of the last training that was done

    def one(job: Job) -> None:
        with lock:
            job.make()
        assert job.trainer is not None
        needed = known[0] * job.trainer.total_steps
        if (minutes := job.config.training.max_minutes) is not None:
            needed = min(needed, 60 * minutes)
        if time.time() + needed > options.until:
            raise OutOfTime("the time that was left was too short")
        job.train(options.until, lock)
        known[0] = job.row["ms_per_step"] / 1e3
        with lock:
            job.measure(options.output)
            exact = job.trainer.average.double().eval()
            job.row["hot"] = {}
            for path in sorted(job.folder.glob("test*.xyz")):
                found = predictions(exact, path)
                job.row["hot"][path.stem] = rms(found["energy"], found["forces"], found)
                np.savez(options.output / f"{job.name}-{path.stem}.npz", **found)

    def in_turn() -> None:
        cuda = options.device.startswith("cuda")
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
            for job in _not_taken(jobs, options):
                print(f"{job.name}: begins", flush=True)
                try:
                    one(job)
                except Exception as error:  # the others go on
                    if not isinstance(error, OutOfTime):
                        traceback.print_exc()
                    job.row["error"] = f"{type(error).__name__}: {error}"[:300]
                part = options.output / f"{job.name}.part"
                part.write_text(json.dumps(job.row))
                part.rename(options.output / f"{job.name}.json")
                print(f"{job.name}: {job.row.get('error', job.row.get('hot'))}", flush=True)
                job.trainer = job.setup = job.best = None

    threads = [threading.Thread(target=in_turn) for _ in range(options.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def table(plan: Tree, data: Path, output: Path) -> str:
    """Force errors in meV/Å (energies in meV) of each variant: mean ± spread over the seeds; of the mean prediction."""
    tests = sorted({path.stem for name in plan["sets"] for path in (data / name).glob("test*.xyz")})
    lines = [f"{'':<32} {'seeds':>5} {'ms/step':>8} {'training':>20} {'validation':>20}"
             + "".join(f" {name:>22} {'of the mean':>15}" for name in tests)]  # fmt: skip
    for name in plan["sets"]:
        for variant in plan["variants"]:
            paths = [output / f"{name}-{variant}-{seed}.json" for seed in plan["seeds"]]
            rows = [json.loads(path.read_text()) for path in paths if path.is_file()]
            failed = [row["error"] for row in rows if "error" in row]
            rows = [row for row in rows if "error" not in row]
            if not rows:
                lines.append(f"{name}-{variant:<25} {failed[0] if failed else 'not done'}")
                continue
            cells = [f"{name}-{variant}"[:32].ljust(32), f"{len(rows):>5}"]
            cells.append(f"{np.mean([row['ms_per_step'] for row in rows]):>8.2f}")
            for subset in ("train", "validation"):
                own = [row["errors"][subset] for row in rows]
                energies, forces = ([errors[key] for errors in own] for key in ("energy_rmse", "forces_rmse"))
                cells.append(f"{_spread(forces, energies):>20}")
            for test in tests:
                if any(test not in row["hot"] for row in rows):  # of another set
                    cells.append(f"{'':>22} {'':>15}")
                    continue
                cells.append(
                    f"{_spread([row['hot'][test][1] for row in rows], [row['hot'][test][0] for row in rows]):>22}"
                )
                found = [np.load(output / f"{row['name']}-{test}.npz") for row in rows]
                energy, forces = (np.mean([f[key] for f in found], 0) for key in ("energy", "forces"))
                e, f = rms(energy, forces, found[0])
                cells.append(f"{f'{f:.1f} ({e:.1f})':>15}")
            lines.append(" ".join(cells) + ("" if not failed else f"  {len(failed)} failed: {failed[0]}"))
    return "\n".join(lines)


def _spread(values: list[float], others: list[float] | None = None) -> str:
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}" + (f" ({np.mean(others):.1f})" if others else "")


def run(options: argparse.Namespace) -> None:
    """Start the processes, wait for them, and print the table whenever a training has ended."""
    plans = [parse_yaml(path.read_text(encoding="utf-8"), str(path)) for path in options.plans]
    for text in options.set:
        for plan in plans:
            apply_override(plan, text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "plans.json").write_text(json.dumps(plans, indent=1))
    # finds mistakes in the plans before anything is started
    jobs = [job for plan in plans for job in jobs_of(plan, options.data, "cpu")]
    for taken in options.output.glob("*.taken"):
        row = taken.with_suffix(".json")
        if not row.is_file() or "error" in json.loads(row.read_text()):
            taken.unlink()
            row.unlink(missing_ok=True)
    gpus = options.gpus if options.gpus is not None else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    until = time.time() + 60 * options.minutes - 30
    print(f"{len(jobs)} trainings, {max(1, gpus)} × {options.threads} at a time, validated on {VALIDATION} frames")
    processes = []

    def write_tables() -> str:
        text = "\n\n".join(table(plan, options.data, options.output) for plan in plans)
        (options.output / "table.txt").write_text(text + "\n")
        return text

    for k in range(max(1, gpus)):
        # a separate queue for every stream that a training may use
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        environment["CUDA_VISIBLE_DEVICES"] = visible[k] if gpus else ""
        command = again("extrapolation", "work", options.output, "--data", options.data)
        command += ["--device", "cuda" if gpus else "cpu", "--until", str(until)]
        command += ["--threads", str(options.threads)]
        with (options.output / f"process_{k}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        seen = -1
        while any(process.poll() is None for process in processes) and time.time() < until + 60:
            time.sleep(1)
            done = len(list(options.output.glob("*-*.json")))
            if done != seen:
                seen = done
                write_tables()
    finally:
        for process in processes:
            process.terminate()
    print(write_tables())


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True)
    make = verbs.add_parser("label", help="make a set of hot frames with GFN2-xTB")
    make.add_argument("given", type=Path, help="structures to start from")
    make.add_argument("folder", type=Path)
    make.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    make.set_defaults(do=label)
    student = verbs.add_parser("teach", help="make the set of a student")
    student.add_argument("given", type=Path, help="folder of frames with expensive labels")
    student.add_argument("cheap", type=Path, help="frames with cheap labels")
    student.add_argument("folder", type=Path)
    student.add_argument("models", type=Path, nargs="+", help="of the difference")
    student.set_defaults(do=teach)
    draw = verbs.add_parser("replay", help="draw structures for init.replay")
    draw.add_argument("structures", type=Path, help="extxyz file to write")
    draw.add_argument("number", type=int)
    draw.add_argument("files", type=Path, nargs="+", help="data files, as the labels of scripts/organic")
    draw.set_defaults(do=replay)
    start = verbs.add_parser("run", help="train and measure all variants of a plan")
    start.add_argument("plans", type=Path, nargs="+", help="the trainings of the first come first")
    start.add_argument("output", type=Path)
    start.add_argument("--data", type=Path, required=True, help="folder of a folder per set")
    start.add_argument("--gpus", type=int, help="default: all that there are")
    start.add_argument("--threads", type=int, default=6, help="trainings at a time on each GPU (%(default)s)")
    shared(start, minutes=25.0)
    start.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the plans, as seeds=[1]")
    start.set_defaults(do=run)
    worker = verbs.add_parser("work", help="(what `run` starts)")
    worker.add_argument("output", type=Path)
    worker.add_argument("--data", type=Path, required=True)
    worker.add_argument("--device", default="cpu")
    worker.add_argument("--threads", type=int, default=1)
    worker.add_argument("--until", type=float, required=True)
    worker.set_defaults(do=work)


def main(options: argparse.Namespace) -> None:
    options.do(options)
