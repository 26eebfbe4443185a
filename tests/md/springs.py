"""Atoms on springs, for the tests of what integrates."""

from __future__ import annotations

import torch

from torchmdnet2.md.integrators import AtomConstants


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


def atoms_of(num, replicas):
    random = torch.Generator().manual_seed(0)
    masses = 1 + 15 * torch.rand(num, 1, generator=random, dtype=torch.float64)
    mobile = torch.ones_like(masses)
    mobile[num // 2] = 0
    pos, vel = torch.randn(2, num * replicas, 3, generator=random, dtype=torch.float64)
    mobile = mobile.repeat(replicas, 1)
    return AtomConstants(masses.repeat(replicas, 1), mobile, 3 * num - 3, replicas), pos, 0.01 * vel * mobile
