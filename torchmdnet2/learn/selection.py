"""Which frames of the dynamics are labelled next. One class per way, registered under a name.

The upper limit on the spread, and the frames before a break: what lies beyond is not worth a calculation, because the
dynamics that led there are wrong. Compare Y. Zhang et al., Comput. Phys. Commun. 253, 107206 (2020) (DP-GEN).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import BadConfig
from ..registry import Registry
from .trajectory import Trajectory

__all__ = ["SELECTIONS", "Choice", "Selection", "make_selection"]

SELECTIONS: Registry[Any] = Registry("selection")


class Choice(NamedTuple):
    """A frame that was selected: of which replica, its number there, and why."""

    run: Trajectory
    frame: int
    reason: str


class Selection(ABC):
    """A way to select frames."""

    @abstractmethod
    def __call__(self, runs: Sequence[Trajectory], count: int, rng: np.random.Generator) -> list[Choice]:
        """Select frames.

        Args:
            runs: all replicas at all temperatures; frames that are labelled already are not among their frames.
            count: how many at most.
            rng: for what is random.
        """


def make_selection(section: Mapping[str, Any]) -> Selection:
    """The way to select of {"name": …, arguments}."""
    arguments = dict(section)
    return SELECTIONS[arguments.pop("name")](**arguments)


@SELECTIONS.register("disagreement")
class Disagreement(Selection):
    """The last trusted frame of each replica that broke, then frames in which the members disagree most.

    Args:
        lowest: eV/Å; frames with a smaller spread are not selected, except before a break.
        highest: eV/Å; a replica is trusted until its spread first exceeds this.
        apart: ps; at least so far apart are two frames of one replica.
    """

    def __init__(self, lowest: float = 0.1, highest: float = 2.0, apart: float = 0.1):
        if not 0 <= lowest < highest or apart < 0:
            raise BadConfig(f"selection: lowest ({lowest}) must be below highest ({highest}), and apart not negative")
        self.lowest, self.highest, self.apart = lowest, highest, apart

    def __call__(self, runs: Sequence[Trajectory], count: int, rng: np.random.Generator) -> list[Choice]:
        ends: list[tuple[float, int, Choice]] = []
        rest: list[tuple[float, int, Choice]] = []
        for number, run in enumerate(runs):
            trusted = self._trusted(run)
            if not run.whole and trusted:
                ends.append((float(run.broken_at or 0.0), number, Choice(run, trusted - 1, f"broken: {run.reason}")))
            rest += [
                (-float(run.spread[k]), number, Choice(run, k, "disagreement"))
                for k in np.flatnonzero(run.spread[:trusted] >= self.lowest).tolist()
            ]
        chosen: list[Choice] = []
        for *_, choice in [*sorted(ends, key=lambda c: c[:2]), *sorted(rest, key=lambda c: c[:2])]:
            if len(chosen) == count:
                break
            if not any(self._near(choice, other) for other in chosen):
                chosen.append(choice)
        return chosen

    def _trusted(self, run: Trajectory) -> int:
        """How many frames of a replica are used. The first one always is: it was given."""
        beyond = np.flatnonzero(run.spread[1:] > self.highest)
        return int(beyond[0]) + 1 if len(beyond) else len(run.time)

    def _near(self, a: Choice, b: Choice) -> bool:
        between = abs(a.run.time[a.frame] - b.run.time[b.frame])
        return a.run is b.run and (a.frame == b.frame or bool(between < self.apart - 1e-9))


@SELECTIONS.register("random")
class Random(Selection):
    """Frames of the same dynamics at random, all with equal probability; to compare with."""

    def __call__(self, runs: Sequence[Trajectory], count: int, rng: np.random.Generator) -> list[Choice]:
        every = [Choice(run, k, "random") for run in runs for k in np.flatnonzero(run.regular).tolist()]
        drawn = rng.permutation(len(every))[:count]
        return [every[k] for k in drawn.tolist()]
