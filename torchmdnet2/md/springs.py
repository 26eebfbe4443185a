"""Springs along bonds and angles, fitted to a potential's forces: the inner potential of multiple time steps.

They take over nearly all of the fast forces and cost next to nothing; the rest changes slowly. Averages do not depend
on the fit, which only decides how long the outer time step can be.

Shapes: N atoms in B replicas of n atoms each, P springs of a replica in T kinds, M springs of an atom at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..engine.bound import BoundStep
from ..errors import BadData
from ..evaluator import Evaluator
from ..potential.potential import Potential, Result
from ..system import System
from .guard import Bonds

__all__ = ["SpringStep", "Springs"]

ORDER = 4
"""Terms of the force: 1, x, x², x³ of the length minus its usual value."""

_WIDTH = 0.04  # Å, of the random displacements of the fit
REACH = 0.25
"""Å by which a length may differ from the usual one before the force becomes constant."""
_ATOMS = 1000  # at least so many atoms in the frames of a fit, and two frames


class Springs:
    """Springs between bonded atoms and between atoms bonded to the same one, in kinds by elements and neighbors.

    Args:
        start: one structure, on the CPU; its bonds get springs.

    Attributes:
        pairs [P, 2], shift [P, 3] (cells between the second atom and its image), kind [P]: int64.
        lengths: [T] Å, the mean of each kind at the start.
        coefficients: [T, ORDER] eV/Å of (length − usual length)/Å to powers; zeros before `fit`.

    Raises:
        BadData: the structure has no bonds.
    """

    def __init__(self, start: System):
        self.start = start
        bonds = Bonds(start)
        if not len(bonds.pairs):
            raise BadData("inner springs: the structure has no bonds between nonmetals; give a model as inner")
        self.pairs, self.shift, self.kind = _springs_of(start, bonds)
        counts = torch.bincount(self.kind)
        lengths = self._vectors(start.pos.double(), start.cell[0].double()).norm(dim=1)
        self.lengths = torch.zeros(len(counts), dtype=torch.float64).index_add(0, self.kind, lengths) / counts
        self.coefficients = torch.zeros(len(counts), ORDER, dtype=torch.float64)

    @property
    def identity(self) -> str:
        """Checksum of which atoms have springs."""
        content = torch.cat([self.pairs, self.shift, self.kind[:, None]], 1).numpy().tobytes()
        return f"springs {hashlib.sha256(content).hexdigest()}"

    def facts(self) -> dict[str, Any]:
        """Return what was fitted, as plain data."""
        return {"lengths": self.lengths.tolist(), "coefficients": self.coefficients.tolist()}

    def take(self, facts: Mapping[str, Any]) -> None:
        """Take over the result of an earlier fit."""
        self.lengths.copy_(torch.tensor(facts["lengths"], dtype=torch.float64))
        self.coefficients.copy_(torch.tensor(facts["coefficients"], dtype=torch.float64))

    def fit(self, potential: Potential) -> float:
        """Fit the coefficients by least squares to the forces on randomly displaced atoms.

        Args:
            potential: on any device.

        Returns:
            The remaining part of the forces (ratio of root mean squares).
        """
        start, random = self.start, torch.Generator().manual_seed(0)
        n, cell = start.num_atoms, start.cell[0].double()
        size = self.coefficients.numel()
        left, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        evaluator, frames, total = Evaluator(potential), [], 0.0
        for _ in range(max(2, -(-_ATOMS // n))):
            pos = start.pos.double() + _WIDTH * torch.randn(n, 3, generator=random, dtype=torch.float64)
            forces = evaluator(start.replace(pos=pos).to(potential.device)).forces
            assert forces is not None
            forces = forces.double().cpu().flatten()
            design = self._design(pos, cell)
            left += design.T @ design
            right += design.T @ forces
            total += float(forces.square().sum())
            frames.append((design, forces))
        left += 1e-6 * left.diagonal().mean() * torch.eye(size, dtype=torch.float64)
        found = torch.linalg.solve(left, right)
        self.coefficients.copy_(found.view(-1, ORDER) / REACH ** torch.arange(ORDER))
        rest = sum(float((forces - design @ found).square().sum()) for design, forces in frames)
        return (rest / total) ** 0.5

    def _vectors(self, pos: Tensor, cell: Tensor) -> Tensor:
        """Return vectors from first to second atom, [P, 3] Å."""
        i, j = self.pairs.T
        return pos[j] - pos[i] + self.shift.double() @ cell

    def _design(self, pos: Tensor, cell: Tensor) -> Tensor:
        """Return forces per coefficient in units of REACH, [3n, T·ORDER]."""
        vectors = self._vectors(pos, cell)
        d = vectors.norm(dim=1)
        x = (d - self.lengths[self.kind]).clamp(-REACH, REACH) / REACH
        along = (vectors / d[:, None])[:, :, None] * torch.stack([x**p for p in range(ORDER)], 1)[:, None]
        place = self.kind[:, None] * ORDER + torch.arange(ORDER)
        design = torch.zeros(len(pos), 3, self.coefficients.numel(), dtype=torch.float64)
        axis = torch.arange(3)[None, :, None]
        for atom, sign in ((self.pairs[:, 0], 1.0), (self.pairs[:, 1], -1.0)):
            design.index_put_((atom[:, None, None], axis, place[:, None]), sign * along, accumulate=True)
        return design.view(3 * len(pos), -1)


def _springs_of(start: System, bonds: Bonds) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs, shifts and kinds."""
    z = start.z.tolist()
    near: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in z]
    for (i, j), shift in zip(bonds.pairs.tolist(), bonds.shift.tolist(), strict=True):
        near[i].append((j, tuple(shift)))
        near[j].append((i, tuple(-s for s in shift)))
    around = [(z[i], tuple(sorted(z[j] for j, _ in own))) for i, own in enumerate(near)]
    found: dict[tuple[int, int, tuple[int, ...]], tuple[Any, ...]] = {}

    def add(i: int, j: int, shift: tuple[int, ...], *middle: Any) -> None:
        if i > j or (i == j and shift < (0, 0, 0)):
            i, j, shift = j, i, tuple(-s for s in shift)
        if (i, j, shift) != (i, i, (0, 0, 0)):
            found.setdefault((i, j, shift), (middle, *sorted((around[i], around[j]))))

    for i, own in enumerate(near):
        for j, shift in own:
            add(i, j, shift)
    for m, own in enumerate(near):
        for k, (i, first) in enumerate(own):
            for j, second in own[k + 1 :]:
                add(i, j, tuple(b - a for a, b in zip(first, second, strict=True)), around[m])
    number = {kind: t for t, kind in enumerate(sorted(set(found.values())))}
    pairs = torch.tensor([[i, j] for i, j, _ in found])
    return pairs, torch.tensor([s for _, _, s in found]), torch.tensor([number[kind] for kind in found.values()])


class SpringStep(BoundStep):
    """The forces of springs in a batch of replicas, for inner steps. They need no energies: none are computed.

    Args:
        springs: of one replica, fitted.
        system: N atoms in B replicas.
        launch: the kernel; None: PyTorch.

    Attributes:
        partner [N, M] int32 (−1: none), shift [N, M, 3] float64, kind [N, M] int32: the springs of each atom.
        lengths, coefficients: of the springs, on the device.
    """

    def __init__(self, springs: Springs, system: System, launch: Callable[[SpringStep], None] | None = None):
        device, B = system.device, system.num_systems
        n = system.num_atoms // B
        own: list[list[tuple[int, list[int], int]]] = [[] for _ in range(n)]
        rows = zip(springs.pairs.tolist(), springs.shift.tolist(), springs.kind.tolist(), strict=True)
        for (i, j), shift, kind in rows:
            own[i].append((j, shift, kind))
            own[j].append((i, [-s for s in shift], kind))
        most = max(map(len, own))
        padded = [row + [(-1, [0, 0, 0], 0)] * (most - len(row)) for row in own]
        partner = torch.tensor([[p for p, _, _ in row] for row in padded], dtype=torch.int32)
        first = n * torch.arange(B, dtype=torch.int32)[:, None, None]
        partner = torch.where(partner < 0, -1, partner + first).view(-1, most)
        shift = torch.tensor([[s for _, s, _ in row] for row in padded], dtype=torch.float64).repeat(B, 1, 1)
        kind = torch.tensor([[k for _, _, k in row] for row in padded], dtype=torch.int32).repeat(B, 1)
        self.partner, self.shift, self.kind = partner.to(device), shift.to(device), kind.to(device)
        self.lengths, self.coefficients = springs.lengths.to(device), springs.coefficients.to(device)
        self._batch = system.batch
        self.pos, self.cell = system.pos.detach().double().clone(), system.cell.detach().double().clone()
        self.forces = torch.zeros_like(self.pos)
        self.energy = torch.zeros(B, dtype=torch.float64, device=device)
        self.atom_energies = torch.zeros(len(self.pos), dtype=torch.float64, device=device)
        self.stress = self.charges = None
        self.reach = torch.full((1,), REACH, dtype=torch.float64, device=device)
        self.launch = launch
        self.replay()

    @torch.no_grad()
    def replay(self) -> None:
        if self.launch is not None:
            self.launch(self)
            return
        none = self.partner < 0
        across = torch.einsum("nmk,nkc->nmc", self.shift, self.cell[self._batch])
        vectors = self.pos[self.partner.clamp(min=0)] - self.pos[:, None] + across
        d = vectors.norm(dim=2).masked_fill(none, 1.0)
        x = (d - self.lengths[self.kind]).clamp(-REACH, REACH)
        c = self.coefficients[self.kind]
        force = (c[..., 0] + x * (c[..., 1] + x * (c[..., 2] + x * c[..., 3]))).masked_fill(none, 0.0)
        torch.sum((force / d)[:, :, None] * vectors, 1, out=self.forces)

    def check(self) -> bool:
        return True

    def fetch(self) -> Result:
        return Result(self.energy.cpu(), self.forces.cpu(), None, self.atom_energies.cpu())

    def properties(self) -> Mapping[str, Tensor]:
        return {}
