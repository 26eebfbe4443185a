"""Domains on the fused kernels of the GPU, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import needs_triton, run_checks

pytest.importorskip("numba")  # of the module that the checks share cases with


@needs_triton
@pytest.mark.slow
def test_fused_domains():
    run_checks(Path(__file__).with_name("domain_checks.py"))
