"""Radial basis, cutoff function and geometry of pairs.

Positions are fixed in training, so radial values and slopes are precomputed. Only linear maps between the cotangents of
the values and of the vectors r are differentiated.

Shapes: P pairs, R radial functions. Rows are P + 1: the last is an atom and itself, at distance 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....triton_launch import FUSED_ARITHMETIC
from ....triton_or_none import tl, triton

__all__ = ["Basis", "PairGeometry"]

_BLOCK = 32


@dataclass(frozen=True, eq=False)
class Basis:
    """Radial functions φ_k(d) = C(d) exp(−w_k (x(d) − c_k)²), k = 1 … R.

    Attributes:
        centres, widths: [R] c and w.
        alpha, lower, upper: x = exp(α (lower − d)) and C the cosine cutoff at upper; α = 0: x = d and C = 1.
    """

    centres: Tensor
    widths: Tensor
    alpha: float = 0.0
    lower: float = 0.0
    upper: float = 1.0


class PairGeometry:
    """Values and derivatives for the vectors of a batch.

    Args:
        r: [P, 3] vectors in Å from the first atom of each pair to the second.
        basis: radial functions.
        start, stop: Å, where the cosine cutoff function begins (0: it is 1 at distance 0) and ends.
        skew_sign: of the antisymmetric part of the geometry, see models/tensornet.py.
    """

    def __init__(self, r: Tensor, basis: Basis, start: float, stop: float, skew_sign: int):
        self.r, self.skew_sign = r.detach().contiguous(), skew_sign
        rows, num = r.shape[0] + 1, basis.centres.shape[0]
        self.sizes = {"R": num, "BR": triton.next_power_of_2(num), "BLOCK": _BLOCK}
        self.rbf, self.rbf_slope = r.new_empty(rows, num), r.new_empty(rows, num)
        self.envelope, self.envelope_slope = r.new_empty(rows), r.new_empty(rows)
        self.geometry = r.new_empty(rows, 9)
        centres, widths = (t.to(r.dtype).contiguous() for t in (basis.centres, basis.widths))
        _values[(triton.cdiv(rows, _BLOCK),)](
            self.rbf, self.rbf_slope, self.envelope, self.envelope_slope, self.geometry, self.r, centres, widths,
            rows - 1, SKEW=skew_sign, START=start, STOP=stop, EXPNORM=basis.alpha != 0, ALPHA=basis.alpha,
            LOWER=basis.lower, UPPER=basis.upper, **FUSED_ARITHMETIC, **self.sizes,
        )  # fmt: skip

    def __call__(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Radial basis [P + 1, R], cutoff function [P + 1] and geometry [P + 1, 9], differentiable in r."""
        return _Values.apply(self, r)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: PairGeometry, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.pairs = pairs
        return (
            pairs.rbf.view_as(pairs.rbf),
            pairs.envelope.view_as(pairs.envelope),
            pairs.geometry.view_as(pairs.geometry),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _Pulled.apply(ctx.pairs, *(g.contiguous() for g in gradients))


class _Pulled(torch.autograd.Function):
    """Cotangents of the values → cotangent of r. Linear; r itself is fixed, and nothing flows to it."""

    @staticmethod
    def forward(ctx: Any, pairs: PairGeometry, rbf: Tensor, envelope: Tensor, geometry: Tensor) -> Tensor:
        ctx.pairs = pairs
        out = torch.empty_like(pairs.r)
        num = out.shape[0]
        _pull[(triton.cdiv(num, _BLOCK),)](
            out, rbf, envelope, geometry, pairs.r, pairs.rbf_slope, pairs.envelope_slope, num, SKEW=pairs.skew_sign,
            **FUSED_ARITHMETIC, **pairs.sizes,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        pairs = ctx.pairs
        rbf, envelope, geometry = (torch.empty_like(t) for t in (pairs.rbf, pairs.envelope, pairs.geometry))
        rows = rbf.shape[0]
        _push[(triton.cdiv(rows, _BLOCK),)](
            rbf, envelope, geometry, u.contiguous(), pairs.r, pairs.rbf_slope, pairs.envelope_slope, rows - 1,
            SKEW=pairs.skew_sign, **FUSED_ARITHMETIC, **pairs.sizes,
        )  # fmt: skip
        return None, rbf, envelope, geometry


@triton.jit
def _direction(r, p, num):
    """Distance and unit vector of pairs; 0 for the row after the last."""
    mask = p < num
    x = tl.load(r + p * 3, mask=mask, other=0.0)
    y = tl.load(r + p * 3 + 1, mask=mask, other=0.0)
    z = tl.load(r + p * 3 + 2, mask=mask, other=0.0)
    d = tl.sqrt(x * x + y * y + z * z)
    inverse = tl.where(d > 0, 1 / tl.where(d > 0, d, 1.0), 0.0)
    return d, inverse, x * inverse, y * inverse, z * inverse


@triton.jit
def _cosine(d, START: tl.constexpr, STOP: tl.constexpr):
    """Value and slope of the cosine cutoff between two distances (from 0 when START is 0)."""
    pi: tl.constexpr = 3.141592653589793
    if START > 0:
        scaled = 2 * (d - START) / (STOP - START) + 1
        inside = (d > START) & (d < STOP)
        rate: tl.constexpr = 2 * pi / (STOP - START)
        value = 0.5 * (tl.cos(pi * scaled) + 1)
        slope = -0.5 * rate * tl.sin(pi * scaled)
    else:
        inside = d < STOP
        turn: tl.constexpr = pi / STOP
        value = 0.5 * (tl.cos(d * turn) + 1)
        slope = -0.5 * turn * tl.sin(d * turn)
    return tl.where(inside, value, 0.0), tl.where(inside, slope, 0.0)


@triton.jit
def _values(
    rbf, rbf_slope, envelope, envelope_slope, geometry, r, centres, widths, num, SKEW: tl.constexpr,
    START: tl.constexpr, STOP: tl.constexpr, EXPNORM: tl.constexpr, ALPHA: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = p <= num
    d, _, ux, uy, uz = _direction(r, p, num)
    value, slope = _cosine(d, START, STOP)
    tl.store(envelope + p, value, mask=mask)
    tl.store(envelope_slope + p, slope, mask=mask)

    k = tl.arange(0, BR)
    both = mask[:, None] & (k < R)[None, :]
    centre, width = tl.load(centres + k, mask=k < R, other=0.0), tl.load(widths + k, mask=k < R, other=0.0)
    if EXPNORM:
        t = tl.exp(ALPHA * (LOWER - d))
        cut, cut_slope = _cosine(d, 0.0, UPPER)
        away = t[:, None] - centre[None, :]
        bell = tl.exp(-width[None, :] * away * away)
        # d exp(−β (t − μ)²)/dd with dt/dd = −α t
        steep = 2 * ALPHA * width[None, :] * away * t[:, None]
        tl.store(rbf + p[:, None] * R + k[None, :], cut[:, None] * bell, mask=both)
        tl.store(rbf_slope + p[:, None] * R + k[None, :], (cut_slope[:, None] + cut[:, None] * steep) * bell, mask=both)
    else:
        away = d[:, None] - centre[None, :]
        bell = tl.exp(-width[None, :] * away * away)
        tl.store(rbf + p[:, None] * R + k[None, :], bell, mask=both)
        tl.store(rbf_slope + p[:, None] * R + k[None, :], -2 * width[None, :] * away * bell, mask=both)

    # the geometry is that of v = −u, which points from the second atom to the first
    vx, vy, vz = -ux, -uy, -uz
    third = (vx * vx + vy * vy + vz * vz) / 3
    to = geometry + p * 9
    tl.store(to, tl.full((BLOCK,), 1.0, vx.dtype), mask=mask)
    tl.store(to + 1, -SKEW * vz, mask=mask)
    tl.store(to + 2, SKEW * vy, mask=mask)
    tl.store(to + 3, -SKEW * vx, mask=mask)
    tl.store(to + 4, vx * vx - third, mask=mask)
    tl.store(to + 5, vx * vy, mask=mask)
    tl.store(to + 6, vx * vz, mask=mask)
    tl.store(to + 7, vy * vy - third, mask=mask)
    tl.store(to + 8, vy * vz, mask=mask)


@triton.jit
def _pull(
    out, rbf, envelope, geometry, r, rbf_slope, envelope_slope, num, SKEW: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = p < num
    _, inverse, ux, uy, uz = _direction(r, p, num)
    k = tl.arange(0, BR)
    both = mask[:, None] & (k < R)[None, :]
    at = p[:, None] * R + k[None, :]
    along = tl.sum(tl.load(rbf + at, mask=both, other=0.0) * tl.load(rbf_slope + at, mask=both, other=0.0), 1)
    along += tl.load(envelope + p, mask=mask, other=0.0) * tl.load(envelope_slope + p, mask=mask, other=0.0)
    vx, vy, vz = -ux, -uy, -uz
    g = geometry + p * 9
    g1, g2 = tl.load(g + 1, mask=mask, other=0.0), tl.load(g + 2, mask=mask, other=0.0)
    g3, g4 = tl.load(g + 3, mask=mask, other=0.0), tl.load(g + 4, mask=mask, other=0.0)
    g5, g6 = tl.load(g + 5, mask=mask, other=0.0), tl.load(g + 6, mask=mask, other=0.0)
    g7, g8 = tl.load(g + 7, mask=mask, other=0.0), tl.load(g + 8, mask=mask, other=0.0)
    wx = -SKEW * g3 + 2 * vx * g4 + vy * g5 + vz * g6
    wy = SKEW * g2 + vx * g5 + 2 * vy * g7 + vz * g8
    wz = -SKEW * g1 + vx * g6 + vy * g8
    # v = −r/d: only what is across the vector turns it
    dot = vx * wx + vy * wy + vz * wz
    tl.store(out + p * 3, along * ux - (wx - dot * vx) * inverse, mask=mask)
    tl.store(out + p * 3 + 1, along * uy - (wy - dot * vy) * inverse, mask=mask)
    tl.store(out + p * 3 + 2, along * uz - (wz - dot * vz) * inverse, mask=mask)


@triton.jit
def _push(
    rbf, envelope, geometry, u, r, rbf_slope, envelope_slope, num, SKEW: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The transpose of `_pull`: changes of the values with a change u of r."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = p <= num
    real = p < num
    _, inverse, ux, uy, uz = _direction(r, p, num)
    x = tl.load(u + p * 3, mask=real, other=0.0)
    y = tl.load(u + p * 3 + 1, mask=real, other=0.0)
    z = tl.load(u + p * 3 + 2, mask=real, other=0.0)
    along = ux * x + uy * y + uz * z
    k = tl.arange(0, BR)
    both = mask[:, None] & (k < R)[None, :]
    at = p[:, None] * R + k[None, :]
    tl.store(rbf + at, along[:, None] * tl.load(rbf_slope + at, mask=both, other=0.0), mask=both)
    tl.store(envelope + p, along * tl.load(envelope_slope + p, mask=mask, other=0.0), mask=mask)
    vx, vy, vz = -ux, -uy, -uz
    dx, dy, dz = -(x - along * ux) * inverse, -(y - along * uy) * inverse, -(z - along * uz) * inverse
    to = geometry + p * 9
    tl.store(to, tl.zeros((BLOCK,), vx.dtype), mask=mask)
    tl.store(to + 1, -SKEW * dz, mask=mask)
    tl.store(to + 2, SKEW * dy, mask=mask)
    tl.store(to + 3, -SKEW * dx, mask=mask)
    tl.store(to + 4, 2 * vx * dx, mask=mask)
    tl.store(to + 5, vx * dy + vy * dx, mask=mask)
    tl.store(to + 6, vx * dz + vz * dx, mask=mask)
    tl.store(to + 7, 2 * vy * dy, mask=mask)
    tl.store(to + 8, vy * dz + vz * dy, mask=mask)
