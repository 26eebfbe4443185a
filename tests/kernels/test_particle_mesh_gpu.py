"""Particle-mesh Ewald on kernels against the prior in float64, by Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path

from interpreter import needs_triton, run_checks


@needs_triton
def test_kernels_of_particle_mesh_ewald():
    run_checks(Path(__file__).with_name("particle_mesh_checks.py"))
