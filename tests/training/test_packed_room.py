"""Capacity of captured steps: a batch as large as on a GPU gives what one of the exact size gives, with all lists."""

from __future__ import annotations

import numpy as np
import torch

from torchmdnet2 import System
from torchmdnet2.neighbors.pairs import all_pairs
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.packed_frames import EdgeRows


def test_room_for_lists_of_charges(raw_config):
    raw_config["properties"] = [{"name": "charges"}]
    raw_config["priors"] = [{"name": "atomref", "energies": "fit"}, {"name": "coulomb", "damping": "exp"}]
    raw_config["training"].update(device="cpu", precision="float64")
    trainer = make_trainer(make_setup(parse_config(raw_config)), None)
    assert pack_trainer(trainer) is None and trainer.packed is not None
    step, network = trainer.packed.step, trainer.packed.training.network
    chosen = [3, 0, 7]
    need = step.store.size(chosen)
    step._cuda = True  # sizes as on a GPU
    capacity = step.capacity(chosen)
    assert (
        capacity.edges
        and all(r > n for r, n in zip(capacity.edges, need.edges, strict=True))
        and capacity.frames > len(chosen)
    )
    padded = torch.tensor(chosen + [-1] * (capacity.frames - len(chosen)))
    found = network(step.store.batch(padded, capacity))
    exact = network(step.store.batch(torch.tensor(chosen), need))
    assert float((found.energy[:3] - exact.energy[:3]).abs().max()) < 1e-10
    assert float((found.forces[: need.atoms] - exact.forces[: need.atoms]).abs().max()) < 1e-10


def test_rows_of_all_pairs():
    """Those of molecules are made by size; they are the rows of the list that priors get, in its order."""
    sizes = np.array([3, 1, 5, 3])
    batch = np.repeat(np.arange(4), sizes)
    system = System(torch.ones(12, dtype=torch.long), torch.randn(12, 3), torch.from_numpy(batch))
    rows, wanted = EdgeRows.of_all_pairs(sizes), EdgeRows.of_list(all_pairs(system), batch, 4)
    assert np.array_equal(rows.rows, wanted.rows) and rows.rows.dtype == wanted.rows.dtype == np.int32
    assert rows.count.tolist() == wanted.count.tolist() == [6, 0, 20, 6]
