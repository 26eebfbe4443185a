"""Pair potentials with a planted fault, as priors of a potential without network."""

from __future__ import annotations

import numpy as np
import torch
from ase import Atoms

from torchmdnet2 import Potential
from torchmdnet2.priors import Prior
from torchmdnet2.testing import without_network

LENGTH, DEPTH, WIDTH = 0.97, 5.0, 2.0  # Å, eV, 1/Å
OH = Atoms("OH", [[0, 0, 0], [0, 0, LENGTH]])


def morse(d):
    return DEPTH * ((1 - torch.exp(-WIDTH * (d - LENGTH))) ** 2 - 1)


def repulsion(d):
    return 300 * torch.exp(-4 * d)


def smooth(d, cutoff):
    """1 … 0, with two continuous derivatives at the cutoff."""
    return torch.where(d < cutoff, (1 - (d / cutoff) ** 2) ** 3, 0.0)


class Pairs(Prior):
    """A sum over pairs of a function of the distance (Å → eV), which need not vanish at the cutoff."""

    def __init__(self, energy, cutoff=5.0):
        super().__init__()
        self.energy, self.cutoff = energy, cutoff

    def forward(self, system, neighbors):
        pair = self.energy(neighbors.distances(system).double())
        return pair.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], pair / 2)


def potential(energy, cutoff=5.0, elements=(1, 6, 8)) -> Potential:
    return without_network([Pairs(energy, cutoff)], elements, cutoff).double()


def icosahedron():
    """The 12 corners, as unit vectors."""
    g = (1 + 5**0.5) / 2
    points = [p for a in (-1, 1) for b in (-g, g) for p in ((0, a, b), (a, b, 0), (b, 0, a))]
    return [np.array(p) / np.linalg.norm(p) for p in points]
