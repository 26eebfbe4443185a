"""Atoms along a space-filling curve (Morton order): atoms that are near in space are near in memory.

The order is a function of the positions alone, so that results do not depend on earlier steps.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def spread(i):
    """The lowest ten bits of i, two zeros between each and the next."""
    i = (i | (i << 16)) & 0x030000FF
    i = (i | (i << 8)) & 0x0300F00F
    i = (i | (i << 4)) & 0x030C30C3
    return (i | (i << 2)) & 0x09249249


@triton.jit
def bin_of(x):
    """Ten bits of a coordinate in bins; it wraps around after 1,024 bins, which only costs locality."""
    x = tl.where(tl.abs(x) < 1e9, x, 0.0)  # NaN and infinity have no bin: the neighbor search reports them
    return tl.floor(x).to(tl.int32) & 1023


@triton.jit(do_not_specialize=["num_atoms"])
def morton_kernel(pos, batch, cell, pbc, keys, num_atoms, width, BLOCK: tl.constexpr):
    """keys [N] = structure · 2³⁰ + Morton code of the position in bins of `width` Å.

    Fully periodic structures are wrapped into their cell first: code and memory follow the fractional coordinates.

    Args:
        pos: [N, 3] Å. batch: [N] int32. cell: [B, 3, 3]. pbc: [B, 3] uint8.
        keys: [N] int32 (one structure) or int64.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < num_atoms
    at = pos + i.to(tl.int64) * 3
    x = tl.load(at, ok, other=0.0).to(tl.float32)
    y = tl.load(at + 1, ok, other=0.0).to(tl.float32)
    z = tl.load(at + 2, ok, other=0.0).to(tl.float32)
    b = tl.load(batch + i, ok, other=0)
    row = cell + b * 9
    ax, ay, az = tl.load(row).to(tl.float32), tl.load(row + 1).to(tl.float32), tl.load(row + 2).to(tl.float32)
    bx, by, bz = tl.load(row + 3).to(tl.float32), tl.load(row + 4).to(tl.float32), tl.load(row + 5).to(tl.float32)
    cx, cy, cz = tl.load(row + 6).to(tl.float32), tl.load(row + 7).to(tl.float32), tl.load(row + 8).to(tl.float32)
    ux, uy, uz = by * cz - bz * cy, bz * cx - bx * cz, bx * cy - by * cx
    vx, vy, vz = cy * az - cz * ay, cz * ax - cx * az, cx * ay - cy * ax
    wx, wy, wz = ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx
    det = ax * ux + ay * uy + az * uz
    sides = pbc + b * 3
    periodic = (tl.load(sides) != 0) & (tl.load(sides + 1) != 0) & (tl.load(sides + 2) != 0) & (det != 0.0)
    safe = tl.where(periodic, det, 1.0)
    f0 = (x * ux + y * uy + z * uz) / safe
    f1 = (x * vx + y * vy + z * vz) / safe
    f2 = (x * wx + y * wy + z * wz) / safe
    # the heights of the cell tell how many bins fit
    h0 = tl.abs(det) / tl.sqrt(ux * ux + uy * uy + uz * uz + 1e-30)
    h1 = tl.abs(det) / tl.sqrt(vx * vx + vy * vy + vz * vz + 1e-30)
    h2 = tl.abs(det) / tl.sqrt(wx * wx + wy * wy + wz * wz + 1e-30)
    x = tl.where(periodic, (f0 - tl.floor(f0)) * h0, x)
    y = tl.where(periodic, (f1 - tl.floor(f1)) * h1, y)
    z = tl.where(periodic, (f2 - tl.floor(f2)) * h2, z)
    code = spread(bin_of(x / width)) | (spread(bin_of(y / width)) << 1) | (spread(bin_of(z / width)) << 2)
    key = code.to(keys.dtype.element_ty)
    if keys.dtype.element_ty == tl.int64:
        key = key | (b.to(tl.int64) << 30)
    tl.store(keys + i, key, ok)
