"""Run stages 3 to 5 in a given time on the GPUs of one host: labels, trainings in turn, errors, dynamics.

    python scripts/organic/run.py work/geometries --aimnet2 aimnet2_wb97m-d3_ens.jpt --output potentials \
        --gpus 0,1 --train-gpus 1 --models organic-small=6.5 organic --minutes 27

The labels come first, on all GPUs, for --label-minutes after the first file of each process. Then the models are
trained on --train-gpus in the order and for the minutes given; the last one has what is left, less --reserve for the
evaluation. The learning rate ends with the time. Each model is evaluated when it is there, beside the next training,
and models, metrics and output are copied to --output all the time. Existing results are kept, so
that the same command continues: labels by file, trainings by their last state. Without GPUs (--gpus none) everything
runs on the CPU, for a trial.

With --init the models begin from others, and with --student models drive the dynamics of every second labelling
process, or of all. A model may have its GPUs, as in NAME=MINUTES@GPUS; --set NAME:KEY=VALUE changes the training of
one model:

        --init organic=organic organic-small=organic-small --student organic \
        --models organic=12@0,1 organic-small=6@1 --set training.precision=tf32 --set organic:training.lr=1.5e-3

WORK/NAME.done appears when WORK/NAME/best.tmn is final.
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

import h5py
from ase.data import chemical_symbols
from halve import halve
from shards import read_shard

from torchmdnet2.core.files import written_aside

HERE = Path(__file__).resolve().parent
MODELS = ("organic", "organic-small")


class Runner:
    """Starts programs, one or several on each GPU.

    Args:
        gpus: their numbers; none: the CPU.
        options: of the command line.
    """

    def __init__(self, gpus: list[int], options: argparse.Namespace):
        self.gpus, self.options, self.began = gpus, options, time.monotonic()
        self.folder = options.work / "logs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = "cuda" if gpus else "cpu"

    @property
    def left(self) -> float:
        """Minutes."""
        return self.options.minutes - (time.monotonic() - self.began) / 60

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def start(self, name: str, words: list[object], gpus: list[int], **variables: str) -> subprocess.Popen:
        """Run Python with these arguments on some GPUs; its output goes to NAME.log."""
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if self.gpus else {}
        with open(self.folder / f"{name}.log", "w") as log:
            return subprocess.Popen([sys.executable, *map(str, words)], stdout=log, stderr=subprocess.STDOUT,
                                    env={**os.environ, **shown, **variables})  # fmt: skip

    def wait(self, running: dict[str, subprocess.Popen]) -> bool:
        """Wait for all, and show the end of each output. Returns whether all succeeded."""
        good = True
        for name, process in running.items():
            while process.poll() is None:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    collect(self)
            code = process.returncode
            lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
            self.say(f"{name}: {'done' if code == 0 else f'FAILED with {code}'}")
            print("\n".join(f"    {line[:160]}" for line in lines[-(4 if code == 0 else 25) :]), flush=True)
            good = good and code == 0
        return good


def label(run: Runner, labels: Path) -> bool:
    options, gpus = run.options, run.gpus or [0]
    parts = len(gpus) * options.per_gpu
    words = [HERE / "label.py", options.geometries, labels, "--aimnet2", options.aimnet2, "--device", run.device,
             "--minutes", options.label_minutes, "--frames", options.frames, "--every", options.every,
             "--largest-force", options.largest_force, "--largest-spread", options.largest_spread,
             "--batch", options.batch, "--timestep", options.timestep, "--keep", options.keep, "--seed", options.seed,
             "--first", *options.first,
             *(["--most-frames", options.most_frames // parts] if options.most_frames else []),
             *(["--student-every", options.student_every] if options.student_every else [])]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // parts))  # more than there are cores would wait for each other
    running = {}
    for k in range(parts):
        on_gpu = k // len(gpus)
        drives = options.student and (options.student_drives == "all" or on_gpu % 2)
        turn = on_gpu if options.student_drives == "all" else on_gpu // 2
        student = ["--student", options.student[turn % len(options.student)]] if drives else []
        part = [*words, "--part", f"{k}/{parts}", *student]
        running[f"label-{k}"] = run.start(f"label-{k}", part, [gpus[k % len(gpus)]], OMP_NUM_THREADS=threads)
    return run.wait(running)


class Training:
    """The training of one model, which is started again from its last state if it fails early.

    Args:
        run: starts it.
        name: of the model.
        minutes: how long it takes, its preparations included.
        gpus: those that it runs on.
    """

    def __init__(self, run: Runner, name: str, minutes: float, gpus: list[int]):
        self.run, self.name, self.gpus, self.minutes = run, name, gpus, minutes
        self.ends = time.monotonic() + 60 * minutes
        self.process, self.starts = self._start(name), 1

    @property
    def left(self) -> float:
        """Minutes."""
        return (self.ends - time.monotonic()) / 60

    def over(self) -> bool:
        """Whether it has ended, well or not."""
        code = self.process.poll()
        if code and self.starts == 1 and self.left > 0.3 * self.minutes:
            self.gpus = self.gpus[-1:]  # what fails on several GPUs may go on one
            self.run.say(f"{self.name}: failed with {code}, starts again on one GPU")
            self.process, self.starts = self._start(f"{self.name}-again"), 2
            return False
        return code is not None

    def _start(self, log: str) -> subprocess.Popen:
        work, gpus = self.run.options.work, self.gpus
        self.run.say(f"{self.name}: training for {self.left:.1f} minutes")
        keys = {
            "data.train": work / "labels" / "train-*.h5",
            "data.validation": work / "labels" / "validation-*.h5",
            "data.cache": work / "cache",
            "training.max_epochs": 1000,
            "training.max_minutes": f"{max(self.left, 0.1):.3f}",
            "output.folder": work / self.name,
            "output.report": "false",  # it would take of the time
        }
        if self.name in self.run.options.init:  # same teacher: its reference energies are known
            keys |= {"init.file": self.run.options.init[self.name], "priors.0.energies": "keep"}
        keys |= {key: value for name, key, value in self.run.options.set if name in (None, self.name)}
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", len(gpus)] if len(gpus) > 1 else []
        words = [*launch, "-m", "torchmdnet2", "train", HERE / f"{self.name}.yaml", "--resume", "auto", *sets]
        return self.run.start(log, words, gpus)


def train(run: Runner, gpus: list[int]) -> bool:
    """Train the models in turn, and evaluate each. The next one prepares its frames while one ends."""
    waiting, training, judging = list(run.options.models), list[Training](), dict[str, subprocess.Popen]()
    good, collected = True, 0.0
    while waiting or training:
        if waiting and (not training or training[-1].left < run.options.ahead / 60):
            (name, minutes, own), left = waiting.pop(0), run.left - run.options.reserve
            minutes = left / (len(waiting) + 1) if minutes is None else minutes
            training.append(Training(run, name, minutes, own or gpus))
        for one in [one for one in training if one.over()]:
            training.remove(one)
            good = run.wait({one.name if one.starts == 1 else f"{one.name}-again": one.process}) and good
            if one.process.returncode == 0:
                (run.options.work / f"{one.name}.done").touch()
            judging |= judge(run, one.name, one.gpus[-1])
        if time.monotonic() > collected + 15:
            collect(run)
            collected = time.monotonic()
        time.sleep(0.5)
    return run.wait(judging) and good


def judge(run: Runner, name: str, gpu: int) -> dict[str, subprocess.Popen]:
    """Start the evaluation of a model, its calibration, and dynamics with molecules of the test set."""
    options, model, running = run.options, run.options.work / name / "best.tmn", {}
    if model.is_file():
        if options.half:
            halve(model, model.with_name("half.tmn"))
            model = model.with_name("half.tmn")
        found = sorted((options.work / "labels").glob("train-*.h5"))
        subsets = {"train": found[:: max(1, len(found) // 24)],
                   "validation": sorted((options.work / "labels").glob("validation-*.h5"))}  # fmt: skip
        frames = {subset: without(options.calibrate_without, files, options.work / "calibration" / subset)
                  for subset, files in subsets.items()}  # fmt: skip
        words = ["-m", "torchmdnet2", "calibrate", model, model.with_name("calibrated.tmn"), "--device", run.device,
                 "--train", *frames["train"], "--validation", *frames["validation"]]  # fmt: skip
        running[f"calibrate-{name}"] = run.start(f"calibrate-{name}", words, [gpu])
        words = [HERE / "evaluate.py", model, options.work / "labels", "--subset", options.subset, "--device",
                 run.device, "--json", options.output / f"{name}-errors.json"]  # fmt: skip
        running[f"evaluate-{name}"] = run.start(f"evaluate-{name}", words, [gpu])
        count = starts_of_dynamics(options)
        words = ["-m", "torchmdnet2", "stability", model, options.work / "dynamics.xyz", "--temperatures", "300,500",
                 "--time", options.picoseconds, "--replicas", count, "--devices", run.device, "--output",
                 options.work / f"stability-{name}"]  # fmt: skip
        if count:
            running[f"stability-{name}"] = run.start(f"stability-{name}", words, [gpu])
    return running


def without(kinds: list[str], files: list[Path], folder: Path) -> list[Path]:
    """Copies of files of labels that lack some kinds of frames; the copies that have frames."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for path in files:
        copy = folder / path.name
        with h5py.File(path) as source, written_aside(copy) as aside, h5py.File(aside, "w") as target:
            kept = [name for name in source if name not in kinds]
            for name in kept:
                source.copy(name, target)
        if any(not name.startswith("_") for name in kept):
            copies.append(copy)
    return copies


def starts_of_dynamics(options: argparse.Namespace) -> int:
    """Write some conformers of the test subset as dynamics.xyz; returns how many."""
    found = [g for path in sorted(options.geometries.glob("test-conformers-*.npz")) for g in read_shard(path)]
    found = [g for g in found if 20 <= len(g.numbers) <= 60]
    chosen = found[:: max(1, len(found) // max(1, options.dynamics))][: options.dynamics]
    with open(options.work / "dynamics.xyz", "w") as file:
        for geometry in chosen:
            file.write(f"{len(geometry.numbers)}\nProperties=species:S:1:pos:R:3 charge={geometry.charge}\n")
            for z, (x, y, w) in zip(geometry.numbers, geometry.positions, strict=True):
                file.write(f"{chemical_symbols[int(z)]} {x:.4f} {y:.4f} {w:.4f}\n")
    return len(chosen)


def collect(run: Runner) -> None:
    """Copy models, training metrics and logs to the output folder."""
    options = run.options
    for name in MODELS:
        folder = options.work / name
        kinds = ("calibrated.tmn", "half.tmn", "best.tmn")
        models = [path for path in (folder / kind for kind in kinds) if path.is_file()]
        if models:  # as calibrated where it is
            shutil.copy(models[0], options.output / f"{name}.tmn")
        if (folder / "metrics.csv").is_file():
            shutil.copy(folder / "metrics.csv", options.output / f"{name}-metrics.csv")
    logs = {path.stem: path.read_text(errors="replace") for path in sorted(run.folder.glob("*.log"))}
    (options.output / "logs.json").write_text(json.dumps(logs, indent=1))


def numbers(text: str) -> list[int]:
    return [] if text == "none" else [int(word) for word in text.split(",")]


def model_name(text: str) -> str:
    if text not in MODELS:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(MODELS)}")
    return text


def turn(text: str) -> tuple[str, float | None, list[int]]:
    """Read NAME or NAME=MINUTES, and @GPUS."""
    words, _, gpus = text.partition("@")
    name, _, minutes = words.partition("=")
    return model_name(name), float(minutes) if minutes else None, numbers(gpus) if gpus else []


def begin(text: str) -> tuple[str, str]:
    """Read NAME=MODEL."""
    name, _, model = text.partition("=")
    if not model:
        raise argparse.ArgumentTypeError(f"'{text}' should be NAME=MODEL")
    return model_name(name), model


def setting(text: str) -> tuple[str | None, str, str]:
    """Read KEY=VALUE of all trainings, or NAME:KEY=VALUE of one."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"'{text}' should be KEY=VALUE or NAME:KEY=VALUE")
    name, colon, rest = key.partition(":")
    return (model_name(name), rest, value) if colon else (None, key, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", type=Path, help="folder of stage 2")
    parser.add_argument("--aimnet2", required=True, help="TorchScript file of the teacher")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for labels, cache and trainings")
    parser.add_argument("--output", type=Path, required=True, help="folder for the models and their errors")
    parser.add_argument("--models", nargs="+", type=turn, default=[("organic-small", 8.0, []), ("organic", None, [])],
                        metavar="NAME[=MINUTES][@GPUS]", help="in this order")  # fmt: skip
    parser.add_argument("--init", nargs="+", type=begin, default=[], metavar="NAME=MODEL",
                        help="begin from a .tmn file, or from the name of a potential")  # fmt: skip
    parser.add_argument("--gpus", type=numbers, default=[0], help="GPUs of the labels, such as 0,1; none: the CPU")
    parser.add_argument("--train-gpus", type=numbers, help="GPUs of the trainings; default: --gpus")
    parser.add_argument("--per-gpu", type=int, default=3, help="labelling processes on each GPU")
    parser.add_argument("--minutes", type=float, default=30, help="in all")
    parser.add_argument("--label-minutes", type=float, default=2)
    parser.add_argument("--reserve", type=float, default=1.4, help="minutes kept for the evaluation of the last model")
    parser.add_argument("--ahead", type=float, default=45, help="seconds that a model takes to prepare its frames")
    parser.add_argument("--frames", type=int, default=3, help="as of label.py")
    parser.add_argument("--every", type=int, default=25, help="as of label.py")
    parser.add_argument("--student-every", type=int, help="as of label.py")
    parser.add_argument("--most-frames", type=int, help="stop the labels at so many; training keeps them on the GPU")
    parser.add_argument("--batch", type=int, default=384, help="as of label.py")
    parser.add_argument("--timestep", type=float, default=0.5, help="as of label.py")
    parser.add_argument("--first", nargs="*", default=[], help="as of label.py")
    parser.add_argument("--student", nargs="+", help="as for label.py; of several, the processes take one each in turn")
    parser.add_argument("--student-drives", choices=("half", "all"), default="half",
                        help="labelling processes that use it")  # fmt: skip
    parser.add_argument("--keep", type=float, default=0.5, help="as of label.py")
    parser.add_argument("--seed", type=int, default=0, help="as of label.py")
    parser.add_argument("--largest-force", type=float, default=20, help="as of label.py")
    parser.add_argument("--largest-spread", type=float, default=1.5, help="as of label.py")
    parser.add_argument("--subset", choices=("validation", "test"), default="test", help="of the errors")
    parser.add_argument("--calibrate-without", nargs="*", default=["protons", "stretched", "substitutions"],
                        metavar="KIND", help="kinds of frames that a model should warn of")  # fmt: skip
    parser.add_argument("--dynamics", type=int, default=100, help="number of molecules in the dynamics")
    parser.add_argument("--picoseconds", type=float, default=2, help="of dynamics")
    parser.add_argument("--half", action="store_true", help="weights of 16 bits: half of the size, see halve.py")
    parser.add_argument("--set", action="append", type=setting, default=[], metavar="[NAME:]KEY=VALUE",
                        help="change all trainings, or that of one model")  # fmt: skip
    options = parser.parse_args()
    options.init = dict(options.init)
    run = Runner(options.gpus, options)
    options.output.mkdir(parents=True, exist_ok=True)
    labels = options.work / "labels"
    try:
        begun = any((options.work / name / "state.safetensors").is_file() for name in MODELS)
        good = begun or label(run, labels)  # a training goes on with the labels that it began with
        run.say(f"{len(list(labels.glob('*.h5')))} files of labels")
        good = train(run, options.train_gpus or options.gpus or [0]) and good
    finally:
        collect(run)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
