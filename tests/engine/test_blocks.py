"""Steps in blocks without a GPU: the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import needs_triton, run_checks

from torchmdnet2 import Evaluator, Potential


@needs_triton
@pytest.mark.slow
def test_blocks_in_the_interpreter():
    run_checks(Path(__file__).with_name("block_checks.py"))


def test_blocks_need_a_gpu():
    potential = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 32, "max_z": 10}})
    with pytest.raises(ValueError, match=r"block_atoms=1000: blocks are evaluated by kernels for a GPU; take .*=None"):
        Evaluator(potential, block_atoms=1000)
    with pytest.raises(ValueError, match="block_atoms must be a positive number of atoms or None, got 0"):
        Evaluator(potential, block_atoms=0)
    with pytest.raises(ValueError, match="block_atoms must be a positive number of atoms or None, got True"):
        Evaluator(potential, block_atoms=True)


@needs_triton
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_a_plane_with_one_atom_far_away_is_cut(noise):
    """Most atoms have the same, smallest coordinate along the longest extent."""
    from torchmdnet2.engine.blocks import _cut

    side = torch.arange(6.0, dtype=torch.float64)
    plane = torch.cartesian_prod(torch.zeros(1).double(), side, side)
    pos = torch.cat([plane + noise * torch.rand(plane.shape), torch.tensor([[40.0, 0, 0]])]).double()
    boxes = torch.tensor(_cut(pos, [-torch.inf] * 3, [torch.inf] * 3, torch.ones(3), 8))
    low, high = boxes[:, None, :3], boxes[:, None, 3:]
    counts = ((pos >= low) & (pos < high)).all(2).sum(1)
    assert counts.sum() == 37 and counts.max() <= 12  # rows of the plane have 6


@needs_triton
def test_atoms_at_one_place_are_not_cut():
    from torchmdnet2.engine.blocks import _cut

    assert _cut(torch.zeros(5, 3), [0.0] * 3, [1.0] * 3, torch.ones(3), 3) == [[0.0] * 3 + [1.0] * 3]
