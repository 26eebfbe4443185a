"""Steps in blocks without a GPU: the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
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
