"""The end of a step: energies of the atoms, sums over each structure in float64, stress, and error flags.

No atomics in the sums: the atoms of a structure lie together, a program adds up a fixed part of them, and the parts
are added in order. Same input, same result, bit for bit.

Shapes: N atoms, B structures, P parts of a structure.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..core.triton_launch import after_previous

__all__ = [
    "BROKEN", "MAX_PARTS", "NO_VOLUME", "RESULT_NOT_FINITE", "TERMS", "energy_spread_kernel", "finish_kernel",
    "mean_kernel",
]  # fmt: skip


RESULT_NOT_FINITE = 16  # an energy or a force is NaN or infinite, though the edges could be used
NO_VOLUME = 32  # the stress was requested, and the cell has no volume
BROKEN = 15  # the bits of the neighbor search: the edges must not be used
MAX_PARTS = 256
TERMS = 8  # numbers per part: the energy, xx, yy, zz, yz, xz, xy of the virial, one unused

_BROKEN = tl.constexpr(BROKEN)
_RESULT_NOT_FINITE = tl.constexpr(RESULT_NOT_FINITE)
_NO_VOLUME = tl.constexpr(NO_VOLUME)
_SEARCH_NOT_FINITE = tl.constexpr(2)
_TERMS = tl.constexpr(TERMS)


@triton.jit
def volume_of(cell, b):
    """Volume of the cell of structure b, float64."""
    row = cell + b * 9
    ax, ay, az = tl.load(row).to(tl.float64), tl.load(row + 1).to(tl.float64), tl.load(row + 2).to(tl.float64)
    bx, by, bz = tl.load(row + 3).to(tl.float64), tl.load(row + 4).to(tl.float64), tl.load(row + 5).to(tl.float64)
    cx, cy, cz = tl.load(row + 6).to(tl.float64), tl.load(row + 7).to(tl.float64), tl.load(row + 8).to(tl.float64)
    return tl.abs(ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx))


@triton.jit
def write_totals(e, xx, yy, zz, yz, xz, xy, b, broken, volume, flag, energy, stress, STRESS: tl.constexpr):
    """Write energy and stress of structure b from its sums; NaN if the edges cannot be used (broken)."""
    if ((e != e) | (tl.abs(e) > 1.7e308)) & ~broken:
        tl.atomic_or(flag, _RESULT_NOT_FINITE)
    tl.store(energy + b, tl.where(broken, float("nan"), e))
    if STRESS:
        if volume == 0.0:
            tl.atomic_or(flag, _NO_VOLUME)
        factor = tl.where(broken | (volume == 0.0), float("nan"), 1.0 / tl.where(volume == 0.0, 1.0, volume))
        out = stress + b * 9
        tl.store(out, xx * factor)
        tl.store(out + 1, xy * factor)
        tl.store(out + 2, xz * factor)
        tl.store(out + 3, xy * factor)
        tl.store(out + 4, yy * factor)
        tl.store(out + 5, yz * factor)
        tl.store(out + 6, xz * factor)
        tl.store(out + 7, yz * factor)
        tl.store(out + 8, zz * factor)


@triton.jit
def note_others(state, needed, most, OTHERS: tl.constexpr):
    """Keep the largest number of edges that other searches needed: [OTHERS, 2] numbers, the first of each two.

    Counts from invalid positions are ignored.
    """
    if (state & _SEARCH_NOT_FINITE) == 0:
        for k in tl.static_range(OTHERS):
            tl.store(most + 2 * k, tl.maximum(tl.load(most + 2 * k), tl.load(needed + 2 * k)))


@triton.jit
def virial_of_rows(virial, place, ok):
    """xx, yy, zz, yz, xz, xy of the symmetric virials of some rows, float64."""
    row = virial + place.to(tl.int64) * 9
    xx = tl.load(row, ok, other=0.0).to(tl.float64)
    yy = tl.load(row + 4, ok, other=0.0).to(tl.float64)
    zz = tl.load(row + 8, ok, other=0.0).to(tl.float64)
    v5, v7 = tl.load(row + 5, ok, other=0.0).to(tl.float64), tl.load(row + 7, ok, other=0.0).to(tl.float64)
    v2, v6 = tl.load(row + 2, ok, other=0.0).to(tl.float64), tl.load(row + 6, ok, other=0.0).to(tl.float64)
    v1, v3 = tl.load(row + 1, ok, other=0.0).to(tl.float64), tl.load(row + 3, ok, other=0.0).to(tl.float64)
    # a row need not be symmetric; the sum over a structure is, since rotations do not change its energy
    return xx, yy, zz, 0.5 * (v5 + v7), 0.5 * (v2 + v6), 0.5 * (v1 + v3)


@triton.jit
def part_sum(row, ok):
    """The sum over parts, in a tree of fixed order; those that are missing are 0 in it. Other programs wrote them."""
    return tl.sum(tl.load(row, ok, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
def add_parts(
    parts, b, num_parts, shift, broken, volume, flag, energy, stress, STRESS: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Write energy and stress of structure b from its parts."""
    k = tl.arange(0, MOST)
    row = parts + (b * num_parts + k).to(tl.int64) * _TERMS
    ok = k < num_parts
    e = part_sum(row, ok) + shift
    xx, yy, zz, yz, xz, xy = e, e, e, e, e, e
    if STRESS:
        xx, yy, zz = part_sum(row + 1, ok), part_sum(row + 2, ok), part_sum(row + 3, ok)
        yz, xz, xy = part_sum(row + 4, ok), part_sum(row + 5, ok), part_sum(row + 6, ok)
    write_totals(e, xx, yy, zz, yz, xz, xy, b, broken, volume, flag, energy, stress, STRESS)


@triton.jit
def finish_kernel(
    raw_energy, raw_forces, virial, unit, row_ptr, order, isolated, reference, neutral, ptr, shift, cell, flag, needed,
    most, needed_by_others, most_of_others, atom_energies, forces, energy, stress, parts, arrived, term_energy,
    term_forces, term_virial, raw_charges, charges,
    SUBTRACT: tl.constexpr, SORTED: tl.constexpr, STRESS: tl.constexpr, SINGLE: tl.constexpr, WITH_TERMS: tl.constexpr,
    CHARGES: tl.constexpr, OTHERS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, p): part p of P ≤ MOST of structure b.

    Args:
        raw_energy [N], raw_forces [N, 3], virial [N, 9]: of the network, float32, in `unit` of eV.
        row_ptr: [N + 1] edges; an atom without edges, in a neutral structure, has exactly the energy of the priors.
        order: [N] the atom that stands at each place (SORTED).
        isolated, reference: [N] float64, eV, by atom (not by place): what to subtract and to add.
        neutral: [B] int32. ptr: [B + 1] first place of each structure. shift: [1] eV per structure. cell: [B, 3, 3].
        flag, needed, most: [1] state of the search, edges found, the largest number of edges found; needed_by_others,
            most_of_others: [OTHERS, 2] of other searches, the first of each two.
        atom_energies [N] float64, forces [N, 3], energy [B] float64, stress [B, 3, 3] float64: results.
        parts: [B, P, TERMS] float64, the sums of the parts; arrived: [B] int32, 0 before and after (unless SINGLE: then
            there is only one part). The program of a structure that is done last adds up the parts, in their order.
        term_energy [N] float64, term_forces [N, 3], term_virial [N, 9] float32, in eV: sums of the other terms by place
            (WITH_TERMS; else not read).
        raw_charges [N] float64 by place, charges [N] float64 by atom: of the network, and results (CHARGES; else not
            read or written).

    The kernel before must not write flag, needed, most, shift, cell or neutral: they are read before it has ended.
    """
    b = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    first, end = tl.load(ptr + b), tl.load(ptr + b + 1)
    size = (end - first + num_parts - 1) // num_parts
    low = first + part * size
    high = tl.minimum(low + size, end)
    # all that is read after the sums is read here, older than the kernel before: few atoms wait for that one alone
    state, found = tl.load(flag, cache_modifier=".cg"), tl.load(needed, cache_modifier=".cg")
    energy_shift, largest = tl.load(shift), tl.load(most, cache_modifier=".cg")
    volume = volume_of(cell, b) if STRESS else 1.0
    broken = (state & _BROKEN) != 0
    is_neutral = tl.load(neutral + b) != 0
    after_previous(PDL)
    e = tl.zeros([BLOCK], tl.float64)
    xx = tl.zeros([BLOCK], tl.float64)
    yy = tl.zeros([BLOCK], tl.float64)
    zz = tl.zeros([BLOCK], tl.float64)
    yz = tl.zeros([BLOCK], tl.float64)
    xz = tl.zeros([BLOCK], tl.float64)
    xy = tl.zeros([BLOCK], tl.float64)
    for start in range(low, high, BLOCK):
        place = start + tl.arange(0, BLOCK)
        ok = place < high
        if SORTED:
            atom = tl.load(order + place, ok, other=0).to(tl.int64)
        else:
            atom = place.to(tl.int64)
        own = tl.load(raw_energy + place, ok, other=0.0).to(tl.float64) * unit
        if SUBTRACT:
            own -= tl.load(isolated + atom, ok, other=0.0)
            alone = tl.load(row_ptr + place + 1, ok, other=0) == tl.load(row_ptr + place, ok, other=0)
            own = tl.where(alone & is_neutral, 0.0, own)
        own += tl.load(reference + atom, ok, other=0.0)
        if WITH_TERMS:
            own += tl.load(term_energy + place, ok, other=0.0)
        tl.store(atom_energies + atom, tl.where(broken, float("nan"), own), ok)
        e += tl.where(ok, own, 0.0)
        if CHARGES:
            q = tl.load(raw_charges + place, ok, other=0.0)
            tl.store(charges + atom, tl.where(broken, float("nan"), q), ok)
        at = place.to(tl.int64) * 3
        for k in tl.static_range(3):
            f = tl.load(raw_forces + at + k, ok, other=0.0) * unit
            if WITH_TERMS:
                f += tl.load(term_forces + at + k, ok, other=0.0)
            f = tl.where(broken, float("nan"), f)
            tl.store(forces + atom * 3 + k, f.to(forces.dtype.element_ty), ok)
            e += f.to(tl.float64) * 0.0  # a force that is not finite is seen in the energy
        if STRESS:
            v = virial_of_rows(virial, place, ok)
            # still in `unit`: the sums are multiplied once, below
            xx, yy, zz, yz, xz, xy = xx + v[0], yy + v[1], zz + v[2], yz + v[3], xz + v[4], xy + v[5]
            if WITH_TERMS:
                v = virial_of_rows(term_virial, place, ok)
                inverse = 1.0 / unit  # a power of two
                xx, yy, zz = xx + v[0] * inverse, yy + v[1] * inverse, zz + v[2] * inverse
                yz, xz, xy = yz + v[3] * inverse, xz + v[4] * inverse, xy + v[5] * inverse
    # one program: the largest number is read and written without atomics
    if (b == 0) & (part == 0):
        if (state & _SEARCH_NOT_FINITE) == 0:
            tl.store(most, tl.maximum(largest, found))
        note_others(state, needed_by_others, most_of_others, OTHERS)
    se = tl.sum(e, 0)
    sxx, syy, szz = tl.sum(xx, 0) * unit, tl.sum(yy, 0) * unit, tl.sum(zz, 0) * unit
    syz, sxz, sxy = tl.sum(yz, 0) * unit, tl.sum(xz, 0) * unit, tl.sum(xy, 0) * unit
    if SINGLE:
        se += energy_shift
        write_totals(se, sxx, syy, szz, syz, sxz, sxy, b, broken, volume, flag, energy, stress, STRESS)
    else:
        out = parts + (b * num_parts + part).to(tl.int64) * _TERMS
        tl.store(out, se)
        if STRESS:
            tl.store(out + 1, sxx)
            tl.store(out + 2, syy)
            tl.store(out + 3, szz)
            tl.store(out + 4, syz)
            tl.store(out + 5, sxz)
            tl.store(out + 6, sxy)
        tl.debug_barrier()  # the sums are written before this program counts as done
        if tl.atomic_add(arrived + b, 1, sem="acq_rel") == num_parts - 1:
            tl.store(arrived + b, 0)
            add_parts(parts, b, num_parts, energy_shift, broken, volume, flag, energy, stress, STRESS, MOST)


# --- Several members: their mean, which `finish_kernel` takes like the results of one network, and their spread ---


@triton.jit
def of_members(network, unit, terms, at, stride, ok, M: tl.constexpr, LANES: tl.constexpr, WITH_TERMS: tl.constexpr):
    """Numbers at some places for each member, [LANES, .] float64, 0 from M on; and their mean."""
    member = tl.arange(0, LANES)[:, None]
    at = member.to(tl.int64) * stride + at[None, :]
    ok = (member < M) & ok[None, :]
    found = tl.load(network + at, ok, other=0.0).to(tl.float64) * unit
    if WITH_TERMS:
        found += tl.load(terms + at, ok, other=0.0).to(tl.float64)
    return found, tl.sum(found, 0) / M


@triton.jit
def deviation(found, mean, M: tl.constexpr, LANES: tl.constexpr):
    """Sample standard deviation over the first axis."""
    away = tl.where(tl.arange(0, LANES)[:, None] < M, found - mean[None, :], 0.0)
    return tl.sqrt(tl.sum(away * away, 0) / (M - 1))


@triton.jit
def mean_kernel(
    raw_energy, raw_forces, raw_virial, raw_charges, unit, term_energy, term_forces, term_virial, order, energy, forces,
    virial, charges, forces_std, num_atoms,
    M: tl.constexpr, LANES: tl.constexpr, SORTED: tl.constexpr, STRESS: tl.constexpr, WITH_TERMS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Means over M members, in eV, and the spread of the forces.

    Args:
        raw_energy [M·N], raw_forces [M·N, 3], raw_virial [M·N, 9], in `unit` of eV, raw_charges [M·N]: of networks.
        term_energy [M·N] float64, term_forces [M·N, 3], term_virial [M·N, 9]: of terms that read charges (WITH_TERMS).
        order: as for `finish_kernel`.
        energy [N] float64, forces [N, 3], virial [N, 9], charges [N] float64: by place, written.
        forces_std: [N, 3] by atom, written.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_previous(PDL)
    ok = place < num_atoms
    place = place.to(tl.int64)
    atom = place
    if SORTED:
        atom = tl.load(order + place, ok, other=0).to(tl.int64)
    mean = of_members(raw_energy, unit, term_energy, place, num_atoms, ok, M, LANES, WITH_TERMS)[1]
    tl.store(energy + place, mean, ok)
    mean = of_members(raw_charges, 1.0, term_energy, place, num_atoms, ok, M, LANES, False)[1]
    tl.store(charges + place, mean, ok)
    for k in tl.static_range(3):
        found, mean = of_members(raw_forces, unit, term_forces, place * 3 + k, num_atoms * 3, ok, M, LANES, WITH_TERMS)
        tl.store(forces + place * 3 + k, mean.to(tl.float32), ok)
        spread = deviation(found, mean, M, LANES)
        tl.store(forces_std + atom * 3 + k, spread.to(forces_std.dtype.element_ty), ok)
    if STRESS:
        for k in tl.static_range(9):
            at = place * 9 + k
            mean = of_members(raw_virial, unit, term_virial, at, num_atoms * 9, ok, M, LANES, WITH_TERMS)[1]
            tl.store(virial + at, mean.to(tl.float32), ok)


@triton.jit
def energy_spread_kernel(
    raw_energy, unit, term_energy, ptr, reference, energy_std, num_atoms,
    M: tl.constexpr, LANES: tl.constexpr, WITH_TERMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: the spread of the energy of structure b, [B] float64; see `mean_kernel`.

    Args:
        reference: [M·N] float64 eV, what is added to the energies, by atom: structures lie together in both orders.
    """
    b = tl.program_id(0)
    after_previous(PDL)
    start, end = tl.load(ptr + b), tl.load(ptr + b + 1)
    total = tl.zeros([LANES, BLOCK], tl.float64)
    for first in range(start, end, BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        total += of_members(raw_energy, unit, term_energy, place, num_atoms, place < end, M, LANES, WITH_TERMS)[0]
        total += of_members(reference, 1.0, term_energy, place, num_atoms, place < end, M, LANES, False)[0]
    found = tl.sum(total, 1)[:, None]
    tl.store(energy_std + b + tl.arange(0, 1), deviation(found, tl.sum(found, 0) / M, M, LANES))
