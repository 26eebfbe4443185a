"""Fused steps without a GPU: the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import needs_triton, run_checks


@needs_triton
@pytest.mark.slow
def test_steps_in_the_interpreter():
    run_checks(Path(__file__).with_name("step_checks.py"))
