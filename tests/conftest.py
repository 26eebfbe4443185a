"""What all tests share."""

from __future__ import annotations

import base64
import gc
import io
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import speed_up

    speed_up()

# a pixel as PNG
EMPTY = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)

torch.set_num_threads(1)  # the structures of the tests are tiny: more threads only wait for each other


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would start with the files of the most tests; the longest test is often alone in its file
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Half a million objects of modules and tests stay to the end: searches for garbage need not visit them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def drawn() -> None:
    """For tests of pictures: they are drawn."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Figures are made, and one empty picture is written for each: to draw it takes half of the time of a short run.

    Fixtures of a module, other processes, and tests with `drawn` draw them.
    """
    if "drawn" in request.fixturenames or find_spec("matplotlib") is None:
        yield
        return
    from matplotlib.figure import Figure

    save = Figure.savefig

    def written(self: Figure, file: Any, **options: Any) -> None:
        file.write(EMPTY) if isinstance(file, io.BytesIO) else save(self, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", written)
        yield


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules complain of objects that are never freed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first: no process of pytest-xdist then waits for another one at the end.

    The first of all compiles TensorNet for the CPU, which numba keeps on disk; meanwhile the other process is busy in
    Triton's interpreter, and does not compile the same. So it is, later, with TensorNet2: test_cpu_bound.py needs its
    kernels too, and waits until the other files with long tests are done.
    """
    compiling = {"test_examples.py": 0, "test_tensornet2_cpu.py": 2, "test_cpu_bound.py": 4}
    names = {"run_checks", "printed_cases"}  # of tests/interpreter.py
    interpreted = {item.path for item in items if names & vars(getattr(item, "module", item)).keys()}
    long = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> int:
        other = 1 if item.path in interpreted else 3 if item.path in long else 5
        return compiling.get(item.path.name, other)

    items.sort(key=place)
