"""Relaxation of a block of records: structures share batches, and one that has converged makes room for the next.

Cells are relaxed by ASE, one structure after another.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from ase.data import covalent_radii

from ..adapters.ase import TorchMDNet2Calculator
from ..ensemble import Ensemble
from ..errors import BadData
from ..evaluator import Evaluator
from ..system import System
from .batches import BatchOptions, Room, Task, TaskWorker, evaluate_each, reason
from .conformers import Ranking
from .lbfgs import BatchedLBFGS, largest_of
from .records import FAULTS, Outcome, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["CellRelaxer", "RelaxOptions", "Relaxer"]


@dataclass(frozen=True)
class RelaxOptions(BatchOptions):
    """How structures are relaxed.

    Attributes:
        fmax: eV/Å, the largest force at which one has converged.
        steps: most steps of one.
        ranking: which conformers are kept; None: all structures, in order.
    """

    fmax: float = 0.02
    steps: int = 1000
    ranking: Ranking | None = None


class Relaxer(TaskWorker[RelaxOptions]):
    """Relaxes blocks of records, structures of all sizes together."""

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        outcomes = super().__call__(records)
        for outcome in outcomes:
            if self.options.ranking is not None and outcome.structures:
                outcome.structures = self.options.ranking(outcome.structures, outcome.record.molfile)
        return outcomes

    def compute(self, tasks: Sequence[Task]) -> None:
        waiting = sorted(tasks, key=lambda task: task.system.num_atoms)  # the largest begin, the smallest fill gaps
        slots = _Slots(self.evaluator, self.room(max(task.system.num_atoms for task in tasks)), self.options)
        while waiting or slots.tasks:
            slots.refill(waiting)
            slots.step()


class CellRelaxer(TaskWorker[RelaxOptions]):
    """Relaxes blocks of periodic structures at zero pressure.

    Forces and, with a length of one atom, the gradient along the cell are below `fmax` at the end
    (`ase.filters.FrechetCellFilter`). Of the options, `fmax` and `steps` count.
    """

    @cached_property
    def _calculator(self) -> TorchMDNet2Calculator:
        potential = self.potential
        return TorchMDNet2Calculator(
            potential, device=potential.device, allow_untrained_charge=potential.allow_untrained_charge
        )

    def compute(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            try:
                task.found = self._relaxed(task.start)
            except FAULTS as error:
                task.error = reason(error)

    def _relaxed(self, start: Atoms) -> Atoms:
        from ase.filters import FrechetCellFilter
        from ase.optimize import LBFGS

        if not start.pbc.all():
            raise BadData("it has no cell that is periodic along three directions")
        atoms = start.copy()
        atoms.calc = self._calculator
        optimizer = LBFGS(FrechetCellFilter(atoms), logfile=None)  # type: ignore[arg-type]
        converged = bool(optimizer.run(fmax=self.options.fmax, steps=self.options.steps))
        energy, forces = float(atoms.get_potential_energy()), atoms.get_forces()
        atoms.calc = None
        if not np.isfinite(energy):
            raise BadData("its energy is not finite")
        return _relaxed(start, atoms, forces, energy, optimizer.nsteps, converged)


class _Slots:
    """The structures of a batch that are relaxed together."""

    def __init__(self, evaluator: Evaluator | Ensemble, room: Room, options: RelaxOptions):
        self.evaluator, self.room, self.options = evaluator, room, options
        self.device = room.device
        self.tasks: list[Task] = []
        self.optimizer = BatchedLBFGS(self.device)
        self._gone: set[int] = set()
        self._failed = False  # one must go, or all would fail
        self.pos = torch.zeros(0, 3, dtype=torch.float64, device=self.device)
        self._sizes: list[int] = []

    def refill(self, waiting: list[Task]) -> None:
        """Let those go that are done, and the next ones in that fit; the largest first.

        Each change of a batch takes as long as a step or more, so it waits until a tenth has to go.
        """
        if len(self.tasks) > 10 * len(self._gone) and not self._failed:
            return
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
        self.tasks, self._sizes, self._gone, self._failed = tasks, sizes, set(), False
        if not tasks:
            return
        joined = System.concatenate([task.system for task in tasks]).to(self.device)
        old = self.pos[index.clamp(min=0)] if len(self.pos) else joined.pos
        self.pos = torch.where(index[:, None] >= 0, old, joined.pos)
        self._batch = joined.batch
        self._mobile = torch.as_tensor(np.concatenate([_mobile(task.start) for task in tasks]), device=self.device)
        self._filled = self.room.fill(joined)
        radii = torch.as_tensor(covalent_radii, device=self.device)[joined.z] * self._mobile
        self.optimizer.take(joined.batch, index, known, self.pos, radii * ~joined.pbc.any(1)[joined.batch])

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
        finite = energy.isfinite() & largest_of(forces, self._batch, b).isfinite()
        self.pos = self.optimizer.advance(self.pos, forces, energy)
        state = self.optimizer
        largest = largest_of(state.forces, self._batch, b)
        values = torch.stack([state.energy, largest, finite.double()], 1).tolist()  # waits for the device
        host: np.ndarray | None = None
        for k, (e, f, usable) in enumerate(values):
            if k in self._gone:
                continue
            task, converged = self.tasks[k], f <= self.options.fmax
            if not usable:
                self._fail(k, "its energy or a force is not finite")
            elif converged or task.steps >= self.options.steps:
                self._gone.add(k)
                first = sum(self._sizes[:k])
                if host is None:
                    host = torch.stack([state.pos, state.forces]).cpu().numpy()
                place, found = host[:, first : first + self._sizes[k]]
                atoms = task.start.copy()
                atoms.set_positions(place, apply_constraint=False)
                task.found = _relaxed(task.start, atoms, found.copy(), e, task.steps, converged)
            task.steps += 1

    def _fail(self, k: int, why: str) -> None:
        self._gone.add(k)
        self._failed = True
        self.tasks[k].error = f"step {self.tasks[k].steps}: {why}"

    def _retire_failed(self) -> None:
        """The batch cannot be evaluated: find the structures of which this is so."""
        parts = self.pos.cpu().split(self._sizes)
        alone = [task.system.replace(pos=pos) for task, pos in zip(self.tasks, parts, strict=True)]
        for k, found in enumerate(evaluate_each(self.evaluator, alone, self.room)):
            if isinstance(found, Exception) and k in self._gone:
                self._failed = True
            elif isinstance(found, Exception):
                self._fail(k, reason(found))
        if not self._failed:
            raise RuntimeError("structures can be evaluated alone and not together: please report this")


def _mobile(atoms: Atoms) -> np.ndarray:
    """[N] 1.0, and 0.0 for atoms that the structure fixes."""
    mobile = np.ones(len(atoms))
    for constraint in atoms.constraints:
        mobile[constraint.get_indices()] = 0.0
    return mobile


def _relaxed(start: Atoms, atoms: Atoms, forces: np.ndarray, energy: float, steps: int, converged: bool) -> Atoms:
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
    bond = np.square(radii[:, None] + radii[None])
    ratios = [_squared_distances(atoms) / bond for atoms in (before, after)]
    near, far = [ratio < 1.2**2 for ratio in ratios], [ratio > 1.5**2 for ratio in ratios]
    return int(((near[0] & far[1]) | (far[0] & near[1])).sum()) // 2


def _squared_distances(atoms: Atoms) -> np.ndarray:
    """[N, N] Å², of the nearest images."""
    if atoms.pbc.any():
        return atoms.get_all_distances(mic=True) ** 2
    return sum(np.square(x[:, None] - x[None]) for x in atoms.positions.T)
