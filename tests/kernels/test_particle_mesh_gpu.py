"""Particle-mesh Ewald on kernels against the prior in float64, by Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path

from interpreter import needs_triton, run_checks


@needs_triton
def test_kernels_of_particle_mesh_ewald():
    run_checks(Path(__file__).with_name("particle_mesh_checks.py"))


@needs_triton
def test_other_meshes_compile_no_other_kernels():
    """Triton compiles a kernel again where a whole number is a multiple of 16 or 1, unless it is told not to."""
    from torchmdnet2.priors.coulomb import gpu

    for kernel in (gpu.spread_kernel, gpu.influence_kernel, gpu.gather_kernel):
        sizes = [parameter for parameter in kernel.params if parameter.name in ("first", "n0", "n1", "n2", "num_parts")]
        assert len(sizes) >= 3 and all(parameter.do_not_specialize for parameter in sizes)
