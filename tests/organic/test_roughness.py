"""The way of a proton, and the second derivative of the force along it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from organic_world import malonaldehyde


def test_curvature_along_a_way(scripts, tmp_path):
    """Beside a formula: a force on the proton that is the cube of its place, and zero on all others."""
    shards, roughness, teachers = scripts("shards"), scripts("roughness"), scripts("teachers")

    class Cubic(teachers.Teacher):
        description = level = "cubic"

        def label(self, numbers, positions, charge):
            forces = torch.zeros_like(positions)
            forces[:, 5] = positions[:, 5] ** 3
            return teachers.Labels(forces.sum((1, 2)), forces, charge[:, None], charge)

    start = malonaldehyde(shards)
    shards.write_shard(tmp_path / "validation-conformers-0000.npz", [malonaldehyde(shards, 1.15), start, start])
    shards.write_shard(tmp_path / "train-conformers-0000.npz", [start._replace(name="other")])
    (way,) = roughness.ways(tmp_path, "validation", 46)
    assert way.h == 5 and not list(roughness.ways(tmp_path, "validation", 8))
    line = (start.positions[0] - start.positions[4]) / 2.6
    np.testing.assert_allclose(way.direction, line, atol=1e-6)
    along = (way.positions[:, 5] - way.geometry.positions[4]) @ line
    assert along[0] == pytest.approx(0.95, abs=1e-5) and 1.65 < along[-1] < 1.67
    np.testing.assert_allclose(np.diff(along), 0.01, atol=1e-9)
    np.testing.assert_array_equal(np.delete(way.positions[3], 5, 0), np.delete(way.positions[0], 5, 0))

    expected = 6 * way.positions[1:-1, 5] @ line**3  # d²(x³)/dt² = 6 x (dx/dt)², projected once more
    np.testing.assert_allclose(roughness.curvature(way, Cubic()), expected, atol=1e-6)


def test_molecules_without_a_way(scripts):
    """Too far apart, and an atom in the way."""
    shards, roughness = scripts("shards"), scripts("roughness")
    start, rng = malonaldehyde(shards), np.random.default_rng(0)
    assert roughness.way_of(malonaldehyde(shards, 1.15), rng) is None
    helium = (start.positions[0] + start.positions[4]) / 2 + [0, 0.9, 0]
    blocked = start._replace(numbers=np.append(start.numbers, 2), positions=np.vstack([start.positions, helium]))
    assert roughness.way_of(blocked, rng) is None
