"""Train several potentials at a time on one GPU and measure them on published test frames: learning curves.

    python -m scripts.bench accuracy --data FOLDER --sets acac,3bpa,ethanol --frames 50,150,450 [--minutes 8]
        [--config configs/acac-scratch.yaml] [--set training.lr=1e-3] [--variants FILE.yaml] [--together 4]
        [--output FOLDER]

FOLDER holds a folder per set with training frames (train_300K.xyz or train.xyz, extxyz, eV and Å). The wanted number
is drawn from them, and 50 others for validation if there is no file validation.xyz. The model is chosen by
validation alone, and then measured in float64 on every file test*.xyz of the folder, and on those training frames that
were not drawn ("rest"). With fewer frames there are more epochs, so that all trainings take as many steps. VARIANTS
maps names to settings, each as in the configuration (`fast: {training: {lr: 2e-3}}`); every set is trained with each.
`--together` trainings share the GPU, each in a separate thread and stream. At the end of the time trainings stop at
their best epoch so far and are measured as well; --output keeps results.json, the models and the learning curves.
"""

from __future__ import annotations

import argparse
import copy
import json
import queue
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from torchmdnet2 import Potential, checkpoint
from torchmdnet2.core.yaml_reader import apply_override, parse_yaml
from torchmdnet2.data import open_dataset
from torchmdnet2.training.config.config import Config, parse_config
from torchmdnet2.training.reporting.evaluation import evaluate
from torchmdnet2.training.run.run import describe
from torchmdnet2.training.run.setup import Setup, make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state, pack_steps
from torchmdnet2.training.steps.batches import Frames
from torchmdnet2.training.steps.distributed import Devices
from torchmdnet2.training.steps.trainer import Hooks, Trainer

from .harness import ROOT, shared

VALIDATION = 50
KEYS = {"energy": "energy", "forces": "forces"}
GOALS = {("acac", "test_MD_300K"): "0.8 and 5.1"}
Tree = dict[str, Any]


class OutOfTime(Exception):
    """The time of the whole benchmark is over."""


def merged(base: Tree, changes: Mapping[str, Any]) -> Tree:
    """A copy of nested settings with some of them replaced."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, Mapping) and key in result else value
    return result


def training_file(folder: Path) -> Path:
    """The file that frames are drawn from."""
    for name in ("train_300K.xyz", "train.xyz"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder} holds neither train_300K.xyz nor train.xyz")


def number_of_frames(path: Path) -> int:
    return len(open_dataset(str(path), keys=KEYS))


def config_of(base: Tree, folder: Path, frames: int, most: int, options: argparse.Namespace) -> Config:
    """The configuration of one training: its frames, and its length."""
    path = training_file(folder)
    own = folder / "validation.xyz"
    drawn = 0 if own.is_file() else VALIDATION
    rest = number_of_frames(path) - frames - drawn
    if rest < 0:
        raise ValueError(f"{path} has too few frames for {frames} and {drawn} to validate")
    split = {"train": frames, "validation": drawn, "test": rest, "seed": options.split_seed}
    data: Tree = {"train": str(path), "keys": KEYS, "split": split}
    tree = {**base, "data": data if drawn else {**data, "validation": str(own)}}
    tree = merged(tree, {"training": {"device": options.device}})
    epochs = tree["training"].get("max_epochs", 300)
    tree["training"]["max_epochs"] = max(1, round(epochs * most / frames))
    return parse_config(tree)


class Job:
    """One training: made first, run in a separate thread, measured at the end."""

    def __init__(self, name: str, folder: Path, config: Config):
        self.name, self.folder, self.config = name, folder, config
        self.trainer: Trainer | None = None
        self.setup: Setup | None = None
        self.best: tuple[int, dict[str, torch.Tensor]] | None = None
        self.row: Tree = {"name": name, "set": folder.name, "settings": config.to_dict()}

    def make(self) -> None:
        """Draw frames and make weights; torch's random state is shared, so call this in one thread only."""
        with own_torch_state(self.config):
            self.setup = make_setup(self.config)
            self.trainer = make_trainer(self.setup, None)

    def train(self, until: float, lock: AbstractContextManager = nullcontext()) -> None:  # noqa: B008 (no state)
        """Train to the last epoch, or until the time is over.

        The lock is held until the first step is done: kernels are compiled, and a graph is captured.
        """
        trainer = self.trainer
        assert trainer is not None
        alone = ExitStack()
        alone.enter_context(lock)
        began, said, minutes = time.time(), [0.0], trainer.config.max_minutes

        def epoch(trainer: Trainer, row: Tree) -> None:
            if time.time() - said[0] > 20 or trainer.finished:
                said[0] = time.time()
                values = {k: v for k, v in row.items() if k.endswith("rmse") and "per" not in k}
                print(f"{self.name}: epoch {row['epoch']}/{trainer.config.max_epochs}, {_in_milli(values)}", flush=True)
            if time.time() > until:
                raise OutOfTime

        def best(trainer: Trainer) -> None:
            self.best = trainer.epoch, {name: value.clone() for name, value in trainer.average.state_dict().items()}

        def over() -> float | None:
            return minutes and (time.time() - began) / (60 * minutes)

        try:
            if (note := pack_steps(trainer, Devices())) is not None:
                print(f"{self.name}: {note}", flush=True)
            trainer.run(Hooks(step=lambda *_: alone.close(), epoch=epoch, best=best, time=over))
        except OutOfTime:
            self.row["stopped"] = f"at epoch {len(trainer.history)} of {trainer.config.max_epochs}"
        finally:
            alone.close()
        seconds = time.time() - began
        self.row |= {"seconds": seconds, "epochs": len(trainer.history), "steps": trainer.step_count}
        self.row["ms_per_step"] = 1e3 * seconds / max(1, trainer.step_count)
        self.row["history"] = trainer.history

    def measure(self, output: Path | None) -> None:
        """Errors of the best epoch."""
        trainer, setup = self.trainer, self.setup
        assert trainer is not None and setup is not None
        if self.best is None:
            raise OutOfTime("not one epoch was done")
        self.row["best_epoch"], state = self.best
        trainer.average.load_state_dict(state)
        exact = copy.deepcopy(trainer.average).double().eval()
        subsets = {name: setup.frames[name] for name in ("train", "validation") if name in setup.frames}
        if len(setup.frames.get("test", ())):
            subsets["rest"] = setup.frames["test"]
        for path in sorted(self.folder.glob("test*.xyz")):
            data = open_dataset(str(path), keys=KEYS)
            subsets[path.stem] = Frames(data, list(range(len(data))), exact.cutoff, cache_bytes=0)
        self.row["errors"] = {name: errors(exact, frames, setup) for name, frames in subsets.items()}
        if output:
            checkpoint.save(trainer.average, output / f"{self.name}.tmn", describe(setup, trainer))


def errors(potential: Potential, frames: Frames, setup: Setup) -> dict[str, float]:
    """RMSE and MAE: energy of the whole molecule in meV, forces in meV/Å."""
    found = evaluate(potential, frames, setup.properties, 64).errors
    names = {"energy": "energy", "forces": "forces"}
    row = {f"{n}_{kind}": 1e3 * found[key][kind] for n, key in names.items() for kind in ("rmse", "mae")}
    return {**row, "frames": len(frames)}


def _in_milli(values: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name.removesuffix('_rmse').replace('_', ' ')} {1e3 * value:.2f}" for name, value in values.items()
    )


def table(rows: list[Tree]) -> str:
    """RMSE (MAE) of each training on each group of frames."""
    lines = [f"{'training':<28} {'frames of':<16} {'energy / meV':>16} {'forces / meV/Å':>18}   goal"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']:<28} {row['error'][:120]}")
            continue
        for subset, e in row["errors"].items():
            numbers = [f"{e[f'{name}_rmse']:.2f} ({e[f'{name}_mae']:.2f})" for name in ("energy", "forces")]
            goal = GOALS.get((row["set"], subset), "")
            lines.append(f"{row['name']:<28} {subset:<16} {numbers[0]:>16} {numbers[1]:>18}   {goal}")
        stopped = f", stopped {row['stopped']}" if "stopped" in row else ""
        lines.append(
            f"{'':<28} best epoch {row['best_epoch']}, {row['steps']} steps in {row['seconds']:.0f} s, "
            f"{row['ms_per_step']:.2f} ms each{stopped}"
        )
    return "\n".join(lines)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Trainings in the order given: by variant, then by number of frames from the largest on, then by set."""
    base = parse_yaml(options.config.read_text(encoding="utf-8"), str(options.config))
    for text in options.set:
        apply_override(base, text)
    variants = {"": {}}
    if options.variants:
        variants = parse_yaml(options.variants.read_text(encoding="utf-8"), str(options.variants))
    numbers = sorted((int(n) for n in options.frames.split(",")), reverse=True)
    jobs = []
    for variant, changes in variants.items():
        for frames in numbers:
            for name in options.sets.split(","):
                own = merged(base, changes or {})
                label = "-".join(part for part in (name, str(frames), variant) if part)
                jobs.append(Job(label, options.data / name, config_of(own, options.data / name, frames, 450, options)))
    return jobs


def run(jobs: list[Job], options: argparse.Namespace) -> list[Tree]:
    """Run all trainings, some at a time; rows are written as soon as they are known."""
    until = time.time() + 60 * options.minutes - 15  # for the last evaluations
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    rows: list[Tree] = []
    lock = threading.Lock()

    def work() -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if options.device.startswith("cuda") else nullcontext()
        with stream:
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    if time.time() > until:
                        raise OutOfTime("the time was over before it began")
                    with lock:
                        job.make()
                    job.train(until, lock)
                    with lock:
                        job.measure(options.output)
                except Exception as error:  # the others go on
                    if not isinstance(error, OutOfTime):
                        traceback.print_exc()
                    job.row["error"] = f"{type(error).__name__}: {error}"[:300]
                with lock:
                    rows.append(job.row)
                    print(table([job.row]), flush=True)
                    if options.output:
                        (options.output / "results.json").write_text(json.dumps(rows, indent=1))
                job.trainer = job.setup = job.best = None

    threads = [threading.Thread(target=work) for _ in range(min(options.together, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder of a folder per set")
    parser.add_argument("--sets", default="acac,3bpa,ethanol")
    parser.add_argument("--frames", default="50,150,450", help="training frames; the steps are those of 450")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/acac-scratch.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `torchmdnet2 train`")
    parser.add_argument("--variants", type=Path, help="YAML or JSON file: name -> settings")
    parser.add_argument("--together", type=int, default=4, help="trainings at a time")
    parser.add_argument("--split-seed", type=int, default=1)
    shared(parser, device="cuda", minutes=30.0)
    parser.add_argument("--output", type=Path, help="folder for results and models")


def main(options: argparse.Namespace) -> None:
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    rows = run(jobs_of(options), options)
    order = {name: k for k, name in enumerate(sorted(row["name"] for row in rows))}
    print("\n" + table(sorted(rows, key=lambda row: order[row["name"]])))
