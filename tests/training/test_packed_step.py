"""A training step on the kernels of the GPU against plain PyTorch, in Triton's interpreter; tests/gpu captures it."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import needs_triton, run_checks

CHECKS = Path(__file__).with_name("packed_step_checks.py")


@needs_triton
def test_tensornet2_in_the_interpreter():
    run_checks(Path(f"{CHECKS}::test_kernels_equal_plain_pytorch[tensornet2 with priors]"))


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter():
    run_checks(CHECKS)
