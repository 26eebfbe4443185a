"""run_md: from a model and a structure to a trajectory."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..adapters.model import ModelSource, open_model
from ..core.files import claimed
from ..core.stated import cell_of
from ..errors import BadConfig, UnknownModel
from ..potential.cells import require_cells
from ..potential.novelty import LARGEST, UnknownStructure, Watch
from ..potential.potential import Potential
from ..potential.refusals import rename
from ..system import System
from .guard import Guard, Limits, NonFiniteState, Unphysical, check_overlaps
from .integrators import AtomConstants, Barostat, Langevin, State, VelocityVerlet
from .options import BAROSTAT, MDOptions
from .output import Conservation, Reporter, TableRow
from .setup import (
    atom_constants,
    check_start,
    fingerprint,
    make_engine,
    minimize,
    noise_seeds,
    plain_copy,
    repartition,
    velocities,
)
from .springs import Springs
from .trajectory import Recorder, check_trajectory, read_restart, write_restart

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["MDResult", "Replica", "run_md"]

_WATCH = 1000  # steps between two looks at the novelty, which takes as long as some compiled steps
_LOOK = 100  # most steps between two checks of the state
SHORTEST = 0.2  # fs, of inner steps
SPRINGS = "springs"
"""The inner potential that is fitted to the model."""
_ENLARGED = 3  # repetitions of a block with a larger capacity for edges, before its steps are run one by one


@dataclass(eq=False)
class Replica:
    """Result of one replica.

    Attributes:
        atoms: the last frame, with momenta.
        rows: the table, also of earlier runs when continued.
        drift: of the conserved energy, eV/atom/ps by a linear fit; nan for short runs.
    """

    atoms: Atoms
    rows: list[TableRow]
    drift: float


@dataclass(eq=False)
class MDResult:
    """Result of a simulation.

    Attributes:
        replicas: each of them.
        ns_per_day: speed, of each replica.
        files: everything that was written.
        watch: the novelty of the frames; empty if the model is not calibrated.
    """

    replicas: list[Replica]
    ns_per_day: float
    files: list[Path]
    watch: Watch

    @property
    def atoms(self) -> Atoms:
        """The last frame of the first replica."""
        return self.replicas[0].atoms

    @property
    def rows(self) -> list[TableRow]:
        """The table of the first replica."""
        return self.replicas[0].rows

    @property
    def drift(self) -> float:
        """The largest drift of all replicas, with its sign."""
        return max((replica.drift for replica in self.replicas), key=abs)


def run_md(
    model: str | os.PathLike | Potential,
    atoms: Atoms,
    options: MDOptions,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    charge: int | None = None,
    spin: int | None = None,
    console: Console | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str | None = None,
    inner: str | os.PathLike | Potential | None = None,
    level: str | None = None,
    start: str | None = None,
) -> MDResult:
    """Simulate the motion of a structure.

    On a GPU, where the model runs on the Evaluator's fused kernels, a step does not pass through the host: it
    launches blocks of steps, and checks the end of a block while the next one runs.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential.
        atoms: the start; not changed. Charge and spin in its `info` come before those given here. Atoms under
            ase.constraints.FixAtoms stay where they are.
        options: how long, how hot, how many replicas, which files.
        device: where everything runs.
        dtype: floating-point type of the network; positions, velocities and sums are float64.
        charge: total charge, e.
        spin: multiplicity.
        console: where progress is shown; None is silent.
        allow_untrained_charge: take a total charge that the model was not trained on, or does not use, with a
            warning.
        coulomb: how Coulomb energies over all pairs are summed in periodic cells, "pme" or "dsf", as of
            `torchmdnet2.load`; None: "pme", or what a Potential that is given has.
        inner: the inner potential of multiple time steps: "springs", which are fitted to the model, or a model as
            `model`, faster and less accurate. Its forces move the atoms in `options.inner_steps` short steps, and the
            difference of the forces of both acts between them. Averages are those of `model`. None: one time step.
        level: level of theory of `model`, where it was trained on several; None: its default.
        start: where the structure is from, such as the name of its file, for the page (`options.report`).

    Raises:
        UnknownElement, UntrainedCharge: the model does not know an atom's element, or the total charge.
        Unphysical: atoms overlap at the start, or forces, temperature or energy explode later; the last good
            frame is then in the trajectory.
        UnknownStructure: `options.stop_if_unknown`, and atoms are unlike those of the training; the frame is then in
            the trajectory.
        BadConfig: the restart file belongs to another simulation, or another run writes the same files.
        ValueError: the structure is not valid (atom without finite position, periodic without cell), or `coulomb` has
            no effect.
    """
    with torch.inference_mode(False):  # also where the caller is in that mode
        opened = open_model(model, device, dtype, allow_untrained_charge, coulomb, level)
        require_cells(coulomb, [cell_of(atoms)[1]])
        fast: tuple[Potential, ModelSource | None] | str | None = None
        if inner is not None:
            fitted = inner == SPRINGS
            try:
                fast = SPRINGS if fitted else open_model(inner, device, dtype, allow_untrained_charge, coulomb)
            except UnknownModel as error:
                raise UnknownModel(f"inner: {error}, or '{SPRINGS}', which are fitted to the model") from None
        try:
            check_start(plain_copy(atoms, charge, spin), opened[0])  # before there are folders
        except ValueError as error:
            if str(error).startswith("structure 0"):
                rename(error, "the start structure")
            raise
        names = [options.prefix, *options.files()]
        for path in names:
            path.parent.mkdir(parents=True, exist_ok=True)
        with claimed(*names):
            return Simulation(opened, atoms, options, charge, spin, console, fast, start).run()


def _identified(opened: tuple[Potential, ModelSource | None]) -> tuple[Potential, str]:
    """Return an opened model, and what identifies it in a restart file."""
    potential, source = opened
    file = None if source is None or source.level is not None else source.sha256
    return potential, file or fingerprint(potential)


def _origin(
    opened: tuple[Potential, ModelSource | None],
    inner: tuple[Potential, ModelSource | None] | str | None,
    start: str | None,
    options: MDOptions,
) -> dict[str, str]:
    """Return models and start structure in words, for the page."""

    def described(source: ModelSource | None) -> str:
        if source is None:
            return "a model in memory"
        level = "" if source.level is None else f", level {source.level}"
        return f"{source.path}{level}, checksum {str(source.sha256)[:12]}…"

    found = {"model": described(opened[1])}
    if inner is not None:
        found["inner model"] = inner if isinstance(inner, str) else described(inner[1])
    relaxed = ", relaxed" if options.minimize else ""
    return {**found, "start": f"{start or 'a structure in memory'}{relaxed}", "seed": str(options.seed)}


class Simulation:
    """A simulation while it runs; arguments as for `run_md`, with the models opened.

    Attributes:
        state: the last state that was found good, on the host.
    """

    def __init__(
        self,
        opened: tuple[Potential, ModelSource | None],
        atoms: Atoms,
        options: MDOptions,
        charge: int | None,
        spin: int | None,
        console: Console | None,
        inner: tuple[Potential, ModelSource | None] | str | None = None,
        start: str | None = None,
    ):
        self.options, self.console = options, console
        self.origin = _origin(opened, inner, start, options)
        self.potential, self.identity = _identified(opened)
        self.inner: Potential | Springs | None = None
        self.inner_identity: str | None = None
        if isinstance(inner, tuple):
            self.inner, self.inner_identity = _identified(inner)
        if inner is None and options.inner_steps is not None:
            raise BadConfig("inner_steps: there is no inner model; give one (inner)")
        if inner is not None and options.timestep < SHORTEST * options.count:
            raise BadConfig(
                f"timestep: {options.timestep:g} fs in {options.count} inner steps are shorter than atoms need; the "
                f"time step is that of the model, so give one of about {0.5 * options.count:g} fs"
            )
        if options.stop_if_unknown and self.potential.calibration is None:
            raise BadConfig(
                "stop_if_unknown: the model is not calibrated, so it cannot notice unknown atoms; calibrate it "
                "(torchmdnet2 calibrate)"
            )
        self.watch = Watch()
        self.start = plain_copy(atoms, charge, spin)
        for potential in (self.potential, self.inner):
            if isinstance(potential, Potential):
                check_start(self.start, potential)
        for path in options.trajectory_files(0):
            check_trajectory(path, self.start)
        if options.minimize and not options.restart:
            self._say(minimize(self.start, self.potential))
        if options.hydrogen_mass is not None:
            repartition(self.start, options.hydrogen_mass)
        if inner == SPRINGS:
            self.inner = self._springs()
            self.inner_identity = self.inner.identity
        self.system = System.from_ase([self.start] * options.replicas)
        if options.stop_if_unknown and self.system.num_atoms > LARGEST:
            raise BadConfig(
                f"stop_if_unknown: the structure has {self.system.num_atoms} atoms, and at most {LARGEST} can be "
                "checked"
            )
        check_overlaps(self.system)
        self.atoms = atom_constants(self.start, options)
        where = self.potential.device
        self.engine = make_engine(
            self.potential, self.system.to(where), self._dynamics(self.atoms.to(where)), options.interval, self.inner,
            options.count, options.precision,
        )  # fmt: skip
        self.saved: dict[str, Any] = {}
        if options.restart:
            self.state, self.saved = read_restart(options.file(".restart"), self._facts())
            self.engine.load(self.state)
        else:
            self.state = self.engine.begin(velocities(self.start, self.atoms, options))
        limits = Limits.for_temperature(options.target_temperature)
        first = self.saved.get("first_conserved")
        self.guard = Guard(self.system, self.atoms, options.timestep, limits, first, self.potential)
        self.conservation = Conservation(self.atoms.num_atoms, options.replicas)

    def _springs(self) -> Springs:
        """Return the springs of the start structure, fitted or from a restart file."""
        springs = Springs(System.from_ase(self.start))
        if self.options.restart:
            _, saved = read_restart(self.options.file(".restart"), {"inner": springs.identity})
            springs.take(saved["springs"])
        else:
            cells = bool(self.start.pbc.any())
            left = springs.fit(self.potential.in_cells() if cells else self.potential)
            what = f"{len(springs.pairs)} bonds and {len(springs.triples)} angles of {len(springs.usual)} kinds"
            self._say(f"springs on {what} take {1 - left:.0%} of the forces")
        return springs

    def _dynamics(self, atoms: AtomConstants) -> VelocityVerlet:
        """Return the integrator, or that of the inner steps where there are any."""
        options = self.options
        timestep = options.timestep if self.inner is None else options.timestep / options.count
        if options.ensemble == "nve":
            return VelocityVerlet(atoms, timestep, remove_drift=options.remove_drift)
        kelvin, seeds, barostat = options.target_temperature, noise_seeds(options.seeds), None
        if options.ensemble == "npt":
            pressure, kind, time, compressibility = map(options.of_barostat, BAROSTAT)
            barostat = Barostat(atoms, options.timestep, kelvin, pressure, seeds, kind, time, compressibility)
        return Langevin(atoms, timestep, kelvin, options.bath_friction, seeds, barostat, options.remove_drift)

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self) -> MDResult:
        """Run all steps, or stop at the first that fails a check."""
        options, first = self.options, self.state.step
        rows = self.guard(self.state)  # before any file is written
        self.conservation(rows)
        self.record = self._recorder()
        if not options.restart:
            self.record.add(self.state, rows)
        self.marks = self.record.marks
        self.engine.prepare()
        self.reporter = Reporter(self.console, first, options.steps, options.timestep)
        self.saved_at = first
        try:
            try:
                self.reporter.update(rows, self.record.worst_drift)
                with self.reporter:
                    self._watch()
                    self._advance()
            finally:  # also when interrupted: the work so far can be continued
                self._save()
                self.record.close()
                notice = self.record.plot(self._title())
                if notice:
                    self._say(notice)
                formula, speed = self.start.get_chemical_formula(), self.reporter.ns_per_day(self.state.step)
                self.record.write_page(formula, self._settings(), self.origin, speed)
        except OSError as error:  # a full disk
            raise OSError(error.errno, self._unwritten(error)) from error
        replicas = [
            Replica(self.record.frame(self.state, b), rows, drift)
            for b, (rows, drift) in enumerate(zip(self.record.rows, self.record.drifts, strict=True))
        ]
        return MDResult(replicas, self.reporter.ns_per_day(self.state.step), self.record.files(), self.watch)

    def _advance(self) -> None:
        """Launch blocks ahead, check each, and repeat one that fails."""
        engine, last = self.engine, self.options.steps
        launched, enlarged = self.state.step, 0
        under_way = 0
        while self.state.step < last:
            while launched < last and under_way <= engine.ahead:
                stop = self._stop_after(launched)
                engine.launch(stop - launched)
                launched, under_way = stop, under_way + 1
            state = engine.collect()
            under_way -= 1
            try:
                rows = self.guard(state)
            except Unphysical as error:
                engine.drop()
                room = self._was_room()
                engine.load(self.state)
                if isinstance(error, NonFiniteState) and not room and enlarged < _ENLARGED:
                    enlarged += 1
                else:
                    self._one_by_one(self._stop_after(self.state.step))
                launched, under_way = self.state.step, 0
            else:
                self._keep(state, rows)
                enlarged = 0

    def _stop_after(self, step: int) -> int:
        """Return the last step of the block that begins at a step."""
        intervals = self.options.interval, self.options.remove_drift or self.options.interval
        return min(*(step - step % every + every for every in intervals), step + _LOOK, self.options.steps)

    def _keep(self, state: State, rows: list[TableRow]) -> None:
        """Keep a checked state to return to, and record it when it is due."""
        options = self.options
        self.conservation(rows)
        last = state.step == options.steps
        recorded = last or state.step % options.interval == 0
        if recorded:
            self.record.add(state, rows)
        self.state, self.marks = state, self.record.marks
        self.reporter.update(rows, self.record.worst_drift)
        if state.step - self.saved_at >= (options.restart_every or max(options.steps // 20, options.interval)):
            self._save()
        since = state.step - self.watched_at
        if recorded and (last or since >= (_WATCH // 10 if options.stop_if_unknown else _WATCH)):
            self._watch()

    def _watch(self) -> None:
        """Check the novelty of the state.

        Raises:
            UnknownStructure: the run is to stop at unknown atoms.
        """
        self.watched_at = step = self.state.step
        if self.potential.calibration is None or self.system.num_atoms > LARGEST:
            return
        system = self.guard.at(self.state)
        scores = self.potential.novelty(system.to(self.potential.device)).cpu()
        names = [f"replica {b}" for b in range(self.options.replicas)] if self.options.replicas > 1 else []
        self.watch(scores, system, f" at {step * self.options.timestep * 1e-3:.3f} ps", names)
        if self.options.stop_if_unknown and self.watch.reported:
            raise UnknownStructure(
                f"step {step}: stopped, since atoms are unlike those of the training; {self.watch.summary()}. Without "
                "stop_if_unknown, restart continues from here"
            )

    def _was_room(self) -> bool:
        """Return whether the edges of a failed block fitted; if not, the capacity is raised."""
        try:
            return self.engine.check()
        except ValueError:
            return True

    def _one_by_one(self, stop: int) -> None:
        """Run step by step from the last checked state to a step.

        Raises:
            Unphysical: names the first bad step; the last good one ends the trajectory.
        """
        while self.state.step < stop:
            self.engine.launch(1)
            state = self.engine.collect()
            try:
                rows = self.guard(state)
            except Unphysical as error:
                words = str(error)
                room = self._was_room()
                self.engine.load(self.state)
                if not room and isinstance(error, NonFiniteState):
                    continue
                self._refuse(state.step, words)
            self._keep(state, rows)

    def _refuse(self, step: int, words: str) -> None:
        recorded = self.record.rows[0]
        if not recorded or recorded[-1].step != self.state.step:
            self.record.add(self.state, self.guard.rows(self.state))
            self.marks = self.record.marks
        path = self.options.trajectory_files(0)[0]
        raise Unphysical(
            f"step {step}: {words}. Stopped; the last good frame (step {self.state.step}) ends {path}. A shorter "
            "timestep, a relaxed start (minimize) or a model trained on such structures may help"
        ) from None

    # --- files ---------------------------------------------------------------------------------------------------

    def _recorder(self) -> Recorder:
        options = self.options
        if not options.restart:
            return Recorder(options, self.start, self.atoms, None, None)
        path, marks = options.file(".restart"), self.saved["trajectories"]
        if marks.keys() != {p.name for b in range(options.replicas) for p in options.trajectory_files(b)}:
            raise BadConfig(f"{path} belongs to the trajectory files {', '.join(marks)}")
        done = self.state.step >= options.steps
        notice = "; already complete: --steps is the total number of steps" if done else ""
        self._say(f"continuing from step {self.state.step} of {options.steps}{notice}")
        return Recorder(options, self.start, self.atoms, self.state.step, marks)

    def _save(self) -> None:
        state, marks = self.state, self.marks
        self.record.sync()
        facts = {**self._facts(), "trajectories": marks, "first_conserved": self.guard.first_conserved}
        if isinstance(self.inner, Springs):
            facts["springs"] = self.inner.facts()
        write_restart(self.options.file(".restart"), state, facts)
        self.saved_at = state.step

    def _unwritten(self, error: OSError) -> str:
        restart = self.options.file(".restart")
        words = f"step {self.state.step}: the files of {self.options.prefix} could not be written: "
        words += error.strerror or str(error)
        if restart.exists():
            return f"{words}. {restart} holds step {self.saved_at}: make room, and continue with restart"
        return words

    def _facts(self) -> dict[str, Any]:
        return {
            **self.options.physics(),
            "model": self.identity,
            "dtype": str(self.potential.dtype) + (", mixed" if self.options.precision == "mixed" else ""),
            "device": self.potential.device.type,
            "elements": hashlib.sha256(self.system.z.numpy().tobytes()).hexdigest(),
            # that of the state, where it changes
            **({} if self.options.ensemble == "npt" else {"cell": self.start.cell.array.round(6).tolist()}),
            "pbc": self.start.pbc.tolist(),
            "masses": hashlib.sha256(self.atoms.masses.numpy().round(6).tobytes()).hexdigest(),
            "fixed atoms": (self.atoms.mobile[: len(self.start), 0] == 0).nonzero()[:, 0].tolist(),
            "charge": float(self.system.charge[0]),
            "spin": int(self.system.spin[0]),
            **({"coulomb": self.potential.coulomb} if self._has_lattice_sum else {}),
            "inner": self.inner_identity,
            "inner_steps": None if self.inner is None else self.options.count,
        }

    @property
    def _has_lattice_sum(self) -> bool:
        """Whether the choice `coulomb` changes the energy of the potential."""
        return bool(self.start.pbc.any()) and self.potential.in_cells() is not self.potential

    def _title(self) -> str:
        return f"{self.start.get_chemical_formula()}: {self._settings()}"

    def _settings(self) -> str:
        options = self.options
        kind = "constant energy" if options.ensemble == "nve" else f"Langevin, {options.target_temperature:g} K"
        if options.ensemble == "npt":
            kind += f", {options.of_barostat('pressure'):g} bar ({options.of_barostat('barostat')})"
        many = "" if options.replicas == 1 else f"{options.replicas} replicas, "
        inner = "" if self.inner is None else f" in {options.count} inner steps"
        mixed = ", mixed precision" if options.precision == "mixed" else ""
        return f"{many}{kind}, {options.timestep:g} fs{inner}{mixed}"

    def _say(self, words: str) -> None:
        if self.console is not None:
            self.console.print(words, highlight=False, soft_wrap=True)
