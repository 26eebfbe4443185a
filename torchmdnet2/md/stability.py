"""Stability of a model in dynamics, which errors on test frames do not show.

X. Fu et al., "Forces are not enough", Trans. Mach. Learn. Res. 2023 (arXiv:2210.07237), find that force errors and
stable simulations are loosely related. What counts as broken: bonds.py, and everything that stops `run_md` (guard.py).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ..adapters.model import open_model
from ..errors import BadConfig, BadData
from ..novelty import Watch
from ..potential import Potential
from ..refusals import rename
from ..system import System
from .bonds import Bonds
from .guard import Unphysical, check_overlaps
from .options import MDOptions
from .replicas import ReplicaBatch, ReplicaRun
from .setup import check_start, plain_copy
from .stability_report import StabilityReport

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["ReplicaProgress", "alike", "check_stability", "checked_start"]

_LARGEST_BATCH = 100_000  # atoms
_REFERENCE = 100  # number of frames from which the usual bond lengths are taken


def check_stability(
    model: str | os.PathLike | Potential,
    frames: Sequence[Atoms],
    temperatures: Iterable[float] = (300.0, 600.0),
    time: float = 10.0,
    replicas: int = 8,
    timestep: float = 0.5,
    friction: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    charge: int | None = None,
    spin: int | None = None,
    console: Console | None = None,
    allow_untrained_charge: bool = False,
    numbers: Sequence[int] | None = None,
) -> StabilityReport:
    """Run Langevin dynamics from given frames and see which runs break.

    A replica is broken when it passes a limit of `run_md` (force, temperature, conserved energy, overlap, a number that
    is not finite) or when its bonds change (`bonds.Bonds`); it is looked at every 10 fs. The others go on without it,
    as they would alone: their velocities and noise are functions of their own seed, and positions are the same up to
    the rounding of a batch of another size.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential.
        frames: starts are taken from all over them, evenly. They need not have the same composition: replicas of
            equally many atoms run side by side, in batches of up to 100,000 atoms. Batches run one after another.
            Labels are not used.
        temperatures: K; one after another, from the same starts and seeds.
        time: ps.
        replicas: at each temperature. With more of them than frames, several begin from the same one.
        timestep: fs.
        friction: 1/ps.
        seed: replica k has seed + k.
        device: where everything runs.
        dtype: floating-point type of the network.
        charge: total charge in e of frames that have none in their `info`.
        spin: multiplicity of frames that have none in their `info`.
        console: where progress is shown; None is silent.
        allow_untrained_charge: take total charges that the model was not trained on, or does not use, with a
            warning.
        numbers: what the frames are called in messages and in the report, as in the file that they come from; default:
            0, 1, …

    Raises:
        BadConfig: a number is out of range.
        BadData: there are no frames.
        UnknownElement, UntrainedCharge: the model does not know an atom's element, or the total charge.
        Unphysical: atoms overlap in a frame.
        ValueError: a frame is not valid.
    """
    plan = [_options(t, time, replicas, timestep, friction, seed) for t in temperatures]
    if not plan:
        raise BadConfig("temperatures: give at least one")
    if not frames:
        raise BadData("there are no frames to start from")
    with torch.inference_mode(False):
        potential, _ = open_model(model, device, dtype, allow_untrained_charge)
        chosen = [k * len(frames) // replicas for k in range(replicas)]
        called = range(len(frames)) if numbers is None else numbers
        starts = {k: checked_start(frames[k], called[k], potential, charge, spin) for k in dict.fromkeys(chosen)}
        bonds = {index: Bonds(System.from_ase(start), alike(start, frames)) for index, start in starts.items()}
        found, watch = [], Watch()
        for options in plan:
            groups: dict[tuple, list[ReplicaRun]] = {}
            for k, index in enumerate(chosen):
                run = ReplicaRun(k, called[index], starts[index], copy.copy(bonds[index]), options)
                groups.setdefault(run.kind, []).append(run)
            everyone = [run for group in groups.values() for run in group]
            with ReplicaProgress(console, options, everyone) as progress:
                for group in groups.values():
                    together = max(1, _LARGEST_BATCH // len(group[0].start))
                    for first in range(0, len(group), together):
                        watch.restart()
                        ReplicaBatch(potential, group[first : first + together], progress.update, watch).run()
            for run in everyone:
                run.finish()
            found += sorted((run.result for run in everyone), key=lambda result: result.replica)
    return StabilityReport(found, plan[0].steps * timestep * 1e-3)


def _options(temperature: float, time: float, replicas: int, timestep: float, friction: float, seed: int) -> MDOptions:
    if not 0 < timestep < float("inf"):
        raise BadConfig(f"timestep: must be a positive number, got {timestep}")
    if not (0 < time < 1e9 and 1000 * time >= timestep):
        raise BadConfig(f"time: must be at least one timestep, got {time} ps and a timestep of {timestep} fs")
    steps = round(1000 * time / timestep)
    return MDOptions(steps, timestep, "nvt", float(temperature), friction, seed, replicas)


def checked_start(frame: Atoms, number: int, potential: Potential, charge: int | None, spin: int | None) -> Atoms:
    start = plain_copy(frame, charge, spin)
    try:
        check_start(start, potential)
        check_overlaps(System.from_ase(start))
    except (Unphysical, ValueError) as error:
        rename(error, f"frame {number}")
        raise
    return start


def alike(start: Atoms, frames: Sequence[Atoms]) -> list[Atoms]:
    """Some of the frames with the same atoms as this one."""
    some = [frames[k * len(frames) // _REFERENCE] for k in range(_REFERENCE)] if len(frames) > _REFERENCE else frames
    return [f for f in some if len(f) == len(start) and (f.numbers == start.numbers).all()]


class ReplicaProgress:
    """Reports replicas when they break and, in a terminal, the progress of the run.

    Args:
        console: where to; None shows nothing.
        options: of the run.
        runs: all at this temperature.
    """

    def __init__(self, console: Console | None, options: MDOptions, runs: Sequence[ReplicaRun]):
        self.options, self.runs, self._console = options, runs, console
        self._status = None if console is None else console.status("")
        self._told: set[int] = set()

    def __enter__(self) -> ReplicaProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, step: int) -> None:
        """Report a step of a batch."""
        if self._console is None or self._status is None:
            return
        results, ps = [run.result for run in self.runs], self.options.timestep * 1e-3
        for result in results:
            if result.broken_at is not None and result.replica not in self._told:
                self._told.add(result.replica)
                words = f"{result.temperature:g} K, replica {result.replica}: broken at {result.broken_at:.3f} ps: "
                self._console.print(words + result.reason, highlight=False, soft_wrap=True, markup=False)
        whole = sum(result.whole for result in results)
        self._status.update(
            f"{self.options.target_temperature:g} K: {step * ps:.2f} of {self.options.steps * ps:g} ps, "
            f"{whole} of {len(results)} whole"
        )
