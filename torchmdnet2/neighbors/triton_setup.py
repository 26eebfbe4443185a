"""GPU kernels shared by both neighbor searches: the geometry of each cell, and the prefix sum over rows.

Shapes: N atoms, B structures, C edge capacity. All kernels run with floating-point fusion off: the count and the fill
pass must round alike, or a pair exactly at the cutoff would be counted and not listed.

The tables that `cell_geometry` writes, one row per structure:
    reals [B, 22] float64: the complete cell, rows first (9), the columns of its inverse (9), along each free direction
        the coordinate of the first atom (3; it becomes the origin), the widest extent of the periodic cell in Å (1);
    whole [B, 11] int32: periodic (3), images (3), bins along each lattice vector (3), bins in all, bins per cutoff
        along the third vector (rounded up).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..core.triton_launch import after_previous
from .neighbor_list import SAME_PLACE

REALS = 22
WHOLE = 11
THIN_BINS = 4  # bins per cutoff along the third lattice vector, where atoms of a column lie in order
FREE_BINS = 27  # a structure of n atoms has at most n + FREE_BINS bins
ROW_BLOCK = 1024  # rows summed by one program of row_pointer_kernel

OVERFLOW = 1  # more edges than the capacity
NOT_FINITE = 2  # a position or a cell is not finite (or beyond 2^30 cells or Å), or a periodic cell is flat
COINCIDENT = 4  # two atoms at the same place; seen where vectors or distances are written
TOO_THIN = 8  # a cell too thin for this search: take method="pairs", or a thicker cell

_OVERFLOW = tl.constexpr(OVERFLOW)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_COINCIDENT = tl.constexpr(COINCIDENT)
_TOO_THIN = tl.constexpr(TOO_THIN)
_SAME_PLACE_SQUARE = tl.constexpr(SAME_PLACE**2)
_REALS = tl.constexpr(REALS)
_WHOLE = tl.constexpr(WHOLE)
_FREE_BINS = tl.constexpr(FREE_BINS)
_THIN_BINS = tl.constexpr(THIN_BINS)
_MAX_IMAGES = tl.constexpr(61)  # along a lattice vector, so that the number of images stays far from 2^31
_MAX_BINS = tl.constexpr(512)  # cutoffs along one lattice vector: the product of three stays below 2^31


@triton.jit
def cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def normalized(x, y, z):
    norm = tl.sqrt(x * x + y * y + z * z)
    return x / norm, y / norm, z / norm


@triton.jit
def complete(ax, ay, az, bx, by, bz, cx, cy, cz, p0, p1, p2):
    """Replace the non-periodic rows by unit vectors orthogonal to the periodic ones, as reference.complete_cell."""
    num = p0 + p1 + p2
    if num == 0:
        ax, ay, az = ax * 0 + 1.0, ay * 0, az * 0
        bx, by, bz = bx * 0, by * 0 + 1.0, bz * 0
        cx, cy, cz = cx * 0, cy * 0, cz * 0 + 1.0
    if num == 1:
        # e along the periodic row, u orthogonal to it from the Cartesian axis farthest from e, v = e × u
        ex, ey, ez = normalized(
            tl.where(p0 == 1, ax, tl.where(p1 == 1, bx, cx)),
            tl.where(p0 == 1, ay, tl.where(p1 == 1, by, cy)),
            tl.where(p0 == 1, az, tl.where(p1 == 1, bz, cz)),
        )
        x_is_far = (tl.abs(ex) <= tl.abs(ey)) & (tl.abs(ex) <= tl.abs(ez))
        y_is_far = (~x_is_far) & (tl.abs(ey) <= tl.abs(ez))
        tx = tl.where(x_is_far, 1.0, 0.0).to(tl.float64)
        ty = tl.where(y_is_far, 1.0, 0.0).to(tl.float64)
        tz = 1.0 - tx - ty
        along = tx * ex + ty * ey + tz * ez
        ux, uy, uz = normalized(tx - along * ex, ty - along * ey, tz - along * ez)
        vx, vy, vz = cross(ex, ey, ez, ux, uy, uz)
        if p0 == 0:
            ax, ay, az = ux, uy, uz
        if p1 == 0:
            bx, by, bz = tl.where(p0 == 1, ux, vx), tl.where(p0 == 1, uy, vy), tl.where(p0 == 1, uz, vz)
        if p2 == 0:
            cx, cy, cz = vx, vy, vz
        # p1 alone: rows u, e, v;  p2 alone: rows u, v, e;  p0 alone: rows e, u, v
    if num == 2:
        if p0 == 0:
            nx, ny, nz = cross(bx, by, bz, cx, cy, cz)
            ax, ay, az = normalized(nx, ny, nz)
        if p1 == 0:
            nx, ny, nz = cross(cx, cy, cz, ax, ay, az)
            bx, by, bz = normalized(nx, ny, nz)
        if p2 == 0:
            nx, ny, nz = cross(ax, ay, az, bx, by, bz)
            cx, cy, cz = normalized(nx, ny, nz)
    return ax, ay, az, bx, by, bz, cx, cy, cz


@triton.jit
def images_needed(ratio, periodic):
    """Images w of a sender along a lattice vector, those at −w/2 … w/2 cells from the receiver: cutoff / height < w/2.
    Float32 finds them to 1e-6."""
    return tl.where(periodic == 1, tl.maximum(tl.ceil(2 * tl.minimum(ratio, 1e6) + 2e-6), 1.0), 1.0).to(tl.int32)


@triton.jit
def first_image(images):
    """Of w images along a lattice vector: the number t of the first one, and h, 0 for odd w and ½ for even w. With the
    difference of fractions d, image t lies at d + t − round(d − h) cells; w images begin at −w/2."""
    return -(images // 2), 0.5 * (1 - images % 2).to(tl.float32)


@triton.jit
def bins_along(ratio, periodic, PER_CUTOFF: tl.constexpr):
    """Bins no narrower than cutoff / PER_CUTOFF; along a free direction as many as allowed (they are folded)."""
    fit = tl.floor((1 - 1e-9) / tl.maximum(ratio, 1e-3) * PER_CUTOFF).to(tl.int32)
    most = PER_CUTOFF * _MAX_BINS
    return tl.where(periodic == 1, tl.minimum(tl.maximum(fit, 1), most), most)


@triton.jit
def geometry(cell, pbc, rc, b):
    """The complete cell of structure b (rows, 9), its inverse (columns, 9), periodic (3), images (3), cutoff
    over height (3), and whether it can be searched at all. All float64 but periodic and images."""
    row = cell + b * 9
    ax, ay, az = tl.load(row).to(tl.float64), tl.load(row + 1).to(tl.float64), tl.load(row + 2).to(tl.float64)
    bx, by, bz = tl.load(row + 3).to(tl.float64), tl.load(row + 4).to(tl.float64), tl.load(row + 5).to(tl.float64)
    cx, cy, cz = tl.load(row + 6).to(tl.float64), tl.load(row + 7).to(tl.float64), tl.load(row + 8).to(tl.float64)
    p0 = tl.load(pbc + b * 3).to(tl.int32)
    p1 = tl.load(pbc + b * 3 + 1).to(tl.int32)
    p2 = tl.load(pbc + b * 3 + 2).to(tl.int32)
    ax, ay, az, bx, by, bz, cx, cy, cz = complete(ax, ay, az, bx, by, bz, cx, cy, cz, p0, p1, p2)
    ux, uy, uz = cross(bx, by, bz, cx, cy, cz)
    vx, vy, vz = cross(cx, cy, cz, ax, ay, az)
    wx, wy, wz = cross(ax, ay, az, bx, by, bz)
    det = ax * ux + ay * uy + az * uz
    ratio0 = rc * tl.sqrt(ux * ux + uy * uy + uz * uz) / tl.abs(det)
    ratio1 = rc * tl.sqrt(vx * vx + vy * vy + vz * vz) / tl.abs(det)
    ratio2 = rc * tl.sqrt(wx * wx + wy * wy + wz * wz) / tl.abs(det)
    # an inverse that is not finite, or a cell without volume, cannot be searched
    total = ratio0 + ratio1 + ratio2
    usable = (total > 0) & (total < 1e12) & (tl.abs(det) < 1e30)
    m0 = images_needed(ratio0, p0)
    m1 = images_needed(ratio1, p1)
    m2 = images_needed(ratio2, p2)
    one = 1.0 / det
    ux, uy, uz = ux * one, uy * one, uz * one
    vx, vy, vz = vx * one, vy * one, vz * one
    wx, wy, wz = wx * one, wy * one, wz * one
    return (
        ax, ay, az, bx, by, bz, cx, cy, cz, ux, uy, uz, vx, vy, vz, wx, wy, wz,
        p0, p1, p2, m0, m1, m2, ratio0, ratio1, ratio2, usable,
    )  # fmt: skip


@triton.jit
def few_images(m0, m1, m2, size):
    """Whether all pairs and images of a structure can be tested: at most 61 images a vector, 2e9 tests per atom."""
    num_images = m0.to(tl.float64) * m1 * m2
    return (tl.maximum(m0, tl.maximum(m1, m2)) <= _MAX_IMAGES) & (num_images * size < 2.0e9)


@triton.jit
def flag_coincident(flag, square, mask):
    """Note edges between atoms at the same place; `square`: squares of their lengths in Å².

    Each lane has its own, predicated instruction: no lane waits for another, and nothing is sent without such an edge.
    """
    close = mask & (square < _SAME_PLACE_SQUARE)
    tl.atomic_or(flag + tl.zeros_like(square).to(tl.int32), _COINCIDENT, mask=close, sem="relaxed")


@triton.jit(do_not_specialize=["num_bins", "B"])
def cell_geometry(
    pos, cell, pbc, cutoff, ptr, reals, whole, flag, bin_count, num_bins, B,
    CELLS: tl.constexpr, ZERO_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per structure writes its tables; together they clear the counts of the bins."""
    after_previous(PDL)
    b = tl.program_id(0)
    cleared = b * ZERO_BLOCK + tl.arange(0, ZERO_BLOCK)
    if CELLS:
        tl.store(bin_count + cleared, tl.zeros([ZERO_BLOCK], tl.int32), mask=cleared < num_bins)
    if b < B:
        rc = tl.load(cutoff)
        first = tl.load(ptr + b)
        size = tl.load(ptr + b + 1) - first
        (
            ax, ay, az, bx, by, bz, cx, cy, cz, ux, uy, uz, vx, vy, vz, wx, wy, wz,
            p0, p1, p2, m0, m1, m2, ratio0, ratio1, ratio2, usable,
        ) = geometry(cell, pbc, rc, b)  # fmt: skip
        if not usable:
            tl.atomic_or(flag, _NOT_FINITE)
        n0 = bins_along(ratio0, p0, 1)
        n1 = bins_along(ratio1, p1, 1)
        n2 = bins_along(ratio2, p2, _THIN_BINS)
        if CELLS:
            # the cell list knows one image to either side
            searchable = (ratio0 * p0 <= 1) & (ratio1 * p1 <= 1) & (ratio2 * p2 <= 1)
            # empty bins cost time: no more bins than atoms, and never fewer than three along a free direction
            while n0 * n1 * n2 > size + _FREE_BINS:
                widest = tl.maximum(n0, n1)
                if (n2 >= widest * _THIN_BINS) | (widest <= 3):
                    n2 = n2 * 3 // 4
                elif n0 == widest:
                    n0 = n0 * 3 // 4
                else:
                    n1 = n1 * 3 // 4
        else:
            searchable = few_images(m0, m1, m2, size)
        if usable & (~searchable):
            tl.atomic_or(flag, _TOO_THIN)
        good = (usable & searchable).to(tl.int32)

        row = reals + b * _REALS
        tl.store(row + 0, ax)
        tl.store(row + 1, ay)
        tl.store(row + 2, az)
        tl.store(row + 3, bx)
        tl.store(row + 4, by)
        tl.store(row + 5, bz)
        tl.store(row + 6, cx)
        tl.store(row + 7, cy)
        tl.store(row + 8, cz)
        tl.store(row + 9, ux)
        tl.store(row + 10, uy)
        tl.store(row + 11, uz)
        tl.store(row + 12, vx)
        tl.store(row + 13, vy)
        tl.store(row + 14, vz)
        tl.store(row + 15, wx)
        tl.store(row + 16, wy)
        tl.store(row + 17, wz)
        x = tl.load(pos + first * 3 + 0, mask=size > 0, other=0.0).to(tl.float64)
        y = tl.load(pos + first * 3 + 1, mask=size > 0, other=0.0).to(tl.float64)
        z = tl.load(pos + first * 3 + 2, mask=size > 0, other=0.0).to(tl.float64)
        tl.store(row + 18, (x * ux + y * uy + z * uz) * (1 - p0))
        tl.store(row + 19, (x * vx + y * vy + z * vz) * (1 - p1))
        tl.store(row + 20, (x * wx + y * wy + z * wz) * (1 - p2))
        extent_x = tl.abs(ax) * p0 + tl.abs(bx) * p1 + tl.abs(cx) * p2
        extent_y = tl.abs(ay) * p0 + tl.abs(by) * p1 + tl.abs(cy) * p2
        extent_z = tl.abs(az) * p0 + tl.abs(bz) * p1 + tl.abs(cz) * p2
        tl.store(row + 21, tl.maximum(extent_x, tl.maximum(extent_y, extent_z)))
        row = whole + b * _WHOLE
        tl.store(row + 0, p0)
        tl.store(row + 1, p1)
        tl.store(row + 2, p2)
        tl.store(row + 3, m0 * good)
        tl.store(row + 4, m1 * good)
        tl.store(row + 5, m2 * good)
        tl.store(row + 6, n0)
        tl.store(row + 7, n1)
        tl.store(row + 8, n2)
        tl.store(row + 9, n0 * n1 * n2 * good)
        across = tl.ceil(tl.minimum(ratio2, 1.0) * n2 + 1e-9).to(tl.int32)
        tl.store(row + 10, tl.where(p2 == 1, across, _THIN_BINS))


@triton.jit(do_not_specialize=["N"])
def row_sums(counts, block_sums, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Edges of each block of rows, [N / BLOCK] int64."""
    after_previous(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(counts + rows, mask=rows < N, other=0).to(tl.int64)
    tl.store(block_sums + tl.program_id(0), tl.sum(length, axis=0))


@triton.jit(do_not_specialize=["N", "capacity"])
def row_pointer_kernel(
    counts,
    block_sums,
    row_ptr,
    needed,
    flag,
    N,
    capacity,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exclusive prefix sum of the row lengths, one program per BLOCK rows; all zero if they pass the capacity.

    With SUMMED, block_sums holds the sums of the blocks; without, every program adds up all rows.
    """
    after_previous(PDL)
    pid = tl.program_id(0)
    total = tl.zeros([SUMS], tl.int64)
    before = tl.zeros([SUMS], tl.int64)
    if SUMMED:
        for first in range(0, tl.num_programs(0), SUMS):
            k = first + tl.arange(0, SUMS)
            block = tl.load(block_sums + k, mask=k < tl.num_programs(0), other=0)
            total += block
            before += tl.where(k < pid, block, 0)
    else:
        for first in range(0, N, SUMS):
            k = first + tl.arange(0, SUMS)
            length = tl.load(counts + k, mask=k < N, other=0).to(tl.int64)
            total += length
            before += tl.where(k < pid * BLOCK, length, 0)
    num = tl.sum(total, axis=0)
    rows = pid * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(counts + rows, mask=rows < N, other=0).to(tl.int64)
    ends = tl.sum(before, axis=0) + tl.cumsum(length, axis=0)
    fits = num <= capacity
    tl.store(row_ptr + rows + 1, tl.where(fits, ends, 0).to(tl.int32), mask=rows < N)
    if pid == 0:
        tl.store(row_ptr, 0)
        tl.store(needed, num)
        if not fits:
            tl.atomic_or(flag, _OVERFLOW)
