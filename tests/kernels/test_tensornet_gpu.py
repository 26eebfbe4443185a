"""The fused TensorNet kernels against the Potential in float64, by Triton's interpreter on the CPU (bar R3)."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import printed_cases

pytest.importorskip("triton", reason="the GPU kernels need triton")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def all_cases():
    return printed_cases(Path(__file__).with_name("tensornet_gpu_checks.py"))


@pytest.fixture(scope="module")
def cases(all_cases):
    return [c for c in all_cases if not c["case"].startswith("mixed")]


def test_all_cases_ran(all_cases, cases):
    assert len(all_cases) == 30 and len(cases) == 25


def test_energies(cases):
    assert max(c["energy"] for c in cases) < 2e-6, cases


def test_forces_are_float32_accurate(cases):
    # eager float32 is printed beside: the two are alike, and which is closer is chance on so few atoms
    for c in cases:
        assert c["forces"] <= 3e-6 * max(1.0, c["largest_force"]), c


def test_the_embedding_by_elements_in_numbers(all_cases):
    """eV and eV/Å, of forces up to 1.9 eV/Å. The largest error of five energies varies three times as much between
    structures as their root mean square."""
    found = [c for c in all_cases if "by elements" in c["case"]]
    for mixed, energy, forces in ((False, 6e-7, 2e-6), (True, 6e-6, 3e-5)):
        cases = [c for c in found if c["case"].startswith("mixed") == mixed]
        assert len(cases) == 2
        assert max(c["energy_rms"] for c in cases) < energy and max(c["forces"] for c in cases) < forces, cases


def test_stress(cases):
    stresses = [c["stress"] for c in cases if "stress" in c]
    assert len(stresses) == 19 and max(stresses) < 1e-5, cases


def test_mixed_precision(all_cases):
    mixed = all_cases[25:]
    for c in mixed:
        assert c["energy"] < 2e-5 and c["stress"] < 5e-4 and c["forces"] < 2e-4 * c["largest_force"], c
    assert max(c["forces"] / c["largest_force"] for c in mixed) > 5e-6, "rounded to float16 nowhere"
