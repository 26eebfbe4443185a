"""A training run from its configuration to the finished folder.

The folder holds config.yaml, splits.json, log.txt, metrics.csv, metrics.jsonl, state.safetensors (to resume from),
best.tmn (the model), and at the end metrics.json, card.md and the plots. metrics.json is written last: it marks a
finished run.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from .. import __version__, checkpoint
from ..errors import BadConfig
from ..files import atomic_write
from .batches import Frames
from .card import model_card
from .config import Config
from .defaults import config_yaml
from .evaluation import Evaluation, evaluate
from .labels import property_of
from .log import TrainingLog, write_metrics
from .metrics import in_words
from .report import draw_report
from .setup import SUBSETS, Setup, device_of, make_setup, require_labels
from .state import load_state
from .trainer import Hooks, Trainer

__all__ = ["run_training"]

_STATE, _BEST, _DONE = "state.safetensors", "best.tmn", "metrics.json"


def run_training(
    config: Config, resume: Literal["auto", "must"] | None = None, check: bool = False, log: TrainingLog | None = None
) -> Path | None:
    """Train a potential.

    Args:
        config: from `load_config`.
        resume: None starts anew and refuses a folder with an unfinished run; "auto" continues an unfinished run
            where there is one; "must" continues one or raises.
        check: only try everything once, print what is to be expected, and write nothing.
        log: where to report; default: standard output and log.txt.

    Returns:
        Path of the model file, best.tmn; None for `check`.

    Raises:
        BadConfig: the configuration does not fit the data, the device, or what is in the folder.
        FileNotFoundError, BadData: a data file is missing, or a label in it.
        TrainingDiverged: the loss is not finite.
    """
    folder = Path(config.output.folder)
    if check:
        from .check import run_check

        run_check(config, log or TrainingLog(None))
        return None
    resuming = _prepare_folder(folder, config, resume)
    if resuming and (folder / _DONE).is_file() and not _extended(folder, config):
        (log or TrainingLog(None)).say(f"{folder} holds a finished run of this configuration: nothing to do")
        return folder / _BEST
    (folder / _DONE).unlink(missing_ok=True)
    with log or TrainingLog(folder / "log.txt") as log, own_torch_state(config):
        setup = make_setup(config)
        require_labels(setup.facts, config.training.loss)
        trainer = make_trainer(setup, folder / _STATE)
        if resuming:
            _check_identity(trainer.identity, load_state(folder / _STATE)[1]["identity"], folder)
            trainer.restore(folder / _STATE)
        else:
            atomic_write(folder / "config.yaml", config_yaml(config))
            atomic_write(folder / "splits.json", json.dumps(setup.splits))
        introduce(setup, trainer, log)
        _train(setup, trainer, folder, log)
        return _finish(setup, trainer, folder, log)


@contextmanager
def own_torch_state(config: Config) -> Iterator[None]:
    """Random numbers and the number of threads of this run; torch's own are as before afterwards."""
    threads = torch.get_num_threads()
    device = device_of(config.training.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.training.seed)
        torch.set_num_threads(config.training.num_threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def make_trainer(setup: Setup, state_path: Path | None) -> Trainer:
    """The training loop of a setup."""
    config = setup.config
    return Trainer(
        setup.potential,
        setup.frames["train"],
        setup.frames.get("validation"),
        config.training,
        setup.properties,
        num_workers=config.data.num_workers,
        state_path=state_path,
        save_every=config.output.save_every_steps,
        identity={"config": config.to_dict(), "data": setup.digests},
    )


def introduce(setup: Setup, trainer: Trainer, log: TrainingLog) -> None:
    """Say what is about to be trained on what."""
    facts = setup.facts
    parameters = sum(p.numel() for p in trainer.parameters)
    counts = ", ".join(f"{len(setup.frames[name])} {name}" for name in SUBSETS if name in setup.frames)
    total = len(setup.frames["train"])
    log.say(f"torchmdnet2 {__version__}, {trainer.device}, {setup.config.training.precision}")
    log.say(f"frames: {counts}")
    for name, labelled in facts["labelled"].items():
        if labelled < total:
            log.say(
                f"note: {total - labelled} of {total} training frames have no {property_of(name)}; they are left out "
                "of that loss"
            )
    for note in setup.notes:
        log.say(note)
    log.say(f"{setup.config.model['name']}: {parameters} parameters, cutoff {setup.potential.cutoff} Å")
    if trainer.step_count:
        log.say(f"resumed at epoch {trainer.epoch + 1}, step {trainer.step_count}")


def _prepare_folder(folder: Path, config: Config, resume: str | None) -> bool:
    """Make the folder; True when a run in it is to be continued."""
    state, done = folder / _STATE, folder / _DONE
    if resume is not None and state.is_file() and not (config.output.overwrite and done.is_file()):
        if done.is_file():
            _check_identity(
                {"config": config.to_dict()}, {"config": load_state(state)[1]["identity"]["config"]}, folder
            )
        return True
    if resume == "must":
        raise BadConfig(f"output.folder: {folder} holds no run to resume")
    if done.is_file() and not config.output.overwrite:
        raise BadConfig(
            f"output.folder: {folder} holds a finished run; choose another folder, or set output.overwrite=true"
        )
    if state.is_file() and not config.output.overwrite:
        raise BadConfig(
            f"output.folder: {folder} holds an unfinished run; continue it with --resume auto, choose another folder, "
            "or set output.overwrite=true"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_DONE, _STATE, _BEST, "log.txt", "metrics.csv", "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    return False


def _extended(folder: Path, config: Config) -> bool:
    """Whether the configuration asks for more epochs than the finished run in the folder had."""
    return config.training.max_epochs > load_state(folder / _STATE)[1]["identity"]["config"]["training"]["max_epochs"]


def _check_identity(now: dict[str, Any], then: dict[str, Any], folder: Path) -> None:
    """Resuming another configuration or other data would be neither the old run nor a new one."""
    different = sorted(_differences(now, then))
    harmless: tuple[str, ...] = ("config.output.", "config.data.num_workers")
    training = now["config"]["training"]
    # what depends on the number of epochs
    if training["lr_schedule"] != "cosine" and not training.get("swa") and not training["loss"].get("schedule"):
        harmless += ("config.training.max_epochs", "config.training.early_stopping_patience")
    different = [path for path in different if not path.startswith(harmless)]
    if different:
        raise BadConfig(
            f"{folder} holds a run that differs in {', '.join(different)}; resume it unchanged, or choose another "
            "output.folder"
        )


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [p for key in keys for p in _differences(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))]
    return [] if a == b else [path]


def _train(setup: Setup, trainer: Trainer, folder: Path, log: TrainingLog) -> None:
    def after_epoch(trainer: Trainer, row: dict[str, Any]) -> None:
        write_metrics(folder, trainer.history)
        log.epoch(row, trainer.config.max_epochs)

    def save_best(trainer: Trainer) -> None:
        checkpoint.save(trainer.average, folder / _BEST, describe(setup, trainer))

    log.start(trainer.total_steps, trainer.step_count)
    trainer.run(
        Hooks(
            step=lambda t, loss: log.step(t.epoch + 1, t.step_count, loss),
            epoch=after_epoch,
            best=save_best,
        )
    )


def _finish(setup: Setup, trainer: Trainer, folder: Path, log: TrainingLog) -> Path:
    """Evaluate the saved model, complete its metadata, write the report."""
    config = setup.config
    write_metrics(folder, trainer.history)
    subsets = [name for name in SUBSETS[1:] if name in setup.frames] or ["train"]
    evaluations = {name: evaluate_saved(folder / _BEST, setup, setup.frames[name]) for name in subsets}
    errors = {name: evaluation.errors for name, evaluation in evaluations.items()}

    best = checkpoint.load(folder / _BEST)
    metadata = {**best.metadata, "errors": errors}
    checkpoint.save(best, folder / _BEST, metadata)
    if config.output.report:
        draw_report(folder, trainer.history, evaluations[subsets[-1]], subsets[-1])
        atomic_write(folder / "card.md", model_card(best.config, metadata, title=folder.name))
    for name in subsets:
        log.say(f"{name}: {in_words(errors[name])}")
    atomic_write(folder / _DONE, json.dumps(errors, indent=1))
    log.say(f"model: {folder / _BEST}")
    return folder / _BEST


def evaluate_saved(path: Path, setup: Setup, frames: Frames) -> Evaluation:
    """Errors of the model file, in float64, so that whoever recomputes them finds the same numbers."""
    potential = checkpoint.load(path, device=setup.potential.device, dtype=torch.float64)
    return evaluate(
        potential,
        frames,
        setup.properties,
        batch_size=2 * setup.config.training.batch_size,
        num_workers=setup.config.data.num_workers,
        units=setup.config.data.units.model_dump(),
    )


def describe(setup: Setup, trainer: Trainer) -> dict[str, Any]:
    """Metadata of the model file: where it comes from. No dates or times: equal runs give equal files."""
    config, facts = setup.config, setup.facts
    return {
        "data": {
            "files": setup.digests,
            "frames": {name: len(frames) for name, frames in setup.frames.items()},
            "split": _split_text(config),
            "level_of_theory": config.data.level_of_theory,
            "licence": config.data.licence,
            "charges": facts["charges"],
            "spins": facts["spins"],
            "forces_rms": facts["forces_rms"],
        },
        "licence": config.output.licence,
        "precision": config.training.precision,
        "num_parameters": sum(p.numel() for p in setup.potential.parameters()),
        "training": {
            "best_epoch": trainer.best.epoch + 1,
            "step": trainer.step_count,
            "validation_loss": trainer.best.loss,
        },
        "versions": {"torchmdnet2": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "config": config.to_dict(),
    }


def _split_text(config: Config) -> str:
    if config.data.split.file:
        return f"from {config.data.split.file}"
    return f"random, seed {config.data.split.seed}; indices in splits.json"
