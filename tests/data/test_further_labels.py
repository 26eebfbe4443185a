"""Labels beyond the built-in ones say their shape in their name: "scalar:gap", "atom_scalar:shift"."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.io import write

from torchmdnet2.data import collate, open_dataset, write_hdf5
from torchmdnet2.errors import BadData

KEYS = {"scalar:gap": "gap", "atom_scalar:shift": "shift", "dipole": "mu"}


@pytest.fixture
def file(tmp_path):
    frames = []
    for k, name in enumerate(["H2O", "CH4", "H2"]):
        atoms = molecule(name)
        atoms.info.update(gap=0.1 * k + 1, mu=[1.0, 2.0, k])
        atoms.arrays["shift"] = np.arange(len(atoms)) * 1.0
        if k == 2:
            del atoms.info["gap"]
        frames.append(atoms)
    write(tmp_path / "l.xyz", frames, format="extxyz")
    return tmp_path / "l.xyz"


def test_read_converted_and_written_back(file, tmp_path):
    data = open_dataset(file, keys=KEYS, units={"scalar:gap": "hartree"})
    batch = collate(list(data))
    gap = batch.labels["scalar:gap"]
    assert gap[:2].tolist() == pytest.approx([27.211386245988, 1.1 * 27.211386245988], rel=1e-12)
    assert torch.isnan(gap[2])
    assert batch.labels["atom_scalar:shift"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    write_hdf5(tmp_path / "l.h5", list(data))
    again = collate(list(open_dataset(tmp_path / "l.h5", keys={**KEYS, "dipole": "dipole"})))
    assert again.labels.keys() == batch.labels.keys()
    for name, value in batch.labels.items():
        assert torch.equal(value.nan_to_num(7.0), again.labels[name].nan_to_num(7.0)), name


def test_mistakes_are_named(file):
    with pytest.raises(BadData, match="unknown label 'scalr:gap'"):
        open_dataset(file, keys={"scalr:gap": "gap"})
    with pytest.raises(BadData, match="no frame has 'gapp', which is the key of gap, did you mean 'gap'"):
        open_dataset(file, keys={"scalar:gap": "gapp"})
    with pytest.raises(BadData, match="unknown unit 'hartre'"):
        open_dataset(file, keys=KEYS, units={"scalar:gap": "hartre"})
    with pytest.raises(BadData, match="atom_scalar:gap has the shape"):
        open_dataset(file, keys={"atom_scalar:gap": "gap"})
