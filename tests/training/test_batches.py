"""Batches: joined neighbor lists equal a fresh search; the order depends on (seed, epoch) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchmdnet2.neighbors import NeighborList, neighbor_list
from torchmdnet2.system import System
from torchmdnet2.training.batches import epoch_order, in_order


def mixed_systems():
    from ase import Atoms
    from ase.build import bulk, molecule

    crystal = bulk("NaCl", "rocksalt", a=5.6)
    crystal.rattle(0.1, seed=0)
    slab = crystal.copy()
    slab.pbc = (True, True, False)
    return [molecule("CH3CH2OH"), crystal, Atoms("He"), slab, molecule("H2O"), Atoms("CO", [[0, 0, 0], [9, 0, 0]])]


def same(a, b):
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("edge_index", "shift", "row_ptr"))


@pytest.mark.parametrize("half", [False, True])
def test_joined_lists_equal_a_fresh_search(half):
    systems = [System.from_ase(atoms) for atoms in mixed_systems()]
    rng = np.random.default_rng(0)
    for _ in range(10):
        chosen = [systems[i] for i in rng.integers(0, len(systems), rng.integers(1, 7))]
        joined = NeighborList.concatenate([neighbor_list(s, 4.0, half=half) for s in chosen])
        fresh = neighbor_list(System.concatenate(chosen), 4.0, half=half)
        assert joined.num_edges > 0 or len(chosen) < 3
        assert same(joined, fresh)
        assert (joined.cutoff, joined.half) == (fresh.cutoff, fresh.half)


def test_lists_that_do_not_belong_together_are_refused():
    system = System.from_ase(mixed_systems()[0])
    with pytest.raises(ValueError, match="cannot be joined"):
        NeighborList.concatenate([neighbor_list(system, 4.0), neighbor_list(system, 5.0)])
    with pytest.raises(ValueError, match="at least one"):
        NeighborList.concatenate([])


def test_order_is_a_function_of_seed_and_epoch():
    state = torch.get_rng_state()
    order = epoch_order(103, 10, seed=3, epoch=7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    assert epoch_order(103, 10, seed=3, epoch=7) == order
    assert epoch_order(103, 10, seed=3, epoch=8) != order
    assert epoch_order(103, 10, seed=4, epoch=7) != order
    assert sorted(i for batch in order for i in batch) == list(range(103))
    assert {len(batch) for batch in order} == {9, 10}
    assert in_order(5, 2) == [[0, 1], [2, 3], [4]]


def test_frames_keep_their_lists_within_the_room(data_file):
    from torchmdnet2.data import open_dataset
    from torchmdnet2.training.batches import Frames, Loader

    data = open_dataset(str(data_file), keys={"energy": "energy", "forces": "forces"})
    order = [[4, 1], [0, 2, 3]]
    plenty, none = Frames(data, range(3, 9), 3.0), Frames(data, range(3, 9), 3.0, cache_bytes=0)
    for frames in (plenty, none):
        for batch, positions in zip(Loader(frames)(order), order, strict=True):
            assert batch.frames == [3 + p for p in positions]
            assert same(batch.neighbors, neighbor_list(batch.sample.system, 3.0))
    assert plenty[2] is plenty[2]
    assert none[2] is not none[2]
