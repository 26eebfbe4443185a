"""The loop of active learning: rounds of dynamics, selection, labels and training, each stored before the next."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from rich.console import Console

from ..core.devices import devices_of
from ..core.files import atomic_write, old_name
from ..core.pipeline import devices_pool, in_order
from ..data.cache import file_facts
from ..ensemble import Ensemble, write_ensemble
from ..errors import BadConfig, BadData, UnknownElement, UntrainedCharge
from ..md.guard import Bonds, Unphysical
from ..md.integrators import State
from ..md.options import MDOptions
from ..md.output import TableRow
from ..md.stability import ReplicaRun, alike, checked_start, run_replicas
from ..potential.potential import Potential
from ..potentials import find_model
from ..system import System
from ..training.config.config import Config
from ..training.reporting.log import TrainingLog
from ..training.run.folder import DONE, differences, exclusive_folder
from ..training.run.run import run_training
from ..training.run.setup import device_of, make_setup, require_usable
from ..training.run.start import own_torch_state
from ..training.steps.trainer import Interrupted
from .config import DynamicsConfig, LearnConfig
from .labellers import make_labeller
from .labelling import FAILED, LABELLED, LABELS, RESULTS, label_frames, put_aside
from .report import RoundSummary, errors_of, first_words, temperatures_of, validation_errors, write_report
from .selection import (
    Trajectory,
    frames_of,
    keys_of,
    labelled_frames,
    labels_of,
    make_selection,
    read_frames,
    read_trajectories,
    seed_of,
    spread_over,
    structures,
    unlabelled,
    write_frames,
    write_trajectories,
)

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console


__all__ = [
    "START", "STARTS", "VERIFY", "LearnResult", "check_starts", "clear_start", "divided", "explore", "force_spread",
    "prepare_start", "run_learning", "verify_start",
]  # fmt: skip


_ATOMS = 4096  # largest number of atoms in a batch of the committee


class _Sampled(ReplicaRun):
    """A replica that keeps frames at equal intervals.

    Args:
        number, index, start, bonds, options: as for ReplicaRun.
        member: number of the member that runs it.
        interval: steps between two kept frames.
    """

    def __init__(
        self, number: int, index: int, start: Atoms, bonds: Bonds, options: MDOptions, member: int, interval: int
    ):
        super().__init__(number, index, start, bonds, options)
        self._given += member, interval
        self.kind += (member,)
        self.member, self.interval = member, interval
        self.kept: dict[int, NDArray[np.float64]] = {}

    def potential(self, model: Ensemble) -> Potential:
        return model.members[self.member]

    def look(self, state: State, row: TableRow | None = None) -> None:
        super().look(state, row)
        if self.result.whole and state.step % self.interval == 0:
            self.kept[state.step] = state.pos.numpy().copy()

    def outcome(self, model: Ensemble) -> Trajectory:
        """Return its frames, with the last ones before it broke, and the spread of the committee in each."""
        result, ps = self.result, 1e-3 * self.options.timestep
        frames = dict(self.kept)
        for atoms in result.frames:
            frames.setdefault(round(atoms.info["time_ps"] / ps), atoms.positions)
        steps = sorted(frames)
        pos = np.stack([frames[step] for step in steps]) if steps else np.zeros((0, len(self.start), 3))
        return Trajectory(
            temperature=result.temperature,
            replica=result.replica,
            member=self.member,
            start=result.frame,
            broken_at=result.broken_at,
            reason=result.reason,
            time=np.array(steps) * ps,
            pos=pos,
            regular=np.array([step in self.kept for step in steps], dtype=bool),
            spread=force_spread(model, self.system, pos),
        )


def explore(
    opening: Callable[[str], Ensemble],
    devices: Sequence[str],
    starts: Sequence[Atoms],
    temperatures: Sequence[float],
    config: DynamicsConfig,
    seed: int,
    console: Console | None = None,
) -> Iterator[list[Trajectory]]:
    """Run Langevin dynamics of all replicas, as `check_stability` does.

    Args:
        opening: function that returns the models on a device; replica k runs with member k modulo their number.
        devices: names of devices, which share the replicas; each of several has a process.
        starts: structures from which starts are chosen evenly; the reference length of a bond is its mean over them.
        temperatures: temperatures in K, of those in `config`. The others change nothing but the sizes of batches, so
            that an interrupted exploration goes on with the same bits.
        config: the section `dynamics`.
        seed: replica k has seed + k.
        console: console for progress; None shows nothing.

    Yields:
        The trajectories at each temperature.

    Raises:
        UnknownElement, UntrainedCharge: the models do not know an element or the charge of a start.
        Unphysical: atoms overlap in a start.
        RuntimeError: the system ended a process.
    """
    members = opening("cpu").members
    steps = round(1000 * config.time / config.timestep)
    plan = [
        MDOptions(steps, config.timestep, "nvt", t, config.friction, seed, config.replicas) for t in config.temperatures
    ]
    chosen = _chosen(starts, config)
    checked = {k: checked_start(starts[k], k, members[0], None, None) for k in dict.fromkeys(chosen)}
    bonds = {k: Bonds(System.from_ase(atoms), alike(atoms, starts)) for k, atoms in checked.items()}
    look = ReplicaRun(0, 0, checked[0], copy.copy(bonds[0]), replace(plan[0], replicas=1)).every
    interval = max(1, round(1000 * config.every / config.timestep / look)) * look
    runs = [
        _Sampled(k, index, checked[index], copy.copy(bonds[index]), options, k % len(members), interval)
        for options in plan
        for k, index in enumerate(chosen)
    ]
    found: list[Trajectory] = []
    with torch.inference_mode(False):
        for trajectory in run_replicas(runs, opening, devices, console, temperatures):
            found.append(trajectory)
            if len(found) == config.replicas:
                yield sorted(found, key=lambda one: one.replica)
                found = []


def _chosen(starts: Sequence[Atoms], config: DynamicsConfig) -> list[int]:
    """Return the number of each replica's start."""
    return [k * len(starts) // config.replicas for k in range(config.replicas)]


def force_spread(committee: Ensemble, system: System, pos: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of the members' forces on the atom where it is largest, [K] eV/Å.

    Args:
        committee: the models.
        system: one structure of n atoms.
        pos: [K, n, 3] positions of K frames in Å.
    """
    n, found = system.num_atoms, [np.zeros(0)]
    size = max(1, _ATOMS // n)
    for first in range(0, len(pos), size):
        part = torch.as_tensor(pos[first : first + size])
        batch = System.concatenate([system] * len(part)).replace(pos=part.reshape(-1, 3))
        std = committee(batch.to(committee.members[0].device)).forces_std
        assert std is not None
        found.append(std.double().norm(dim=1).view(len(part), n).amax(1).cpu().numpy())
    return np.concatenate(found)


# --- The start of a run: first frames, starts of the dynamics, comparison of labels with the labeller ---

START, STARTS, VERIFY = "start.xyz", "starts.xyz", "verify"
ENERGY, FORCE = 5e-3, 0.05
"""Largest differences between labels of the same method, eV per atom and eV/Å."""


def prepare_start(config: LearnConfig, folder: Path) -> None:
    """Write start.xyz, the first frames, and starts.xyz, the starts of the dynamics.

    Raises:
        FileNotFoundError, BadData: a file is missing or cannot be used.
        BadConfig: there are fewer than two frames, or more to label than the budget.
    """
    start = config.start
    if not (folder / START).is_file():
        if start.labelled:
            keys = {name: key for name, key in start.keys.model_dump().items() if key is not None}
            frames = labelled_frames(start.file, keys, start.units.model_dump(exclude_none=True))
        else:
            frames = structures(start.file)
        frames = spread_over(frames, start.frames)
        if len(frames) < 2:
            raise BadConfig("start.file: has one frame; at least two are needed, to train on one and validate on one")
        if not start.labelled and len(frames) > config.labels.budget:
            raise BadConfig(
                f"labels.budget: {config.labels.budget} is less than the {len(frames)} start frames, which are "
                "labelled first: raise it, or take fewer with start.frames"
            )
        for k, atoms in enumerate(frames):
            atoms.info.update(round=0, reason="start", start=k)
        write_frames(folder / START, frames)
    if not (folder / STARTS).is_file():
        given = config.dynamics.starts
        write_frames(folder / STARTS, read_frames(folder / START) if given is None else structures(given))


def check_starts(config: LearnConfig, folder: Path) -> None:
    """Refuse starts of the dynamics that the first models will not know.

    Raises:
        UnknownElement, UntrainedCharge: no training frame, nor the model of `train.init`, has an element or the charge.
        Unphysical: atoms overlap in a start.
        BadConfig: `train.model` cannot know an element of the frames.
    """
    frames, starts = read_frames(folder / START), read_frames(folder / STARTS)
    train = System.from_ase(divided(frames, config.validation)[0])
    training = config.training(True, {"train": TRAIN}, folder, 0)
    network, base = training.untrained(), training.base()
    elements, charges = {*train.z.tolist()}, {*train.charge.tolist()}
    known: dict[str, Any] = {"elements": sorted(elements), "total_charges": sorted(charges)}
    if base is not None:
        known = {
            "elements": sorted(elements | {*base.elements}),
            "total_charges": None if base.total_charges is None else sorted(charges | {*base.total_charges}),
            "closed_shell": base.closed_shell and not bool((train.electrons.round() % 2 == 1).any()),
        }
    try:
        potential = Potential.from_config({**network.config, **known}, network)
    except ValueError as error:  # an element above max_z
        raise BadConfig(f"train.model: {error}") from None
    setting = "start.file" if config.dynamics.starts is None else "dynamics.starts"
    for k in dict.fromkeys(_chosen(starts, config.dynamics)):
        try:
            checked_start(starts[k], k, potential, None, None)
        except (UnknownElement, UntrainedCharge) as error:
            words = str(error).partition(";")[0]  # what follows is not a remedy here
            error.args = (f"{setting}: {words}. Leave this structure out, or train on more such frames",)
            raise
        except (ValueError, Unphysical) as error:
            error.args = (f"{setting}: {error}",)
            raise


def divided(
    new: Sequence[Atoms], share: float, train: Sequence[Atoms] = (), validation: Sequence[Atoms] = ()
) -> tuple[list[Atoms], list[Atoms]]:
    """Return the frames of training and of validation with new ones; a frame stays in its first subset.

    Args:
        new: frames to divide.
        share: fraction of the frames that is not trained on.
        train, validation: frames that are divided already.
    """
    train, validation = list(train), list(validation)
    for atoms in new:
        count = len(train) + len(validation)
        held_out = int((count + 1) * share + 1e-9) > int(count * share + 1e-9)
        (validation if held_out else train).append(atoms)
    if not validation:
        validation.append(train.pop())
    return train, validation


def verify_start(config: LearnConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Label some labelled start frames again, in the folder `verify`, and compare.

    Raises:
        BadData: labels cannot be computed, or differ, since units, method or settings differ.
    """
    count = config.start.verify if config.start.labelled else 0
    if not count:
        return
    frames: list[Atoms] = spread_over(read_frames(folder / START), count)
    own = folder / VERIFY
    own.mkdir(exist_ok=True)
    if not (own / LABELLED).is_file():
        label_frames([_bare(atoms) for atoms in frames], own, config.labels, say)
    for atoms in read_frames(own / FAILED):
        raise BadData(f"start frame {atoms.info['start']} cannot be labelled: {atoms.info['error']}")
    energy = force = 0.0
    for given, computed in zip(frames, read_frames(own / LABELLED), strict=True):
        theirs, ours = labels_of(given), labels_of(computed)
        energy = max(energy, abs(theirs.energy - ours.energy) / len(given))
        force = max(force, float(np.abs(theirs.forces - ours.forces).max()))
    if energy > ENERGY or force > FORCE:
        raise BadData(
            f"the labels of the start frames differ from those of the labeller: energies by {1e3 * energy:.3g} "
            f"meV/atom, forces by {1e3 * force:.3g} meV/Å. Check start.keys, start.units and the settings of the "
            "labeller; or set start.labelled to false, to label the structures again"
        )
    say(
        f"{len(frames)} start frame(s) labelled again: energies differ by {1e3 * energy:.2g} meV/atom, forces by "
        f"{1e3 * force:.2g} meV/Å"
    )


def clear_start(folder: Path, others: Iterable[str]) -> None:
    """Clear the folder of a run whose start has failed; labels stay in verify.old.

    Args:
        folder: folder of the run.
        others: names of files that the run has written before.
    """
    own = folder / VERIFY
    if own.exists():
        shutil.rmtree(old_name(own), ignore_errors=True)
        os.replace(own, old_name(own))
    for name in (START, STARTS, *others):
        (folder / name).unlink(missing_ok=True)


def _bare(atoms: Atoms) -> Atoms:
    frame = atoms.copy()
    frame.calc = None
    return frame


# --- The loop ---
#
# Every phase of a round ends with a file that is complete or absent. A phase whose file exists is skipped. A run that
# was killed therefore continues where it was, and ends with the same files. The results of a round depend on the
# configuration, the number of the round, and the files of earlier rounds.

RUN, CONFIG, FINISHED, SUMMARY, SELECTED = "run.json", "config.yaml", "finished.json", "round.json", "selected.xyz"
TRAIN, VALIDATION = "train.xyz", "validation.xyz"
_FREE = ("devices", "labels.budget", "labels.processes", "labels.threads", "labels.timeout", "stop", "output")
"""Keys that may change when a run is resumed."""


@dataclass(frozen=True)
class LearnResult:
    """The result of a run.

    Attributes:
        reason: the reason why it stopped, in words.
        stable: True if the requested stability was reached.
        ensemble: the models of the last round, for `Ensemble.load`.
        rounds: summary of each round.
    """

    reason: str
    stable: bool
    ensemble: Path
    rounds: list[RoundSummary]


def run_learning(
    config: LearnConfig, resume: Literal["auto", "must"] | None = None, log: TrainingLog | None = None
) -> LearnResult:
    """Train models by active learning, until they are stable or the budget is spent.

    A round trains the models, runs dynamics, selects frames and labels them.

    Args:
        config: configuration from `load_learn_config`.
        resume: None refuses a folder with a run; "auto" continues a run if there is one; "must" requires one.
        log: log of the run; the default is standard output and log.txt.

    Raises:
        BadConfig: the folder holds another run, or the labeller cannot be used; and errors of `run_training`.
        BadData: a file cannot be used, the labels of the start frames differ from those of the labeller, or no frame of
            a round could be labelled.
        MissingBackend: a labeller or a prior needs a package that is not installed.
        Interrupted: Ctrl-C or SIGTERM; finished work is kept.
    """
    folder = Path(config.output.folder)
    make_labeller(config.labels.labeller).check()
    config.training(True, {"train": TRAIN}, folder, 0).untrained()
    _refuse(config, folder, resume)
    with exclusive_folder(folder), _signals(folder), log or TrainingLog(folder / "log.txt") as log:
        _refuse(config, folder, resume)
        return _Loop(config, folder, log).run()


class _Loop:
    """The state of a run."""

    def __init__(self, config: LearnConfig, folder: Path, log: TrainingLog):
        self.config, self.folder, self.log, self.say = config, folder, log, log.say
        self.level = make_labeller(config.labels.labeller).level_of_theory
        device = str(device_of(self._training(0, 0).training.device))
        self.devices = [device] if config.devices is None else devices_of(config.devices)

    def run(self) -> LearnResult:
        """Run all rounds."""
        config, folder = self.config, self.folder
        if not (folder / RUN).is_file():
            facts = {"config": config.to_dict(), "inputs": _inputs(config)}
            atomic_write(folder / RUN, json.dumps(facts, indent=1))
        if not (folder / CONFIG).is_file():
            atomic_write(folder / CONFIG, yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
        (folder / FINISHED).unlink(missing_ok=True)
        begun = self._of(0) / "member_0"
        try:
            prepare_start(config, folder)
            if config.start.labelled and not begun.exists():  # what the first training would refuse
                self._of(0).mkdir(exist_ok=True)
                self._label(0)
                require_usable(make_setup(self._training(0, 0)))
            check_starts(config, folder)
            verify_start(config, folder, self.say)
        except (ValueError, OSError, Unphysical):
            if not (begun.exists() or (self._of(0) / RESULTS).exists()):  # it can be corrected in the same folder
                shutil.rmtree(self._of(0), ignore_errors=True)
                clear_start(folder, (CONFIG, RUN))
            raise
        self.starts = read_frames(folder / STARTS)
        rounds: list[RoundSummary] = []
        while True:
            summary = self._round(len(rounds))
            rounds.append(summary)
            self.say(summary.words())
            reason = self._stop(summary)
            chosen = 0 if reason else self._select(summary)
            if not reason and not chosen:
                reason = "no frame is left to select: see selection.lowest"
            write_report(folder / "report.html", folder.name, rounds, config, self.level, reason or "")
            if reason:
                return self._finish(rounds, reason)

    # --- phases --------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> RoundSummary:
        """Run labels, training and dynamics of a round."""
        own = self._of(number)
        if (own / SUMMARY).is_file():
            return RoundSummary.read(own / SUMMARY)
        own.mkdir(exist_ok=True)
        with self._timed(number, "labels"):
            frames, new_errors = self._label(number)
        with self._timed(number, "training"):
            models = self._train(number)
        with self._timed(number, "dynamics"):
            runs = self._explore(number)
        metrics = [json.loads((model.parent / DONE).read_text(encoding="utf-8")) for model in models]
        asked, failed = self._counts(number)
        summary = RoundSummary(
            round=number,
            asked=asked,
            failed=failed,
            reasons=first_words(frames),
            train=len(read_frames(own / TRAIN)),
            validation=len(read_frames(own / VALIDATION)),
            new_errors=new_errors,
            validation_errors=validation_errors(metrics),
            temperatures=temperatures_of(runs),
        )
        summary.write(own / SUMMARY)
        return summary

    def _label(self, number: int) -> tuple[list[Atoms], dict[str, float] | None]:
        """Label the selected frames and divide all frames; return the new ones and the errors of the last models."""
        own, asked = self._of(number), self._asked(number)
        if asked and (own / LABELLED).is_file() and not read_frames(own / LABELLED):
            self.say(f"round {number}: no frame was labelled before; all of {len(asked)} are tried again")
            put_aside(own)
        if asked and not (own / LABELLED).is_file():
            label_frames(asked, own, self.config.labels, self.say)
        new = read_frames(own / LABELLED) if asked else []
        if asked and not new:
            first = read_frames(own / FAILED)[0].info["error"]
            raise BadData(
                f"round {number}: none of {len(asked)} frames could be labelled; the first: {first}. Files of the "
                f"calculations are in {own / LABELS}. --resume auto tries all of them again; if the configuration is "
                "the cause, correct it and choose another output.folder"
            )
        if number == 0 and self.config.start.labelled:
            new = read_frames(self.folder / START)
        self._divide(number, new)
        errors = None
        if number:
            with own_torch_state(self._training(number, 0)):
                errors = errors_of(self._committee(number - 1), new)
        return new, errors

    def _divide(self, number: int, new: list[Atoms]) -> None:
        """Write train.xyz and validation.xyz; a frame stays in its first subset."""
        own, share = self._of(number), self.config.validation
        if (own / TRAIN).is_file():
            return
        before = self._of(number - 1)
        old = [read_frames(before / name) for name in (TRAIN, VALIDATION)] if number else []
        train, validation = divided(new, share, *old)
        if not train:
            raise BadData(
                f"round {number}: only one frame was labelled; two are needed, to train on one and validate on one"
            )
        write_frames(own / VALIDATION, validation)
        write_frames(own / TRAIN, train)

    def _train(self, number: int) -> list[Path]:
        """Train the members; each continues from its last weights."""
        configs = [self._training(number, k) for k in range(self.config.members)]
        remedy = "continue with --resume auto, on fewer devices if memory is short"
        with devices_pool(_trainer, self.devices, remedy=remedy, here=True) as pool:
            models = list(in_order(configs, pool))
        write_ensemble(models, self._of(number) / "ensemble.json")
        return models

    def _training(self, number: int, member: int) -> Config:
        own = self._of(number)
        data = {
            "train": str(own / TRAIN),
            "validation": str(own / VALIDATION),
            "split": {"validation": 0, "test": 0},
            "level_of_theory": self.level,
        }
        seed = seed_of(self.config.seed, "training", number, member)
        before = str(self._of(number - 1) / f"member_{member}" / "best.tmn") if number else None
        return self.config.training(not number, data, own / f"member_{member}", seed, before)

    def _explore(self, number: int) -> list[Trajectory]:
        """Run the dynamics at all temperatures."""
        config, seed = self.config.dynamics, seed_of(self.config.seed, "dynamics", number)
        paths = {t: self._of(number) / f"dynamics_{t:g}K.npz" for t in config.temperatures}
        if left := [t for t, path in paths.items() if not path.is_file()]:
            opening = partial(Ensemble.load, (self._of(number) / "ensemble.json").resolve())
            with own_torch_state(self._training(number, 0)):
                runs = explore(opening, self.devices, self.starts, left, config, seed, self.log.console)
                for temperature, found in zip(left, runs, strict=True):
                    write_trajectories(paths[temperature], found)
        return [run for path in paths.values() for run in read_trajectories(path)]

    def _select(self, summary: RoundSummary) -> int:
        """Write the frames to label in the next round; return their number."""
        number, config = summary.round, self.config
        path = self._of(number) / SELECTED
        if not path.is_file():
            known = keys_of(read_frames(self.folder / START)) if config.start.labelled else set()
            for k in range(number + 1):
                known |= keys_of(self._asked(k))
            runs = [
                run
                for temperature in config.dynamics.temperatures
                for run in read_trajectories(self._of(number) / f"dynamics_{temperature:g}K.npz")
            ]
            select = make_selection(config.selection)
            count = min(config.labels.per_round, config.labels.budget - summary.asked)
            rng = np.random.default_rng(seed_of(config.seed, "selection", number))
            chosen = select(unlabelled(runs, self.starts, known), count, rng)
            if not chosen:
                return 0
            write_frames(path, frames_of(chosen, self.starts, number + 1))
        return len(read_frames(path))

    def _stop(self, summary: RoundSummary) -> str:
        """Return the reason why the loop ends after this round; "" if it continues."""
        config = self.config
        if summary.stable(config.stop):
            limit = config.stop.spread
            agreed = "" if limit is None else f", and a spread below {limit:g} eV/Å in 99 of 100 frames"
            return f"stable: {config.stop.whole:.0%} of the replicas whole for {config.dynamics.time:g} ps{agreed}"
        if summary.asked >= config.labels.budget:
            return f"the budget of {config.labels.budget} labels is spent"
        if summary.round + 1 >= config.stop.rounds:
            return f"{config.stop.rounds} rounds are done"
        return ""

    def _finish(self, rounds: list[RoundSummary], reason: str) -> LearnResult:
        last = self._of(len(rounds) - 1)
        models = [last / f"member_{k}" / "best.tmn" for k in range(self.config.members)]
        listed = write_ensemble(models, self.folder / "ensemble.json")
        stable = rounds[-1].stable(self.config.stop)
        facts = {"reason": reason, "stable": stable, "rounds": len(rounds), "asked": rounds[-1].asked,
                 "failed": rounds[-1].failed}  # fmt: skip
        atomic_write(self.folder / FINISHED, json.dumps(facts, indent=1) + "\n")
        self.say(f"stopped: {reason}; {rounds[-1].asked} labels requested, {rounds[-1].failed} failed")
        self.say(f"models: {listed}; report: {self.folder / 'report.html'}")
        return LearnResult(reason, stable, listed, rounds)

    # --- files ---------------------------------------------------------------------------------------------------

    def _of(self, number: int) -> Path:
        return self.folder / f"round_{number:03d}"

    def _asked(self, number: int) -> list[Atoms]:
        """Return the frames that go to the labeller in a round."""
        if number:
            return read_frames(self._of(number - 1) / SELECTED)
        return [] if self.config.start.labelled else read_frames(self.folder / START)

    def _counts(self, number: int) -> tuple[int, int]:
        """Return the numbers of requested and of failed labels up to the end of a round."""
        asked = [len(self._asked(k)) for k in range(number + 1)]
        failed = [len(read_frames(self._of(k) / FAILED)) for k in range(number + 1) if asked[k]]
        return sum(asked), sum(failed)

    def _committee(self, number: int) -> Ensemble:
        return Ensemble.load(self._of(number) / "ensemble.json", self.devices[0])

    @contextmanager
    def _timed(self, number: int, phase: str) -> Iterator[None]:
        since = time.monotonic()
        yield
        self.say(f"round {number}: {phase} took {time.monotonic() - since:.1f} s")


def _trainer(device: str) -> Callable[[Config], Path]:
    """Return the function that trains a member on a device."""
    return partial(_train, device)


def _train(device: str, config: Config) -> Path:
    folder = Path(config.output.folder)
    folder.mkdir(exist_ok=True)
    # "auto" and "cuda" of a configuration, which is the same on each device, mean this one
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        model = run_training(config, resume="auto", log=TrainingLog(folder / "log.txt", Console(quiet=True)))
    assert model is not None
    return model


def _refuse(config: LearnConfig, folder: Path, resume: str | None) -> None:
    """Raise BadConfig if the folder holds another run, or one that must not be continued."""
    path = folder / RUN
    if not path.is_file():
        if resume == "must":
            raise BadConfig(f"output.folder: {folder} holds no run to resume")
        names = [
            "state.safetensors",
            "ensemble.json",
            "report.html",
            "round_000",
            CONFIG,
            FINISHED,
            START,
            STARTS,
            VERIFY,
        ]
        foreign = [name for name in names if (folder / name).exists()]
        if foreign:
            raise BadConfig(
                f"output.folder: {folder} holds the file {foreign[0]}, which is not of a run; choose another folder"
            )
        return
    if resume is None:
        raise BadConfig(
            f"output.folder: {folder} holds a run; continue it with --resume auto, or choose another folder"
        )
    then = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(config.to_dict()))
    changed = [key for key in sorted(differences(now, then["config"])) if not key.startswith(_FREE)]
    if changed:
        raise BadConfig(
            f"{folder} holds a run with another configuration: {', '.join(changed)} changed. Resume it unchanged, or "
            "choose another output.folder"
        )
    inputs = _inputs(config)
    for file, digest in then["inputs"].items():
        if inputs.get(file) != digest:
            raise BadConfig(f"{folder} holds a run, but {file} has changed since; choose another output.folder")


def _inputs(config: LearnConfig) -> dict[str, str]:
    """Return file -> SHA-256 for the files that the run reads."""
    given: list[Any] = [config.start.file, config.dynamics.starts, *make_labeller(config.labels.labeller).files]
    if init := (config.train.get("init") or {}).get("file"):
        given.append(str(find_model(init)))
    files = [file for entry in given if entry for file in ([entry] if isinstance(entry, str) else entry)]
    return {file: file_facts(file)["sha256"] for file in files if Path(file).is_file()}


@contextmanager
def _signals(folder: Path) -> Iterator[None]:
    """Stop the run at SIGTERM as at Ctrl-C within the block; both say how to continue."""
    words = f"; finished work is kept in {folder}: continue with --resume auto"

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number, f"stopped by {signal.Signals(number).name}{words}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
