"""Triton for modules whose plain expressions work without it; kernels can be launched only where it is installed."""

from __future__ import annotations

from typing import Any

__all__ = ["tl", "triton"]


class _Absent:
    """Stands for the package while modules are read: decorated functions stay as they are."""

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()  # type: ignore[assignment]
