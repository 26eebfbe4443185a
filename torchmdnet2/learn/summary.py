"""What a round found: counts of labels, errors, stability. One JSON file per round; no times, so that equal runs give
equal files."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ensemble import Ensemble
from ..files import atomic_write
from ..system import System
from .config import StopConfig
from .frames import labels_of
from .trajectory import Trajectory

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["RoundSummary", "TemperatureSummary", "errors_of", "temperatures_of"]


@dataclass(frozen=True)
class TemperatureSummary:
    """The replicas at one temperature.

    Attributes:
        temperature: K.
        replicas, whole: how many, and how many of them did not break.
        median_break: ps, when half of them were broken; None if fewer broke.
        spread_median, spread_high, spread_largest: eV/Å, of the frames before a break: median, 99 %, largest.
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
    """A round.

    Attributes:
        round: its number, from 0 on.
        asked, failed: labels so far, failed ones included; and how many failed.
        reasons: reason of the frames labelled in this round -> how many, the first word of it.
        train, validation: frames of each subset.
        new_errors: of the committee of the round before, for the frames labelled in this one: "frames",
            "energy_per_atom" (MAE, eV) and "forces" (RMSE of components, eV/Å); None in the first round.
        validation_errors: mean of the members' errors after training, of the same form.
        temperatures: stability.
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
        """Whether the asked stability is reached, at every temperature."""
        limit = math.inf if stop.spread is None else stop.spread
        return all(t.whole >= stop.whole * t.replicas and t.spread_high <= limit for t in self.temperatures)

    def write(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> RoundSummary:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**raw, "temperatures": [TemperatureSummary(**t) for t in raw["temperatures"]]})

    def words(self) -> str:
        """For the log."""
        stable = ", ".join(f"{t.whole} of {t.replicas} whole at {t.temperature:g} K" for t in self.temperatures)
        found = self.validation_errors
        return (
            f"round {self.round}: {self.asked} labels asked for, {self.failed} failed; {self.train} training frames; "
            f"validation {1e3 * found['energy_per_atom']:.3g} meV/atom, {1e3 * found['forces']:.3g} meV/Å; {stable}"
        )


def temperatures_of(runs: Sequence[Trajectory]) -> list[TemperatureSummary]:
    """The replicas by temperature."""
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
    """Errors of the mean of the members for labelled frames; None if there are none."""
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
    """The mean over the members of what their metrics.json say."""
    own = [found["validation"] for found in metrics]
    return {
        "frames": own[0]["forces"]["count"],
        "energy_per_atom": statistics.fmean(e["energy_per_atom"]["mae"] for e in own),
        "forces": statistics.fmean(e["forces"]["rmse"] for e in own),
    }


def first_words(frames: Sequence[Atoms]) -> dict[str, int]:
    """How many frames were selected for each reason: "broken", "disagreement", …"""
    return dict(Counter(str(atoms.info["reason"]).partition(":")[0] for atoms in frames))
