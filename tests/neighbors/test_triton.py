"""The Triton kernels without a GPU, and what happens without Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.errors import MissingBackend
from torchmdnet2.neighbors import neighbor_list

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_checks.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


@needs_triton
def test_tensors_on_the_cpu_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        neighbor_list(System(z=torch.ones(2, dtype=torch.long), pos=torch.eye(3)[:2]), 4.0, backend="triton")


@pytest.mark.parametrize(
    ("backend", "module", "package"),
    [
        ("triton", "triton", "triton"),
        ("torch_cluster", "torch_cluster", "torch-cluster"),
        ("nvalchemi", "nvalchemiops", "nvalchemi-toolkit-ops"),
        ("vesin", "vesin", "vesin"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, backend, module, package):
    for name in [m for m in sys.modules if m.split(".")[0] == module or m.startswith("torchmdnet2.neighbors.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # makes `import module` fail
    with pytest.raises(MissingBackend, match=f"pip install {package}"):
        neighbor_list(System(z=torch.ones(2, dtype=torch.long), pos=torch.eye(3)[:2]), 4.0, backend=backend)
