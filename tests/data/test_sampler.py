"""The order of an epoch: every frame once, evenly filled batches, the same on any number of devices."""

import numpy as np
import pytest
import torch

from torchmdnet2.data import epoch_batches, epoch_order, in_order
from torchmdnet2.data.splits import group_batches
from torchmdnet2.errors import BadData

RNG = np.random.default_rng(0)
ATOMS = RNG.integers(1, 30, 1003)
EDGES = ATOMS * RNG.integers(3, 20, 1003)
KINDS = {
    "molecules": {"batch_size": 10},
    "atoms": {"max_atoms": 200},
    "edges": {"max_edges": 3000},
    "both": {"max_atoms": 150, "max_edges": 2500},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def batches(kind, seed=5, epoch=0, **more):
    return epoch_batches(ATOMS, EDGES, seed=seed, epoch=epoch, **kind, **more)


def flat(parts):
    return [i for part in parts for i in part]


def test_every_frame_once_per_epoch(kind):
    for epoch in range(3):
        parts = batches(kind, epoch=epoch)
        assert sorted(flat(parts)) == list(range(1003)) and all(parts)


def test_order_is_a_function_of_seed_and_epoch(kind):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    late = batches(kind, epoch=7)
    assert late != batches(kind, epoch=8) and late != batches(kind, seed=6, epoch=7)
    torch.manual_seed(1)
    assert batches(kind, epoch=7) == late
    torch.set_rng_state(before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    together = {frozenset(part) for part in late} & {frozenset(part) for part in batches(kind, epoch=8)}
    assert not {part for part in together if len(part) > 1}  # other frames meet each other


def test_batches_of_frames_are_even():
    sizes = [len(part) for part in batches(KINDS["molecules"])]
    assert set(sizes) == {9, 10} and len(sizes) == 101
    assert [len(part) for part in epoch_batches(ATOMS[:3], EDGES[:3], seed=0, epoch=0, batch_size=10)] == [3]
    parts, at_random = batches(KINDS["molecules"]), epoch_order(1003, 10, 5, 0)
    for first in (0, 32, 64):  # windows of batches; from one to the next there is some chance
        even, uneven = (np.std([EDGES[part].sum() for part in p[first : first + 32]]) for p in (parts, at_random))
        assert even < uneven / 20


@pytest.mark.parametrize("name", ["atoms", "edges", "both"])
def test_budgets_are_kept_and_used(name):
    kind = KINDS[name]
    parts = batches(kind)
    atoms, edges = (np.array([values[part].sum() for part in parts]) for values in (ATOMS, EDGES))
    fill = np.maximum(atoms / kind.get("max_atoms", np.inf), edges / kind.get("max_edges", np.inf))
    assert fill.max() <= 1
    assert fill.mean() > 0.85


def test_frames_of_very_different_size():
    atoms = np.array([1000] * 5 + [900] * 5 + [10] * 600)
    parts = epoch_batches(atoms, atoms, seed=0, epoch=0, max_atoms=1000)
    assert sorted(flat(parts)) == list(range(610))
    assert max(atoms[part].sum() for part in parts) <= 1000 and len(parts) <= 18  # 15.5 full ones at least


def test_a_frame_that_is_too_large_is_named():
    with pytest.raises(
        BadData, match=rf"train\.xyz, frame {ATOMS.argmax()}: the frame has 29 atoms, but a batch at most 20"
    ):
        batches({"max_atoms": 20}, name="train.xyz, frame {}".format)
    with pytest.raises(BadData, match="raise max_edges, or leave out this frame"):
        batches({"max_edges": int(EDGES.max()) - 1, "max_atoms": 1000})
    assert batches({"max_atoms": 29})


@pytest.mark.parametrize("settings", [{}, {"batch_size": 5, "max_atoms": 100}])
def test_a_size_or_a_budget(settings):
    with pytest.raises(ValueError, match="batch_size, or else"):
        batches(settings)


def test_batches_of_groups():
    """Each group once, as a whole, with room for its frames; about as many edges in each batch of a window."""
    frames = RNG.integers(1, 25, 2000)
    edges = frames * RNG.integers(30, 1000, 2000)
    parts = group_batches(frames, edges, seed=1, epoch=2, batch_size=192)
    assert sorted(flat(parts)) == list(range(2000))
    sizes, costs = (np.array([values[part].sum() for part in parts]) for values in (frames, edges))
    assert sizes.max() <= 192 and sizes.mean() > 180
    assert all(np.std(costs[k : k + 32]) < 0.02 * costs.mean() for k in (0, 32, 64))
    assert parts == group_batches(frames, edges, seed=1, epoch=2, batch_size=192)
    assert parts != group_batches(frames, edges, seed=1, epoch=3, batch_size=192)
    assert group_batches(np.array([5]), np.array([9]), seed=0, epoch=0, batch_size=5) == [[0]]


def test_without_balance():
    order = epoch_order(103, 10, seed=3, epoch=7)
    assert sorted(flat(order)) == list(range(103)) and {len(part) for part in order} == {9, 10}
    assert order == epoch_order(103, 10, 3, 7) != epoch_order(103, 10, 3, 8)
    assert in_order(5, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.slow
def test_many_frames_are_ordered_in_seconds():
    import time

    atoms = RNG.integers(15, 51, 300_000)
    for kind in KINDS.values():
        start = time.process_time()
        parts = epoch_batches(atoms, 18 * atoms, seed=0, epoch=0, **kind)
        seconds = time.process_time() - start
        print(f"{kind}: {len(parts)} batches in {seconds:.1f} s")
        assert sum(map(len, parts)) == 300_000 and seconds < 10
