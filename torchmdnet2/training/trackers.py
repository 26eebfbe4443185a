"""Metrics for TensorBoard and Weights & Biases, where these are installed and asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import MissingBackend
from ..files import atomic_write
from .config import Config

__all__ = ["TensorBoard", "Tracker", "Wandb", "open_trackers"]


class Tracker(Protocol):
    """Takes the metrics of an epoch, and closes at the end."""

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def close(self, errors: Mapping[str, Any] | None = None) -> None: ...


def open_trackers(config: Config, folder: Path | None) -> list[Tracker]:
    """What `output.tensorboard` and `output.wandb` ask for.

    Args:
        config: of the run.
        folder: of the run; None: only look whether the packages are there.

    Raises:
        MissingBackend: a package is not installed; says which.
    """
    found: list[Tracker] = []
    if config.output.tensorboard:
        found.append(TensorBoard(folder))
    if config.output.wandb is not None:
        found.append(Wandb(config, folder))
    return found


class TensorBoard:
    """Scalars by epoch in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingBackend(
                "output.tensorboard: the package is not installed; pip install 'torchmdnet2[tensorboard]', or set it "
                "to false"
            ) from error
        self._writer: Any = None if folder is None else SummaryWriter(str(folder / "tensorboard"))

    def epoch(self, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["epoch"])
        self._writer.flush()

    def close(self, errors: Mapping[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases; a resumed training continues it."""

    def __init__(self, config: Config, folder: Path | None):
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
            if not identity.is_file():
                atomic_write(identity, wandb.util.generate_id())
            self._run = wandb.init(
                project=settings.project,
                name=settings.name or folder.name,
                id=identity.read_text().strip(),
                resume="allow",
                mode=settings.mode,
                dir=str(folder),
                config=config.to_dict(),
            )

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=row["epoch"])

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
