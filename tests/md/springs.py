"""Atoms on springs, for the tests of what integrates."""

from __future__ import annotations

import torch

from torchmdnet2.md.integrators import AtomConstants, volume_of


class Springs:
    """In place of a bound step: every atom on a spring."""

    def __init__(self, pos, replicas):
        self.pos, self.forces = pos.clone(), torch.zeros_like(pos)
        self.energy = torch.zeros(replicas, dtype=torch.float64)
        self.replay()

    def replay(self):
        self.forces.copy_(-30 * self.pos)
        self.energy.copy_((15 * self.pos.square()).view(len(self.energy), -1).sum(1))

    def check(self):
        return True


class Crystal:
    """In place of a bound step: atoms on springs to the sites of a lattice, which resists strain.

    The energy is ½ k Σ u² + ½ C V₀ ΣE², with the displacements u from the sites, whose fractional coordinates stay, and
    the strain E = (F Fᵀ − 1)/2 of the cell F·cell₀. Cells strain independently of the displacements.
    """

    def __init__(self, cell, sites, spring=10.0, modulus=0.5):
        self._first, self._sites, self._spring, self._modulus = cell.clone(), sites, spring, modulus
        self.cell = cell.clone()
        self.pos = (sites @ cell).reshape(-1, 3)
        self.forces, self.energy = torch.zeros_like(self.pos), torch.zeros(len(cell), dtype=torch.float64)
        self.stress = torch.zeros_like(cell)
        self.replay()

    def replay(self):
        one = torch.eye(3, dtype=torch.float64)
        u = self.pos.view(len(self.cell), -1, 3) - self._sites @ self.cell
        shape = torch.linalg.inv(self._first) @ self.cell
        strain = (shape @ shape.mT - one) / 2
        stiffness = self._modulus * volume_of(self._first)
        self.forces.copy_(-self._spring * u.reshape(-1, 3))
        energy = 0.5 * self._spring * u.square().sum((1, 2)) + 0.5 * stiffness * strain.square().sum((1, 2))
        self.energy.copy_(energy)
        of_cell = stiffness[:, None, None] * (shape.mT @ strain @ shape)
        self.stress.copy_((self._spring * u.mT @ u + of_cell) / volume_of(self.cell)[:, None, None])

    def check(self):
        return True


def crystal_of(replicas, edge=4.0, **more):
    random = torch.Generator().manual_seed(3)
    skew = torch.tensor([[1.0, 0, 0], [0.1, 1, 0], [0, -0.2, 1]], dtype=torch.float64)
    sites = torch.rand(replicas, 8, 3, generator=random, dtype=torch.float64)
    return Crystal((edge * skew).repeat(replicas, 1, 1), sites, **more)


def atoms_of(num, replicas):
    random = torch.Generator().manual_seed(0)
    masses = 1 + 15 * torch.rand(num, 1, generator=random, dtype=torch.float64)
    mobile = torch.ones_like(masses)
    mobile[num // 2] = 0
    pos, vel = torch.randn(2, num * replicas, 3, generator=random, dtype=torch.float64)
    mobile = mobile.repeat(replicas, 1)
    return AtomConstants(masses.repeat(replicas, 1), mobile, 3 * num - 3, replicas), pos, 0.01 * vel * mobile
