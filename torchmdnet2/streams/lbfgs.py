"""L-BFGS for many structures at once, on fixed memory.

Each structure has a separate history and trust radius. A step that raises the energy is undone; the history of that
structure is cleared and its radius halved. So the energy never rises, and no line search is needed, for which
structures would have to wait for each other.

Forces of molecules are scaled by springs between their atoms, which are stiff along bonds and soft along torsions.
Otherwise forces would be small long before the torsions are at their minimum. The inverse curvature has its compact
form, a few products of matrices instead of two loops over the history.

Methods: J. Nocedal, Math. Comput. 35, 773 (1980); compact form: R. H. Byrd et al., Math. Program. 63, 129 (1994);
springs: D. Packwood et al., J. Chem. Phys. 144, 164109 (2016).

Shapes: N atoms, B structures, C chunks of L atoms, M steps of history, n atoms of the largest molecule.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BatchedLBFGS", "into"]

_MEMORY = 30  # M
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

    Each step changes the state in place, so that a CUDA graph can repeat it. A structure that has ended stays.

    Args:
        device: device of all tensors, which are float64.
        fmax: largest force of a converged structure, eV/Å.
        most: largest number of steps.
        atoms, structures: N and B of all batches, so that tensors keep their memory; the atoms after those of `take`
            have no effect. None: as many as there are.

    Attributes:
        sizes: numbers of atoms of the structures.
        energy: [B] eV, from the last step of each structure that was not undone.
        finite: [B] False if the last energy or one of the last forces was not finite; such a step is undone.
        ended: [B] True if the structure has converged, or has taken all steps.
        steps: [B] number of steps.
    """

    def __init__(
        self,
        device: torch.device,
        fmax: float = 0.0,
        most: int = 2**31,
        atoms: int | None = None,
        structures: int | None = None,
    ):
        self.fmax, self.most, self._fixed = fmax, most, (atoms, structures)
        self.sizes = np.zeros(0, int)
        self._chunks = _Chunks(self.sizes, device, *self._fixed)
        self._springs = _Springs(device)
        chunks = torch.zeros(0, 3 * _CHUNK, dtype=torch.float64, device=device)
        each = chunks.new_zeros(0)
        self.energy, self._radius, self._scale, self._tolerance = (each,) * 4
        self.finite = self.ended = each.bool()
        self.steps = each.long()
        self._pos, self._forces = chunks, chunks
        self._scaled, self._step = chunks, chunks  # forces and last step in the coordinates of the springs
        self._history = chunks.new_zeros(0, 2 * _MEMORY, 3 * _CHUNK)  # moves, then changes of the gradient
        self._oldest = torch.zeros(1, dtype=torch.long, device=device)  # place in both, which the next step takes
        self._upper = chunks.new_zeros(0, _MEMORY, _MEMORY)  # move · change, of changes that are not older; latest last
        self._changes = chunks.new_zeros(0, _MEMORY, _MEMORY)  # change · change

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that a step uses."""
        for part in (self, self._chunks, self._springs):
            yield from (value for value in vars(part).values() if isinstance(value, Tensor))

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

    def take(
        self, sizes: NDArray, previous: NDArray, pos: Tensor, radii: NDArray, source: BatchedLBFGS | None = None
    ) -> None:  # fmt: skip
        """Continue with some structures of an optimizer and with new ones.

        Args:
            sizes: number of atoms of each structure.
            previous: row of each structure in `source`; -1 for new ones.
            pos: first positions of all atoms, Å; those of new structures are read.
            radii: covalent radii of all atoms, Å; 0 for atoms without springs, which are in cells or fixed.
            source: the optimizer; None: this one.
        """
        source = source or self
        chunks = _Chunks(sizes, pos.device, *self._fixed)
        structures = np.full(chunks.structures, -1)
        structures[: len(previous)] = previous
        rows = chunks.rows(source._chunks, structures)
        for name in ("_pos", "_forces", "_scaled", "_step", "_history"):
            setattr(self, name, into(getattr(self, name), _kept(getattr(source, name), rows)))
        for name, first in {"energy": torch.inf, "_radius": _LARGEST, "_scale": 1.0, "_upper": 0.0, "_changes": 0.0,
                            "finite": True, "ended": False, "steps": 0}.items():  # fmt: skip
            setattr(self, name, into(getattr(self, name), _kept(getattr(source, name), structures, first)))
        self._oldest.copy_(source._oldest)
        self._springs.take(chunks, structures, pos, radii, source._springs)
        self._tolerance = into(self._tolerance, torch.as_tensor(_NOISE * chunks.sizes, device=pos.device))
        self.sizes = sizes
        self._chunks.become(chunks)
        new = torch.as_tensor(rows < 0, device=pos.device)[:, None]
        whole = torch.nn.functional.pad(pos, (0, 0, 0, len(self._chunks.place) - len(pos)))
        self._pos.copy_(torch.where(new, self._chunks.spread(whole), self._pos))

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
        self.finite.copy_(energy.isfinite() & of.largest(forces).isfinite())
        worse = ~(energy <= self.energy + self._tolerance) & (self._radius > _SMALLEST) & ~first
        taken = self.finite & ~worse & ~self.ended
        scaled = springs.scaled(forces)
        move, change = self._step, self._scaled - scaled
        along, squared = of.sum(torch.stack([(move * change).sum(1), (change * change).sum(1)], 1)).unbind(1)
        good = taken & ~first & (along > 1e-12)
        self._scale.copy_(torch.where(good, along / squared.clamp(min=1e-300), torch.where(worse, 1.0, self._scale)))
        shorter = of.largest(pos - self._pos) / 2
        radius = torch.where(worse, shorter, (1.5 * self._radius).clamp(max=_LARGEST)).clamp(min=_SMALLEST)
        self._radius.copy_(radius)
        self.energy.copy_(torch.where(taken, energy, self.energy))
        forward = taken[of.owner, None]
        for state, latest in ((self._pos, pos), (self._forces, forces), (self._scaled, scaled)):
            state.copy_(torch.where(forward, latest, state))
        converged = (self.largest_force <= self.fmax) & self.energy.isfinite()
        self.ended.logical_or_(converged | (self.steps >= self.most))
        self.steps.add_(~self.ended)
        step = self._direction(move, change, good, ~worse)
        displacement = springs.back(step)
        part = (self._radius / of.largest(displacement).clamp(min=1e-300)).clamp(max=1.0) * ~self.ended
        torch.mul(step, part[of.owner, None], out=self._step)
        return of.atoms(self._pos + displacement * part[of.owner, None])

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
        sizes: numbers of atoms of the structures.
        device: device of the tensors.
        atoms, structures: N and B; None: as many as there are. Others have at least one structure and one chunk, in
            whose last place all further atoms are.

    Attributes:
        structures: B; is_fixed: whether N and B were given.
        sizes, counts, firsts: [B] number of atoms and of chunks of each structure, and its first chunk, on the host.
        local, places: numbers of the atoms of `sizes` within their structures, and their places, on the host.
        owner: [C] structure of each chunk.
        place: [N] place of each atom among all C L.
    """

    def __init__(self, sizes: NDArray, device: torch.device, atoms: int | None = None, structures: int | None = None):
        self.structures, self.is_fixed = structures or len(sizes), atoms is not None
        self.sizes = np.zeros(self.structures, int)
        self.sizes[: len(sizes)] = sizes
        self.counts = -(-self.sizes // _CHUNK)
        self.firsts = np.cumsum(self.counts) - self.counts
        self.local = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.places = np.repeat(self.firsts * _CHUNK, self.sizes) + self.local
        owner, place = np.repeat(np.arange(self.structures), self.counts), self.places
        if atoms is not None:
            most = atoms // _CHUNK + self.structures + 1
            owner = np.concatenate([owner, np.full(most - len(owner), self.structures - 1)])
            place = np.concatenate([place, np.full(atoms - len(place), most * _CHUNK - 1)])
        self.owner, self.place = torch.as_tensor(owner, device=device), torch.as_tensor(place, device=device)

    def become(self, other: _Chunks) -> None:
        """Take over another layout, in place where the sizes are equal."""
        for name, value in vars(other).items():
            setattr(self, name, into(getattr(self, name), value) if isinstance(value, Tensor) else value)

    def rows(self, old: _Chunks, structures: NDArray) -> NDArray:
        """Return the chunk of an older layout for each chunk, [C]; -1 for new structures and free chunks.

        Args:
            old: the older layout.
            structures: [B] previous row of each structure; -1 for new ones.
        """
        found, used = np.full(len(self.owner), -1), int(self.counts.sum())
        if (structures >= 0).any():
            local = np.arange(used) - np.repeat(self.firsts, self.counts)
            before = np.repeat(old.firsts[structures.clip(0)], self.counts) + local
            found[:used] = np.where(np.repeat(structures, self.counts) >= 0, before, -1)
        return found

    def spread(self, values: Tensor) -> Tensor:
        """Return values [N, 3] as [C, 3 L]."""
        found = values.new_zeros(len(self.owner) * _CHUNK, 3)
        return found.index_copy_(0, self.place, values).view(-1, 3 * _CHUNK)

    def atoms(self, values: Tensor) -> Tensor:
        """Return values [C, 3 L] as [N, 3]."""
        return values.view(-1, 3).index_select(0, self.place)

    def sum(self, values: Tensor) -> Tensor:
        """Return sums over the chunks of each structure, [C, ...] -> [B, ...]."""
        return values.new_zeros(self.structures, *values.shape[1:]).index_add_(0, self.owner, values)

    def largest(self, vectors: Tensor) -> Tensor:
        """Return the largest length of the vectors of each structure, [C, 3 L] -> [B]."""
        squares = vectors.view(-1, _CHUNK, 3).square().sum(2).amax(1)
        return squares.new_zeros(self.structures).scatter_reduce(0, self.owner, squares, "amax").sqrt()


class _Springs:
    """Coordinates u of each structure, pos = Wᵀ u, in which its springs have the stiffness 1."""

    def __init__(self, device: torch.device):
        self._factors = torch.zeros(0, 0, 0, dtype=torch.float64, device=device)  # W, [B, 3 n, 3 n]
        self._from = self._to = self._has = torch.zeros(0, dtype=torch.long, device=device)

    def take(self, chunks: _Chunks, structures: NDArray, pos: Tensor, radii: NDArray, source: _Springs) -> None:
        """Continue with some structures, as `BatchedLBFGS.take`; `structures` is [B]."""
        device, count = pos.device, chunks.structures
        batch = np.repeat(np.arange(count), chunks.sizes)
        has = (radii > 0) & (chunks.sizes <= _ATOMS)[batch]
        most = int(chunks.sizes[batch][has].max(initial=0))
        if chunks.is_fixed:
            most = max(most, *(springs._factors.shape[1] // 3 for springs in (self, source)))
        inside = np.flatnonzero(has)
        place = (batch * most + chunks.local)[inside]
        # free places of one layout read any atom of the same structure in the other; W has no element for them
        origin = np.repeat(np.minimum(chunks.firsts, len(chunks.owner) - 1) * _CHUNK, most)
        origin[place] = chunks.places[inside]
        target, there = np.zeros(len(chunks.owner) * _CHUNK, int), np.zeros((len(chunks.owner) * _CHUNK, 1), bool)
        target[chunks.places[inside]], there[chunks.places[inside]] = place, True
        for name, value in (("_from", origin), ("_to", target), ("_has", there)):
            setattr(self, name, into(getattr(self, name), torch.as_tensor(value, device=device)))
        old, size = _kept(source._factors, structures), 3 * most
        old = old[:, :size, :size]
        factors = torch.eye(size, dtype=pos.dtype, device=device).repeat(count, 1, 1)
        factors[:, : old.shape[1], : old.shape[2]] = old
        new = np.flatnonzero((structures < 0) & (chunks.sizes > 0))
        rank = np.full(count, -1)
        rank[new] = np.arange(len(new))
        chosen = inside[rank[batch[inside]] >= 0]
        place = rank[batch[chosen]] * most + chunks.local[chosen]
        radius, index = np.zeros(len(new) * most), (torch.as_tensor(value, device=device) for value in (place, chosen))
        radius[place] = radii[chosen]
        at, atoms = index
        where = pos.new_zeros(len(new) * most, 3).index_copy_(0, at, pos.index_select(0, atoms))
        shape = len(new), most  # no atoms if all structures are periodic, and so have no springs
        found = _factors(where.view(*shape, 3), torch.as_tensor(radius, device=device).view(shape))
        factors.index_copy_(0, torch.as_tensor(new, device=device), found)
        self._factors = into(self._factors, factors)

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


def _kept(value: Tensor, rows: NDArray, first: float = 0.0) -> Tensor:
    """Return rows of `value`, [n, ...], and `first` where the index is -1."""
    found = value.new_full((len(rows), *value.shape[1:]), first)
    known = np.flatnonzero(rows >= 0)
    old, new = (torch.as_tensor(index, device=value.device) for index in (rows[known], known))
    return found.index_copy_(0, new, value.index_select(0, old))


def into(held: Tensor, value: Tensor) -> Tensor:
    """Return the memory of `held` with a value, or the value if its size or type is another one."""
    if held.shape == value.shape and held.dtype == value.dtype:
        return held.copy_(value)
    return value
