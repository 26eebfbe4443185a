"""Triton for modules whose plain expressions work without it; kernels can be launched only where it is installed."""

from __future__ import annotations

from typing import Any

__all__ = ["FUSED_ARITHMETIC", "after_previous", "before_next", "tl", "triton"]


class _Absent:
    """Stands for the package while modules are read: decorated functions stay unchanged."""

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()  # type: ignore[assignment]


# --- Overlapping a kernel with the end of the one before (programmatic dependent launch, Hopper on) ---
#
# A kernel launched with `launch_pdl=True` may be placed on the device while its predecessor still runs. What comes
# before `after_previous` may read weights, and what kernels before the predecessor have written: that the predecessor
# runs beyond its own wait says that those have finished. Read it past the L1 cache (".cg"), which is cleared when a
# kernel starts. From `after_previous` on, all that the predecessor has written is there.
#
# PDL: 0 launch by launch; 1 the next kernel is placed when the blocks of this one end; 2 when all have passed
# `before_next`, which pays where this kernel leaves room on the device.

# Products and sums in one rounding: up to 3.9 Triton's default, from 3.10 on only with this option.
# Kernels that decide by comparing (neighbor search, totals) are launched with False.
FUSED_ARITHMETIC = {"enable_fp_fusion": True}


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the kernel before."""
    if PDL > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def before_next(PDL: tl.constexpr):
    """From here on the next kernel may be placed. Only after `after_previous`."""
    if PDL > 1:
        tl.extra.cuda.gdc_launch_dependents()
