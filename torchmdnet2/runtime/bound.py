"""One structure held on the device for loops that never leave it, on static buffers.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..fused.finish import NO_VOLUME, RESULT_NOT_FINITE
from ..neighbors import neighbor_list
from ..potential import Potential, Result, require_stress
from ..refusals import refuse_coincident
from ..result import with_dipole
from ..system import System
from .graphed_step import GraphedStep, raise_input_flags
from .outputs import Outputs
from .reference import BoundStep
from .step import COINCIDENT

__all__ = ["FusedBoundStep", "raise_input_error"]

_NEAR = 0.1
"""Å, the cutoff of the list in which atoms at the same place are looked up."""


class FusedBoundStep(BoundStep):
    """On a step over static buffers.

    Args:
        graphed: a step whose inputs are loaded and that is used by nobody else.
        potential, system: to name what is at fault.
    """

    def __init__(self, graphed: GraphedStep, potential: Potential, system: System):
        self._graphed, self._potential, self._system = graphed, potential, system
        step = graphed.step
        self.pos, self.cell = step.pos, step.cell
        out = step.out
        self.forces, self.energy, self.atom_energies = out.forces, out.energy, out.atom_energies
        self.stress, self.charges = out.stress, out.charges
        self._host: Outputs | None = None

    @property
    def capacity(self) -> int:
        """Room for directed edges."""
        return self._graphed.step.capacity

    def replay(self) -> None:
        self._graphed.run()

    def check(self) -> bool:
        flag, _ = self._graphed.status()
        if not flag:
            return True
        if self._graphed.recover(flag):
            return False
        raise_input_error(self._system.replace(pos=self.pos, cell=self.cell), flag)
        raise AssertionError("unreachable")

    def fetch(self) -> Result | None:
        step = self._graphed.step
        if self._host is None:
            with torch.inference_mode(False):
                packed = torch.zeros_like(step.out.packed, device="cpu", pin_memory=step.device.type == "cuda")
            self._host = step.out.on(packed)
        host = self._host
        host.packed.copy_(step.out.packed, non_blocking=True)
        if step.device.type == "cuda":
            torch.cuda.current_stream(step.device).synchronize()
        if int(host.status[0]) & 0xFFFFFFFF and not self.check():
            return None
        result = Result(host.energy, host.forces, host.stress, host.atom_energies, host.charges)
        properties = {name: value.cpu() for name, value in step.properties(host.charges).items()}
        result.properties = with_dipole(properties, host.charges, self._system.replace(pos=self.pos))
        return result

    def properties(self) -> Mapping[str, Tensor]:
        charges = None if self.charges is None else self.charges.clone()
        return with_dipole(self._graphed.step.properties(charges), charges, self._system.replace(pos=self.pos))


def raise_input_error(system: System, flag: int) -> None:
    """Raise the error that the reference path would raise for these inputs.

    Raises:
        ValueError: always.
    """
    system.validate()
    if flag & COINCIDENT:
        refuse_coincident(neighbor_list(system, _NEAR), system)
    if flag & NO_VOLUME:
        require_stress(system)
        raise ValueError("the stress needs a cell with a volume")
    raise_input_flags(flag)
    if flag & RESULT_NOT_FINITE:
        raise ValueError(
            "an energy or a force is not finite, though all positions are: atoms may lie on top of each other"
        )
    raise ValueError(f"the step could not be computed (flags {flag})")
