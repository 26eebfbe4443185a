"""The report of a training: report.html (self-contained), its plots as PNG, and outliers.xyz."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ...files import atomic_write
from ...html_page import breakable, document, image, table
from ...potential import SYMBOLS, Potential
from ...version import __version__
from ..steps.batches import Frames
from ..steps.metrics import shown
from ..steps.trainer import Properties
from .evaluation import Evaluation
from .outliers import Outlier, find_outliers, outlier_frames
from .plots import digits, pictures, structures

__all__ = ["Report", "ensemble_page", "write_report"]


@dataclass
class Report:
    """What a report is made from.

    Attributes:
        title: usually the folder's name.
        history: one row of metrics per epoch.
        evaluations: subset -> errors of the final weights; the last subset is shown in detail.
        frames: subset -> frames.
        potential: the final one.
        properties: what it was evaluated for.
        config: the configuration as plain data.
        metadata: of the model file.
        costs: name -> text: time, speed, memory.
        outliers: how many frames to show.
    """

    title: str
    history: Sequence[Mapping[str, Any]]
    evaluations: Mapping[str, Evaluation]
    frames: Mapping[str, Frames]
    potential: Potential
    properties: Properties
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    costs: Mapping[str, str]
    outliers: int = 10


def write_report(folder: Path, report: Report) -> list[Path]:
    """Write report.html, the PNG files and outliers.xyz.

    Args:
        folder: where they go.
        report: what it is made from.

    Returns:
        The files written.
    """
    subset = list(report.evaluations)[-1]
    evaluation, frames = report.evaluations[subset], report.frames[subset]
    drawn = pictures(report.history, evaluation, subset)
    found = find_outliers(report.potential, frames, evaluation, report.properties, report.outliers)
    written = []
    for name, content in drawn.items():
        atomic_write(folder / f"{name}.png", content)
        written.append(folder / f"{name}.png")
    if found:
        from ase.io import write

        text = io.StringIO()
        write(text, outlier_frames(found), format="extxyz")
        atomic_write(folder / "outliers.xyz", text.getvalue())
        written.append(folder / "outliers.xyz")
    atomic_write(folder / "report.html", _page(report, subset, drawn, found))
    return [*written, folder / "report.html"]


def _page(report: Report, subset: str, drawn: Mapping[str, bytes], found: Sequence[Outlier]) -> str:
    data = report.metadata.get("data", {})
    files = table(
        ["data file", "sha256"],
        [[path, digest] for path, digest in data.get("files", {}).items()],
        code=True,
        left=(0, 1),
    )
    by_element = report.evaluations[subset].errors.get("forces_by_element", {})
    body = [
        f"<h1>{html.escape(report.title)}</h1>",
        f"<p class=note>{html.escape(_headline(report))}</p>",
        f"<p class=note>{html.escape(_subject(report))}</p>",
        "<h2>Errors</h2>",
        _error_table(report.evaluations),
        "<p class=note>Spread: RMSE over the standard deviation of the labels, energies less the reference energies; "
        "100 % means no better than predicting the mean.</p>",
        _file_table(report.evaluations[subset], report.frames[subset], subset),
        "<div class=pictures>",
        *(image(content, name.replace("_", " ")) for name, content in drawn.items()),
        "</div>",
    ]
    if by_element:
        rows = [[z, *_numbers(e)] for z, e in by_element.items()]
        body += [
            f"<h2>Forces by element, {subset} frames</h2>",
            table(["element", "MAE", "RMSE", "unit", "labels"], rows, left=(0, 3)),
        ]
    if found:
        body += [f"<h2>Largest errors, {subset} frames</h2>", _outlier_table(found, report.evaluations[subset].errors)]
        body.append("<p class=note>Structures, labels and predictions are in outliers.xyz.</p>")
    body += ["<h2>Time and memory</h2>", table(["", ""], [[k, v] for k, v in report.costs.items()], left=(0, 1))]
    counts = ", ".join(f"{len(frames)} {name}" for name, frames in report.frames.items())
    body += ["<h2>Data</h2>", f"<p>{html.escape(counts)}; split: {html.escape(str(data.get('split', '')))}</p>", files]
    references = _references(report.potential)
    if references:
        body.append(table(["element", "reference energy", "unit"], references, left=(0, 2)))
    text = yaml.safe_dump(dict(report.config), sort_keys=False, allow_unicode=True)
    body += ["<h2>Configuration</h2>", f"<pre>{html.escape(text)}</pre>"]
    return document(report.title, body)


def ensemble_page(title: str, metrics: Mapping[str, Any], members: Mapping[str, Any], images: Sequence[bytes]) -> str:
    """The report of an ensemble.

    Args:
        title: usually the folder's name.
        metrics: errors of the mean and its spread, as in ensemble_metrics.json.
        members: name -> errors of each, on the same frames.
        images: plots, PNG.
    """
    rows = [
        [who, name.replace("_", " "), *_numbers(error)]
        for who, errors in (("mean", metrics["errors"]), *members.items())
        for name, error in errors.items()
        if name != "forces_by_element"
    ]
    spread = [
        [name.replace("_", " "), *(digits(shown(v[key], v["unit"])[0]) for key in ("rms_spread", "rmse")),
         shown(0.0, v["unit"])[1], "–" if v["ratio"] is None else f"{v['ratio']:.2f}", f"{v['correlation']:.2f}"]
        for name, v in metrics["spread"].items()
    ]  # fmt: skip
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=note>{len(members)} members; errors on {metrics['subset']} frames</p>",
        "<h2>Errors</h2>",
        table(["", "property", "MAE", "RMSE", "unit", "labels"], rows, left=(0, 1, 4)),
        "<h2>Spread</h2>",
        "<p>Standard deviation of the members beside the error of their mean, by component as above; the plots show "
        "lengths of vectors. The correlation is that of the ranks: 1 where a larger spread always means a larger "
        "error.</p>",
        table(["", "rms spread", "RMSE", "unit", "RMSE / spread", "correlation"], spread, left=(0, 3)),
        "<div class=pictures>",
        *(image(picture, "error over spread") for picture in images),
        "</div>",
    ]
    return document(title, body)


def _headline(report: Report) -> str:
    model = report.config["model"]
    best = max((row["epoch"] for row in report.history if row["best"]), default="?")
    return (
        f"{model['name']}, {report.metadata.get('num_parameters', '?')} parameters; best of {len(report.history)} "
        f"epochs: {best}; torchmdnet2 {__version__}"
    )


def _subject(report: Report) -> str:
    """What the model is for: level of theory, elements, cutoff."""
    theory = report.metadata.get("data", {}).get("level_of_theory", "not stated")
    elements = ", ".join(SYMBOLS[z] for z in report.potential.elements)
    named = f"{theory}; " if theory != "not stated" else ""
    return f"{named}elements {elements}; cutoff {report.potential.cutoff} Å"


def _references(potential: Potential) -> list[list[str]]:
    """Rows of the reference energies."""
    tables = [p["energies"] for p in potential.config["priors"] if p["name"] == "atomref" and p["energies"]]
    return [[SYMBOLS[int(z)], f"{energy:.6f}", "eV"] for table in tables for z, energy in table.items()]


def _error_table(evaluations: Mapping[str, Evaluation]) -> str:
    rows = [
        [subset, name.replace("_", " "), *_numbers(error), _of_spread(evaluation, name, error)]
        for subset, evaluation in reversed(list(evaluations.items()))
        for name, error in evaluation.errors.items()
        if name != "forces_by_element"
    ]
    return table(["frames", "property", "MAE", "RMSE", "unit", "labels", "of spread"], rows, left=(0, 1, 4))


def _of_spread(evaluation: Evaluation, name: str, error: Mapping[str, Any]) -> str:
    """RMSE as a part of the standard deviation of the labels, in percent; "" where there is none."""
    labels = evaluation.pairs[name][0] if name in evaluation.pairs else np.zeros(0)
    spread = float(labels.std()) if len(labels) else 0.0
    return f"{digits(100 * error['rmse'] / spread, 2)} %" if spread > 0 else ""


def _numbers(error: Mapping[str, Any]) -> list[str]:
    (mae, unit), (rmse, _) = shown(error["mae"], error["unit"]), shown(error["rmse"], error["unit"])
    return [digits(mae), digits(rmse), unit, str(error["count"])]


def _file_table(evaluation: Evaluation, frames: Frames, subset: str) -> str:
    """Rms errors by data file, where there are several."""
    if "frame" not in evaluation.by_frame:
        return ""
    origin = np.array([frames.data.name(int(i)).rpartition(", frame ")[0] for i in evaluation.by_frame["frame"]])
    files = sorted(set(origin.tolist()))
    names = [name for name in evaluation.by_frame if name != "frame"]
    if not 1 < len(files) <= 200:
        return ""
    units = [evaluation.errors[name]["unit"] if name in evaluation.errors else "" for name in names]
    rows = []
    for file in files:
        columns = [evaluation.by_frame[name][origin == file] for name in names]
        known = [c[np.isfinite(c)] for c in columns]
        rms = [float(np.sqrt(np.mean(c**2))) if len(c) else None for c in known]
        values = ["–" if r is None else digits(shown(r, unit)[0]) for r, unit in zip(rms, units, strict=True)]
        rows.append([file, str(int((origin == file).sum())), *values])
    heads = [f"{name.replace('_', ' ')}{_in(unit)}" for name, unit in zip(names, units, strict=True)]
    return f"<p>Rms error of frames by origin, {subset}:</p>" + table(["file", "frames", *heads], rows)


def _outlier_table(found: Sequence[Outlier], errors: Mapping[str, Any]) -> str:
    images = structures([outlier.atoms for outlier in found])
    units = {name: errors[name]["unit"] if name in errors else "" for name in found[0].errors}
    rows = []
    for outlier, picture in zip(found, images, strict=True):
        values = [
            digits(shown(value, units[name])[0]) if np.isfinite(value) else "–"
            for name, value in outlier.errors.items()
        ]
        rows.append([breakable(outlier.name), html.escape(outlier.atoms.get_chemical_formula()), *values,
                     image(picture, outlier.name, "structure")])  # fmt: skip
    heads = [f"{name.replace('_', ' ')}{_in(units[name])}" for name in found[0].errors]
    return table(["frame", "formula", *heads, ""], rows, escaped=True, left=(0, 1))


def _in(unit: str) -> str:
    """The unit that errors are shown in, for a heading."""
    return f"\n({shown(0.0, unit)[1]})" if unit else ""
