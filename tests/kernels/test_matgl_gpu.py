"""matgl's TensorNet on the fused kernels against the Potential in float64, by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from interpreter import printed_cases

pytest.importorskip("triton", reason="the GPU kernels need triton")

from torchmdnet2 import Potential
from torchmdnet2.engine.select import unsupported_reason


@pytest.fixture(scope="module")
def cases():
    return printed_cases(Path(__file__).with_name("matgl_gpu_checks.py"))


@pytest.mark.slow
def test_agrees_with_the_potential(cases):
    """Energies to 2e-6 eV, forces to 3e-6 of the largest, stress to 1e-5: as TensorNet's kernels."""
    assert len(cases) == 4 + 2 * ("TORCHMDNET2_MATGL" in os.environ)
    for c in cases:
        size = max(1.0, c["largest_force"])
        assert c["energy"] <= 2e-6 * size and c["forces"] <= 3e-6 * size and c.get("stress", 0) < 1e-5, c
    assert max(c["largest_force"] for c in cases) > 0.1


@pytest.mark.parametrize(
    ("model", "head", "words"),
    [
        ({}, {"name": "gated_scalar"}, ""),
        ({"messages": "own"}, {"name": "gated_scalar"}, "receiver's own"),
        ({"activation": "tanh"}, {"name": "gated_scalar"}, "silu"),
        ({}, {"name": "gated_scalar", "activation": "tanh"}, "silu"),
        ({}, {"name": "scalar"}, "ScalarHead"),
    ],
)
def test_what_the_kernels_cover(model, head, words):
    potential = Potential.from_config({"model": {"name": "matgl_tensornet", **model}, "head": head})
    reason = unsupported_reason(potential)
    assert words in reason and bool(words) == bool(reason)
    assert "no compiled kernels" in unsupported_reason(potential, compiled=True)
    assert unsupported_reason(potential.to(torch.float64))
