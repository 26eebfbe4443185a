"""The end of a training: errors of the saved model, its metadata, the report."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import checkpoint
from ...core.files import atomic_write
from ...version import __version__
from ..config.config import Config
from ..reporting.evaluation import Evaluation, evaluate
from ..reporting.log import TrainingLog
from ..reporting.report import Report, model_card, write_report
from ..steps.batches import Frames, measured_batches
from ..steps.loss import in_words
from ..steps.trainer import Trainer
from .folder import BEST, DONE
from .setup import SUBSETS, Setup

_AT_ONCE = 64  # frames, at most
_FEW = 8  # labels
_UNLEARNED = 0.9  # of the spread of the labels

__all__ = ["describe", "evaluate_saved", "finish", "package_versions", "unlearned"]


def finish(setup: Setup, trainer: Trainer, folder: Path, log: TrainingLog) -> dict[str, Any]:
    """Evaluate the saved model, complete its metadata, write the report; metrics.json comes last.

    Returns:
        Errors by subset.
    """
    config = setup.config
    if trainer.packed is not None:
        trainer.packed.forget_graphs()  # their memory is needed
    subsets = [name for name in SUBSETS[1:] if name in setup.frames] or ["train"]
    evaluations = {name: evaluate_saved(folder / BEST, setup, setup.frames[name]) for name in subsets}
    errors = {name: evaluation.errors for name, evaluation in evaluations.items()}

    best = checkpoint.load(folder / BEST)
    metadata = {**best.metadata, "errors": errors}
    checkpoint.save(best, folder / BEST, metadata)
    if config.output.report:
        report = Report(
            title=folder.name,
            history=trainer.history,
            evaluations=evaluations,
            frames=setup.frames,
            potential=checkpoint.load(folder / BEST, device=setup.potential.device, dtype=torch.float64),
            properties=setup.properties,
            config=config.to_dict(),
            metadata=metadata,
            costs=costs(setup, trainer),
            outliers=config.output.outliers,
        )
        write_report(folder, report)
        atomic_write(folder / "card.md", model_card(best.config, metadata, title=folder.name))
    for name in subsets:
        log.say(f"{name}: {in_words(errors[name])}")
        for note in unlearned(evaluations[name]):
            log.say(f"note: {name}: {note}")
    atomic_write(folder / DONE, json.dumps(errors, indent=1))
    if config.output.report:
        log.say(f"report: {folder / 'report.html'}")
    log.say(f"model: {folder / BEST}")
    return errors


def unlearned(evaluation: Evaluation) -> Iterator[str]:
    """Labels whose errors are as large as the labels differ from each other, in words."""
    for name, (label, predicted) in evaluation.pairs.items():
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
    """Bytes that the device, or on a CPU this process, needed at most; 0 where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if platform.system() == "Darwin" else 1024 * peak)


def evaluate_saved(path: Path, setup: Setup, frames: Frames) -> Evaluation:
    """Errors of the model file, in float64, so that whoever recomputes them finds the same numbers."""
    potential = checkpoint.load(path, device=setup.potential.device, dtype=torch.float64)
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
    """Metadata of the model file: where it comes from. No dates or times: equal runs give equal files."""
    config, facts = setup.config, setup.facts
    return {
        "data": {
            "files": setup.digests,
            "frames": {name: len(frames) for name, frames in setup.frames.items()},
            "split": _split_text(config),
            "level_of_theory": config.data.level_of_theory,
            "licence": config.data.licence,
            "citation": config.data.citation,
            "elements": facts["elements"],
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
        "versions": {**package_versions(), "python": platform.python_version()},
        "config": config.to_dict(),
    }


def package_versions() -> dict[str, str]:
    """The versions that the numbers of a training depend on."""
    return {"torchmdnet2": __version__, "torch": str(torch.__version__)}


def _split_text(config: Config) -> str:
    if config.data.split.file:
        return f"from {config.data.split.file}"
    return f"random, seed {config.data.split.seed}; indices in splits.json"
