"""The check whether a model is stable in dynamics: replicas, their outcomes, a summary by temperature, the files."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from statistics import fmean
from time import monotonic as clock
from typing import TYPE_CHECKING, Any

import torch

from ..adapters.model import Opening, open_model
from ..core.devices import devices_of
from ..core.files import atomic_write, keep_old
from ..core.pipeline import blocks_of, devices_pool, in_order
from ..errors import BadConfig, BadData
from ..potential.cells import require_cells
from ..potential.novelty import LARGEST, Watch
from ..potential.potential import Potential
from ..potential.refusals import rename
from ..system import System
from .guard import Bonds, Guard, Limits, NonFiniteState, Unphysical, check_overlaps
from .integrators import AtomConstants, Engine, Langevin, State, maxwell_boltzmann
from .options import MDOptions
from .output import TableRow, largest_jump
from .setup import atom_constants, check_start, make_engine, noise_seeds, plain_copy

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console


__all__ = [
    "ReplicaBatch", "ReplicaOutcome", "ReplicaRun", "StabilityReport", "Summary", "alike", "check_stability",
    "checked_start", "run_replicas",
]  # fmt: skip


@dataclass(eq=False)
class ReplicaOutcome:
    """The outcome of one replica.

    Attributes:
        replica: its number, from 0 on.
        frame: of the file, from which it started.
        formula: of its atoms.
        temperature: K, of the bath.
        seed: of its velocities and noise.
        broken_at: ps; None if it did not break.
        reason: in words; empty if it did not break.
        mean_temperature: K, until it broke.
        deviation: Å, the largest of a bond length from its usual value, until it broke.
        transfers: number of protons that moved along a hydrogen bond.
        jumped_at: ps, when the conserved energy first jumped (output.py), as it does where the energy of the
            model has a hole; None if it did not.
        novelty: the largest of an atom, above 1 unlike the training; None: the model is not calibrated.
        followed: ps until its last check that did not fail.
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
    followed: float = 0.0
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
        first_break: ps; None if no replica broke.
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
    """The result of `check_stability`.

    Attributes:
        runs: every replica at every temperature.
        time: ps, planned length of each run.
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
        """Return plain data for JSON; temperatures in K, times in ps, lengths in Å; missing values are null."""
        runs = [{k: v for k, v in vars(run).items() if k != "frames"} for run in self.runs]
        found = {"time": self.time, "temperatures": [asdict(s) for s in self.summaries], "runs": runs}
        return _plain(found)

    def write(self, prefix: Path, keep: bool = True) -> list[Path]:
        """Write PREFIX.json and, when a replica broke, PREFIX_broken.xyz; those of an earlier check become ….old.

        Args:
            prefix: of the files' names, folder included.
            keep: keep files that are there as ….old; False: replace them.

        Returns:
            The files that were written.
        """
        from ase.io import write

        prefix.parent.mkdir(parents=True, exist_ok=True)
        report, broken = self.files(prefix)
        atomic_write(report, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", keep=keep)
        if not self.frames:
            keep_old(broken) if keep else broken.unlink(missing_ok=True)  # which belongs to another check
            return [report]
        text = io.StringIO()
        write(text, self.frames, format="extxyz")
        atomic_write(broken, text.getvalue(), keep=keep)
        return [report, broken]

    @staticmethod
    def files(prefix: Path) -> tuple[Path, Path]:
        """Return the files that `write` writes.

        Args:
            prefix: of the files' names, folder included.
        """
        return prefix.with_name(prefix.name + ".json"), prefix.with_name(prefix.name + "_broken.xyz")


def _or_none(time: float) -> float | None:
    return time if math.isfinite(time) else None


def _plain(value: Any) -> Any:
    """Return None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- Replicas that run together at a constant temperature; those that break are removed and the others go on ---

_LOOK_FS = 10.0  # between two checks of a replica: one vibration of a bond to hydrogen
_WATCH_FS = 500.0  # between two looks at the novelty
_SAVE_S = 60.0  # between two reports of what is found so far
_KEPT = 5  # number of checks before a break whose frames are kept
_NOT_FINITE = "energy or forces are not finite"


class ReplicaRun:
    """Follows one replica: its checks, its last states and its outcome.

    Other processes get it as it was before it ran.

    Args:
        number: k.
        index: of its frame in the file.
        start: that frame.
        bonds: of that frame; changed.
        options: of the run.
    """

    def __init__(self, number: int, index: int, start: Atoms, bonds: Bonds, options: MDOptions):
        self._given: tuple[Any, ...] = number, index, start, bonds, options
        self.start, self.bonds, self.options, self.seed = start, bonds, options, options.seeds[number]
        self.system, self.atoms = System.from_ase(start), atom_constants(start, replace(options, replicas=1))
        limits = Limits.for_temperature(options.target_temperature)
        self.guard = Guard(self.system, self.atoms, options.timestep, limits)
        self.kind: tuple[Any, ...] = options.target_temperature, len(start), self.atoms.dof, *map(bool, start.pbc)
        self.result = ReplicaOutcome(number, index, start.get_chemical_formula(), options.target_temperature, self.seed)
        self.every = max(1, round(_LOOK_FS / options.timestep))
        self._last: deque[State] = deque(maxlen=_KEPT)
        self._temperatures: list[float] = []
        self._conserved: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given  # PyTorch would share the memory of each tensor by a file descriptor

    def potential(self, model: Any) -> Potential:
        """Return the potential that moves it, of what was opened for the device."""
        return model

    def look(self, state: State, row: TableRow | None = None) -> None:
        """Check a finite state of this replica; if it is broken, record the reason.

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
        result.followed = state.step * self.options.timestep * 1e-3
        result.deviation, result.transfers = self.bonds.deviation, self.bonds.transfers

    def _compare(self, row: TableRow) -> None:
        """Note when the conserved energy first jumps."""
        before, self._conserved = self._conserved, row.conserved_eV
        if before is not None and abs(row.conserved_eV - before) > largest_jump(len(self.start)):
            self.result.jumped_at = self.result.jumped_at or row.time_ps

    def fail(self, step: int, reason: str) -> None:
        """Record that the replica broke at this step."""
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

    def outcome(self, model: Any) -> Any:
        """Return what is found at the end of the run.

        Args:
            model: what was opened for the device.
        """
        if self._temperatures:
            self.result.mean_temperature = fmean(self._temperatures)
        return self.result


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
        """Return an engine at the initial structures, and a guard; the caller then loads a state."""
        options, where = self.options, self.potential.device
        atoms = _together(runs).to(where)
        seeds = noise_seeds([run.seed for run in runs])
        dynamics = Langevin(atoms, options.timestep, options.target_temperature, options.bath_friction, seeds)
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
        """Return where the block ends that begins at a step."""
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
        """Check the novelty, when it is due."""
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
    """Return the state after the next step, on the host. The step is repeated with a larger capacity for edges if it is
    not finite."""
    while True:
        engine.load(state)
        engine.launch(1)
        after = engine.collect().clone()
        if _finite(after) or _was_room(engine):
            return after


def _was_room(engine: Engine) -> bool:
    """Return whether the edges of the launched steps fitted; if not, the capacity is raised."""
    try:
        return engine.check()
    except ValueError:  # not finite for another reason
        return True


def _together(runs: Sequence[ReplicaRun]) -> AtomConstants:
    first, every = runs[0].atoms, [run.atoms for run in runs]
    masses, mobile = torch.cat([a.masses for a in every]), torch.cat([a.mobile for a in every])
    return AtomConstants(masses, mobile, first.dof, len(runs))


def _one(state: State, replica: int, n: int) -> State:
    """Return one replica of a state; not copied."""
    own, k = slice(replica * n, (replica + 1) * n), slice(replica, replica + 1)
    return State(state.pos[own], state.vel[own], state.forces[own], state.energy[k], state.heat[k], state.step)


def _part(state: State, replicas: list[int], n: int) -> State:
    """Return some of the replicas of a state; copied."""
    atoms = (torch.tensor(replicas)[:, None] * n + torch.arange(n)).flatten()
    pos, vel, forces = state.pos[atoms], state.vel[atoms], state.forces[atoms]
    return State(pos, vel, forces, state.energy[replicas], state.heat[replicas], state.step)


def _finite(state: State) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.tensors().values())


# --- Stability of a model in dynamics, which errors on test frames do not show ---
#
# X. Fu et al., "Forces are not enough", Trans. Mach. Learn. Res. 2023 (arXiv:2210.07237), find that force errors and
# stable simulations are loosely related. What counts as broken: guard.py, and everything that stops `run_md`
# (guard.py).

_LARGEST_BATCH = 100_000  # atoms
_REFERENCE = 100  # number of frames from which the usual bond lengths are taken


def check_stability(
    model: str | os.PathLike | Potential,
    frames: Sequence[Atoms],
    temperatures: Iterable[float] = (300.0, 600.0),
    time: float = 10.0,
    replicas: int = 8,
    timestep: float = 0.5,
    friction: float | None = None,
    seed: int = 0,
    devices: str | Sequence[str] = "auto",
    dtype: torch.dtype | str | None = None,
    charge: int | None = None,
    spin: int | None = None,
    console: Console | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str | None = None,
    numbers: Sequence[int] | None = None,
    level: str | None = None,
    save: Callable[[StabilityReport], object] | None = None,
) -> StabilityReport:
    """Run Langevin dynamics from given frames and see which runs break.

    A replica is broken when it passes a limit of `run_md` (force, temperature, conserved energy, overlap, a number that
    is not finite) or when its bonds change (`guard.Bonds`); it is checked every 10 fs. The others go on without it
    as if they ran alone: velocities and noise of a replica depend on its seed only, and positions are the same up to
    the rounding of a batch of another size.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential.
        frames: start structures are taken from them at even intervals. They need not have the same composition:
            replicas of equally many atoms run together, in batches of up to 100,000 atoms, which the devices share.
            Labels are not used.
        temperatures: K; from the same starts and seeds.
        time: ps.
        replicas: at each temperature. With more of them than frames, several begin from the same one.
        timestep: fs.
        friction: 1/ps; None means 1.
        seed: replica k has seed + k.
        devices: "auto" (the first GPU, else the CPU), "all", or names ("cuda:0,cuda:1", "cpu,cpu"); each of several has
            a process, which computes some of the replicas.
        dtype: floating-point type of the network.
        charge: total charge in e of frames that state none; those that state another are an error.
        spin: multiplicity of frames, likewise.
        console: where progress is shown; None is silent.
        allow_untrained_charge: take total charges that the model was not trained on, or does not use, with a
            warning.
        coulomb: "pme" or "dsf" in periodic cells, as of `run_md`.
        numbers: numbers of the frames in messages and in the report, as in their file; default: 0, 1, …
        level: level of theory, of a model that was trained on several; None: its default.
        save: function that gets what is found so far, once a minute, so that it is not lost if the process is killed.
            `followed` says how far each replica is. With several devices, only batches that have ended are known, in
            their order.

    Raises:
        BadConfig: a number is out of range, or `devices` is not valid.
        BadData: there are no frames.
        RuntimeError: the system ended a process, for example when memory was short.
        UnknownElement, UntrainedCharge: the model does not know an atom's element, or the total charge.
        Unphysical: atoms overlap in a frame.
        ValueError: a frame is not valid.
    """
    plan = [_options(t, time, replicas, timestep, friction, seed) for t in temperatures]
    if not plan:
        raise BadConfig("temperatures: give at least one")
    if not frames:
        raise BadData("there are no frames to start from")
    names, opening = devices_of(devices), Opening(dtype, allow_untrained_charge, coulomb, level)
    with torch.inference_mode(False):
        potential, source = open_model(model, "cpu", *opening)
        require_cells(coulomb, [frame.pbc for frame in frames])
        chosen = [k * len(frames) // replicas for k in range(replicas)]
        called = range(len(frames)) if numbers is None else numbers
        starts = {k: checked_start(frames[k], called[k], potential, charge, spin) for k in dict.fromkeys(chosen)}
        bonds = {index: Bonds(System.from_ase(start), alike(start, frames)) for index, start in starts.items()}
        runs = [
            ReplicaRun(k, called[index], starts[index], copy.copy(bonds[index]), options)
            for options in plan
            for k, index in enumerate(chosen)
        ]
        place: Any = model if source is None else source.path  # which other processes find, too
        order, found = [options.target_temperature for options in plan], list[ReplicaOutcome]()
        saved_at = clock()

        def report() -> StabilityReport:
            ended = {(result.temperature, result.replica) for result in found}
            others = (run.outcome(None) for run in runs if (run.result.temperature, run.result.replica) not in ended)
            every = sorted([*found, *others], key=lambda result: (order.index(result.temperature), result.replica))
            return StabilityReport(every, plan[0].steps * timestep * 1e-3)

        def save_in_time() -> None:
            nonlocal saved_at
            if save is not None and clock() - saved_at >= _SAVE_S:
                save(report())
                saved_at = clock()

        for result in run_replicas(runs, partial(opening.open, place), names, console, checked=save_in_time):
            found.append(result)
    return report()


def _options(
    temperature: float, time: float, replicas: int, timestep: float, friction: float | None, seed: int
) -> MDOptions:
    if not 0 < timestep < float("inf"):
        raise BadConfig(f"timestep: must be a positive number, got {timestep}")
    if not (0 < time < 1e9 and 1000 * time >= timestep):
        raise BadConfig(f"time: must be at least one timestep, got {time} ps and a timestep of {timestep} fs")
    steps = round(1000 * time / timestep)
    return MDOptions(steps, timestep, "nvt", float(temperature), friction, seed, replicas)


def checked_start(frame: Atoms, number: int, potential: Potential, charge: int | None, spin: int | None) -> Atoms:
    try:
        start = plain_copy(frame, charge, spin)
        check_start(start, potential)
        check_overlaps(System.from_ase(start), [potential], where=f"frame {number}")
    except (Unphysical, ValueError) as error:
        rename(error, f"frame {number}")
        raise
    return start


def alike(start: Atoms, frames: Sequence[Atoms]) -> list[Atoms]:
    """Return up to so many frames with the same atoms as this one."""
    some = [frames[k * len(frames) // _REFERENCE] for k in range(_REFERENCE)] if len(frames) > _REFERENCE else frames
    return [f for f in some if len(f) == len(start) and (f.numbers == start.numbers).all()]


# --- Batches of replicas on devices ---


def run_replicas(
    runs: Sequence[ReplicaRun],
    opening: Callable[[str], Any],
    devices: Sequence[str],
    console: Console | None,
    temperatures: Collection[float] | None = None,
    checked: Callable[[], object] | None = None,
) -> Iterator[Any]:
    """Run replicas in batches, which are handed out to one process for each device.

    Args:
        runs: the replicas, by temperature. They stay as they are where other processes run them.
        opening: function that opens what `ReplicaRun.potential` and `outcome` take, on a device.
        devices: as from `devices_of`.
        console: where replicas are reported when they break (with several devices when their batch ends), and in a
            terminal the progress; None prints nothing.
        temperatures: K; only replicas at these run, in the batches that they have beside the others. None: all.

    Yields:
        `outcome` of each replica, by temperature.

    Raises:
        RuntimeError: the system ended a process.
    """
    batches = [
        batch
        for batch in _batches(runs, len(devices))
        if temperatures is None or batch[0].options.target_temperature in temperatures
    ]
    progress = _Progress(console, batches, checked)
    record = progress.update if len(devices) == 1 else partial(_record, progress.reached)
    remedy = "take fewer replicas or fewer devices"
    setup = partial(_Replicas, batches, opening, record)
    with progress, devices_pool(setup, [*devices], remedy=remedy, here=True) as pool:
        for outcomes in in_order(range(len(batches)), pool):
            progress.report(outcomes)
            yield from outcomes
            if checked is not None:
                checked()


def _batches(runs: Sequence[ReplicaRun], devices: int) -> list[list[ReplicaRun]]:
    """Return the largest batches of replicas that can run together and give all devices equal work.

    A step of few atoms takes nearly as long as one of twice as many. So what must run apart, as temperatures, is not
    divided further where it is a multiple of the devices.
    """
    groups: dict[tuple, list[ReplicaRun]] = {}
    for run in runs:
        groups.setdefault(run.kind, []).append(run)
    similar = Counter(len(group[0].start) for group in groups.values())
    batches: list[list[ReplicaRun]] = []
    for group in groups.values():
        n = len(group[0].start)
        parts = devices // math.gcd(devices, similar[n])
        batches += blocks_of(group, min(max(1, _LARGEST_BATCH // n), math.ceil(len(group) / parts)))
    return batches


class _Replicas:
    """Runs batches of replicas on a device.

    Args:
        batches: all batches.
        opening: as for `run_replicas`.
        record: function that is called with the number of a batch, its step and its number of whole replicas.
        device: the device.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[ReplicaRun]],
        opening: Callable[[str], Any],
        record: Callable[[int, int, int], None],
        device: str,
    ):
        self.batches, self.record, self.model, self.watch = batches, record, opening(device), Watch()

    def __call__(self, number: int) -> list[Any]:
        """Return the outcomes of a batch."""
        runs = self.batches[number]

        def progress(step: int) -> None:
            self.record(number, step, sum(run.result.whole for run in runs))

        self.watch.restart()
        ReplicaBatch(runs[0].potential(self.model), [*runs], progress, self.watch).run()
        progress(runs[0].options.steps)
        return [run.outcome(self.model) for run in runs]


def _record(reached: Any, number: int, step: int, whole: int) -> None:
    reached[2 * number : 2 * number + 2] = [step, whole]


class _Progress:
    """Reports replicas that broke and, in a terminal, how far the runs are.

    Args:
        console: where to print; None prints nothing.
        batches: all replicas, as they run together.
        checked: function that is called after each check in this process.
    """

    def __init__(
        self,
        console: Console | None,
        batches: Sequence[Sequence[ReplicaRun]],
        checked: Callable[[], object] | None = None,
    ):
        self._console, self._batches, self._checked = console, batches, checked
        self.reached = RawArray("q", [number for batch in batches for number in (-1, len(batch))])  # as `_record` does
        self._status = None if console is None else console.status(self)
        self._reported: set[tuple[float, int]] = set()

    def __enter__(self) -> None:
        if self._status is not None:
            self._status.start()

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, number: int, step: int, whole: int) -> None:
        """Record a step of a batch of this process, and report replicas that broke at it."""
        _record(self.reached, number, step, whole)
        self.report([run.result for run in self._batches[number]])
        if self._checked is not None:
            self._checked()

    def report(self, outcomes: Iterable[Any]) -> None:
        """Print a line for each replica that has broken, once."""
        for result in outcomes:
            name = result.temperature, result.replica
            if self._console is not None and not result.whole and name not in self._reported:
                self._reported.add(name)
                words = f"{result.temperature:g} K, replica {result.replica}: broken at {result.broken_at:.3f} ps: "
                self._console.print(words + result.reason, highlight=False, soft_wrap=True, markup=False)

    def __rich__(self) -> str:
        """Return the temperatures that are under way, for a status that is drawn again and again."""
        under_way: dict[MDOptions, list[tuple[int, int, int]]] = {}
        for batch, step, whole in zip(self._batches, self.reached[::2], self.reached[1::2], strict=True):
            under_way.setdefault(batch[0].options, []).append((len(batch), step, whole))
        words = []
        for options, rows in under_way.items():
            count, ps = sum(size for size, *_ in rows), options.timestep * 1e-3
            if any(step >= 0 for _, step, _ in rows) and any(step < options.steps for _, step, _ in rows):
                mean = sum(size * max(0, step) for size, step, _ in rows) / count
                words.append(
                    f"{options.target_temperature:g} K: {mean * ps:.2f} of {options.steps * ps:g} ps, "
                    f"{sum(whole for *_, whole in rows)} of {count} whole"
                )
        return "; ".join(words)
