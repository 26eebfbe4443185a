"""Model card and report: errors, plots and settings of a model, as Markdown and HTML."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from ...core import html_page as page
from ...core.files import atomic_write
from ...potential.determined import Determined
from ...potential.levels import Level
from ...potential.potential import SYMBOLS, Potential
from ...potential.prior import atomic_number
from ...version import __version__
from ..steps.batches import Frames, Loader
from ..steps.loss import UNITS, shown
from ..steps.trainer import Properties, predict
from .evaluation import Evaluation, Predictions

if TYPE_CHECKING:
    from ase import Atoms
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = [
    "Report", "digits", "ensemble_page", "model_card", "pictures", "spread_picture", "structures", "write_report",
]  # fmt: skip


def model_card(config: Mapping[str, Any], metadata: Mapping[str, Any], title: str = "Model") -> str:
    """Return the card of a model.

    Args:
        config: of the potential, as in the model file.
        metadata: as `run_training` writes it; missing entries are left out, so cards of other models work too. "about"
            has further sections: heading -> text.
        title: heading.
    """
    model = config.get("model", {})
    # models of other programs may have plain text under these names
    words = {
        name: metadata[name]
        for name in ("data", "errors", "training", "versions")
        if not isinstance(metadata.get(name, {}), Mapping)
    }
    metadata = {name: value for name, value in metadata.items() if name not in words}
    data = metadata.get("data", {})
    about = metadata.get("about", {})
    about = about if isinstance(about, Mapping) else {}
    known = {
        **_card_elements(config.get("elements") or [], data.get("elements")),
        "Level of theory": data.get("level_of_theory", "not stated"),
        **({"Levels of theory": ", ".join(data["levels"])} if data.get("levels") else {}),
        "Model": f"{model.get('name', '?')}, {metadata.get('num_parameters', '?')} parameters",
        "Cutoff": f"{model.get('cutoff', '?')} Å",
        "Units": "energy eV, length Å, forces eV/Å, stress eV/Å³, charge e",
        "Total charges": _listed(data.get("charges")),
        "Spin multiplicities": _listed(data.get("spins"), {0: "not given"}),
        "Precision of the training": metadata.get("precision", "not stated"),
        "Licence of the model": metadata.get("licence", "not stated"),
        "Licence of the data": data.get("licence", "not stated"),
        # cards of the shipped models name the papers in their sections
        "Citation of the data": data.get("citation", "see below" if about else "not stated"),
        **{name.capitalize(): value for name, value in words.items()},
    }
    lines = [f"# {title}", "", *_markdown_table(["", ""], known.items())]
    for heading, text in about.items():
        lines += [f"## {heading}", "", str(text), ""]
    lines += _errors(metadata.get("errors", {}))
    lines += _card_references(config)
    lines += _data(data)
    if "training" in metadata:
        training = metadata["training"]
        lines += ["## Training", ""]
        lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in training.items()]
        lines.append("")
    if "versions" in metadata:
        lines += ["## Versions", "", *(f"- {name} {version}" for name, version in metadata["versions"].items()), ""]
    if "config" in metadata:
        text = yaml.safe_dump(metadata["config"], sort_keys=False, allow_unicode=True)
        lines += ["## Configuration", "", "```yaml", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return lines of a table; none without rows."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    top = "| " + " | ".join(heads) + " |" if any(heads) else "|" + " |" * len(heads)
    return [top, "|" + "---|" * len(heads), *lines, ""] if lines else []


def _card_elements(elements: Sequence[int], trained: Sequence[int] | None) -> dict[str, str]:
    """Return elements of the training frames, and those that only the starting model knows."""
    kinds = {"Elements": elements}
    if trained is not None:
        kinds = {
            "Elements": [z for z in elements if z in trained],
            "Elements of the starting model only": [z for z in elements if z not in trained],
        }
    found = {name: ", ".join(SYMBOLS[int(z)] for z in kind) for name, kind in kinds.items() if kind}
    return {"Elements": "not stated", **found}


def _errors(errors: Mapping[str, Any]) -> list[str]:
    """Return a table of errors by subset and property, and of force errors by element."""
    rows: list[list[Any]] = []
    for subset, properties in sorted(errors.items(), reverse=True):
        for name, value in sorted(properties.items()):
            entries = sorted(value.items()) if name == "forces_by_element" else [("", value)]
            for element, error in entries:
                label = f"forces on {element}" if element else name.replace("_", " ")
                (mae, unit), (rmse, _) = shown(error["mae"], error["unit"]), shown(error["rmse"], error["unit"])
                rows.append([subset, label, f"{mae:.3f}", f"{rmse:.3f}", unit, error["count"]])
    lines = _markdown_table(["frames", "property", "MAE", "RMSE", "unit", "labels"], rows)
    return ["## Errors", "", *lines] if lines else []


def _card_references(config: Mapping[str, Any]) -> list[str]:
    """Return a table of the reference energies of each level of theory."""
    levels = {config.get("level"): config}
    levels |= {name: Level(None, None, own).complete(config) for name, own in (config.get("levels") or {}).items()}
    lines = []
    for level, own in levels.items():
        for prior in own.get("priors") or []:
            if prior.get("name") == "atomref" and prior.get("energies"):
                energies = {atomic_number(z, len(SYMBOLS)): energy for z, energy in prior["energies"].items()}
                words: list[str] = []
                if own.get("compositions") is not None:
                    determined = Determined(own["compositions"])
                    sentence = determined.sentence(own.get("elements") or energies)
                    words = [f"{sentence[0].upper()}{sentence[1:]}.", ""]
                    energies = {z: energy for z, energy in energies.items() if z in determined.elements}
                rows = [(SYMBOLS[z], f"{energy:.6f}") for z, energy in energies.items()]
                name = [f"### {level}", ""] if len(levels) > 1 else []
                lines += [*name, *words, *_markdown_table(["element", "eV"], rows)]
    return ["## Reference energies", "", *lines] if lines else []


def _data(data: Mapping[str, Any]) -> list[str]:
    if not data:
        return []
    lines = ["## Data", ""]
    lines += [f"- `{path}`, sha256 {digest}" for path, digest in data.get("files", {}).items()]
    if "frames" in data:
        lines.append("- frames: " + ", ".join(f"{count} {subset}" for subset, count in data["frames"].items()))
    if "split" in data:
        lines.append(f"- split: {data['split']}")
    return [*lines, "", *_card_sources(data.get("sources") or [])]


def _card_sources(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the sources of a training on several levels of theory."""
    rows = [
        [source["level"], ", ".join(f"`{file}`" for file in source["files"]), source["frames"],
         source.get("licence", "not stated"), source.get("citation", "not stated")]
        for source in sources
    ]  # fmt: skip
    lines = _markdown_table(["level of theory", "files", "training frames", "licence", "citation"], rows)
    return ["## Sources", "", *lines] if lines else []


def _listed(values: Any, names: Mapping[Any, str] | None = None) -> str:
    names = names or {}
    return ", ".join(str(names.get(v, v)) for v in values) if values else "not stated"


# --- The plots of the report. They are drawn without pyplot: no window, no global state ---

_SUBSETS = ("train", "validation")
_MOST_POINTS = 20_000  # of a parity plot
_MOST_STICKS = 500  # atoms of a structure that is drawn with bonds
_MOSTLY_VACUUM = 40  # volumes of its atoms that a cell has, from which on it is a molecule in a box
_FILES = {"energy_per_atom": "energy_parity", "forces": "force_parity"}  # others: their name + _parity


def pictures(history: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Evaluation]) -> dict[str, bytes]:
    """Draw the learning curve, and for each evaluation parity plots and force errors by element, for the labels that
    there are.

    Args:
        history: one row of metrics per epoch.
        evaluations: of the final weights, by subset: "test", or "test, LEVEL" for each of several levels of theory.

    Returns:
        File name without ".png" -> PNG. The names end in _1, _2, … if there are several evaluations.
    """
    curves = _curves(history, {name: error for e in evaluations.values() for name, error in e.errors.items()})
    found = {
        "learning_curve": page.figure_png(
            partial(_learning_curve, history, curves), (5.2, max(4.2, 0.8 + 1.6 * len(curves)))
        )
    }
    for number, (subset, evaluation) in enumerate(evaluations.items(), 1):
        end = f"_{number}" if len(evaluations) > 1 else ""
        for name, pair in evaluation.pairs.items():
            if len(pair[0]) and name in evaluation.errors:
                draw = partial(_parity, pair, evaluation.errors[name], name, subset)
                found[_FILES.get(name, f"{name}_parity") + end] = page.plot_png(draw)
        by_element = evaluation.errors.get("forces_by_element")
        if by_element:
            size = (max(5.2, 0.4 * len(by_element)), 4.2)
            found[f"errors_by_element{end}"] = page.plot_png(partial(_elements, by_element, subset), size)
    return found


def _frames_of(subset: str) -> str:
    """Return "test frames" for "test", and "test frames, LEVEL" for "test, LEVEL"."""
    kind, comma, level = subset.partition(", ")
    return f"{kind} frames{comma}{level}"


def _title(text: str, subset: str) -> str:
    return textwrap.fill(f"{text}, {_frames_of(subset)}", 50)


def digits(value: float, count: int = 4) -> str:
    """Return a number with this many significant digits, and all before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}"


def structures(frames: Sequence[Atoms]) -> list[bytes]:
    """Draw a small picture of each structure, seen along its shortest principal axis, as PNG."""
    return [page.plot_png(partial(_structure, atoms), size=(1.8, 1.5)) for atoms in frames]


def spread_picture(error: np.ndarray, deviation: np.ndarray, name: str, unit: str) -> bytes:
    """Draw |error| of an ensemble's mean over the standard deviation of its members, on logarithmic axes, as PNG."""

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

    return page.plot_png(draw)


def _curves(history: Sequence[Mapping[str, Any]], errors: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return property and unit of each learning curve; the energy per atom stands for the energy too."""
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
    """Draw a panel for each property, since they differ in unit and size."""
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
    """Return multiples of powers of ten that are labelled on an axis over this range."""
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
    axes.set(xlabel=f"reference{unit}", ylabel=f"predicted{unit}", title=_title(title.capitalize(), subset))
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_box_aspect(1)
    axes.locator_params(nbins=6)


def _elements(errors: Mapping[str, Any], subset: str, axes: Axes) -> None:
    names = list(errors)
    for shift, kind in ((-0.2, "mae"), (0.2, "rmse")):
        values = [1e3 * errors[name][kind] for name in names]
        axes.bar([i + shift for i in range(len(names))], values, 0.38, label=kind.upper())
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="force error (meV/Å)", title=_title("Force errors by element", subset))
    axes.legend()


def _structure(atoms: Atoms, axes: Axes) -> None:
    """Draw balls and sticks, the nearest last, and the cell of a structure that fills it."""
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


# --- The report of a training: report.html (self-contained), its plots as PNG, and outliers.xyz ---


@dataclass
class Report:
    """The results of a training that a report shows.

    Attributes:
        title: usually the folder's name.
        history: one row of metrics per epoch.
        evaluations: subset, or "subset, LEVEL" for each of several levels of theory -> errors of the final weights; the
            last subset (of each level) is shown in detail.
        frames: subset -> frames.
        potential: the final one.
        properties: those that were evaluated.
        config: the configuration as plain data.
        metadata: of the model file.
        costs: name -> text: time, speed, memory.
        outliers: number of frames to show (of each level).
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


def write_report(folder: Path, report: Report) -> None:
    """Write report.html, the plots as PNG files, and outliers.xyz. Without matplotlib there are no plots.

    Args:
        folder: the folder of the files.
        report: the contents.
    """
    last = {name.partition(", ")[2]: name for name in report.evaluations}.values()  # of each level
    detailed = {name: report.evaluations[name] for name in last}
    drawn = {} if page.missing_plots() else pictures(report.history, detailed)
    found = {name: _outliers(report, name) for name in detailed}
    for name, content in drawn.items():
        atomic_write(folder / f"{name}.png", content)
    if any(found.values()):
        from ase.io import write

        text = io.StringIO()
        write(text, [outlier.atoms for part in found.values() for outlier in part], format="extxyz")
        atomic_write(folder / "outliers.xyz", text.getvalue())
    atomic_write(folder / "report.html", _page(report, drawn, found))


@dataclass
class _Outlier:
    """A frame with large errors: its source, the rms error of each property (NaN without label), and the structure with
    predictions in its calculator, and labels and errors in `info` and `arrays`."""

    name: str
    errors: dict[str, float]
    atoms: Atoms


def _outliers(report: Report, subset: str) -> list[_Outlier]:
    """Return the frames with the largest errors, worst first: errors of forces, else of the energy, else of another
    label."""
    frames, columns = report.frames[subset], dict(report.evaluations[subset].by_frame)
    indices = columns.pop("frame", ())
    candidates = [name for name in ("forces", "energy_per_atom", *columns) if name in columns]
    ranked = next((columns[name] for name in candidates if np.isfinite(columns[name]).any()), np.zeros(0))
    found = []
    for position in np.argsort(-np.nan_to_num(ranked, nan=-1.0), kind="stable")[: report.outliers].tolist():
        if np.isfinite(ranked[position]):
            batch = next(iter(Loader(frames)([[position]]))).to(report.potential.device)
            result = predict(report.potential, batch, report.properties)
            names = [frames.name(position)]
            (atoms,) = Predictions.of(batch.sample, result, report.potential.outputs, names).frames()
            errors = {name: float(column[position]) for name, column in columns.items()}
            atoms.info.update({f"rms_error_{name}": value for name, value in errors.items()})
            found.append(_Outlier(frames.data.name(int(indices[position])), errors, atoms))
    return found


def _page(report: Report, drawn: Mapping[str, bytes], found: Mapping[str, Sequence[_Outlier]]) -> str:
    data = report.metadata.get("data", {})
    counts = ", ".join(f"{len(frames)} {name.replace(', ', ' at ', 1)}" for name, frames in report.frames.items())
    detailed = {subset: report.evaluations[subset] for subset in found}
    spread = (
        "Spread: RMSE over the standard deviation of the labels, energies minus the reference energies; 100 % means no "
        "better than predicting the mean."
    )
    by_file = [_file_table(evaluation, report.frames[subset], subset) for subset, evaluation in detailed.items()]
    plots = page.figures((name.replace("_", " "), content) for name, content in drawn.items())
    return page.document(
        report.title,
        page.note(_headline(report)),
        page.note(_subject(report)),
        page.section("Errors", _error_table(report.evaluations), page.note(spread), *by_file, plots),
        *(page.section(f"Forces by element, {_frames_of(s)}", _element_table(e)) for s, e in detailed.items()),
        *(page.section(f"Largest errors, {_frames_of(s)}", _outlier_table(found[s], e)) for s, e in detailed.items()),
        page.note("Structures, labels and predictions are in outliers.xyz." if any(found.values()) else ""),
        page.section("Time and memory", page.facts(report.costs)),
        page.section(
            "Data",
            page.paragraph(f"{counts}; split: {data.get('split', '')}"),
            page.table(["data file", "sha256"], data.get("files", {}).items(), code=True, left=(0, 1)),
            _reference_table(report.potential),
        ),
        page.section("Configuration", page.configuration(report.config)),
    )


def ensemble_page(title: str, metrics: Mapping[str, Any], members: Mapping[str, Any], images: Sequence[bytes]) -> str:
    """Return the report of an ensemble.

    Args:
        title: usually the folder's name.
        metrics: errors of the mean and its spread, as in ensemble_metrics.json.
        members: name -> errors of each, on the same frames.
        images: plots, PNG.
    """
    errors = [row for who, own in (("mean", metrics["errors"]), *members.items()) for row in _error_rows(who, own)]
    spread = [
        [name.replace("_", " "), *(digits(shown(v[key], v["unit"])[0]) for key in ("rms_spread", "rmse")),
         shown(0.0, v["unit"])[1], "–" if v["ratio"] is None else f"{v['ratio']:.2f}", f"{v['correlation']:.2f}"]
        for name, v in metrics["spread"].items()
    ]  # fmt: skip
    meaning = (
        "Standard deviation of the members and error of their mean, by component as above; the plots show lengths of "
        "vectors. The correlation is that of the ranks: 1 where a larger spread always means a larger error."
    )
    heads = ["", "rms spread", "RMSE", "unit", "RMSE / spread", "correlation"]
    return page.document(
        title,
        page.note(f"{len(members)} members; errors on {metrics['subset']} frames"),
        page.section("Errors", page.table(["", "property", "MAE", "RMSE", "unit", "labels"], errors, left=(0, 1, 4))),
        page.section("Spread", page.paragraph(meaning), page.table(heads, spread, left=(0, 3))),
        page.figures(("error over spread", picture) for picture in images),
    )


def _headline(report: Report) -> str:
    model = report.config["model"]
    best = max((row["epoch"] for row in report.history if row["best"]), default="?")
    return (
        f"{model['name']}, {report.metadata.get('num_parameters', '?')} parameters; best of {len(report.history)} "
        f"epochs: {best}; torchmdnet2 {__version__}"
    )


def _subject(report: Report) -> str:
    """Return the domain of the model: levels of theory, elements, cutoff."""
    data = report.metadata.get("data", {})
    theory = "; ".join(data.get("levels") or [data.get("level_of_theory", "not stated")])
    elements = ", ".join(SYMBOLS[z] for z in report.potential.elements_of_levels)
    named = f"{theory}; " if theory != "not stated" else ""
    return f"{named}elements {elements}; cutoff {report.potential.cutoff} Å"


def _reference_table(potential: Potential) -> str:
    """Return a table of the reference energies, with the level of theory if there are several."""
    levels = [[name] for name in potential.level_names] or [[]]
    rows = [
        [SYMBOLS[int(z)], f"{energy:.6f}", "eV", *level]
        for level in levels
        for prior in (potential.at_level(*level) if level else potential).config["priors"]
        if prior["name"] == "atomref"
        for z, energy in (prior["energies"] or {}).items()
    ]
    return page.table(["element", "reference energy", "unit", *("level" for _ in levels[0])], rows, left=(0, 2, 3))


def _error_rows(who: str, errors: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of whose errors they are, the property and the numbers."""
    rest = {name: error for name, error in errors.items() if name != "forces_by_element"}
    return [[who, name.replace("_", " "), *_numbers(error)] for name, error in rest.items()]


def _error_table(evaluations: Mapping[str, Evaluation]) -> str:
    rows = [
        [*row, _of_spread(evaluation, name)]
        for subset, evaluation in reversed(list(evaluations.items()))
        for name, error in evaluation.errors.items()
        for row in _error_rows(subset, {name: error})
    ]
    return page.table(["frames", "property", "MAE", "RMSE", "unit", "labels", "of spread"], rows, left=(0, 1, 4))


def _element_table(evaluation: Evaluation) -> str:
    rows = [[z, *_numbers(error)] for z, error in evaluation.errors.get("forces_by_element", {}).items()]
    return page.table(["element", "MAE", "RMSE", "unit", "labels"], rows, left=(0, 3))


def _of_spread(evaluation: Evaluation, name: str) -> str:
    """Return RMSE relative to the standard deviation of the labels, in percent; "" if there is none."""
    labels = evaluation.pairs[name][0] if name in evaluation.pairs else np.zeros(0)
    spread = float(labels.std()) if len(labels) else 0.0
    return f"{digits(100 * evaluation.errors[name]['rmse'] / spread, 2)} %" if spread > 0 else ""


def _numbers(error: Mapping[str, Any]) -> list[str]:
    (mae, unit), (rmse, _) = shown(error["mae"], error["unit"]), shown(error["rmse"], error["unit"])
    return [digits(mae), digits(rmse), unit, str(error["count"])]


def _columns(errors: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return property -> unit of its errors, and headings with the units that errors are shown in."""
    units = {name: errors[name]["unit"] if name in errors else "" for name in names}
    return units, [name.replace("_", " ") + (f"\n({shown(0.0, of)[1]})" if of else "") for name, of in units.items()]


def _value(error: float, unit: str) -> str:
    """Return an error in the unit that it is shown in; "–" without labels."""
    return digits(shown(error, unit)[0]) if math.isfinite(error) else "–"


def _file_table(evaluation: Evaluation, frames: Frames, subset: str) -> str:
    """Return a table of rms errors by data file, if there are several."""
    columns = dict(evaluation.by_frame)
    origin = np.array([frames.data.name(int(i)).rpartition(", frame ")[0] for i in columns.pop("frame", ())])
    files = sorted(set(origin.tolist()))
    if not 1 < len(files) <= 200:
        return ""

    def rms(errors: np.ndarray) -> float:
        known = errors[np.isfinite(errors)]
        return float(np.sqrt(np.mean(known**2))) if len(known) else math.nan

    units, heads = _columns(evaluation.errors, columns)
    rows = [
        [file, (origin == file).sum(), *(_value(rms(columns[name][origin == file]), of) for name, of in units.items())]
        for file in files
    ]
    return page.paragraph(f"Rms error of frames by origin, {_frames_of(subset)}:") + page.table(
        ["file", "frames", *heads], rows
    )


def _outlier_table(found: Sequence[_Outlier], evaluation: Evaluation) -> str:
    units, heads = _columns(evaluation.errors, found[0].errors if found else ())
    drawn = [] if page.missing_plots() else structures([outlier.atoms for outlier in found])
    rows = []
    for outlier, picture in zip_longest(found, drawn):
        values = [_value(outlier.errors[name], unit) for name, unit in units.items()]
        shown_atoms = page.image(picture, outlier.name, "structure") if picture else ""
        rows.append([outlier.name, outlier.atoms.get_chemical_formula(), *values, shown_atoms])
    return page.table(["frame", "formula", *heads, ""], rows, left=(0, 1))
