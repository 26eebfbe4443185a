"""A training run from its configuration to the finished folder.

The folder holds config.yaml, splits.json, log.txt, metrics.csv, metrics.jsonl, state.safetensors (to resume from),
best.tmn (the model), and at the end metrics.json, card.md and the plots. metrics.json is written last: it marks a
finished run.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ... import checkpoint
from ...core.files import atomic_write
from ...data.sources import file_facts
from ...errors import BadCheckpoint, BadConfig
from ...potential.potential import Potential
from ..config.config import Config, config_yaml
from ..reporting.log import Tracker, TrainingLog, open_trackers, write_metrics
from ..steps.distributed import Devices
from ..steps.state import catch_signals, load_state
from ..steps.trainer import Hooks, Trainer
from .finish import describe, finish, package_versions
from .folder import BEST, DONE, HEADER, STATE, check_identity, clear, exclusive_folder, prepare, require_alike
from .setup import Setup, device_of, make_setup, require_usable
from .start import introduce, make_trainer, own_torch_state, pack_steps, run_check, take_threads

__all__ = ["run_training"]


def run_training(
    config: Config, resume: Literal["auto", "must"] | None = None, check: bool = False, log: TrainingLog | None = None
) -> Path | None:
    """Train a potential.

    Args:
        config: from `load_config`.
        resume: None starts anew and refuses a folder with an unfinished run; "auto" continues an unfinished run
            where there is one; "must" continues one or raises.
        check: only run all checks, print what is to be expected, and write nothing.
        log: where to report; default: standard output and log.txt.

    Returns:
        Path of the model file, best.tmn; None for `check`.

    Raises:
        BadConfig: the configuration does not fit the data, the device, or what is in the folder.
        FileNotFoundError, BadData: a data file is missing, or a label in it.
        TrainingDiverged: the loss is not finite.
        Interrupted: Ctrl-C or SIGTERM; the state is saved after the step that is running.
        ProcessFailed: another one of the processes that torchrun started did.
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
            atomic_write(folder / "splits.json", json.dumps(setup.splits))
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
    """Raise BadConfig when the best model of the run in the folder is gone or damaged; nothing else has its weights."""
    try:
        checkpoint.load(folder / BEST)
    except (FileNotFoundError, BadCheckpoint) as error:
        problem = "is gone" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise BadConfig(
            f"output.folder: {folder / BEST}, the best model of the run in this folder, {problem}; restore it from a "
            "copy, choose another folder, or train anew: without --resume, with output.overwrite=true"
        ) from None


def _has_best(folder: Path) -> bool:
    return any(row["best"] for row in load_state(folder / STATE)[1]["history"])


def _extended(folder: Path, config: Config) -> bool:
    """Whether the configuration asks for more epochs than the finished run in the folder had, or for more patience."""
    state = load_state(folder / STATE)[1]
    then, now = state["identity"]["config"]["training"], config.training
    if state["learning_rate"].get("time", 0.0) >= 1:  # its rate has come to its end
        return False
    if state["epoch"] < then["max_epochs"]:  # it was stopped early
        patience = now.early_stopping_patience
        return patience is None or patience > state["best"]["waited"]
    return now.max_epochs > then["max_epochs"]


class _Best:
    """The best weights so far: kept on the device, and written when the state is saved.

    A file takes longer than an epoch of a small data set.
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
    """Whether a signal asked one of the processes to stop; looked for as often as the steps are waited for."""
    with catch_signals() as signalled:
        yield devices.any(signalled, trainer.check_every)


def _time(trainer: Trainer, devices: Devices, started: float) -> Callable[[], float | None]:
    """The share of `max_minutes` that is over, as the main process has it; None in between, and without a limit.

    It counts from the first step, or on from where an earlier start ended: the schedule is of the steps alone.

    Args:
        trainer: before its first step of this start.
        devices: processes that all call the function after each step.
        started: `time.monotonic()` where this start began.
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
    with _stop(trainer, devices) as stop:
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
