"""One structure held for loops on the compiled kernels of the CPU.

Shapes: N atoms in B structures.
"""

from __future__ import annotations

from ..fused.numba_pool import lost_by_fork
from ..system import System
from .cpu_model import CpuModel
from .reference import ReferenceBoundStep

__all__ = ["CpuBoundStep"]


class CpuBoundStep(ReferenceBoundStep):
    """On the CPU's compiled kernels, as `CpuModel` to the last bit.

    Args:
        model: the prepared potential.
        system, stress: as for Evaluator.bind.
    """

    compiled = True

    def __init__(self, model: CpuModel, system: System, stress: bool):
        super().__init__(model, system, stress)
        self._cpu_step = model.step(self._system)
        self._model = model
        self._arrays = self.energy.numpy(), self.atom_energies.numpy(), self.forces.numpy()

    def _step(self) -> None:
        if lost_by_fork():
            self._potential = self._model.potential
        if self.stress is not None or lost_by_fork():
            super()._step()
            return
        for mine, value in zip(self._arrays, self._cpu_step(self._system, True), strict=False):
            mine[:] = value
