"""Structures of all sizes evaluated together, and those that fail reported one by one.

On a GPU all batches of a stream have the same number of atoms and structures, so that the step which the Evaluator
captures for the first one serves them all: what is left over is filled with isolated atoms.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..evaluator import Evaluator
from ..md.guard import Unphysical, check_overlaps
from ..md.setup import check_start, plain_copy
from ..potential.potential import Potential, Result
from ..system import System
from .records import FAULTS

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Room", "evaluate_each", "reason", "usable"]

_APART = 50.0  # Å between isolated atoms


def usable(atoms: Atoms, potential: Potential) -> System:
    """A structure that the potential can evaluate, float64, on the CPU.

    Raises:
        ValueError, RuntimeError: it cannot; as `Potential.check`, and for atoms that overlap.
    """
    start = plain_copy(atoms, None, None)
    check_start(start, potential)
    system = System.from_ase(start)
    check_overlaps(system)
    return system


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


def evaluate_each(evaluator: Evaluator, systems: Sequence[System], room: Room) -> list[Result | Exception]:
    """Results of structures that fit into one batch, on the CPU, or why one has none.

    A batch that fails is halved until what fails is alone.

    Args:
        evaluator: of the potential.
        systems: one structure each, on the CPU.
        room: of a batch.
    """
    if not systems:
        return []
    device = evaluator.potential.device
    try:
        result = evaluator(room.fill(System.concatenate(systems).to(device)))
    except (*FAULTS, Unphysical) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        if len(systems) == 1:
            return [error]
        half = len(systems) // 2
        return [*evaluate_each(evaluator, systems[:half], room), *evaluate_each(evaluator, systems[half:], room)]
    assert result.forces is not None
    sizes = [system.num_atoms for system in systems]
    used, energy = sum(sizes), result.energy.cpu()
    forces = result.forces[:used].cpu().split(sizes)
    charges = None if result.charges is None else result.charges[:used].detach().cpu().split(sizes)
    return [Result(energy[k : k + 1], forces[k], None, None, None if charges is None else charges[k])
            for k in range(len(systems))]  # fmt: skip
