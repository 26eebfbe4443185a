"""Which frames are selected, and what the dynamics leave behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from tiny import ELEMENTS, ethanol, tiny_potential

from torchmdnet2 import System
from torchmdnet2.core.pipeline import devices_pool
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.learn import SELECTIONS
from torchmdnet2.learn.config import DynamicsConfig
from torchmdnet2.learn.loop import explore, force_spread
from torchmdnet2.learn.selection import (
    Trajectory,
    frames_of,
    keys_of,
    read_trajectories,
    seed_of,
    unlabelled,
    write_trajectories,
)
from torchmdnet2.md import stability

RNG = np.random.default_rng(0)


def trajectory(replica, spread, broken_at=None, step=0.05, regular=None):
    count = len(spread)
    return Trajectory(
        temperature=300.0, replica=replica, member=0, start=0, broken_at=broken_at,
        reason="" if broken_at is None else "a bond", time=step * np.arange(count),
        pos=np.arange(count)[:, None, None] + np.zeros((count, 2, 3)) + 100 * replica,
        regular=np.ones(count, dtype=bool) if regular is None else np.array(regular), spread=np.array(spread),
    )  # fmt: skip


def picked(choices):
    return [(c.run.replica, c.frame, c.reason) for c in choices]


def test_breaks_come_first_then_the_largest_spread():
    runs = [
        trajectory(0, [0.0, 0.3, 0.2, 0.5]),
        trajectory(1, [0.0, 0.1, 0.9], broken_at=0.2),
        trajectory(2, [0.0, 0.0], broken_at=0.1),
    ]
    select = SELECTIONS["disagreement"](lowest=0.2, highest=1.0, apart=0.0)
    every = picked(select(runs, 10, RNG))
    assert every[:2] == [(2, 1, "broken: a bond"), (1, 2, "broken: a bond")]  # the earliest break first
    assert every[2:] == [(0, 3, "disagreement"), (0, 1, "disagreement"), (0, 2, "disagreement")]
    assert picked(select(runs, 3, RNG)) == every[:3]


def test_frames_beyond_trust_and_near_duplicates_are_left_out():
    runs = [trajectory(0, [0.0, 0.5, 0.4, 3.0, 0.6], broken_at=0.3), trajectory(1, [5.0, 0.1, 4.0])]
    select = SELECTIONS["disagreement"](lowest=0.2, highest=1.0, apart=0.1)
    # replica 0 is trusted until 3.0; frame 1 is within 0.1 ps of frame 2. The first frame of replica 1 was given
    assert picked(select(runs, 10, RNG)) == [(0, 2, "broken: a bond"), (1, 0, "disagreement")]
    assert not SELECTIONS["disagreement"]()([trajectory(0, [0.0, 0.05])], 10, RNG)


def test_random_frames():
    runs = [trajectory(k, [0.0] * 20, regular=[True] * 19 + [False]) for k in range(5)]
    select = SELECTIONS["random"]()
    first, again = (picked(select(runs, 8, np.random.default_rng(3))) for _ in range(2))
    assert first == again and len(set(first)) == 8 and {reason for *_, reason in first} == {"random"}
    assert picked(select(runs, 8, np.random.default_rng(4))) != first
    assert len(select(runs, 1000, RNG)) == 95  # not the frames right before a break


def test_labelled_frames_are_recognised():
    starts = [Atoms("H2", [[0, 0, 0], [0, 0, 0]], info={"charge": 1, "energy": 3.0})]
    runs = [trajectory(0, [0.4, 0.5, 0.6])]
    known = keys_of([Atoms("H2", np.ones((2, 3)) + 1e-8)])
    (left,) = unlabelled(runs, starts, known)
    assert left.time.tolist() == [0.0, 0.1] and left.spread.tolist() == [0.4, 0.6] and left.replica == 0
    (frame,) = frames_of(SELECTIONS["disagreement"]()([left], 1, RNG), starts, 7)
    assert frame.info == {
        "charge": 1, "round": 7, "reason": "disagreement", "spread": 0.6, "temperature_K": 300.0, "time_ps": 0.1,
        "replica": 0, "start": 0,
    }  # fmt: skip
    assert (frame.positions == 2.0).all() and frame.calc is None


def test_trajectories_on_disk(tmp_path):
    runs = [trajectory(0, RNG.random(3)), trajectory(1, [], broken_at=0.0)]
    write_trajectories(tmp_path / "a.npz", runs)
    write_trajectories(tmp_path / "b.npz", runs)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    for found, expected in zip(read_trajectories(tmp_path / "a.npz"), runs, strict=True):
        for name, value in vars(expected).items():
            assert np.array_equal(getattr(found, name), value), name


def test_seeds_are_their_own():
    seeds = {
        seed_of(s, what, r, k) for s in (0, 1) for what in ("training", "dynamics") for r in (0, 1) for k in (0, 1)
    }
    assert len(seeds) == 16 and max(seeds) < 2**56 and seed_of(1, "training", 2, 3) == seed_of(1, "training", 2, 3)


@pytest.fixture(scope="module")
def committee():
    return Ensemble([tiny_potential(seed=k, noise=0.02, energy_scale=0.05) for k in (0, 1)])


def test_spread_is_that_of_the_ensemble(committee):
    frames = []
    for seed in range(3):
        atoms = ethanol()
        atoms.rattle(0.1, seed=seed)
        frames.append(atoms)
    found = force_spread(committee, System.from_ase(frames[0]), np.stack([atoms.positions for atoms in frames]))
    for value, atoms in zip(found, frames, strict=True):
        forces = torch.stack([potential(System.from_ase(atoms)).forces for potential in committee.members])
        expected = ((forces[0] - forces[1]).square().sum(1) / 2).sqrt().max()  # n − 1 of two members
        assert value == pytest.approx(float(expected), rel=1e-9)


def test_replicas_run_with_the_members_in_turn(committee):
    """Each as it would run with its member alone, from starts spread over the file."""
    from torchmdnet2.md import check_stability

    assert 6 in ELEMENTS
    water = Atoms("OHH", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    config = DynamicsConfig(temperatures=[50.0], time=0.03, replicas=3, every=0.01)
    (runs,) = explore(lambda device: committee, ["cpu"], [ethanol(), water], [50.0], config, seed=5)
    assert [(run.replica, run.member, run.start) for run in runs] == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    assert [run.pos.shape[1] for run in runs] == [9, 9, 3]
    alone = check_stability(committee.members[1], [ethanol()], [50.0], time=0.03, replicas=1, seed=6)
    assert alone.runs[0].whole == runs[1].whole and alone.runs[0].broken_at == runs[1].broken_at
    for run in runs:
        assert np.array_equal(run.pos[0], (ethanol() if run.start == 0 else water).positions)
        assert (np.diff(run.time) > 0).all() and len(run.spread) == len(run.time) == len(run.regular)
        if run.whole:
            np.testing.assert_allclose(run.time, [0, 0.01, 0.02, 0.03], atol=1e-12)
            assert run.regular.all() and (run.spread > 0).all()


def test_an_exploration_that_goes_on_has_the_same_batches(committee, monkeypatch):
    """At the temperatures that are left, as the sizes of batches change the rounding."""
    sizes, begin = [], stability.ReplicaBatch.__init__
    monkeypatch.setattr(
        stability, "devices_pool", lambda setup, devices, **_: devices_pool(setup, devices[:1], here=True)
    )
    monkeypatch.setattr(
        stability.ReplicaBatch, "__init__", lambda self, p, r, *more: sizes.append(len(r)) or begin(self, p, r, *more)
    )
    config = DynamicsConfig(temperatures=[50.0, 60.0], time=0.01, replicas=8, every=0.01)
    found = []
    for temperatures in ([50.0, 60.0], [60.0]):
        *_, last = explore(lambda device: committee, ["cpu"] * 4, [ethanol()], temperatures, config, seed=5)
        found.append(last)
    assert sizes == [4, 4] * 3
    for one, other in zip(*found, strict=True):
        assert one.temperature == 60.0 and np.array_equal(one.pos, other.pos)
