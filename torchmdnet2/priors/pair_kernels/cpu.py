"""Pair priors on the CPU: preparation, calls and kernels. See gpu.py.

The functions of the distance and their slopes are those of triton_kernels.py, for one pair and in float64:
g(d, b, c, constants, mode) → g, dg/dd.

Shapes: N atoms, B structures, E directed edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numba import njit
from torch import Tensor

from ...core.compiling_cpu import INNER, kernel
from ...kernels.interfaces import Array, Atoms, Edges, Term, TermLaunch, TermSums
from ...neighbors.pairs import require_molecules
from ...potential.prior import Prior
from ...system import System
from .parameters import D3Parameters, PairParameters, describe

__all__ = [
    "KERNELS",
    "MIN_DISTANCE",
    "NOTHING",
    "CpuD3Term",
    "CpuPairTerm",
    "add_edge",
    "add_row",
    "all_pairs",
    "coordination",
    "coordination_forces",
    "d2",
    "dispersion",
    "inline",
    "length",
    "limit",
    "make_cpu_term",
    "members_of_structures",
    "pair_potential",
    "reaction_field",
    "shifted_force",
    "taper",
    "zbl",
]


_FAR = 1e100  # Å, instead of infinity, with which the kernels cannot compare


def make_cpu_term(prior: Prior, elements: Iterable[int]) -> CpuPairTerm | CpuD3Term:
    """Return the kernels of a prior.

    Args:
        prior: a prior for which `parameters.unsupported_reason` returns "".
        elements: atomic numbers that can occur.
    """
    parameters = describe(prior, elements)
    return CpuD3Term(parameters) if isinstance(parameters, D3Parameters) else CpuPairTerm(parameters)


class _Pairs:
    """What `CpuPairTerm` holds of a composition.

    Attributes:
        key: [N] rows of `table`; table: [K, 3] numbers of elements or atoms.
        all: of `members_of_structures` where all pairs are summed, else None.
        unused: [N], a slope that nobody reads.
    """

    key: Array
    table: Array
    all: tuple[Array, Array, Array] | None
    unused: Array


class CpuPairTerm(Term):
    """A sum over pairs of one function of the distance."""

    def __init__(self, parameters: PairParameters):
        self.parameters = parameters
        self.cutoff, self.uses_charges = parameters.cutoff, parameters.source == "predicted"
        self._constants = tuple(c.numpy() if isinstance(c, Tensor) else c for c in parameters.constants)

    def allocate(self, num_atoms: int) -> _Pairs:
        return _Pairs()

    def set_composition(self, buffers: _Pairs, system: System) -> None:
        parameters, n = self.parameters, system.num_atoms
        by_element = parameters.source == "element"
        buffers.key = system.z.numpy().copy() if by_element else np.arange(n)
        buffers.table = np.zeros((128 if by_element else n, 3))
        if not self.uses_charges:
            numbers = parameters.table if by_element else parameters.numbers_of(system)
            assert numbers is not None
            buffers.table[:, : numbers.shape[1]] = numbers.numpy()
        buffers.unused = np.zeros(n)
        buffers.all = None if math.isfinite(self.cutoff) else _all_of_molecules(system)

    def run(self, buffers: _Pairs, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        p, key, table = self.parameters, buffers.key, buffers.table
        if self.uses_charges:
            table[:, 0] = atoms.charges
        slope = sums.charge_slope if self.uses_charges else buffers.unused
        last = sums.energy, sums.forces, sums.virial, slope
        n = atoms.num_rows
        if p.alone:
            a = table[key[:n], 0]
            sums.energy[:n] -= p.strength * p.alone * a * a
            slope[:n] -= 2 * p.strength * p.alone * a
        if edges is None:
            assert buffers.all is not None
            KERNELS[p.radial](n, *buffers.all, atoms.pos, key, table, p.strength, self._constants, p.mode, *last)
        else:
            KERNELS[p.radial](
                n, edges.row_ptr, edges.sender, edges.vectors, key, table, p.strength, limit(edges, p.cutoff),
                self._constants, p.mode, *last,
            )  # fmt: skip


class _Coordinated:
    """What `CpuD3Term` holds of a composition: atomic numbers, pairs as in `_Pairs`, and fields, with ghosts."""

    z: Array
    all: tuple[Array, Array, Array] | None
    weights: Array
    mixed: Array
    by_coordination: Array


class CpuD3Term(Term):
    """D3(BJ)."""

    cost = 35

    def __init__(self, parameters: D3Parameters):
        self.parameters, self.cutoff = parameters, parameters.cutoff

        def array(values: Tensor) -> Array:
            return np.ascontiguousarray(values.numpy())

        self._elements, self._reference = array(parameters.elements), array(parameters.reference)
        self._c6 = array(parameters.c6)
        self._none, self._none64 = np.empty((0, 3), np.float32), np.empty((0, 3))

    def allocate(self, num_atoms: int) -> _Coordinated:
        held, n = _Coordinated(), num_atoms
        held.weights, held.mixed = np.empty((n, 8)), np.empty((n, len(self._reference), 2, 8))
        held.by_coordination = np.empty(n)
        return held

    def set_composition(self, buffers: _Coordinated, system: System) -> None:
        buffers.z = system.z.numpy().copy()
        buffers.all = None if math.isfinite(self.cutoff) else _all_of_molecules(system)

    def run(self, buffers: _Coordinated, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        p, weights, mixed, by_coordination = self.parameters, buffers.weights, buffers.mixed, buffers.by_coordination
        if edges is None:
            assert buffers.all is not None
            pairs = *buffers.all, self._none, np.asarray(atoms.pos, np.float64), False
        else:
            pairs = edges.row_ptr[:-1], edges.row_ptr[1:], edges.sender, edges.vectors, self._none64, True
        rows = len(pairs[0]), *pairs, buffers.z, self._elements
        limits = _FAR if edges is None else limit(edges, p.cutoff), p.start, p.inverse
        coordination(*rows, self._reference, self._c6, *limits, weights, mixed)
        # the next pass reads weights of the neighbors, the last one dE/dCN of the neighbors
        atoms.send(weights)
        dispersion(
            *rows, weights, mixed, *limits, p.prior.s6, p.prior.s8, p.prior.a1, p.prior.a2, sums.energy, sums.forces,
            sums.virial, by_coordination,
        )  # fmt: skip
        atoms.send(by_coordination)
        coordination_forces(*rows, by_coordination, *limits, sums.energy, sums.forces, sums.virial)


def members_of_structures(system: System) -> tuple[Array, Array, Array]:
    """Return, for each atom, the first and last + 1 of its structure's atoms in a list; and the list."""
    batch = system.batch.numpy()
    end = np.bincount(batch, minlength=system.num_systems).cumsum()
    start = np.concatenate([[0], end[:-1]])
    return start[batch], end[batch], np.argsort(batch, kind="stable")


def _all_of_molecules(system: System) -> tuple[Array, Array, Array]:
    require_molecules(system)
    return members_of_structures(system)


def limit(rows: Edges, cutoff: float) -> float:
    """Return the distance in Å from which edges do not count; rows of the term's list end exactly at its cutoff."""
    return _FAR if rows.cutoff <= cutoff else cutoff


inline = njit(forceinline=True, **INNER)


@inline
def taper(d, start, inverse):
    """`priors.pairs.taper`, and its slope; `inverse` of the switch's width, 1/Å."""
    if d <= start:
        return 1.0, 0.0
    t = min((d - start) * inverse, 1.0)
    square = (1 - t) * (1 - t)
    return square * (1 - t) * (1 + t * (3 + 6 * t)), -30 * t * t * square * inverse


@inline
def zbl(d, power, radii, constants, covalent):
    """φ(d/a)/d · end; power = 1/a in 1/Å."""
    if covalent:
        if d >= radii:
            return 0.0, 0.0
        t = d / radii
        square = (1 - t) * (1 - t)
        end = square * (1 - t) * (1 + t * (3 + t * (6 + t * (10 + t * (15 + t * 21)))))
        end_slope = -168 * t**5 * square / radii
    else:
        cutoff = constants[0]
        half = math.pi / 2 * ((cutoff - d) / cutoff)
        sin = math.sin(half)
        end, end_slope = sin * sin, -math.pi / cutoff * sin * math.cos(half)
    x = d * power
    e0, e1 = 0.1818 * math.exp(-3.2 * x), 0.5099 * math.exp(-0.9423 * x)
    e2, e3 = 0.2802 * math.exp(-0.4029 * x), 0.02817 * math.exp(-0.2016 * x)
    g = (e0 + e1 + e2 + e3) / d
    slope = -(3.2 * e0 + 0.9423 * e1 + 0.4029 * e2 + 0.2016 * e3) * power / d - g / d
    return g * end, slope * end + g * end_slope


@inline
def pair_potential(d, place, _sum, constants, _mode):
    """(Σ_k A_k exp(−a_k (d − 1)) − Σ_k B_k exp(−b_k (d − 1))) (1 − d²/cutoff²)³; A, B in row `place` of the table."""
    table, cutoff = constants[0], constants[1]
    if d >= cutoff:
        return 0.0, 0.0
    row, x = int(place), d - 1.0
    r0, r1 = table[row, 0] * math.exp(-3.2 * x), table[row, 1] * math.exp(-4.0 * x)
    r2, r3 = table[row, 2] * math.exp(-5.0 * x), table[row, 3] * math.exp(-6.5 * x)
    q0, q1 = table[row, 4] * math.exp(-x), table[row, 5] * math.exp(-1.5 * x)
    q2, q3 = table[row, 6] * math.exp(-2.0 * x), table[row, 7] * math.exp(-2.6 * x)
    g = (r0 + r1 + r2 + r3) - (q0 + q1 + q2 + q3)
    slope = (q0 + 1.5 * q1 + 2.0 * q2 + 2.6 * q3) - (3.2 * r0 + 4.0 * r1 + 5.0 * r2 + 6.5 * r3)
    rest = (cutoff - d) * (cutoff + d) / (cutoff * cutoff)
    end, end_slope = rest * rest * rest, -6.0 * d / (cutoff * cutoff) * rest * rest
    return g * end, slope * end + g * end_slope


@inline
def d2(d, radii, _sum, constants, _mode):
    """1/d⁶ · 1/(1 + exp(−20 (d/radii − 1))) · taper."""
    r = 1 / d
    r3 = r * r * r
    exponent = -20 * (d / radii - 1)
    damping, damping_slope = 1.0, 0.0
    if exponent > -40:  # 1 in float64 beyond
        falling = math.exp(exponent)
        damping = 1 / (1 + falling)
        damping_slope = damping * damping * falling * (20 / radii)
    end, end_slope = taper(d, constants[0], constants[1])
    return r3 * r3 * damping * end, r3 * r3 * ((damping_slope - 6 * r * damping) * end + damping * end_slope)


@inline
def _short_range(d, lower, inverse, damping):
    """`Electrostatics.factor` and its slope; damping: 0 none, 1 "exp", 2 "cosine"."""
    if damping == 0:
        return 1.0, 0.0
    if damping == 1:
        t = min(d * inverse, 1 - 1e-6)
        rest = (1 - t) * (1 + t)
        x = t * t / rest
        if x > 60:  # 1 in float64, of a slope below 1e-20
            return 1.0, 0.0
        f = -math.expm1(-x)
        return f, (1 - f) * 2 * t * inverse / (rest * rest)
    phase = min(max((d - lower) * inverse, 0.0), 1.0) * (math.pi / 2)
    sin = math.sin(phase)
    return sin * sin, math.pi * inverse * sin * math.cos(phase)


@inline
def all_pairs(d, _b, _c, constants, damping):
    """f(d)/d."""
    f, f_slope = _short_range(d, constants[0], constants[1], damping)
    r = 1 / d
    return f * r, (f_slope - f * r) * r


@inline
def reaction_field(d, _b, _c, constants, damping):
    """f(d) (1/d + reaction d² − shift) · taper."""
    lower, inverse, start, taper_inverse, reaction, shift = constants
    f, f_slope = _short_range(d, lower, inverse, damping)
    end, end_slope = taper(d, start, taper_inverse)
    r = 1 / d
    field = r + reaction * d * d - shift
    return f * field * end, f_slope * field * end + f * ((2 * reaction * d - r * r) * end + field * end_slope)


@inline
def shifted_force(d, _b, _c, constants, damping):
    """(erfc(α d) − 1 + f(d))/d − value − slope (d − end); of an atom alone: `PairParameters.alone`."""
    lower, inverse, alpha, value, slope, end = constants
    f, f_slope = _short_range(d, lower, inverse, damping)
    r, x = 1 / d, alpha * d
    near = math.erfc(x) - 1 + f
    near_slope = f_slope - 2 / math.sqrt(math.pi) * alpha * math.exp(-x * x)
    return near * r - value - slope * (d - end), (near_slope - near * r) * r - slope


# --- Kernels for sums over pairs, as in triton_kernels.py, but in float64 ---
#
# Threads divide the atoms. Each atom adds to its row alone, so that results do not depend on the number of threads.

MIN_DISTANCE = 1e-3  # Å, as neighbors/pairs.py
NOTHING = (0.0,) * 10


@inline
def length(square):
    """Return d ≥ MIN_DISTANCE from d², and 1/d, which is 0 below MIN_DISTANCE, where the clamped d has no slope."""
    if square < MIN_DISTANCE * MIN_DISTANCE:
        return MIN_DISTANCE, 0.0
    d = math.sqrt(square)
    return d, 1 / d


@inline
def add_edge(s, energy, along, x, y, z):
    """The ten sums of a row (energy, force, xx, yy, zz, yz, xz, xy of the virial) with a pair: along = u'(d)/d."""
    gx, gy, gz = along * x, along * y, along * z
    return (
        s[0] + energy, s[1] + gx, s[2] + gy, s[3] + gz, s[4] + gx * x, s[5] + gy * y, s[6] + gz * z, s[7] + gy * z,
        s[8] + gx * z, s[9] + gx * y,
    )  # fmt: skip


@inline
def add_row(s, factor, i, energy, forces, virial):
    """Add the sums of a row, times a factor, to energy [N], forces [N, 3] and virial [N, 9].

    Energies and virials of both directions of a pair are equal: half. Forces are opposite, one on each atom: whole, and
    with vec = r_j − r_i the force on i is + u'(d) vec/d.
    """
    half = 0.5 * factor
    energy[i] += half * s[0]
    forces[i, 0] += factor * s[1]
    forces[i, 1] += factor * s[2]
    forces[i, 2] += factor * s[3]
    row = virial[i]
    row[0] += half * s[4]
    row[4] += half * s[5]
    row[8] += half * s[6]
    row[5] += half * s[7]
    row[7] += half * s[7]
    row[2] += half * s[8]
    row[6] += half * s[8]
    row[1] += half * s[9]
    row[3] += half * s[9]


@inline
def _listed(g_of, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces, virial):
    """Add the edges of atom i; return dE/dA."""
    own, s, limit = table[key[i]], NOTHING, cutoff * cutoff
    for e in range(row_ptr[i], row_ptr[i + 1]):
        x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
        square = x * x + y * y + z * z
        if square < limit:
            d, inverse = length(square)
            other = table[key[sender[e]]]
            g, slope = g_of(d, own[1] + other[1], own[2] + other[2], constants, mode)
            s = add_edge(s, other[0] * g, other[0] * slope * inverse, x, y, z)
    add_row(s, strength * own[0], i, energy, forces, virial)
    return strength * s[0]


@kernel
def _zbl(
    begin, stop, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope
):
    for i in range(begin, stop):
        slope[i] += _listed(
            zbl, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces, virial
        )


@kernel
def _d2(
    begin, stop, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope
):
    for i in range(begin, stop):
        slope[i] += _listed(
            d2, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces, virial
        )


@kernel
def _reaction_field(
    begin, stop,
    row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope
):  # fmt: skip
    for i in range(begin, stop):
        slope[i] += _listed(
            reaction_field, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces,
            virial,
        )  # fmt: skip


@kernel
def _shifted_force(
    begin, stop,
    row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope
):  # fmt: skip
    for i in range(begin, stop):
        slope[i] += _listed(
            shifted_force, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces,
            virial,
        )  # fmt: skip


@kernel
def _all_pairs(
    begin, stop, first, last, members, pos, key, table, strength, constants, mode, energy, forces, virial, slope
):
    """Add the pairs of atom i with members[first[i] … last[i] − 1], the atoms of its structure."""
    for i in range(begin, stop):
        own, s = table[key[i]], NOTHING
        for k in range(first[i], last[i]):
            j = members[k]
            if j != i:
                x, y, z = pos[j, 0] - pos[i, 0], pos[j, 1] - pos[i, 1], pos[j, 2] - pos[i, 2]
                d, inverse = length(x * x + y * y + z * z)
                other = table[key[j]]
                g, g_slope = all_pairs(d, own[1] + other[1], own[2] + other[2], constants, mode)
                s = add_edge(s, other[0] * g, other[0] * g_slope * inverse, x, y, z)
        add_row(s, strength * own[0], i, energy, forces, virial)
        slope[i] += strength * s[0]


@kernel
def _pair_potential(
    begin, stop, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, energy, forces, virial, slope
):
    for i in range(begin, stop):
        slope[i] += _listed(
            pair_potential, row_ptr, sender, vec, key, table, strength, cutoff, constants, mode, i, energy, forces,
            virial,
        )  # fmt: skip


KERNELS: dict[str, Callable] = {
    "zbl": _zbl,
    "pair_potential": _pair_potential,
    "d2": _d2,
    "reaction_field": _reaction_field,
    "shifted_force": _shifted_force,
    "all_pairs": _all_pairs,
}
"""Name of the function of the distance -> kernel, which adds to energy [N], forces [N, 3], virial [N, 9], slope [N]
(dE/dA).

Arguments: rows of edges (row_ptr [N + 1], sender and vec [E, 3] float32) or of structures; key [N], the row of the
table [K, 3] (A, b, c) of each atom; strength, cutoff (Å, finite), constants and mode as in ../parameters.py.
"""


# --- D3(BJ) in three passes over the edges, as in triton_kernels.py, but in float64 ---
#
# The edges of atom i are first[i] … last[i] − 1, with vectors vec [E, 3]. Without a list of pairs, `sender` holds all
# atoms of its structure, and vectors follow from the positions pos [N, 3].


@inline
def _count(d, bond, start, inverse):
    """Return the part of a neighbor at d in the coordination number, and its slope; `bond` is the sum of the radii."""
    falling = math.exp(-16 * (bond / d - 1))
    counted = 1 / (1 + falling)
    end, end_slope = taper(d, start, inverse)
    return counted * end, counted * (end_slope - counted * falling * (16 * bond / (d * d)) * end)


@inline
def _pair(listed, vec, pos, e, i, j):
    """Return the vector of an edge of atom i and its squared length; without a list, i itself does not count."""
    if listed:
        x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
    else:
        x, y, z = pos[j, 0] - pos[i, 0], pos[j, 1] - pos[i, 1], pos[j, 2] - pos[i, 2]
    return x, y, z, (x * x + y * y + z * z if listed or i != j else np.inf)


@kernel
def coordination(
    begin,
    stop,
    first,
    last,
    sender,
    vec,
    pos,
    listed,
    z,
    elements,
    reference,
    c6,
    cutoff,
    start,
    inverse,
    weights,
    mixed,
):
    """Write the weights [N, 8] of the references, and mixed [N, T, 2, 8]: C6 with each element's references, slope."""
    for i in range(begin, stop):
        radius, kind, count = elements[z[i], 0], int(elements[z[i], 2]), 0.0
        for e in range(first[i], last[i]):
            _x, _y, _z, square = _pair(listed, vec, pos, e, i, sender[e])
            if square < cutoff * cutoff:
                count += _count(length(square)[0], radius + elements[z[sender[e]], 0], start, inverse)[0]
        known, w, dw = reference[kind], weights[i], np.zeros(8)
        # no slope where the number is clamped: before it is
        steepness = -8.0 if count < elements[z[i], 3] else 0.0
        count = min(count, elements[z[i], 3])
        # exponents count from the largest: far from all references, all weights would be 0/0
        nearest = 1e30
        for a in range(8):
            nearest = min(nearest, (count - known[a]) ** 2)
        total, turn = 0.0, 0.0
        for a in range(8):
            w[a] = math.exp(-4 * ((count - known[a]) ** 2 - nearest))
            total += w[a]
        for a in range(8):
            w[a] /= total
            turn += w[a] * steepness * (count - known[a])
        for a in range(8):
            # dw_a/dCN = w_a (t_a − Σ_b w_b t_b), t = −8 (CN − CN_a)
            dw[a] = w[a] * (steepness * (count - known[a]) - turn)
        # C6_ij = Σ_ab w_a C6_ab w_b: the sum over a is the same for all neighbors of one element
        for t in range(len(reference)):
            row = mixed[i, t]
            row[:] = 0
            for a in range(8):
                for b in range(8):
                    row[0, b] += w[a] * c6[kind, t, a, b]
                    row[1, b] += dw[a] * c6[kind, t, a, b]


@kernel
def dispersion(
    begin, stop,
    first, last, sender, vec, pos, listed, z, elements, weights, mixed, cutoff, start, inverse, s6, s8, a1, a2, energy,
    forces, virial, by_coordination,
):  # fmt: skip
    """Add energies and forces at fixed coordination numbers; write by_coordination [N] = dE/dCN."""
    for i in range(begin, stop):
        own, s, turn = elements[z[i], 1], NOTHING, 0.0
        for e in range(first[i], last[i]):
            x, y, z_vec, square = _pair(listed, vec, pos, e, i, sender[e])
            if square < cutoff * cutoff:
                d, inverse_d = length(square)
                j = sender[e]
                w, row = weights[j], mixed[i, int(elements[z[j], 2])]
                c6, c6_turn = 0.0, 0.0
                for b in range(8):
                    c6 += row[0, b] * w[b]
                    c6_turn += row[1, b] * w[b]
                moments = own * elements[z[j], 1]
                f = a1 * moments + a2
                f2, d2 = f * f, d * d
                f6, d6 = f2 * f2 * f2, d2 * d2 * d2
                sixth, eighth = 1 / (d6 + f6), 1 / (d6 * d2 + f6 * f2)
                part6, part8 = s6 * sixth, s8 * moments * moments * eighth
                g = part6 + part8
                g_slope = -d6 / d * (6 * part6 * sixth + 8 * part8 * eighth * d2)
                end, end_slope = taper(d, start, inverse)
                # dE/dCN_i of the whole energy: CN_i is in both directions of a pair, each with ½
                turn -= c6_turn * g * end
                along = -c6 * (g_slope * end + g * end_slope) * inverse_d
                s = add_edge(s, -c6 * g * end, along, x, y, z_vec)
        by_coordination[i] = turn
        add_row(s, 1.0, i, energy, forces, virial)


@kernel
def coordination_forces(
    begin,
    stop,
    first,
    last,
    sender,
    vec,
    pos,
    listed,
    z,
    elements,
    by_coordination,
    cutoff,
    start,
    inverse,
    energy,
    forces,
    virial,
):
    """Add the forces through the coordination numbers."""
    for i in range(begin, stop):
        radius, s = elements[z[i], 0], NOTHING
        for e in range(first[i], last[i]):
            x, y, z_vec, square = _pair(listed, vec, pos, e, i, sender[e])
            if square < cutoff * cutoff:
                d, inverse_d = length(square)
                j = sender[e]
                slope = _count(d, radius + elements[z[j], 0], start, inverse)[1]
                # d_ij is in CN_i and in CN_j
                along = (by_coordination[i] + by_coordination[j]) * slope * inverse_d
                s = add_edge(s, 0.0, along, x, y, z_vec)
        add_row(s, 1.0, i, energy, forces, virial)
