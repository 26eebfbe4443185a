"""How numba compiles the kernels of the CPU."""

from __future__ import annotations

from typing import Any

__all__ = ["OPTIONS", "PARALLEL"]


OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "no_cfunc_wrapper": True}

_OFF = "comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"
PARALLEL: dict[str, Any] = {"parallel": {**dict.fromkeys(_OFF, False), "prange": True}, "cache": True}
"""Of kernels that are loops over prange, and parallel nowhere else: to look for more takes a tenth of the time."""
