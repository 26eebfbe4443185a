"""Replicas side by side are what separate runs would give."""

from __future__ import annotations

import numpy as np
import pytest
from ase.build import molecule
from ase.constraints import FixAtoms
from ase.io import read

from torchmdnet2.errors import BadConfig
from torchmdnet2.md import MDOptions, Unphysical, run_md


def options(tmp_path, steps=20, name="run", **more):
    return MDOptions(steps=steps, output=str(tmp_path / name), every=10, **more)


@pytest.mark.parametrize(("ensemble", "fixed"), [("nve", False), ("nvt", True)])
def test_replicas_are_separate_runs(potential, water, tmp_path, ensemble, fixed):
    """float64 on the CPU: to rounding."""
    if fixed:
        water.set_constraint(FixAtoms([0]))
    together = run_md(potential, water, options(tmp_path, replicas=2, seed=4, ensemble=ensemble))
    assert len(together.replicas) == 2
    for k, replica in enumerate(together.replicas):
        alone = run_md(potential, water, options(tmp_path, name="alone", seed=4 + k, ensemble=ensemble))
        np.testing.assert_allclose(replica.atoms.positions, alone.atoms.positions, rtol=0, atol=1e-12)
        np.testing.assert_allclose(replica.atoms.get_momenta(), alone.atoms.get_momenta(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.array(replica.rows), np.array(alone.rows), rtol=1e-10, atol=1e-12)
        ours, theirs = read(tmp_path / f"run.{k}.xyz", ":"), read(tmp_path / "alone.xyz", ":")
        for a, b in zip(ours, theirs, strict=True):
            assert a.info["step"] == b.info["step"]
            np.testing.assert_allclose(a.get_forces(), b.get_forces(), atol=1e-7)
    first, second = (replica.atoms.positions for replica in together.replicas[:2])
    assert np.abs(first - second).max() > 1e-3


def test_files_and_restart(model_file, water, tmp_path):
    for name, parts in (("once", [30]), ("twice", [13, 30])):
        for k, steps in enumerate(parts):
            files = (str(tmp_path / f"{name}.traj"), str(tmp_path / f"{name}.dcd"))
            o = options(tmp_path, steps, name, replicas=2, ensemble="nvt", restart=k > 0, trajectories=files)
            result = run_md(model_file, water, o)
    kinds = [f"{k}.{kind}" for k in range(2) for kind in ("traj", "dcd", "csv")]
    assert {p.name for p in result.files} == {f"twice.{kind}" for kind in (*kinds, "png", "restart")}
    for k in range(2):
        once, twice = (read(tmp_path / f"{name}.{k}.traj", -1) for name in ("once", "twice"))
        assert np.array_equal(once.positions, twice.positions)
        assert np.array_equal(once.get_momenta(), twice.get_momenta())
        assert len(result.replicas[k].rows) == 5  # 0, 10, 13, 20, 30
    with pytest.raises(BadConfig, match="replicas"):
        run_md(model_file, water, options(tmp_path, 40, "twice", replicas=3, ensemble="nvt", restart=True))


def test_the_replica_that_explodes_is_named(potential, water, tmp_path, monkeypatch, host):
    advance = host.advance

    def wrong(self, steps):
        for _ in range(steps):
            advance(self, 1)
            if self._state.step == 14:
                self._state.forces[4] += 300.0
                self._state.vel[4] += 1.0  # so that it is still wrong when the block ends

    monkeypatch.setattr(host, "advance", wrong)
    with pytest.raises(Unphysical, match=r"step 14: .*atom 1 \(H\) of replica 1"):
        run_md(potential, water, options(tmp_path, replicas=3))
    for k in range(3):
        assert [f.info["step"] for f in read(tmp_path / f"run.{k}.xyz", ":")] == [0, 10, 13]


def test_start_velocities_are_for_one(potential, tmp_path):
    """Several replicas would all do the same."""
    water = molecule("H2O")
    water.set_momenta(np.eye(3))
    result = run_md(potential, water, options(tmp_path, steps=0, replicas=2))
    first, second = (replica.atoms.get_momenta() for replica in result.replicas)
    assert not np.allclose(first, np.eye(3)) and not np.allclose(first, second)
