"""Potentials without fused kernels as steps over static buffers, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import needs_triton, run_checks


@needs_triton
@pytest.mark.slow
def test_autograd_steps_in_the_interpreter():
    run_checks(Path(__file__).with_name("autograd_checks.py"))
