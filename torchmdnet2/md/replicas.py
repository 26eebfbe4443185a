"""Replicas that run side by side at a constant temperature, of which those that break leave the others alone.

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from ..potential import Potential
from ..system import System
from .bonds import Bonds
from .choose_engine import make_engine
from .engine import Engine
from .guard import Guard, Limits, NotFinite, Unphysical
from .integrators import Langevin
from .options import MDOptions
from .setup import atomistics, noise_seeds
from .state import Atomistics, State, maxwell_boltzmann
from .survival import Survival

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Batch", "Walker"]

_LOOK_FS = 10.0  # between two looks at a replica: a bond to hydrogen vibrates once
_KEPT = 5  # looks before a break whose frames are kept
_NOT_FINITE = "energy or forces are not finite"


class Walker:
    """One replica: what is known of it, and whether it is still whole.

    Args:
        number: k.
        index: of its frame in the file.
        start: that frame.
        bonds: of that frame; changed.
        options: of the run.
    """

    def __init__(self, number: int, index: int, start: Atoms, bonds: Bonds, options: MDOptions):
        self.start, self.bonds, self.options, self.seed = start, bonds, options, options.seeds[number]
        self.system, self.atoms = System.from_ase(start), atomistics(start, replace(options, replicas=1))
        limits = Limits.for_temperature(options.target_temperature)
        self.guard = Guard(self.system, self.atoms, options.timestep, limits)
        self.kind = (len(start), self.atoms.dof, *map(bool, start.pbc))
        self.result = Survival(number, index, start.get_chemical_formula(), options.target_temperature, self.seed)
        self.every = max(1, round(_LOOK_FS / options.timestep))
        self._last: deque[State] = deque(maxlen=_KEPT)
        self._temperatures: list[float] = []

    def look(self, state: State) -> None:
        """Take note of a finite state of this replica alone; when it is broken, of why."""
        try:
            (row,) = self.guard(state)
            self.bonds(state.pos)
        except Unphysical as error:
            self.fail(state.step, str(error))
            return
        if self._last and self._last[-1].step % self.every:  # looked at out of turn
            self._last.pop()
        self._last.append(state)
        self._temperatures.append(row.temperature_K)
        result = self.result
        result.deviation, result.transfers = self.bonds.deviation, self.bonds.transfers

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


class Batch:
    """Replicas of equally many atoms side by side, as long as they are whole.

    Attributes:
        whole: replicas that run.
        state: the last state in which all of them were good, on the host.
    """

    def __init__(self, potential: Potential, walkers: list[Walker], progress: Callable[[int], None]):
        self.potential, self.whole, self.progress = potential, walkers, progress
        first = walkers[0]
        self.options, self.every, self.n = first.options, first.every, len(first.start)

    def run(self) -> None:
        """All steps, or until none is whole."""
        state = self._begin(self.whole)
        if not _finite(state):  # which may be in every replica, whichever it comes from
            for walker in self.whole:
                if not _finite(self._begin([walker])):
                    walker.fail(0, _NOT_FINITE)
            self.whole = [walker for walker in self.whole if walker.result.whole]
            self.progress(0)
            if not self.whole:
                return
            state = self._begin(self.whole)
        if self._look(state):
            self.engine.prepare()
        while self.whole and self.state.step < self.options.steps:
            self._advance()

    def _begin(self, walkers: list[Walker]) -> State:
        """Make their engine and first state."""
        self.engine = self._engine(walkers)
        seeds = [walker.seed for walker in walkers]
        return self.engine.begin(maxwell_boltzmann(_together(walkers), self.options.target_temperature, seeds))

    def _engine(self, walkers: list[Walker]) -> Engine:
        """Where each of these began; a state is loaded next."""
        options, where = self.options, self.potential.device
        atoms = _together(walkers).to(where)
        seeds = noise_seeds([walker.seed for walker in walkers])
        dynamics = Langevin(atoms, options.timestep, options.target_temperature, options.friction, seeds)
        system = System.concatenate([walker.system for walker in walkers])
        return make_engine(self.potential, system.to(where), dynamics, self.every)

    def _advance(self) -> None:
        """Launch blocks ahead and look at each, until one is not good."""
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
            except NotFinite:
                engine.drop()
                self._one_by_one(self._stop_after(self.state.step))
                return
            if not good:
                return

    def _stop_after(self, step: int) -> int:
        """Where the block ends that begins at a step."""
        return min(step - step % self.every + self.every, self.options.steps)

    def _look(self, state: State) -> bool:
        """Show a state to each replica; those that broke go. False where the engine was made anew, or none is left."""
        if not _finite(state):
            raise NotFinite(_NOT_FINITE)
        for b, walker in enumerate(self.whole):
            walker.look(_part(state, [b], self.n))
        self.state = state
        return self._retire()

    def _retire(self) -> bool:
        """Go on without those that broke."""
        self.progress(self.state.step)
        rest = [b for b, walker in enumerate(self.whole) if walker.result.whole]
        if len(rest) == len(self.whole):
            return True
        self.engine.drop()
        self.whole = [self.whole[b] for b in rest]
        if rest:
            self.state = _part(self.state, rest, self.n)
            self.engine = self._engine(self.whole)
            self.engine.load(self.state)
        return False

    def _one_by_one(self, stop: int) -> None:
        """Find the step and the replica where numbers are no longer finite."""
        _was_room(self.engine)
        while self.state.step < stop:
            state = _step(self.engine, self.state)
            if not _finite(state):
                self._blame()
                return
            if not self._look(state):
                return

    def _blame(self) -> None:
        """Take the next step of each replica alone."""
        for b, walker in enumerate(self.whole):
            if not _finite(_step(self._engine([walker]), _part(self.state, [b], self.n))):
                walker.fail(self.state.step + 1, _NOT_FINITE)
        if self._retire():
            raise RuntimeError("a step is finite for each replica alone and not for all together: please report this")


def _step(engine: Engine, state: State) -> State:
    """The state after the next step, on the host; not finite only when more room for edges does not help."""
    while True:
        engine.load(state)
        engine.launch(1)
        after = engine.collect().clone()
        if _finite(after) or _was_room(engine):
            return after


def _was_room(engine: Engine) -> bool:
    """Whether there was room for the edges of what was launched; if not, there is now."""
    try:
        return engine.check()
    except ValueError:  # not finite for another reason
        return True


def _together(walkers: Sequence[Walker]) -> Atomistics:
    first, every = walkers[0].atoms, [walker.atoms for walker in walkers]
    masses, mobile = torch.cat([a.masses for a in every]), torch.cat([a.mobile for a in every])
    return Atomistics(masses, mobile, first.dof, len(walkers))


def _part(state: State, replicas: list[int], n: int) -> State:
    """Some of the replicas of a state; copied."""
    atoms = (torch.tensor(replicas)[:, None] * n + torch.arange(n)).flatten()
    pos, vel, forces = state.pos[atoms], state.vel[atoms], state.forces[atoms]
    return State(pos, vel, forces, state.energy[replicas], state.heat[replicas], state.step)


def _finite(state: State) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.tensors().values())
