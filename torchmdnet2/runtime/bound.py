"""One structure held on the device for loops that never leave it, on fused kernels.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from ..potential import Potential, require_stress
from ..system import System
from .graphs import GraphedStep, refuse
from .reference import BoundStep
from .step import NO_VOLUME, RESULT_NOT_FINITE

__all__ = ["FusedBoundStep", "explain"]


class FusedBoundStep(BoundStep):
    """On fused kernels.

    Args:
        graphed: a step whose inputs are loaded and that is used by nobody else.
        potential, system: to name what is at fault.
    """

    def __init__(self, graphed: GraphedStep, potential: Potential, system: System):
        self._graphed, self._potential, self._system = graphed, potential, system
        step = graphed.step
        self.pos, self.cell = step.pos, step.cell
        out = step.out
        self.forces, self.energy, self.atom_energies, self.stress = (
            out.forces,
            out.energy,
            out.atom_energies,
            out.stress,
        )

    @property
    def capacity(self) -> int:
        """Room for directed edges."""
        return self._graphed.step.capacity

    def replay(self) -> None:
        self._graphed.run()

    def check(self) -> bool:
        flag, needed = self._graphed.status()
        if not flag:
            return True
        if self._graphed.recover(flag, needed):
            return False
        explain(self._system.replace(pos=self.pos, cell=self.cell), flag)
        raise AssertionError("unreachable")


def explain(system: System, flag: int) -> None:
    """Raise the error that the reference path would raise for these inputs.

    Raises:
        ValueError: always.
    """
    system.validate()
    if flag & NO_VOLUME:
        require_stress(system)
        raise ValueError("the stress needs a cell with a volume")
    refuse(flag)
    if flag & RESULT_NOT_FINITE:
        raise ValueError("an energy is not finite, though all positions are: atoms may lie on top of each other")
    raise ValueError(f"the step could not be computed (flags {flag})")
