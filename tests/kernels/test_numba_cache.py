"""Kernels of the CPU that numba keeps on disk."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

from torchmdnet2.models.tensornet.numba_steps import kernels as tensornet
from torchmdnet2.models.tensornet2.numba_kernels import kernels as tensornet2


@pytest.mark.parametrize(
    "kernels", [tensornet(8, True, False), tensornet2(8, 2, True)], ids=["TensorNet", "TensorNet2"]
)
def test_another_process_finds_them(kernels: tuple) -> None:
    """numba compares what a kernel closes over by its pickle, and that of a compiled function differs by process."""
    for kernel in kernels:
        held = [cell.cell_contents for cell in kernel.py_func.__closure__ or ()]
        assert all(isinstance(value, int) for value in held), (kernel, held)
