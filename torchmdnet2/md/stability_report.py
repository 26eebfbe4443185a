"""The result of a stability check: the outcome of each replica, a summary by temperature, and the files."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import atomic_write, keep_old

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["ReplicaOutcome", "StabilityReport", "Summary"]


@dataclass(eq=False)
class ReplicaOutcome:
    """What became of one replica.

    Attributes:
        replica: its number, from 0 on.
        frame: of the file, where it began.
        formula: of its atoms.
        temperature: K, of the bath.
        seed: of its velocities and noise.
        broken_at: ps; None if it did not break.
        reason: in words; empty if it did not break.
        mean_temperature: K, until it broke.
        deviation: Å, the largest of a bond length from its usual value, until it broke.
        transfers: number of protons that moved along a hydrogen bond.
        jumped_at: ps, when the conserved energy first jumped (conservation.py), as it does where the energy of the
            model has a hole; None if it did not.
        novelty: largest score of an atom that was seen, above 1 unlike the training; None: the model is not calibrated.
        frames: the last ones before it broke, 10 fs apart, without labels; info holds the reason and the time.
    """

    replica: int
    frame: int
    formula: str
    temperature: float
    seed: int
    broken_at: float | None = None
    reason: str = ""
    mean_temperature: float = math.nan
    deviation: float = 0.0
    transfers: int = 0
    jumped_at: float | None = None
    novelty: float | None = None
    frames: list[Atoms] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether it did not break."""
        return self.broken_at is None


@dataclass(frozen=True)
class Summary:
    """The replicas at one temperature.

    Attributes:
        temperature: K, of the bath.
        replicas: how many.
        survivors: how many did not break.
        first_break: ps; None without any.
        median_break: ps, when half of them were broken; None if fewer broke.
        mean_temperature: K, of all until they broke.
        deviation: Å, the largest of a bond until its replica broke.
        transfers: of all.
        jumps: number of replicas whose conserved energy jumped, broken or not.
        novelty: the largest; None: the model is not calibrated.
    """

    temperature: float
    replicas: int
    survivors: int
    first_break: float | None
    median_break: float | None
    mean_temperature: float
    deviation: float
    transfers: int
    jumps: int
    novelty: float | None

    @classmethod
    def of(cls, runs: Sequence[ReplicaOutcome]) -> Summary:
        times = [math.inf if run.broken_at is None else run.broken_at for run in runs]
        means = [run.mean_temperature for run in runs if math.isfinite(run.mean_temperature)]
        return cls(
            temperature=runs[0].temperature,
            replicas=len(runs),
            survivors=sum(run.whole for run in runs),
            first_break=_or_none(min(times)),
            median_break=_or_none(statistics.median_low(times)),
            mean_temperature=statistics.fmean(means) if means else math.nan,
            deviation=max(run.deviation for run in runs),
            transfers=sum(run.transfers for run in runs),
            jumps=sum(run.jumped_at is not None for run in runs),
            novelty=max((run.novelty for run in runs if run.novelty is not None), default=None),
        )


@dataclass(eq=False)
class StabilityReport:
    """What `check_stability` found.

    Attributes:
        runs: every replica at every temperature.
        time: ps that each was to run.
    """

    runs: list[ReplicaOutcome]
    time: float

    @property
    def survived(self) -> bool:
        """Whether no replica broke."""
        return all(run.whole for run in self.runs)

    @property
    def summaries(self) -> list[Summary]:
        """One for each temperature."""
        temperatures = dict.fromkeys(run.temperature for run in self.runs)
        return [Summary.of([run for run in self.runs if run.temperature == t]) for t in temperatures]

    @property
    def frames(self) -> list[Atoms]:
        """The last frames before the break, of all replicas that broke: what to label and train on next."""
        return [frame for run in self.runs for frame in run.frames]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; temperatures in K, times in ps, lengths in Å; missing values are null."""
        runs = [{k: v for k, v in vars(run).items() if k != "frames"} for run in self.runs]
        found = {"time": self.time, "temperatures": [asdict(s) for s in self.summaries], "runs": runs}
        return _plain(found)

    def write(self, prefix: Path) -> list[Path]:
        """Write PREFIX.json and, when a replica broke, PREFIX_broken.xyz; those of an earlier check become ….old.

        Args:
            prefix: of the files' names, folder included.

        Returns:
            What was written.
        """
        from ase.io import write

        prefix.parent.mkdir(parents=True, exist_ok=True)
        report, broken = self.files(prefix)
        atomic_write(report, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", keep=True)
        if not self.frames:
            keep_old(broken)  # which tells of another check
            return [report]
        text = io.StringIO()
        write(text, self.frames, format="extxyz")
        atomic_write(broken, text.getvalue(), keep=True)
        return [report, broken]

    @staticmethod
    def files(prefix: Path) -> tuple[Path, Path]:
        """Where `write` writes.

        Args:
            prefix: of the files' names, folder included.
        """
        return prefix.with_name(prefix.name + ".json"), prefix.with_name(prefix.name + "_broken.xyz")


def _or_none(time: float) -> float | None:
    return time if math.isfinite(time) else None


def _plain(value: Any) -> Any:
    """NaN, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
