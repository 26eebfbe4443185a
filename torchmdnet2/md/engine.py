"""Engines advance a state by many steps: one by one from the host, or in blocks on the device.

Shapes: N atoms in B replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..engine.bound import BoundStep
from .integrators import State, VelocityVerlet

__all__ = ["Engine", "HostEngine"]


class Engine(ABC):
    """Advances the replicas of a simulation.

    Args:
        step: energy and forces of N atoms in B structures, float64; where the simulation begins.
        dynamics: the integrator.

    Attributes:
        ahead: blocks that may run while the host checks the previous one.
    """

    ahead = 0

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet):
        self.step, self.dynamics = step, dynamics

    def begin(self, vel: Tensor) -> State:
        """The state at the first positions with these velocities, on the host."""
        heat = torch.zeros(self.step.energy.shape[0], self.parts, dtype=torch.float64)
        state = self._state_of(vel, heat, 0).to("cpu").clone()
        self.load(state)
        return state

    def _state_of(self, vel: Tensor, heat: Tensor, steps: int) -> State:
        """The state on its device, without velocities and heat."""
        step, dynamics = self.step, self.dynamics
        state = State(step.pos, vel, step.forces, step.energy, heat, step=steps)
        if dynamics.barostat is not None:
            if step.stress is None:
                raise ValueError("constant pressure needs a step that computes the stress")
            state.cell, state.stress = step.cell, step.stress
        if dynamics.fast is not None:
            state.fast = dynamics.fast.forces
        return state

    def prepare(self) -> None:  # noqa: B027
        """Compile kernels and capture graphs, so that the first steps are as fast as later ones."""

    @property
    def parts(self) -> int:
        """P, the number of partial sums of a replica's heat."""
        return 1

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from another state."""

    @abstractmethod
    def launch(self, steps: int) -> None:
        """Advance by some steps; on a GPU, returns before they are done."""

    @abstractmethod
    def collect(self) -> State:
        """The state after the oldest launch that was not collected, on the host. It is
        overwritten by the second launch after this call."""

    @abstractmethod
    def drop(self) -> None:
        """Discard launches that were not collected."""

    def check(self) -> bool:
        """Whether the steps since the last check were good: as BoundStep.check."""
        fast = self.dynamics.fast
        enough = fast is None or fast.check()
        return self.step.check() and enough


class HostEngine(Engine):
    """Launches step by step from the host: on a CPU, and where the potential cannot be captured in a CUDA graph."""

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet):
        super().__init__(step, dynamics)
        self._state = self._state_of(torch.zeros_like(step.pos), torch.zeros_like(step.energy)[:, None], 0)
        self._done: list[State] = []

    def load(self, state: State) -> None:
        with torch.no_grad():
            self._state.copy_(state)

    def launch(self, steps: int) -> None:
        with torch.no_grad():
            self.dynamics.begin_block(self._state)
        self.advance(steps)
        self._done.append(self._state.clone().to("cpu"))

    def advance(self, steps: int) -> None:
        """Advance the state by some steps, one at least."""
        state, dynamics = self._state, self.dynamics
        for _ in range(steps):
            with torch.no_grad():
                dynamics.open(state)
            self.step.replay()
            with torch.no_grad():
                dynamics.close(state)

    def collect(self) -> State:
        return self._done.pop(0)

    def drop(self) -> None:
        self._done.clear()
