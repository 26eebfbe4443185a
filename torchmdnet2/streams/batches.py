"""Structures of all sizes evaluated together, and those that fail reported one by one: energies, forces, charges.

On a GPU all batches of a stream have the same number of atoms and structures, so that the step which the Evaluator
captures for the first one serves them all: what is left over is filled with isolated atoms.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..ensemble import Ensemble, EnsembleResult
from ..evaluator import Evaluator
from ..md.guard import Unphysical, check_overlaps
from ..md.setup import plain_copy, refuse_start
from ..potential.potential import Potential
from ..system import System
from .records import FAULTS, Outcome, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["BatchOptions", "Room", "Scorer", "Task", "Worker", "evaluate_each", "reason"]

_APART = 50.0  # Å between isolated atoms
_TOGETHER = 128  # structures that are checked at once
_Found = TypeVar("_Found")


def _usable(starts: Sequence[Atoms], potentials: Sequence[Potential]) -> list[System | Exception]:
    """Structures that the potentials can evaluate, float64, on the CPU, or why they cannot: as `Potential.check`, an
    unknown constraint, atoms that overlap."""
    found: list[System | Exception] = []
    for atoms in starts:
        try:
            start = plain_copy(atoms, None, None)
            refuse_start(start)
            found.append(System.from_ase(start))
        except FAULTS as error:
            found.append(error)
    systems = [system for system in found if isinstance(system, System)]

    def check(part: Sequence[System]) -> list[System]:
        joined = System.concatenate(part).to(potentials[0].device)
        for potential in potentials:
            potential.check(joined)
        check_overlaps(joined)
        return list(part)

    parts = (systems[first : first + _TOGETHER] for first in range(0, len(systems), _TOGETHER))
    checked = iter([system for part in parts for system in _each(check, part)])
    return [next(checked) if isinstance(system, System) else system for system in found]


def _each(run: Callable[[Sequence[System]], list[_Found]], systems: Sequence[System]) -> list[_Found | Exception]:
    """What `run` gives for structures together; where it fails, they are halved until what fails is alone."""
    try:
        return [*run(systems)]
    except (*FAULTS, Unphysical) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        if len(systems) == 1:
            return [error]
    half = len(systems) // 2
    return [*_each(run, systems[:half]), *_each(run, systems[half:])]


def reason(error: Exception) -> str:
    """An error about one structure, as one line that does not name it."""
    words = " ".join((str(error) or type(error).__name__).split())
    return "it" + words.removeprefix("system 0") if words.startswith("system 0") else words


class Room:
    """How many atoms and structures a batch holds.

    Args:
        potential: what evaluates it.
        largest: atoms of the largest structure that must fit.
        atoms: of a batch, None: by the device.
        padded: fill batches; None: on a GPU.
    """

    def __init__(self, potential: Potential, largest: int, atoms: int | None = None, padded: bool | None = None):
        on_gpu = potential.device.type != "cpu"
        self.device = potential.device
        self.atoms = max(atoms or (16384 if on_gpu else 768), largest + 1)
        self.structures = max(2, self.atoms // 16)
        self._filler = _filler(potential) if (on_gpu if padded is None else padded) else None

    def fits(self, atoms: int, structures: int) -> bool:
        """Whether so many fit; each slot that is not used holds at least one atom."""
        return structures < self.structures and atoms + self.structures - structures <= self.atoms

    def fill(self, system: System) -> System:
        """The system, with isolated atoms behind its own where batches are padded."""
        if self._filler is None:
            return system
        spare, slots = self.atoms - system.num_atoms, self.structures - system.num_systems
        device = system.device
        batch = torch.arange(spare, device=device) * slots // spare
        k = torch.arange(spare, device=device)
        grid = torch.stack([k % 32, k // 32 % 32, k // 1024], 1).to(system.dtype)
        rest = System(
            z=torch.full((spare,), self._filler, device=device),
            pos=_APART * grid,
            batch=batch,
            cell=torch.zeros(slots, 3, 3, dtype=system.dtype, device=device),
            pbc=torch.zeros(slots, 3, dtype=torch.bool, device=device),
        )
        return System.concatenate([system, rest])


def _filler(potential: Potential) -> int | None:
    """An element whose isolated atom the potential evaluates; None: there is none."""
    for z in (6, 8, 2, 14, 1):
        try:
            potential.check(System(z=torch.tensor([z]), pos=torch.zeros(1, 3).double()).to(potential.device))
        except ValueError:
            continue
        return z
    return None


def evaluate_each(
    evaluator: Evaluator | Ensemble, systems: Sequence[System], room: Room
) -> list[EnsembleResult | Exception]:
    """Results of structures that fit into one batch, on the CPU, or why one has none.

    Args:
        evaluator: of the potential, or of several, which also give their spread.
        systems: one structure each, on the CPU.
        room: of a batch.
    """

    def run(part: Sequence[System]) -> list[EnsembleResult]:
        result = evaluator(room.fill(System.concatenate(part).to(room.device)))
        sizes = [system.num_atoms for system in part]
        found: dict[str, Sequence[Tensor]] = {}
        for name in ("energy", "energy_std", "forces", "forces_std", "charges"):
            value = getattr(result, name, None)
            if value is not None:
                each = [1] * len(sizes) if name.startswith("energy") else sizes
                found[name] = value[: sum(each)].detach().cpu().split(each)
        return [EnsembleResult(**{name: v[k] for name, v in found.items()}) for k in range(len(part))]  # type: ignore[arg-type]

    return _each(run, systems) if systems else []


@dataclass(frozen=True)
class BatchOptions:
    """What a verb computes, and how.

    Attributes:
        novelty: whether it is computed, of calibrated models.
        atoms: of a batch; None: 16,384 on a GPU, 768 on a CPU.
        padded: batches of one size, for CUDA graphs; None: on a GPU.
    """

    novelty: bool = True
    atoms: int | None = None
    padded: bool | None = None


@dataclass(eq=False)
class Task:
    """One structure under way.

    Attributes:
        start: as it was given.
        system: the same, float64, on the CPU.
        found: its result, with properties in `info`.
        error: why there is none.
        steps: of a relaxation.
    """

    start: Atoms
    system: System
    found: Atoms | None = None
    error: str = ""
    steps: int = 0


_Options = TypeVar("_Options", bound=BatchOptions)


class Worker(ABC, Generic[_Options]):
    """Computes blocks of records with one potential.

    Args:
        potential: on its device.
        options: what is computed.
        others: further potentials, of which the mean with the first is computed.
    """

    def __init__(self, potential: Potential, options: _Options, others: Sequence[Potential] = ()):
        self.potential, self.options, self._members = potential, options, [potential, *others]
        self._room: Room | None = None

    @cached_property
    def evaluator(self) -> Evaluator | Ensemble:
        return Ensemble(self._members) if len(self._members) > 1 else Evaluator(self.potential)

    @abstractmethod
    def compute(self, tasks: Sequence[Task]) -> None:
        """Give each task what was found, or the error."""

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        """One outcome for each record, in order."""
        outcomes = [Outcome(record, errors=[record.error] if record.error else []) for record in records]
        tasks: list[tuple[Outcome, Task]] = []
        starts = [(outcome, atoms) for outcome in outcomes for atoms in outcome.record.starts]
        usable = _usable([atoms for _, atoms in starts], self._members)
        for (outcome, atoms), system in zip(starts, usable, strict=True):
            outcome.record.starts = []
            if isinstance(system, Exception):
                outcome.errors.append(reason(system))
            else:
                tasks.append((outcome, Task(atoms, system)))
        if tasks:
            self.compute([task for _, task in tasks])
        if self.options.novelty:
            for potential in self._members:
                _rate(potential, [task.found for _, task in tasks if task.found is not None])
        for outcome, task in tasks:
            if task.found is not None:
                outcome.structures.append(task.found)
            else:
                outcome.errors.append(task.error)
        return outcomes

    def room(self, tasks: Sequence[Task]) -> Room:
        """That of the last block where it has room for all tasks."""
        largest = max(task.system.num_atoms for task in tasks)
        if self._room is None or self._room.atoms <= largest:
            self._room = Room(self.potential, largest, self.options.atoms, self.options.padded)
        return self._room


def _rate(potential: Potential, structures: Sequence[Atoms]) -> None:
    """Write the largest novelty of the atoms of each structure into it, where the potential is calibrated."""
    if potential.calibration is None or not potential.calibration.fits(potential.representation):
        return
    for first in range(0, len(structures), 64):
        part = structures[first : first + 64]
        # the structures have been evaluated: they are not checked again
        system = System.from_ase(part).to(potential.device)
        scores = potential.calibration(potential.representation, system).cpu()
        top = torch.zeros(len(part), dtype=torch.float64).scatter_reduce(0, system.batch.cpu(), scores, "amax")
        for atoms, score in zip(part, top.tolist(), strict=True):
            atoms.info["novelty"] = max(score, atoms.info.get("novelty", score))


class Scorer(Worker[BatchOptions]):
    """Energies, forces and charges of blocks of records."""

    def compute(self, tasks: Sequence[Task]) -> None:
        room = self.room(tasks)
        for batch in _batches(tasks, room):
            found = evaluate_each(self.evaluator, [task.system for task in batch], room)
            for task, result in zip(batch, found, strict=True):
                if isinstance(result, Exception):
                    task.error = reason(result)
                elif np.isfinite(energy := float(result.energy)):
                    task.found = _scored(task.start, result, energy)
                else:
                    task.error = "its energy is not finite"


def _batches(tasks: Sequence[Task], room: Room) -> Iterator[list[Task]]:
    batch: list[Task] = []
    used = 0
    for task in tasks:
        size = task.system.num_atoms
        if batch and not room.fits(used + size, len(batch) + 1):
            yield batch
            batch, used = [], 0
        batch.append(task)
        used += size
    yield batch


def _scored(atoms: Atoms, result: EnsembleResult, energy: float) -> Atoms:
    """A structure with its results; labels of other methods that it had are left out."""
    from ase import Atoms

    assert result.forces is not None
    found = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    found.info = {name: value for name, value in atoms.info.items() if np.ndim(value) == 0}
    found.arrays["forces"] = result.forces.double().numpy()
    found.info |= {"energy": energy, "largest_force": float(np.linalg.norm(found.arrays["forces"], axis=1).max())}
    if result.energy_std is not None and result.forces_std is not None:
        found.info |= {"energy_std": float(result.energy_std), "force_std": float(result.forces_std.norm(dim=1).max())}
    if result.charges is not None:
        found.arrays["charges"] = result.charges.double().numpy()
    return found
