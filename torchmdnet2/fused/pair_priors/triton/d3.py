"""D3(BJ) in three passes over the edges: coordination numbers; energies with their slopes; forces through coordination.

The formulas are those of priors/dispersion_d3.py. A pass over the row of an atom writes what belongs to this atom: no
atomics; same input, same result, bit for bit. Coordination numbers, weights and energies are summed in float64.

Shapes: N atoms, C edge capacity, T elements, 8 reference systems of an element (the last one unused).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_launch import after_previous
from .frame import neighbor, put, put_row, row_of
from .radial import taper

__all__ = ["coordination_force_kernel", "coordination_kernel", "dispersion_kernel"]


@triton.jit
def _count(d, bond, start, inverse):
    """How much a neighbor at d adds to the coordination number, and the slope; `bond` the sum of the radii."""
    falling = tl.exp(-16.0 * (bond / d - 1.0))
    counted = 1.0 / (1.0 + falling)
    end, end_slope = taper(d, start, inverse)
    return counted * end, counted * (end_slope - counted * falling * (16.0 * bond / (d * d)) * end)


@triton.jit(do_not_specialize=["types", "cutoff", "start", "inverse"])
def coordination_kernel(
    row_ptr, sender, vec, pos, batch, ptr, z, elements, reference, c6, weights, mixed, types, cutoff, start, inverse,
    BT: tl.constexpr, LISTED: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: how the C6 coefficients of atom i follow from its coordination number.

    Args:
        row_ptr [N + 1], sender [C], vec [C, 3]: edges within `cutoff` or further (LISTED); else all pairs by pos,
            batch and ptr, as for `pair_kernel`. z [N].
        elements: [128, 4] float32 by atomic number: covalent radius, √C8/C6 part, index 0 … T − 1, largest
            coordination number.
        reference: [T, 8] float32 coordination numbers, very large where there is no reference.
        c6: [T, T, 8, 8] float32 eV Å⁶ by element and reference of both.
        weights: [N, 8] of the references, written.
        mixed: [N, T, 2, 8], written: C6 with each element's references, and its slope in the coordination number.
        types: T. start, inverse: of the taper.
    """
    i = tl.program_id(0)
    after_previous(PDL)
    first_edge, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    own = elements + tl.load(z + i) * 4
    radius = tl.load(own)
    kind = tl.load(own + 2).to(tl.int64)
    count = tl.zeros([BE], tl.float64)
    for first in range(first_edge, end, BE):
        e = first + tl.arange(0, BE)
        use, j, _x, _y, _z, d, _inverse = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        other = tl.load(elements + tl.load(z + j, use, other=1) * 4, use, other=0.0)
        counted, _slope = _count(d, radius + other, start, inverse)
        count += tl.where(use, counted, 0.0).to(tl.float64)
    counted, most = tl.sum(count, 0), tl.load(own + 3).to(tl.float64)
    a = tl.arange(0, 8)
    away = tl.minimum(counted, most) - tl.load(reference + kind * 8 + a).to(tl.float64)
    exponent = -4.0 * away * away
    weight = tl.exp(exponent - tl.max(exponent, 0))
    weight = weight / tl.sum(weight, 0)
    turn = tl.where(counted < most, -8.0 * away, 0.0)
    turn = weight * (turn - tl.sum(weight * turn, 0))
    tl.store(weights + i.to(tl.int64) * 8 + a, weight.to(tl.float32))
    w, dw = weight.to(tl.float32)[None, :, None], turn.to(tl.float32)[None, :, None]
    for first in range(0, types, BT):
        t = first + tl.arange(0, BT)
        ok = t < types
        at = ((kind * types + t[:, None, None]) * 8 + a[None, :, None]) * 8 + a[None, None, :]
        block = tl.load(c6 + at, ok[:, None, None], other=0.0)
        row = mixed + ((i.to(tl.int64) * types + t[:, None]) * 16 + a[None, :])
        tl.store(row, tl.sum(block * w, 1), ok[:, None])
        tl.store(row + 8, tl.sum(block * dw, 1), ok[:, None])


@triton.jit(do_not_specialize=["types", "cutoff", "start", "inverse", "s6", "s8", "a1", "a2"])
def dispersion_kernel(
    row_ptr, sender, vec, pos, batch, ptr, z, elements, weights, mixed, energy, forces, virial, by_coordination,
    types, cutoff, start, inverse, s6, s8, a1, a2,
    LISTED: tl.constexpr, FIRST: tl.constexpr, VIRIAL: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: energy of atom i, forces at fixed coordination numbers, and by_coordination [N] = dE/dCN in eV.

    Args: as `coordination_kernel` and `pair_kernel`; s6, s8, a1 and a2 (Å) of the density functional.
    """
    i = tl.program_id(0)
    after_previous(PDL)
    first_edge, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    own = tl.load(elements + tl.load(z + i) * 4 + 1)
    row = mixed + i.to(tl.int64) * types * 16
    a = tl.arange(0, 8)
    total = tl.zeros([BE], tl.float64)
    turn = tl.zeros([BE], tl.float32)
    fx, fy, fz, xx, yy, zz, yz, xz, xy = turn, turn, turn, turn, turn, turn, turn, turn, turn
    for first in range(first_edge, end, BE):
        e = first + tl.arange(0, BE)
        use, j, x, y, z_vec, d, inverse_d = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        element = elements + tl.load(z + j, use, other=1) * 4
        moments = own * tl.load(element + 1, use, other=1.0)
        kind = tl.load(element + 2, use, other=0.0).to(tl.int32)
        weight = tl.load(weights + j[:, None] * 8 + a[None, :], use[:, None], other=0.0)
        mix = row + kind[:, None] * 16 + a[None, :]
        c6 = tl.sum(tl.load(mix, use[:, None], other=0.0) * weight, 1)
        c6_turn = tl.sum(tl.load(mix + 8, use[:, None], other=0.0) * weight, 1)
        ratio = moments * moments
        f = a1 * moments + a2
        f2, d2 = f * f, d * d
        f6, d6 = f2 * f2 * f2, d2 * d2 * d2
        sixth = 1.0 / (d6 + f6)
        eighth = 1.0 / (d6 * d2 + f6 * f2)
        part6, part8 = s6 * sixth, s8 * ratio * eighth
        g = part6 + part8
        g_slope = -d6 / d * (6.0 * part6 * sixth + 8.0 * part8 * eighth * d2)
        tapered, taper_slope = taper(d, start, inverse)
        total -= tl.where(use, c6 * g * tapered, 0.0).to(tl.float64)
        turn -= tl.where(use, c6_turn * g * tapered, 0.0)
        along = tl.where(use, -c6 * (g_slope * tapered + g * taper_slope) * inverse_d, 0.0)
        gx, gy, gz = along * x, along * y, along * z_vec
        fx += gx
        fy += gy
        fz += gz
        if VIRIAL:
            xx += gx * x
            yy += gy * y
            zz += gz * z_vec
            yz += gy * z_vec
            xz += gx * z_vec
            xy += gx * y
    put(energy + i, 0.5 * tl.sum(total, 0), FIRST)
    tl.store(by_coordination + i, tl.sum(turn, 0))
    put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, 1.0, FIRST, VIRIAL)


@triton.jit(do_not_specialize=["cutoff", "start", "inverse"])
def coordination_force_kernel(
    row_ptr, sender, vec, pos, batch, ptr, z, elements, by_coordination, forces, virial, cutoff, start, inverse,
    LISTED: tl.constexpr, VIRIAL: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: adds the force on atom i through all coordination numbers, and the virial of its row."""
    i = tl.program_id(0)
    after_previous(PDL)
    first_edge, end, px, py, pz = row_of(i, row_ptr, pos, batch, ptr, LISTED)
    radius = tl.load(elements + tl.load(z + i) * 4)
    own = tl.load(by_coordination + i)
    fx = tl.zeros([BE], tl.float32)
    fy, fz, xx, yy, zz, yz, xz, xy = fx, fx, fx, fx, fx, fx, fx, fx
    for first in range(first_edge, end, BE):
        e = first + tl.arange(0, BE)
        use, j, x, y, z_vec, d, inverse_d = neighbor(e, e < end, i, sender, vec, pos, px, py, pz, cutoff, LISTED)
        other = tl.load(elements + tl.load(z + j, use, other=1) * 4, use, other=0.0)
        _counted, slope = _count(d, radius + other, start, inverse)
        both = own + tl.load(by_coordination + j, use, other=0.0)
        along = tl.where(use, both * slope * inverse_d, 0.0)
        gx, gy, gz = along * x, along * y, along * z_vec
        fx += gx
        fy += gy
        fz += gz
        if VIRIAL:
            xx += gx * x
            yy += gy * y
            zz += gz * z_vec
            yz += gy * z_vec
            xz += gx * z_vec
            xy += gx * y
    put_row(forces, virial, i, fx, fy, fz, xx, yy, zz, yz, xz, xy, 1.0, False, VIRIAL)
