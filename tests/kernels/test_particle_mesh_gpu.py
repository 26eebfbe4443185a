"""Particle-mesh Ewald on kernels against the prior in float64, by Triton's interpreter on the CPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
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


@needs_triton
def test_the_kernels_of_a_box_are_found_while_nothing_is_launched(monkeypatch):
    """They are compiled side by side then: PyTorch's part of lattice sums runs on zeros."""
    from triton.runtime.jit import JITFunction

    from torchmdnet2 import load
    from torchmdnet2.benchmark import water_box
    from torchmdnet2.engine.fused_step import FusedModel, StaticInputs

    found = []
    monkeypatch.setattr("torchmdnet2.neighbors.triton_search.interpreted", lambda: True)  # buffers on the CPU
    monkeypatch.setattr(JITFunction, "run", lambda self, *given, **options: found.append(self.__name__))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FusedModel(load("organic-small").in_cells(), "native")
        system = water_box(2).to(dtype=torch.float32)
        step = model.step(system.num_atoms, 1, torch.float32, True)
        StaticInputs(model, step).load(system)
    assert step.rehearses and step.measures_graph
    step.launch()
    assert {"spread_kernel", "influence_kernel", "gather_kernel", "pair_kernel", "finish_kernel"} <= {*found}
