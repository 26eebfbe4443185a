"""The training kernels against plain PyTorch to the second derivative, by Triton's interpreter in float64 (bar R3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernels need triton")

NAMES = [
    "inner", "norms", "scale", "mix", "product O(3)", "product SO(3)", "pair sum", "message", "embedding",
    "segment sum", "silu", "enveloped True", "enveloped False", "expnorm from 0.0", "expnorm from 0.5",
    "gauss from 0.0", "gauss from 0.5", "normalise", "add square",
]  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    # the interpreter is chosen when triton is imported, so it needs a process of its own
    script = Path(__file__).with_name("forms_checks.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_value_and_derivatives(cases, name):
    case = cases[name]
    assert case["value"] < 1e-13, case
    assert case["first"] < 1e-13, case
    assert case["second"] < 1e-12, case
