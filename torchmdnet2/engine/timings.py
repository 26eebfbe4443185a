"""Times of the parts of a step: searches, network, priors, sums.

On a GPU each part is replayed separately, many times in one CUDA graph, so that launches do not count. On a CPU it is
timed by the clock.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..core.devices import wait_for
from ..system import System
from .graph import CudaGraph, NotCapturable

__all__ = ["WHOLE", "Part", "Stopwatch", "Timing", "describe_timings", "measure"]


WHOLE = "whole step"
"""Name of the last timing, of which the others are shares."""

_REPEATS = 20  # of a part in a graph
_REPLAYS = 5  # of which the median counts
_ENOUGH = 0.2  # s, for which a part is repeated on a CPU


class Part(NamedTuple):
    """A part of a step: its name, its path, and the function that runs it."""

    name: str
    path: str
    run: Callable[[], Any]


class Timing(NamedTuple):
    """The time of a part, in s."""

    name: str
    path: str
    seconds: float


def measure(parts: Sequence[Part], device: torch.device, replayed: bool = True) -> list[Timing]:
    """Return the time of each part alone, the median of some runs; before, they run once in this order.

    Args:
        parts: of a step, in order.
        device: of the step.
        replayed: on a GPU, time replays of CUDA graphs, where they can hold a part, instead of launches.
    """
    for part in parts:
        part.run()
    clock = _replays if replayed and device.type == "cuda" else _clock
    return [Timing(part.name, part.path, clock(part.run, device)) for part in parts]


def _replays(run: Callable[[], Any], device: torch.device) -> float:
    """Time on a GPU in s, without launches."""

    def repeat() -> None:
        for _ in range(_REPEATS):
            run()

    try:
        graph = CudaGraph.record(repeat, device)
    except NotCapturable:
        return _clock(run, device)
    found = []
    with torch.cuda.device(device):
        for _ in range(_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / _REPEATS)
    graph.reset()
    return _median(found)


def _clock(run: Callable[[], Any], device: torch.device) -> float:
    """Time by the clock in s."""
    found: list[float] = []
    while not found or (sum(found) < _ENOUGH and len(found) < _REPEATS):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        found.append(time.perf_counter() - start)
    return _median(found)


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


class Stopwatch:
    """Times the parts within a step on a CPU; a part within another one is not counted twice.

    Attributes:
        found: s by name and path, of each round.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[tuple[str, str], float]] = []
        self._inside = [0.0]  # s of the parts that ran within those that run now

    @contextmanager
    def time(self, name: str, path: str) -> Iterator[None]:
        """Count the time of the block for this part."""
        self._inside.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            within = self._inside.pop()
            self._inside[-1] += taken
            if self.rounds:
                times = self.rounds[-1]
                times[name, path] = times.get((name, path), 0.0) + taken - within

    def watch(self, owner: Any, method: str, name: str, path: str) -> None:
        """Time a method of an object from now on."""
        run = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            with self.time(name, path):
                return run(*args, **options)

        setattr(owner, method, timed)

    def measure(self, step: Callable[[], Any]) -> list[Timing]:
        """Return medians over some runs of a step; the last one is that of the whole step."""
        step()
        whole: list[float] = []
        while not whole or (sum(whole) < _ENOUGH and len(whole) < _REPEATS):
            self.rounds.append({})
            start = time.perf_counter()
            step()
            whole.append(time.perf_counter() - start)
        parts = [
            Timing(name, path, _median([times[name, path] for times in self.rounds])) for name, path in self.rounds[0]
        ]
        self.rounds = []
        return [*parts, Timing(WHOLE, "", _median(whole))]


def describe_timings(timings: Sequence[Timing], system: System) -> list[str]:
    """Return lines of a report; the last timing is that of the whole step."""
    structures = "1 structure" if system.num_systems == 1 else f"{system.num_systems} structures"
    whole, wide = timings[-1].seconds, max(len(t.name) for t in timings)
    path = max(len(t.path) for t in timings)
    lines = [f"times of a step with forces, {system.num_atoms} atoms in {structures}:"]
    for name, by, taken in timings:
        share = f"{100 * taken / whole:5.1f} %" if whole > 0 else ""
        lines.append(f"  {name:{wide}}  {by:{path}}  {1e3 * taken:9.4f} ms  {share}".rstrip())
    return lines
