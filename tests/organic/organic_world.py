"""Small molecules and a teacher that is a formula, for the scripts of scripts/organic."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "organic"
OPTIONS = argparse.Namespace(
    frames=2, every=3, student_every=None, timestep=0.5, keep=0.5, largest_force=30.0, largest_spread=1.5, batch=4,
    seed=0, temperatures=(300.0, 500.0),
)  # fmt: skip
KEYS = {"energy": "energy", "forces": "forces", "charges": "charges"}


def molecules(scripts):
    shards = scripts("shards")
    water = np.array([[0.0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]])
    rng = np.random.default_rng(0)
    waters = [shards.Geometry(f"w{k}", np.array([8, 1, 1]), water + rng.normal(0, 0.05, (3, 3)), 0) for k in range(6)]
    return [*waters, shards.Geometry("OH", np.array([8, 1]), water[:2], -1)]


def malonaldehyde(shards, scale=1.0):
    """O=C–C=C–O–H, planar, its oxygens 2.6 Å apart."""
    positions = np.array([
        [-1.3, 0.0, 0], [-1.2, 1.24, 0], [0.05, 1.95, 0], [1.2, 1.28, 0], [1.3, 0.0, 0], [0.33, -0.25, 0],
        [-2.1, 1.85, 0], [0.05, 3.03, 0], [2.15, 1.8, 0],
    ])  # fmt: skip
    return shards.Geometry("O=CC=CO", np.array([8, 6, 6, 6, 8, 1, 1, 1, 1]), scale * positions, 0)


def springs(scripts):
    """A teacher: springs of 1 Å between all atoms, 5 eV/Å², and charges that are even."""
    teachers = scripts("teachers")

    class Springs(teachers.Teacher):
        description = level = "springs"
        device = torch.device("cpu")

        def label(self, numbers, positions, charge):
            r = positions.double().detach().requires_grad_()
            n = r.shape[1]
            i, j = torch.triu_indices(n, n, 1)
            energy = (5 / 2 * ((r[:, i] - r[:, j]).norm(dim=2) - 1) ** 2).sum(1)
            (gradient,) = torch.autograd.grad(energy.sum(), r)
            even = (charge.double() / n)[:, None].expand(-1, n)
            return teachers.Labels(energy.detach(), -gradient, even, torch.zeros(len(r)))

    return Springs()
