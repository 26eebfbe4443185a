"""A run of active learning that takes seconds."""

from __future__ import annotations

import pytest
from ase.io import write
from learn_world import labelled, raw_config, water_like


@pytest.fixture(scope="session")
def start_file(tmp_path_factory):
    """Eight labelled frames."""
    path = tmp_path_factory.mktemp("learn") / "morse.xyz"
    write(path, [labelled(water_like(seed)) for seed in range(8)], format="extxyz")
    return path


@pytest.fixture
def raw_learn(start_file, tmp_path):
    """A configuration whose rounds take about a second each, as plain data."""
    return raw_config(start_file, tmp_path / "learn")
