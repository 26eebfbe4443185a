"""Relaxation of a block of records: structures share batches, and one that has converged makes room for the next.

Cells are relaxed by ASE, one structure after another.

Shapes: N atoms, B structures, M steps of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from ase.data import covalent_radii
from torch import Tensor

from ..adapters.ase import TorchMDNet2Calculator
from ..errors import BadData
from ..evaluator import Evaluator
from ..system import System
from .batches import BatchOptions, Room, Task, Worker, evaluate_each, reason
from .conformers import Ranking
from .records import FAULTS, Outcome, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["BatchedLBFGS", "CellRelaxer", "RelaxOptions", "Relaxer"]

_MEMORY = 20
_LARGEST, _SMALLEST = 0.2, 1e-3  # Å, of the trust radius
_FIRST = 1 / 70  # Å²/eV, inverse curvature before there is a history
_NOISE = 1e-6  # eV an atom: rounding of networks in float32 is no rise of the energy


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


class Relaxer(Worker[RelaxOptions]):
    """Relaxes blocks of records, structures of all sizes together."""

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        outcomes = super().__call__(records)
        for outcome in outcomes:
            if self.options.ranking is not None and outcome.structures:
                outcome.structures = self.options.ranking(outcome.structures, outcome.record.molfile)
        return outcomes

    def compute(self, tasks: Sequence[Task]) -> None:
        waiting = sorted(tasks, key=lambda task: task.system.num_atoms)  # the largest begin, the smallest fill gaps
        slots = _Slots(self.evaluator, self.room(tasks), self.options)
        while waiting or slots.tasks:
            slots.refill(waiting)
            slots.step()


class CellRelaxer(Worker[RelaxOptions]):
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

    def __init__(self, evaluator: Evaluator, room: Room, options: RelaxOptions):
        self.evaluator, self.room, self.options = evaluator, room, options
        self.device = evaluator.potential.device
        self.tasks: list[Task] = []
        self.optimizer = BatchedLBFGS(self.device)
        self._gone: set[int] = set()
        self.pos = torch.zeros(0, 3, dtype=torch.float64, device=self.device)
        self._sizes: list[int] = []

    def refill(self, waiting: list[Task]) -> None:
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
                task.found = _relaxed(task.start, atoms, forces[own].cpu().numpy(), e, task.steps, converged)
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
    ratios = []
    for atoms in (before, after):
        distances = atoms.get_all_distances(mic=bool(atoms.pbc.any()))
        ratios.append(distances / (radii[:, None] + radii[None]))
    changed = ((ratios[0] < 1.2) & (ratios[1] > 1.5)) | ((ratios[0] > 1.5) & (ratios[1] < 1.2))
    return int(np.triu(changed, 1).sum())


# --- the optimizer ---


class BatchedLBFGS:
    """L-BFGS of many structures at once, each with a separate history and trust radius; it begins without structures.

    A step that raises the energy is taken back: the history of that structure is forgotten and its radius halved. So
    the energy never rises, and no line search is needed, for which structures would have to wait for each other.

    Method: J. Nocedal, Math. Comput. 35, 773 (1980).

    Args:
        device: of all tensors, which are float64.
    """

    def __init__(self, device: torch.device):
        self.batch = torch.zeros(0, dtype=torch.long, device=device)
        atoms, structures = (
            torch.zeros(0, 3, dtype=torch.float64, device=device),
            torch.zeros(0, device=device).double(),
        )
        self._pos, self._forces = atoms, atoms
        self._energy, self._radius, self._scale = structures, structures, structures
        self._moves = atoms.new_zeros(_MEMORY, 0, 3)
        self._changes = self._moves
        self._curvature = structures.new_zeros(_MEMORY, 0)  # 1 / (move · change); 0: no pair
        self._latest = 0

    def take(self, batch: Tensor, rows: Tensor, structures: Tensor) -> None:
        """Go on with some of the structures, and with new ones.

        Args:
            batch: [N] structure of each atom.
            rows: [N] the row in which each atom was before; -1: of a new structure.
            structures: [B] the same of structures.
        """
        self.batch = batch
        known, given = structures >= 0, rows >= 0
        atoms, old = rows.clamp(min=0), structures.clamp(min=0)

        def of_atoms(value: Tensor) -> Tensor:
            if not value.shape[-2]:
                return value.new_zeros(*value.shape[:-2], len(rows), 3)
            return torch.where(given[:, None], value.index_select(-2, atoms), 0.0)

        def of_structures(value: Tensor, first: float) -> Tensor:
            if not value.shape[-1]:
                return value.new_full((*value.shape[:-1], len(structures)), first)
            return torch.where(known, value.index_select(-1, old), first)

        self._pos, self._forces = of_atoms(self._pos), of_atoms(self._forces)
        self._moves, self._changes = of_atoms(self._moves), of_atoms(self._changes)
        self._energy = of_structures(self._energy, float("inf"))
        self._radius = of_structures(self._radius, _LARGEST)
        self._scale = of_structures(self._scale, _FIRST)
        self._curvature = of_structures(self._curvature, 0.0)
        self._tolerance = _NOISE * self._sum(torch.ones_like(batch, dtype=torch.float64))

    def advance(self, pos: Tensor, forces: Tensor, energy: Tensor) -> Tensor:
        """The next positions.

        Args:
            pos: [N, 3] Å, those that the last call gave, or the first ones.
            forces: [N, 3] eV/Å there; energy: [B] eV.

        Returns:
            [N, 3] Å.
        """
        first = self._energy.isinf()
        worse = ~(energy <= self._energy + self._tolerance) & (self._radius > _SMALLEST) & ~first
        move, change = pos - self._pos, self._forces - forces
        along, squared = self._sum(move * change), self._sum(change * change)
        good = ~first & ~worse & (along > 1e-12)
        self._latest = (self._latest + 1) % _MEMORY
        self._moves[self._latest], self._changes[self._latest] = move, change
        self._curvature[self._latest] = torch.where(good, 1 / torch.where(good, along, 1.0), 0.0)
        self._curvature[:, worse] = 0.0
        self._scale = torch.where(good, along / squared.clamp(min=1e-300), torch.where(worse, _FIRST, self._scale))
        shorter = largest_of(move, self.batch, len(energy)) / 2
        self._radius = torch.where(worse, shorter, (1.5 * self._radius).clamp(max=_LARGEST)).clamp(min=_SMALLEST)
        back = worse[self.batch, None]
        self._pos, self._forces = torch.where(back, self._pos, pos), torch.where(back, self._forces, forces)
        self._energy = torch.where(worse, self._energy, energy)
        step = self._direction()
        length = largest_of(step, self.batch, len(energy))
        return self._pos + step * (self._radius / length.clamp(min=1e-300)).clamp(max=1.0)[self.batch, None]

    def _direction(self) -> Tensor:
        """The inverse curvature times the forces, by the two loops of the method."""
        order = [(self._latest - k) % _MEMORY for k in range(_MEMORY)]  # the latest first
        q, weights = self._forces.clone(), {}
        for k in order:
            weights[k] = self._curvature[k] * self._sum(self._moves[k] * q)
            q -= weights[k][self.batch, None] * self._changes[k]
        q *= self._scale[self.batch, None]
        for k in reversed(order):
            other = self._curvature[k] * self._sum(self._changes[k] * q)
            q += (weights[k] - other)[self.batch, None] * self._moves[k]
        return q

    def _sum(self, values: Tensor) -> Tensor:
        """[B] sums over the atoms of each structure."""
        total = self._energy.new_zeros(len(self._energy))
        return total.index_add_(0, self.batch, values if values.ndim == 1 else values.sum(1))


def largest_of(vectors: Tensor, batch: Tensor, structures: int) -> Tensor:
    """[B] the largest length of the vectors [N, 3] of each structure."""
    return vectors.new_zeros(structures).scatter_reduce(0, batch, vectors.norm(dim=1), "amax")
