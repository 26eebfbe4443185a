"""The Triton kernels without a GPU, and what happens without Triton."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton, run_checks

from torchmdnet2 import System
from torchmdnet2.errors import MissingBackend
from torchmdnet2.neighbors import neighbor_list


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter():
    run_checks(Path(__file__).with_name("triton_checks.py"))


@needs_triton
@pytest.mark.parametrize("edges", [60, 1000])
@pytest.mark.parametrize("num_atoms", [1, 264, 265, 1056, 1057, 2112])
def test_programs_of_one_structure_run_side_by_side(num_atoms, edges):
    from torchmdnet2.neighbors.triton_search import division

    tile = division(num_atoms, edges * num_atoms, processors=132)
    assert (tile.programs - 1) * tile.rows < num_atoms <= tile.programs * tile.rows
    assert tile.programs * tile.lanes * 128 <= 132 * 65536  # registers
    assert tile.lanes == (256 if num_atoms <= 264 or edges == 1000 else 128)


@needs_triton
@pytest.mark.parametrize(("num_atoms", "periodic", "programs"), [(32, False, 1), (33, False, 33), (32, True, 32)])
def test_few_atoms_without_images_are_searched_by_one_program(num_atoms, periodic, programs):
    from torchmdnet2.neighbors.triton_search import division

    assert division(num_atoms, 60 * num_atoms, 132, periodic).programs == programs


@needs_triton
@pytest.mark.parametrize("edges", [60, 1000])
def test_too_many_atoms_for_programs_side_by_side(edges):
    from torchmdnet2.neighbors.triton_search import division

    assert division(2113, edges * 2113, processors=132) is None


@needs_triton
def test_tensors_on_the_cpu_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        neighbor_list(System(z=torch.ones(2, dtype=torch.long), pos=torch.eye(3)[:2]), 4.0, backend="triton")


@pytest.mark.parametrize(
    ("backend", "module", "extra"),
    [
        ("triton", "triton", "gpu"),
        ("torch_cluster", "torch_cluster", "cluster"),
        ("vesin", "vesin", "cpu"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, backend, module, extra):
    for name in [m for m in sys.modules if m.split(".")[0] == module or m.startswith("torchmdnet2.neighbors.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # makes `import module` fail
    with pytest.raises(MissingBackend, match=rf"needs the package {module}: pip install 'torchmdnet2\[{extra}\]'"):
        neighbor_list(System(z=torch.ones(2, dtype=torch.long), pos=torch.eye(3)[:2]), 4.0, backend=backend)
