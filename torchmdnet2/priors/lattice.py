"""Inverse and volume of a cell, without waiting for a GPU, as the functions of torch.linalg do."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse", "volume"]


def inverse(cell: Tensor) -> Tensor:
    """The inverse of a cell [3, 3]; its columns are the reciprocal lattice vectors (without 2π)."""
    a, b, c = cell.unbind(0)
    columns = [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)]
    return torch.stack(columns, 1) / (a * columns[0]).sum()


def volume(cell: Tensor) -> Tensor:
    """Volume of a cell [3, 3], also of a left-handed one."""
    a, b, c = cell.unbind(0)
    return (a * torch.linalg.cross(b, c)).sum().abs()
