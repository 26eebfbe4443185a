"""The report of active learning: labels against stability and errors, in one HTML file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..files import atomic_write
from ..html_page import document, figure_png, image, table
from ..training.reporting.plots import digits
from ..version import __version__
from .config import LearnConfig
from .summary import RoundSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_report"]


def write_report(
    path: Path, title: str, rounds: Sequence[RoundSummary], config: LearnConfig, level: str, reason: str
) -> None:
    """Write report.html.

    Args:
        path: of the file.
        title: usually the folder's name.
        rounds: all so far.
        config: of the run.
        level: level of theory of the labels.
        reason: why the run ended; "" while it goes on.
    """
    last = rounds[-1]
    state = f"stopped: {reason}" if reason else "not finished"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=note>{html.escape(state)}; {last.asked} labels asked for, {last.failed} failed; "
        f"{html.escape(level)}; torchmdnet2 {__version__}</p>",
        _pictures(rounds),
        "<h2>Rounds</h2>",
        _rounds(rounds),
        "<p class=note>New frames: errors of the models before they were trained on these frames, so that they are "
        "errors on unseen frames. Validation: mean of the members after training. Energies: mean absolute error; "
        "forces: root mean square error of components.</p>",
        "<h2>Stability</h2>",
        _stability(rounds),
        "<p class=note>Spread: standard deviation of the members' forces, on the atom of a frame where it is largest."
        "</p>",
        "<h2>Configuration</h2>",
        f"<pre>{html.escape(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))}</pre>",
    ]
    atomic_write(path, document(title, body))


def _pictures(rounds: Sequence[RoundSummary]) -> str:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "<p class=note>For a picture of the progress, pip install matplotlib and resume the run.</p>"
    return f"<div class=pictures>{image(figure_png(lambda f: _draw(rounds, f), (5.2, 6.0)), 'progress')}</div>"


def _draw(rounds: Sequence[RoundSummary], figure: Figure) -> None:
    asked = [r.asked for r in rounds]
    stable, errors = figure.subplots(2, 1, sharex=True)
    for k, first in enumerate(rounds[0].temperatures):
        whole = [r.temperatures[k].whole / r.temperatures[k].replicas for r in rounds]
        stable.plot(asked, whole, "o-", label=f"{first.temperature:g} K")
    stable.set(ylim=(-0.03, 1.03), ylabel="replicas that stayed whole", title="Progress")
    new = [(r.asked, 1e3 * r.new_errors["forces"]) for r in rounds if r.new_errors]
    errors.plot(asked, [1e3 * r.validation_errors["forces"] for r in rounds], "o-", label="validation frames")
    if new:
        errors.plot(*zip(*new, strict=True), "s--", label="new frames, before training on them")
    errors.set(ylim=(0, None), xlabel="labels asked for", ylabel="rms force error (meV/Å)")
    for axes in (stable, errors):
        axes.grid(color="0.9", lw=0.6)
        axes.legend(fontsize=8)


def _rounds(rounds: Sequence[RoundSummary]) -> str:
    rows = []
    for r in rounds:
        new = r.new_errors or {}
        chosen = ", ".join(f"{count} {reason}" for reason, count in r.reasons.items())
        rows.append(
            [str(r.round), str(r.asked), str(r.failed), chosen, str(r.train), str(r.validation),
             *(_milli(errors.get(name)) for errors in (new, r.validation_errors)
               for name in ("energy_per_atom", "forces"))]
        )  # fmt: skip
    heads = ["round", "labels\nasked for", "failed", "new frames: reason", "train", "validation",
             "new frames\nmeV/atom", "new frames\nmeV/Å", "validation\nmeV/atom", "validation\nmeV/Å"]  # fmt: skip
    return table(heads, rows, left=(3,))


def _stability(rounds: Sequence[RoundSummary]) -> str:
    rows = [
        [str(r.round), f"{t.temperature:g}", f"{t.whole} of {t.replicas}",
         "–" if t.median_break is None else f"{t.median_break:.2f}",
         *map(_milli, (t.spread_median, t.spread_high, t.spread_largest))]
        for r in rounds
        for t in r.temperatures
    ]  # fmt: skip
    heads = ["round", "K", "whole", "median break\nps", "spread, median\nmeV/Å", "99 %\nmeV/Å", "largest\nmeV/Å"]
    return table(heads, rows)


def _milli(value: float | None) -> str:
    return "–" if value is None else digits(1e3 * value, 3)
