"""The interpreter that the checks of kernels use computes what Triton's own does, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from interpreter import needs_triton


@needs_triton
def test_the_same_bits():
    cases = Path(__file__).with_name("interpreter_cases.py")
    run = subprocess.run(
        [sys.executable, str(cases)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
