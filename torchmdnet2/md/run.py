"""run_md: from a model and a structure to a trajectory."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..adapters.model import open_model
from ..errors import BadConfig, BadData
from ..evaluator import Evaluator
from ..potential import Potential
from ..system import System
from ..units import AMU_A2_FS2
from .guard import Limits, Unphysical, check_overlaps, closest_pair, name_atom
from .integrators import Langevin, VelocityVerlet
from .options import MDOptions
from .output import Drift, Row, Table, TrajectoryFile, plot
from .progress import Reporter
from .restart import read_restart, write_restart
from .state import Atomistics, State, maxwell_boltzmann, remove_momentum

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["MDResult", "run_md"]

_VELOCITY = math.sqrt(AMU_A2_FS2)
"""Å/fs in ASE's unit of velocity, sqrt(eV/amu)."""


@dataclass(eq=False)
class MDResult:
    """What a simulation gave.

    Attributes:
        atoms: the last frame, with momenta.
        rows: the table, also of earlier runs when continued.
        drift: of the conserved energy, eV/atom/ps by a linear fit; nan for short runs.
        ns_per_day: speed.
        files: everything that was written.
    """

    atoms: Atoms
    rows: list[Row]
    drift: float
    ns_per_day: float
    files: list[Path]


def run_md(
    model: str | os.PathLike | Potential,
    atoms: Atoms,
    options: MDOptions,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    charge: int | None = None,
    spin: int | None = None,
    console: Console | None = None,
) -> MDResult:
    """Simulate the motion of a structure.

    Args:
        model: path of a .tmn file or a Potential.
        atoms: the start; not changed. Charge and spin in its `info` come before those given here. Atoms under
            ase.constraints.FixAtoms stay where they are.
        options: how long, how hot, which files.
        device: where everything runs.
        dtype: floating-point type of the network; positions, velocities and sums are float64.
        charge, spin: total charge in e and multiplicity.
        console: where progress is shown; None is silent.

    Raises:
        UnknownElement: the model does not know an atom's element.
        Unphysical: atoms overlap at the start, or forces, temperature or energy explode later; the last good
            frame is then in the trajectory.
        BadConfig: the restart file belongs to another simulation.
        ValueError: the structure is not valid (atom without finite position, periodic without cell).
    """
    with torch.inference_mode(False):  # also where the caller is in that mode
        return Simulation(model, atoms, options, device, dtype, charge, spin, console).run()


class Simulation:
    """A simulation while it runs; arguments as for `run_md`."""

    def __init__(
        self,
        model: str | os.PathLike | Potential,
        atoms: Atoms,
        options: MDOptions,
        device: torch.device | str,
        dtype: torch.dtype | str | None,
        charge: int | None,
        spin: int | None,
        console: Console | None,
    ):
        self.options, self.console = options, console
        self.potential, source = open_model(model, device, dtype)
        self.identity = _fingerprint(self.potential) if source is None else source.sha256
        self.evaluator = Evaluator(self.potential)
        self.start = _start(atoms, charge, spin)
        self.num_atoms = len(atoms)
        self._check_start()
        if options.minimize and not options.restart:
            self._minimize()
        self.system = System.from_ase(self.start, device=self.potential.device)
        check_overlaps(self.system)
        self.atoms = _atomistics(self.start, options, self.potential.device)
        self.dynamics = self._dynamics()
        self.limits = Limits.for_temperature(self._target_temperature())
        self.marks: list[dict[str, int] | None] = [None] * len(options.trajectory_files)
        self.first_conserved: float | None = None
        self.state = self._continue() if options.restart else self._begin()

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self) -> MDResult:
        """All steps, or as many as go well."""
        options, state = self.options, self.state
        row = self._checked_row()  # before any file is touched
        if self.first_conserved is None:
            self.first_conserved = row.conserved_eV
        for path in (options.prefix, *options.trajectory_files):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.trajectories = [TrajectoryFile(p, m) for p, m in zip(options.trajectory_files, self.marks, strict=True)]
        self.table = Table(options.file(".csv"), keep_to=state.step if options.restart else None)
        self.drift = Drift(self.num_atoms)
        for old in self.table.rows:
            self.drift.add(old)
        if not options.restart:
            self._record(row)
        reporter = Reporter(self.console, state.step, options.steps, options.timestep)
        every = options.restart_every or max(options.steps // 20, options.interval)
        saved = state.step
        try:
            reporter.update(row, self.drift.slope)
            with reporter:
                while state.step < options.steps:
                    row = self._block(min(options.interval - state.step % options.interval, options.steps - state.step))
                    reporter.update(row, self.drift.slope)
                    if state.step - saved >= every:
                        self._save()
                        saved = state.step
        finally:  # also when interrupted: the work so far can be continued
            self._save()
            self.table.close()
            if len(self.table.rows) > 1:
                plot(options.file(".png"), self.table.rows, self.num_atoms, self._title(), self.drift.slope)
        speed = reporter.ns_per_day(state.step)
        files = [*options.trajectory_files, *(options.file(e) for e in (".csv", ".png", ".restart"))]
        return MDResult(self._frame(), self.table.rows, self.drift.slope, speed, [f for f in files if f.exists()])

    def _block(self, steps: int) -> Row:
        """Some steps without looking, then a look; when it is bad, the same steps again one by one."""
        good, noise = self.state.clone(), self.dynamics.generator.get_state()
        try:
            for _ in range(steps):
                self.dynamics.step(self.state)
            row = self._checked_row()
        except (Unphysical, ValueError):
            self._rewind(good, noise)
            self._find_the_step(steps)
            raise
        except KeyboardInterrupt:
            self._rewind(good, noise)
            raise
        self._record(row)
        return row

    def _find_the_step(self, steps: int) -> None:
        """Advance to the last good step, keep it as a frame, and raise for the next one."""
        for _ in range(steps):
            good, noise = self.state.clone(), self.dynamics.generator.get_state()
            try:
                self.dynamics.step(self.state)
                self._checked_row()
            except (Unphysical, ValueError) as error:
                at = f"step {self.state.step + (0 if isinstance(error, Unphysical) else 1)}"
                self._rewind(good, noise)
                if self.table.rows and self.table.rows[-1].step != good.step:
                    self._record(self._checked_row())
                raise Unphysical(
                    f"{at}: {error}. Stopped; the last good frame (step {good.step}) ends "
                    f"{self.trajectories[0].path}. A shorter timestep, a relaxed start (minimize) or a model trained "
                    "on such structures may help"
                ) from None

    def _rewind(self, good: State, noise: Tensor) -> None:
        for name, value in vars(good.clone()).items():
            setattr(self.state, name, value)
        self.dynamics.generator.set_state(noise)

    def _checked_row(self) -> Row:
        """The state as a row of the table; raises Unphysical when it is off."""
        state = self.state
        force = state.forces.norm(dim=1)
        # one transfer from the device
        told = torch.stack([state.energy, self.atoms.kinetic_energy(state.vel), state.heat, force.max()]).tolist()
        potential, kinetic, heat, largest = told
        row = Row(
            step=state.step,
            time_ps=state.step * self.options.timestep * 1e-3,
            temperature_K=self.atoms.temperature(kinetic),
            potential_eV=potential,
            kinetic_eV=kinetic,
            conserved_eV=potential + kinetic - heat,
        )
        first = row.conserved_eV if self.first_conserved is None else self.first_conserved
        error = (row.conserved_eV - first) / self.num_atoms
        wrong = self.limits.violation(potential, row.temperature_K, largest, error)
        if wrong is None:
            check_overlaps(self.system.replace(pos=state.pos))
            return row
        raise Unphysical(f"{wrong}; {self._worst_atom(force)}")

    def _worst_atom(self, force: Tensor) -> str:
        z = self.system.z.tolist()
        worst = int(torch.nan_to_num(force, nan=math.inf).argmax())
        words = f"the largest force is on {name_atom(z, worst)}"
        if bool(torch.isfinite(self.state.pos).all()):
            pair = closest_pair(self.system.replace(pos=self.state.pos))
            if pair is not None:
                words += f", the closest pair is {name_atom(z, pair[1])} and {name_atom(z, pair[2])} at {pair[3]:.2f} Å"
        return words

    # --- beginning -----------------------------------------------------------------------------------------------

    def _check_start(self) -> None:
        from ase.constraints import FixAtoms

        if not self.num_atoms:
            raise BadData("the start structure has no atoms")
        for constraint in self.start.constraints:
            if not isinstance(constraint, FixAtoms):
                raise BadData(f"the start structure has a {type(constraint).__name__}; only FixAtoms is supported here")
        system = System.from_ase(self.start, device=self.potential.device).validate()
        self.potential.check_elements(system.z)

    def _minimize(self) -> None:
        from ase.optimize import FIRE

        from ..adapters.ase import TorchMDNet2Calculator

        self.start.calc = TorchMDNet2Calculator(self.potential, device=self.potential.device)
        optimizer = FIRE(self.start, logfile=None)
        done = optimizer.run(fmax=0.05, steps=1000)
        largest = np.linalg.norm(self.start.get_forces(), axis=1).max()
        self._say(
            f"minimised in {optimizer.nsteps} steps: energy {self.start.get_potential_energy():.4f} eV, "
            f"largest force {largest:.3f} eV/Å" + ("" if done else " (not converged)")
        )
        self.start.calc = None

    def _dynamics(self) -> VelocityVerlet:
        options = self.options
        if options.ensemble == "nve":
            return VelocityVerlet(self._evaluate, self.atoms, options.timestep)
        target = 300.0 if options.temperature is None else options.temperature
        # another stream than that of the velocities, which were drawn from the same seed
        seed = int.from_bytes(hashlib.sha256(f"noise {options.seed}".encode()).digest()[:7], "little")
        return Langevin(self._evaluate, self.atoms, options.timestep, target, options.friction, seed)

    def _evaluate(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        result = self.evaluator(self.system.replace(pos=pos))
        assert result.forces is not None
        return result.energy[0], result.forces

    def _begin(self) -> State:
        given = torch.as_tensor(self.start.get_velocities() / _VELOCITY, dtype=torch.float64)
        if self.options.temperature is None and bool(given.any()):
            vel = remove_momentum(self.atoms, given.to(self.potential.device) * self.atoms.mobile)
        else:
            vel = maxwell_boltzmann(self.atoms, self._target_temperature(), self.options.seed)
        energy, forces = self._evaluate(self.system.pos)
        return State(self.system.pos, vel, forces, energy, heat=torch.zeros_like(energy))

    def _continue(self) -> State:
        path = self.options.file(".restart")
        state, generator, facts = read_restart(path, self._facts(), self.potential.device)
        self.dynamics.generator.set_state(generator)
        if facts["trajectories"].keys() != {p.name for p in self.options.trajectory_files}:
            raise BadConfig(f"{path} goes with the trajectory files {', '.join(facts['trajectories'])}")
        self.marks = [facts["trajectories"][p.name] for p in self.options.trajectory_files]
        self.first_conserved = facts["first_conserved"]
        self._say(f"continuing from step {state.step} of {self.options.steps}")
        return state

    def _target_temperature(self) -> float:
        return 300.0 if self.options.temperature is None else self.options.temperature

    # --- output --------------------------------------------------------------------------------------------------

    def _record(self, row: Row) -> None:
        self.table.add(row)
        self.drift.add(row)
        frame = self._frame()
        for trajectory in self.trajectories:
            trajectory.write(frame)

    def _frame(self) -> Atoms:
        """The state as Atoms: positions as they are (not wrapped), momenta, energy, forces."""
        from ase.calculators.singlepoint import SinglePointCalculator

        frame = self.start.copy()
        frame.set_constraint(self.start.constraints)
        frame.set_positions(self.state.pos.cpu().numpy(), apply_constraint=False)
        momenta = (self.atoms.masses * self.state.vel).cpu().numpy() * _VELOCITY
        frame.set_momenta(momenta, apply_constraint=False)
        frame.info.update(step=self.state.step, time_fs=self.state.step * self.options.timestep)
        frame.calc = SinglePointCalculator(
            frame, energy=float(self.state.energy), forces=self.state.forces.cpu().double().numpy().copy()
        )
        return frame

    def _save(self) -> None:
        self.table.flush()
        marks = {t.path.name: t.mark() for t in self.trajectories}
        facts = {**self._facts(), "trajectories": marks, "first_conserved": self.first_conserved}
        write_restart(self.options.file(".restart"), self.state, self.dynamics.generator, facts)

    def _facts(self) -> dict[str, Any]:
        return {
            **self.options.physics(),
            "model": self.identity,
            "dtype": str(self.potential.dtype),
            "device": self.potential.device.type,
            "elements": hashlib.sha256(self.system.z.cpu().numpy().tobytes()).hexdigest(),
            "charge": float(self.system.charge[0]),
            "spin": int(self.system.spin[0]),
        }

    def _title(self) -> str:
        kind = "constant energy" if self.options.ensemble == "nve" else f"Langevin, {self._target_temperature():g} K"
        return f"{self.start.get_chemical_formula()}: {kind}, {self.options.timestep:g} fs"

    def _say(self, words: str) -> None:
        if self.console is not None:
            self.console.print(words, highlight=False, soft_wrap=True)


def _fingerprint(potential: Potential) -> str:
    """What a restart file knows a model in memory by: its weights."""
    digest = hashlib.sha256()
    for name, value in sorted(potential.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _start(atoms: Atoms, charge: int | None, spin: int | None) -> Atoms:
    """A copy with charge and spin in its info and without labels, which would be wrong in every later frame."""
    from ase import Atoms

    start = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc, constraint=atoms.constraints)
    for name in ("masses", "momenta"):
        if atoms.has(name):
            start.set_array(name, atoms.get_array(name))
    for key, given in (("charge", charge), ("spin", spin)):
        value = atoms.info.get(key, given)
        if value is not None:
            start.info[key] = value
    return start


def _atomistics(atoms: Atoms, options: MDOptions, device: torch.device) -> Atomistics:
    mobile = torch.ones(len(atoms), 1, dtype=torch.float64)
    for constraint in atoms.constraints:
        mobile[torch.as_tensor(constraint.index)] = 0
    count = int(mobile.sum())
    if not count:
        raise BadData("every atom of the start structure is fixed")
    free = options.ensemble == "nvt" or count < len(atoms) or count == 1
    masses = torch.as_tensor(atoms.get_masses(), dtype=torch.float64)[:, None]
    if not bool((masses > 0).all()):
        bad = int((~(masses > 0)).nonzero()[0, 0])
        raise BadData(f"atom {bad} has a mass of {float(masses[bad]):g}; give it a positive one")
    return Atomistics(masses.to(device), mobile.to(device), dof=3 * count - (0 if free else 3))
