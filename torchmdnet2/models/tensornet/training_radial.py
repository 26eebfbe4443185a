"""Filters of many pairs from few distances, for training.

A filter is a function of the distance alone. Where a batch has many more pairs than there are knots, which are evenly
spaced distances, the network of the distance is evaluated at the knots, and each pair takes its filter from the POINTS
knots around it by Lagrange interpolation. With 16 knots for each radial function the error of interpolation is far
below the rounding of float32. Slopes are differences of rounded values: the rounding error of forces is two to ten
times that of filters computed for each pair.

Everything stays linear: in the table of values at the knots, and in the weights of the knots, which are fixed functions
of the positions. So the derivatives of the loss by the parameters are exactly those of the interpolated filters.

Shapes: K knots, P + 1 rows (pairs, and an atom with itself), C columns (three filters of F features).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.triton_launch import FUSED_ARITHMETIC, tl, triton
from ...kernels.pair_ops import MultilinearOp

__all__ = ["POINTS", "Interpolation", "Stencil", "lagrange"]

POINTS = 6
"""Knots that a filter is interpolated from: a polynomial of degree 5."""
_PER_FUNCTION = 16  # knots: the standard deviation of the narrowest radial function is 4.5 intervals
_PAIRS_PER_KNOT = 12  # with fewer pairs the table costs as much as it saves (H200)
_PARTS = 4  # of the pairs of a knot, summed side by side


@dataclass(frozen=True)
class Stencil:
    """Evenly spaced knots from 0 to the cutoff.

    Attributes:
        num_knots: K, at least POINTS.
        spacing: Å.
    """

    num_knots: int
    spacing: float

    @classmethod
    def for_pairs(cls, num_pairs: int, num_radial: int, cutoff: float) -> Stencil | None:
        """Return the knots for filters of so many radial functions; None where pairs are too few to gain from it."""
        intervals = _PER_FUNCTION * num_radial
        if num_pairs < _PAIRS_PER_KNOT * intervals:
            return None
        return cls(intervals + 1, cutoff / intervals)

    def knots(self, device: torch.device) -> Tensor:
        """[K] distances in Å, float64."""
        return self.spacing * torch.arange(self.num_knots, dtype=torch.float64, device=device)

    def first(self, distances: Tensor) -> Tensor:
        """The first of the POINTS knots around each distance [P + 1], int32; at the ends they are all on one side."""
        before = (distances / self.spacing).floor().int() - (POINTS // 2 - 1)
        return before.clamp(0, self.num_knots - POINTS)


def lagrange(s: Tensor) -> Tensor:
    """Weights of values at 0 … POINTS − 1 for their interpolation at s: [P] to [P, POINTS], differentiable."""
    at = torch.arange(POINTS, dtype=s.dtype, device=s.device)
    factors = (s[:, None, None] - at) / torch.where(torch.eye(POINTS, device=s.device) > 0, 1, at[:, None] - at)
    return torch.where(torch.eye(POINTS, device=s.device) > 0, 1, factors).prod(2)


class Interpolation(MultilinearOp):
    """T(t, w, g) = Σ_p Σ_a w_pa ⟨t_(first_p + a), g_p⟩: each row takes a few rows of a table with its weights.

    Args:
        first: [P + 1] int32, the first row of the table that each row takes.
        num_knots: K.
        count: [1] number of pairs; the rows after them, but for the last one, are padding, whose weights are 0.

    Slots: t [K, C], w [P + 1, POINTS]; result and g [P + 1, C].
    """

    def __init__(self, first: Tensor, num_knots: int, count: Tensor, use_kernels: bool):
        self.first, self.num_knots, self.use_kernels = first, num_knots, use_kernels
        if use_kernels:  # rows of one knot together, for the sums over them; padding after all, so that no sum reads it
            bins = torch.arange(num_knots - POINTS + 2, dtype=torch.int32, device=first.device)
            row = torch.arange(len(first), device=first.device)
            knot, order = torch.where((row >= count) & (row < len(first) - 1), bins[-1], first).sort(stable=True)
            self.order, self.start = order.int(), torch.searchsorted(knot, bins, out_int32=True)

    def reference(self, *slots: Tensor) -> Tensor:
        table, weights = slots
        rows = self.first.long()[:, None] + torch.arange(POINTS, device=table.device)
        return torch.linalg.vecdot(weights[:, :, None], table[rows], dim=1)

    def partial(self, slot: int, slots: Sequence[Tensor | None]) -> Tensor:
        table, weights, g = slots
        if slot == 2:
            assert table is not None and weights is not None
            return self.interpolate(table, weights)
        assert g is not None
        if slot == 1:
            assert table is not None
            return self.row_dots(table, g)
        assert weights is not None
        # the transpose of `interpolate`: knots gather from the sorted rows, where rows would scatter to knots
        return self.sums(weights, g)

    def interpolate(self, table: Tensor, weights: Tensor) -> Tensor:
        """∂T/∂g by a kernel."""
        rows, columns = weights.shape[0], table.shape[1]
        out = table.new_empty(rows, columns)
        grid, tile = _tile(rows, columns)
        _interpolate[grid](out, table, weights, self.first, rows, **tile)
        return out

    def row_dots(self, table: Tensor, g: Tensor) -> Tensor:
        """∂T/∂w by a kernel."""
        rows, columns = g.shape
        out = g.new_empty(rows, POINTS)
        (programs, _), tile = _tile(rows, columns)
        _row_dots[(programs,)](out, table, g, self.first, rows, **tile)
        return out

    def sums(self, weights: Tensor, g: Tensor) -> Tensor:
        """∂T/∂t by two kernels, without atomics: sums over the rows of each first knot, then over first knots."""
        columns, bins = g.shape[1], self.num_knots - POINTS + 1
        parts = g.new_empty(_PARTS, bins, POINTS, columns)
        width = min(128, triton.next_power_of_2(columns))
        blocks = triton.cdiv(columns, width)
        tile = {"C": columns, "BC": width, "N": POINTS, "PARTS": _PARTS, **FUSED_ARITHMETIC}
        _sums[(bins, blocks, _PARTS)](parts, weights, g, self.order, self.start, bins, BP=8, num_warps=2, **tile)
        out = g.new_empty(self.num_knots, columns)
        _fold[(self.num_knots, blocks)](out, parts, bins, num_warps=2, **tile)
        return out


def _tile(rows: int, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid over blocks of rows and of columns, and their sizes."""
    width = min(128, triton.next_power_of_2(columns))
    return (triton.cdiv(rows, 8), triton.cdiv(columns, width)), {
        "C": columns, "BP": 8, "BC": width, "N": POINTS, "num_warps": 4, **FUSED_ARITHMETIC,
    }  # fmt: skip


@triton.jit
def _interpolate(
    out, table, weights, first, rows, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, N: tl.constexpr
):
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (p < rows)[:, None] & (c < C)[None, :]
    k = tl.load(first + p, mask=p < rows, other=0)
    total = tl.zeros((BP, BC), out.dtype.element_ty)
    for a in tl.static_range(N):
        w = tl.load(weights + p * N + a, mask=p < rows, other=0.0)
        total += w[:, None] * tl.load(table + ((k + a) * C)[:, None] + c[None, :], mask=mask, other=0.0)
    tl.store(out + p[:, None] * C + c[None, :], total, mask=mask)


@triton.jit
def _row_dots(out, table, g, first, rows, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, N: tl.constexpr):
    """⟨t_(first + a), g⟩ of each row, [P + 1, N]: one program has all columns of its rows.

    The N sums of a row are eight lanes, since tiles are powers of two.
    """
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    k = tl.load(first + p, mask=p < rows, other=0)
    n = tl.arange(0, 8)
    total = tl.zeros((BP, 8), out.dtype.element_ty)
    for block in tl.static_range(0, C, BC):
        c = block + tl.arange(0, BC)
        mask = (p < rows)[:, None] & (c < C)[None, :]
        x = tl.load(g + p[:, None] * C + c[None, :], mask=mask, other=0.0)
        for a in tl.static_range(N):
            t = tl.load(table + ((k + a) * C)[:, None] + c[None, :], mask=mask, other=0.0)
            total += tl.where((n == a)[None, :], tl.sum(t * x, 1)[:, None], 0.0)
    tl.store(out + p[:, None] * N + n[None, :], total, mask=(p < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _sums(
    parts, weights, g, order, start, bins, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Σ w_pa g_p of the rows with one first knot, for each a: a part of them in each program.

    parts [PARTS, bins, N, C] has a place for each program; which rows it adds, and in which order, depends on the
    sorted list alone.
    """
    k, part = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n = tl.arange(0, 8)
    total = tl.zeros((8, BC), parts.dtype.element_ty)
    stop = tl.load(start + k + 1)
    for at in range(tl.load(start + k) + part * BP, stop, PARTS * BP):
        here = at + tl.arange(0, BP)
        p = tl.load(order + here, mask=here < stop, other=0).to(tl.int64)
        x = tl.load(g + p[:, None] * C + c[None, :], mask=(here < stop)[:, None] & (c < C)[None, :], other=0.0)
        w = tl.load(weights + p[:, None] * N + n[None, :], mask=(here < stop)[:, None] & (n < N)[None, :], other=0.0)
        total += tl.sum(w[:, :, None] * x[:, None, :], 0)
    to = parts + ((part * bins + k).to(tl.int64) * N + n)[:, None] * C + c[None, :]
    tl.store(to, total, mask=(n < N)[:, None] & (c < C)[None, :])


@triton.jit
def _fold(out, parts, bins, C: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """Row k of the table: the sums of (first knot k − a, a) of all parts, in a fixed order."""
    k = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), out.dtype.element_ty)
    for a in tl.static_range(N):
        # knot k is the a-th of the rows whose first knot is k − a
        row = k - a
        mask = c < tl.where((row >= 0) & (row < bins), C, 0)
        for part in tl.static_range(PARTS):
            at = ((part * bins + row).to(tl.int64) * N + a) * C
            total += tl.load(parts + at + c, mask=mask, other=0.0)
    tl.store(out + k.to(tl.int64) * C + c, total, mask=c < C)
