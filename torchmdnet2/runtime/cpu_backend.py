"""The CPU's compiled kernels as a backend.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..potential import Result
from ..system import System
from .backend import Backend, Declined, Task
from .coverage import describe_priors, unsupported_reason
from .reference import BoundStep
from .timings import Timing

if TYPE_CHECKING:
    from .cpu_model import CpuModel

__all__ = ["CompiledCpuBackend"]


class CompiledCpuBackend(Backend):
    """Kernels that numba compiles."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.unsupported_reason = self._reason()

    def _reason(self) -> str:
        if self.task.precision == "float64":
            return "precision='float64' was asked for"
        reason = unsupported_reason(self.task.potential, compiled=True)
        if reason:
            return reason
        try:
            from . import cpu_bound
        except (ImportError, RuntimeError) as error:
            return f"the fused kernels need numba ({error})"
        self._module = cpu_bound
        return ""

    @cached_property
    def _model(self) -> CpuModel:
        return self._module.CpuModel(self.task.potential)

    def run(self, system: System, forces: bool, stress: bool) -> Result:
        self._require_usable(system)
        return self._model(system, forces=forces, stress=stress)

    def bind(self, system: System, stress: bool) -> BoundStep:
        self._require_usable(system)
        return self._module.CpuBoundStep(self._model, system, stress)

    def timings(self, system: System, stress: bool) -> list[Timing]:
        self._require_usable(system)
        self._model(system)  # checked on its first use
        return self._model.timings(system)

    def _require_usable(self, system: System) -> None:
        reason = unsupported_system(system) or self._module.lost_by_fork()
        if reason:
            raise Declined(reason)

    def describe(self, reasons: str) -> list[str]:
        number = torch.get_num_threads()
        threads = "1 thread" if number == 1 else f"up to {number} threads, or 1 where that is faster"
        kind = type(self.task.potential.representation).__name__
        lines = [f"compiled {kind} kernels (numba) on {self.task.device}, float32, {threads}"]
        lines += describe_priors(self.task.potential, compiled=True)
        return lines + (["precision='tf32' has no effect there"] if self.task.precision == "tf32" else [])


def unsupported_system(system: System) -> str:
    """Why steps with static buffers cannot hold a system, "" where they can."""
    if system.num_atoms == 0:
        return "the system has no atoms"
    if system.dtype not in (torch.float32, torch.float64):
        return f"the positions are {system.dtype}"
    return ""
