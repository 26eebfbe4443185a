"""Dynamics that stay on the device: several steps in one CUDA graph, results copied to the host while the next run.

Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.capture import CudaGraph, ReplayDiffers
from ..runtime.reference import BoundStep
from ..units import AMU_A2_FS2
from .engine import Engine
from .integrators import Langevin, VelocityVerlet
from .kernels import BLOCK, advance_kernel, close_kernel
from .state import State

__all__ = ["GraphEngine"]

_CHUNK = 20  # steps in one graph
_CHUNK_UP_TO = 4096  # atoms; above, the pause between two graphs is nothing beside a step


class GraphEngine(Engine):
    """Integrator and potential in CUDA graphs. Under Triton's interpreter (tests): the same launches on the CPU.

    Args:
        step: on the device, without waits.
        dynamics: as for Engine.
        interval: steps between the moments when the host looks.
        capture: False for a step that replays a graph of its own, which cannot be captured in another.

    Attributes:
        captures: how often a graph was captured.
    """

    ahead = 1

    def __init__(self, step: BoundStep, dynamics: VelocityVerlet, interval: int = _CHUNK, capture: bool = True):
        super().__init__(step, dynamics)
        pos, atoms = step.pos, dynamics.atoms
        self.captures = 0
        self._device = pos.device
        self._cuda = pos.device.type == "cuda"
        self._capturing = capture and self._cuda
        self._grid = (atoms.replicas, self.parts)

        def new(dtype: torch.dtype) -> Tensor:
            return torch.zeros(self._grid, dtype=dtype, device=pos.device)

        self._vel, self._heat = torch.zeros_like(pos), new(torch.float64)
        self._counter, self._pending = new(torch.int64), new(torch.int32)
        self._half_kick, self._masses = dynamics.half_kick.flatten(), atoms.masses.flatten()
        self._kick, keep, self._seeds = self._masses, 1.0, self._counter
        if isinstance(dynamics, Langevin):
            self._kick, keep, self._seeds = dynamics.kick.flatten(), dynamics.keep, dynamics.seeds
        constants = [dynamics.timestep, keep, 0.5 * AMU_A2_FS2]
        self._constants = torch.tensor(constants, dtype=torch.float64, device=pos.device)
        self._chunk = min(_CHUNK, interval) if pos.shape[0] <= _CHUNK_UP_TO else 1
        self._graphs: dict[int, CudaGraph] = {}
        self._steps = 0
        self._slots = [self._slot() for _ in range(self.ahead + 2)]
        self._under_way: list[_Slot] = []
        self._next = 0

    @property
    def parts(self) -> int:
        return -(-self.dynamics.atoms.num_atoms // BLOCK)

    # --- states --------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        """The state where it lives."""
        step = self.step
        return State(step.pos, self._vel, step.forces, step.energy, self._heat, self._steps)

    def _slot(self) -> _Slot:
        """Room for a copy on the host."""
        state = self._state()
        for name, value in state.tensors().items():
            setattr(state, name, torch.zeros_like(value, device="cpu", pin_memory=self._cuda))
        return _Slot(state, torch.cuda.Event() if self._cuda else None)

    def load(self, state: State) -> None:
        self._state().copy_(state)
        self._counter.fill_(state.step)
        self._pending.zero_()
        self._steps = state.step

    def prepare(self) -> None:
        if self._capturing:
            with torch.cuda.device(self._device):
                self._capture(self._chunk)
                self._close()  # nothing is open: this compiles the kernel

    # --- steps ---------------------------------------------------------------------------------------------------

    def launch(self, steps: int) -> None:
        with torch.cuda.device(self._device) if self._cuda else contextlib.nullcontext():
            self._launch_block(steps)

    def _launch_block(self, steps: int) -> None:
        left = steps
        for size in (self._chunk, 1):
            while left >= size:
                self._run(size)
                left -= size
        self._close()
        self._steps += steps
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        for name, value in self._state().tensors().items():
            getattr(slot.state, name).copy_(value, non_blocking=True)
        slot.state.step = self._steps
        if slot.done is not None:
            slot.done.record()
        self._under_way.append(slot)

    def _close(self) -> None:
        close_kernel[self._grid](
            self._vel, self.step.forces, self._half_kick, self._pending, self.dynamics.atoms.num_atoms, BLOCK=BLOCK,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def collect(self) -> State:
        slot = self._under_way.pop(0)
        while slot.done is not None and not slot.done.query():
            time.sleep(5e-5)  # unlike waiting for the event, this can be interrupted
        return slot.state

    def drop(self) -> None:
        while self._under_way:
            self.collect()

    def check(self) -> bool:
        good = self.step.check()
        if not good:  # other buffers: what was captured is void
            self._graphs.clear()
        return good

    def _run(self, size: int) -> None:
        if not self._capturing:
            self._launch(size)
            return
        if size not in self._graphs:
            self._capture(size)
        self._graphs[size].replay()

    def _launch(self, size: int) -> None:
        dynamics = self.dynamics
        for _ in range(size):
            advance_kernel[self._grid](
                self.step.pos, self._vel, self.step.forces, self._half_kick, self._masses, self._kick, self._constants,
                self._seeds, self._heat, self._counter, self._pending, dynamics.atoms.num_atoms,
                LANGEVIN=isinstance(dynamics, Langevin), BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
            self.step.replay()

    def _capture(self, size: int) -> None:
        """Capture `size` steps; what a replay gives is compared with what the launches give."""
        tensors = [*self._state().tensors().values(), self._counter, self._pending]
        try:
            graph = CudaGraph.record(lambda: self._launch(size), self._device, tensors, changes_inputs=True)
        except ReplayDiffers as error:
            raise ReplayDiffers(f"{error}, in dynamics: please report this") from None
        self._graphs[size] = graph
        self.captures += 1


class _Slot(NamedTuple):
    state: State
    done: torch.cuda.Event | None
