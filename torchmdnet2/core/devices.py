"""Devices and floating-point types as users name them."""

from __future__ import annotations

import torch
from torch import float64, nn

__all__ = ["Float64Buffers", "device_of", "dtype_name", "dtype_of"]


_DTYPES = {"float32": torch.float32, "float64": torch.float64, "single": torch.float32, "double": torch.float64}


def device_of(device: torch.device | str) -> torch.device:
    """A torch device that exists here.

    Raises:
        ValueError: it does not.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device '{device}' cannot be used here: give cpu, cuda, cuda:1, …") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no NVIDIA GPU"
        raise ValueError(f"device '{device}' cannot be used here: {why}; use cpu")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"device '{device}' cannot be used here: {reason}") from None
    return found


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """float32 or float64, by torch's name or "single" and "double"; None stays None.

    Raises:
        ValueError: any other type.
    """
    if dtype is None or dtype in (torch.float32, torch.float64):
        return dtype  # type: ignore[return-value]
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype must be float32 or float64, got {dtype}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" or "float64"."""
    return str(dtype).removeprefix("torch.")


# --- Modules whose constants stay in double precision ---


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
