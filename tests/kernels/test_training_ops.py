"""The training kernels against plain PyTorch to the second derivative, by Triton's interpreter in float64 (bar R3)."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import printed_cases

pytest.importorskip("triton", reason="the GPU kernels need triton")

NAMES = [
    "inner", "norms", "scale", "mix", "product O(3)", "product SO(3)", "pair sum", "message", "embedding",
    "segment sum", "silu", "enveloped True", "enveloped False", "expnorm from 0.0", "expnorm from 0.5",
    "gauss from 0.0", "gauss from 0.5", "knots from 0.0", "knots from 0.5", "interpolation", "normalise", "add square",
    "edge sum", "edge message",
]  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    return {case["name"]: case for case in printed_cases(Path(__file__).with_name("ops_checks.py"))}


@pytest.mark.parametrize("name", NAMES)
def test_value_and_derivatives(cases, name):
    case = cases[name]
    assert case["value"] < 1e-13, case
    assert case["first"] < 1e-13, case
    assert case["second"] < 1e-12, case
