"""Batches of structures of all sizes. Structures that fail are reported one by one.

On a GPU all batches of a stream have the same number of atoms and structures, so that the step which the Evaluator
captures for the first one serves all of them. Free places are filled with isolated atoms.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.check import for_any_composition
from ..ensemble import Ensemble, EnsembleResult
from ..evaluator import Evaluator
from ..md.guard import Unphysical, close_atoms
from ..md.setup import refuse_start
from ..potential.novelty import common_scores, largest, rated
from ..potential.output import Output
from ..potential.potential import Potential, Result, with_dipole
from ..system import System
from .records import FAULTS, Outcome, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = [
    "OPENED", "BatchCapacity", "BatchOptions", "Task", "TaskWorker", "Worker", "each", "evaluate_each", "in_parts",
    "novelty_of", "opened", "parts", "reason", "refusals", "without_rest",
]  # fmt: skip

_FEWEST = 12  # atoms per structure in a full batch
_APART = 50.0  # Å between isolated atoms
_FULL = 1024  # atoms; a step with fewer atoms is not faster
_TOGETHER = 128  # number of structures that are checked at once
OPENED = 16  # the same, while a GPU computes
_SMALLEST, _LARGEST = 16384, 65536  # limits of the number of atoms in a batch on a GPU that holds a whole block
_MOST = {"cpu": 2048, "cuda": 8192}  # number of atoms whose features plain PyTorch computes at once
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def opened(starts: Sequence[Atoms], read: Callable[[Atoms], _Found]) -> list[_Found | Exception]:
    """Return the result of `read` for each structure, or its error: no atoms, an unknown constraint, a bad entry."""
    found: list[_Found | Exception] = []
    for atoms in starts:
        try:
            refuse_start(atoms)
            found.append(read(atoms))
        except FAULTS as error:
            found.append(error)
    return found


def refusals(
    items: Sequence[_Item], check: Callable[[Sequence[_Item]], Any], most: int = _TOGETHER
) -> list[Exception | None]:
    """Return why a check of some structures together, at most so many, fails for each of them; None if it does not."""

    def run(part: Sequence[_Item]) -> list[None]:
        check(part)
        return [None] * len(part)

    return in_parts(run, items, most)


def in_parts(
    run: Callable[[Sequence[_Item]], list[_Found]], items: Sequence[_Item], most: int = _TOGETHER
) -> list[_Found | Exception]:
    """Compute as `each`, with at most so many items together."""
    return [found for first in range(0, len(items), most) for found in each(run, items[first : first + most])]


def each(run: Callable[[Sequence[_Item]], list[_Found]], items: Sequence[_Item]) -> list[_Found | Exception]:
    """Return the results of `run` for all items. If it fails, halve the items until each one that fails is alone."""
    try:
        return [*run(items)]
    except (*FAULTS, Unphysical) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        if len(items) == 1:
            return [error]
    half = len(items) // 2
    return [*each(run, items[:half]), *each(run, items[half:])]


def reason(error: Exception) -> str:
    """Return an error about a structure as one line that does not name the structure."""
    words = " ".join((str(error) or type(error).__name__).split())
    return (
        "it" + words.removeprefix("structure 0").removeprefix(" of the list")
        if words.startswith("structure 0")
        else words
    )


def parts(items: Sequence[_Item], sizes: Sequence[int], fits: Callable[[int, int], bool]) -> Iterator[list[_Item]]:
    """Yield items in order, as many together as fit; each part has at least one.

    Args:
        items: the items.
        sizes: number of atoms of each item.
        fits: function that returns whether a number of atoms, of a number of items, fits.
    """
    part: list[_Item] = []
    used = 0
    for item, size in zip(items, sizes, strict=True):
        if part and not fits(used + size, len(part) + 1):
            yield part
            part, used = [], 0
        part.append(item)
        used += size
    if part:
        yield part


class BatchCapacity:
    """The numbers of atoms and structures that a batch can hold.

    Args:
        potential: the potential that evaluates the batches.
        largest: number of atoms of the largest structure that must fit.
        atoms: number of atoms in a batch; None chooses it for the device.
        padded: fill free places of batches; None does so on a GPU.
        mean: number of atoms per structure that is expected. A batch holds fewer structures if they are large.
    """

    def __init__(
        self,
        potential: Potential,
        largest: int,
        atoms: int | None = None,
        padded: bool | None = None,
        mean: float = 0.0,
    ):
        on_gpu = potential.device.type != "cpu"
        self.device = potential.device
        self.atoms = max(atoms or (16384 if on_gpu else 768), largest + 1)
        self.each = max(_FEWEST, int(0.8 * mean))  # fewest atoms per structure in a full batch
        self.structures = max(2, self.atoms // self.each)
        self._filler = _filler(potential) if (on_gpu if padded is None else padded) else None

    @staticmethod
    def of_block(atoms: int) -> int:
        """Return the number of atoms in a batch for a block with so many.

        On a GPU a block is one batch, since the host's time for a call of the Evaluator does not depend on its size.
        """
        return min(max(int(1.1 * atoms), _SMALLEST), _LARGEST)

    @property
    def is_padded(self) -> bool:
        """Whether what structures leave free is filled."""
        return self._filler is not None

    @cached_property
    def _quarter(self) -> BatchCapacity | None:
        """The capacity for a quarter of the atoms; None if batches are not padded, or a step would not be faster."""
        if self._filler is None or self.atoms < 4 * _FULL:
            return None
        quarter = copy(self)
        quarter.atoms, quarter.structures = self.atoms // 4, max(2, self.atoms // 4 // self.each)
        return quarter

    def smallest(self, atoms: int, structures: int) -> BatchCapacity:
        """Return the smallest capacity, among this one and repeated quarters of it, in which so many fit."""
        quarter = self._quarter
        return quarter.smallest(atoms, structures) if quarter and quarter.fits(atoms, structures) else self

    def fits(self, atoms: int, structures: int) -> bool:
        """Return whether so many fit; each free place for a structure needs at least one atom."""
        return structures < self.structures and atoms + self.structures - structures <= self.atoms

    def fill(self, system: System) -> System:
        """Return the system, followed by isolated atoms if batches are padded."""
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


def without_rest(result: Result, system: System, outputs: Mapping[str, Output]) -> Result:
    """Return the results of the system that `BatchCapacity.fill` was given.

    Args:
        result: those of the filled system.
        system: N atoms in B structures.
        outputs: those of the potential.
    """
    found = result.first(system.num_atoms, system.num_systems, outputs)
    found.properties = with_dipole(found.properties, found.charges, system)
    return found


def _filler(potential: Potential) -> int | None:
    """Return an element whose isolated atom the potential can evaluate; None if there is none."""
    potential = for_any_composition(potential)
    for z in (6, 8, 2, 14, 1):
        try:
            potential.check(System(z=torch.tensor([z]), pos=torch.zeros(1, 3).double()).to(potential.device))
        except ValueError:
            continue
        return z
    return None


def evaluate_each(
    evaluator: Evaluator | Ensemble, systems: Sequence[System], capacity: BatchCapacity
) -> list[EnsembleResult | Exception]:
    """Return the results, on the CPU, of structures that fit into one batch, or the error of each that failed.

    Args:
        evaluator: evaluator of a potential, or an ensemble, which also gives the spread.
        systems: systems of one structure each, on the CPU.
        capacity: capacity of a batch.
    """

    def run(part: Sequence[System]) -> list[EnsembleResult]:
        result = evaluator(capacity.fill(System.concatenate(part).to(capacity.device)))
        sizes = [system.num_atoms for system in part]
        found: dict[str, Sequence[Tensor]] = {}
        for name in ("energy", "energy_std", "forces", "forces_std", "charges"):
            value = getattr(result, name, None)
            if value is not None:
                each = [1] * len(sizes) if name.startswith("energy") else sizes
                found[name] = value[: sum(each)].detach().cpu().split(each)
        return [EnsembleResult(**{name: v[k] for name, v in found.items()}) for k in range(len(part))]  # type: ignore[arg-type]

    return each(run, systems) if systems else []


@dataclass(frozen=True)
class BatchOptions:
    """Options of a stream.

    Attributes:
        novelty: compute the novelty with calibrated models.
        atoms: number of atoms in a batch; None: 16,384 on a GPU, 768 on a CPU.
        padded: fill batches to one size, for CUDA graphs; None: on a GPU.
    """

    novelty: bool = True
    atoms: int | None = None
    padded: bool | None = None


@dataclass(eq=False)
class Task:
    """A structure that is being computed.

    Attributes:
        start: the given structure.
        system: the same structure, float64 on the CPU.
        found: the result, with properties in `info`.
        error: the reason why there is no result.
        near: words about atoms of the start that are nearer than any bond, else "".
    """

    start: Atoms
    system: System
    near: str
    found: Atoms | None = None
    error: str = ""

    @cached_property
    def size(self) -> int:
        """Number of atoms."""
        return len(self.start)

    @cached_property
    def mobile(self) -> NDArray:
        """0.0 for atoms that the structure fixes and 1.0 for others, [N]."""
        mobile = np.ones(self.size)
        for constraint in self.start.constraints:
            mobile[constraint.get_indices()] = 0.0
        return mobile


_Options = TypeVar("_Options", bound=BatchOptions)


class Worker(ABC, Generic[_Options]):
    """Computes blocks of records with one potential, or with the mean of several.

    Args:
        potential: the potential, on its device.
        options: options of the stream.
        others: further potentials, whose mean with the first is computed.
    """

    def __init__(self, potential: Potential, options: _Options, others: Sequence[Potential] = ()):
        self.potential, self.options, self.members = potential, options, [potential, *others]
        self._capacity: BatchCapacity | None = None

    @cached_property
    def evaluator(self) -> Evaluator | Ensemble:
        members = [for_any_composition(member) for member in self.members]  # `check` sees structures, not fillers
        return Ensemble(members) if len(members) > 1 else Evaluator(members[0])

    @abstractmethod
    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        """Return an outcome for each record, in order."""

    def check(self, system: System, records: Sequence[Record]) -> None:
        """Refuse structures that a potential cannot evaluate; warnings name the record of each."""
        system = system.to(self.potential.device)
        for potential in self.members:
            potential.check(system, names=records)

    @cached_property
    def rated(self) -> list[Potential]:
        """The calibrated potentials if the novelty is requested, else none."""
        return rated(self.members if self.options.novelty else [])

    def capacity(self, largest: int, most: int | None = None, mean: float = 0.0) -> BatchCapacity:
        """Return the capacity of the last block's batches, or one in which a structure of so many atoms fits.

        A new capacity is for `most` atoms by default, and for structures of `mean` atoms.
        """
        capacity = self._capacity
        if capacity is None or capacity.atoms <= largest or capacity.each > 2 * max(_FEWEST, mean):
            self._capacity = capacity = BatchCapacity(
                self.potential, largest, self.options.atoms or most, self.options.padded, mean
            )
        return capacity


class TaskWorker(Worker[_Options]):
    """Computes structures that change, one by one or several together."""

    @abstractmethod
    def compute(self, tasks: Iterator[Task], sizes: Sequence[int]) -> None:
        """Set the result or the error of each task.

        Args:
            tasks: the tasks, which are checked when they are taken.
            sizes: numbers of atoms of all structures, also of those that the checks refuse.
        """

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        outcomes = [Outcome(record, errors=[record.error] if record.error else []) for record in records]
        starts = [(outcome, atoms) for outcome in outcomes for atoms in outcome.record.starts]
        for outcome in outcomes:
            outcome.record.starts = []
        tasks: list[tuple[Outcome, Task]] = []
        if starts:
            self.compute(self._opened(starts, tasks), [len(atoms) for _, atoms in starts])
        done = [(task.system, task.found) for _, task in tasks if task.found is not None]
        novelty = novelty_of(self.rated, done, [len(found) for _, found in done], _at_ends)
        for (_, found), score in zip(done, [] if novelty is None else novelty.tolist(), strict=False):
            found.info["novelty"] = score
        for outcome, task in tasks:
            if task.found is not None:
                outcome.structures.append(task.found)
                outcome.near += [task.near] * bool(task.near)
            else:
                outcome.errors.append(task.error)
        return outcomes

    def _opened(
        self, starts: Sequence[tuple[Outcome, Atoms]], tasks: list[tuple[Outcome, Task]]
    ) -> Iterator[Task]:  # fmt: skip
        """Yield a task for each structure that can be evaluated, which is appended to `tasks`; others are errors."""

        def opened(part: Sequence[tuple[Outcome, Atoms]]) -> list[Task]:
            given = [atoms for _, atoms in part]
            for atoms in given:
                refuse_start(atoms)
            joined = System.from_ase(given)
            for potential in self._on_cpu:
                potential.check(joined, names=[outcome.record for outcome, _ in part])
            return [Task(*each) for each in zip(given, joined.split(), close_atoms(joined), strict=True)]

        for first in range(0, len(starts), OPENED):
            part = starts[first : first + OPENED]
            ready = []
            found = in_parts(opened, part)
            for (outcome, _), task in zip(part, found, strict=True):
                if isinstance(task, Exception):
                    outcome.errors.append(reason(task))
                else:
                    ready.append((outcome, task))
            tasks += ready
            yield from (task for _, task in ready)

    @cached_property
    def _on_cpu(self) -> list[Potential]:
        """The potentials on the CPU, whose checks do not wait for what a GPU computes."""
        return [p if p.device.type == "cpu" else deepcopy(p).to("cpu") for p in self.members]


def _at_ends(computed: Sequence[tuple[System, Atoms]]) -> System:
    """Return given structures as they were found, as one batch."""
    ends = [(found.positions, found.cell.array) for _, found in computed]
    pos, cell = (torch.from_numpy(np.concatenate(values)) for values in zip(*ends, strict=True))
    return System.concatenate([system for system, _ in computed]).replace(pos=pos, cell=cell.view(-1, 3, 3))


def _fits_features(most: int, atoms: int, _structures: int) -> bool:
    return atoms <= most


def novelty_of(
    potentials: Sequence[Potential],
    items: Sequence[_Item],
    sizes: Sequence[int],
    system: Callable[[list[_Item]], System],
) -> NDArray | None:
    """Return the largest novelty of the atoms of each structure, [B]; None without potentials.

    Args:
        potentials: the potentials from `rated`, the largest novelty of which counts. They have evaluated the
            structures, which are not checked again.
        items: the structures.
        sizes: number of atoms of each structure.
        system: function that returns some of the structures as a batch, on any device.
    """
    if not potentials:
        return None
    device, tops = potentials[0].device, [np.zeros(0)]
    for part in parts(items, sizes, partial(_fits_features, _MOST.get(device.type, _MOST["cpu"]))):
        batch = system(part).to(device)
        tops.append(largest(common_scores(potentials, batch), batch).cpu().numpy())
    return np.concatenate(tops)
