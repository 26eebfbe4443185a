"""A small world for the training tests: H, C, O molecules with Morse bonds between all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run import start

REFERENCES = {1: -13.5, 6: -1030.0, 8: -2040.0}  # eV


def morse(numbers, positions):
    """Energy in eV and forces in eV/Å of Morse pairs on top of reference energies."""
    delta = positions[None] - positions[:, None]
    r = np.linalg.norm(delta, axis=-1) + np.eye(len(numbers))
    depth = 0.4 + 0.05 * np.sqrt(np.outer(numbers, numbers))
    np.fill_diagonal(depth, 0)
    e = np.exp(-1.5 * (r - 1.4))
    energy = (depth * (e * e - 2 * e)).sum() / 2 + sum(REFERENCES[z] for z in numbers)
    slope = depth * (-3.0 * e * e + 3.0 * e)
    return energy, (slope[:, :, None] * delta / r[:, :, None]).sum(1)


def make_frames(count, seed=0):
    """Random molecules of 3 to 5 atoms as ase.Atoms with labels."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    rng = np.random.default_rng(seed)
    corners = 1.2 * np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    frames = []
    for _ in range(count):
        size = rng.integers(3, 6)
        numbers = np.array([6, 1, 8, 1, 1])[:size] if rng.random() < 0.5 else np.array([8, 1, 1, 6, 1])[:size]
        atoms = Atoms(numbers, corners[:size] + rng.normal(0, 0.08, (size, 3)))
        energy, forces = morse(numbers, atoms.positions)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        frames.append(atoms)
    return frames


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    """32 labelled frames as extxyz."""
    from ase.io import write

    path = tmp_path_factory.mktemp("data") / "morse.xyz"
    write(path, make_frames(32), format="extxyz")
    return path


@pytest.fixture
def raw_config(data_file, tmp_path):
    """A configuration that trains in about a second, as plain data."""
    return {
        "data": {"train": str(data_file), "split": {"validation": 6, "test": 6}},
        "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "training": {
            "batch_size": 5,
            "max_epochs": 3,
            "lr": 5e-3,
            "warmup_steps": 4,
            "device": "cpu",
            "num_threads": 1,
        },
        "output": {"folder": str(tmp_path / "run"), "report": False},
    }


@pytest.fixture
def config(raw_config):
    return parse_config(raw_config)


@pytest.fixture
def without_notes(monkeypatch):
    """Trainings do not look for doubtful labels, which takes a part of the time; test_data_notes.py has it."""
    monkeypatch.setattr(start, "data_notes", lambda *_: [])
