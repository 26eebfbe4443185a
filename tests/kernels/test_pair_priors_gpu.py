"""The kernels of pair priors against the priors in float64, by Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path

from interpreter import needs_triton, run_checks


@needs_triton
def test_kernels_of_pair_priors():
    run_checks(Path(__file__).with_name("pair_prior_checks.py"))
