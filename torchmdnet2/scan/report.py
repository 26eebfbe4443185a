"""The report of a scan: numbers of every curve, plots and files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import html_page as page
from ..core.files import atomic_write, keep_old
from .findings import DEPTH
from .paths import Array
from .surfaces import Curve, Finding, minima

__all__ = ["MARKS", "ScanReport", "picture", "rows"]


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLUMNS = 4
_LARGEST = 12.0  # eV, the upper end of plots of bonds and contacts; higher walls would hide everything else
_LINES = {"wall": "C3", "hole": "C3", "extra minimum": "C1"}


def picture(curves: Sequence[Curve], reference: str | None) -> bytes:
    """Draw a panel for each curve of one kind, as PNG: energies above the curve's zero, the reference as dots.

    Args:
        curves: at least one curve.
        reference: name of the reference, for the legend.
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
    return page.figure_png(draw, (max(4.2, 3.0 * columns), 2.5 * lines + 0.3))


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
    """Return the limits of the energy axis."""
    known = energies[np.isfinite(energies)]
    if not len(known):
        return -1.0, 1.0
    low, high = float(known.min()), float(known.max())
    if kind != "torsion":
        low, high = max(low, -_LARGEST), min(high, _LARGEST)
    margin = 0.05 * max(high - low, 0.01)
    return low - margin, high + margin


# --- The result of a scan and its files ---

MARKS = {"bond": (0.6, 0.7, 0.8, 1.5, 2.0), "torsion": (), "contact": (0.8, 1.0, 1.5, 2.0)}
"""Multiples of the usual value whose energies are in the tables."""

TITLES = {"bond": "Bonds", "torsion": "Torsions", "contact": "Contacts"}

WORDS = {
    "bond": "eV above the minimum, at multiples of the bond's length",
    "torsion": "minima in a full turn of a rigid rotation, its barrier in eV",
    "contact": "two copies of the molecule: eV above separate copies, at multiples of the sum of the covalent radii",
}
"""Meaning of the numbers in the tables."""


@dataclass(eq=False)
class ScanReport:
    """The result of `scan_molecule`.

    Attributes:
        model: name of the model.
        formula: formula of the molecule.
        curves: curves of bonds, torsions and contacts.
        cutoff: largest cutoff of the model, Å.
        reference: name of the reference; None without one.
        notes: sentences on what was left out.
        members: number of members of an ensemble; 1 for a single model.
        complete: False if the scan was interrupted.
    """

    model: str
    formula: str
    curves: list[Curve]
    cutoff: float
    reference: str | None = None
    notes: list[str] = field(default_factory=list)
    members: int = 1
    complete: bool = True

    @property
    def findings(self) -> list[tuple[Curve, Finding]]:
        """All findings, curve by curve."""
        return [(curve, finding) for curve in self.curves for finding in curve.findings]

    @property
    def passed(self) -> bool:
        """Whether the scan is complete and has no findings."""
        return self.complete and not self.findings

    def of(self, kind: str) -> list[Curve]:
        """Return the curves of a kind.

        Args:
            kind: "bond", "torsion" or "contact".
        """
        return [curve for curve in self.curves if curve.path.kind == kind]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: energies in eV above the zero of each curve, distances in Å, angles in rad."""
        return {
            "model": self.model,
            "members": self.members,
            "molecule": self.formula,
            "reference": self.reference,
            "passed": self.passed,
            "complete": self.complete,
            "notes": self.notes,
            "curves": [_curve(curve) for curve in self.curves],
        }

    def write(self, prefix: Path) -> list[Path]:
        """Write PREFIX.json, PREFIX.csv, PREFIX.html and a PNG for each kind; existing files are renamed to FILE.old.

        Args:
            prefix: beginning of the files' names, with the folder.

        Returns:
            The written files. Without matplotlib there are no plots.
        """
        prefix.parent.mkdir(parents=True, exist_ok=True)
        drawn: dict[str, bytes] = {}
        if why := page.missing_plots():
            self.notes.append(why)
        else:
            drawn = {kind: picture(self.of(kind), self.reference) for kind in TITLES if self.of(kind)}
        content: dict[Path, bytes | str] = {
            _named(prefix, ".json"): json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n",
            _named(prefix, ".csv"): self._csv(),
            _named(prefix, ".html"): self._page(drawn),
            **{_named(prefix, f"_{kind}s.png"): png for kind, png in drawn.items()},
        }
        for file in self.files(prefix):
            if file in content:
                atomic_write(file, content[file], keep=True)
            else:
                keep_old(file)  # a file of another scan
        return list(content)

    @staticmethod
    def files(prefix: Path) -> list[Path]:
        """Return all files that `write` may write.

        Args:
            prefix: beginning of the files' names, with the folder.
        """
        ends = [".json", ".csv", ".html", *(f"_{kind}s.png" for kind in TITLES)]
        return [_named(prefix, end) for end in ends]

    def _csv(self) -> str:
        """Return a table with a row for each point of each curve."""
        lines = ["kind,name,coordinate,multiple,energy_eV,force,spread_eV,reference_eV,reference_force"]
        for curve in self.curves:
            path, samples = curve.path, curve.model
            theirs: dict[float, tuple[float, float]] = {}
            if curve.reference is not None:
                reference = curve.reference
                pairs = zip(curve.relative(reference).tolist(), reference.force.tolist(), strict=True)
                theirs = dict(zip(reference.values.tolist(), pairs, strict=True))
            spread = [math.nan] * len(samples.values) if samples.spread is None else samples.spread.tolist()
            columns = zip(
                samples.values.tolist(), curve.relative().tolist(), samples.force.tolist(), spread, strict=True
            )
            for x, energy, force, std in columns:
                numbers = [x, x / path.usual, energy, force, std, *theirs.get(x, (math.nan, math.nan))]
                lines.append(",".join([path.kind, path.name, *("" if math.isnan(v) else f"{v:.9g}" for v in numbers)]))
        return "\n".join(lines) + "\n"

    def _page(self, drawn: dict[str, bytes]) -> str:
        title = f"Scan of {self.formula}"
        about = self.model + (f", mean of {self.members} members" if self.members > 1 else "")
        about += f"; reference (in brackets): {self.reference}" if self.reference else ""
        count = len(self.findings)
        return page.document(
            title,
            *map(page.note, [about, *self.notes]),
            page.paragraph(f"{count} finding{'' if count == 1 else 's'}." if count else "Nothing was found."),
            *(self._section(kind, drawn) for kind in TITLES if self.of(kind)),
        )

    def _section(self, kind: str, drawn: dict[str, bytes]) -> str:
        curves, name = self.of(kind), TITLES[kind]
        words = [(c.path.name, f.text) for c in curves for f in c.findings]
        words += [(c.path.name, f"{f.text} (the reference too: no finding)") for c in curves for f in c.excused]
        return page.section(
            name,
            page.note(WORDS[kind]),
            page.table(*rows(curves, self.members > 1)),
            page.image(drawn[kind], f"energies along {name.lower()}", "wide") if kind in drawn else "",
            page.table(["", "found"], words, left=(0, 1)),
        )


def rows(curves: Sequence[Curve], ensemble: bool) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of curves of one kind; numbers of the reference are in brackets."""
    kind = curves[0].path.kind
    heads = {
        "bond": ["bond", "Å", *(f"{m:g}×" for m in MARKS[kind])],
        "torsion": ["torsion", "minima", "barrier"],
        "contact": ["contact", *(f"{m:g}×" for m in MARKS[kind]), "lowest", "at Å"],
    }[kind]
    heads += ["spread"] if ensemble else []
    return [*heads, "force jump", "findings"], [_row(curve, ensemble) for curve in curves]


def _row(curve: Curve, ensemble: bool) -> list[str]:
    path, samples = curve.path, curve.model
    energy = curve.relative()
    theirs = None if curve.reference is None else curve.relative(curve.reference)
    cells = [path.name, *([f"{path.usual:.2f}"] if path.kind == "bond" else [])]
    if path.kind == "torsion":
        cells += [_both(of(energy), None if theirs is None else of(theirs)) for of in (_rotamers, _top)]
    for mark in MARKS[path.kind]:
        cells.append(_both(curve.at(mark), None if curve.reference is None else curve.at(mark, curve.reference)))
    if path.kind == "contact":
        lowest = int(np.argmin(np.where(np.isfinite(energy), energy, np.inf)))
        cells.append(_both(float(energy[lowest]), None if theirs is None else -_top(-theirs)))
        cells.append(f"{samples.values[lowest]:.2f}")
    if ensemble:
        cells.append("–" if samples.spread is None else f"{np.nanmax(samples.spread):.2g}")
    jump = curve.jumps.get("force jump", 0.0)
    return [*cells, f"{jump:.0e}" if jump > 1e-6 else "0", str(len(curve.findings) or "–")]


def _both(own: float, other: float | None) -> str:
    """Return both numbers as "1.20 (1.31)", with "–" for a missing one."""
    texts = ["–" if v is None or not math.isfinite(v) else _short(v) for v in (own, other)]
    return texts[0] if other is None else f"{texts[0]} ({texts[1]})"


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.{1 if abs(value) >= 9.995 else 2}f}"


def _rotamers(energy: Array) -> int:
    """Return the number of minima of a full turn, whose first and last points coincide."""
    inner = energy[:-1]
    rolled = np.roll(inner, -int(np.argmax(np.where(np.isfinite(inner), inner, -np.inf))))
    return len(minima(np.append(rolled, rolled[0]), DEPTH["torsion"]))


def _top(energy: Array) -> float:
    return float(np.nanmax(energy)) if np.isfinite(energy).any() else math.nan


def _curve(curve: Curve) -> dict[str, Any]:
    path, samples, reference = curve.path, curve.model, curve.reference
    return {
        "kind": path.kind,
        "name": path.name,
        "atoms": list(path.atoms),
        "usual": path.usual,
        "unit": "rad" if path.kind == "torsion" else "Å",
        "marks": {f"{m:g}": _plain(curve.at(m)) for m in MARKS[path.kind]},
        "reference_marks": None if reference is None else
        {f"{m:g}": _plain(curve.at(m, reference)) for m in MARKS[path.kind]},
        "jumps": curve.jumps,
        "findings": [vars(finding) for finding in curve.findings],
        "excused": [vars(finding) for finding in curve.excused],
        "values": samples.values.tolist(),
        "energy": _list(curve.relative()),
        "force": _list(samples.force),
        "spread": None if samples.spread is None else _list(samples.spread),
        "reference": None if reference is None else {
            "values": reference.values.tolist(),
            "energy": _list(curve.relative(reference)),
            "force": _list(reference.force),
        },
    }  # fmt: skip


def _named(prefix: Path, end: str) -> Path:
    return prefix.with_name(prefix.name + end)


def _list(values: Array) -> list[float | None]:
    return [_plain(v) for v in values.tolist()]


def _plain(value: float) -> float | None:
    """Return NaN, which JSON does not have, as None."""
    return value if math.isfinite(value) else None
