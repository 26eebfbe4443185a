"""The kernels of AIMNet2 against the Potential in float64, by Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import needs_triton, run_checks

pytestmark = pytest.mark.slow


@needs_triton
def test_steps_on_the_gpu():
    run_checks(Path(__file__).with_name("aimnet2_gpu_checks.py"))
