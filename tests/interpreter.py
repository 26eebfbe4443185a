"""GPU kernels without a GPU: checks that run in Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is imported, so it cannot be switched on in a process that uses Triton otherwise.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm import warm_python

ROOT = Path(__file__).parents[1]
_PYTHON = sys.version_info >= (3, 11)  # with 3.10 the interpreter of Triton 3.7 fails in the first kernel
needs_triton = pytest.mark.skipif(
    not _PYTHON or importlib.util.find_spec("triton") is None, reason="needs triton, and Python 3.11"
)


def _run(arguments: list[str], timeout: float | None) -> subprocess.CompletedProcess[str]:
    if not _PYTHON:
        pytest.skip("Triton's interpreter needs Python 3.11")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [warm_python(), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def run_checks(path: Path) -> None:
    """Run a file of tests in the interpreter; all must pass."""
    run = _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)], None)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def printed_cases(path: Path, timeout: float = 800) -> list[dict[str, Any]]:
    """What a script prints in the interpreter, a JSON object a line."""
    run = _run([str(ROOT / "tests" / "quick_interpreter.py"), str(path)], timeout)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
