"""The fused TensorNet2 kernels against the Potential in float64, by Triton's interpreter on the CPU (bar R3)."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import needs_triton, run_checks

pytestmark = pytest.mark.slow


@needs_triton
def test_steps_on_the_gpu():
    run_checks(Path(__file__).with_name("tensornet2_gpu_checks.py"))
