"""Results of active learning: a JSON file for each round and an HTML report.

The files hold counts of labels, errors and stability, but no times, so that equal runs give equal files.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import html_page as page
from ..core.files import atomic_write
from ..ensemble import Ensemble
from ..system import System
from ..training.reporting.report import digits
from ..version import __version__
from .config import LearnConfig, StopConfig
from .selection import Trajectory, labels_of

if TYPE_CHECKING:
    from ase import Atoms
    from matplotlib.figure import Figure


__all__ = ["RoundSummary", "TemperatureSummary", "errors_of", "temperatures_of", "write_report"]


@dataclass(frozen=True)
class TemperatureSummary:
    """The replicas at one temperature.

    Attributes:
        temperature: temperature in K.
        replicas, whole: number of replicas, and number of those that did not break.
        median_break: time in ps at which half of them were broken; None if fewer broke.
        spread_median, spread_high, spread_largest: median, 99 % quantile and largest value of the spread in frames
            before a break, eV/Å.
    """

    temperature: float
    replicas: int
    whole: int
    median_break: float | None
    spread_median: float
    spread_high: float
    spread_largest: float


@dataclass(frozen=True)
class RoundSummary:
    """The results of a round.

    Attributes:
        round: its number, from 0.
        asked, failed: number of requested labels so far, and number of failures among them.
        reasons: first word of the reason for labelling a frame in this round -> number of frames.
        train, validation: number of frames in each subset.
        new_errors: errors of the previous committee for the frames labelled in this round: "frames",
            "energy_per_atom" (MAE, eV) and "forces" (RMSE of components, eV/Å); None in the first round.
        validation_errors: mean of the members' errors after training, in the same form.
        temperatures: stability at each temperature.
    """

    round: int
    asked: int
    failed: int
    reasons: dict[str, int]
    train: int
    validation: int
    new_errors: dict[str, float] | None
    validation_errors: dict[str, float]
    temperatures: list[TemperatureSummary]

    def stable(self, stop: StopConfig) -> bool:
        """Return whether the requested stability is reached at every temperature."""
        limit = math.inf if stop.spread is None else stop.spread
        return all(t.whole >= stop.whole * t.replicas and t.spread_high <= limit for t in self.temperatures)

    def write(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> RoundSummary:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**raw, "temperatures": [TemperatureSummary(**t) for t in raw["temperatures"]]})

    def words(self) -> str:
        """Return the line of the round in the log."""
        stable = ", ".join(f"{t.whole} of {t.replicas} whole at {t.temperature:g} K" for t in self.temperatures)
        found = self.validation_errors
        return (
            f"round {self.round}: {self.asked} labels requested, {self.failed} failed; {self.train} training frames; "
            f"validation {1e3 * found['energy_per_atom']:.3g} meV/atom, {1e3 * found['forces']:.3g} meV/Å; {stable}"
        )


def temperatures_of(runs: Sequence[Trajectory]) -> list[TemperatureSummary]:
    """Return the summary of the replicas at each temperature."""
    found = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        own = [run for run in runs if run.temperature == temperature]
        times = [math.inf if run.broken_at is None else run.broken_at for run in own]
        middle = statistics.median_low(times)
        spread = np.concatenate([run.spread for run in own])
        found.append(
            TemperatureSummary(
                temperature, len(own), sum(run.whole for run in own), middle if math.isfinite(middle) else None,
                *np.quantile(spread, [0.5, 0.99, 1.0]).tolist(),
            )
        )  # fmt: skip
    return found


def errors_of(committee: Ensemble, frames: Sequence[Atoms]) -> dict[str, float] | None:
    """Return the errors of the mean of the members for labelled frames; None without frames."""
    if not frames:
        return None
    energies, forces = [], []
    for atoms in frames:
        labels, result = labels_of(atoms), committee(System.from_ase(atoms, device=committee.members[0].device))
        assert result.forces is not None
        energies.append(abs(float(result.energy[0]) - labels.energy) / len(atoms))
        forces.append((result.forces.double().cpu().numpy() - labels.forces).ravel())
    return {
        "frames": len(frames),
        "energy_per_atom": statistics.fmean(energies),
        "forces": float(np.sqrt(np.mean(np.concatenate(forces) ** 2))),
    }


def validation_errors(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean over the members of the errors in their metrics.json."""
    own = [found["validation"] for found in metrics]
    return {
        "frames": own[0]["forces"]["count"],
        "energy_per_atom": statistics.fmean(e["energy_per_atom"]["mae"] for e in own),
        "forces": statistics.fmean(e["forces"]["rmse"] for e in own),
    }


def first_words(frames: Sequence[Atoms]) -> dict[str, int]:
    """Return the number of selected frames for each reason: "broken", "disagreement", …"""
    return dict(Counter(str(atoms.info["reason"]).partition(":")[0] for atoms in frames))


# --- The HTML report ---


def write_report(
    path: Path, title: str, rounds: Sequence[RoundSummary], config: LearnConfig, level: str, reason: str
) -> None:
    """Write report.html, which shows stability and errors as functions of the number of labels.

    Args:
        path: path of the file.
        title: title, usually the folder's name.
        rounds: all rounds so far.
        config: configuration of the run.
        level: level of theory of the labels.
        reason: the reason why the run ended; "" while it continues.
    """
    last = rounds[-1]
    state = f"stopped: {reason}" if reason else "not finished"
    errors = (
        "New frames: errors of the models before the training on these frames, which the models had not seen. "
        "Validation: mean of the members after training. Energies: mean absolute error; forces: root mean square error "
        "of components."
    )
    spread = "Spread: standard deviation of the members' forces on the atom of a frame where it is largest."
    content = page.document(
        title,
        page.note(f"{state}; {last.asked} labels requested, {last.failed} failed; {level}; torchmdnet2 {__version__}"),
        page.note("For a plot of the progress, run pip install 'torchmdnet2[plot]' and resume the run.")
        if page.missing_plots()
        else page.figures([("progress", page.figure_png(partial(_draw, rounds), (5.2, 6.0)))]),
        page.section("Rounds", _rounds(rounds), page.note(errors)),
        page.section("Stability", _stability(rounds), page.note(spread)),
        page.section("Configuration", page.configuration(config.to_dict())),
    )
    atomic_write(path, content)


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
    errors.set(ylim=(0, None), xlabel="labels requested", ylabel="rms force error (meV/Å)")
    for axes in (stable, errors):
        axes.grid(color="0.9", lw=0.6)
        axes.legend(fontsize=8)


def _rounds(rounds: Sequence[RoundSummary]) -> str:
    rows = []
    for r in rounds:
        new = r.new_errors or {}
        chosen = ", ".join(f"{count} {reason}" for reason, count in r.reasons.items())
        rows.append(
            [r.round, r.asked, r.failed, chosen, r.train, r.validation,
             *(_milli(errors.get(name)) for errors in (new, r.validation_errors)
               for name in ("energy_per_atom", "forces"))]
        )  # fmt: skip
    heads = ["round", "labels\nrequested", "failed", "new frames: reason", "train", "validation",
             "new frames\nmeV/atom", "new frames\nmeV/Å", "validation\nmeV/atom", "validation\nmeV/Å"]  # fmt: skip
    return page.table(heads, rows, left=(3,))


def _stability(rounds: Sequence[RoundSummary]) -> str:
    rows = [
        [r.round, f"{t.temperature:g}", f"{t.whole} of {t.replicas}",
         "–" if t.median_break is None else f"{t.median_break:.2f}",
         *map(_milli, (t.spread_median, t.spread_high, t.spread_largest))]
        for r in rounds
        for t in r.temperatures
    ]  # fmt: skip
    heads = ["round", "K", "whole", "median break\nps", "spread, median\nmeV/Å", "99 %\nmeV/Å", "largest\nmeV/Å"]
    return page.table(heads, rows)


def _milli(value: float | None) -> str:
    return "–" if value is None else digits(1e3 * value, 3)
