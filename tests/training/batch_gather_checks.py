"""The kernel that gathers batches against PyTorch, to the bit. Run by test_batch_gather.py in a process of its own:
TRITON_INTERPRET must be set before triton is first imported. The same checks run on a GPU
(tests/gpu/test_training_gpu.py).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from torchmdnet2.training.steps import packed_frames
from torchmdnet2.training.steps.packed_frames import Capacity
from training.batch_gather_cases import assert_same, random_batches, random_frames

assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.fixture
def filled():
    """New tensors hold NaN and the largest integers, so that what is not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dtype", "stress", "chunk"), [(torch.float32, True, 16), (torch.float64, False, 128)])
def test_the_kernel_gathers_what_pytorch_does(filled, monkeypatch, dtype, stress, chunk):
    """In chunks of 16, rows of a frame and sums over slots take several turns."""
    monkeypatch.setattr(packed_frames, "CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    store = random_frames(rng, dtype, stress, "cpu", largest=30)
    assert store.num_atoms.max() > 16 and store.num_pairs.max() > 128 and store.num_pairs.min() == 0
    assert torch.isnan(store._unwritten(Capacity(2, 3, 4)).forces).all()
    for chosen, capacity in random_batches(rng, store, most=34):
        index = torch.tensor(chosen)
        assert_same(store.kernel_batch(index, capacity), store.reference_batch(index, capacity))


def test_nothing_is_written_beyond_the_room(monkeypatch):
    """A capacity that is too small breaks the contract, but no memory."""
    rng = np.random.default_rng(3)
    store = random_frames(rng, torch.float64, True, "cpu", largest=20)
    chosen = torch.tensor([0, 3, 0, 5])
    capacity = Capacity(4, 25, 30)
    need = store.size(chosen.tolist())
    assert need.atoms > capacity.atoms and need.pairs > capacity.pairs
    guard = 64
    made, behind = store._unwritten(capacity), []

    def guarded(x):
        memory = torch.full((x.numel() + guard,), 77, dtype=x.dtype)
        behind.append(memory[x.numel() :])
        return memory[: x.numel()].view(x.shape)

    for each in (made, made.pairs):
        for name, x in vars(each).items():
            if isinstance(x, torch.Tensor):
                setattr(each, name, guarded(x))
    monkeypatch.setattr(store, "_unwritten", lambda capacity: made)
    store.kernel_batch(chosen, capacity)
    assert len(behind) == 18 and all((x == 77).all() for x in behind)
