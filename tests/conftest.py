"""What all tests share."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import speed_up

    speed_up()

torch.set_num_threads(1)  # the structures of the tests are tiny: more threads only wait for each other


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would start with the files of the most tests; the longest test is often alone in its file
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first: no process of pytest-xdist then waits for another one at the end."""
    long = {i.path for i in items if i.get_closest_marker("slow") or hasattr(getattr(i, "module", None), "run_checks")}
    items.sort(key=lambda item: item.path not in long)
