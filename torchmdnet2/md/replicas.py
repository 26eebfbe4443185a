"""Replicas that run together at a constant temperature; those that break are removed and the others go on.

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from ..novelty import LARGEST, Watch
from ..potential import Potential
from ..system import System
from .bonds import Bonds
from .choose_engine import make_engine
from .conservation import largest_jump
from .engine import Engine
from .guard import Guard, Limits, NonFiniteState, Unphysical
from .integrators import Langevin
from .options import MDOptions
from .output import TableRow
from .setup import atom_constants, noise_seeds
from .stability_report import ReplicaOutcome
from .state import AtomConstants, State, maxwell_boltzmann

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["ReplicaBatch", "ReplicaRun"]

_LOOK_FS = 10.0  # between two checks of a replica: one vibration of a bond to hydrogen
_WATCH_FS = 500.0  # between two looks at the novelty
_KEPT = 5  # number of checks before a break whose frames are kept
_NOT_FINITE = "energy or forces are not finite"


class ReplicaRun:
    """One replica: its checks, its last states and its outcome.

    Args:
        number: k.
        index: of its frame in the file.
        start: that frame.
        bonds: of that frame; changed.
        options: of the run.
    """

    def __init__(self, number: int, index: int, start: Atoms, bonds: Bonds, options: MDOptions):
        self.start, self.bonds, self.options, self.seed = start, bonds, options, options.seeds[number]
        self.system, self.atoms = System.from_ase(start), atom_constants(start, replace(options, replicas=1))
        limits = Limits.for_temperature(options.target_temperature)
        self.guard = Guard(self.system, self.atoms, options.timestep, limits)
        self.kind = (len(start), self.atoms.dof, *map(bool, start.pbc))
        self.result = ReplicaOutcome(number, index, start.get_chemical_formula(), options.target_temperature, self.seed)
        self.every = max(1, round(_LOOK_FS / options.timestep))
        self._last: deque[State] = deque(maxlen=_KEPT)
        self._temperatures: list[float] = []
        self._conserved: float | None = None

    def look(self, state: State, row: TableRow | None = None) -> None:
        """Check a finite state of this replica; if it is broken, record why.

        Args:
            state: of this replica alone.
            row: of the state, if a guard of all replicas found it good.
        """
        try:
            if row is None:
                (row,) = self.guard(state)
            elif self.guard.first_conserved is None:
                self.guard.first_conserved = [row.conserved_eV]
            self._compare(row)
            self.bonds(state.pos)
        except Unphysical as error:
            self.fail(state.step, str(error))
            return
        if self._last and self._last[-1].step % self.every:  # an additional check
            self._last.pop()
        self._last.append(state)
        self._temperatures.append(row.temperature_K)
        result = self.result
        result.deviation, result.transfers = self.bonds.deviation, self.bonds.transfers

    def _compare(self, row: TableRow) -> None:
        """Note when the conserved energy first jumps."""
        before, self._conserved = self._conserved, row.conserved_eV
        if before is not None and abs(row.conserved_eV - before) > largest_jump(len(self.start)):
            self.result.jumped_at = self.result.jumped_at or row.time_ps

    def fail(self, step: int, reason: str) -> None:
        """It broke at this step."""
        result, ps = self.result, self.options.timestep * 1e-3
        result.broken_at, result.reason = step * ps, reason
        for at, pos in [(state.step, state.pos) for state in self._last] or [(0, self.system.pos)]:
            frame = self.start.copy()
            frame.set_positions(pos.numpy(), apply_constraint=False)
            frame.info.update(
                temperature_K=result.temperature, replica=result.replica, start_frame=result.frame, time_ps=at * ps,
                broken_at_ps=result.broken_at, reason=reason,
            )  # fmt: skip
            result.frames.append(frame)

    def finish(self) -> None:
        """Sum up."""
        if self._temperatures:
            self.result.mean_temperature = fmean(self._temperatures)


class ReplicaBatch:
    """Replicas of equally many atoms that run together until they break.

    Attributes:
        watch: warns about atoms that are unlike those of the training, if the potential is calibrated.
        whole: replicas that have not broken.
        state: the last state in which no check failed, on the host.
    """

    def __init__(
        self, potential: Potential, runs: list[ReplicaRun], progress: Callable[[int], None], watch: Watch | None = None
    ):
        self.potential, self.whole, self.progress = potential, runs, progress
        self.watch, self._watched_at = watch or Watch(), -math.inf
        first = runs[0]
        self.options, self.every, self.n = first.options, first.every, len(first.start)

    def run(self) -> None:
        """Run all steps, or until all replicas are broken."""
        state = self._begin(self.whole)
        if not _finite(state):  # one bad replica can spoil the others
            for run in self.whole:
                if not _finite(self._begin([run])):
                    run.fail(0, _NOT_FINITE)
            self.whole = [run for run in self.whole if run.result.whole]
            self.progress(0)
            if not self.whole:
                return
            state = self._begin(self.whole)
        if self._look(state):
            self.engine.prepare()
        while self.whole and self.state.step < self.options.steps:
            self._advance()

    def _begin(self, runs: list[ReplicaRun]) -> State:
        """Make an engine and the first state."""
        self.engine = self._engine(runs)
        seeds = [run.seed for run in runs]
        return self.engine.begin(maxwell_boltzmann(_together(runs), self.options.target_temperature, seeds))

    def _engine(self, runs: list[ReplicaRun]) -> Engine:
        """An engine at the initial structures, and a guard; the caller loads a state next."""
        options, where = self.options, self.potential.device
        atoms = _together(runs).to(where)
        seeds = noise_seeds([run.seed for run in runs])
        dynamics = Langevin(atoms, options.timestep, options.target_temperature, options.friction, seeds)
        system = System.concatenate([run.system for run in runs])
        first = [value for run in runs for value in run.guard.first_conserved or ()]  # of all runs, or of none yet
        self.guard = Guard(system, _together(runs), options.timestep, runs[0].guard.limits, first or None)
        return make_engine(self.potential, system.to(where), dynamics, self.every)

    def _advance(self) -> None:
        """Launch blocks ahead and check each, until a replica breaks."""
        engine, last = self.engine, self.options.steps
        launched, under_way = self.state.step, 0
        while self.state.step < last:
            while launched < last and under_way <= engine.ahead:
                stop = self._stop_after(launched)
                engine.launch(stop - launched)
                launched, under_way = stop, under_way + 1
            state = engine.collect().clone()
            under_way -= 1
            try:
                good = self._look(state)
            except NonFiniteState:
                engine.drop()
                self._one_by_one(self._stop_after(self.state.step))
                return
            if not good:
                return

    def _stop_after(self, step: int) -> int:
        """Where the block ends that begins at a step."""
        return min(step - step % self.every + self.every, self.options.steps)

    def _look(self, state: State) -> bool:
        """Check a state of each replica and remove the broken ones. False if any was removed."""
        if not _finite(state):
            raise NonFiniteState(_NOT_FINITE)
        rows: Sequence[TableRow | None]
        try:
            rows = self.guard(state)
        except Unphysical:  # of one replica or more: each looks for itself
            rows = [None] * len(self.whole)
        for b, (run, row) in enumerate(zip(self.whole, rows, strict=True)):
            run.look(_one(state, b, self.n), row)
        self.state = state
        self._watch(state)
        return self._retire()

    def _watch(self, state: State) -> None:
        """Look at the novelty, when it is due."""
        due = (state.step - self._watched_at) * self.options.timestep >= _WATCH_FS
        if self.potential.calibration is None or not due or len(state.pos) > LARGEST:
            return
        self._watched_at = state.step
        system = System.concatenate([run.system for run in self.whole]).replace(pos=state.pos)
        scores = self.potential.novelty(system.to(self.potential.device)).cpu()
        when = f" at {state.step * self.options.timestep * 1e-3:.3f} ps and {self.options.target_temperature:g} K"
        self.watch(scores, system, when, [f"replica {run.result.replica}" for run in self.whole])
        for b, run in enumerate(self.whole):
            own = float(scores[b * self.n : (b + 1) * self.n].max())
            run.result.novelty = max(own, run.result.novelty or 0.0)

    def _retire(self) -> bool:
        """Continue without the replicas that broke."""
        self.progress(self.state.step)
        rest = [b for b, run in enumerate(self.whole) if run.result.whole]
        if len(rest) == len(self.whole):
            return True
        self.engine.drop()
        self.watch.restart()
        self.whole = [self.whole[b] for b in rest]
        if rest:
            self.state = _part(self.state, rest, self.n)
            self.engine = self._engine(self.whole)
            self.engine.load(self.state)
        return False

    def _one_by_one(self, stop: int) -> None:
        """Find the step and the replica in which numbers are no longer finite."""
        _was_room(self.engine)
        while self.state.step < stop:
            state = _step(self.engine, self.state)
            if not _finite(state):
                self._blame()
                return
            if not self._look(state):
                return

    def _blame(self) -> None:
        """Run the next step of each replica alone, to find those that fail."""
        for b, run in enumerate(self.whole):
            if not _finite(_step(self._engine([run]), _part(self.state, [b], self.n))):
                run.fail(self.state.step + 1, _NOT_FINITE)
        if self._retire():
            raise RuntimeError("a step is finite for each replica alone and not for all together: please report this")


def _step(engine: Engine, state: State) -> State:
    """The state after the next step, on the host; not finite only if a larger capacity for edges does not help."""
    while True:
        engine.load(state)
        engine.launch(1)
        after = engine.collect().clone()
        if _finite(after) or _was_room(engine):
            return after


def _was_room(engine: Engine) -> bool:
    """Whether the edges of the launched steps fitted; if not, the capacity is raised."""
    try:
        return engine.check()
    except ValueError:  # not finite for another reason
        return True


def _together(runs: Sequence[ReplicaRun]) -> AtomConstants:
    first, every = runs[0].atoms, [run.atoms for run in runs]
    masses, mobile = torch.cat([a.masses for a in every]), torch.cat([a.mobile for a in every])
    return AtomConstants(masses, mobile, first.dof, len(runs))


def _one(state: State, replica: int, n: int) -> State:
    """One replica of a state; not copied."""
    own, k = slice(replica * n, (replica + 1) * n), slice(replica, replica + 1)
    return State(state.pos[own], state.vel[own], state.forces[own], state.energy[k], state.heat[k], state.step)


def _part(state: State, replicas: list[int], n: int) -> State:
    """Some of the replicas of a state; copied."""
    atoms = (torch.tensor(replicas)[:, None] * n + torch.arange(n)).flatten()
    pos, vel, forces = state.pos[atoms], state.vel[atoms], state.forces[atoms]
    return State(pos, vel, forces, state.energy[replicas], state.heat[replicas], state.step)


def _finite(state: State) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.tensors().values())
