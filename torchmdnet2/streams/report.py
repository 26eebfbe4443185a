"""The report of a run as one HTML file: counts, distributions, failures, pictures of the lowest structures.

It is made from the table that a run writes block by block, so that the report of a resumed run is complete too.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core import html_page as page
from ..core.files import atomic_write
from ..core.pipeline import rate_text
from ..errors import needs_extra
from ..training.reporting.report import structures as pictures_of
from .records import RecordFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["require_plots", "write_report"]

_BEST, _REASONS = 12, 20
_DISTRIBUTIONS = {
    "above": "energy above the lowest of the same formula (eV)",
    "steps": "steps",
    "largest_force": "largest force (eV/Å)",
    "novelty": "novelty",
    "rate": "structures a second",
}


def require_plots() -> None:
    """Raise MissingBackend if matplotlib is not installed."""
    with needs_extra("plot"):
        import matplotlib  # noqa: F401


def write_report(path: Path, title: str, rows: Path, failed: Path, results: Path) -> None:
    """Write the report.

    Args:
        path: path of the HTML file.
        title: title as plain text.
        rows: table of the run, with the columns of CSV results and the `seconds` of each structure.
        failed: list of failures.
        results: file of the structures, in the order of the table; not read if it is CSV.
    """
    lowest: dict[str, float] = {}
    columns: dict[str, list[float]] = {
        name: [] for name in (*_DISTRIBUTIONS, "record", "energy", "seconds", "converged")
    }
    formulas: list[str] = []
    changed, relaxed = 0, False
    with open(rows, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            formula, energy = row["formula"] + row["charge"], float(row["energy"])
            whole = row["bonds_changed"] in ("", "0") and row["converged"] != "False"
            if whole:
                lowest[formula] = min(energy, lowest.get(formula, np.inf))
            changed += row["bonds_changed"] not in ("", "0")
            relaxed |= row["converged"] != ""
            formulas.append(formula)
            for name in ("record", "energy", "steps", "largest_force", "novelty", "seconds"):
                columns[name].append(float(row[name] or "nan"))
            columns["converged"].append(whole)
    found = {name: np.array(values, float) for name, values in columns.items()}
    found["above"] = found["energy"] - [lowest.get(formula, np.nan) for formula in formulas]
    found["rate"] = 1 / np.maximum(found["seconds"], 1e-9)
    with open(failed, encoding="utf-8") as file:
        reasons, records = Counter[str](), set()
        for line in file:
            record, _, reason = line.rstrip("\n").partition(": ")
            records.add(record)
            reasons[reason] += 1
    of_relaxation = {
        "not converged, or with changed bonds": int((found["converged"] == 0).sum()),
        "with changed bonds": changed,
    }
    summary = {
        "structures": len(formulas),
        "records with failures": len(records),
        **(of_relaxation if relaxed else {}),
        "novelty above 1": int((found["novelty"] > 1).sum()),
        "time": f"{found['seconds'].sum():.1f} s, {rate_text(len(formulas), found['seconds'].sum())} a second",
    }
    best = nsmallest(_BEST, np.flatnonzero(found["converged"] == 1).tolist(), key=lambda k: (found["above"][k], k))
    further = len(reasons) - _REASONS
    content = page.document(
        title,
        page.facts(summary),
        page.section("Distributions", page.figures(_histograms(found))),
        page.section("Lowest structures", *_lowest(results, best, found, relaxed)),
        page.section(
            "Failures",
            page.table(["reason", "records"], reasons.most_common(_REASONS)) or page.paragraph("None."),
            page.note(f"{further} further reasons are in {failed.name}." if further > 0 else ""),
        ),
    )
    atomic_write(path, content)


def _histograms(found: dict[str, np.ndarray]) -> Iterator[tuple[str, bytes]]:
    for name, label in _DISTRIBUTIONS.items():
        values = found[name][np.isfinite(found[name])]
        if len(values) and np.ptp(values) > 0:
            yield f"histogram: {label}", page.plot_png(partial(_draw, values, label), (5.2, 3.0))


def _draw(values: np.ndarray, label: str, axes: Axes) -> None:
    axes.hist(values, bins=min(60, max(10, len(values) // 10)))
    axes.set(xlabel=label, ylabel="structures")


def _lowest(results: Path, best: Sequence[int], columns: dict[str, np.ndarray], relaxed: bool) -> list[str]:
    if results.suffix.lower() == ".csv":
        return [page.paragraph("A table has no positions: write .sdf, .xyz or .h5 to see the structures.")]
    wanted, found = set(best), {}
    for place, record in enumerate(RecordFile(str(results))):
        if place in wanted and record.starts:
            found[place] = record.starts[0]
            found[place].info.setdefault("name", record.name or found[place].get_chemical_formula())
            if len(found) == len(wanted):
                break
    order = [place for place in best if place in found]
    lines = []
    for place, picture in zip(order, pictures_of([found[place] for place in order]), strict=True):
        name = str(found[place].info["name"])
        numbers = [f"{columns[key][place]:.3f}" for key in ("energy", "above", "novelty")]
        lines.append([page.image(picture, name, "structure"), name, f"{columns['record'][place]:.0f}", *numbers])
    which = "; converged, with unchanged bonds" if relaxed else ""
    return [
        page.note(f"By energy above the lowest of the same formula{which}. Records are counted from 0 in the input."),
        page.table(["", "name", "record", "energy (eV)", "above (eV)", "novelty"], lines, left=(0, 1)),
    ]
