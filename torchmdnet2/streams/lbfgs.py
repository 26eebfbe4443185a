"""L-BFGS of many structures at once, each with a separate history and trust radius.

A step that raises the energy is taken back: the history of that structure is forgotten and its radius halved. So the
energy never rises, and no line search is needed, for which structures would have to wait for each other.

Forces of molecules are scaled by springs between their atoms, which are stiff along bonds and soft along torsions. Else
forces are small long before the torsions are at their minimum. The inverse curvature is used in its compact form, a few
products of matrices instead of two loops over the history.

Methods: J. Nocedal, Math. Comput. 35, 773 (1980); compact form: R. H. Byrd et al., Math. Program. 63, 129 (1994);
springs: D. Packwood et al., J. Chem. Phys. 144, 164109 (2016).

Shapes: N atoms, B structures, M steps of history, n atoms of the largest molecule.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BatchedLBFGS", "largest_of"]

_MEMORY = 30
_LARGEST, _SMALLEST = 0.2, 1e-4  # Å, of the trust radius
_FIRST = 1 / 70  # Å²/eV, inverse curvature of what has no springs
_NOISE = 1e-6  # eV an atom: rounding of networks in float32 is no rise of the energy

_BOND = 35.0  # eV/Å², of a spring at the sum of the covalent radii
_DECAY = 3.0  # 1/Å, of springs between atoms that are further apart
_ACROSS = 0.05  # part of the stiffness in all directions, without which planar rings would have none out of the plane
_LEAST = 0.05  # eV/Å², of each atom
_ATOMS = 100  # largest structure with springs: their matrices are full


class BatchedLBFGS:
    """The state of the optimizer; it begins without structures.

    Args:
        device: of all tensors, which are float64.

    Attributes:
        batch: [N] structure of each atom.
        pos, forces, energy: [N, 3] Å, [N, 3] eV/Å, [B] eV: of the last step of each structure that was not taken back.
    """

    def __init__(self, device: torch.device):
        self.batch = torch.zeros(0, dtype=torch.long, device=device)
        atoms = torch.zeros(0, 3, dtype=torch.float64, device=device)
        structures = atoms.new_zeros(0)
        self.pos, self.forces, self.energy = atoms, atoms, structures
        self._radius, self._scale = structures, structures
        self._springs = _Springs(device)
        self._step = atoms  # in the coordinates of the springs
        self._history = atoms.new_zeros(0, 2 * _MEMORY, 3)  # moves, then changes of the gradient; the latest last
        self._upper = atoms.new_zeros(0, _MEMORY, _MEMORY)  # move · change, of changes that are not older
        self._changes = atoms.new_zeros(0, _MEMORY, _MEMORY)  # change · change

    def take(self, batch: Tensor, rows: Tensor, structures: Tensor, pos: Tensor, radii: Tensor) -> None:
        """Go on with some of the structures, and with new ones.

        Args:
            batch: [N] structure of each atom.
            rows: [N] the row in which each atom was before; -1: of a new structure.
            structures: [B] the same of structures.
            pos: [N, 3] Å, where new structures begin.
            radii: [N] Å, covalent radii; 0 of atoms without springs, as those of cells and fixed ones.
        """
        self.batch = batch
        self.pos, self.forces = _kept(self.pos, rows), _kept(self.forces, rows)
        self._step, self._history = _kept(self._step, rows), _kept(self._history, rows)
        self.energy, self._radius = _kept(self.energy, structures, torch.inf), _kept(self._radius, structures, _LARGEST)
        self._scale = _kept(self._scale, structures, 1.0)
        self._upper, self._changes = _kept(self._upper, structures), _kept(self._changes, structures)
        self._tolerance = _NOISE * torch.bincount(batch, minlength=len(structures))
        self._springs.take(batch, structures, pos, radii)

    def advance(self, pos: Tensor, forces: Tensor, energy: Tensor) -> Tensor:
        """The next positions.

        Args:
            pos: [N, 3] Å, those that the last call gave, or the first ones.
            forces: [N, 3] eV/Å there; energy: [B] eV.

        Returns:
            [N, 3] Å.
        """
        first = self.energy.isinf()
        worse = ~(energy <= self.energy + self._tolerance) & (self._radius > _SMALLEST) & ~first
        move, change = self._step, self._springs.scaled(self.forces - forces)
        along, squared = self._sum((move * change).sum(1)), self._sum((change * change).sum(1))
        good = ~first & ~worse & (along > 1e-12)
        self._scale = torch.where(good, along / squared.clamp(min=1e-300), torch.where(worse, 1.0, self._scale))
        shorter = largest_of(pos - self.pos, self.batch, len(energy)) / 2
        self._radius = torch.where(worse, shorter, (1.5 * self._radius).clamp(max=_LARGEST)).clamp(min=_SMALLEST)
        back = worse[self.batch, None]
        self.pos, self.forces = torch.where(back, self.pos, pos), torch.where(back, self.forces, forces)
        self.energy = torch.where(worse, self.energy, energy)
        self._remember(move, change, good, ~worse)
        self._step = self._direction(change, good)
        step = self._springs.back(self._step)
        length = largest_of(step, self.batch, len(energy))
        part = (self._radius / length.clamp(min=1e-300)).clamp(max=1.0)[self.batch, None]
        self._step = self._step * part
        return self.pos + step * part

    def _remember(self, move: Tensor, change: Tensor, good: Tensor, keep: Tensor) -> None:
        """Put the latest step behind the others, or zeros where it is not good; forget all where it is not kept."""
        new = good[self.batch, None, None]
        old = self._history * keep[self.batch, None, None]
        self._history = torch.cat([old[:, 1:_MEMORY], torch.where(new, move[:, None], 0.0),
                                   old[:, _MEMORY + 1 :], torch.where(new, change[:, None], 0.0)], 1)  # fmt: skip
        for name in ("_upper", "_changes"):
            value = torch.zeros_like(getattr(self, name))
            value[:, :-1, :-1] = getattr(self, name)[:, 1:, 1:] * keep[:, None, None]
            setattr(self, name, value)

    def _direction(self, change: Tensor, good: Tensor) -> Tensor:
        """[N, 3] the inverse curvature times the forces, in the coordinates of the springs."""
        forces = self._springs.scaled(self.forces)
        pair = torch.stack([torch.where(good[self.batch, None], change, 0.0), forces], 2)
        products = self._sum(self._history @ pair)
        latest, (moves, changes) = products[..., 0], products[..., 1].split(_MEMORY, 1)
        self._upper[:, :, -1] = latest[:, :_MEMORY]
        self._changes[:, :, -1] = self._changes[:, -1, :] = latest[:, _MEMORY:]
        along = self._upper.diagonal(dim1=1, dim2=2)
        upper = self._upper + torch.diag_embed((along == 0).to(along.dtype))  # 1 where there is no step
        scale = self._scale[:, None]
        solved = torch.linalg.solve_triangular(upper, moves[..., None], upper=True)
        right = along * solved[..., 0] + scale * ((self._changes @ solved)[..., 0] - changes)
        weights = torch.linalg.solve_triangular(upper.mT, right[..., None], upper=False)
        weights = torch.cat([weights, -scale[..., None] * solved], 1)[..., 0]
        step = (weights[self.batch, None] @ self._history)[:, 0]
        return step + self._scale[self.batch, None] * forces

    def _sum(self, values: Tensor) -> Tensor:
        """[B, ...] sums over the atoms of each structure."""
        return values.new_zeros(len(self.energy), *values.shape[1:]).index_add_(0, self.batch, values)


class _Springs:
    """Coordinates u of each structure, pos = Wᵀ u, in which its springs have the stiffness 1."""

    def __init__(self, device: torch.device):
        self._factors = torch.zeros(0, 0, 0, dtype=torch.float64, device=device)  # W, [B, 3 n, 3 n]
        self._inside = self._place = torch.zeros(0, dtype=torch.long, device=device)

    def take(self, batch: Tensor, structures: Tensor, pos: Tensor, radii: Tensor) -> None:
        """As `BatchedLBFGS.take`."""
        sizes = torch.bincount(batch, minlength=len(structures))
        first = sizes.cumsum(0) - sizes
        has = (radii > 0) & (sizes <= _ATOMS)[batch]
        self._inside = has.nonzero()[:, 0]
        most = int(torch.where(has, sizes[batch], 0).max()) if len(has) else 0
        local = torch.arange(len(batch), device=batch.device) - first[batch]
        self._place = (batch * most + local)[self._inside]
        old, size = _kept(self._factors, structures), 3 * most
        if old.shape[1] > size:
            old = old[:, :size, :size]
        factors = torch.eye(size, dtype=pos.dtype, device=pos.device).repeat(len(structures), 1, 1)
        factors[:, : old.shape[1], : old.shape[2]] = old
        new = (structures < 0).nonzero()[:, 0]
        where, radius = (self._padded(value, len(structures), most)[new] for value in (pos, radii[:, None]))
        factors[new] = _factors(where, radius[..., 0])
        self._factors = factors

    def _padded(self, values: Tensor, structures: int, most: int) -> Tensor:
        """[B, n, ...] the rows [N, ...] of atoms with springs, and zeros."""
        found = values.new_zeros(structures * most, *values.shape[1:])
        return found.index_copy_(0, self._place, values[self._inside]).view(structures, most, *values.shape[1:])

    def _times(self, factors: Tensor, values: Tensor) -> Tensor:
        count, size, _ = factors.shape
        if not size:
            return values * _FIRST**0.5
        product = factors @ self._padded(values, count, size // 3).view(count, size, 1)
        rows = product.view(-1, 3).index_select(0, self._place)
        return (values * _FIRST**0.5).index_copy_(0, self._inside, rows)

    def scaled(self, forces: Tensor) -> Tensor:
        """[N, 3] forces along u."""
        return self._times(self._factors, forces)

    def back(self, step: Tensor) -> Tensor:
        """[N, 3] Å, of steps in u."""
        return self._times(self._factors.mT, step)


def _factors(pos: Tensor, radii: Tensor) -> Tensor:
    """[B, 3 n, 3 n] W, the inverse of the Cholesky factor of the springs' stiffness.

    Args:
        pos: [B, n, 3] Å.
        radii: [B, n] Å; 0: there is no atom.
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
    """Rows of `value`, [n, ...], and `first` where the index is -1."""
    found = value.new_full((len(index), *value.shape[1:]), first)
    known = (index >= 0).nonzero()[:, 0]
    return found.index_copy_(0, known, value.index_select(0, index[known]))


def largest_of(vectors: Tensor, batch: Tensor, structures: int) -> Tensor:
    """[B] the largest length of the vectors [N, 3] of each structure."""
    return vectors.new_zeros(structures).scatter_reduce(0, batch, vectors.norm(dim=1), "amax")
