"""scripts/organic/shards.py: files of geometries, and settings that are kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
from organic_world import molecules


def test_shards(scripts, tmp_path):
    shards, given = scripts("shards"), molecules(scripts)
    assert shards.write_shard(tmp_path / "a.npz", given) == 7
    for found, wanted in zip(shards.read_shard(tmp_path / "a.npz"), given, strict=True):
        assert found.name == wanted.name and found.charge == wanted.charge
        assert np.array_equal(found.numbers, wanted.numbers)
        assert np.abs(found.positions - (wanted.positions - wanted.positions.mean(0))).max() <= 0.00051
    with pytest.raises(ValueError, match="larger than 64"):
        shards.write_shard(tmp_path / "b.npz", [given[0]._replace(positions=np.eye(3) * 60)])
    assert not (tmp_path / "b.npz").exists()
    assert shards.write_shard(tmp_path / "c.npz", []) == 0 and not list(shards.read_shard(tmp_path / "c.npz"))


def test_settings_are_kept(scripts, tmp_path):
    shards = scripts("shards")
    shards.keep_settings(tmp_path, "labels", {"seed": 1}, ["numpy", "not-a-package"])
    shards.keep_settings(tmp_path, "labels", {"seed": 1}, ["numpy", "not-a-package"])
    known = json.loads((tmp_path / "labels.json").read_text())
    assert known["versions"] == [{"numpy": np.__version__, "not-a-package": "not installed"}]
    with pytest.raises(SystemExit, match="other settings"):
        shards.keep_settings(tmp_path, "labels", {"seed": 2}, ["numpy"])
