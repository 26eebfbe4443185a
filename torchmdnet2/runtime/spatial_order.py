"""Atoms in spatial order: what one atom gathers lies together in the caches.

The order is a function of the positions alone, so that results do not depend on what was computed before.
Shapes: N atoms, B structures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .morton import morton_kernel

__all__ = ["SORT_FROM", "SpatialOrder"]

SORT_FROM = 16384
"""Atoms from which the sort is worth its time, on one NVIDIA H200."""


class SpatialOrder:
    """Static buffers of the sort.

    Args:
        num_atoms, num_systems: N and B.
        pos: the static positions that are sorted; z: their elements.
        width: bins in Å.

    Attributes:
        order: [N] int64, the atom at each place; structures stay in their sequence.
        pos, z: [N, 3] and [N] in that order.
    """

    def __init__(self, num_atoms: int, num_systems: int, pos: Tensor, z: Tensor, width: float = 2.5):
        device = pos.device
        dtype = torch.int32 if num_systems == 1 else torch.int64
        self.width = width
        self.keys = torch.zeros(num_atoms, dtype=dtype, device=device)
        self.sorted_keys = torch.zeros_like(self.keys)
        self.order = torch.arange(num_atoms, device=device)
        self._source = pos, z
        self.pos, self.z = torch.zeros_like(pos), torch.zeros_like(z)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.sorted_keys, self.order, self.pos, self.z))

    def __call__(self, batch: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """Sort; ties stay in the sequence of the atoms."""
        pos, z = self._source
        n = pos.shape[0]
        morton_kernel[(-(-n // 256),)](
            pos, batch, cell, pbc.view(torch.uint8), self.keys, n, self.width, BLOCK=256, enable_fp_fusion=False
        )
        torch.sort(self.keys, stable=True, out=(self.sorted_keys, self.order))
        torch.index_select(pos, 0, self.order, out=self.pos)
        torch.index_select(z, 0, self.order, out=self.z)
