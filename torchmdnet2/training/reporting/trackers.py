"""Metrics for TensorBoard and Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import MissingBackend
from ...files import atomic_write
from ..config.config import Config

__all__ = ["TensorBoard", "Tracker", "Wandb", "open_trackers"]


class Tracker(Protocol):
    """Receives the metrics of each epoch; closed at the end of the run."""

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def close(self, errors: Mapping[str, Any] | None = None) -> None: ...


def open_trackers(config: Config, folder: Path | None, history: Sequence[Mapping[str, Any]] = ()) -> list[Tracker]:
    """What `output.tensorboard` and `output.wandb` ask for.

    A run that was killed repeats the epochs since its state was saved, and what a tracker had not yet written is gone:
    curves have each epoch once all the same.

    Args:
        config: of the run.
        folder: of the run; None: only look whether the packages are there.
        history: the epochs that are done.

    Raises:
        MissingBackend: a package is not installed; says which.
    """
    found: list[Tracker] = []
    if config.output.tensorboard:
        found.append(TensorBoard(folder, history))
    if config.output.wandb is not None:
        found.append(Wandb(config, folder, history))
    return found


class TensorBoard:
    """Scalars by epoch in the folder `tensorboard` of the run; what was written of epochs to come is purged."""

    def __init__(self, folder: Path | None, history: Sequence[Mapping[str, Any]] = ()):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingBackend(
                "output.tensorboard: the package is not installed; pip install 'torchmdnet2[tensorboard]', or set it "
                "to false"
            ) from error
        self._writer: Any = None
        if folder is not None:
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=len(history) + 1)

    def epoch(self, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["epoch"])
        self._writer.flush()

    def close(self, errors: Mapping[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases; a resumed training continues it, and fills in what a killed one had not sent.

    Offline, each start writes all epochs from the first on to a folder of its own.
    """

    def __init__(self, config: Config, folder: Path | None, history: Sequence[Mapping[str, Any]] = ()):
        settings = config.output.wandb
        assert settings is not None
        try:
            import wandb
        except ImportError as error:
            raise MissingBackend(
                "output.wandb: the package is not installed; pip install 'torchmdnet2[wandb]', or set it to null"
            ) from error
        self._run: Any = None
        if folder is not None:
            identity = folder / "wandb.id"
            if not history or not identity.is_file():
                atomic_write(identity, secrets.token_hex(4))
            self._run = wandb.init(
                project=settings.project,
                name=settings.name or folder.name,
                id=identity.read_text().strip(),
                resume="allow",
                mode=settings.mode,
                dir=str(folder),
                config=config.to_dict(),
            )
            for row in history:
                if row["epoch"] >= self._run.step:
                    self.epoch(row)

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=row["epoch"], commit=True)

    def close(self, errors: Mapping[str, Any] | None = None) -> None:
        if self._run is not None:
            for subset, properties in (errors or {}).items():
                for name, error in properties.items():
                    if "mae" in error:
                        self._run.summary[f"{subset}/{name}_mae"] = error["mae"]
            self._run.finish()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an epoch as "train/forces_mae" and the like."""
    found = {}
    for name, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch":
            subset, under, rest = name.partition("_")
            found[f"{subset}/{rest}" if under and subset in ("train", "validation") else name] = float(value)
    return found
