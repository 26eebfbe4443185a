"""Relaxation of a block of records. Structures share batches; the next one replaces one that has converged.

ASE relaxes cells, one structure after another.

All structures of a batch take a step of the potential and one of L-BFGS (`lbfgs.py`) in turn.

Shapes: N atoms, B structures, of which the first n and b are not there to fill the batch.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray
from torch import Tensor

from ..adapters.ase import TorchMDNet2Calculator
from ..engine.graph import CudaGraph, NotCapturable
from ..ensemble import Ensemble
from ..errors import BadData
from ..evaluator import Evaluator
from ..system import System
from .batches import OPENED, BatchCapacity, BatchOptions, Task, TaskWorker, evaluate_each, reason
from .conformers import Ranking
from .lbfgs import BatchedLBFGS, into
from .records import FAULTS, Outcome, Record

if TYPE_CHECKING:
    from ase import Atoms

    from ..engine.step import FusedBoundStep

__all__ = ["CellRelaxer", "RelaxOptions", "Relaxer"]


@dataclass(frozen=True)
class RelaxOptions(BatchOptions):
    """Options of a relaxation.

    Attributes:
        fmax: largest force of a converged structure, eV/Å.
        steps: largest number of steps of a structure.
        ranking: choice of the conformers to keep; None keeps all structures in order.
    """

    fmax: float = 0.02
    steps: int = 1000
    ranking: Ranking | None = None


class Relaxer(TaskWorker[RelaxOptions]):
    """Relaxes blocks of records, structures of all sizes together."""

    _slots: _Slots | None = None

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        outcomes = super().__call__(records)
        for outcome in outcomes:
            if self.options.ranking is not None and outcome.structures:
                outcome.structures = self.options.ranking(outcome.structures, outcome.record.molfile)
        return outcomes

    def compute(self, tasks: Iterator[Task], sizes: Sequence[int]) -> None:
        capacity = self.capacity(max(sizes), mean=sum(sizes) / len(sizes))
        slots = self._slots
        if slots is None or slots.capacity is not capacity:
            slots = _Slots(self.evaluator, capacity, self.options)
        self._slots = None  # after an error it is not used again
        slots.relax(tasks)
        self._slots = slots


class CellRelaxer(TaskWorker[RelaxOptions]):
    """Relaxes blocks of periodic structures at zero pressure.

    At the end the forces and the gradient of the cell, in eV/Å as in `ase.filters.FrechetCellFilter`, are below `fmax`.
    Only the options `fmax` and `steps` have an effect.
    """

    @cached_property
    def _calculator(self) -> TorchMDNet2Calculator:
        potential = self.potential
        return TorchMDNet2Calculator(
            potential, device=potential.device, allow_untrained_charge=potential.allow_untrained_charge
        )

    def compute(self, tasks: Iterator[Task], sizes: Sequence[int]) -> None:
        for task in tasks:
            try:
                task.found = self._relaxed(task.start)
            except FAULTS as error:
                task.error = reason(error)

    def _relaxed(self, start: Atoms) -> Atoms:
        from ase.filters import FrechetCellFilter
        from ase.optimize import LBFGS

        if not start.pbc.all():
            raise BadData("it has no cell that is periodic in three directions")
        atoms = start.copy()
        atoms.calc = self._calculator
        optimizer = LBFGS(FrechetCellFilter(atoms), logfile=None)  # type: ignore[arg-type]
        with warnings.catch_warnings():  # SciPy warns of errors of 1e-13 in each step
            warnings.filterwarnings("ignore", "logm result may be inaccurate")
            converged = bool(optimizer.run(fmax=self.options.fmax, steps=self.options.steps))
        energy, forces = float(atoms.get_potential_energy()), atoms.get_forces()
        atoms.calc = None
        if not np.isfinite(energy):
            raise BadData("its energy is not finite")
        return _relaxed(start, atoms, forces, energy, optimizer.nsteps, converged)


_RENEWED = {"cpu": 0.1, "cuda": 0.15}  # part of the structures that is finished when others take their places


class _Slots:
    """The places of a batch, whose structures are relaxed together.

    On a GPU the host opens the next structures and builds results while the device computes, and it reads the numbers
    of a step when the next one has been launched. So the device seldom waits.
    """

    def __init__(self, evaluator: Evaluator | Ensemble, capacity: BatchCapacity, options: RelaxOptions):
        self.evaluator, self.capacity, self.options = evaluator, capacity, options
        self._batches: dict[int, _Batch] = {}  # by number of atoms
        self._batch = self._of_size(capacity)  # the one in use
        self._coming: Iterator[Task] = iter(())
        self._waiting: list[Task] = []  # by size
        self._tasks: list[Task] = []
        self._joined: System  # the same as one batch, on the CPU; only positions do not follow
        self._gone = np.zeros(0, bool)
        self._failed = False  # a structure failed and must leave, else the whole batch would fail
        self._ended: deque[tuple[Task, NDArray, NDArray, NDArray]] = deque()

    def relax(self, tasks: Iterator[Task]) -> None:
        """Set the result or the error of each task."""
        self._coming = tasks
        while self._refill():
            self._step()
        while self._build():
            pass

    def _of_size(self, capacity: BatchCapacity) -> _Batch:
        if capacity.atoms not in self._batches:
            self._batches[capacity.atoms] = _Batch(self.evaluator, capacity, self.options)
        return self._batches[capacity.atoms]

    def _refill(self) -> bool:
        """Remove finished structures and add the next ones that fit, the largest first.

        A change of the batch takes as long as a step or two. So it waits until a part of the structures is finished
        and, if no others wait, until the rest fits into a smaller batch.

        Returns:
            Whether there are structures.
        """
        part = _RENEWED[self.capacity.device.type]
        if self._tasks and self._gone.sum() < part * len(self._tasks) and not self._failed:
            return True
        kept = np.flatnonzero(~self._gone)
        tasks = [self._tasks[k] for k in kept]
        used = sum(task.size for task in tasks)
        wanted = self.capacity.atoms - used
        while sum(task.size for task in self._waiting) < wanted and self._open():
            pass
        capacity, smallest = self.capacity, self.capacity.smallest(used, len(tasks))
        if tasks and not self._waiting and not self._failed and capacity.is_padded and smallest is self._batch.capacity:
            return True
        place = len(self._waiting)
        while place:
            place -= 1
            size = self._waiting[place].size
            if capacity.fits(used + size, len(tasks) + 1):
                tasks.append(self._waiting.pop(place))
                used += size
            elif not capacity.fits(used + 1, len(tasks) + 1):
                break
        if len(tasks) == len(kept) == len(self._tasks):
            return bool(tasks)
        self._collect()
        gone, self._gone = self._gone, np.zeros(len(tasks), bool)
        self._tasks, self._failed = tasks, False
        if tasks:
            before, self._batch = self._batch, self._of_size(capacity.smallest(used, len(tasks)))
            new = tasks[len(kept) :]
            parts = [task.system for task in new]
            if len(kept):
                parts.insert(0, self._joined.select(torch.as_tensor(~gone)))
            self._joined = System.concatenate(parts)
            self._batch.take(tasks, self._joined, [*kept.tolist(), *[-1] * len(new)], before)
        return bool(tasks)

    def _open(self) -> bool:
        """Open some of the next structures; return whether there were any."""
        found = list(islice(self._coming, OPENED))
        self._waiting = sorted([*self._waiting, *found], key=lambda task: task.size)
        return bool(found)

    def _step(self) -> None:
        """Launch a step; read the numbers of the last one that has ended."""
        batch = self._batch
        try:
            batch.launch()
        except FAULTS:
            self._retire_failed()
            return
        while not batch.is_ready and (self._build() or self._open()):
            pass
        numbers = batch.receive()
        if numbers is not None:
            self._look(numbers)

    def _look(self, numbers: NDArray) -> None:
        """Note which structures have ended or failed at a step, see `_Batch.receive`."""
        _, _, finite, ended, steps = numbers[:, : len(self._tasks)]
        self._gone |= ended > 0
        bad = np.flatnonzero((finite == 0) & ~self._gone).tolist()
        if not bad:
            return
        try:
            counts = self._batch.check()
        except FAULTS:
            self._retire_failed()
            return
        for k in bad if counts else ():
            self._fail(k, f"step {steps[k]:.0f}: its energy or a force is not finite")

    def _collect(self) -> None:
        """Take the results of structures that have ended from the device."""
        if not self._gone.any():
            return
        places, forces, numbers = self._batch.results()
        lasts = np.cumsum([task.size for task in self._tasks])
        for k in np.flatnonzero(self._gone).tolist():
            task = self._tasks[k]
            if not task.error:
                part = slice(lasts[k] - task.size, lasts[k])
                self._ended.append((task, places[part], forces[part].copy(), numbers[:, k]))

    def _build(self) -> bool:
        """Build the result of one structure that has ended; return whether there was any."""
        if not self._ended:
            return False
        task, pos, forces, (energy, largest, _, _, steps) = self._ended.popleft()
        if not np.isfinite(energy):
            task.error = f"step {steps:.0f}: its energy or a force is not finite"
            return True
        atoms = task.start.copy()
        atoms.set_positions(pos, apply_constraint=False)
        converged = bool(largest <= self.options.fmax)
        task.found = _relaxed(task.start, atoms, forces, float(energy), int(steps), converged)
        return True

    def _fail(self, k: int, why: str) -> None:
        self._gone[k] = self._failed = True
        self._tasks[k].error = why

    def _retire_failed(self) -> None:
        """Find the structures because of which the batch cannot be evaluated.

        Steps that were launched before it was noticed may have moved them on, so that there are none.
        """
        parts = self._batch.pos.cpu().split([task.size for task in self._tasks])
        alone = [task.system.replace(pos=pos) for task, pos in zip(self._tasks, parts, strict=True)]
        for k, found in enumerate(evaluate_each(self.evaluator, alone, self._batch.capacity)):
            if isinstance(found, Exception) and self._gone[k]:
                self._failed = True
            elif isinstance(found, Exception):
                self._fail(k, f"step {self._batch.steps(k)}: {reason(found)}")
        if not (self._failed or self._batch.is_bound):
            raise RuntimeError("structures can be evaluated alone but not together: please report this")


class _Calls:
    """Calls of an evaluator in the form of a bound step."""

    def __init__(self, evaluator: Evaluator | Ensemble, system: System):
        self._evaluator = evaluator
        self.pos = self.forces = system.pos.new_zeros(0, 3)
        self.energy = self.pos.new_zeros(0)
        self.load(system)

    def load(self, system: System, check: bool = True) -> None:
        """Hold another system, which each call checks."""
        self.pos = into(self.pos, system.pos)
        self.forces = into(self.forces, torch.zeros_like(system.pos))
        self.energy = into(self.energy, system.pos.new_zeros(system.num_systems))
        self._system = system.at(self.pos)

    def replay(self) -> None:
        result = self._evaluator(self._system)
        assert result.forces is not None
        self.energy.copy_(result.energy)
        self.forces.copy_(result.forces)

    def check(self) -> bool:
        return True


class _Batch:
    """A batch of one size, in which structures take steps of the potential and of the optimizer in turn.

    On a GPU all tensors keep their memory, so that both steps are CUDA graphs, for all structures that are ever in it.

    Args:
        evaluator: the evaluator or ensemble.
        capacity: numbers of atoms and structures that it can hold.
        options: of the relaxation.
    """

    def __init__(self, evaluator: Evaluator | Ensemble, capacity: BatchCapacity, options: RelaxOptions):
        self.evaluator, self.capacity = evaluator, capacity
        device, fixed = capacity.device, (capacity.atoms, capacity.structures) if capacity.is_padded else ()
        self.optimizer = BatchedLBFGS(device, options.fmax, options.steps, *fixed)
        self._on_gpu = device.type == "cuda"
        self._step: FusedBoundStep | _Calls | None = None
        self._mobile = self._still = self._numbers = torch.zeros(0, 1, device=device)
        self._replay: Callable[[], None] | None = None  # an optimizer step as a CUDA graph
        self._recorded: Any = None  # the tensors that it was recorded for
        self._count = 0  # of atoms
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._mail: list[Tensor] = []
        self._void = 0  # number of sent steps that do not count

    def take(self, tasks: Sequence[Task], joined: System, previous: Sequence[int], source: _Batch) -> None:
        """Continue with structures of a batch, which may be this one, and with new ones.

        Args:
            tasks: the structures.
            joined: the same as one batch on the CPU; positions of new ones are read.
            previous: row of each structure in `source`; -1 for new ones.
            source: the batch.
        """
        source._sent.clear()  # structures that have ended at these steps say so again
        device, rows = self.capacity.device, np.array(previous)
        sizes = np.array([task.size for task in tasks])
        pos = joined.pos.to(device)
        if source._step is not None and (rows >= 0).any():
            old = source.optimizer.sizes
            firsts = (np.cumsum(old) - old)[rows.clip(0)]
            local = np.arange(len(pos)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            index = np.where(np.repeat(rows, sizes) >= 0, np.repeat(firsts, sizes) + local, -1)
            places = torch.as_tensor(index, device=device)
            pos = torch.where(places[:, None] >= 0, source._step.pos[places.clamp(min=0)], pos)
        mobile = np.concatenate([task.mobile for task in tasks])
        radii = covalent_radii[joined.z.numpy()] * mobile * ~joined.pbc.any(1)[joined.batch].numpy()
        self.optimizer.take(sizes, rows, pos, radii, source.optimizer)
        filled = self.capacity.fill(joined.to(device).at(pos))
        binds = not joined.pbc.any() and self._binds
        if self._step is None or binds != self.is_bound:
            self._step = (
                cast("FusedBoundStep", self.evaluator.bind(filled)) if binds else _Calls(self.evaluator, filled)
            )
        else:
            self._step.load(filled, check=False)
        self._count = len(pos)
        free = np.zeros(filled.num_atoms - len(pos))
        self._mobile = into(self._mobile, torch.as_tensor(np.concatenate([mobile, free])[:, None], device=device))
        still = np.concatenate([~mobile.astype(bool), free == 0])[:, None]
        self._still = into(self._still, torch.as_tensor(still, device=device))
        self._numbers = into(self._numbers, pos.new_zeros(5, filled.num_systems))
        if self._on_gpu and not (self._mail and self._mail[0].shape == self._numbers.shape):
            self._mail = [torch.zeros_like(self._numbers, device="cpu", pin_memory=True) for _ in range(2)]

    @property
    def _binds(self) -> bool:
        """Whether molecules take bound steps, which do not wait for the device."""
        evaluator = self.evaluator
        return self._on_gpu and self.capacity.is_padded and isinstance(evaluator, Evaluator) and evaluator.fused

    @property
    def is_bound(self) -> bool:
        """Whether launched steps are not waited for."""
        return not isinstance(self._step, _Calls)

    @property
    def pos(self) -> Tensor:
        """[n, 3] Å, the positions of the next step."""
        assert self._step is not None
        return self._step.pos[: self._count]

    def steps(self, k: int) -> int:
        """Return the number of steps that a structure has taken."""
        return int(self.optimizer.steps[k])

    def launch(self) -> None:
        """Launch a step, without waiting for a GPU.

        Raises:
            ValueError, RuntimeError: a structure cannot be evaluated; the optimizer did not take a step.
        """
        assert self._step is not None
        self._step.replay()
        held = [self._step.pos, self._step.energy, self._step.forces, self._mobile, self._still, self._numbers]
        tensors = [(t.data_ptr(), t.shape) for t in [*held, *self.optimizer.tensors()]]
        if tensors != self._recorded:
            self._replay, self._recorded = None, tensors
            self._advance()
        elif self._replay is None and self._on_gpu and self.capacity.is_padded:
            # the first move has initialised the libraries, so that a graph can be captured
            self._replay = self._captured()
            self._replay()
        else:
            (self._replay or self._advance)()
        self._send()

    def _advance(self) -> None:
        """Update positions and numbers by an optimizer step, without waiting for the device."""
        step, optimizer = self._step, self.optimizer
        assert step is not None
        pos = optimizer.advance(step.pos, step.forces * self._mobile, step.energy)
        step.pos.copy_(torch.where(self._still, step.pos, pos))
        flags = optimizer.finite.double(), optimizer.ended.double(), optimizer.steps.double()
        torch.stack([optimizer.energy, optimizer.largest_force, *flags], out=self._numbers)

    def _captured(self) -> Callable[[], None]:
        """Return `_advance` as a CUDA graph."""
        try:
            return CudaGraph.record(self._advance, self.capacity.device, warm_up=lambda: None).replay
        except NotCapturable:
            return self._advance

    def _send(self) -> None:
        """Send the numbers to the host."""
        if not self._on_gpu:
            self._sent.append((self._numbers, None))
            return
        mail, event = self._mail[0], torch.cuda.Event()
        self._mail.reverse()
        mail.copy_(self._numbers, non_blocking=True)
        event.record(torch.cuda.current_stream(self.capacity.device))
        self._sent.append((mail, event))

    @property
    def is_ready(self) -> bool:
        """Whether `receive` would not wait."""
        event = self._sent[0][1] if self._sent else None
        return event is None or event.query()

    def receive(self) -> NDArray | None:
        """Return the numbers of the last step; on a GPU those of the step before.

        Returns:
            Energy (eV), largest force (eV/Å), whether all are finite, whether it has ended, steps: [5, B]. None if
            there is no such step since the batch has changed, or one that does not count.
        """
        if len(self._sent) <= self._on_gpu:
            return None
        numbers, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        if self._void:
            self._void -= 1
            return None
        return numbers.numpy()

    def check(self) -> bool:
        """Return whether results of a step that are not finite count.

        They do not if the capacity for neighbors was too small, and is larger now. The optimizer has undone such steps.

        Raises:
            ValueError: a structure cannot be evaluated.
        """
        assert self._step is not None
        self._void = len(self._sent)
        good = self._step.check()
        self._void = 0 if good else self._void
        return good

    def results(self) -> tuple[NDArray, NDArray, NDArray]:
        """Return positions [n, 3] Å and forces [n, 3] eV/Å of all structures, and their numbers, see `receive`."""
        places, forces = torch.stack([self.optimizer.pos, self.optimizer.forces])[:, : self._count].cpu().numpy()
        return places, forces, self._numbers.cpu().numpy().copy()


def _relaxed(start: Atoms, atoms: Atoms, forces: np.ndarray, energy: float, steps: int, converged: bool) -> Atoms:
    """Return a relaxed structure with its properties.

    Args:
        start: the structure before the relaxation.
        atoms: the relaxed structure, which is changed in place.
        forces: [N, 3] eV/Å.
        energy: eV.
        steps: number of steps.
        converged: True if it has converged.
    """
    atoms.arrays["forces"] = forces
    largest = float(np.linalg.norm(forces, axis=1).max())
    atoms.info.update(
        energy=energy, largest_force=largest, steps=steps, converged=converged,
        bonds_changed=_bonds_changed(start, atoms),
    )  # fmt: skip
    return atoms


def _bonds_changed(before: Atoms, after: Atoms) -> int:
    """Return the number of bonds that were broken or made.

    Atoms within 1.2 times the sum of their covalent radii are bonded, atoms beyond 1.5 times are not. A pair that moves
    into or out of the range between does not count.
    """
    radii = covalent_radii[before.numbers]
    bond = np.square(radii[:, None] + radii[None])
    ratios = [_squared_distances(atoms) / bond for atoms in (before, after)]
    near, far = [ratio < 1.2**2 for ratio in ratios], [ratio > 1.5**2 for ratio in ratios]
    return int(((near[0] & far[1]) | (far[0] & near[1])).sum()) // 2


def _squared_distances(atoms: Atoms) -> np.ndarray:
    """Return the squared distances of nearest images, [N, N] Å²."""
    if atoms.pbc.any():
        return atoms.get_all_distances(mic=True) ** 2
    return sum(np.square(x[:, None] - x[None]) for x in atoms.positions.T)
