"""A batch as one block of bytes, sent by data-loading processes: tensors alone would take twice as long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["BatchMessage"]


@dataclass(eq=False)
class BatchMessage:
    """Named tensors in one buffer, and other small things.

    Attributes:
        buffer: all numbers, uint8.
        layout: of each tensor its name, dtype, shape and first byte.
        rest: anything else.
    """

    buffer: Tensor
    layout: list[tuple[str, torch.dtype, tuple[int, ...], int]]
    rest: Any

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], rest: Any) -> BatchMessage:
        """Copy tensors into a buffer."""
        layout, first = [], 0
        for name, tensor in tensors.items():
            layout.append((name, tensor.dtype, tuple(tensor.shape), first))
            first += -(-tensor.nbytes // 8) * 8  # so that every tensor begins at a multiple of its item's size
        message = cls(torch.empty(first, dtype=torch.uint8), layout, rest)
        for name, view in message.tensors().items():
            view.copy_(tensors[name])
        return message

    def tensors(self) -> dict[str, Tensor]:
        """The tensors again, as views of the buffer."""
        views = {}
        for name, dtype, shape, first in self.layout:
            size = dtype.itemsize
            for length in shape:
                size *= length
            views[name] = self.buffer[first : first + size].view(dtype).view(shape)
        return views
