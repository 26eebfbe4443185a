"""Batches: joined neighbor lists equal a fresh search, and gathered batches equal joined frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchmdnet2.data import CachedDataset, collate, open_dataset
from torchmdnet2.errors import BadData
from torchmdnet2.neighbors import NeighborList, neighbor_list
from torchmdnet2.system import System
from torchmdnet2.training.config.config import TrainingConfig
from torchmdnet2.training.steps.batches import (
    Batch,
    Frames,
    Loader,
    in_order,
    measured_batches,
    most_frames,
    training_batches,
)


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


KEYS = {"energy": "energy", "forces": "forces"}
ORDER = [[4, 1], [0, 2, 3, 5], [5], [1, 1]]


@pytest.fixture(params=["memory", "no room", "cache", "cache without lists"])
def frames(request, data_file, tmp_path, monkeypatch):
    """Frames 3 … 8 of the file, however they are kept."""
    kept = request.param.startswith("cache")
    data = open_dataset(str(data_file), KEYS, cache=tmp_path / "cache" if kept else "off")
    assert isinstance(data, CachedDataset) == kept
    if request.param == "cache without lists":
        monkeypatch.setattr(CachedDataset, "edges", lambda self, cutoff: (_ for _ in ()).throw(PermissionError()))
    return Frames(data, range(3, 9), 3.0, cache_bytes=0 if request.param == "no room" else 2**20)


def equal(a, b):
    labels = a.sample.labels.keys() == b.sample.labels.keys() and all(
        torch.equal(a.sample.labels[n].nan_to_num(-9.0), b.sample.labels[n].nan_to_num(-9.0)) for n in a.sample.labels
    )
    systems = all(torch.equal(x, getattr(b.sample.system, n)) for n, x in vars(a.sample.system).items())
    return labels and systems and same(a.neighbors, b.neighbors) and a.frames == b.frames


def join(parts):
    """Several batches as one, in order."""
    return Batch(
        collate([part.sample for part in parts]),
        NeighborList.concatenate([part.neighbors for part in parts]),
        [index for part in parts for index in part.frames],
    )


def test_batches_equal_joined_frames(frames):
    """Gathered at once, gathered again from what was kept, and read by workers: all equal to the reference."""
    expected = [join([frames[position] for position in batch]) for batch in ORDER]
    for batch, positions in zip(expected, ORDER, strict=True):
        assert batch.frames == [3 + p for p in positions]
        assert same(batch.neighbors, neighbor_list(batch.sample.system, 3.0))
    for loader in (Loader(frames), Loader(frames), Loader(frames, num_workers=2)):
        for _ in range(2):
            found = list(loader(ORDER))
            assert len(found) == len(ORDER) and all(map(equal, found, expected))
    assert frames.atoms.tolist() == [frames[k].sample.system.num_atoms for k in range(6)]
    assert frames.edges.tolist() == [frames[k].neighbors.num_edges for k in range(6)]
    assert frames.name(2).endswith("morse.xyz, frame 5")


def test_workers_leave_random_numbers_alone(frames):
    state = torch.get_rng_state()
    list(Loader(frames, num_workers=2)(ORDER))
    assert torch.equal(state, torch.get_rng_state())


def test_training_batches_follow_the_configuration(frames):
    by_size = TrainingConfig(batch_size=4, seed=3)
    by_atoms = TrainingConfig(max_atoms=9)
    for config in (by_size, by_atoms):
        parts = training_batches(frames, config, epoch=2)
        assert sorted(i for part in parts for i in part) == list(range(6))
    assert [len(part) for part in training_batches(frames, by_size, 0)] == [3, 3]
    assert all(frames.atoms[part].sum() <= 9 for part in training_batches(frames, by_atoms, 0))
    for config in (by_size, by_atoms, TrainingConfig(max_edges=20, max_atoms=100)):
        assert max(map(len, training_batches(frames, config, 0))) <= most_frames(frames, config) <= 6
    with pytest.raises(BadData, match=r"morse\.xyz, frame \d: the frame has \d atoms, .* raise max_atoms"):
        training_batches(frames, TrainingConfig(max_atoms=2), 0)


@pytest.mark.slow
def test_speed(tmp_path):
    """Molecules of 15 to 50 atoms, 2 atoms of which see about 30 others, from a cache on disk."""
    import time

    from torchmdnet2.data import Sample
    from torchmdnet2.data.cache import write_cache
    from torchmdnet2.data.reader import Chunk

    rng = np.random.default_rng(0)

    def chunks():
        for first in range(0, 10_000, 500):
            sizes = rng.integers(15, 51, 500)
            batch = np.repeat(np.arange(500), sizes)
            pos = torch.from_numpy(rng.normal(size=(len(batch), 3)) * (sizes[batch, None] / 0.1) ** (1 / 3) / 2.5)
            system = System(z=torch.full((len(batch),), 6), pos=pos, batch=torch.from_numpy(batch))
            labels = {"energy": torch.from_numpy(rng.normal(size=500)), "forces": torch.randn(len(batch), 3).double()}
            yield Chunk(Sample(system, labels), "random", first)

    write_cache(tmp_path / "cache", chunks())
    frames = Frames(CachedDataset(tmp_path / "cache"), range(10_000), 5.0)
    order = training_batches(frames, TrainingConfig(batch_size=64), 0)
    loader, rate = Loader(frames, 0), 0.0
    for _ in range(3):  # the first epoch checks every block
        start = time.process_time()
        count = sum(batch.sample.system.num_systems for batch in loader(order))
        rate = max(rate, count / (time.process_time() - start))
    print(f"{frames.edges.mean() / frames.atoms.mean():.0f} neighbors; {rate:.0f} molecules per processor second")
    assert rate > 10_000


def test_errors_are_measured_within_the_budget(data_file):
    frames = Frames(open_dataset(data_file, {"energy": "energy"}), range(20), 3.0)
    assert measured_batches(frames, TrainingConfig(batch_size=4)) == in_order(20, 8)
    for budget, values in (({"max_atoms": 6}, frames.atoms), ({"max_edges": 30}, frames.edges)):
        batches = measured_batches(frames, TrainingConfig(batch_size=16, **budget))
        (most,) = budget.values()
        assert [k for batch in batches for k in batch] == list(range(20))
        assert max(values[batch].sum() for batch in batches) <= 2 * most and max(map(len, batches)) > 1
    assert measured_batches(frames, TrainingConfig(max_atoms=1)) == [[k] for k in range(20)]
