"""Relaxation of a block of records: structures share batches, and one that has converged makes room for the next.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from ase.data import covalent_radii

from ..evaluator import Evaluator
from ..potential.potential import Potential
from ..system import System
from .batches import Room, evaluate_each, reason, usable
from .conformers import Ranking
from .lbfgs import BatchedLBFGS, largest_of
from .records import FAULTS, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Outcome", "RelaxOptions", "Relaxer", "novelties", "with_properties"]


@dataclass
class Outcome:
    """What became of a record.

    Attributes:
        record: without its starts.
        structures: the results, with properties in `info`; none where all failed.
        errors: a line for each structure that failed.
    """

    record: Record
    structures: list[Atoms] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RelaxOptions:
    """How structures are relaxed.

    Attributes:
        fmax: eV/Å, the largest force at which one has converged.
        steps: most steps of one.
        atoms: of a batch; None: 16,384 on a GPU, 768 on a CPU.
        ranking: which conformers are kept; None: all structures, in order.
        padded: batches of one size, for CUDA graphs; None: on a GPU.
    """

    fmax: float = 0.02
    steps: int = 1000
    atoms: int | None = None
    ranking: Ranking | None = None
    padded: bool | None = None


@dataclass(eq=False)
class _Task:
    """One structure under way; `pos` is the last that was accepted."""

    start: Atoms
    system: System
    steps: int = 0
    relaxed: Atoms | None = None
    error: str = ""


class Relaxer:
    """Relaxes blocks of records with one potential.

    Args:
        potential: on its device.
        options: of the relaxation.
    """

    def __init__(self, potential: Potential, options: RelaxOptions):
        self.potential, self.options, self.evaluator = potential, options, Evaluator(potential)
        self._room: Room | None = None

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        """One outcome for each record, in order."""
        tasks, outcomes = [], []
        for record in records:
            outcome = Outcome(record, errors=[record.error] if record.error else [])
            own: list[_Task] = []
            for atoms in record.starts:
                try:
                    own.append(_Task(atoms, usable(atoms, self.potential)))
                except FAULTS as error:
                    outcome.errors.append(reason(error))
            tasks.append(own)
            outcomes.append(outcome)
        self._relax([task for own in tasks for task in own])
        for outcome, own in zip(outcomes, tasks, strict=True):
            outcome.structures = [task.relaxed for task in own if task.relaxed is not None]
            outcome.errors += [task.error for task in own if task.error]
            if self.options.ranking is not None and outcome.structures:
                outcome.structures = self.options.ranking(outcome.structures, outcome.record.molfile)
            outcome.record.starts = []
        return outcomes

    def _relax(self, tasks: Sequence[_Task]) -> None:
        if not tasks:
            return
        waiting = sorted(tasks, key=lambda task: task.system.num_atoms)  # the largest begin, the smallest fill gaps
        largest = waiting[-1].system.num_atoms
        if self._room is None or self._room.atoms <= largest:
            self._room = Room(self.potential, largest, self.options.atoms, self.options.padded)
        slots = _Slots(self.evaluator, self._room, self.options)
        while waiting or slots.tasks:
            slots.refill(waiting)
            slots.step()
        for task, score in zip(tasks, novelties(self.potential, [task.relaxed for task in tasks]), strict=True):
            if task.relaxed is not None and score is not None:
                task.relaxed.info["novelty"] = score


class _Slots:
    """The structures of a batch that are relaxed together."""

    def __init__(self, evaluator: Evaluator, room: Room, options: RelaxOptions):
        self.evaluator, self.room, self.options = evaluator, room, options
        self.device = evaluator.potential.device
        self.tasks: list[_Task] = []
        self.optimizer = BatchedLBFGS(self.device)
        self._gone: set[int] = set()
        self.pos = torch.zeros(0, 3, dtype=torch.float64, device=self.device)
        self._sizes: list[int] = []

    def refill(self, waiting: list[_Task]) -> None:
        """Let those go that are done, and the next ones in that fit; the largest first."""
        kept = [k for k in range(len(self.tasks)) if k not in self._gone]
        tasks = [self.tasks[k] for k in kept]
        used, place = sum(task.system.num_atoms for task in tasks), len(waiting)
        while place:
            place -= 1
            size = waiting[place].system.num_atoms
            if self.room.fits(used + size, len(tasks) + 1):
                tasks.append(waiting.pop(place))
                used += size
            elif not self.room.fits(used + 1, len(tasks) + 1):
                break
        if len(tasks) == len(kept) == len(self.tasks):
            return
        firsts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(int)
        sizes = [task.system.num_atoms for task in tasks]
        rows = [np.arange(firsts[k], firsts[k + 1]) for k in kept] + [np.full(n, -1) for n in sizes[len(kept) :]]
        index = torch.as_tensor(np.concatenate([np.zeros(0, int), *rows]), device=self.device)
        known = torch.as_tensor(np.array(kept + [-1] * (len(tasks) - len(kept)), int), device=self.device)
        self.tasks, self._sizes, self._gone = tasks, sizes, set()
        if not tasks:
            return
        joined = System.concatenate([task.system for task in tasks]).to(self.device)
        old = self.pos[index.clamp(min=0)] if len(self.pos) else joined.pos
        self.pos = torch.where(index[:, None] >= 0, old, joined.pos)
        self._batch = joined.batch
        self._mobile = torch.as_tensor(np.concatenate([_mobile(task.start) for task in tasks]), device=self.device)
        self._filled = self.room.fill(joined)
        self.optimizer.take(joined.batch, index, known)

    def step(self) -> None:
        """Evaluate all, and move those that have not converged."""
        if not self.tasks:
            return
        n, b = len(self.pos), len(self.tasks)
        self._filled = self._filled.replace(pos=torch.cat([self.pos, self._filled.pos[n:]]))
        try:
            result = self.evaluator(self._filled)
        except FAULTS:
            self._retire_failed()
            return
        assert result.forces is not None
        energy = result.energy[:b].detach().double()
        forces = result.forces[:n].double() * self._mobile[:, None]
        largest = largest_of(forces, self._batch, b)
        for k, (e, f) in enumerate(torch.stack([energy, largest], 1).tolist()):  # waits for the device
            task = self.tasks[k]
            if not np.isfinite(e) or not np.isfinite(f):
                self._fail(k, "its energy or a force is not finite")
            elif f <= self.options.fmax or task.steps >= self.options.steps:
                self._gone.add(k)
                first = sum(self._sizes[:k])
                own = slice(first, first + self._sizes[k])
                atoms = task.start.copy()
                atoms.set_positions(self.pos[own].cpu().numpy(), apply_constraint=False)
                converged = f <= self.options.fmax
                task.relaxed = with_properties(task.start, atoms, forces[own].cpu().numpy(), e, task.steps, converged)
            task.steps += 1
        self.pos = self.optimizer.advance(self.pos, forces, energy)

    def _fail(self, k: int, why: str) -> None:
        self._gone.add(k)
        self.tasks[k].error = f"step {self.tasks[k].steps}: {why}"

    def _retire_failed(self) -> None:
        """The batch cannot be evaluated: find the structures of which this is so."""
        parts = self.pos.cpu().split(self._sizes)
        alone = [task.system.replace(pos=pos) for task, pos in zip(self.tasks, parts, strict=True)]
        for k, found in enumerate(evaluate_each(self.evaluator, alone, self.room)):
            if isinstance(found, Exception):
                self._fail(k, reason(found))
        if not self._gone:
            raise RuntimeError("structures can be evaluated alone and not together: please report this")


def _mobile(atoms: Atoms) -> np.ndarray:
    """[N] 1.0, and 0.0 for atoms that the structure fixes."""
    mobile = np.ones(len(atoms))
    for constraint in atoms.constraints:
        mobile[constraint.get_indices()] = 0.0
    return mobile


def with_properties(
    start: Atoms, atoms: Atoms, forces: np.ndarray, energy: float, steps: int, converged: bool
) -> Atoms:
    """A relaxed structure with its properties.

    Args:
        start: as it was.
        atoms: changed in place.
        forces: [N, 3] eV/Å, energy: eV.
        steps: that were taken.
        converged: whether it is a minimum.
    """
    atoms.arrays["forces"] = forces
    largest = float(np.linalg.norm(forces, axis=1).max())
    atoms.info.update(
        energy=energy, largest_force=largest, steps=steps, converged=converged,
        bonds_changed=_bonds_changed(start, atoms),
    )  # fmt: skip
    return atoms


def _bonds_changed(before: Atoms, after: Atoms) -> int:
    """How many bonds were broken or made.

    Atoms within 1.2 times the sum of their covalent radii are bonded, and beyond 1.5 times they are not; what moves
    from or to the range between has not changed.
    """
    radii = covalent_radii[before.numbers]
    ratios = []
    for atoms in (before, after):
        distances = atoms.get_all_distances(mic=bool(atoms.pbc.any()))
        ratios.append(distances / (radii[:, None] + radii[None]))
    changed = ((ratios[0] < 1.2) & (ratios[1] > 1.5)) | ((ratios[0] > 1.5) & (ratios[1] < 1.2))
    return int(np.triu(changed, 1).sum())


def novelties(potential: Potential, structures: Sequence[Atoms | None]) -> list[float | None]:
    """The largest novelty of the atoms of each structure; None where the potential is not calibrated."""
    found: list[float | None] = [None] * len(structures)
    if potential.calibration is None or not potential.calibration.fits(potential.representation):
        return found
    some = [k for k, atoms in enumerate(structures) if atoms is not None]
    for first in range(0, len(some), 64):
        part = some[first : first + 64]
        # the structures have been evaluated: they are not checked again
        system = System.from_ase([structures[k] for k in part]).to(potential.device)  # type: ignore[misc]
        scores = potential.calibration(potential.representation, system).cpu()
        top = torch.zeros(len(part), dtype=torch.float64).scatter_reduce(0, system.batch.cpu(), scores, "amax")
        for k, score in zip(part, top.tolist(), strict=True):
            found[k] = score
    return found
