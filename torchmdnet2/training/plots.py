"""The pictures of the report, drawn on canvases of their own: no window, and pyplot's global state is left alone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .evaluation import Evaluation

if TYPE_CHECKING:
    from ase import Atoms
    from matplotlib.axes import Axes

__all__ = ["pictures", "spread_picture", "structures"]

_MOST_POINTS = 20_000  # of a parity plot
_MOST_STICKS = 500  # atoms of a structure that is drawn with bonds
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
    found = {"learning_curve": _picture(partial(_learning_curve, history))}
    for name, pair in evaluation.pairs.items():
        if len(pair[0]) and name in evaluation.errors:
            draw = partial(_parity, pair, evaluation.errors[name], name, subset)
            found[_FILES.get(name, f"{name}_parity")] = _picture(draw)
    by_element = evaluation.errors.get("forces_by_element")
    if by_element:
        found["errors_by_element"] = _picture(partial(_elements, by_element, subset))
    return found


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # equal plots, equal bytes
    return buffer.getvalue()


def _learning_curve(history: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    epochs = [row["epoch"] for row in history]
    curves = [
        ("energy_per_atom_mae", "energy", 1e3, " (meV/atom)"),
        ("forces_mae", "forces", 1e3, " (meV/Å)"),
        ("stress_mae", "stress", 1e3, " (meV/Å³)"),
    ]
    known = {f"{p}_{c[0]}" for p in ("train", "validation") for c in curves} | {"train_energy_mae"}
    keys = dict.fromkeys(key for row in history for key in row)
    maes = [key for key in keys if key.startswith("train_") and key.endswith("_mae") and key not in known]
    further = [key.removeprefix("train_") for key in maes]
    curves += [(key, key.removesuffix("_mae").replace("_", " "), 1.0, "") for key in further]
    for prefix, alpha in (("train", 0.35), ("validation", 1.0)):
        for k, (key, label, scale, unit) in enumerate(curves):
            values = [scale * row.get(f"{prefix}_{key}", math.nan) for row in history]
            if np.isfinite(values).any():
                text = f"{label}, {prefix}{unit}"
                axes.plot(epochs, values, color=f"C{k % 10}", alpha=alpha, lw=1.4, label=text)
    scale_of_y = "log" if any(np.greater(line.get_ydata(), 0).any() for line in axes.lines) else "linear"
    best = max((row["epoch"] for row in history if row["best"]), default=None)
    if best is not None:
        axes.axvline(best, color="0.6", lw=0.8, ls=":", label=f"best epoch: {best}")
    axes.set(xlabel="epoch", ylabel="mean absolute error", yscale=scale_of_y, title="Learning curve")
    axes.legend(fontsize=7)


def _parity(
    pairs: tuple[np.ndarray, np.ndarray], errors: Mapping[str, Any], name: str, subset: str, axes: Axes
) -> None:
    label, predicted = pairs
    known = {"energy_per_atom": "energy per atom − references", "forces": "force components"}
    title = known.get(name, name.replace("_", " "))
    stride = -(-len(label) // _MOST_POINTS)
    scale, unit = (1e3, f"m{errors['unit']}") if errors["unit"] else (1.0, "")
    text = "\n".join(f"{kind.upper()} {scale * errors[kind]:.3g} {unit}".rstrip() for kind in ("mae", "rmse"))
    axes.plot(scale * label[::stride], scale * predicted[::stride], ".", ms=4, alpha=0.5, mew=0, label=text)
    ends = [scale * min(label.min(), predicted.min()), scale * max(label.max(), predicted.max())]
    axes.plot(ends, ends, color="0.4", lw=0.8)
    unit = unit and f" ({unit})"
    axes.set(xlabel=f"reference{unit}", ylabel=f"predicted{unit}", title=f"{title.capitalize()}, {subset} frames")
    axes.legend(loc="upper left")


def _elements(errors: Mapping[str, Any], subset: str, axes: Axes) -> None:
    names = list(errors)
    for shift, kind in ((-0.2, "mae"), (0.2, "rmse")):
        values = [1e3 * errors[name][kind] for name in names]
        axes.bar([i + shift for i in range(len(names))], values, 0.38, label=kind.upper())
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="force error (meV/Å)", title=f"Force errors by element, {subset} frames")
    axes.legend()


def _structure(atoms: Atoms, axes: Axes) -> None:
    """Balls and sticks, the nearest last; the cell of a periodic structure."""
    from ase.data import covalent_radii
    from ase.data.colors import jmol_colors
    from matplotlib.patches import Circle

    pos, radii = atoms.positions - atoms.positions.mean(0), covalent_radii[atoms.numbers]
    if atoms.pbc.any():
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
            depth = float(pos[[one, two], 2].mean())
            axes.plot(*pos[[one, two], :2].T, color="0.45", lw=2.0, zorder=depth, solid_capstyle="round")
    for place, radius, z in zip(pos, radii, atoms.numbers, strict=True):
        axes.add_patch(Circle(place[:2], 0.5 * radius, fc=jmol_colors[z], ec="0.2", lw=0.6, zorder=float(place[2])))
    axes.set_aspect("equal")
    axes.autoscale_view()
    axes.set_axis_off()
