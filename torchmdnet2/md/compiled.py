"""Dynamics on the CPU, compiled by numba: what integrators.py does between two evaluations of the forces.

For few atoms, the calls of PyTorch's operations cost as much as the forces. No fastmath, so that constant energy is as
integrators.py to the last bit.

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.compiling_cpu import compiled
from ..engine.bound import BoundStep
from ..units import AMU_A2_FS2
from .integrators import HostEngine, Langevin, VelocityVerlet

__all__ = ["CompiledEngine", "normal3"]

_compiled = compiled(error_model="numpy")

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUND0, _ROUND1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY0, _KEY1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_UNIT = 2.0**-32
_TURN = 2 * math.pi * 2.0**-32


@_compiled
def normal3(seed, atom, step):
    """Three standard normal numbers (float64) of an atom; as noise.normal."""
    key, word = np.uint64(seed), np.uint64(step)
    c0, c1, c2, c3 = np.uint64(atom), word & _MASK, word >> _HALF, np.uint64(0)
    k0, k1 = key & _MASK, key >> _HALF
    for _ in range(10):
        low, high = c0 * _ROUND0, c2 * _ROUND1
        c0, c1, c2, c3 = (high >> _HALF) ^ c1 ^ k0, high & _MASK, (low >> _HALF) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _KEY0) & _MASK, (k1 + _KEY1) & _MASK
    first = math.sqrt(-2 * math.log((np.float64(c0) + 1) * _UNIT))
    second = math.sqrt(-2 * math.log((np.float64(c2) + 1) * _UNIT))
    angle, other = np.float64(c1) * _TURN, np.float64(c3) * _TURN
    return first * math.cos(angle), first * math.sin(angle), second * math.cos(other)


@_compiled
def _advance(pos, vel, forces, half_kick, timestep, closing):
    """Close the previous step, if `closing`, and open the next one, at constant energy.

    Args:
        pos [N, 3], vel [N, 3], forces [N, 3], half_kick [N]: float64; positions and velocities are overwritten.
        timestep: fs.
        closing: whether the forces are those of a step that is not closed.
    """
    for a in range(len(pos)):
        for k in range(3):
            push, v = half_kick[a] * forces[a, k], vel[a, k]
            if closing:
                v += push
            v += push
            vel[a, k] = v
            pos[a, k] += timestep * v


@_compiled
def _advance_langevin(
    pos, vel, forces, half_kick, timestep, masses, kick, keep, seeds, heat, half_amu, step, closing
):  # fmt: skip
    """As `_advance`, with a Langevin bath.

    Args:
        masses [N], kick [N]: float64, keep: as Langevin has them.
        seeds: [B] int64.
        heat: [B, 1] float64, eV; the heat of the step is added.
        half_amu: eV in half an amu (Å/fs)².
        step: steps done.
    """
    n, half = len(pos) // len(seeds), 0.5 * timestep
    for b in range(len(seeds)):
        change = 0.0
        for i in range(n):
            a = b * n + i
            noise = normal3(seeds[b], i, step)
            before, after = 0.0, 0.0
            for k in range(3):
                push, v = half_kick[a] * forces[a, k], vel[a, k]
                if closing:
                    v += push
                v += push
                x = pos[a, k] + half * v
                before += v * v
                v = keep * v + kick[a] * noise[k]
                after += v * v
                vel[a, k] = v
                pos[a, k] = x + half * v
            change += masses[a] * (after - before)
        heat[b, 0] += half_amu * change


@_compiled
def _close(vel, forces, half_kick):
    """Close the previous step; arguments as above."""
    for a in range(len(vel)):
        for k in range(3):
            vel[a, k] += half_kick[a] * forces[a, k]


class CompiledEngine(HostEngine):
    """Fast dynamics of few atoms on a CPU, in a constant cell, with one potential.

    Results are those of HostEngine: at constant energy to the last bit, with a bath up to rounding.

    Args:
        step: on the CPU.
        dynamics: as for Engine.
    """

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet):
        super().__init__(step, dynamics)
        state = self._state
        self._vel, self._forces, heat = state.vel.numpy(), state.forces.numpy(), state.heat.numpy()
        self._half_kick = dynamics.half_kick.flatten().numpy()
        self._given: tuple[Any, ...] = (
            state.pos.numpy(), self._vel, self._forces, self._half_kick, dynamics.timestep
        )  # fmt: skip
        self._bath: tuple[Any, ...] = ()
        if isinstance(dynamics, Langevin):
            masses, kick = dynamics.atoms.masses.flatten().numpy(), dynamics.kick_width.flatten().numpy()
            self._bath = (masses, kick, dynamics.keep, dynamics.seeds.numpy(), heat, 0.5 * AMU_A2_FS2)

    def advance(self, steps: int) -> None:
        state, given, bath, replay = self._state, self._given, self._bath, self.step.replay
        for k in range(steps):
            if bath:
                _advance_langevin(*given, *bath, state.step, k > 0)
            else:
                _advance(*given, k > 0)
            replay()
            state.step += 1
        _close(self._vel, self._forces, self._half_kick)
