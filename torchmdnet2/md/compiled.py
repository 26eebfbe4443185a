"""Dynamics on the CPU with a compiled integrator. Needs numba.

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

from typing import Any

from ..engine.bound import BoundStep
from ..units import AMU_A2_FS2
from . import kernels_cpu as kernels
from .engine import HostEngine
from .integrators import Langevin, VelocityVerlet

__all__ = ["CompiledEngine"]


class CompiledEngine(HostEngine):
    """As HostEngine: at constant energy to the last bit; random numbers and sums to rounding.

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
            masses, kick = dynamics.atoms.masses.flatten().numpy(), dynamics.kick.flatten().numpy()
            self._bath = (masses, kick, dynamics.keep, dynamics.seeds.numpy(), heat, 0.5 * AMU_A2_FS2)

    def advance(self, steps: int) -> None:
        state, given, bath, replay = self._state, self._given, self._bath, self.step.replay
        for k in range(steps):
            if bath:
                kernels.advance_langevin(*given, *bath, state.step, k > 0)
            else:
                kernels.advance(*given, k > 0)
            replay()
            state.step += 1
        kernels.close(self._vel, self._forces, self._half_kick)
