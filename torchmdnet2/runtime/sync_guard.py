"""Finds operations that synchronise the host with the GPU, which a captured graph cannot do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["ForbidHostSync", "HostSync", "NotCapturable"]

_ATEN = torch.ops.aten
# their result, or its size, is a value that the host must know
_LOOK = {
    _ATEN._local_scalar_dense, _ATEN.item, _ATEN.is_nonzero, _ATEN.equal, _ATEN.nonzero, _ATEN.masked_select,
    _ATEN.bincount, _ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.lift_fresh,
}  # fmt: skip
_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_, _ATEN._unsafe_index}
_HERE = (str(Path(torch.__file__).parent), __file__)


class NotCapturable(RuntimeError):
    """No CUDA graph can hold this computation; the message says why."""


class HostSync(NotCapturable):
    """An operation synchronises the host with the GPU; the message names the function and the operation."""


class ForbidHostSync(TorchDispatchMode):
    """A context in which operations of this thread that would synchronise with the GPU raise HostSync, on a CPU too.

    Such operations copy values to the host, have results whose size depends on values, or copy constants to the device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        waits = packet in _LOOK
        if packet is _ATEN.repeat_interleave:
            waits = kwargs.get("output_size") is None and func._overloadname.endswith("Tensor")
        elif packet in _INDEXED:
            waits = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        elif packet in (_ATEN._to_copy, _ATEN.copy_, _ATEN._copy_from):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            kinds = {t.device.type for t in tensors if t.numel()}
            if kwargs.get("device") is not None:
                kinds.add(torch.device(kwargs["device"]).type)
            waits = len(kinds) > 1
        if waits:
            raise HostSync(f"{_where()} copies tensor values to the CPU ({packet})")
        return func(*args, **kwargs)


def _where() -> str:
    """The innermost function that is not PyTorch's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return "a function"
    code = frame.f_code
    name = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if name is None:
        owner = frame.f_locals.get("self")
        name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
    return f"'{name}' ({Path(code.co_filename).name})"
