"""A training run from its configuration to the finished folder, and the runs of the members of an ensemble.

The folder holds config.yaml, splits.json, log.txt, metrics.csv, metrics.jsonl, state.safetensors (to resume from),
best.tmn (the model), and at the end metrics.json, card.md and the plots. metrics.json is written last: it marks a
finished run.
"""

from __future__ import annotations

import copy
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from ... import checkpoint
from ...core.files import atomic_write
from ...core.html_page import missing_plots
from ...data.cache import file_facts
from ...ensemble import Ensemble, write_ensemble
from ...errors import BadCheckpoint, BadConfig
from ...potential.potential import Potential
from ...version import __version__
from ..config.config import Config, config_yaml
from ..config.sections import LossConfig
from ..reporting.evaluation import Evaluation, Spread, evaluate, evaluate_ensemble
from ..reporting.log import Tracker, TrainingLog, open_trackers, write_metrics
from ..reporting.report import Report, ensemble_page, model_card, spread_picture, write_report
from ..steps.batches import Frames, measured_batches
from ..steps.distributed import Devices
from ..steps.loss import in_words, shown
from ..steps.trainer import Hooks, Trainer, catch_signals, load_state
from .fine_tuning import NOT_STATED
from .folder import (
    BEST,
    DONE,
    HEADER,
    SPLITS,
    STATE,
    check_identity,
    clear,
    exclusive_folder,
    prepare,
    protect_inputs,
    require_alike,
    require_same_splits,
)
from .levels import levels_of, require_one_level
from .setup import SUBSETS, Setup, device_of, make_setup, naming_frames, require_usable
from .start import (
    introduce,
    make_trainer,
    naming_compilation,
    own_torch_state,
    pack_steps,
    run_check,
    take_threads,
)

__all__ = [
    "describe", "evaluate_saved", "finish", "member_config", "package_versions", "run_members", "run_training",
    "unlearned",
]  # fmt: skip


def run_training(
    config: Config, resume: Literal["auto", "must"] | None = None, check: bool = False, log: TrainingLog | None = None
) -> Path | None:
    """Train a potential.

    Args:
        config: from `load_config`.
        resume: None starts a new run and refuses a folder with an unfinished one; "auto" continues an unfinished run
            if there is one; "must" continues one or raises.
        check: only run all checks, print expected times and memory, and write nothing.
        log: where to report; default: standard output and log.txt.

    Returns:
        Path of the model file, best.tmn; None for `check`.

    Raises:
        BadConfig: the configuration does not fit the data, the device, or the content of the folder.
        FileNotFoundError, BadData: a data file is missing, or a label in it.
        TrainingDiverged: the loss is not finite.
        Interrupted: Ctrl-C or SIGTERM; the state is saved after the step that is running.
        ProcessFailed: another process that torchrun started has failed.
    """
    folder = Path(config.output.folder)
    if check:
        open_trackers(config, None)
        log = log or TrainingLog(None)
        try:
            prepare(folder, config, resume)
        except BadConfig as error:
            log.say(f"note: {error}")
        run_check(config, log)
        return None
    with Devices.joined(device_of(config.training.device)) as devices, ExitStack() as held:
        if not devices.main:
            log = TrainingLog(None, Console(quiet=True))
        return _run(config, folder, resume, log, devices, held)


def _run(
    config: Config, folder: Path, resume: str | None, log: TrainingLog | None, devices: Devices, held: ExitStack
) -> Path:
    started = time.monotonic()
    require_alike(devices, {"config": config.to_dict(), "versions": package_versions()})
    with devices.together():
        if devices.main:
            prepare(folder, config, resume)  # which makes no folder
            held.enter_context(exclusive_folder(folder))
        resuming = devices.main and prepare(folder, config, resume)
        if resuming:
            require_same_splits(folder)
        finished = resuming and (folder / DONE).is_file() and not _extended(folder, config)
        if resuming and _has_best(folder):
            _require_best(folder)
        if finished:
            _require_same_files(folder)
        elif devices.main:
            open_trackers(config, None)  # what is not installed is not found out after hours
    resuming, finished = devices.agree(resuming), devices.agree(finished)
    if finished:
        (log or TrainingLog(None)).say(f"{folder} holds a finished run of this configuration: nothing to do")
        return folder / BEST
    with log or TrainingLog(folder / "log.txt") as log, own_torch_state(config):
        with devices.together():
            setup = make_setup(config)
            require_usable(setup)
            if not resuming:  # what an earlier version accepted can be continued
                require_one_level(config, setup.frames, setup.statistics)
            held.enter_context(naming_frames(setup))
            trainer = make_trainer(setup, folder / STATE if devices.main else None)
            take_threads(setup, trainer)
        require_alike(devices, {"data": setup.digests})
        if resuming:
            with devices.copy_of(folder / STATE) as state, devices.together():
                check_identity(trainer.identity, load_state(state)[1]["identity"], folder)
                trainer.restore(state)
            if devices.main:
                (folder / DONE).unlink(missing_ok=True)
        packing = pack_steps(trainer, devices)
        if devices.main and not resuming:
            clear(folder)  # not before: what would have failed by now has cost no earlier run
            atomic_write(folder / "config.yaml", HEADER + config_yaml(config))
            atomic_write(folder / SPLITS, json.dumps(setup.splits))
        introduce(setup, trainer, log)
        if packing is not None:
            log.say(packing)
        if not devices.main:
            with _stop(trainer, devices) as stop:
                trainer.run(Hooks(stop=stop, time=_time(trainer, devices, started)))
            return folder / BEST
        errors: dict[str, Any] = {}
        trackers = open_trackers(config, folder, trainer.history)
        try:
            _train(setup, trainer, folder, log, trackers, devices, started)
            if trainer.best.stop and trainer.epoch < config.training.max_epochs:
                log.say(f"stopped early, at training.early_stopping_patience; best epoch: {trainer.best.epoch + 1}")
            errors = finish(setup, trainer, folder, log)
        finally:
            for tracker in trackers:
                tracker.close(errors)
        return folder / BEST


def _require_same_files(folder: Path) -> None:
    """Raise BadConfig when data of the finished run in the folder have changed since."""
    for path, digest in load_state(folder / STATE)[1]["identity"]["data"].items():
        if Path(path).is_file() and file_facts(path)["sha256"] != digest:
            raise BadConfig(
                f"{folder} holds a finished run, and {path} was changed; choose another output.folder, "
                "or set output.overwrite=true"
            )


def _require_best(folder: Path) -> None:
    """Raise BadConfig when the best model of the run in the folder is gone or damaged: its weights are nowhere else."""
    try:
        checkpoint.load(folder / BEST)
    except (FileNotFoundError, BadCheckpoint) as error:
        problem = "is gone" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise BadConfig(
            f"output.folder: {folder / BEST}, the best model of the run in this folder, {problem}; restore it from a "
            "copy, choose another folder, or start a new training: without --resume, with output.overwrite=true"
        ) from None


def _has_best(folder: Path) -> bool:
    return any(row["best"] for row in load_state(folder / STATE)[1]["history"])


def _extended(folder: Path, config: Config) -> bool:
    """Return whether the configuration has more epochs or more patience than the finished run in the folder."""
    state = load_state(folder / STATE)[1]
    then, now = state["identity"]["config"]["training"], config.training
    if state["learning_rate"].get("time", 0.0) >= 1:  # its rate has come to its end
        return False
    if state["epoch"] < then["max_epochs"]:  # it was stopped early
        patience = now.early_stopping_patience
        return patience is None or patience > state["best"]["waited"]
    return now.max_epochs > then["max_epochs"]


class _Best:
    """Keeps the best weights so far on the device, and writes them when the state is saved.

    Writing a file takes longer than an epoch of a small data set.
    """

    def __init__(self, average: Potential):
        self._potential = copy.deepcopy(average)
        self._metadata: dict[str, Any] | None = None  # of weights that are not yet in the file

    def keep(self, average: Potential, metadata: dict[str, Any]) -> None:
        self._potential.load_state_dict(average.state_dict())
        self._metadata = metadata

    def write(self, path: Path) -> None:
        if self._metadata is not None:
            checkpoint.save(self._potential, path, self._metadata)
            self._metadata = None


@contextmanager
def _stop(trainer: Trainer, devices: Devices) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the signal to stop that one of the processes got; called when the host waits for
    steps."""
    with catch_signals() as signalled:
        yield devices.any(signalled, trainer.check_every)


def _time(trainer: Trainer, devices: Devices, started: float) -> Callable[[], float | None]:
    """Return the share of `max_minutes` that is over, in the main process; None between checks, and without a limit.

    It counts from the first step, or continues from the end of an earlier start: preparations do not count.

    Args:
        trainer: before its first step of this start.
        devices: the processes, all of which call the function after each step.
        started: `time.monotonic()` at the beginning of this start.
    """
    if trainer.config.max_minutes is None:
        return lambda: None
    calls, before, first = itertools.count(1), trainer.learning_rate.time, time.monotonic()
    left = max(started + 60 * trainer.config.max_minutes - first, 1e-9)

    def over() -> float | None:
        if next(calls) % trainer.check_every:
            return None
        share = before + (1 - before) * (time.monotonic() - first) / left
        return float(
            devices.sum(torch.tensor(share if devices.main else 0.0, dtype=torch.float64, device=devices.device))
        )

    return over


def _train(
    setup: Setup,
    trainer: Trainer,
    folder: Path,
    log: TrainingLog,
    trackers: list[Tracker],
    devices: Devices,
    started: float,
) -> None:
    def after_epoch(trainer: Trainer, row: dict[str, Any]) -> None:
        log.epoch(row, trainer.config.max_epochs)
        for tracker in trackers:
            tracker.epoch(row)
        keep(row)

    def keep(row: dict[str, Any]) -> None:
        path, every = folder / f"epoch_{row['epoch']:04d}.tmn", setup.config.output.keep_every
        if every is not None and row["epoch"] % every == 0 and not path.is_file():
            watched = row.get("validation_loss", row["train_loss"])
            facts = {"epoch": row["epoch"], "step": row["step"], "validation_loss": watched}
            checkpoint.save(trainer.average, path, {**describe(setup, trainer), "training": facts})

    best = _Best(trainer.average)

    def save(trainer: Trainer) -> None:
        write_metrics(folder, trainer.history)
        best.write(folder / BEST)

    if trainer.history and trainer.position == 0:  # killed before it was written
        keep(trainer.history[-1])
    log.start(trainer.total_steps, trainer.step_count)
    with naming_compilation(trainer, log), _stop(trainer, devices) as stop:
        hooks = Hooks(
            step=lambda t, loss: log.step(t.epoch + 1, t.step_count, loss),
            epoch=after_epoch,
            best=lambda t: best.keep(t.average, describe(setup, t)),
            save=save,
            stop=stop,
            time=_time(trainer, devices, started),
        )
        try:
            trainer.run(hooks)
        finally:  # of a run that failed as well
            save(trainer)


# --- The end of a training: errors of the saved model, its metadata, the report ---

_AT_ONCE = 64  # frames, at most
_OF_TRAINING = 2000  # frames of a level, evenly spread, where none are held out
_FEW = 8  # labels
_UNLEARNED = 0.9  # of the spread of the labels


def finish(setup: Setup, trainer: Trainer, folder: Path, log: TrainingLog) -> dict[str, Any]:
    """Evaluate the saved model, complete its metadata, write the report; metrics.json comes last.

    Returns:
        Errors by subset.
    """
    config = setup.config
    if trainer.packed is not None:
        trainer.packed.forget_graphs()  # their memory is needed
    frames = _evaluated(setup)
    evaluations = {name: evaluate_saved(folder / BEST, setup, part) for name, part in frames.items()}
    errors = {name: evaluation.errors for name, evaluation in evaluations.items()}

    best = checkpoint.load(folder / BEST)
    metadata = {**best.metadata, "errors": errors}
    checkpoint.save(best, folder / BEST, metadata)
    if config.output.report:
        report = Report(
            title=folder.name,
            history=trainer.history,
            evaluations=evaluations,
            frames={**setup.frames, **frames},
            potential=checkpoint.load(folder / BEST, device=setup.potential.device, dtype=torch.float64),
            properties=setup.properties,
            config=config.to_dict(),
            metadata=metadata,
            costs=costs(setup, trainer),
            outliers=config.output.outliers,
        )
        write_report(folder, report)
        atomic_write(folder / "card.md", model_card(best.config, metadata, title=folder.name))
    for name in evaluations:
        log.say(f"{name}: {in_words(errors[name])}")
        for note in unlearned(evaluations[name], config.training.loss.final):
            log.say(f"note: {name}: {note}")
    atomic_write(folder / DONE, json.dumps(errors, indent=1))
    if config.output.report:
        log.say(f"report: {folder / 'report.html'}{f' ({why})' if (why := missing_plots()) else ''}")
    log.say(f"model: {folder / BEST}")
    return errors


def _evaluated(setup: Setup) -> dict[str, Frames]:
    """Return the frames of final errors: of validation and test, by level of theory if there are several; those of
    training where there are no others, as of replayed structures."""
    kept = [name for name in SUBSETS[1:] if name in setup.frames]
    names = setup.potential.level_names
    if not names:
        return {name: setup.frames[name] for name in kept or ["train"]}
    found: dict[str, Frames] = {}
    for subset in kept:
        frames = setup.frames[subset]
        found |= {f"{subset}, {n}": frames.of(frames.levels == k) for k, n in enumerate(names) if k in frames.levels}
    train, _ = setup.frames["train"].once
    for k, name in enumerate(names):
        own = np.flatnonzero(train.levels == k)
        if len(own) and not any(f"{subset}, {name}" in found for subset in kept):
            found[f"train, {name}"] = train.of(own[:: -(-len(own) // _OF_TRAINING)])
    return found


def unlearned(evaluation: Evaluation, loss: LossConfig | None = None) -> Iterator[str]:
    """Yield notes about labels whose errors are as large as their spread; not about total energies without a weight in
    the loss, if it is given."""
    for name, (label, predicted) in evaluation.pairs.items():
        if name == "energy_per_atom" and loss is not None and loss.energy == 0:
            continue
        spread = float(np.sqrt(np.mean(np.square(label - label.mean())))) if len(label) else 0.0
        error = float(np.sqrt(np.mean(np.square(label - predicted)))) if len(label) else 0.0
        if len(label) >= _FEW and spread > 0 and error > _UNLEARNED * spread:
            yield (
                f"the error of {name.replace('_', ' ')} (RMSE {error:.3g}) is as large as the spread of its labels "
                f"({spread:.3g}): nothing was learned of it. Are its sign and unit right (see the notes at the "
                "start), its weight in training.loss too small, or the training too short?"
            )


def costs(setup: Setup, trainer: Trainer) -> dict[str, str]:
    """Time, speed and memory of the training, in words."""
    seconds = sum(row["seconds"] for row in trainer.history)
    epochs = max(1, len(trainer.history))
    frames, atoms = len(setup.frames["train"]), sum(setup.facts["atoms"])
    per_epoch = max(seconds / epochs, 1e-9)
    found = {
        "device": _device_name(trainer.device),
        "epochs": f"{len(trainer.history)} in {seconds:.0f} s, {per_epoch:.2f} s each",
        "steps": f"{trainer.step_count}, {1e3 * seconds / max(1, trainer.step_count):.1f} ms each",
        "throughput": f"{frames / per_epoch:.0f} frames/s, {atoms / per_epoch:.0f} atoms/s",
    }
    memory = _peak_memory(trainer.device)
    return {**found, "largest memory": f"{memory / 2**20:.0f} MiB"} if memory else found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"{device}, {threads} thread{'s' if threads > 1 else ''}"


def _peak_memory(device: torch.device) -> float:
    """Return the largest memory of the device, or on a CPU of this process, in bytes; 0 if the system does not report
    it."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if platform.system() == "Darwin" else 1024 * peak)


def evaluate_saved(path: Path, setup: Setup, frames: Frames) -> Evaluation:
    """Compute errors of the model file, in float64, so that anyone who repeats it finds the same numbers."""
    potential = checkpoint.load(path, device=setup.potential.device, dtype=torch.float64)
    if potential.level_names:  # the frames are of one
        potential = potential.at_level(potential.level_names[int(frames.levels[0])])
    # plain PyTorch in float64 needs far more memory for a frame than the steps that the batches were made for
    batches = [
        list(batch[first : first + _AT_ONCE])
        for batch in measured_batches(frames, setup.config.training)
        for first in range(0, len(batch), _AT_ONCE)
    ]
    return evaluate(
        potential,
        frames,
        setup.properties,
        batches=batches,
        num_workers=setup.config.data.num_workers,
        units=setup.config.data.units.model_dump(),
        check=False,
    )


def describe(setup: Setup, trainer: Trainer) -> dict[str, Any]:
    """Return metadata of the model file: data, settings, versions. No dates or times: equal runs give equal files."""
    config, facts, start = setup.config, setup.facts, setup.potential.metadata
    licence = config.output.licence if config.output.licence != NOT_STATED else start.get("licence", NOT_STATED)
    return {
        **start,
        "data": {
            "files": setup.digests,
            "frames": {name: len(frames.once[0]) for name, frames in setup.frames.items()},
            "split": _split_text(config),
            "level_of_theory": (config.data.levels or [config.data.level_of_theory])[0],
            **({"levels": setup.potential.level_names} if setup.potential.level_names else {}),
            "licence": config.data.licence,
            "citation": config.data.citation,
            "elements": facts["elements"],
            "charges": facts["charges"],
            "spins": facts["spins"],
            "forces_rms": facts["forces_rms"],
            **({"sources": facts["sources"]} if "sources" in facts else {}),
        },
        "licence": licence,
        "precision": config.training.precision,
        "num_parameters": sum(p.numel() for p in setup.potential.parameters()),
        "training": {
            "best_epoch": trainer.best.epoch + 1,
            "step": trainer.step_count,
            "validation_loss": trainer.best.loss,
        },
        "versions": {**package_versions(), "python": platform.python_version()},
        "config": config.to_dict(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions that the numbers of a training depend on."""
    return {"torchmdnet2": __version__, "torch": str(torch.__version__)}


def _split_text(config: Config) -> str:
    if config.data.split.file:
        return f"from {config.data.split.file}"
    return f"random, seed {config.data.split.seed}; indices in splits.json"


# --- Several members of an ensemble: the same data, different random seeds ---
#
# Every member is a separate run in `member_0`, `member_1`, … of the folder, and can be resumed as any run. When all are
# done, `ensemble.json` lists their models for `Ensemble.load`, and `ensemble_metrics.json` has the errors of their mean
# and their spread on the test frames; report.html shows both.


def member_config(config: Config, member: int, bootstrap: bool = False) -> Config:
    """Return the configuration of member 0, 1, …: another seed and folder, and with `bootstrap` another draw of
    frames."""
    seed = config.training.seed + member
    split = config.data.split.model_copy(update={"bootstrap": seed} if bootstrap else {})
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"split": split}),
            "training": config.training.model_copy(update={"seed": seed}),
            "output": config.output.model_copy(update={"folder": str(Path(config.output.folder) / f"member_{member}")}),
        }
    )


def run_members(
    config: Config,
    count: int,
    bootstrap: bool = False,
    resume: Literal["auto", "must"] | None = None,
    check: bool = False,
    log: TrainingLog | None = None,
) -> Path | None:
    """Train an ensemble, one member after the other.

    Args:
        config: of each member; the seed is that of the first.
        count: number of members, at least 2.
        bootstrap: draw each member's training frames at random, with repetition.
        resume: "auto" continues where an earlier call was interrupted; "must": each member, or fail.
        check: only check the first member.
        log: where to report; default: standard output, and log.txt of each member.

    Returns:
        Path of ensemble.json; None for `check`.

    Raises:
        BadConfig: fewer than two members, or several levels of theory; as `run_training`.
    """
    if count < 2:
        raise BadConfig(f"--members: an ensemble has at least two members, got {count}")
    if len(levels_of(config)) > 1:
        raise BadConfig(
            "--members: not possible with several levels of theory; train each model separately, with another seed"
        )
    say = (log or TrainingLog(None)).say
    if check:
        run_training(member_config(config, 0, bootstrap), check=True, log=log)
        say(f"{count} members, one after the other: {count} times as long")
        return None
    folder = Path(config.output.folder)
    paths = []
    with Devices.joined(device_of(config.training.device)) as devices:  # one group of processes for all members
        with devices.together():
            if devices.main and (folder / "state.safetensors").is_file():
                raise BadConfig(f"output.folder: {folder} holds the run of a single model; choose another folder")
            if devices.main:
                protect_inputs(folder, ("ensemble.json", "ensemble_metrics.json", "report.html"), config)
        for k in range(count):
            if devices.main:
                say(f"member {k + 1} of {count}")
            member = member_config(config, k, bootstrap)
            started = (Path(member.output.folder) / "state.safetensors").is_file()
            paths.append(run_training(member, resume=resume if started or resume == "must" else None, log=log))
        if not devices.main:
            return folder / "ensemble.json"
    return _together(config, [path for path in paths if path is not None], say)


def _together(config: Config, models: list[Path], say: Callable[[str], None]) -> Path:
    """Write the files of the ensemble: ensemble.json, ensemble_metrics.json, report.html."""
    folder = Path(config.output.folder)
    listed = write_ensemble(models, folder / "ensemble.json")
    with own_torch_state(config):
        metrics, spread = ensemble_metrics(make_setup(config), models)
    atomic_write(folder / "ensemble_metrics.json", json.dumps(metrics, indent=1))
    if config.output.report:
        alone = {
            model.parent.name: checkpoint.read_header(model)["metadata"]["errors"][metrics["subset"]]
            for model in models
        }
        units = {name: value["unit"] for name, value in metrics["spread"].items()}
        images = [
            spread_picture(error.numpy(), deviation.numpy(), name, units[name])
            for name, (error, deviation) in spread.pairs().items()
            if units.get(name) and not missing_plots()
        ]
        atomic_write(folder / "report.html", ensemble_page(folder.name, metrics, alone, images))
    say(f"mean of {len(models)} members, {metrics['subset']}: {in_words(metrics['errors'])}")
    for name, value in metrics["spread"].items():
        (spread_rms, unit), (rmse, _) = (shown(value[key], value["unit"]) for key in ("rms_spread", "rmse"))
        sizes = f"rms spread of the members {spread_rms:.3f}, RMSE of their mean {rmse:.3f} {unit}".rstrip()
        say(f"{name.replace('_', ' ')}: {sizes}; rank correlation {value['correlation']:.2f}")
    say(f"ensemble: {listed}")
    return listed


def ensemble_metrics(setup: Setup, models: list[Path]) -> tuple[dict[str, Any], Spread]:
    """Return errors of the mean of some models, and their relation to the spread of the models.

    Args:
        setup: of the run, for its frames.
        models: model files.

    Returns:
        {"subset": "test", "errors": as `ErrorSums.summary`, "spread": as `Spread.summary`, of the energy per atom and
        every other label that all members predict, "members": their files}, and errors and deviations themselves.
    """
    subset = next(name for name in ("test", "validation", "train") if name in setup.frames)
    frames, config = setup.frames[subset], setup.config
    ensemble = Ensemble.load(models, device_of(config.training.device), torch.float64, allow_untrained_charge=True)
    found = evaluate_ensemble(
        ensemble,
        frames,
        setup.properties,
        units=config.data.units.model_dump(),
        batches=measured_batches(frames, config.training),
    )
    errors, spread = found.sums[0].summary(), found.spread
    listed = [str(model) for model in models]
    return {"subset": subset, "errors": errors, "spread": spread.summary(), "members": listed}, spread
