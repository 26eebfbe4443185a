import itertools
import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torchmdnet2.data import AtomBatchSampler, InMemoryDataset, MoleculeBatchSampler, collate

from .frames import METHANE, WATER, make_sample, same

NUM_ATOMS = np.random.default_rng(0).integers(1, 30, 103).tolist()
MAKERS = {
    "molecules": lambda **kwargs: MoleculeBatchSampler(103, 10, **kwargs),
    "atoms": lambda **kwargs: AtomBatchSampler(NUM_ATOMS, 50, **kwargs),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def test_every_frame_once_per_epoch(make):
    sampler = make(seed=5)
    for epoch in range(3):
        batches = sampler.batches(epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(103))
        assert all(batches)


def test_order_is_a_function_of_seed_and_epoch(make):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    sampler = make(seed=5)
    late = sampler.batches(7)
    assert late != sampler.batches(8) and late != make(seed=6).batches(7)
    torch.manual_seed(1)
    assert make(seed=5).batches(7) == late
    torch.set_rng_state(before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert make(shuffle=False).batches(0) == make(shuffle=False).batches(1)
    assert [i for batch in make(shuffle=False).batches(0) for i in batch] == list(range(103))


def test_sizes_of_batches():
    assert {len(batch) for batch in MAKERS["molecules"]().batches(0)} == {9, 10}
    assert [len(batch) for batch in MoleculeBatchSampler(3, 10).batches(0)] == [3]
    batches = MAKERS["atoms"]().batches(0)
    atoms = [sum(NUM_ATOMS[i] for i in batch) for batch in batches]
    assert max(atoms) <= 50
    for batch, following in itertools.pairwise(batches):  # none could have taken one more
        assert sum(NUM_ATOMS[i] for i in batch) + NUM_ATOMS[following[0]] > 50
    alone = AtomBatchSampler([5, 200, 5], 50, shuffle=False)
    assert alone.batches(0) == [[0], [1], [2]]


def test_resuming_anywhere_gives_the_same_batches(make):
    whole, sampler = [], make(seed=2)
    while sampler.epoch < 3:
        batch = next(iter(sampler))
        whole.append(batch)
        sampler.step()
    for stop in range(0, len(whole), 5):
        first = make(seed=2)
        for _ in range(stop):
            first.step()
        state = json.loads(json.dumps(first.state_dict()))
        second = make(seed=2)
        second.load_state_dict(state)
        rest = []
        while second.epoch < 3:
            for batch in second:
                rest.append(batch)
                second.step()
        assert whole[:stop] + rest == whole


def test_length_is_what_is_left():
    sampler = MoleculeBatchSampler(10, 3)
    lengths = []
    for _ in range(5):
        assert len(list(sampler)) == len(sampler)
        lengths.append(len(sampler))
        sampler.step()
    assert lengths == [4, 3, 2, 1, 4] and (sampler.epoch, sampler.position) == (1, 1)


def test_a_state_of_other_settings_is_refused(make):
    state = make(seed=2).state_dict()
    with pytest.raises(ValueError, match="seed = 2, and now it is 3"):
        make(seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="num_frames"):
        MoleculeBatchSampler(99, 10, seed=2).load_state_dict(MoleculeBatchSampler(98, 10, seed=2).state_dict())


def test_settings_that_cannot_be():
    for make_bad in (
        lambda: MoleculeBatchSampler(0, 5),
        lambda: MoleculeBatchSampler(5, 0),
        lambda: AtomBatchSampler([], 5),
        lambda: AtomBatchSampler([3], 0),
    ):
        with pytest.raises(ValueError, match="at least"):
            make_bad()


def test_workers_do_not_change_the_epoch():
    """0 and 2 workers, with a stop in the middle: reading ahead must not move the position."""
    data = InMemoryDataset([make_sample(METHANE if k % 3 else WATER, seed=k) for k in range(30)])

    def epoch(num_workers, stop):
        sampler, batches = AtomBatchSampler([len(s.system.z) for s in data], 20, seed=4), []
        for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers):
            batches.append(batch)
            sampler.step()
            if len(batches) == stop:
                break
        resumed = AtomBatchSampler([len(s.system.z) for s in data], 20, seed=4)
        resumed.load_state_dict(sampler.state_dict())
        rest = DataLoader(data, batch_sampler=resumed, collate_fn=collate, num_workers=num_workers)
        return batches + (list(rest) if stop else [])

    reference = epoch(0, None)
    for num_workers, stop in ((0, 3), (2, None), (2, 3)):
        got = epoch(num_workers, stop)
        assert len(got) == len(reference) and all(same(a, b) for a, b in zip(reference, got, strict=True))
