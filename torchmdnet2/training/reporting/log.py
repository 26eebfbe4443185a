"""The log of a training: console, log.txt, and the tables metrics.csv and metrics.jsonl."""

from __future__ import annotations

import csv
import io
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...core.console import SteadyConsole
from ...core.files import atomic_write
from ...errors import MissingBackend
from ..config.config import Config

__all__ = ["TensorBoard", "Tracker", "TrainingLog", "Wandb", "epoch_line", "open_trackers", "write_metrics"]


class TrainingLog:
    """Prints to the console and appends to log.txt; on a terminal, shows a bar with the errors and the time left.

    Args:
        path: log.txt; None: console only.
        console: where to print (default: standard output).
    """

    def __init__(self, path: Path | None, console: Console | None = None):
        self.path = path
        self.console = console or SteadyConsole(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._errors = ""
        self.notes = 0

    def say(self, text: str) -> None:
        """Print and log one line or several; counts notes."""
        self.notes += text.startswith("note: ")
        (self._bar.console if self._bar else self.console).print(text, markup=False)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def start(self, total_steps: int, done: int) -> None:
        """Show the bar, on a terminal."""
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[errors]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=total_steps, completed=done, errors="")

    def step(self, epoch: int, done: int, loss: float) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(
                self._task, completed=done, description=f"epoch {epoch}", errors=f"loss {loss:.2e}{self._errors}"
            )

    def epoch(self, row: dict[str, Any], max_epochs: int) -> None:
        """Print and log the line of an epoch."""
        self._errors = "".join(f"  {text}" for text in _error_texts(row, _prefix(row)))
        self.say(epoch_line(row, max_epochs))

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def epoch_line(row: dict[str, Any], max_epochs: int) -> str:
    """Return the line of an epoch with errors in meV; * marks the best epoch so far."""
    width = len(str(max_epochs))
    parts = [
        f"epoch {row['epoch']:>{width}}/{max_epochs}",
        f"lr {row['lr']:.1e}",
        f"train loss {row['train_loss']:.3e}",
    ]
    prefix = _prefix(row)
    if prefix == "validation":
        parts.append(f"validation loss {row['validation_loss']:.3e}")
    parts += _error_texts(row, prefix)
    parts.append(f"{row['seconds']:.1f} s")
    return "  ".join(parts) + ("  *" if row["best"] else "")


def _prefix(row: dict[str, Any]) -> str:
    return "validation" if "validation_loss" in row else "train"


def _error_texts(row: dict[str, Any], prefix: str) -> list[str]:
    texts = []
    for name, label, unit in (
        ("energy_per_atom", "E", "meV/atom"),
        ("forces", "F", "meV/Å"),
        ("stress", "S", "meV/Å³"),
        ("relative_energy", "relative E", "meV"),
    ):
        value = row.get(f"{prefix}_{name}_mae", math.nan)
        if math.isfinite(value):
            texts.append(f"{label} {1e3 * value:.3g} {unit}")
    shown = {f"{prefix}_{name}_mae" for name in ("energy", "energy_per_atom", "forces", "stress", "relative_energy")}
    for key, value in row.items():
        if key.startswith(f"{prefix}_") and key.endswith("_mae") and key not in shown and math.isfinite(value):
            texts.append(f"{key[len(prefix) + 1 : -4]} {value:.3g}")
    return texts


def write_metrics(folder: Path, history: Iterable[dict[str, Any]]) -> None:
    """Write metrics.csv and metrics.jsonl atomically: one row per epoch, energies in eV, lengths in Å."""
    rows = list(history)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    atomic_write(folder / "metrics.csv", text.getvalue())
    lines = [json.dumps({k: v if _is_json(v) else None for k, v in row.items()}) for row in rows]
    atomic_write(folder / "metrics.jsonl", "".join(line + "\n" for line in lines))


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


# --- Metrics for TensorBoard and Weights & Biases ---


class Tracker(Protocol):
    """Receives the metrics of each epoch; closed at the end of the run."""

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def close(self, errors: Mapping[str, Any] | None = None) -> None: ...


def open_trackers(config: Config, folder: Path | None, history: Sequence[Mapping[str, Any]] = ()) -> list[Tracker]:
    """Return the trackers that `output.tensorboard` and `output.wandb` ask for.

    A run that was killed repeats the epochs since its state was saved, and a tracker may have lost epochs; its curves
    still have each epoch once.

    Args:
        config: of the run.
        folder: of the run; None: only check that the packages are installed.
        history: metrics of the completed epochs.

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
    """Writes scalars by epoch to the folder `tensorboard` of the run; entries of epochs to be repeated are purged."""

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
    """A run of Weights & Biases; a resumed training continues it, and sends epochs that a killed one had not sent.

    Offline, each start writes all epochs from the first on to a new folder.
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
    """Return the metrics of an epoch as "train/forces_mae" and the like."""
    found = {}
    for name, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch":
            subset, under, rest = name.partition("_")
            found[f"{subset}/{rest}" if under and subset in ("train", "validation") else name] = float(value)
    return found
