"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the structures of the tests are tiny: more threads only wait for each other


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of reference data beside the repository; tests that need it are skipped without it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the reference data (../shared) is not here")
    return folder
