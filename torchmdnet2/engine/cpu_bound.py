"""One structure held for loops on the compiled kernels of the CPU.

Shapes: N atoms in B structures.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..kernels.numba_pool import lost_by_fork
from ..potential.potential import require_stress
from ..system import System
from .bound import ReferenceBoundStep
from .cpu_step import CpuModel, Values, stress_of

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
        self._cpu_step = model.take(self._system)
        self._model = model
        self._arrays = self.energy.numpy(), self.atom_energies.numpy(), self.forces.numpy()
        self._charges = None if self.charges is None else self.charges.numpy()
        self._values: Values | None = None

    def _step(self) -> None:
        if lost_by_fork():
            self._potential, self._values = self._model.potential, None
            super()._step()
            return
        if self.stress is not None:
            require_stress(self._system)
        self._values = values = self._cpu_step(self._system, True)
        for mine, value in zip(self._arrays, values, strict=False):
            mine[:] = value
        if self._charges is not None:
            self._charges[:] = values.charges
        if self.stress is not None:
            self.stress.copy_(stress_of(values, self._system))

    def _given(self) -> Mapping[str, Tensor]:
        if self._values is None or self._error is not None:
            return super()._given()
        return self._model.properties(self._values, self._system)
