"""The log of a training: console, log.txt, and the tables metrics.csv and metrics.jsonl."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...console import SteadyConsole
from ...files import atomic_write

__all__ = ["TrainingLog", "epoch_line", "write_metrics"]


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

    def say(self, text: str) -> None:
        """One line, or several."""
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
        """One line per epoch."""
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
    """An epoch's errors in meV on one line; * marks the best epoch so far."""
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
    ):
        value = row.get(f"{prefix}_{name}_mae", math.nan)
        if math.isfinite(value):
            texts.append(f"{label} {1e3 * value:.3g} {unit}")
    shown = {f"{prefix}_{name}_mae" for name in ("energy", "energy_per_atom", "forces", "stress")}
    for key, value in row.items():
        if key.startswith(f"{prefix}_") and key.endswith("_mae") and key not in shown and math.isfinite(value):
            texts.append(f"{key[len(prefix) + 1 : -4]} {value:.3g}")
    return texts


def write_metrics(folder: Path, history: Iterable[dict[str, Any]]) -> None:
    """metrics.csv and metrics.jsonl: one row per epoch, energies in eV, lengths in Å; written whole, atomically."""
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
