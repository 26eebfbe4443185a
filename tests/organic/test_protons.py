"""scripts/organic/protons.py: structures with a proton on its way from one atom to another; needs no RDKit."""

from __future__ import annotations

import sys

import numpy as np
import torch
from organic_world import malonaldehyde


def test_a_job_without_good_frames(scripts, monkeypatch, tmp_path):
    """Leaves no HDF5 file, which training would refuse, and is not done again."""
    label, shards, teachers = map(scripts, ("label", "shards", "teachers"))

    class Unsure(teachers.Teacher):
        description = level = "unsure"
        device, calls = torch.device("cpu"), 0

        def label(self, numbers, positions, charge):
            Unsure.calls += 1
            zero = torch.zeros(positions.shape)
            return teachers.Labels(zero[:, 0, 0].double(), zero, zero[:, :, 0], zero[:, 0, 0] + 9)

    monkeypatch.setattr(label, "GFN2", Unsure)
    shards.write_shard(tmp_path / "train-x-0000.npz", [shards.Geometry("OH", np.array([8, 1]), np.eye(3)[:2], -1)])
    words = ["label.py", str(tmp_path), str(tmp_path / "labels"), "--gfn2", "--frames", "0"]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):
        label.main()
    assert Unsure.calls == 1
    assert [p.name for p in (tmp_path / "labels").iterdir() if p.suffix != ".json"] == ["train-002-0000.none"]


def test_shared_protons(scripts):
    """A proton is between two heavy atoms that are 2.3 to 3.2 Å apart, and only it has moved far."""
    shards, protons = scripts("shards"), scripts("protons")
    water = np.array([[0.0, 0, 0.066], [0, 0.757, -0.52], [0, -0.757, -0.52]])
    waters = [
        shards.Geometry("w", np.array([8, 1, 1]), water, 0),
        shards.Geometry("OH", np.array([8, 1]), water[:2], -1),
    ]
    rng = np.random.default_rng(0)
    radii, ways = {1: 1.1, 8: 1.52}, []
    for geometry in protons.shared_protons(40 * waters, waters, radii, 200, 64, rng):
        assert (len(geometry.numbers), geometry.charge) in ((6, 0), (5, -1))  # hydroxide takes, but does not give
        apart = np.linalg.norm(geometry.positions[:, None] - geometry.positions[None], axis=2)
        oxygen = geometry.numbers == 8
        assert 2.1 < apart[oxygen][:, oxygen].max() < 3.4  # with thermal displacements
        assert apart[np.triu_indices(len(apart), 1)].min() > 0.7
        ways.append(np.sort(apart[oxygen][:, ~oxygen], axis=0)[1].min() / apart[oxygen][:, oxygen].max())
    assert len(ways) > 80 and min(ways) < 0.55 < max(ways)  # from halfway to hardly begun
    assert protons.shared_protons([], waters, radii, 10, 64, rng) == []


def test_a_proton_goes_around_other_atoms(scripts):
    """Not through phosphorus to the other oxygen on it."""
    shards, protons = scripts("shards"), scripts("protons")
    rng = np.random.default_rng(0)
    ring = [np.array([np.cos(t), np.sin(t), 0]) for t in (0.0, 2.2)]
    acid = shards.Geometry("P(O)O", np.array([15, 8, 8, 1]), np.array([[0, 0, 0], 1.6 * ring[0], 1.5 * ring[1],
                                                                     1.6 * ring[0] + [0, 0, 0.97]]), -1)  # fmt: skip
    found = protons.sites(acid)
    assert found.donors == [(3, 1)] and found.weights == [24.0] and set(found.acceptors) == {1, 2}
    assert protons.within(acid, found) == [(3, 1, 2)]
    found = [protons.moved(acid, 3, 1, 2, rng) for _ in range(20)]
    found = [made.positions for made in found if made is not None]
    assert len(found) > 10 and min(np.linalg.norm(p[3] - p[0]) for p in found) >= protons.CLEAR


def test_ways_of_a_proton(scripts):
    """Pairs of places along the way, and no other atom moves; none without an acceptor that is near."""
    shards, protons = scripts("shards"), scripts("protons")
    start = malonaldehyde(shards)
    found = [g for seed in range(20) for g in protons.ways(start, np.random.default_rng(seed))]
    again = [g for seed in range(20) for g in protons.ways(start, np.random.default_rng(seed))]
    assert 40 < len(found) <= 20 * 2 * protons.PLACES
    line = (start.positions[0] - start.positions[4]) / 2.6
    for one, other, same in zip(found[::2], found[1::2], again[::2], strict=True):
        np.testing.assert_array_equal(one.positions, same.positions)
        for geometry in (one, other):
            np.testing.assert_array_equal(np.delete(geometry.positions, 5, 0), np.delete(start.positions, 5, 0))
        np.testing.assert_allclose(other.positions[5] - one.positions[5], protons.STEP * line, atol=1e-12)
        assert -0.12 < (one.positions[5] - start.positions[4]) @ line - 0.97 < 0.71
    reached = [(one.positions[5] - start.positions[4]) @ line for one in found]
    assert min(reached) < 1.1 < 1.5 < max(reached)
    assert protons.ways(malonaldehyde(shards, 3.0), np.random.default_rng(3)) == []
