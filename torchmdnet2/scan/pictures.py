"""The plots of a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..html_page import figure_png
from .curve import Curve
from .paths import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["picture"]

_COLUMNS = 4
_LARGEST = 12.0  # eV of a bond or contact that is drawn in full; above, walls would hide all else
_LINES = {"wall": "C3", "hole": "C3", "extra minimum": "C1"}


def picture(curves: Sequence[Curve], reference: str | None) -> bytes:
    """A panel for each curve of one kind, as PNG: energies above the curve's zero, the reference as dots.

    Args:
        curves: at least one.
        reference: its name, for the legend.
    """

    def draw(figure: Figure) -> None:
        panels = figure.subplots(lines, columns, squeeze=False).ravel()
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        for axes, curve in zip(panels, curves, strict=False):
            _panel(axes, curve, reference)
        if reference is not None:
            panels[0].legend(fontsize=7)

    columns = min(_COLUMNS, len(curves))
    lines = -(-len(curves) // columns)
    return figure_png(draw, (max(4.2, 3.0 * columns), 2.5 * lines + 0.3))


def _panel(axes: Axes, curve: Curve, reference: str | None) -> None:
    path, samples = curve.path, curve.model
    x, energy = _shown(curve, samples.values), curve.relative()
    seen = [energy]
    axes.axhline(0, color="0.8", lw=0.6)
    if samples.spread is not None:
        axes.fill_between(x, energy - samples.spread, energy + samples.spread, color="C0", alpha=0.25, lw=0)
    axes.plot(x, energy, color="C0", lw=1.4, label="model")
    if curve.reference is not None:
        theirs = curve.relative(curve.reference)
        seen.append(theirs)
        axes.plot(_shown(curve, curve.reference.values), theirs, ".", color="0.25", ms=4, label=reference)
    for finding in curve.findings:
        place = _shown(curve, np.array([finding.value]))[0]
        axes.axvline(place, color=_LINES.get(finding.kind, "C4"), lw=0.8, ls=":")
    axes.set_ylim(*_range(np.concatenate(seen), path.kind))
    axes.set_title(f"{path.name}" + (" ✗" if curve.findings else ""), fontsize=9)
    axes.set_xlabel("angle (°)" if path.kind == "torsion" else "distance (Å)", fontsize=8)
    axes.set_ylabel("energy (eV)", fontsize=8)
    axes.tick_params(labelsize=7)


def _shown(curve: Curve, values: Array) -> Array:
    return np.degrees(values) if curve.path.kind == "torsion" else values


def _range(energies: Array, kind: str) -> tuple[float, float]:
    """Limits of the energy axis."""
    known = energies[np.isfinite(energies)]
    if not len(known):
        return -1.0, 1.0
    low, high = float(known.min()), float(known.max())
    if kind != "torsion":
        low, high = max(low, -_LARGEST), min(high, _LARGEST)
    margin = 0.05 * max(high - low, 0.01)
    return low - margin, high + margin
