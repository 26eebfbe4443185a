"""L-BFGS of many structures at once, each with a separate history and trust radius.

A step that raises the energy is taken back: the history of that structure is forgotten and its radius halved. So the
energy never rises, and no line search is needed, for which structures would have to wait for each other.

Method: J. Nocedal, Math. Comput. 35, 773 (1980).

Shapes: N atoms, B structures, M steps of history.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BatchedLBFGS", "largest_of"]

_MEMORY = 20
_LARGEST, _SMALLEST = 0.2, 1e-3  # Å, of the trust radius
_FIRST = 1 / 70  # Å²/eV, inverse curvature before there is a history
_NOISE = 1e-6  # eV an atom: rounding of networks in float32 is no rise of the energy


class BatchedLBFGS:
    """The state of the optimizer; it begins without structures.

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
