"""The long-range part of Ewald sums over a batch, of sizes that are fixed beforehand.

How many waves or mesh points a structure needs depends on its cell, which is known on the GPU only. A plan holds these
sizes: what is computed with it waits for nothing, and a CUDA graph can hold it. Other cells may be computed with the
same plan as long as they fit, which the plan notes.

Shapes: N atoms, B structures, n atoms of a structure, C charge channels, K reciprocal vectors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..neighbors.result import safe_norm
from ..system import System
from .lattice import inverse, volume
from .mesh import Mesh, mesh_potential, mesh_sizes, order_and_spacing
from .pairs import MIN_DISTANCE, all_pairs, sum_pairs

__all__ = ["EwaldPlan", "EwaldSum", "active_plan", "require_all_or_none", "with_plans"]

_active: ContextVar[Mapping[int, EwaldPlan] | None] = ContextVar("_active", default=None)


@contextmanager
def with_plans(plans: Mapping[int, EwaldPlan]) -> Iterator[None]:
    """Within the block Ewald sums are computed with these plans, by the `id` of the module that computes them."""
    before = _active.set(plans)
    try:
        yield
    finally:
        _active.reset(before)


def active_plan(module: Any) -> EwaldPlan | None:
    """The plan that a module is to use now."""
    plans = _active.get()
    return None if plans is None else plans.get(id(module))


def require_all_or_none(system: System) -> Tensor:
    """Which structures are periodic, [B] bool.

    Raises:
        ValueError: one is periodic in some directions only.
    """
    periodic = system.pbc.all(1)
    mixed = system.pbc.any(1) & ~periodic
    if bool(mixed.any()):
        raise ValueError(
            f"system {int(mixed.nonzero()[0, 0])} is periodic in one or two directions only; Ewald summation needs "
            "all three (put enough vacuum between the layers) or none"
        )
    return periodic


class EwaldSum(NamedTuple):
    """What an Ewald sum is computed to.

    Attributes:
        mesh: by particle mesh, else by plane waves.
        alpha: 1/Å.
        k_max: 1/Å, the longest wave.
        accuracy: of the mesh.
        factor: damping f(d) of distances [E], for molecules.
    """

    mesh: bool
    alpha: float
    k_max: float
    accuracy: float
    factor: Callable[[Tensor], Tensor]


class EwaldPlan:
    """Sizes for a batch of structures with these atoms, periodicity and cells.

    Args:
        sums: what is computed.
        system: N atoms in B structures; positions and charges do not matter.
        room: of the waves: the plan fits cells that are strained by so much.
        mesh_room: the same of the mesh. Above 0 it is another mesh than that of the cells themselves, whose energies
            differ from those by as much as the accuracy allows.

    Attributes:
        periodic: [B] bool.
        lacking: [1] bool, whether a cell did not fit since this was made; what was computed then is not accurate.
        unfit: [B, 3, 3] Å, the first cells that did not fit; zeros before.

    Raises:
        ValueError: a structure is periodic in some directions only.
    """

    def __init__(self, sums: EwaldSum, system: System, room: float = 0.0, mesh_room: float = 0.0):
        self.sums, self.periodic = sums, require_all_or_none(system)
        self._notes = room > 0 or mesh_room > 0
        self.lacking = torch.zeros(1, dtype=torch.bool, device=system.device)
        self.unfit = torch.zeros_like(system.cell, dtype=torch.float64)
        self._parts: list[_Part] = []
        for b, periodic in enumerate(self.periodic.tolist()):
            atoms = (system.batch == b).nonzero()[:, 0]
            cell = system.cell[b].detach().double()
            if atoms.numel() == 0:
                continue
            if not periodic:
                self._parts.append(_Molecule(sums, b, atoms, system))
            elif sums.mesh:
                self._parts.append(_OnMesh(sums, b, atoms, cell * (1 + mesh_room)))
            else:
                self._parts.append(_Waves(sums, b, atoms, cell, room))

    def energies(self, system: System, q: Tensor) -> Tensor:
        """Long-range, self and background energies; all of molecules.

        Args:
            system: as that of the plan but for positions and cells.
            q: [N, C] e, float64.

        Returns:
            [N] e²/Å, float64.
        """
        if self._notes:
            self._note(system)
        total = torch.zeros(system.num_atoms, dtype=torch.float64, device=system.device)
        for part in self._parts:
            pos, charges = system.pos.index_select(0, part.atoms).double(), q.index_select(0, part.atoms)
            total = total.index_add(0, part.atoms, part.energies(pos, system.cell[part.b].double(), charges))
        return total

    @torch.no_grad()
    def _note(self, system: System) -> None:
        """Remember the first cells that do not fit."""
        cell = system.cell.detach().double()
        fit = [part.fits(cell[part.b]) for part in self._parts]
        if not fit:
            return
        # what is not finite is refused for that
        lacking = (~torch.stack(fit).all() & cell.isfinite().all()).reshape(1)
        self.unfit.copy_(torch.where(lacking & ~self.lacking, cell, self.unfit))
        self.lacking |= lacking


class _Part(ABC):
    """One structure of the batch.

    Attributes:
        b: its number.
        atoms: [n] its atoms.
    """

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor):
        self.sums, self.b, self.atoms = sums, b, atoms

    @abstractmethod
    def energies(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        """[n] e²/Å of positions [n, 3], a cell [3, 3] and charges [n, C], all float64."""

    @abstractmethod
    def fits(self, cell: Tensor) -> Tensor:
        """[] bool."""


class _Molecule(_Part):
    """All pairs."""

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor, system: System):
        super().__init__(sums, b, atoms)
        self._pairs = all_pairs(System(z=system.z[atoms], pos=system.pos[atoms].detach()))

    def energies(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        receiver, sender = self._pairs.edge_index
        d = safe_norm(pos.index_select(0, sender) - pos.index_select(0, receiver)).clamp(min=MIN_DISTANCE)
        products = (q.index_select(0, receiver) * q.index_select(0, sender)).sum(1)
        return sum_pairs(products * self.sums.factor(d) / d, self._pairs, len(pos))

    def fits(self, cell: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=cell.device)


class _Periodic(_Part):
    def energies(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        alpha = self.sums.alpha
        background = math.pi / (volume(cell) * alpha * alpha) * q.sum(0)
        potential = self._potential(pos, cell, q)
        return (q * (potential - 2 * alpha / math.sqrt(math.pi) * q - background)).sum(1) / 2

    @abstractmethod
    def _potential(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        """Of the smooth charges at the atoms, [n, C] e/Å."""


class _OnMesh(_Periodic):
    """A mesh of fixed sizes, whose points must not be further apart than the accuracy allows."""

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor, cell: Tensor):
        super().__init__(sums, b, atoms)
        self._order, self._spacing = order_and_spacing(sums.accuracy, sums.alpha)
        self._mesh = Mesh.of(mesh_sizes(cell, self._order, self._spacing), self._order, cell.device)

    def _potential(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        return mesh_potential(pos, cell, q, self.sums.alpha, self._order, self._mesh)

    def fits(self, cell: Tensor) -> Tensor:
        return ~(cell.norm(dim=1) > self._mesh.numbers * (self._spacing * (1 + 1e-9))).any()


class _Waves(_Periodic):
    """The waves of one half of space that are no longer than k_max in the cell, out of a list that reaches further.

    The wave n of a cell A has k = 2π A⁻¹ n. It is in the list of the cell A₀ because |A₀⁻¹ n| ≤ ‖A₀⁻¹ A‖ |A⁻¹ n|.
    """

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor, cell: Tensor, room: float):
        super().__init__(sums, b, atoms)
        self._inverse, self._room = inverse(cell), room
        k_max = sums.k_max * (1 + room)
        reach = (k_max * cell.norm(dim=1) / (2 * math.pi)).floor().long().tolist()
        index = torch.cartesian_prod(*[torch.arange(-n, n + 1, device=cell.device) for n in reach])
        n0, n1, n2 = index.unbind(1)
        half = (n0 > 0) | ((n0 == 0) & ((n1 > 0) | ((n1 == 0) & (n2 > 0))))
        index = index[half].double()
        self._index = index[self._waves(index, cell).norm(dim=1) <= k_max]

    @staticmethod
    def _waves(index: Tensor, cell: Tensor) -> Tensor:
        return 2 * math.pi * index @ inverse(cell).T

    def _potential(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        k = self._waves(self._index, cell)
        k2 = (k * k).sum(1)
        # vectors of one half of space stand for both halves
        strength = 8 * math.pi / volume(cell) * torch.exp(-k2 / (4 * self.sums.alpha**2)) / k2
        strength = torch.where(k2.detach() <= self.sums.k_max**2 * (1 + 1e-12), strength, 0.0)
        phase = pos @ k.T
        cos, sin = torch.cos(phase), torch.sin(phase)
        return cos @ (strength[:, None] * (cos.T @ q)) + sin @ (strength[:, None] * (sin.T @ q))

    def fits(self, cell: Tensor) -> Tensor:
        strain = (self._inverse @ cell).abs()
        # the norm is at most √(‖·‖₁ ‖·‖∞)
        return ~(strain.sum(0).amax() * strain.sum(1).amax() > (1 + self._room) ** 2 + 1e-12)
