"""Triton's interpreter without what it does again in every call; what it computes is the same.

It replaces the functions of triton.language before each launch and each call of a function of a kernel, makes a table
of all types whenever it needs one of them, and scans element by element even where there is one element to scan.
tests/conftest.py uses this for checks; python quick_interpreter.py SCRIPT runs a script with it.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from contextlib import ExitStack
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core  # noqa: F401  the interpreter looks for both among the globals of a function
from triton.runtime import interpreter

__all__ = ["speed_up"]


def speed_up() -> None:
    """Change the interpreter of this process, in which all kernels are interpreted."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    numpy_type, replace, scan = interpreter._get_np_dtype, interpreter._patch_lang, interpreter.ScanOps.generic_scan
    type_of_scalar = cache(numpy_type)

    @cache
    def replace_all() -> None:
        replace(speed_up)

    def replace_once(_function: Any) -> Any:
        replace_all()
        scope: Any = ExitStack()
        scope.restore = scope.close  # nothing is put back
        return scope

    def type_of_elements(kind: tl.dtype) -> Any:
        return numpy_type(kind) if kind.scalar.is_ptr() else type_of_scalar(kind.scalar)

    def scan_of_several(self: Any, given: Any) -> Any:
        return given if given[0].shape[self.axis] == 1 else scan(self, given)

    gc.freeze()  # modules stay, and each interpreted operation makes many small objects: fewer searches for garbage
    gc.set_threshold(50_000, 20, 20)
    interpreter._get_np_dtype = type_of_elements
    interpreter._patch_lang = replace_once
    interpreter.ScanOps.generic_scan = scan_of_several


if __name__ == "__main__":
    speed_up()
    sys.path[0] = os.path.dirname(sys.argv[1])
    runpy.run_path(sys.argv[1], run_name="__main__")
