"""Plots at the end of a training: learning curve, parity of energies and forces, force errors by element."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import atomic_write
from .evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_report"]

_MOST_POINTS = 20_000  # of a parity plot


def draw_report(folder: Path, history: list[dict[str, Any]], evaluation: Evaluation, subset: str) -> list[Path]:
    """Write the plots as PNG files.

    Args:
        folder: where they go.
        history: one row of metrics per epoch.
        evaluation: of the final weights.
        subset: what `evaluation` was made on, for the titles: "test".

    Returns:
        The files written: learning_curve.png, energy_parity.png, force_parity.png, errors_by_element.png, as far as
        there are labels for them.
    """
    written = [_figure(folder / "learning_curve.png", partial(_learning_curve, history))]
    parities = (
        ("energy_per_atom", "energy_parity.png", "energy", "meV/atom"),
        ("forces", "force_parity.png", "force component", "meV/Å"),
    )
    for name, file, title, unit in parities:
        if name in evaluation.pairs:
            draw = partial(_parity, evaluation.pairs[name], evaluation.errors[name], title, unit, subset)
            written.append(_figure(folder / file, draw))
    by_element = evaluation.errors.get("forces_by_element")
    if by_element:
        written.append(_figure(folder / "errors_by_element.png", partial(_elements, by_element, subset)))
    return written


def _figure(path: Path, draw: Callable[[Axes], None]) -> Path:
    """Draw on a canvas of its own: no window, and pyplot's global state is left alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    atomic_write(path, buffer.getvalue())
    return path


def _learning_curve(history: list[dict[str, Any]], axes: Axes) -> None:
    epochs = [row["epoch"] for row in history]
    curves = (
        ("energy_per_atom_mae", "energy", "meV/atom", "tab:blue"),
        ("forces_mae", "forces", "meV/Å", "tab:orange"),
        ("stress_mae", "stress", "meV/Å³", "tab:green"),
    )
    for prefix, style, alpha in (("train", "-", 0.35), ("validation", "-", 1.0)):
        for key, label, unit, color in curves:
            values = [1e3 * row.get(f"{prefix}_{key}", math.nan) for row in history]
            if np.isfinite(values).any():
                axes.plot(epochs, values, style, color=color, alpha=alpha, lw=1.4, label=f"{label} {prefix} ({unit})")
    best = max((row["epoch"] for row in history if row["best"]), default=None)
    if best is not None:
        axes.axvline(best, color="0.6", lw=0.8, ls=":", label=f"best epoch: {best}")
    axes.set(xlabel="epoch", ylabel="mean absolute error", yscale="log", title="Learning curve")
    axes.legend(fontsize=7)


def _parity(
    pairs: tuple[np.ndarray, np.ndarray], errors: dict[str, Any], title: str, unit: str, subset: str, axes: Axes
) -> None:
    label, predicted = pairs
    if title == "energy":  # absolute energies hide all differences
        title, label, predicted = "energy − mean", label - label.mean(), predicted - label.mean()
    stride = -(-len(label) // _MOST_POINTS)
    scale = 1e3
    text = f"MAE {scale * errors['mae']:.3g} {unit}\nRMSE {scale * errors['rmse']:.3g} {unit}"
    axes.plot(scale * label[::stride], scale * predicted[::stride], ".", ms=4, alpha=0.5, mew=0, label=text)
    ends = [scale * min(label.min(), predicted.min()), scale * max(label.max(), predicted.max())]
    axes.plot(ends, ends, color="0.4", lw=0.8)
    axes.set(xlabel=f"reference ({unit})", ylabel=f"predicted ({unit})", title=f"{title.capitalize()}, {subset} frames")
    axes.legend(loc="upper left")


def _elements(errors: dict[str, Any], subset: str, axes: Axes) -> None:
    names = list(errors)
    for shift, kind in ((-0.2, "mae"), (0.2, "rmse")):
        values = [1e3 * errors[name][kind] for name in names]
        axes.bar([i + shift for i in range(len(names))], values, 0.38, label=kind.upper())
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="force error (meV/Å)", title=f"Force errors by element, {subset} frames")
    axes.legend()
