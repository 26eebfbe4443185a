"""Time steps in one Triton kernel: what integrators.py does between two evaluations of the forces.

Every program keeps its own count of the steps and its own part of the heat, so that nothing is passed between
programs, no atomics are needed and a captured graph needs no arguments from the host. Programs are one warp: it has
read the count before it writes the next.

Shapes: N atoms in B replicas of n atoms each; P parts of a replica, of BLOCK atoms.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "advance_kernel", "close_kernel", "normal3"]

BLOCK = 64


@triton.jit
def normal3(seed, atom, step):
    """Three standard normal numbers (float64) per atom; as noise.normal."""
    zero = atom * 0
    low = (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (step >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, atom, zero + low, zero + high, zero)
    unit: tl.constexpr = 2.0**-32
    turn: tl.constexpr = 6.283185307179586 * 2.0**-32
    first = tl.sqrt(tl.log((a.to(tl.float64) + 1.0) * unit) * -2.0)
    second = tl.sqrt(tl.log((c.to(tl.float64) + 1.0) * unit) * -2.0)
    angle, other = b.to(tl.float64) * turn, d.to(tl.float64) * turn
    return first * tl.cos(angle), first * tl.sin(angle), second * tl.cos(other)


@triton.jit(do_not_specialize=["num_atoms"])
def advance_kernel(
    pos, vel, forces, half_kick, masses, kick, constants, seeds, heat, counter, pending, num_atoms,
    LANGEVIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, p): close the step before, if it is not closed, and open the next one.

    Args:
        pos [N, 3], vel [N, 3], forces [N, 3]: float64.
        half_kick, masses, kick: [N] float64.
        constants: [3] float64: timestep, part of the velocity that friction leaves, eV in half an amu (Å/fs)².
        seeds: [B] int64.
        heat [B, P] float64, counter [B, P] int64, pending [B, P] int32: heat put in, steps opened, whether the last
            one is not closed.
        num_atoms: n.
    """
    b, p = tl.program_id(0), tl.program_id(1)
    slot = b * tl.num_programs(1) + p
    own = p * BLOCK + tl.arange(0, BLOCK)
    ok = own < num_atoms
    atom = b.to(tl.int64) * num_atoms + own
    at = atom * 3
    timestep = tl.load(constants)
    h = tl.load(half_kick + atom, ok, other=0.0)
    closing = tl.load(pending + slot) != 0
    x, y, z = tl.load(pos + at, ok), tl.load(pos + at + 1, ok), tl.load(pos + at + 2, ok)
    u, v, w = (
        tl.load(vel + at, ok, other=0.0),
        tl.load(vel + at + 1, ok, other=0.0),
        tl.load(vel + at + 2, ok, other=0.0),
    )
    du, dv, dw = h * tl.load(forces + at, ok), h * tl.load(forces + at + 1, ok), h * tl.load(forces + at + 2, ok)
    u, v, w = tl.where(closing, u + du, u), tl.where(closing, v + dv, v), tl.where(closing, w + dw, w)
    u, v, w = u + du, v + dv, w + dw
    if LANGEVIN:
        half = timestep * 0.5
        x, y, z = x + half * u, y + half * v, z + half * w
        mass = tl.load(masses + atom, ok, other=0.0)
        before = mass * (u * u + v * v + w * w)
        keep, width = tl.load(constants + 1), tl.load(kick + atom, ok, other=0.0)
        step = tl.load(counter + slot)
        r, s, t = normal3(tl.load(seeds + b), own, step)
        u, v, w = keep * u + width * r, keep * v + width * s, keep * w + width * t
        after = mass * (u * u + v * v + w * w)
        change = tl.sum(tl.where(ok, after - before, 0.0), 0)
        tl.store(heat + slot, tl.load(heat + slot) + change * tl.load(constants + 2))
        x, y, z = x + half * u, y + half * v, z + half * w
    else:
        step = tl.load(counter + slot)
        x, y, z = x + timestep * u, y + timestep * v, z + timestep * w
    tl.store(pos + at, x, ok)
    tl.store(pos + at + 1, y, ok)
    tl.store(pos + at + 2, z, ok)
    tl.store(vel + at, u, ok)
    tl.store(vel + at + 1, v, ok)
    tl.store(vel + at + 2, w, ok)
    tl.store(counter + slot, step + 1)
    tl.store(pending + slot, 1)


@triton.jit(do_not_specialize=["num_atoms"])
def close_kernel(vel, forces, half_kick, pending, num_atoms, BLOCK: tl.constexpr):
    """Program (b, p): close the step before, if it is not closed; arguments as above."""
    b, p = tl.program_id(0), tl.program_id(1)
    slot = b * tl.num_programs(1) + p
    own = p * BLOCK + tl.arange(0, BLOCK)
    ok = own < num_atoms
    atom = b.to(tl.int64) * num_atoms + own
    h = tl.load(half_kick + atom, ok, other=0.0)
    closing = tl.load(pending + slot) != 0
    for k in tl.static_range(3):
        v = tl.load(vel + atom * 3 + k, ok)
        tl.store(vel + atom * 3 + k, tl.where(closing, v + h * tl.load(forces + atom * 3 + k, ok), v), ok)
    tl.store(pending + slot, 0)
