"""Stages 3 to 5 in a given time, on all GPUs of one host: labels, both trainings side by side, errors, dynamics.

    python scripts/organic/run.py work/geometries --aimnet2 aimnet2_wb97m-d3_ens.jpt --output shipped --minutes 10

The labels come first, for --label-minutes. Then `organic` is trained on all GPUs but the last, `organic-small` on the
last one, until what is left of the time is needed for the evaluation: the learning rate ends with it. What is there
already is kept, so that the same command continues: labels by file, trainings by their last state. Without GPUs
(--gpus 0) everything runs on the CPU, for a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from shards import read_shard

HERE = Path(__file__).resolve().parent
MODELS = ("organic", "organic-small")


class Runner:
    """Starts programs, one or several on each GPU.

    Args:
        gpus: how many there are; 0: the CPU.
        folder: for their output.
        began: `time.monotonic()` at the start.
    """

    def __init__(self, gpus: int, folder: Path, began: float):
        self.gpus, self.folder, self.began = gpus, folder, began
        folder.mkdir(parents=True, exist_ok=True)
        self.device = "cuda" if gpus else "cpu"

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def start(self, name: str, words: list[object], gpus: list[int], **variables: str) -> subprocess.Popen:
        """Run Python with these words on some GPUs; what it prints goes to NAME.log."""
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if self.gpus else {}
        with open(self.folder / f"{name}.log", "w") as log:
            return subprocess.Popen([sys.executable, *map(str, words)], stdout=log, stderr=subprocess.STDOUT,
                                    env={**os.environ, **shown, **variables})  # fmt: skip

    def wait(self, running: dict[str, subprocess.Popen]) -> bool:
        """Wait for all, and show the end of what each printed. Returns whether none failed."""
        good = True
        for name, process in running.items():
            code = process.wait()
            lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
            self.say(f"{name}: {'done' if code == 0 else f'FAILED with {code}'}")
            print("\n".join(f"    {line[:160]}" for line in lines[-(4 if code == 0 else 25) :]), flush=True)
            good = good and code == 0
        return good


def label(run: Runner, options: argparse.Namespace, labels: Path) -> bool:
    parts = max(1, run.gpus) * options.per_gpu
    names = {k: f"label-{k}" for k in range(parts)}
    words = [HERE / "label.py", options.geometries, labels, "--aimnet2", options.aimnet2, "--device", run.device,
             "--minutes", options.label_minutes, "--frames", options.frames, "--every", options.every,
             "--batch", 1024]  # fmt: skip
    return run.wait({
        name: run.start(name, [*words, "--part", f"{k}/{parts}"], [k % max(1, run.gpus)]) for k, name in names.items()
    })  # fmt: skip


def train(run: Runner, options: argparse.Namespace, labels: Path) -> bool:
    left = options.minutes - options.reserve - (time.monotonic() - run.began) / 60
    run.say(f"training for {left:.1f} minutes")
    running = {}
    for name in options.models:
        gpus = list(range(run.gpus))
        if len(options.models) > 1:
            gpus = gpus[-1:] if name == "organic-small" else gpus[:-1] or gpus
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", len(gpus)] if len(gpus) > 1 else []
        keys = {
            "data.train": labels / "train-*.h5",
            "data.validation": labels / "validation-*.h5",
            "data.cache": options.work / "cache",
            "training.max_epochs": 1000,
            "training.max_minutes": f"{left:.3f}",
            "output.folder": options.work / name,
            "output.report": "false",  # it would take of the time
            **dict(text.split("=", 1) for text in options.set),
        }
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        words = [*launch, "-m", "torchmdnet2", "train", HERE / f"{name}.yaml", "--resume", "auto", *sets]
        running[name] = run.start(name, words, gpus)
    return run.wait(running)


def evaluate(run: Runner, options: argparse.Namespace, labels: Path) -> bool:
    running = {}
    for k, name in enumerate(options.models):
        model = options.work / name / "best.tmn"
        if model.is_file():
            shutil.copy(model, options.output / f"{name}.tmn")
            words = [HERE / "evaluate.py", model, labels, "--subset", "test", "--device", run.device, "--json",
                     options.output / f"{name}-errors.json"]  # fmt: skip
            running[f"evaluate-{name}"] = run.start(f"evaluate-{name}", words, [k % max(1, run.gpus)])
    return run.wait(running)


def stability(run: Runner, options: argparse.Namespace) -> bool:
    """Dynamics from geometries of the test subset, as a first look: `torchmdnet2 stability` on a few of them."""
    found = [g for path in sorted(options.geometries.glob("test-conformers-*.npz")) for g in read_shard(path)]
    found = [g for g in found if 20 <= len(g.numbers) <= 60]
    chosen = found[:: max(1, len(found) // options.dynamics)][: options.dynamics]
    path = options.work / "dynamics.xyz"
    with open(path, "w") as file:
        for geometry in chosen:
            file.write(f"{len(geometry.numbers)}\nProperties=species:S:1:pos:R:3 charge={geometry.charge}\n")
            for z, (x, y, w) in zip(geometry.numbers, geometry.positions, strict=True):
                file.write(f"{_symbols()[int(z)]} {x:.4f} {y:.4f} {w:.4f}\n")
    running = {}
    for k, name in enumerate(options.models):
        words = ["-m", "torchmdnet2", "stability", options.output / f"{name}.tmn", path, "--temperatures", "300,500",
                 "--time", options.picoseconds, "--replicas", len(chosen), "--device", run.device, "--output",
                 options.work / f"stability-{name}"]  # fmt: skip
        if chosen and (options.output / f"{name}.tmn").is_file():
            running[f"stability-{name}"] = run.start(f"stability-{name}", words, [k % max(1, run.gpus)])
    return run.wait(running)


def _symbols() -> list[str]:
    from ase.data import chemical_symbols

    return chemical_symbols


def collect(run: Runner, options: argparse.Namespace) -> None:
    """Models, how they were trained, and what was printed: all in the output folder."""
    for name in options.models:
        for source, target in (("best.tmn", f"{name}.tmn"), ("metrics.csv", f"{name}-metrics.csv")):
            if (options.work / name / source).is_file():
                shutil.copy(options.work / name / source, options.output / target)
    logs = {path.stem: path.read_text(errors="replace") for path in sorted(run.folder.glob("*.log"))}
    (options.output / "logs.json").write_text(json.dumps(logs, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", type=Path, help="folder of stage 2")
    parser.add_argument("--aimnet2", required=True, help="TorchScript file of the teacher")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for labels, cache and trainings")
    parser.add_argument("--output", type=Path, required=True, help="folder for the models and their errors")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--per-gpu", type=int, default=3, help="labelling processes on each GPU")
    parser.add_argument("--minutes", type=float, default=10, help="in all")
    parser.add_argument("--label-minutes", type=float, default=1.7)
    parser.add_argument("--reserve", type=float, default=1.4, help="minutes kept for the evaluation")
    parser.add_argument("--frames", type=int, default=6, help="as of label.py")
    parser.add_argument("--every", type=int, default=40, help="as of label.py")
    parser.add_argument("--dynamics", type=int, default=64, help="molecules whose dynamics is looked at")
    parser.add_argument("--picoseconds", type=float, default=2, help="of dynamics")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change both trainings")
    options = parser.parse_args()
    run = Runner(options.gpus, options.work / "logs", time.monotonic())
    options.output.mkdir(parents=True, exist_ok=True)
    labels = options.work / "labels"
    try:
        begun = any((options.work / name / "state.safetensors").is_file() for name in options.models)
        good = begun or label(run, options, labels)  # a training goes on with the labels that it began with
        run.say(f"{len(list(labels.glob('*.h5')))} files of labels")
        good = train(run, options, labels) and good
        good = evaluate(run, options, labels) and good
        left = options.minutes - (time.monotonic() - run.began) / 60
        if options.dynamics and left > options.reserve / 4:
            good = stability(run, options) and good
    finally:
        collect(run, options)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
