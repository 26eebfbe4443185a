"""The plots of the report. They are drawn without pyplot: no window, no global state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...html_page import figure_png
from ..steps.metrics import UNITS, shown
from .evaluation import Evaluation

if TYPE_CHECKING:
    from ase import Atoms
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["digits", "pictures", "spread_picture", "structures"]

_SUBSETS = ("train", "validation")
_MOST_POINTS = 20_000  # of a parity plot
_MOST_STICKS = 500  # atoms of a structure that is drawn with bonds
_MOSTLY_VACUUM = 40  # volumes of its atoms that a cell has, from which on it is a molecule in a box
_FILES = {"energy_per_atom": "energy_parity", "forces": "force_parity"}  # others: their name + _parity


def pictures(history: Sequence[Mapping[str, Any]], evaluation: Evaluation, subset: str) -> dict[str, bytes]:
    """Learning curve, parity plots, force errors by element, as far as there are labels for them.

    Args:
        history: one row of metrics per epoch.
        evaluation: of the final weights.
        subset: what `evaluation` was made on, for the titles: "test".

    Returns:
        File name without ".png" -> PNG.
    """
    curves = _curves(history, evaluation.errors)
    found = {
        "learning_curve": figure_png(
            partial(_learning_curve, history, curves), (5.2, max(4.2, 0.8 + 1.6 * len(curves)))
        )
    }
    for name, pair in evaluation.pairs.items():
        if len(pair[0]) and name in evaluation.errors:
            draw = partial(_parity, pair, evaluation.errors[name], name, subset)
            found[_FILES.get(name, f"{name}_parity")] = _picture(draw)
    by_element = evaluation.errors.get("forces_by_element")
    if by_element:
        size = (max(5.2, 0.4 * len(by_element)), 4.2)
        found["errors_by_element"] = _picture(partial(_elements, by_element, subset), size)
    return found


def digits(value: float, count: int = 4) -> str:
    """A number by so many digits that count, and all before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}"


def structures(frames: Sequence[Atoms]) -> list[bytes]:
    """A small picture of each structure, seen along its shortest principal axis, as PNG."""
    return [_picture(partial(_structure, atoms), size=(1.8, 1.5)) for atoms in frames]


def spread_picture(error: np.ndarray, deviation: np.ndarray, name: str, unit: str) -> bytes:
    """|error| of an ensemble's mean over the standard deviation of its members, on logarithmic axes, as PNG."""

    def draw(axes: Axes) -> None:
        stride = -(-len(error) // _MOST_POINTS)
        low = 1e-6  # what is exactly 0 is drawn at the edge
        x, y = (1e3 * np.maximum(values[::stride], low) for values in (deviation, error))
        axes.plot(x, y, ".", ms=4, alpha=0.4, mew=0)
        ends = [min(x.min(), y.min()), max(x.max(), y.max())]
        axes.plot(ends, ends, color="0.4", lw=0.8, label="error = spread")
        axes.set(xscale="log", yscale="log", xlabel=f"standard deviation of the members (m{unit})",
                 ylabel=f"error of their mean (m{unit})", title=name.replace("_", " ").capitalize())  # fmt: skip
        axes.legend()

    return _picture(draw)


def _picture(draw: Callable[[Axes], None], size: tuple[float, float] = (5.2, 4.2)) -> bytes:
    return figure_png(lambda figure: draw(figure.add_subplot()), size)


def _curves(history: Sequence[Mapping[str, Any]], errors: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Property and unit of each learning curve; the energy per atom stands for the energy too."""
    names = dict.fromkeys(
        key[6:-4] for row in history for key in row if key.startswith("train_") and key.endswith("_mae")
    )
    if "energy_per_atom" in names:
        names.pop("energy", None)
    units = {**UNITS, **{name: error["unit"] for name, error in errors.items() if "unit" in error}}
    known = [
        n for n in names if any(math.isfinite(row.get(f"{s}_{n}_mae", math.nan)) for s in _SUBSETS for row in history)
    ]
    return [(name, units.get(name, "")) for name in known]


def _learning_curve(history: Sequence[Mapping[str, Any]], curves: Sequence[tuple[str, str]], figure: Figure) -> None:
    """A panel for each property, since they differ in unit and size."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    epochs = [row["epoch"] for row in history]
    best = max((row["epoch"] for row in history if row["best"]), default=None)
    panels = figure.subplots(max(1, len(curves)), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, unit) in zip(panels, curves, strict=False):
        drawn: list[float] = []
        for subset, style in zip(_SUBSETS, ({"color": "C1", "lw": 1.2}, {"color": "C0", "lw": 1.8}), strict=True):
            values = [shown(row.get(f"{subset}_{name}_mae", math.nan), unit)[0] for row in history]
            if np.isfinite(values).any():
                axes.plot(epochs, values, marker="." if len(epochs) < 30 else "", label=subset, **style)
                drawn += values
        found = np.array([value for value in drawn if value > 0])
        if len(found):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=_subs(found.max() / found.min()), numticks=12))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        if best is not None:
            axes.axvline(best, color="0.6", lw=0.8, ls=":", label=f"best epoch: {best}")
        axes.set_ylabel(f"{name.replace('_', ' ')}\nMAE ({shown(0.0, unit)[1] or '1'})")
        axes.grid(axis="y", color="0.9", lw=0.6)
    panels[0].set_title("Learning curve")
    panels[0].legend(fontsize=8)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))


def _subs(ratio: float) -> tuple[float, ...]:
    """Multiples of powers of ten that are labelled on an axis over this range."""
    return (1, 1.5, 2, 3, 5, 7) if ratio < 10 else (1, 2, 5) if ratio < 200 else (1,)


def _parity(
    pairs: tuple[np.ndarray, np.ndarray], errors: Mapping[str, Any], name: str, subset: str, axes: Axes
) -> None:
    label, predicted = pairs
    known = {"energy_per_atom": "energy per atom − references", "forces": "force components"}
    title = known.get(name, name.replace("_", " "))
    stride = -(-len(label) // _MOST_POINTS)
    ends = np.array([min(label.min(), predicted.min()), max(label.max(), predicted.max())])
    scale, unit = (1.0, errors["unit"]) if np.abs(ends).max() >= 1 else shown(1.0, errors["unit"])
    axes.plot(scale * label[::stride], scale * predicted[::stride], ".", ms=4, alpha=0.5, mew=0)
    axes.plot(scale * ends, scale * ends, color="0.4", lw=0.8)
    texts = [(kind.upper(), *shown(errors[kind], errors["unit"])) for kind in ("mae", "rmse")]
    text = "\n".join(f"{kind} {digits(value, 3)} {of}".rstrip() for kind, value, of in texts)
    axes.text(0.04, 0.96, text, transform=axes.transAxes, va="top")
    unit = unit and f" ({unit})"
    axes.set(xlabel=f"reference{unit}", ylabel=f"predicted{unit}", title=f"{title.capitalize()}, {subset} frames")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_box_aspect(1)
    axes.locator_params(nbins=6)


def _elements(errors: Mapping[str, Any], subset: str, axes: Axes) -> None:
    names = list(errors)
    for shift, kind in ((-0.2, "mae"), (0.2, "rmse")):
        values = [1e3 * errors[name][kind] for name in names]
        axes.bar([i + shift for i in range(len(names))], values, 0.38, label=kind.upper())
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="force error (meV/Å)", title=f"Force errors by element, {subset} frames")
    axes.legend()


def _structure(atoms: Atoms, axes: Axes) -> None:
    """Balls and sticks, the nearest last; the cell of a periodic structure that fills it."""
    from ase.data import covalent_radii
    from ase.data.colors import jmol_colors
    from matplotlib.patches import Circle

    pos, radii = atoms.positions - atoms.positions.mean(0), covalent_radii[atoms.numbers]
    if atoms.pbc.any() and atoms.cell.volume < _MOSTLY_VACUUM * 4 / 3 * np.pi * (radii**3).sum():
        corners = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T @ atoms.cell.array
        for one, two in zip(*np.triu_indices(8, 1), strict=True):
            edge = corners[[one, two]] - atoms.positions.mean(0)
            if np.isclose(np.linalg.norm(edge[1] - edge[0]), atoms.cell.lengths()).any():
                axes.plot(*edge[:, :2].T, color="0.75", lw=0.6, zorder=-1e6)
    elif len(atoms) > 2:
        pos = pos @ np.linalg.svd(pos, full_matrices=True)[2].T
    if len(atoms) <= _MOST_STICKS:
        near = np.linalg.norm(pos[:, None] - pos, axis=2) < 1.25 * np.add.outer(radii, radii)
        for one, two in zip(*np.triu(near, 1).nonzero(), strict=True):
            depth = float(pos[[one, two], 2].min()) - 1e-3  # behind its own atoms
            axes.plot(*pos[[one, two], :2].T, color="0.45", lw=2.0, zorder=depth, solid_capstyle="round")
    for place, radius, z in zip(pos, radii, atoms.numbers, strict=True):
        axes.add_patch(Circle(place[:2], 0.5 * radius, fc=jmol_colors[z], ec="0.2", lw=0.6, zorder=float(place[2])))
    axes.set_aspect("equal")
    axes.autoscale_view()
    axes.set_axis_off()
