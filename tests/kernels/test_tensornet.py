"""The fused TensorNet kernels against the Potential in float64, by Triton's interpreter on the CPU (bar R3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernels need triton")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases():
    # the interpreter is chosen when triton is imported, so it needs a process of its own
    script = Path(__file__).with_name("fused_checks.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_cases_ran(cases):
    assert len(cases) == 7


def test_energies(cases):
    assert max(c["energy"] for c in cases) < 2e-6, cases


def test_forces_are_float32_accurate(cases):
    # eager float32 is printed beside: the two are alike, and which is closer is chance on so few atoms
    for c in cases:
        assert c["forces"] <= 3e-6 * max(1.0, c["largest_force"]), c


def test_stress(cases):
    stresses = [c["stress"] for c in cases if "stress" in c]
    assert len(stresses) == 5 and max(stresses) < 1e-5, cases
