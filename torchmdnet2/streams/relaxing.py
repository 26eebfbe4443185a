"""Relaxation of a block of records. Structures share batches; the next one replaces one that has converged.

ASE relaxes cells, one structure after another.

The batch takes steps of L-BFGS, each structure with a separate history and trust radius. A step that raises the energy
is undone; the history of that structure is cleared and its radius halved. So the energy never rises, and no line search
is needed, for which structures would have to wait for each other.

Forces of molecules are scaled by springs between their atoms, which are stiff along bonds and soft along torsions.
Otherwise forces would be small long before the torsions are at their minimum. The inverse curvature has its compact
form, a few products of matrices instead of two loops over the history.

Methods: J. Nocedal, Math. Comput. 35, 773 (1980); compact form: R. H. Byrd et al., Math. Program. 63, 129 (1994);
springs: D. Packwood et al., J. Chem. Phys. 144, 164109 (2016).

Shapes: N atoms, B structures, C chunks of L atoms, M steps of history, n atoms of the largest molecule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase.data import covalent_radii
from torch import Tensor

from ..adapters.ase import TorchMDNet2Calculator
from ..engine.graph import CudaGraph, GraphMemory, NotCapturable
from ..ensemble import Ensemble
from ..errors import BadData
from ..evaluator import Evaluator
from ..system import System
from .batches import BatchOptions, Room, Task, TaskWorker, evaluate_each, reason
from .conformers import Ranking
from .records import FAULTS, Outcome, Record

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["BatchedLBFGS", "CellRelaxer", "RelaxOptions", "Relaxer"]


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

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        outcomes = super().__call__(records)
        for outcome in outcomes:
            if self.options.ranking is not None and outcome.structures:
                outcome.structures = self.options.ranking(outcome.structures, outcome.record.molfile)
        return outcomes

    def compute(self, tasks: Sequence[Task]) -> None:
        waiting = sorted(
            tasks, key=lambda task: task.system.num_atoms
        )  # the largest start first, the smallest fill gaps
        slots = _Slots(self.evaluator, self.room(max(task.system.num_atoms for task in tasks)), self.options)
        while waiting or slots.tasks:
            slots.refill(waiting)
            slots.step()
        slots.collect()


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


class _Slots:
    """The places of a batch, whose structures are relaxed together.

    On a GPU the optimizer's step, about a hundred small kernels, is captured in a CUDA graph for as long as the batch
    stays the same.
    """

    def __init__(self, evaluator: Evaluator | Ensemble, room: Room, options: RelaxOptions):
        self.evaluator, self.room, self.options = evaluator, room, options
        self.device = room.device
        self.tasks: list[Task] = []
        self.optimizer = BatchedLBFGS(self.device)
        self._steps, self._gone = np.zeros(0, int), np.zeros(0, bool)
        self._failed = False  # a structure failed and must leave, else the whole batch would fail
        self.pos = torch.zeros(0, 3, dtype=torch.float64, device=self.device)
        self._sizes: list[int] = []
        self._memory: GraphMemory | None = None
        self._ended: list[tuple[Task, Any, Any, float, int, bool]] = []
        self._now = room  # or a part of it, in which the batch is

    def refill(self, waiting: list[Task]) -> None:
        """Remove finished structures and add the next ones that fit, the largest first.

        A change of the batch takes as long as several steps. So it waits until a tenth of the structures is finished
        and, if no others wait, until the rest fits into a smaller batch.
        """
        if len(self.tasks) > 10 * self._gone.sum() and not self._failed:
            return
        kept = np.flatnonzero(~self._gone).tolist()
        tasks = [self.tasks[k] for k in kept]
        used, place = sum(task.system.num_atoms for task in tasks), len(waiting)
        if (
            tasks
            and not waiting
            and not self._failed
            and self.room.is_padded
            and self.room.smallest(used, len(tasks)) is self._now
        ):
            return
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
        self._steps = np.concatenate([self._steps[kept], np.zeros(len(tasks) - len(kept), int)])
        self._gone = np.zeros(len(tasks), bool)
        self.tasks, self._sizes, self._failed = tasks, sizes, False
        if not tasks:
            return
        joined = System.concatenate([task.system for task in tasks]).to(self.device)
        old = self.pos[index.clamp(min=0)] if len(self.pos) else joined.pos
        self.pos = torch.where(index[:, None] >= 0, old, joined.pos)
        self._mobile = torch.as_tensor(np.concatenate([_mobile(task.start) for task in tasks]), device=self.device)
        self._now = self.room.smallest(used, len(tasks))
        self._filled = self._now.fill(joined)
        radii = torch.as_tensor(covalent_radii, device=self.device)[joined.z] * self._mobile
        self.optimizer.take(joined.batch, known, self.pos, radii * ~joined.pbc.any(1)[joined.batch])
        # input and output of an optimizer step, at fixed addresses for all steps of this batch
        self._energy, self._forces = self.pos.new_zeros(len(tasks)), torch.zeros_like(self.pos)
        self._found = self.pos.new_zeros(len(tasks), 3)  # energy, largest force, 1 if both are finite
        self._move, self._moves = self._advance, 0

    def step(self) -> None:
        """Evaluate all structures, and move those that have not converged."""
        if not self.tasks:
            return
        n, b = len(self.pos), len(self.tasks)
        self._filled.pos[:n] = self.pos
        try:
            result = self.evaluator(self._filled)
        except FAULTS:
            self._retire_failed()
            return
        assert result.forces is not None
        self._energy.copy_(result.energy[:b])
        self._forces.copy_(result.forces[:n])
        if (
            self._moves == 1 and self.device.type == "cuda"
        ):  # the first move of a batch has initialised the libraries, so that a graph can be captured
            self._move = self._captured()
        self._move()
        self._moves += 1
        self.collect()  # those that ended at the last step, while the device computes this one
        found = self._found.cpu().numpy()  # waits for the device
        finite, converged = found[:, 2] > 0, found[:, 1] <= self.options.fmax
        ends = ~self._gone & (~finite | converged | (self._steps >= self.options.steps))
        if ends.any():
            places, forces = torch.stack([self.optimizer.pos, self.optimizer.forces]).cpu().numpy()
            lasts = np.cumsum(self._sizes)
            for k in np.flatnonzero(ends).tolist():
                if not finite[k]:
                    self._fail(k, "its energy or a force is not finite")
                    continue
                part = slice(lasts[k] - self._sizes[k], lasts[k])
                last = places[part], forces[part].copy(), float(found[k, 0]), int(self._steps[k]), bool(converged[k])
                self._ended.append((self.tasks[k], *last))
        self._gone |= ends
        self._steps += 1

    def collect(self) -> None:
        """Build the results of structures that have ended."""
        for task, pos, *last in self._ended:
            atoms = task.start.copy()
            atoms.set_positions(pos, apply_constraint=False)
            task.found = _relaxed(task.start, atoms, *last)
        self._ended.clear()

    def _advance(self) -> None:
        """Update `pos` and the numbers for the host by an optimizer step, without waiting for the device."""
        state = self.optimizer
        self.pos.copy_(state.advance(self.pos, self._forces * self._mobile[:, None], self._energy))
        torch.stack([state.energy, state.largest_force, state.finite.double()], 1, out=self._found)

    def _captured(self) -> Callable[[], None]:
        """Return `_advance` as a CUDA graph."""
        if self._memory is None:
            self._memory = GraphMemory(self.device)
        try:
            return CudaGraph.record(self._advance, self.device, warm_up=lambda: None, memory=self._memory).replay
        except NotCapturable:
            return self._advance

    def _fail(self, k: int, why: str) -> None:
        self._gone[k] = self._failed = True
        self.tasks[k].error = f"step {self._steps[k]}: {why}"

    def _retire_failed(self) -> None:
        """Find the structures because of which the batch cannot be evaluated."""
        parts = self.pos.cpu().split(self._sizes)
        alone = [task.system.replace(pos=pos) for task, pos in zip(self.tasks, parts, strict=True)]
        for k, found in enumerate(evaluate_each(self.evaluator, alone, self.room)):
            if isinstance(found, Exception) and self._gone[k]:
                self._failed = True
            elif isinstance(found, Exception):
                self._fail(k, reason(found))
        if not self._failed:
            raise RuntimeError("structures can be evaluated alone but not together: please report this")


def _mobile(atoms: Atoms) -> np.ndarray:
    """Return 0.0 for atoms that the structure fixes and 1.0 for others, [N]."""
    mobile = np.ones(len(atoms))
    for constraint in atoms.constraints:
        mobile[constraint.get_indices()] = 0.0
    return mobile


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


_MEMORY = 30
_CHUNK = 16  # L, see `_Chunks`
_LARGEST, _SMALLEST = 0.2, 1e-4  # limits of the trust radius, Å
_FIRST = 1 / 70  # Å²/eV, inverse curvature of atoms without springs
_NOISE = 1e-6  # eV per atom; a smaller rise of the energy may be rounding of a network in float32

_BOND = 35.0  # eV/Å², stiffness of a spring at the sum of the covalent radii
_DECAY = 3.0  # 1/Å, decay of the stiffness at larger distances
_ACROSS = 0.05  # part of the stiffness in all directions, so that planar rings have some out of the plane
_LEAST = 0.05  # eV/Å², added stiffness of each atom
_ATOMS = 100  # largest structure with springs, since their matrices are dense


class BatchedLBFGS:
    """L-BFGS for many structures at once; it starts without structures.

    Each step changes the state in place, so that a CUDA graph can repeat it.

    Args:
        device: device of all tensors, which are float64.

    Attributes:
        energy: [B] eV, from the last step of each structure that was not undone.
        finite: [B] False if the last energy or one of the last forces was not finite, whether undone or not.
    """

    def __init__(self, device: torch.device):
        self._chunks = _Chunks(torch.zeros(0, dtype=torch.long, device=device), 0)
        self._springs = _Springs(device)
        atoms = torch.zeros(0, 3 * _CHUNK, dtype=torch.float64, device=device)
        structures = atoms.new_zeros(0)
        self.energy, self.finite = structures, structures.bool()
        self._radius, self._scale = structures, structures
        self._pos, self._forces = atoms, atoms
        self._scaled, self._step = atoms, atoms  # forces and last step in the coordinates of the springs
        self._history = atoms.new_zeros(0, 2 * _MEMORY, 3 * _CHUNK)  # moves, then changes of the gradient
        self._oldest = torch.zeros(1, dtype=torch.long, device=device)  # place in both, which the next step takes
        self._upper = atoms.new_zeros(0, _MEMORY, _MEMORY)  # move · change, for changes that are not older; latest last
        self._changes = atoms.new_zeros(0, _MEMORY, _MEMORY)  # change · change

    @property
    def pos(self) -> Tensor:
        """[N, 3] Å, as `energy`."""
        return self._chunks.atoms(self._pos)

    @property
    def forces(self) -> Tensor:
        """[N, 3] eV/Å, as `energy`."""
        return self._chunks.atoms(self._forces)

    @property
    def largest_force(self) -> Tensor:
        """[B] eV/Å, as `energy`."""
        return self._chunks.largest(self._forces)

    def take(self, batch: Tensor, structures: Tensor, pos: Tensor, radii: Tensor) -> None:
        """Continue with some of the structures and with new ones.

        Args:
            batch: [N] structure of each atom, ascending.
            structures: [B] previous row of each structure; -1 for new ones.
            pos: [N, 3] Å, first positions of new structures.
            radii: [N] Å, covalent radii; 0 for atoms without springs, which are in cells or fixed.
        """
        old, self._chunks = self._chunks, _Chunks(batch, len(structures))
        rows = self._chunks.rows(old, structures)
        for name in ("_pos", "_forces", "_scaled", "_step", "_history"):
            setattr(self, name, _kept(getattr(self, name), rows))
        for name, first in {"energy": torch.inf, "_radius": _LARGEST, "_scale": 1.0, "_upper": 0.0, "_changes": 0.0,
                            "finite": True}.items():  # fmt: skip
            setattr(self, name, _kept(getattr(self, name), structures, first))
        self._tolerance = _NOISE * torch.bincount(batch, minlength=len(structures))
        self._springs.take(self._chunks, structures, pos, radii)

    def advance(self, pos: Tensor, forces: Tensor, energy: Tensor) -> Tensor:
        """Return the next positions.

        Args:
            pos: [N, 3] Å, positions from the last call, or the first ones.
            forces: [N, 3] eV/Å at these positions.
            energy: [B] eV at these positions.

        Returns:
            [N, 3] Å.
        """
        of, springs = self._chunks, self._springs
        pos, forces = of.spread(pos), of.spread(forces)
        first = self.energy.isinf()
        worse = ~(energy <= self.energy + self._tolerance) & (self._radius > _SMALLEST) & ~first
        scaled = springs.scaled(forces)
        move, change = self._step, self._scaled - scaled
        along, squared = of.sum(torch.stack([(move * change).sum(1), (change * change).sum(1)], 1)).unbind(1)
        good = ~first & ~worse & (along > 1e-12)
        self._scale.copy_(torch.where(good, along / squared.clamp(min=1e-300), torch.where(worse, 1.0, self._scale)))
        shorter = of.largest(pos - self._pos) / 2
        radius = torch.where(worse, shorter, (1.5 * self._radius).clamp(max=_LARGEST)).clamp(min=_SMALLEST)
        self._radius.copy_(radius)
        self.finite.copy_(energy.isfinite() & of.largest(forces).isfinite())
        self.energy.copy_(torch.where(worse, self.energy, energy))
        back = worse[of.owner, None]
        for state, latest in ((self._pos, pos), (self._forces, forces), (self._scaled, scaled)):
            state.copy_(torch.where(back, state, latest))
        step = self._direction(move, change, good, ~worse)
        displacement = springs.back(step)
        part = (self._radius / of.largest(displacement).clamp(min=1e-300)).clamp(max=1.0)[of.owner, None]
        torch.mul(step, part, out=self._step)
        return of.atoms(self._pos + displacement * part)

    def _direction(self, move: Tensor, change: Tensor, good: Tensor, keep: Tensor) -> Tensor:
        """Return the inverse curvature times the forces, in the coordinates of the springs, [C, 3 L].

        The latest step is appended to the history if it is `good`; the history is cleared if not `keep`.
        """
        of, owner = self._chunks, self._chunks.owner
        new = good[owner, None]
        for first, latest in ((0, move), (_MEMORY, change)):
            self._history.index_copy_(1, self._oldest + first, torch.where(new, latest, 0.0)[:, None])
        self._oldest.copy_((self._oldest + 1) % _MEMORY)
        places = torch.arange(_MEMORY, device=owner.device)
        order, inverse = (self._oldest + places) % _MEMORY, (places - self._oldest) % _MEMORY  # the latest last
        for matrix in (self._upper, self._changes):
            matrix[:, :-1, :-1] = matrix[:, 1:, 1:] * keep[:, None, None]
            matrix[:, -1], matrix[:, :, -1] = 0.0, 0.0
        there = self._upper.diagonal(dim1=1, dim2=2) != 0  # other steps were not good or have been cleared
        there[:, -1] = good
        products = of.sum(self._history @ torch.stack([torch.where(new, change, 0.0), self._scaled], 2))
        products = products.view(-1, 2, _MEMORY, 2).index_select(2, order) * there[:, None, :, None]
        latest, (moves, changes) = products[..., 0], products[..., 1].unbind(1)
        self._upper[:, :, -1] = latest[:, 0]
        self._changes[:, :, -1] = self._changes[:, -1] = latest[:, 1]
        along = self._upper.diagonal(dim1=1, dim2=2)
        upper = self._upper + torch.diag_embed((~there).to(along.dtype))  # so that the matrix is regular
        scale = self._scale[:, None]
        solved = torch.linalg.solve_triangular(upper, moves[..., None], upper=True)
        right = along * solved[..., 0] + scale * ((self._changes @ solved)[..., 0] - changes)
        weights = torch.linalg.solve_triangular(upper.mT, right[..., None], upper=False)
        weights = torch.stack([weights[..., 0], -scale * solved[..., 0]], 1).index_select(2, inverse).flatten(1)
        step = (weights[owner, None] @ self._history)[:, 0]
        return step + self._scale[owner, None] * self._scaled


class _Chunks:
    """A layout of atoms: those of each structure fill chunks of L = 16, of which the last one may have free places.

    Sums over structures then are sums over rows of equal length, and a short sum over chunks, instead of an atomic
    operation for each atom. Values are [C, 3 L], zero at free places.

    Args:
        batch: [N] structure of each atom, ascending.
        structures: their number.

    Attributes:
        owner: [C] structure of each chunk.
        place: [N] place of each atom among all C L.
        sizes, counts: [B] number of atoms and of chunks of each structure.
    """

    def __init__(self, batch: Tensor, structures: int):
        self.batch, self.sizes = batch, torch.bincount(batch, minlength=structures)
        self.counts = (self.sizes + _CHUNK - 1) // _CHUNK
        self._firsts = self.counts.cumsum(0) - self.counts
        self.owner = torch.arange(structures, device=batch.device).repeat_interleave(self.counts)
        self.local = torch.arange(len(batch), device=batch.device) - (self.sizes.cumsum(0) - self.sizes)[batch]
        self.place = self._firsts[batch] * _CHUNK + self.local

    def rows(self, old: _Chunks, structures: Tensor) -> Tensor:
        """Return the chunk of an older layout for each chunk, [C]; -1 for new structures.

        Args:
            old: the older layout.
            structures: [B] previous row of each structure; -1 for new ones.
        """
        if not len(old.counts):
            return torch.full_like(self.owner, -1)
        before = structures[self.owner]
        local = torch.arange(len(self.owner), device=before.device) - self._firsts[self.owner]
        return torch.where(before >= 0, old._firsts[before.clamp(min=0)] + local, -1)

    def spread(self, values: Tensor) -> Tensor:
        """Return values [N, 3] as [C, 3 L]."""
        found = values.new_zeros(len(self.owner) * _CHUNK, 3)
        return found.index_copy_(0, self.place, values).view(-1, 3 * _CHUNK)

    def atoms(self, values: Tensor) -> Tensor:
        """Return values [C, 3 L] as [N, 3]."""
        return values.view(-1, 3).index_select(0, self.place)

    def sum(self, values: Tensor) -> Tensor:
        """Return sums over the chunks of each structure, [C, ...] -> [B, ...]."""
        return values.new_zeros(len(self.sizes), *values.shape[1:]).index_add_(0, self.owner, values)

    def largest(self, vectors: Tensor) -> Tensor:
        """Return the largest length of the vectors of each structure, [C, 3 L] -> [B]."""
        squares = vectors.view(-1, _CHUNK, 3).square().sum(2).amax(1)
        return squares.new_zeros(len(self.sizes)).scatter_reduce(0, self.owner, squares, "amax").sqrt()


class _Springs:
    """Coordinates u of each structure, pos = Wᵀ u, in which its springs have the stiffness 1."""

    def __init__(self, device: torch.device):
        self._factors = torch.zeros(0, 0, 0, dtype=torch.float64, device=device)  # W, [B, 3 n, 3 n]

    def take(self, chunks: _Chunks, structures: Tensor, pos: Tensor, radii: Tensor) -> None:
        """As `BatchedLBFGS.take`."""
        batch, device, count = chunks.batch, pos.device, len(structures)
        has = (radii > 0) & (chunks.sizes <= _ATOMS)[batch]
        most = int(torch.where(has, chunks.sizes[batch], 0).max()) if len(has) else 0
        inside = has.nonzero()[:, 0]
        place = (batch * most + chunks.local)[inside]
        # free places of one layout read any atom of the same structure in the other; W has no element for them
        self._from = (chunks.place[chunks.sizes.cumsum(0) - chunks.sizes][:, None].expand(count, most)
                      .flatten().index_copy(0, place, chunks.place[inside]))  # fmt: skip
        self._to = torch.zeros(len(chunks.owner) * _CHUNK, dtype=torch.long, device=device)
        self._to.index_copy_(0, chunks.place[inside], place)
        self._has = torch.zeros(len(self._to), 1, dtype=torch.bool, device=device)
        self._has.index_fill_(0, chunks.place[inside], True)
        old, size = _kept(self._factors, structures), 3 * most
        if old.shape[1] > size:
            old = old[:, :size, :size]
        factors = torch.eye(size, dtype=pos.dtype, device=device).repeat(count, 1, 1)
        factors[:, : old.shape[1], : old.shape[2]] = old
        new = (structures < 0).nonzero()[:, 0]
        where, radius = (
            value.new_zeros(count * most, value.shape[1])
            .index_copy_(0, place, value[inside])
            .view(count, most, -1)[new]
            for value in (pos, radii[:, None])
        )
        factors[new] = _factors(where, radius[..., 0])
        self._factors = factors

    def _times(self, factors: Tensor, values: Tensor) -> Tensor:
        count, size, _ = factors.shape
        plain = values * _FIRST**0.5
        if not size:
            return plain
        rows = values.view(-1, 3).index_select(0, self._from).view(count, size, 1)
        product = (factors @ rows).view(-1, 3).index_select(0, self._to)
        return torch.where(self._has, product, plain.view(-1, 3)).view(values.shape)

    def scaled(self, forces: Tensor) -> Tensor:
        """Return the forces along u, [C, 3 L]."""
        return self._times(self._factors, forces)

    def back(self, step: Tensor) -> Tensor:
        """Return the change of the positions for a step in u, [C, 3 L] Å."""
        return self._times(self._factors.mT, step)


def _factors(pos: Tensor, radii: Tensor) -> Tensor:
    """Return W, the inverse of the Cholesky factor of the springs' stiffness, [B, 3 n, 3 n].

    Args:
        pos: [B, n, 3] Å.
        radii: [B, n] Å; 0 for padding.
    """
    count, n = radii.shape
    there = radii > 0
    apart = pos[:, :, None] - pos[:, None]
    distance = apart.norm(dim=3)
    unit = apart / distance.clamp(min=0.1)[..., None]
    stretch = distance - radii[:, :, None] - radii[:, None]
    stiffness = _BOND * torch.exp(-_DECAY * stretch.clamp(min=-0.5)) * (there[:, :, None] & there[:, None])
    stiffness = stiffness * ~torch.eye(n, dtype=torch.bool, device=pos.device)
    one = torch.eye(3, dtype=pos.dtype, device=pos.device)
    blocks = stiffness[..., None, None] * ((1 - _ACROSS) * unit[..., None] * unit[..., None, :] + _ACROSS * one)
    least = torch.where(there, _LEAST, 1.0)[..., None, None] * one
    blocks = torch.diag_embed((blocks.sum(2) + least).permute(0, 2, 3, 1)).permute(0, 3, 4, 1, 2) - blocks
    matrix = blocks.permute(0, 1, 3, 2, 4).reshape(count, 3 * n, 3 * n)
    lower, _ = torch.linalg.cholesky_ex(matrix)
    return torch.linalg.solve_triangular(lower, torch.eye(3 * n, dtype=pos.dtype, device=pos.device), upper=False)


def _kept(value: Tensor, index: Tensor, first: float = 0.0) -> Tensor:
    """Return rows of `value`, [n, ...], and `first` where the index is -1."""
    found = value.new_full((len(index), *value.shape[1:]), first)
    known = (index >= 0).nonzero()[:, 0]
    return found.index_copy_(0, known, value.index_select(0, index[known]))
