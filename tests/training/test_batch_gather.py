"""Batches that one kernel gathers, without a GPU: in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import needs_triton, run_checks

from torchmdnet2.training.steps.packed_frames import Capacity
from training.batch_gather_cases import random_frames


@needs_triton
@pytest.mark.slow
def test_kernel_in_the_interpreter():
    run_checks(Path(__file__).with_name("batch_gather_checks.py"))


def test_rows_of_edges_are_those_of_the_frames():
    """row_ptr, sender and pair of each frame, which the kernel is compared to, against the frame alone."""
    rng = np.random.default_rng(5)
    store = random_frames(rng, torch.float64, True, "cpu", largest=12)
    chosen = [4, -1, 9, 0, 4]
    need = store.size([k for k in chosen if k >= 0])
    batch = store.batch(torch.tensor(chosen), Capacity(5, need.atoms + 3, need.pairs + 2))
    atom = pair = 0
    for slot, k in enumerate(chosen):
        assert (int(batch.atom_ptr[slot]), int(batch.pair_ptr[slot])) == (atom, pair)
        if k < 0:
            continue
        one = store.batch(torch.tensor([k]), store.size([k]))
        atoms, pairs = one.forces.shape[0], one.r.shape[0]
        rows, edges = slice(atom, atom + atoms), slice(2 * pair, 2 * (pair + pairs))
        assert torch.equal(batch.z[rows], one.z[:atoms])
        assert torch.equal(batch.pairs.row_ptr[atom : atom + atoms + 1] - 2 * pair, one.pairs.row_ptr[: atoms + 1])
        assert torch.equal(batch.pairs.sender[edges] - atom, one.pairs.sender)
        signed = batch.pairs.pair[edges]
        assert torch.equal(torch.where(signed < 0, signed + pair, signed - pair), one.pairs.pair)
        assert (batch.structure[rows] == slot).all() and (batch.pair_structure[pair : pair + pairs] == slot).all()
        atom, pair = atom + atoms, pair + pairs
    assert (batch.pairs.row_ptr[atom:] == 2 * pair).all() and (batch.r[pair:] == 2 * store.cutoff).all()
    assert batch.forces[atom:].isnan().all() and int(batch.pairs.count) == pair == need.pairs


def test_room_for_another_number_of_frames_is_refused():
    store = random_frames(np.random.default_rng(0), torch.float32, False, "cpu", largest=3)
    with pytest.raises(ValueError, match="2 frames are chosen, and the capacity is 3"):
        store.batch(torch.tensor([0, 1]), Capacity(3, 99, 99))
