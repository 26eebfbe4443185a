"""Kernels of the CPU that numba keeps on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

import numba

from torchmdnet2.core.compiling_cpu import _CacheFile, kernel
from torchmdnet2.models.tensornet.cpu import kernels as tensornet
from torchmdnet2.models.tensornet2.cpu import kernels as tensornet2

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "kernels", [tensornet(8, True, False), tensornet2(8, 2, True)], ids=["TensorNet", "TensorNet2"]
)
def test_another_process_finds_them(kernels: tuple) -> None:
    """numba compares what a kernel closes over by its pickle, and that of a compiled function differs by process."""
    for one in kernels:
        held = [cell.cell_contents for cell in one.py_func.__closure__ or ()]
        assert all(isinstance(value, int | str) for value in held), (one, held)


def _doubled_and(shift: int) -> Any:
    @kernel
    def add(begin, stop, x, out):
        for i in range(begin, stop):
            out[i] = 2 * x[i] + shift

    return add


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_threads_share_all_passes_of_a_loop(count: int) -> None:
    """And kernels that differ by a number alone are not taken for each other."""
    x, threads = np.arange(1001.0), numba.get_num_threads()
    try:
        for number in {1, threads}:
            numba.set_num_threads(number)
            for shift in (3, 4):
                out = np.full(1001, -1.0)
                _doubled_and(shift)(count, x, out)
                np.testing.assert_array_equal(out[:count], 2 * x[:count] + shift)
                assert (out[count:] == -1).all()
    finally:
        numba.set_num_threads(threads)


def test_symbols_of_kernels_for_other_numbers_differ() -> None:
    """Two of one name, one from the cache and one compiled, would be linked to the same code."""
    found = {}
    for options in [(8, True, False), (8, True, True), (8, False, False), (16, True, False)]:
        for one in tensornet(*options):
            body = one.loop.py_func
            held = tuple(cell.cell_contents for cell in body.__closure__ or ())
            assert found.setdefault((body.__qualname__, body.__code__), held) == held
            assert one.py_func.__qualname__ == body.__qualname__


_LOOPS = """
import sys
import numpy as np
from torchmdnet2.core.compiling_cpu import kernel

@kernel
def double(begin, stop, x):
    for i in range(begin, stop):
        x[i] *= 2

@kernel
def triple(begin, stop, x):
    for i in range(begin, stop):
        x[i] *= 3

x = np.ones(5)
loop = globals()[sys.argv[1]]
loop(5, x)
print(x.sum(), sum(loop.stats.cache_hits.values()))
"""


def test_a_kernel_is_loaded_by_a_process_that_has_no_threads_yet(tmp_path: Path) -> None:
    """The second process finds the loop of threads on disk, and numba keeps with `triple` what it knows of it."""
    file = tmp_path / "loops.py"
    file.write_text(_LOOPS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for name in ("double", "triple", "triple"):
        run = [sys.executable, str(file), name]
        done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["10.0", "0"], ["15.0", "0"], ["15.0", "1"]]


def test_processes_that_save_at_once_do_not_take_each_others_code(tmp_path: Path) -> None:
    class Slow(_CacheFile):
        """Another process saves between its reading and writing of the index."""

        def _load_index(self) -> dict:
            found = super()._load_index()
            if other := self.__dict__.pop("other", None):
                other.save("types of the other", "code of the other")
            return found

    ours, other = Slow(str(tmp_path), "f", 1), _CacheFile(str(tmp_path), "f", 1)
    ours.other = other
    ours.save("our types", "our code")
    expected = {"our types": "our code", "types of the other": "code of the other"}
    for key, code in expected.items():
        assert other.load(key) in (code, None)
    assert other.load("our types") == "our code"


def test_files_of_another_version_of_the_source_go(tmp_path: Path) -> None:
    for version in (1, 2):
        for key in "ab":
            _CacheFile(str(tmp_path), "f", version).save(key, f"{key}{version}")
    assert len(list(tmp_path.glob("*.nbc"))) == 2
    assert _CacheFile(str(tmp_path), "f", 2).load("b") == "b2"
    assert _CacheFile(str(tmp_path), "f", 1).load("b") is None


def test_a_function_that_changes_in_another_file_is_compiled_again(tmp_path: Path) -> None:
    """numba itself looks at the file of the kernel alone: what it calls would stay what it was."""
    outer = "import numpy as np\nfrom middle import twice\nfrom torchmdnet2.core.compiling_cpu import kernel\n"
    outer += "@kernel\ndef put(begin, stop, x):\n    for i in range(begin, stop):\n        x[i] = twice(x[i])\n"
    outer += "x = np.ones(3)\nput(3, x)\nprint(x.sum(), sum(put.stats.cache_hits.values()))\n"
    middle = "from numba import njit\nfrom inner import factor\n@njit\ndef twice(x):\n    return factor() * x\n"
    (tmp_path / "outer.py").write_text(outer)
    (tmp_path / "middle.py").write_text(middle)
    search = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": search, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for factor in ("2.0", "2.0", "3.00"):
        inner = f"from numba import njit\n@njit\ndef factor():\n    return {factor}\n"
        if factor not in ((tmp_path / "inner.py").read_text() if found else ""):
            (tmp_path / "inner.py").write_text(inner)
        run = [sys.executable, str(tmp_path / "outer.py")]
        done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["6.0", "0"], ["6.0", "1"], ["9.0", "0"]]
