"""Modules whose constants stay in double precision."""

from __future__ import annotations

from torch import float64, nn

__all__ = ["Float64Buffers"]


class Float64Buffers(nn.Module):
    """A module whose own floating-point buffers stay float64 when the model is cast.

    Constants (reference energies, centres of radial functions) are cast where they are used, so that
    `model.float().double()` is still exact.
    """

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def, override]
        exact = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == float64}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != float64:
                self._buffers[name] = buffer.to(moved.device)
        return self
